"""The payload: packed once, mapped by every worker, its arrays shared until somebody writes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import agnoload
from agnoload import DataLoader, OptionError, PackedList
from agnoload.errors import DatasetNotPicklable
from agnoload.transport import payload as module
from agnoload.transport.memory import sending
from agnoload.transport.payload import Payload, digest, pack

MIB = 1 << 20


@contextmanager
def packed(value: Any, **environment: Any) -> Iterator[int]:
    fd, *_ = pack(value, environment, {"dataset": value}, "forkserver")
    try:
        yield fd
    finally:
        os.close(fd)


def round_trip(value: Any) -> Any:
    with packed(value) as fd:
        return Payload(fd).value([])


def elsewhere(value: Any, code: str) -> str:
    """What another process prints that was given the payload as `value`."""
    script = f"from agnoload.transport.payload import Payload; value = Payload(int(input())).value([]); {code}"
    with packed(value) as fd:
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=f"{fd}\n",
            pass_fds=[fd],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    return done.stdout.strip()


def test_a_bound_method_of_the_processs_own_generator_is_one_of_the_other_process() -> None:
    held = [random.random, random.getrandbits.__self__, np.random.uniform, np.random.standard_normal.__self__]
    random.seed(1)
    before = digest(held, {})
    random.random()
    assert digest(held, {}) == before
    code = (
        "import random, numpy as np; python, numpy = random.random.__self__, np.random.uniform.__self__; "
        "print(value[0].__self__ is value[1] is python, value[2].__self__ is value[3] is numpy)"
    )
    assert elsewhere(held, code) == "True True"


class Doubler:
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return value * self.factor


STRAY = """
import threading

LOCK = threading.Lock()

class Tripler:
    def __call__(self, value):
        return 3 * value

def uses_a_global():
    return LOCK
"""


@pytest.fixture
def stray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that no other process can import, as a test's is, or a helper's beside a notebook."""
    path = tmp_path / "stray.py"
    path.write_text(STRAY)
    spec = importlib.util.spec_from_file_location("a_stray_module", path)
    stray = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, stray)
    spec.loader.exec_module(stray)
    return stray


# ------------------------------------------------------------------------------------------------ what travels


def test_values_come_back_equal() -> None:
    value = {"a": [1, "two", 3.0], "b": np.arange(5), "c": (None, b"x", Path("/tmp"))}
    found = round_trip(value)
    assert found["b"].tolist() == value["b"].tolist()
    assert (found["a"], found["c"]) == (value["a"], value["c"])


def test_the_environment_can_be_read_before_the_value() -> None:
    with packed(np.arange(3), path=["/a"], environ={"B": "c"}) as fd:
        assert Payload(fd).environment == {"path": ["/a"], "environ": {"B": "c"}}


def local_class() -> Any:
    class Local:
        def __call__(self, value: int) -> str:
            return f"{type(self).__name__} {value}"

    return Local()


def closure() -> Any:
    step = 7
    return lambda n: n + step


TRAVELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a lambda": (lambda stray: lambda n: n + 1, "3"),
    "a closure": (lambda stray: closure(), "9"),
    "a local class": (lambda stray: local_class(), "Local 2"),
    "a class of this module": (lambda stray: Doubler(5), "10"),
    "a class of a module that no other process finds": (lambda stray: stray.Tripler(), "6"),
    "a partial of a method": (lambda stray: functools.partial(Doubler(5).__call__), "10"),
}


@pytest.mark.parametrize("kind", TRAVELS)
def test_code_without_an_importable_name_travels(kind: str, stray: Any) -> None:
    make, printed = TRAVELS[kind]
    assert elsewhere(make(stray), "print(value(2))") == printed


