"""What a script defines, and what its process has set, is in workers what it is without them; or an error names it."""

from __future__ import annotations

import decimal
import gc
import importlib
import locale
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

from agnoload import AgnoloadWarning, DataLoader, DatasetNotPicklable, IterableDataset, OptionError


def plain(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, np.ndarray) else batch for batch in batches]


def with_and_without_workers(dataset: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    with DataLoader(dataset, 2, num_workers=2, **options) as loader:
        return plain(loader), plain(DataLoader(dataset, 2))


class Four:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index


def script(text: str) -> dict[str, Any]:
    """What a script defines, which no worker can import."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)
    return names


# ------------------------------------------------------------------------------------------------ functions


FUNCTIONS = """
import functools, threading

@functools.lru_cache(maxsize=7)
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
fibonacci.note = "mine"

@functools.singledispatch
def size(value): return 1

@size.register
def _(value: list): return sum(size(item) for item in value)

class Functions:
    lock = threading.local()

    def __len__(self): return 4

    @functools.cached_property
    def rows(self): return [10, 20, 30, 40]

    @functools.cache
    def squared(self, index): return index**2

    @functools.singledispatchmethod
    def text(self, value): return "something"

    @text.register
    def _(self, value: int): return f"int {value}"

    def __getitem__(self, index):
        assert fibonacci.note == "mine" and fibonacci.cache_parameters() == {"maxsize": 7, "typed": False}
        return [fibonacci(index + 5), self.rows[index], self.squared(index), self.text(index), size([[1], [2, 3]])]
"""


def test_cached_and_generic_functions_of_a_script_travel() -> None:
    dataset = script(FUNCTIONS)["Functions"]()
    with DataLoader(dataset, 2, num_workers=2, collate_fn=list) as loader:
        assert [*loader] == [*DataLoader(script(FUNCTIONS)["Functions"](), 2, collate_fn=list)]


KEYS = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Key:
    number: int

class Keyed:
    def __len__(self): return 4
    def __getitem__(self, key): return key.number if isinstance(key, Key) else "another class"
"""


@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.filterwarnings("ignore:multiprocessing_context='fork'")
def test_keys_of_a_class_of_the_script_reach_workers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = script(KEYS)
    monkeypatch.setattr(sys.modules["__main__"], "Key", names["Key"], raising=False)
    batches = [[names["Key"](0), names["Key"](1)], [names["Key"](2)]]
    options: Any = {"batch_sampler": batches, "num_workers": 1, "multiprocessing_context": method}
    with DataLoader(names["Keyed"](), **options) as loader:
        assert plain(loader) == [[0, 1], [2]]


# ------------------------------------------------------------------------------------------------ classes


HOOKS = """
import abc

class Four:
    def __len__(self): return 4

kinds = {}

class Base:
    def __init_subclass__(cls, *, kind="none"):
        assert cls.__name__ not in kinds
        kinds[cls.__name__] = cls
        cls.kind, cls.doubled = kind, 2 * cls.number

class Numbers(Base, Four, kind="numbers"):
    number = 4
    def __getitem__(self, index): return index * self.doubled, self.kind, kinds["Numbers"] is type(self)

def metaclass(base):
    made = []

    class Meta(base):
        def __new__(mcs, name, bases, namespace, *, suffix):
            assert name + suffix not in made
            made.append(name + suffix)
            return super().__new__(mcs, name, bases, namespace)
        def __init__(cls, name, bases, namespace, *, suffix):
            super().__init__(name, bases, namespace)

    class Made(Four, metaclass=Meta, suffix="!"):
        def __getitem__(self, index): return index, made, isinstance(self, Made), type(type(self)).__name__

    return Made

DATASETS = [Numbers(), metaclass(type)(), metaclass(abc.ABCMeta)()]
"""


def test_hooks_of_a_script_do_not_run_again_in_workers() -> None:
    for dataset in script(HOOKS)["DATASETS"]:
        with DataLoader(dataset, 2, num_workers=2, collate_fn=list) as loader:
            assert list(loader) == list(DataLoader(dataset, 2, collate_fn=list))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Makes a module that workers can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def make(text: str) -> ModuleType:
        names.append(f"by_value_module_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return importlib.import_module(names[-1])

    yield make
    for name in names:
        del sys.modules[name]


def test_a_hook_of_an_imported_module_runs_in_workers_and_says_what_it_misses(module: Any) -> None:
    base = module(
        "KINDS = {}\n"
        "class Base:\n"
        "    def __init_subclass__(cls): KINDS[cls.__name__] = cls\n"
        "class Strict:\n"
        "    def __init_subclass__(cls, *, kind): pass\n"
    )

    class Numbers(base.Base, Four):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return base.KINDS["Numbers"] is type(self)

    class Strictly(base.Strict, Four, kind="x"):  # type: ignore[misc,call-arg]
        pass

    with DataLoader(Numbers(), 4, num_workers=1) as loader:
        assert plain(loader) == [[True] * 4]
    with DataLoader(Strictly(), 4, num_workers=1) as loader, pytest.raises(TypeError, match="kind") as caught:
        next(iter(loader))
    assert "Define Strictly in a module" in "".join(caught.value.__notes__)


def test_a_class_of_a_module_that_nobody_has_imported_travels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.rec", raising=False)

    class Records(Four):
        def __init__(self) -> None:
            self.records = np.zeros((4, 3)).view(np.recarray)

        def __getitem__(self, index: int) -> float:
            return float(self.records[index][0])

    workers, inline = with_and_without_workers(Records())
    assert workers == inline


RANKS = """
import multiprocessing
import agnoload

class Squares:
    def __len__(self): return 4
    def __getitem__(self, i): return {"square": i * i, "kind": type(self).__name__}

def train(rank):
    sampler = agnoload.DistributedSampler(Squares(), 2, rank, shuffle=False)
    loader = agnoload.DataLoader(Squares(), 2, sampler=sampler, num_workers=1)
    print(rank, *[(batch["square"].tolist(), batch["kind"]) for batch in loader], flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train, args=(1,))
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_a_rank_that_a_script_spawns_has_workers_also_where_comparing_bytes_with_text_is_an_error(program: Any) -> None:
    assert program(RANKS, "-bb").end() == (0, "1 ([1, 9], ['Squares', 'Squares'])\n", "")


# ------------------------------------------------------------------------------------------------ errors


class Wrapper(Four):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_dataset_that_cannot_be_rebuilt_is_named_with_the_remedy() -> None:
    with DataLoader(Wrapper([1]), 2, num_workers=1) as loader, pytest.raises(RecursionError) as caught:
        next(iter(loader))
    notes = "".join(caught.value.__notes__)
    assert "rebuilt the dataset" in notes
    assert f"{__name__}.Wrapper" in notes
    assert "raise AttributeError(name)" in notes


class Table(Four):
    def __init__(self) -> None:
        self.open = threading.local()

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self.open, "connection"):
            self.open.connection = sqlite3.connect(":memory:")
        return self.open.connection.execute("select ?", (index,)).fetchone()[0]


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # no other thread may close a worker's
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_what_the_error_for_a_handle_advises_suits_processes_and_threads(kind: Any) -> None:
    table: Any = Table()
    table.open = 0, sqlite3.connect(":memory:")
    with DataLoader(table, num_workers=1) as loader, pytest.raises(DatasetNotPicklable) as caught:
        iter(loader)
    table.open[1].close()
    assert "dataset.open[1] (sqlite3.Connection)" in str(caught.value)
    assert "threading.local()" in str(caught.value)
    assert "worker_type='thread'" not in str(caught.value)
    table = Table()
    workers, inline = with_and_without_workers(table, worker_type=kind)
    assert workers == inline
    table.open.connection.close()
    gc.collect()
    workers, inline = with_and_without_workers(Stream(), worker_type=kind)
    assert workers == inline


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.own = threading.local()

    def __iter__(self) -> Iterator[int]:
        self.own.read = [1, 2]
        yield from self.own.read


FIRED: list[int] = []


class Alarmed(Four):
    def __reduce__(self) -> Any:
        if not FIRED:
            FIRED.append(1)
            signal.raise_signal(signal.SIGALRM)
        return Alarmed, ()


def test_an_exception_of_a_signal_handler_comes_out_of_packing_as_itself() -> None:
    class Late(Exception):
        pass

    def late(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    try:
        with DataLoader(Alarmed(), num_workers=1) as loader, pytest.raises(Late):
            iter(loader)
    finally:
        signal.signal(signal.SIGALRM, before)


FORKED = """
import agnoload, os, sys, threading
packing, forked = threading.Event(), threading.Event()

class Slow:
    def __len__(self): return 4
    def __getitem__(self, i): return i
    def __reduce__(self):
        packing.set()
        forked.wait()
        return range, (4,)

thread = threading.Thread(target=lambda: list(agnoload.DataLoader(Slow(), 2, num_workers=1)))
thread.start()
packing.wait()
child = os.fork()
if child == 0:
    print([batch.tolist() for batch in agnoload.DataLoader(range(4), 2, num_workers=1)], flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
forked.set()
thread.join()
"""


@pytest.mark.slow
def test_a_fork_while_another_thread_packs_a_dataset_has_workers_of_its_own(program: Any) -> None:
    assert program(FORKED, "-Wignore::DeprecationWarning").end() == (0, "[[0, 1], [2, 3]]\n0\n", "")


# ------------------------------------------------------------------------------------------------ settings

CONF = """
SIZE, NAME, NEVER_NAMED = 64, "a", 1
class Options: rate = 0.5
class Data:
    factor = 1
    def __len__(self): return 4
    def __getitem__(self, index): return (SIZE, NAME, Options.rate * self.factor)
"""


def changed(conf: ModuleType) -> None:
    conf.SIZE, conf.NEVER_NAMED, conf.Options.rate, conf.Data.factor = 128, 2, 0.25, 3  # type: ignore[attr-defined]


def test_values_that_were_set_in_a_module_later_are_named_once(module: Any) -> None:
    conf = module(CONF)
    changed(conf)
    with DataLoader(conf.Data(), 1, num_workers=2, collate_fn=list) as loader:
        with pytest.warns(AgnoloadWarning) as caught:
            assert [*loader] == [[(64, "a", 0.5)]] * 4
        assert [*loader] == [[(64, "a", 0.5)]] * 4
        (text,) = [str(warning.message) for warning in caught]
        for said in ("SIZE is 128 here and 64 in", "Options.rate is 0.25 here and 0.5", "Data.factor is 3 here and 1"):
            assert f"{conf.__name__}.{said}" in text
        assert "NAME" not in text
        assert caught[0].filename == __file__


def test_each_way_out_gives_what_the_program_gives_without_workers(module: Any) -> None:
    conf = module(CONF)
    changed(conf)
    for options in (
        {"worker_init_fn": lambda _: changed(conf)},
        {"multiprocessing_context": "fork"},
        {"worker_type": "thread"},
    ):
        with warnings.catch_warnings(), DataLoader(conf.Data(), 4, num_workers=1, collate_fn=list, **options) as loader:
            warnings.filterwarnings("ignore", "multiprocessing_context='fork'")
            assert [*loader] == [[(128, "a", 0.75)] * 4]


class Settings(Four):
    def __getitem__(self, index: int) -> Any:
        context = decimal.getcontext()
        return np.geterr(), context.prec, context.rounding, locale.setlocale(locale.LC_ALL)


@pytest.fixture
def other_settings() -> Iterator[None]:
    before = locale.setlocale(locale.LC_ALL)
    with np.errstate(all="raise", under="ignore"), decimal.localcontext() as context:
        context.prec, context.rounding = 7, decimal.ROUND_UP
        locale.setlocale(locale.LC_ALL, "C")
        yield
    locale.setlocale(locale.LC_ALL, before)


@pytest.mark.usefixtures("other_settings")
def test_settings_of_numpy_decimal_and_locale_hold_in_workers() -> None:
    with DataLoader(Settings(), 1, num_workers=1, collate_fn=list) as loader:
        assert [*loader] == [[Settings()[0]]] * 4


class Zeros(Four):
    def __init__(self, shared: Any) -> None:
        self.shared = shared

    def __getitem__(self, index: int) -> Any:
        import torch

        self.shared[index] = index + 1
        return str(torch.zeros(1).dtype), torch.get_deterministic_debug_mode()


@pytest.mark.slow
def test_torchs_settings_and_shared_tensors_are_the_same_in_workers() -> None:
    torch = pytest.importorskip("torch")
    cells = torch.zeros(8, dtype=torch.bfloat16).share_memory_()[4:]
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with DataLoader(Zeros(cells), 1, num_workers=1, collate_fn=list) as loader:
            assert [*loader] == [[("torch.float64", 2)]] * 4
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert cells.tolist() == [1, 2, 3, 4]


@pytest.mark.slow
def test_workers_import_torch_for_settings_that_change_results_only() -> None:
    torch = pytest.importorskip("torch")
    from agnoload_torch import TorchBackend

    assert TorchBackend().settings() is None
    torch.set_float32_matmul_precision("high")
    try:
        apply = TorchBackend().settings()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert apply is not None
    code = f"import pickle, sys; pickle.loads({pickle.dumps(apply)!r})(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# ------------------------------------------------------------------------------------------------ the loader

Sample = TypeVar("Sample")


def test_a_loader_is_generic_in_the_type_of_a_sample() -> None:
    class Own(DataLoader[int]):
        pass

    class Open(DataLoader[Sample], Generic[Sample]):
        pass

    for kind in (Own, Open, Open[int], DataLoader[int], DataLoader[int, Any]):
        loader = kind(range(2), 2)  # type: ignore[operator]
        assert isinstance(loader, DataLoader)
        assert plain(loader) == [[0, 1]]


def test_the_repr_of_a_loader_never_raises() -> None:
    refused = DataLoader.__new__(DataLoader)
    with pytest.raises(OptionError):
        refused.__init__(range(4), backend="no such backend")  # type: ignore[misc]

    class Unspeakable(Four):
        def __repr__(self) -> str:
            raise RuntimeError

    for loader in (refused, DataLoader(Unspeakable())):
        assert repr(loader).startswith("<agnoload.loader.DataLoader object")
