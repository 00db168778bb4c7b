"""What the loader asks of a backend with a device, and in which order: a recorder stands for the device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import Backend, DataLoader, OptionError
from agnoload.pools.inline import InlinePool


class Numbered(agnoload.Dataset):
    """Sample i is i, some kilobytes of it."""

    def __init__(self, length: int, width: int = 1024) -> None:
        self.length = length
        self.width = width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full(self.width, index, np.int32), "name": f"sample {index}"}


class Growing(Numbered):
    """The samples grow, up to a megabyte."""

    def __getitem__(self, index: int) -> Any:
        return np.full(self.width << min(index, 8), index + 1, np.int32)


class Placed:
    """A batch on the device: what it was copied from must still have been there when it was due."""

    def __init__(self, number: int, values: Any) -> None:
        self.number = number
        self.values = values


class Recorder(Backend):
    """A device that copies when a batch is due, at the last moment that is allowed, and writes down what is asked."""

    name = "recorder"

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.locked: dict[int, int] = {}
        self.fences: list[threading.Event] = []
        self.behind = False
        """Whether the device is still busy with what it was given."""
        self.started = 0
        self.finished = 0
        self.hosts: list[weakref.ref[Any]] = []
        self.fail_at: dict[str, int] = {}

    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        if device not in (None, "far"):
            raise OptionError(f"device must be 'far' or None, got {device!r}")
        return device

    def convert(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and int(leaf.flat[0]) == self.fail_at.get("convert"):
            raise ValueError("this one cannot be converted")
        return leaf

    def attach(self, slot: Any) -> Callable[[], None]:
        address, nbytes = slot.ctypes.data, slot.nbytes
        assert threading.current_thread() is threading.main_thread()
        assert not any(start < address + nbytes and address < start + size for start, size in self.locked.items())
        self.locked[address] = nbytes
        self.log.append(("attach", address))

        def undo() -> None:
            assert mapped(address, nbytes), "it was unmapped before it was unlocked"
            self.log.append(("detach", address, int(slot[:4].view(np.int32)[0])))
            del self.locked[address]

        return undo

    def fence(self) -> Callable[[], bool]:
        assert threading.current_thread() is threading.main_thread()
        passed = threading.Event()
        if not self.behind:
            passed.set()
        self.fences.append(passed)
        return passed.is_set

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        assert device == "far"
        number = int(batch["x"][0, 0])
        if number == self.fail_at.get("place"):
            raise MemoryError("the device is full")
        self.log.append(("place", number))
        self.started += 1
        self.hosts.append(weakref.ref(batch["x"]))
        host = weakref.ref(batch["x"])

        def finish() -> Placed:
            if number == self.fail_at.get("finish"):
                raise RuntimeError("the copy has failed")
            source = host()
            assert source is not None, "the batch died before its copy was due"
            self.log.append(("finish", number))
            self.finished += 1
            return Placed(number, source.copy())

        return finish


def mapped(address: int, nbytes: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= address and address + nbytes <= end:
                return True
    return False


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers, as if the workers were always ahead of the loop."""
    monkeypatch.setattr(InlinePool, "ready", lambda self: bool(self._requests))


def numbers(loader: Any) -> list[int]:
    return [batch.number for batch in loader]


def test_two_batches_are_on_their_way_across_epochs_while_the_user_has_one(recorder: Recorder, eager: None) -> None:
    ahead = []
    loader = DataLoader(Numbered(12), 4, backend=recorder, device="far")
    for number, batch in enumerate(loader.steps(8)):
        first = 4 * number % 12
        assert (batch.values[:, 0] == np.arange(first, first + 4)).all()
        ahead.append(recorder.started - recorder.finished)
    assert ahead == [2] * 6 + [1, 0]


