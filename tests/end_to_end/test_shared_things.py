"""What a dataset holds that is shared between processes, or lies outside of them, is the same thing in a worker."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
import pytest

from agnoload import AgnoloadWarning, DataLoader, DatasetNotPicklable
from agnoload.transport import pickling

METHODS = ("forkserver", pytest.param("spawn", marks=pytest.mark.slow))
"""For what is not carried by the payload alone: trackers of names, locks with names, keys to log in."""


class Holds:
    """Calls a function of itself and the index for each of four samples."""

    def __init__(self, sample: Callable[[Any, int], Any] = lambda self, index: index, **attributes: Any) -> None:
        self.sample = sample
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.sample(self, index)


def mark(self: Any, index: int) -> int:
    self.cells[index] = index + 1
    return index


# ------------------------------------------------------------------------------------------------ shared memory


@pytest.fixture(scope="module", autouse=True)
def heaps() -> list[Any]:
    """Both libraries keep the memory of their shared values once they have some; for the tests it is no leak."""
    return [library.get_context("spawn").RawArray("i", 4) for library in (multiprocessing, multiprocess)]


def of_a_raw_array(folder: Path) -> Any:
    return np.frombuffer(multiprocessing.RawArray("i", 4), np.int32)


def of_a_file_that_was_deleted(folder: Path) -> Any:
    cells = np.memmap(folder / "cells", np.int32, "w+", shape=4)
    os.remove(folder / "cells")
    return cells


def of_a_part_of_a_map(folder: Path) -> Any:
    cells = np.memmap(folder / "cells", np.int32, "w+", offset=4096, shape=(4, 3))
    return np.asarray(cells)[::-1, 1]


KINDS: dict[str, Callable[[Path], Any]] = {
    "RawArray": lambda folder: multiprocessing.RawArray("i", 4),
    "NumPy's view of a RawArray": of_a_raw_array,
    "memmap": lambda folder: np.memmap(folder / "cells", np.int32, "w+", shape=4),
    "a file that was deleted": of_a_file_that_was_deleted,
    "a part of a map": of_a_part_of_a_map,
    "records": lambda folder: np.memmap(folder / "cells", [("x", "i4")], "w+", shape=4).view(np.recarray).x,
}


def test_what_a_worker_writes_into_shared_memory_is_seen_here(tmp_path: Path) -> None:
    found = {}
    for kind, make in KINDS.items():
        (folder := tmp_path / kind).mkdir()
        found[kind] = make(folder)

    def mark_all(self: Any, index: int) -> int:
        for cells in self.cells.values():
            cells[index] = index + 1
        return index

    list(DataLoader(Holds(mark_all, cells=found), 2, num_workers=1))
    assert {kind: list(cells) for kind, cells in found.items()} == {kind: [1, 2, 3, 4] for kind in KINDS}


def test_shared_memory_that_no_other_process_can_open_is_named_once() -> None:
    class Leaves(Holds):
        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in vars(self).items() if name != "lock"}

    cells = np.frombuffer(mmap.mmap(-1, 4), np.uint8)
    dataset = Leaves(lock=threading.Lock(), inner=Holds(cells=cells))
    dataset.sample = lambda self, index: mark(self.inner, index)
    with DataLoader(dataset, 2, num_workers=1) as loader, pytest.warns(AgnoloadWarning) as caught:
        list(loader)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("dataset.inner.cells lies in shared memory that has no file")


@pytest.mark.parametrize("method", METHODS)
def test_a_segment_of_shared_memory_outlives_the_workers_that_attach_to_it(method: str) -> None:
    block = shared_memory.SharedMemory(create=True, size=4)
    try:
        cells = np.frombuffer(block.buf, np.uint8)
        loader = DataLoader(
            Holds(lambda self, index: (mark(self, index), self.block.buf[index]), block=block, cells=cells),
            num_workers=2,
            multiprocessing_context=method,
        )
        for _ in range(2):
            assert [value.tolist() for _, value in loader] == [[1], [2], [3], [4]]
        assert cells.tolist() == [1, 2, 3, 4]
        del cells, loader
    finally:
        block.close()
        block.unlink()


# ------------------------------------------------------------------------------------------------ files


def seen(self: Any, index: int) -> Any:
    data = self.data
    name = str(data.filename) if isinstance(data, np.memmap) else None
    return type(data).__name__, name, getattr(data, "mode", None), data.flags.writeable, np.array(data).tolist()


@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_a_memory_mapped_file_is_the_same_in_a_worker(mode: str, tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.arange(6, dtype=">i2").reshape(2, 3))
    dataset = Holds(seen, data=np.load(tmp_path / "data.npy", mmap_mode=mode)[:, ::2])
    if mode == "c":
        dataset.data[0, 0] = 7  # in this process's own copy, and so in the workers'
    expected = dataset[0]
    for method in ("forkserver", "fork"):
        loader = DataLoader(dataset, None, num_workers=1, multiprocessing_context=method)
        assert next(iter(loader))[3:] == expected[3:]
        if mode != "c":
            assert next(iter(loader)) == expected
        loader.close()


def test_an_open_text_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with open(tmp_path / "lines.txt", "w+", encoding="utf-8") as file:
        loader = DataLoader(Holds(inner=Holds(file=file)), num_workers=1)
        with pytest.raises(DatasetNotPicklable, match=r"^dataset\.inner\.file \(_io\.TextIOWrapper\).*lines\.txt"):
            iter(loader)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the worker's own: nobody closes the file there
def test_an_open_text_file_in_a_batch_is_refused(tmp_path: Path) -> None:
    dataset = Holds(lambda self, index: self.path.open("w", encoding="utf-8"), path=tmp_path / "x")
    loader = DataLoader(dataset, None, num_workers=1)
    with pytest.raises(TypeError, match="an open file cannot be pickled"):
        list(loader)


def test_a_standard_stream_is_the_workers_own() -> None:
    assert pickle.loads(pickling.dumps(sys.__stdout__)) is sys.__stdout__


# ------------------------------------------------------------------------------------------------ multiprocessing


def use(self: Any, index: int) -> int:
    with self.counter.get_lock():
        self.counter.value += 1
    self.pipe.send(index)
    self.event.set()
    self.array[index] = index
    return index


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "method"),
    [
        (multiprocess, "forkserver"),
        (multiprocessing, "forkserver"),
        pytest.param(multiprocessing, "spawn", marks=pytest.mark.slow),
    ],
)
def test_locks_and_shared_values_that_have_names_are_shared_with_workers(library: Any, method: str) -> None:
    context = library.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    held = {"counter": context.Value("i", 0), "pipe": sender, "event": context.Event(), "array": context.Array("d", 4)}
    with receiver, sender, DataLoader(Holds(use, **held), num_workers=2, multiprocessing_context=method) as loader:
        list(loader)
        assert sorted(receiver.recv() for _ in range(4)) == [0, 1, 2, 3]
    assert (held["counter"].value, held["event"].is_set(), held["array"][:]) == (4, True, [0, 1, 2, 3])


@pytest.mark.parametrize("make", [lambda context: context.Value("i", 3), lambda context: context.Event()])
def test_a_lock_that_only_forks_can_have_is_refused_with_remedies_that_work(make: Callable[[Any], Any]) -> None:
    fork = multiprocessing.get_context("fork")
    with pytest.raises(DatasetNotPicklable) as caught:
        iter(DataLoader(Holds(inner=Holds(thing=make(fork))), num_workers=1))
    text = str(caught.value)
    assert text.startswith("dataset.inner.thing (multiprocessing.")
    assert all(
        way in text for way in ("get_context('spawn')", "multiprocessing_context='fork'", "worker_type='thread'")
    )
    for thing, options in (
        (make(multiprocessing.get_context("spawn")), {}),
        (make(fork), {"multiprocessing_context": "fork"}),
        (make(fork), {"worker_type": "thread"}),
    ):
        assert len(list(DataLoader(Holds(thing=thing), 4, num_workers=1, **options))) == 1


@pytest.mark.slow
def test_proxies_of_a_manager_log_in_from_workers() -> None:
    def note(self: Any, index: int) -> int:
        self.outer["inner"][index] = True  # a proxy that comes out of another one
        return index

    with multiprocessing.get_context("spawn").Manager() as manager:
        inner = manager.dict()
        dataset = Holds(note, outer=manager.dict(inner=inner))
        list(DataLoader(dataset, num_workers=2))
        assert dict(inner) == dict.fromkeys(range(4), True)
        del dataset, inner


# ------------------------------------------------------------------------------------------------ kept workers


@pytest.fixture
def kept() -> Iterator[Callable[..., DataLoader[Any]]]:
    loaders: list[DataLoader[Any]] = []

    def make(dataset: Any, **options: Any) -> DataLoader[Any]:
        loaders.append(DataLoader(dataset, None, num_workers=1, persistent_workers=True, **options))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_kept_workers_follow_an_array_that_is_changed_in_place(kept: Any, method: str) -> None:
    dataset = Holds(lambda self, index: int(self.data[index]), data=np.zeros(4, np.int64))
    loader = kept(dataset, multiprocessing_context=method)
    for stage in range(3):
        dataset.data[:] = stage
        assert list(loader) == [stage] * 4


def test_kept_workers_follow_the_working_directory_and_the_environment(
    kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = kept(Holds(lambda self, index: (os.getcwd(), os.environ.get("STAGE"))))
    assert next(iter(loader)) == (os.getcwd(), None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGE", "2")
    assert next(iter(loader)) == (str(tmp_path), "2")


def test_workers_stay_while_what_they_share_changes(kept: Any) -> None:
    dataset = Holds(lambda self, index: (mark(self, index), os.getpid())[1], cells=of_a_raw_array(Path()))
    loader = kept(dataset)
    first = set(loader)
    dataset.cells[:] = 0
    assert set(loader) == first
    assert dataset.cells.tolist() == [1, 2, 3, 4]


def test_a_container_too_large_to_be_compared_is_named_once(kept: Any) -> None:
    dataset = Holds(lambda self, index: self.samples[index], samples=[f"sample {n}" for n in range(99_999)], stage=0)
    loader = kept(dataset)
    list(loader)
    with pytest.warns(AgnoloadWarning, match=r"a copy of dataset\.samples, which is too large") as caught:
        list(loader)
    dataset.samples = ["another", *dataset.samples[1:]]
    assert next(iter(loader)) == "another"
    list(loader)
    assert len(caught) == 1
