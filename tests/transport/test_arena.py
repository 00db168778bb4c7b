"""The arena: a slot is free again exactly when the last view of it has died."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.transport.arena import SLOTS, STRIDE, Arena, Slots
from agnoload.transport.memory import HUGE, Mapping, aligned_empty

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(reserved=1, capacity=3)) as arena:
        yield arena


def lent(arena: Arena, nbytes: int = 4096, fill: int = 7) -> tuple[int, np.ndarray]:
    """A slot's number and a leased array over its first bytes."""
    slot = arena.acquire()
    slot.reset()
    slot.empty((nbytes,), np.uint8)[:] = fill
    return slot.number, np.ndarray((nbytes,), np.uint8, np.asarray(arena.lend(slot, nbytes)))


# ------------------------------------------------------------------------------------------------ leases

VIEWS: list[Callable[[Any], Any]] = [
    lambda array: np.asarray(array)[1:],
    lambda array: np.asarray(array)[:64].reshape(1, -1)[0],
    lambda array: np.asarray(array).view(np.int8).T,
    lambda array: np.from_dlpack(np.asarray(array)),
    lambda array: np.frombuffer(memoryview(array), np.uint8),
    memoryview,
    lambda array: memoryview(array)[1:],
]


@given(chain=st.lists(st.sampled_from(range(len(VIEWS))), max_size=6))
def test_a_slot_returns_when_its_last_view_dies(chain: list[int]) -> None:
    with closing(Arena(reserved=1, capacity=3)) as arena:
        number, kept = lent(arena)
        for view in chain:
            kept = VIEWS[view](kept)
        assert arena.lent == 1
        assert arena.acquire().number != number
        del kept
        assert arena.lent == 0
        assert arena.acquire().number == number


def test_a_slot_returns_when_the_garbage_that_holds_it_is_collected(arena: Arena) -> None:
    kept: list[Any] = [lent(arena)[1]]
    kept.append(kept)
    del kept
    assert arena.lent == 1
    gc.collect()
    assert arena.lent == 0


@given(steps=st.lists(st.tuples(st.sampled_from(["lend", "view", "drop", "return", "trim"]), st.integers(0, 9))))
def test_no_slot_is_handed_out_or_emptied_while_somebody_can_see_it(steps: list[tuple[str, int]]) -> None:
    with closing(Arena(reserved=2, capacity=2)) as arena:
        held: dict[int, list[np.ndarray]] = {}
        for step, which in steps:
            numbers = list(held)
            if step == "lend":
                number, array = lent(arena)
                assert number >= 2
                assert number not in held
                array[:] = number
                held[number] = [array]
                del array
            elif step == "return":  # a request that was never answered by a batch
                slot = arena.acquire()
                assert slot.number not in held
                arena.give_back(slot.number)
            elif step == "trim":
                arena.trim()
            elif numbers and step == "view":
                views = held[numbers[which % len(numbers)]]
                views.append(views[0][::2])
            elif numbers:
                number = numbers[which % len(numbers)]
                held[number].pop()
                if not held[number]:
                    del held[number]
            assert arena.lent == len(held)
            assert all((view == number).all() for number, views in held.items() for view in views)
        held.clear()
        arena.trim()
        assert arena.nbytes() <= 2 * 4096


def test_leases_that_die_in_other_threads_give_their_slots_back(arena: Arena) -> None:
    kept = [lent(arena) for _ in range(64)]
    numbers = {number for number, _ in kept}
    barrier = threading.Barrier(4)

    def drop() -> None:
        barrier.wait()
        while kept:
            kept.pop()

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.lent == 0
    assert {arena.acquire().number for _ in range(64)} == numbers


