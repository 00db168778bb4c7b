"""The payload: packed once, mapped by every worker, its arrays shared until somebody writes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import mmap
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import agnoload
from agnoload import AgnoloadError, DataLoader, OptionError, PackedList
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


def closure() -> Any:
    step = 7
    return lambda n: n + step


def fails(_: int) -> None:
    raise KeyError("here")


def slotted() -> list[Any]:
    """Objects of classes that no other process can import, in all forms that slots have."""

    class Base:
        __slots__ = ("__hidden", "first")

        def __init__(self, first: int) -> None:
            self.first, self.__hidden = first, -first

        def hidden(self) -> int:
            return self.__hidden

    class Own(Base):
        __slots__ = "name"

    class Documented:
        __slots__ = {"first": "the only one"}

        def __init__(self, first: int) -> None:
            self.first = first

    class Hidden(Base):
        __slots__ = ("__dict__", "__hidden", "__weakref__")

        def __init__(self, first: int) -> None:
            super().__init__(first)
            self.__hidden, self.more = first, [first]

        def hidden(self) -> int:
            return 2 * self.__hidden

    @dataclass(slots=True, frozen=True, weakref_slot=True)
    class Frozen:
        first: int
        rest: list[int] = field(default_factory=list)

    return [kind(3) for kind in (Base, Own, Documented, Hidden, Frozen)]


def describe_slotted(things: list[Any]) -> str:
    return str([
        (type(t).__name__, t.first, hasattr(t, "__dict__"), t.hidden() if hasattr(t, "hidden") else 0,
         type(type(t).first).__name__)
        for t in things
    ])  # fmt: skip


ELSEWHERE = """
import random, sys, traceback
import numpy as np
from agnoload.transport.payload import Payload

calls, generators, slotted, describe_slotted, stream = Payload(int(input())).value([])
for call in calls[:-1]:
    print(call(2))
try:
    calls[-1](2)
except KeyError as error:
    print(traceback.extract_tb(error.__traceback__)[-1].filename)