def test_without_workers_nobody_waits_for_what_is_not_due_yet(recorder: Recorder) -> None:
    for _ in DataLoader(Numbered(40), 4, backend=recorder, device="far"):
        assert recorder.started == recorder.finished


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}])
def test_batches_from_workers_are_placed_in_order_and_two_ahead_at_most(
    recorder: Recorder, options: dict[str, Any]
) -> None:
    with DataLoader(Numbered(80), 4, backend=recorder, device="far", **options) as loader:
        for number, batch in enumerate(loader):
            assert (batch.values[:, 0] == np.arange(4 * number, 4 * number + 4)).all()
            assert recorder.started - recorder.finished <= 2
    for what in ("place", "finish"):
        assert [entry[1] for entry in recorder.log if entry[0] == what] == list(range(0, 80, 4))


KINDS: dict[str, type[Exception]] = {"convert": ValueError, "place": MemoryError, "finish": RuntimeError}


@pytest.mark.parametrize(
    ("step", "workers", "device"), [*((step, 0, "far") for step in KINDS), ("finish", 2, "far"), ("convert", 2, None)]
)
def test_an_error_of_the_backend_comes_in_its_batchs_turn_and_names_it(
    recorder: Recorder, eager: None, step: str, workers: int, device: str | None
) -> None:
    recorder.fail_at = {step: 16}
    with DataLoader(Numbered(40), 4, num_workers=workers, backend=recorder, device=device) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(4)]
        with pytest.raises(KINDS[step]) as caught:
            next(iterator)
        assert "while batch 4 of epoch 0 was handed to the backend" in caught.value.__notes__
        assert ("at the leaf x" in caught.value.__notes__) is (step == "convert")
        numbers = [int((batch["x"] if device is None else batch.values)[0, 0]) for batch in [*first, *iterator]]
        assert numbers == [0, 4, 8, 12, 20, 24, 28, 32, 36]


def test_what_a_sampler_raises_waits_for_the_batches_that_are_on_their_way(recorder: Recorder, eager: None) -> None:
    def sampler() -> Iterator[list[int]]:
        yield from ([i, i + 1] for i in range(0, 10, 2))
        raise KeyError("no more")

    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            return sampler()

    iterator = iter(DataLoader(Numbered(40), batch_sampler=Sampler(), backend=recorder, device="far"))
    assert [next(iterator).number for _ in range(5)] == [0, 2, 4, 6, 8]
    with pytest.raises(KeyError, match="no more"):
        next(iterator)


class Holes(Numbered):
    def __getitem__(self, index: int) -> Any:
        if index % 8 < 5:
            raise OSError(f"no file for {index}")
        return super().__getitem__(index)


def test_a_verdict_on_the_epoch_waits_for_the_batches_that_are_on_their_way(recorder: Recorder, eager: None) -> None:
    loader = DataLoader(Holes(40), 4, backend=recorder, device="far", on_error="skip", max_failed=0.5)
    iterator = iter(loader)
    assert [next(iterator).number for _ in range(5)] == [5, 13, 21, 29, 37]
    with pytest.raises(agnoload.AgnoloadError, match="25 samples of epoch 0 failed"):
        next(iterator)
    assert len(loader.stats().failed) == 25


