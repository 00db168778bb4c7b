"""What a dataset's module imports is imported once, in a process that forks the workers."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import signal
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agnoload import DataLoader, WorkerDied
from agnoload.inspect import modules_of

HERE = "os.getpid() == int(os.environ['PARENT'])"
"""In the text of a module: whether it is the user's process that imports it."""
DATA = """
class Data:
    def __len__(self): return 4
    def __getitem__(self, index): return index
"""


class Module:
    """A module that notes each of its imports."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        self.name, self.log, self.path = name, folder / f"{name}.log", folder / f"{name}.py"

    def write(self, text: str) -> None:
        note = f"import os\nwith open({str(self.log)!r}, 'a') as log: log.write(f'{{os.getpid()}}\\n')\n"
        self.path.write_text(note + textwrap.dedent(text))

    def load(self, text: str) -> Any:
        self.write(text)
        return importlib.import_module(self.name)

    def imports(self) -> int:
        """How many processes have imported it, beside this one."""
        return len({*self.log.read_text().split()} - {str(os.getpid())}) if self.log.exists() else 0


@pytest.fixture
def module(tmp_path, monkeypatch) -> Callable[[str], Module]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PARENT", str(os.getpid()))
    return lambda name: Module(tmp_path, f"{name}_{tmp_path.name}")


def test_a_module_is_imported_once_for_all_workers_epochs_restarts_and_loaders_that_need_it(module) -> None:
    mine = module("mine")
    data = mine.load(DATA).Data()
    with (
        DataLoader(data, 2, num_workers=2, max_worker_restarts=1) as loader,
        DataLoader(data, 1, num_workers=2) as other,
    ):
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        batches = iter(loader)
        os.kill(batches._pool.pids()[0], signal.SIGKILL)  # type: ignore[attr-defined]
        assert len(list(batches)) == 2
        assert len(list(other)) == 4
    assert mine.imports() == 1


def test_the_imports_begin_when_the_loader_is_made(module) -> None:
    mine, inner, alone = module("mine"), module("inner"), module("alone")
    reader, writer = os.pipe()
    says = f"if not {HERE}:\n    with open('/proc/{os.getpid()}/fd/{writer}', 'w') as f: f.write(__name__[0])\n"
    dataset = mine.load(DATA).Data()
    dataset.transforms = [inner.load(says + "class Crop: pass").Crop()]
    function = alone.load(says + "def collate(samples): return samples").collate
    with DataLoader(dataset, 2, num_workers=2, collate_fn=function), open(reader, "rb", 0) as heard, open(writer, "wb"):
        assert {heard.read(1), heard.read(1)} == {b"i", b"a"}


def test_a_loader_that_is_iterated_later_imports_nothing_more(module) -> None:
    mine = module("mine")
    data = mine.load(DATA).Data()
    with DataLoader(data, 1, num_workers=2) as loader:
        begun = loader._keeper.preload
        assert begun is not None
        for _ in range(2):
            assert len(list(loader)) == 4
        assert loader._keeper.preload is begun
        assert has_one_template(loader)
    assert mine.imports() == 1


def has_one_template(loader: DataLoader) -> bool:
    preload = loader._keeper.preload
    assert preload is not None
    assert preload._server is not None
    return preload._server.forked_from is preload._server.base


def at_once(samples: list[object]) -> object:  # without an assert, for which pytest names modules of its own
    return samples[0]


def test_modules_are_found_through_parts_and_base_classes_and_at_the_top_of_the_users_files(module) -> None:
    mine, other = module("mine"), module("other")
    other.write("class Base: pass")
    kind = mine.load(f"import {other.name}\nclass Data({other.name}.Base): pass").Data
    parts = {"dataset": {"parts": [kind(), np.arange(3)]}, "collate_fn": functools.partial(at_once)}
    found = modules_of(parts, lambda name: name != __name__)
    assert [name for name in found if name in (mine.name, other.name)] == [other.name, mine.name]
    assert not {__name__, "pytest"} & {*found}  # the function travels by value, and does not name pytest


def test_a_class_within_a_function_needs_only_what_its_methods_name() -> None:
    class Look:
        def __getitem__(self, index: int) -> object:
            return textwrap.dedent(str(index))

    assert [name for name in modules_of({"dataset": Look()}, lambda name: True) if name != "builtins"] == ["textwrap"]


@pytest.mark.slow
def test_the_first_template_has_the_backend_of_a_framework_that_the_dataset_imports(module) -> None:
    pytest.importorskip("torch")
    text = """
        import torch
        class Data:
            def __len__(self): return 4
            def __getitem__(self, index): return torch.tensor(index)
    """
    data = module("mine").load(text).Data()
    with DataLoader(data, 2, num_workers=1) as loader:
        for _ in range(2):
            assert len(list(loader)) == 2
        assert has_one_template(loader)


def test_what_workers_had_to_import_the_next_epochs_find_imported(module) -> None:
    mine, late = module("mine"), module("late")
    late.write("")
    text = f"""
        class Data:
            def __len__(self): return 2
            def __getitem__(self, index):
                import {late.name}
                return index
    """
    data = mine.load(text).Data()
    with DataLoader(data, 1, num_workers=1) as loader:
        assert [(len(list(loader)), late.imports()) for _ in range(4)] == [(2, 1), (2, 2), (2, 2), (2, 2)]
    assert mine.imports() == 1


def test_an_edit_of_a_source_file_does_not_reach_a_run_under_way(module) -> None:
    mine, late = module("mine"), module("late")
    late.write("")
    text = f"class Data:\n    def __len__(self): return 1\n    def __getitem__(self, i):\n        import {late.name}\n"
    data = mine.load(text + "        return 1\n").Data()
    with DataLoader(data, 1, num_workers=1) as loader:
        assert list(loader) == [[1]]
        mine.write(text + "        return 100\n")
        assert list(loader) == [[1]]  # though what it has imported late is imported ahead now
        assert list(loader) == [[1]]


@pytest.mark.parametrize("helper", [False, True])
def test_workers_have_the_module_that_the_program_has_loaded_again(helper, module) -> None:
    """As a notebook does that reloads what was edited, while the loader of a cell before lives."""
    mine, inner = module("mine"), module("inner")
    edited = inner if helper else mine
    inner.load("VALUE = 1")
    text = f"from {inner.name} import VALUE\nclass Data:\n    def __len__(self): return 1\n"
    text += "    def __getitem__(self, i): return VALUE, {}\n"
    before = DataLoader(mine.load(text.format(1)).Data(), 1, num_workers=1, collate_fn=list)
    assert list(before) == [[(1, 1)]]
    # Of another length: Python takes a compiled file for that of any text of this size and second.
    edited.write("VALUE = 22" if helper else text.format(22))
    importlib.reload(sys.modules[inner.name])
    with (
        before,
        DataLoader(importlib.reload(sys.modules[mine.name]).Data(), 1, num_workers=1, collate_fn=list) as later,
    ):
        assert list(later) == [[later.dataset[0]]] == [[(22, 1) if helper else (1, 22)]]


def test_a_loader_that_lives_on_has_the_module_of_its_package_that_was_loaded_again(module, tmp_path) -> None:
    package = f"package_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "inner.py").write_text("VALUE = 1")
    text = f"from {package} import inner\nclass Data:\n    def __len__(self): return 1\n"
    (tmp_path / package / "outer.py").write_text(text + "    def __getitem__(self, i): return inner.VALUE\n")
    with DataLoader(importlib.import_module(f"{package}.outer").Data(), 1, num_workers=1) as loader:
        assert list(loader) == [[1]]
        (tmp_path / package / "inner.py").write_text("VALUE = 22")
        importlib.reload(sys.modules[f"{package}.inner"])
        assert list(loader) == [[22]]


TAINTS = {
    "a thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "an open file": "FILE = open(__file__)",
}


@pytest.mark.parametrize("what", ["a thread", "an open file"])
def test_an_import_that_must_not_be_shared_is_each_workers_own_and_stats_names_it(what, module) -> None:
    mine, plain = module("mine"), module("plain")
    plain.write("")
    text = f"import {plain.name}\nif not {HERE}:\n" + textwrap.indent(TAINTS[what], "    ") + DATA
    data = mine.load(text).Data()
    with DataLoader(data, 1, num_workers=2) as loader:
        for _ in range(3):
            assert [int(batch[0]) for batch in loader] == [0, 1, 2, 3]
        assert loader.stats().imported_apart == (mine.name,)
        assert mine.name in str(loader.stats())
        before = plain.imports()
        assert len(list(loader)) == 4
    assert plain.imports() == before
    before = mine.imports()
    with DataLoader(data, 1, num_workers=1) as another:
        assert len(list(another)) == 4
    assert mine.imports() == before + 1  # by the worker: no template tries it again


def test_an_import_that_fails_is_the_users_error_out_of_a_worker(module) -> None:
    data = module("mine").load(f"if not {HERE}: raise LookupError('only at home')\n" + DATA).Data()
    with DataLoader(data, 1, num_workers=2) as loader, pytest.raises(LookupError, match="only at home") as caught:
        list(loader)
    assert any("in worker" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_an_import_that_ends_the_process_is_a_worker_that_died(end, module) -> None:
    data = module("mine").load(f"if not {HERE}: {end}\n" + DATA).Data()
    with (
        DataLoader(data, 1, num_workers=2) as loader,
        pytest.raises(WorkerDied, match="before its first batch") as caught,
    ):
        list(loader)
    assert caught.value.exitcode == (3 if "exit" in end else -9)


def test_an_import_says_what_it_says_once(module, capfd) -> None:
    with pytest.warns(UserWarning, match="careful"):
        data = module("mine").load("import warnings\nprint('hello', flush=True)\nwarnings.warn('careful')\n" + DATA)
    with DataLoader(data.Data(), 1, num_workers=2) as loader:
        assert len(list(loader)) == 4
    assert capfd.readouterr() == ("hello\n", "")


def test_the_exit_status_and_the_memory_of_a_worker_are_known(module) -> None:
    text = """
        class Data:
            def __len__(self): return 4
            def __getitem__(self, index):
                block = bytearray(64 << 20)
                os._exit(7)
    """
    data = module("mine").load(text).Data()
    with DataLoader(data, 1, num_workers=1) as loader, pytest.raises(WorkerDied) as caught:
        list(loader)
    assert caught.value.exitcode == 7
    assert caught.value.rss is not None
    assert caught.value.rss > 64 << 20


def test_workers_find_the_program_as_it_is_though_the_modules_were_imported_before(
    module, monkeypatch, tmp_path
) -> None:
    text = """
        import os, sys
        class Data:
            def __len__(self): return 1
            def __getitem__(self, index): return os.environ["COLOUR"], sys.argv[-1], os.getcwd()
    """
    data = module("mine").load(text).Data()
    with DataLoader(data, None, num_workers=1) as loader:
        for colour in ("red", "green"):
            (tmp_path / colour).mkdir()
            monkeypatch.setenv("COLOUR", colour)
            monkeypatch.setattr(sys, "argv", ["program", colour])
            monkeypatch.chdir(tmp_path / colour)
            assert list(loader) == [(colour, colour, str(tmp_path / colour))]
    monkeypatch.chdir(tmp_path)


KILLED = """
import mine, agnoload, os, psutil, signal
batches = iter(agnoload.DataLoader(mine.Data(), 1, num_workers=2))
next(batches)
print(len(psutil.Process().children(recursive=True)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_processes_end_with_a_parent_that_is_killed(program, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(DATA)
    one = program(KILLED)
    assert one.line() == "4"  # the base, the template, two workers
    one.end()
    one.gone()


NOTHING = """
import agnoload, psutil

def children(): return len(psutil.Process().children())

found = [children()]
for end in (agnoload.DataLoader.close, lambda loader: None):
    loader = agnoload.DataLoader(range(4), 2, num_workers=2)
    found.append(children())
    end(loader)
    del loader
    found.append(children())
threads = agnoload.DataLoader(range(4), 2, num_workers=2, worker_type="thread")
none = agnoload.DataLoader(range(4), 2)
forks = agnoload.DataLoader(range(4), 2, num_workers=2, multiprocessing_context="fork")
print(*found, children())
with agnoload.DataLoader(range(4), 2, num_workers=1) as loader:
    batches = iter(loader)
    print(batches._pool.crew._server.forked_from, len(list(batches)), loader.stats().imported_apart)
"""


def test_the_server_lives_with_loaders_that_need_it_and_no_process_is_between_where_nothing_is_imported(
    program,
) -> None:
    assert program(NOTHING, "-W", "error").end() == (0, "0 1 0 1 0 0\nNone 2 ()\n", "")