python, numpy = random.random.__self__, np.random.uniform.__self__
print(generators[0].__self__ is generators[1] is python, generators[2].__self__ is generators[3] is numpy)
print(describe_slotted(slotted))
print(stream is sys.__stdout__)
"""


def test_code_that_no_other_process_can_import_travels_and_what_every_process_has_is_its_own(stray: Any) -> None:
    class Local:
        def __call__(self, value: int) -> str:
            return f"{type(self).__name__} {value}"

    calls = [lambda n: n + 1, closure(), Local(), Doubler(5), stray.Tripler(), functools.partial(Doubler(5).__call__)]
    generators = [random.random, random.getrandbits.__self__, np.random.uniform, np.random.standard_normal.__self__]
    value = [*calls, fails], generators, slotted(), describe_slotted, sys.__stdout__
    with packed(value) as fd:
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE], input=f"{fd}\n", pass_fds=[fd], capture_output=True, text=True,
            check=True, timeout=120,
        )  # fmt: skip
    wanted = ["3", "9", "Local 2", "10", "6", "10", __file__, "True True", describe_slotted(slotted()), "True"]
    assert done.stdout.splitlines() == wanted
    assert cloudpickle.list_registry_pickle_by_value() == set()
    with pytest.raises(KeyError) as caught:
        round_trip(fails)(2)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == 'raise KeyError("here")'


PLAIN = st.recursive(
    st.integers() | st.text(max_size=4) | st.binary(max_size=8) | hnp.arrays(np.uint8, st.integers(0, 9)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(value=PLAIN, environment=st.dictionaries(st.sampled_from(["path", "environ"]), st.lists(st.text())))
@settings(max_examples=50)
def test_values_come_back_equal_and_the_environment_can_be_read_before(value: Any, environment: Any) -> None:
    with packed(value, **environment) as fd:
        received = Payload(fd)
        assert received.environment == environment
        assert pickle.dumps(copy.deepcopy(received.value([]))) == pickle.dumps(copy.deepcopy(value))


# ------------------------------------------------------------------------------------------------ arrays


def test_arrays_also_of_subclasses_lie_beside_the_pickle() -> None:
    class Named(np.ndarray):
        name = "nobody"

    named = np.arange(MIB).view(Named)
    named.name = "somebody"
    records = np.rec.array([(1, 2.0)] * 1000, dtype="i4,f8")
    with packed([np.zeros(MIB, np.uint8), np.ones((3, 1000)), named, records, np.zeros((0, 3)), np.array(5)]) as fd:
        received = Payload(fd)
    assert received._header < 2048
    zeros, ones, first, second, empty, number = received.value([])
    assert (zeros.sum(), ones.sum(), empty.shape, int(number)) == (0, 3000, (0, 3), 5)
    assert (type(first).__name__, first.name, int(first[-1])) == ("Named", "somebody", MIB - 1)
    assert second.f1.sum() == 2000


def test_a_packed_list_leaves_a_header_below_1_kib() -> None:
    with sending() as extra, packed(PackedList(str(n) for n in range(100_000))) as fd:
        received = Payload(fd)
        assert received._header < 1024
        assert received.value([os.dup(e) for e in extra])[99_999] == "99999"


def test_readers_share_the_pages_that_nobody_writes_and_see_no_writes_of_others() -> None:
    source = np.ones(32 * MIB, np.uint8)
    with packed(source) as fd:
        before = os.fstat(fd).st_blocks * 512
        arrays = [Payload(fd).value([]) for _ in range(4)]
        total = [int(array.sum()) for array in arrays]
        assert os.fstat(fd).st_blocks * 512 == before
    assert [own_bytes(array) for array in arrays] == [0] * 4
    assert total == [32 * MIB] * 4
    arrays[0][5] = 2
    assert (arrays[1][5], source[5]) == (1, 1)
    assert own_bytes(arrays[0]) >= mmap.PAGESIZE
    assert not own_bytes(arrays[1])


def own_bytes(array: Any) -> int:
    """What this process alone has, of the mapping that an array lies in."""
    address, here, own = array.ctypes.data, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            here = start <= address < stop
        elif here and line.startswith("Anonymous:"):
            own += int(line.split()[1]) * 1024
    return own


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
    if mode == "c":  # what this process has written to its own copy is packed
        data[1, 3 * MIB] = 1
        assert round_trip(data)[1, 3 * MIB] == 1


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return np.memmap(tmp_path_factory.mktemp("mapped") / "cells", np.int32, "w+", offset=4096, shape=(8, 9))


SLICES = st.slices(8).filter(lambda s: len(range(*s.indices(8))) > 0)


@given(rows=SLICES, column=st.integers(0, 8), transposed=st.booleans(), plain=st.booleans())
@settings(max_examples=50)
def test_any_view_of_a_mapped_file_is_the_same_memory(
    mapped: np.ndarray, rows: slice, column: int, transposed: bool, plain: bool
) -> None:
    mapped[:] = np.arange(72).reshape(8, 9)
    view = (np.asarray(mapped) if plain else mapped)[rows, column:]
    view = view.T if transposed else view
    found = round_trip(view)
    assert type(found) is type(view)
    assert found.tolist() == view.tolist()
    found += 1
    assert found.tolist() == view.tolist()


def test_a_file_that_was_replaced_since_is_the_one_that_is_mapped_here(tmp_path: Path) -> None:
    held = [np.memmap(tmp_path / "cells", np.uint8, "w+", shape=4)]
    with packed(held) as fd:
        (tmp_path / "others").write_bytes(bytes(4))
        os.replace(tmp_path / "others", tmp_path / "cells")
        found = Payload(fd).value([])[0]
        found[:] = 7
        assert held.pop().tolist() == [7] * 4
        del found
        with pytest.raises(AgnoloadError, match="cannot be opened any more"):
            Payload(fd).value([])


# ------------------------------------------------------------------------------------------------ what does not


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, value: Any) -> Any:
        return value


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


def refused(value: Any) -> str:
    """The error for what cannot be packed."""
    with pytest.raises(DatasetNotPicklable) as caught, packed(value):
        pass
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None
    return str(caught.value)


NESTS: list[Callable[[Any, int], tuple[Any, str]]] = [
    lambda value, before: ([*range(before), value], f"[{before}]"),
    lambda value, before: ((*range(before), value), f"[{before}]"),
    lambda value, before: ({**dict.fromkeys(range(before)), "key": value}, "['key']"),
    lambda value, _: (Data(options={"at": value}), ".options['at']"),
    lambda value, _: (Slotted(value), ".inner"),
    lambda value, _: (a_closure_over(value), ".value"),
    lambda value, _: (functools.partial(int, value), ".args[0]"),
    lambda value, _: (functools.partial(int, base=value), ".keywords['base']"),
    lambda value, _: (functools.partial(a_closure_over(value)), ".func.value"),
    lambda value, _: (Data(value).load, ".__self__.transform"),
]


@given(nests=st.lists(st.tuples(st.sampled_from(range(len(NESTS))), st.integers(0, 2)), max_size=5))
@settings(max_examples=50)
def test_what_cannot_be_pickled_is_named_by_its_path(nests: list[tuple[int, int]]) -> None:
    value: Any = threading.Lock()
    path = ""
    for kind, before in nests:
        value, step = NESTS[kind](value, before)
        path = step + path
    text = refused(value)
    assert text.startswith(f"dataset{path} (_thread.lock) cannot be sent to a worker process")
    for word in ("'forkserver'", "worker_init_fn", "__getstate__", "num_workers=0"):
        assert word in text


def test_culprits_of_other_kinds_are_named_too(stray: Any) -> None:
    lock = threading.Lock()

    class Stubborn:
        def __reduce__(self) -> Any:
            raise OptionError("I stay here")

    class Holds:
        lock_of_all = lock

    class Uses:
        def __getitem__(self, index: int) -> Any:
            return lock

    loop: list[Any] = [lock]
    loop.insert(0, loop)
    for value, start in (
        (Data(sys._getframe()), "dataset.transform (builtins.frame)"),
        (Data(stray.uses_a_global), "dataset.transform.LOCK (_thread.lock)"),
        (Data(Holds()), "dataset.transform.lock_of_all (_thread.lock)"),
        (Uses(), "dataset.__getitem__.lock (_thread.lock)"),
        (loop, "dataset[1] (_thread.lock)"),
    ):
        assert refused(value).startswith(start)
    assert "I stay here" in refused(Data(Stubborn()))
    assert "IterableDataset" in refused(number for number in range(3))


def test_the_search_for_the_culprit_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    assert refused(Data([threading.Lock()])).startswith("dataset (")


# ------------------------------------------------------------------------------------------------ through a loader


def test_lambdas_local_classes_and_closures_reach_workers() -> None:
    offset = 10

    class Local(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return (lambda number: number + offset)(super().__getitem__(index))

    with DataLoader(Local(range(4)), 2, num_workers=2, collate_fn=lambda samples: (*samples,)) as loader:
        assert list(loader) == [(10, 11), (12, 13)]


def test_a_lock_in_what_workers_need_is_named_by_its_path() -> None:
    lock = threading.Lock()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dataset": Data(Data([len, int, lock]))}, "dataset.transform.transform[2] (_thread.lock)"),
        ({"collate_fn": Slotted(lock)}, "collate_fn.inner (_thread.lock)"),
        ({"worker_init_fn": Slotted(lock)}, "worker_init_fn.inner (_thread.lock)"),
        ({"on_error": Slotted(lock)}, "on_error.inner (_thread.lock)"),
        ({"collate_fn": lambda samples, lock=lock: samples}, "collate_fn"),
    ]
    for options, path in cases:
        loader = DataLoader(**{"dataset": [1, 2], **options}, num_workers=2)
        with loader, pytest.raises(DatasetNotPicklable) as caught:
            iter(loader)
        assert str(caught.value).startswith(path)
        assert "'forkserver'" in str(caught.value)


def test_our_own_classes_pickle() -> None:
    for value in (
        agnoload.ArrayDataset([1, 2]), agnoload.StackDataset([1], [2]), agnoload.ConcatDataset([[1], [2]]),
        agnoload.Subset([1, 2], [0]), agnoload.PackedList(["a", "b"]), agnoload.RandomSampler(range(3)),
        agnoload.WeightedRandomSampler([1, 2], 2), agnoload.DistributedSampler(range(3), 2, 0),
        agnoload.BatchSampler(agnoload.SequentialSampler(range(3)), 2, False),
        agnoload.BalancedBatchSampler([0, 1, 0], 2), agnoload.IterableDataset(), agnoload.Backend(),
        agnoload.OptionError("x"), agnoload.CollateError("x", "a.b", (1, 2)), agnoload.WorkerDied("x", 1, 2, 3),
    ):  # fmt: skip
        back = pickle.loads(pickle.dumps(value))
        assert type(back) is type(value)
        if isinstance(value, Exception):
            assert (str(back), vars(back)) == (str(value), vars(value))


# ------------------------------------------------------------------------------------------------ the same again?


@given(one=PLAIN, other=PLAIN)
@settings(max_examples=50)
def test_two_payloads_have_one_digest_exactly_if_they_are_equal(one: Any, other: Any) -> None:
    found = digest(Data(one), {})
    assert found == digest(Data(copy.deepcopy(one)), {})
    assert (found == digest(Data(other), {})) == (pickle.dumps(one) == pickle.dumps(other))


def test_a_digest_does_not_follow_the_draws_of_the_processs_own_generators() -> None:
    held = [random.random, np.random.standard_normal.__self__]
    before = digest(held, {})
    random.random()
    np.random.random()
    assert digest(held, {}) == before


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
    first = data.transform  # kept alive, so that no other has its identity
    entries = [*first]
    entries[70_000] = "another entry, which is not looked at"
    for changed in (["other entries", *entries][:100_000], entries, entries[:-1]):
        data.transform = kind(changed)
        assert digest(data, parts) != before
    data.transform = kind([*first][::-1])
    assert digest(data, parts) != before