class Rows(agnoload.IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return ({"x": np.full(8, number, np.int32), "name": str(number)} for number in range(self.length))


@pytest.mark.filterwarnings("ignore:the stream has no state_dict")
@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 8), st.sampled_from([Rows, Numbered]))
def test_neither_a_state_nor_the_account_counts_what_is_on_its_way(
    length: int, size: int, stop: int, kind: Any
) -> None:
    recorder, dataset, expected = Recorder(), kind(length), list(range(0, length, size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InlinePool, "ready", lambda self: bool(self._requests))
        loader = DataLoader(dataset, size, backend=recorder, device="far")
        iterator = iter(loader)
        count = len([batch.number for batch in islice(iterator, stop)])
        ahead = min(2, len(expected) - count) if count else 0
        assert recorder.started - recorder.finished == ahead
        assert [host() is None for host in recorder.hosts] == [True] * count + [False] * ahead
        assert (loader.stats().batches, loader.stats().samples) == (count, min(count * size, length))
        state = loader.state_dict()
        iterator.close()
        assert all(host() is None for host in recorder.hosts)
        again = DataLoader(dataset, size, backend=Recorder(), device="far")
        for restored in (again, loader):
            restored.load_state_dict(state)
            assert numbers(restored) == (expected[count:] or expected)  # after the last batch, the next epoch


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_in_the_middle_leaves_nothing_and_the_next_epoch_is_whole(recorder: Recorder, persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "pin_memory": True}
    with DataLoader(Numbered(80), 4, backend=recorder, device="far", **options) as loader:
        for _ in range(3):
            for batch in loader:
                if batch.number == 8:
                    break
            del batch
            gc.collect()
            assert all(host() is None for host in recorder.hosts)
            assert bool(recorder.locked) is persistent  # kept workers keep their memory, and it stays locked
        assert numbers(loader) == list(range(0, 80, 4))
    assert recorder.locked == {}


def test_each_mapping_is_locked_once_and_unlocked_while_its_pages_are_there(recorder: Recorder) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "pin_memory": True}
    with DataLoader(Growing(40), 1, backend=recorder, **options) as loader:
        kept = [(number, batch) for number, batch in enumerate(loader)]
        for number, batch in kept:
            assert (batch == number + 1).all()
            address = batch.ctypes.data
            assert any(start <= address < start + size for start, size in recorder.locked.items())
        arena = loader._keeper.kept._pools[0].arena  # type: ignore[union-attr]
        assert arena.lent == 40
        assert len(recorder.locked) == 40
        before = arena.nbytes()
        del kept, batch
        assert arena.lent == 0
        for number, again in enumerate(loader):  # in memory that is there, while that of surplus slots is given back
            assert (again == number + 1).all()
        del again
        assert len(recorder.locked) <= 6
        assert arena.nbytes() < before / 4
        locks = [entry for entry in recorder.log if entry[0] == "attach"]
        unlocks = [entry for entry in recorder.log if entry[0] == "detach"]
        assert len(locks) - len(unlocks) == len(recorder.locked)
        assert all(first > 0 for _, _, first in unlocks), "the pages had been given back before they were unlocked"
    assert recorder.locked == {}


def test_a_slot_is_filled_again_only_when_the_device_has_passed_its_fence(recorder: Recorder) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "pin_memory": True}
    with DataLoader(Numbered(400), 4, backend=recorder, **options) as loader:
        recorder.behind = True
        being_read: dict[int, int] = {}
        for number, batch in enumerate(loader):
            address = batch["x"].ctypes.data
            assert address not in being_read, f"batch {number} lies where the device still reads {being_read[address]}"
            being_read[address] = number
            del batch
            if number == 30:
                break
        arena = loader._keeper.kept._pools[0].arena  # type: ignore[union-attr]
        assert arena.lent == 0
        recorder.behind = False
        for fence in recorder.fences:
            fence.set()
        addresses = set()
        for number, batch in enumerate(loader):
            assert (batch["x"][:, 0] == np.arange(4 * number, 4 * number + 4)).all()
            addresses.add(batch["x"].ctypes.data)
        assert len(addresses) < 20  # used again, a hundred times


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "worker_type": "thread"}])
def test_memory_that_is_no_slot_is_neither_locked_nor_fenced(recorder: Recorder, options: dict[str, Any]) -> None:
    with DataLoader(Numbered(40), 4, backend=recorder, pin_memory=True, **options) as loader:
        assert [int(batch["x"][0, 0]) for batch in loader] == list(range(0, 40, 4))
    assert recorder.log == recorder.fences == []


def test_a_backend_that_cannot_lock_ends_the_loop_with_its_error(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(slot: Any) -> Callable[[], None]:
        raise OSError("no memory can be locked")

    monkeypatch.setattr(recorder, "attach", refuse)
    loader = DataLoader(Numbered(40), 4, num_workers=1, backend=recorder, pin_memory=True)
    with loader, pytest.raises(OSError, match="no memory can be locked"):
        next(iter(loader))


def test_what_is_skipped_whole_is_not_placed(recorder: Recorder, eager: None) -> None:
    loader = DataLoader(
        Holes(40), batch_sampler=[[0, 1], [5, 6], [8, 9], [13]], backend=recorder, device="far", on_error="skip"
    )
    assert numbers(loader) == [5, 13]
    assert recorder.started == 2