def test_packing_leaves_the_registry_of_cloudpickle_as_it_was(stray: Any) -> None:
    round_trip(stray.Tripler())
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_code_that_travels_by_value_keeps_its_file_name() -> None:
    def fails() -> None:
        raise KeyError("here")

    code = (
        "import traceback\ntry: value()\nexcept KeyError as error: print(traceback.extract_tb(error.__traceback__)[-1])"
    )
    assert __file__ in elsewhere(fails, f"exec({code!r})")
    with pytest.raises(KeyError) as caught:
        round_trip(fails)()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == 'raise KeyError("here")'


# ------------------------------------------------------------------------------------------------ arrays


def test_arrays_lie_beside_the_pickle() -> None:
    with packed({"x": np.zeros(MIB, np.uint8), "y": np.ones((3, 1000))}) as fd:
        received = Payload(fd)
    assert len(received._sizes) == 2
    assert received._header < 1024


def test_c26_a_packed_list_leaves_a_header_below_1_kib() -> None:
    with sending() as extra, packed(PackedList(str(n) for n in range(100_000))) as fd:
        received = Payload(fd)
        assert received._header < 1024
        assert received.value([os.dup(e) for e in extra])[99_999] == "99999"


def test_a_write_of_one_reader_is_not_seen_by_another() -> None:
    source = np.zeros(4 * MIB, np.uint8)
    with packed(source) as fd:
        first, second = Payload(fd).value([]), Payload(fd).value([])
    first[5] = 1
    assert (second[5], source[5]) == (0, 0)
    assert first.flags.writeable


def test_readers_share_the_pages_that_nobody_writes(tmp_path: Path) -> None:
    with packed(np.ones(32 * MIB, np.uint8)) as fd:
        before = os.fstat(fd).st_blocks * 512
        arrays = [Payload(fd).value([]) for _ in range(4)]
        total = [int(array.sum()) for array in arrays]
        assert os.fstat(fd).st_blocks * 512 == before
        assert private_bytes() - (start := private_bytes()) < MIB, start
    assert total == [32 * MIB] * 4


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_file_is_not_read(mode: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.zeros((2, 4 * MIB), np.uint8))
    data = np.load(tmp_path / "data.npy", mmap_mode=mode)
    value = [data, data[:, ::2], np.asarray(data)[1], data.view(np.recarray)]
    with packed(value) as fd:
        assert os.fstat(fd).st_size < MIB
        found = Payload(fd).value([])
    assert [(type(a), a.shape, a.flags.writeable) for a in found] == [
        (type(a), a.shape, a.flags.writeable) for a in value
    ]


def test_what_was_written_to_a_private_map_is_packed(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.zeros(4 * MIB, np.uint8))
    data = np.load(tmp_path / "data.npy", mmap_mode="c")
    data[3 * MIB] = 1
    assert round_trip(data)[3 * MIB] == 1


def test_the_memory_of_a_subclass_lies_beside_the_pickle_too() -> None:
    class Named(np.ndarray):
        name = "nobody"

    named = np.arange(MIB).view(Named)
    named.name = "somebody"
    with packed([named, np.rec.array([(1, 2.0)] * 1000, dtype="i4,f8")]) as fd:
        received = Payload(fd)
    assert len(received._sizes) == 2
    first, second = received.value([])
    assert (type(first).__name__, first.name, int(first[-1])) == ("Named", "somebody", MIB - 1)
    assert second.f1.sum() == 2000


def test_arrays_outlive_the_descriptor_and_may_be_empty_or_without_axes() -> None:
    found = round_trip([np.arange(1000), np.zeros((0, 3)), np.array(5)])
    assert (found[0].sum(), found[1].shape, int(found[2])) == (499_500, (0, 3), 5)


# ------------------------------------------------------------------------------------------------ what does not


LOCK = threading.Lock()


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, value: Any) -> Any:
        return value


@dataclass
class Compose:
    fns: list[Any]


@dataclass
class Data:
    transform: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        return self.transform

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def a_closure_over(value: Any) -> Any:
    return lambda: value