def test_leased_memory_outlives_its_arena_and_keeps_no_descriptor(arena: Arena) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [lent(arena, fill=number)[1] for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    arena.close()
    arena.close()
    assert [int(array[-1]) for array in kept] == list(range(50))
    other = Arena(reserved=0, capacity=1)
    _, orphan = lent(other, fill=4)
    other.close()
    del other
    gc.collect()
    assert (orphan == 4).all()
    del kept
    assert arena.lent == 0


# ------------------------------------------------------------------------------------------------ taking slots


def test_the_slot_used_last_is_taken_first_because_its_pages_are_there(arena: Arena) -> None:
    first, second = arena.acquire(), arena.acquire()
    arena.give_back(first.number)
    arena.give_back(second.number)
    assert arena.acquire() is second


def test_more_batches_than_slots_are_an_error_that_says_what_to_do() -> None:
    with closing(Arena(reserved=SLOTS - 2, capacity=1)) as arena:
        arena.acquire(), arena.acquire()
        with pytest.raises(MemoryError, match="lower prefetch_factor"):
            arena.acquire()


def test_a_slot_that_a_device_still_reads_is_not_handed_out() -> None:
    passed: list[bool] = []
    fence = lambda: lambda: bool(passed)  # noqa: E731
    with closing(Arena(reserved=0, capacity=1, attach=lambda memory: lambda: None, fence=fence)) as arena:
        number, array = lent(arena)
        del array
        assert arena.lent == 0
        assert arena.acquire().number != number
        passed.append(True)
        assert arena.acquire().number == number


# ------------------------------------------------------------------------------------------------ memory


def test_an_arena_takes_the_memory_that_was_written(arena: Arena) -> None:
    assert arena.nbytes() == 0
    for _ in range(3):
        arena.acquire().empty((MIB,), np.uint8)[:] = 1
    assert 3 * MIB <= arena.nbytes() <= 3 * MIB + 3 * 4096
    arena.acquire().empty((7 * MIB + 1000,), np.uint8)[:] = 1  # with huge pages, too
    assert arena.nbytes() <= 10 * MIB + 4 * 4096


def test_page_locked_memory_is_locked_once_and_unlocked_before_its_pages_go() -> None:
    locked: list[int] = []
    unlocked: list[int] = []

    def attach(memory: np.ndarray) -> Callable[[], None]:
        address = memory.ctypes.data
        locked.append(address)
        return lambda: unlocked.append(address)

    arena = Arena(reserved=0, capacity=1, attach=attach)
    kept = [arena.acquire() for _ in range(2)]
    leases = [arena.lend(slot, 64) for slot in kept]
    leases.append(arena.lend(kept[0], 64))  # the same mapping
    assert len(locked) == 2
    del leases, kept
    arena.trim()
    assert len(unlocked) == 1
    arena.close()
    assert sorted(unlocked) == sorted(locked)


@pytest.mark.parametrize("huge", [True, False])
def test_what_was_written_stays_when_a_slot_gets_huge_pages_or_the_system_has_none(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    if not huge:
        monkeypatch.setattr("agnoload.transport.memory._COLLAPSE", 9999)
    slot = arena.acquire()
    sizes = [MIB // 2, MIB // 2, MIB // 2, 9 * MIB, 70 * MIB]
    for number, size in enumerate(sizes):
        slot.empty((size,), np.uint8)[: 10 * MIB] = number + 1
    assert slot.mapping.address % HUGE == 0
    there = Slots(arena.fd)[slot.number]
    there.reach(slot.used)
    for number, (start, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
        assert (there.bytes[start : start + min(size, 10 * MIB)] == number + 1).all()


def test_memory_that_cannot_be_had_is_an_error_with_its_size(arena: Arena) -> None:
    with pytest.raises(OSError, match="cannot map"):
        Mapping(arena.fd, 0, 1 << 62)
    with pytest.raises(MemoryError, match="larger than"):
        arena.acquire().reach(STRIDE + 1)


# ------------------------------------------------------------------------------------------------ a slot


@given(sizes=st.lists(st.integers(1, 3 * MIB) | st.sampled_from([1, 65536, 65537]), min_size=1, max_size=4))
def test_both_sides_see_the_same_memory_however_a_slot_grows(sizes: list[int]) -> None:
    with closing(Arena(reserved=0, capacity=1)) as arena:
        mine = arena.acquire()
        arrays = [mine.empty((size,), np.uint8) for size in sizes]
        for number, array in enumerate(arrays):
            array[0] = array[-1] = number + 1
        there = Slots(arena.fd)[mine.number]
        there.reach(mine.used)
        for number, array in enumerate(arrays):
            start, strides = mine.place(array)
            assert (start % 64, strides) == (0, None)
            assert array.ctypes.data % 64 == 0
            assert there.bytes[start] == there.bytes[start + array.nbytes - 1] == number + 1
            assert mine.place(array[array.size // 2 :]) == (start + array.size // 2, None)  # a view is known, too
        mine.reset()
        assert mine.place(mine.empty((4,), np.uint8)) == (0, None)


@pytest.mark.parametrize(("shape", "dtype"), [((0, 3), np.float32), ((2,), object), ((0,), "M8[s]")])
def test_empty_arrays_and_arrays_of_objects_lie_elsewhere(arena: Arena, shape: tuple[int, ...], dtype: Any) -> None:
    slot = arena.acquire()
    array = slot.empty(shape, dtype)
    assert (array.shape, array.dtype, slot.used) == (shape, np.dtype(dtype), 0)


@given(nbytes=st.integers(1, 5000))
def test_private_memory_is_aligned_too(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % 64 == 0