CULPRITS: dict[str, Any] = {
    "dataset.transform.fns[2]": lambda: Data(Compose([int, float, threading.Lock()])),
    "dataset.options['lock']": lambda: Data(options={"lock": threading.Lock()}),
    "dataset[1][0]": lambda: [0, (threading.Lock(),)],
    "dataset.transform.inner": lambda: Data(Slotted(threading.Lock())),
    "dataset.transform.value": lambda: Data(a_closure_over(threading.Lock())),
    "dataset.transform.func.value": lambda: Data(functools.partial(a_closure_over(threading.Lock()))),
    "dataset.transform.args[0]": lambda: Data(functools.partial(int, threading.Lock())),
    "dataset.transform.keywords['base']": lambda: Data(functools.partial(int, base=threading.Lock())),
    "dataset.transform.__self__.transform": lambda: Data(Data(threading.Lock()).load),
    "dataset.transform": lambda: Data(sys._getframe()),
    "dataset": lambda: (number for number in range(3)),
}


@pytest.mark.parametrize("path", CULPRITS)
def test_what_cannot_be_pickled_is_named_by_its_path(path: str) -> None:
    value = CULPRITS[path]()
    with pytest.raises(DatasetNotPicklable) as caught, packed(value):
        pass
    assert str(caught.value).startswith(f"{path} (")
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None
    assert ("IterableDataset" in str(caught.value)) == (path == "dataset")


def test_a_global_that_a_function_by_value_uses_is_named(stray: Any) -> None:
    with pytest.raises(DatasetNotPicklable, match=r"^dataset\.transform\.LOCK "), packed(Data(stray.uses_a_global)):
        pass


def test_a_class_that_travels_by_value_is_searched_too() -> None:
    lock = threading.Lock()

    class Holds:
        lock_of_all = lock

    class Uses:
        def __getitem__(self, index: int) -> Any:
            return lock

    with pytest.raises(DatasetNotPicklable, match=r"^dataset\.transform\.lock_of_all "), packed(Data(Holds())):
        pass
    with pytest.raises(DatasetNotPicklable, match=r"^dataset\.__getitem__\.lock "), packed(Uses()):
        pass


def test_the_error_names_the_type_the_start_method_and_the_remedy() -> None:
    with pytest.raises(DatasetNotPicklable) as caught, packed(Data(threading.Lock())):
        pass
    for word in ("_thread.lock", "'forkserver'", "worker_init_fn", "__getstate__", "num_workers=0"):
        assert word in str(caught.value)


def test_the_culprit_may_be_another_part_than_the_dataset() -> None:
    value = {"dataset": [1], "collate_fn": a_closure_over(threading.Lock())}
    with pytest.raises(DatasetNotPicklable, match=r"^collate_fn\.value \("):
        pack(value, {}, value, "spawn")


def test_an_object_that_hides_what_is_in_it_is_named_itself() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise OptionError("I stay here")

    with pytest.raises(DatasetNotPicklable, match=r"^dataset\.transform .*I stay here"), packed(Data(Stubborn())):
        pass


def test_a_structure_that_contains_itself_ends_the_search() -> None:
    loop: list[Any] = [threading.Lock()]
    loop.insert(0, loop)
    with pytest.raises(DatasetNotPicklable, match=r"^dataset\[1\] "), packed(loop):
        pass


def test_the_search_for_the_culprit_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(DatasetNotPicklable, match=r"^dataset "), packed(Data(Compose([threading.Lock()]))):
        pass
    assert time is module.time


# ------------------------------------------------------------------------------------------------ through a loader


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_c33_lambdas_local_classes_and_closures_reach_workers(method: str) -> None:
    offset = 10

    class Local(list[int]):
        lock = threading.Lock() if method == "fork" else None  # fork pickles nothing

        def __getitem__(self, index: Any) -> Any:
            return (lambda number: number + offset)(super().__getitem__(index))

    loader = DataLoader(
        Local(range(4)), 2, num_workers=2, collate_fn=lambda samples: (*samples,), multiprocessing_context=method
    )
    with loader:
        assert list(loader) == [(10, 11), (12, 13)]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"dataset": Data(Compose([len, int, threading.Lock()]))}, "dataset.transform.fns[2] (_thread.lock)"),
        ({"collate_fn": Slotted(threading.Lock())}, "collate_fn.inner (_thread.lock)"),
        ({"worker_init_fn": Slotted(threading.Lock())}, "worker_init_fn.inner (_thread.lock)"),
        ({"on_error": Slotted(threading.Lock())}, "on_error.inner (_thread.lock)"),
        ({"collate_fn": lambda samples, lock=LOCK: samples}, "collate_fn"),
    ],
)
def test_c33_a_lock_in_what_workers_need_is_named_by_its_path(options: dict[str, Any], path: str) -> None:
    loader = DataLoader(**{"dataset": [1, 2], **options}, num_workers=2)
    with loader, pytest.raises(DatasetNotPicklable) as caught:
        iter(loader)
    assert str(caught.value).startswith(path)
    assert "'forkserver'" in str(caught.value)


OURS = [
    agnoload.ArrayDataset([1, 2]),
    agnoload.StackDataset([1], [2]),
    agnoload.ConcatDataset([[1], [2]]),
    agnoload.Subset([1, 2], [0]),
    agnoload.PackedList(["a", "b"]),
    agnoload.RandomSampler(range(3)),
    agnoload.WeightedRandomSampler([1, 2], 2),
    agnoload.BatchSampler(agnoload.SequentialSampler(range(3)), 2, False),
    agnoload.DistributedSampler(range(3), 2, 0),
    agnoload.BalancedBatchSampler([0, 1, 0], 2),
    agnoload.IterableDataset(),
    agnoload.Backend(),
    agnoload.OptionError("x"),
    agnoload.CollateError("x", "a.b", (1, 2)),
    agnoload.WorkerDied("x", 1, 2, 3),
]


@pytest.mark.parametrize("value", OURS, ids=lambda value: type(value).__name__)
def test_c33_our_own_classes_pickle(value: Any) -> None:
    back = pickle.loads(pickle.dumps(value))
    assert type(back) is type(value)
    if isinstance(value, Exception):
        assert (str(back), vars(back)) == (str(value), vars(value))


# ------------------------------------------------------------------------------------------------ the same again?


PLAIN = st.recursive(
    st.integers() | st.text() | st.binary(max_size=8) | hnp.arrays(np.uint8, hnp.array_shapes(max_dims=2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(one=PLAIN, other=PLAIN)
def test_two_payloads_have_one_digest_exactly_if_they_are_equal(one: Any, other: Any) -> None:
    found = digest(Data(one), {})
    assert found == digest(Data(copy.deepcopy(one)), {})
    assert (found == digest(Data(other), {})) == (pickle.dumps(one) == pickle.dumps(other))


def test_an_array_that_is_too_large_to_be_hashed_is_known_by_its_address_and_some_of_its_bytes() -> None:
    array = np.zeros(module.BUFFERS // 8 + 1)
    before = digest(array, {})
    assert digest(array, {}) == before
    assert digest(array.copy(), {}) != before
    array[::64] += 1
    assert digest(array, {}) != before


@pytest.mark.parametrize("kind", [list, tuple, dict.fromkeys, frozenset])
def test_a_long_container_is_known_by_its_identity_its_length_and_some_of_its_entries(kind: Any) -> None:
    data = Data(kind([f"sample {number}" for number in range(100_000)]))
    parts = {"dataset": data}
    before = digest(data, parts)
    assert before.unseen == "dataset.transform"
    assert digest(data, parts) == before
    data.options["stage"] = 1
    assert digest(data, parts) != before
    data.options.clear()
    data.transform = kind(["other entries", *data.transform][:100_000])
    assert digest(data, parts) != before
    data.transform = kind([*data.transform][::-1])
    assert digest(data, parts) != before
