"""The arena: a slot is free again exactly when the last view of it has died."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.transport.arena import SLOTS, STRIDE, Arena, Slot, Slots
from agnoload.transport.memory import HUGE, Mapping, aligned_empty

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(reserved=1, capacity=3)
    yield arena
    arena.close()


def lent(arena: Arena, nbytes: int = 4096, fill: int = 7) -> tuple[int, np.ndarray]:
    """A slot's number and a leased array over its first bytes."""
    slot = arena.acquire()
    array = slot.empty((nbytes,), np.uint8)
    array[:] = fill
    return slot.number, np.ndarray((nbytes,), np.uint8, np.asarray(arena.lend(slot, nbytes)))


# ------------------------------------------------------------------------------------------------ leases


def as_torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


def through_dlpack(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_dlpack(array)


def as_jax(array: np.ndarray) -> Any:
    return pytest.importorskip("jax").numpy.from_dlpack(array)


class Cycle:
    def __init__(self, array: np.ndarray) -> None:
        self.array, self.me = array, self


VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[3:9],
    "an item's view": lambda array: array[5:6].reshape(()),
    "another shape and dtype": lambda array: array.reshape(64, -1).view(np.float32).T,
    "a view of a view's base": lambda array: array[1:].base[2:],
    "a memoryview": memoryview,
    "a slice of a memoryview": lambda array: memoryview(array)[4:8],
    "an array from a memoryview": lambda array: np.frombuffer(memoryview(array)[8:], np.uint8),
    "torch.from_numpy": as_torch,
    "a view of a tensor": lambda array: as_torch(array)[2:4],
    "dlpack to torch": through_dlpack,
    "dlpack to numpy": np.from_dlpack,
    "dlpack to jax": as_jax,
    "a cycle of garbage": Cycle,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_slot_returns_when_its_last_view_dies(arena: Arena, view: str) -> None:
    number, array = lent(arena)
    kept = VIEWS[view](array)
    del array
    assert arena.lent == 1
    assert arena.acquire().number != number
    del kept
    if view == "a cycle of garbage":
        gc.collect()
    assert arena.lent == 0
    assert arena.acquire().number == number


def test_two_arrays_of_a_slot_hold_it_until_both_are_gone(arena: Arena) -> None:
    slot = arena.acquire()
    memory = np.asarray(arena.lend(slot, 128))
    first, second = np.ndarray((64,), np.uint8, memory), np.ndarray((64,), np.uint8, memory, 64)
    del memory, first
    assert arena.lent == 1
    del second
    assert arena.lent == 0


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


def test_leased_memory_outlives_its_arena(arena: Arena) -> None:
    _, array = lent(arena, fill=9)
    arena.close()
    arena.close()
    assert (array == 9).all()
    other = Arena(reserved=0, capacity=1)
    _, orphan = lent(other, fill=4)
    other.close()
    del other
    gc.collect()
    assert (orphan == 4).all()
    del array
    assert arena.lent == 0


def test_a_lease_keeps_no_descriptor(arena: Arena) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [lent(arena) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    del kept


# ------------------------------------------------------------------------------------------------ taking slots


def test_reserved_slots_are_never_handed_out() -> None:
    arena = Arena(reserved=3, capacity=2)
    assert [arena.acquire().number for _ in range(3)] == [3, 4, 5]
    arena.close()


def test_the_slot_used_last_is_taken_first_because_its_pages_are_there(arena: Arena) -> None:
    first, second = arena.acquire(), arena.acquire()
    arena.give_back(first.number)
    arena.give_back(second.number)
    assert arena.acquire() is second


def test_more_batches_than_slots_are_an_error_that_says_what_to_do() -> None:
    arena = Arena(reserved=SLOTS - 2, capacity=1)
    arena.acquire(), arena.acquire()
    with pytest.raises(MemoryError, match="lower prefetch_factor"):
        arena.acquire()
    arena.close()


# ------------------------------------------------------------------------------------------------ memory


def test_an_arena_takes_the_memory_that_was_written(arena: Arena) -> None:
    assert arena.nbytes() == 0
    for _ in range(3):
        arena.acquire().empty((MIB,), np.uint8)[:] = 1
    assert 3 * MIB <= arena.nbytes() <= 3 * MIB + 3 * 4096
    arena.acquire().empty((7 * MIB + 1000,), np.uint8)[:] = 1  # with huge pages, too
    assert arena.nbytes() <= 10 * MIB + 4 * 4096


def test_trimming_gives_surplus_pages_back_and_the_slots_can_be_used_again(arena: Arena) -> None:
    slots = [arena.acquire() for _ in range(8)]
    for slot in slots:
        slot.empty((MIB,), np.uint8)[:] = 1
    for slot in slots:
        arena.give_back(slot.number)
    arena.trim()
    assert arena.nbytes() <= 3 * (MIB + 4096)
    again = [arena.acquire() for _ in range(8)]
    assert {slot.number for slot in again} == {slot.number for slot in slots}
    cold = [slot for slot in again if not slot.bytes[:4096].any()]
    assert len(cold) == 5
    cold[0].reset()
    cold[0].empty((MIB,), np.uint8)[:] = 2
    assert Slot(arena.fd, cold[0].number).bytes[0] == 2


def test_slots_that_are_lent_are_never_trimmed(arena: Arena) -> None:
    kept = [lent(arena, MIB, fill) for fill in range(8)]
    arena.trim()
    assert all((array == fill).all() for fill, (_, array) in enumerate(kept))


def test_page_locked_memory_is_unlocked_before_its_pages_go() -> None:
    locked: list[int] = []
    unlocked: list[int] = []

    def attach(memory: np.ndarray) -> Callable[[], None]:
        address = memory.ctypes.data
        locked.append(address)
        return lambda: unlocked.append(address)

    arena = Arena(reserved=0, capacity=1, attach=attach)
    kept = [arena.acquire() for _ in range(2)]
    leases = [arena.lend(slot, 64) for slot in kept]
    leases.append(arena.lend(kept[0], 64))  # the same mapping: locked once
    assert len(locked) == 2
    del leases, kept
    arena.trim()
    assert len(unlocked) == 1
    arena.close()
    assert sorted(unlocked) == sorted(locked)


# ------------------------------------------------------------------------------------------------ huge pages


@pytest.mark.parametrize("mebibytes", [2, 3, 17])
def test_large_mappings_lie_where_they_can_have_huge_pages(arena: Arena, mebibytes: int) -> None:
    slot = arena.acquire()
    slot.reach(mebibytes * MIB)
    assert slot.mapping.address % HUGE == 0


def test_what_was_written_stays_when_a_slot_gets_huge_pages(arena: Arena) -> None:
    slot = arena.acquire()
    parts = [slot.empty((MIB // 2,), np.uint8) for _ in range(3)]
    for number, part in enumerate(parts):
        part[:] = number + 1
    large = slot.empty((9 * MIB,), np.uint8)
    large[:] = 7
    there = Slots(arena.fd)[slot.number]
    there.reach(slot.used)
    for number in range(3):
        assert (there.bytes[number * MIB // 2 : (number + 1) * MIB // 2] == number + 1).all()
    assert (there.bytes[3 * MIB // 2 : 3 * MIB // 2 + 9 * MIB] == 7).all()


def test_a_system_without_huge_pages_does_as_well(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agnoload.transport.memory._COLLAPSE", 9999)
    slot = arena.acquire()
    slot.empty((5 * MIB,), np.uint8)[:] = 3
    assert (slot.bytes[: 5 * MIB] == 3).all()


def test_memory_that_cannot_be_mapped_is_an_error_with_its_size(arena: Arena) -> None:
    with pytest.raises(OSError, match="cannot map"):
        Mapping(arena.fd, 0, 1 << 62)


# ------------------------------------------------------------------------------------------------ a slot


@given(sizes=st.lists(st.integers(1, 3 * MIB) | st.sampled_from([1, 65536, 65537]), min_size=1, max_size=4))
def test_both_sides_see_the_same_memory_however_a_slot_grows(sizes: list[int]) -> None:
    arena = Arena(reserved=0, capacity=1)
    try:
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
    finally:
        arena.close()


def test_a_slot_holds_a_large_batch(arena: Arena) -> None:
    array = arena.acquire().empty((70 * MIB,), np.uint8)
    array[0], array[-1] = 5, 6
    assert (array[0], array[-1]) == (5, 6)


def test_arrays_of_a_slot_that_grows_stay_valid_and_known(arena: Arena) -> None:
    slot = arena.acquire()
    small = slot.empty((1000,), np.uint8)
    small[:] = 1
    large = slot.empty((MIB,), np.uint8)
    large[:] = 2
    assert (slot.bytes[:1000] == 1).all()
    assert slot.place(small) == (0, None)
    assert slot.place(small[10:]) == (10, None)
    assert slot.place(large) == (1024, None)


def test_a_batch_larger_than_a_stride_is_refused(arena: Arena) -> None:
    with pytest.raises(MemoryError, match="larger than"):
        arena.acquire().reach(STRIDE + 1)


@pytest.mark.parametrize(("shape", "dtype"), [((0, 3), np.float32), ((2,), object), ((0,), "M8[s]")])
def test_empty_arrays_and_arrays_of_objects_lie_elsewhere(arena: Arena, shape: tuple[int, ...], dtype: Any) -> None:
    slot = arena.acquire()
    array = slot.empty(shape, dtype)
    assert (array.shape, array.dtype, slot.used) == (shape, np.dtype(dtype), 0)


def test_a_reset_slot_is_written_from_the_beginning(arena: Arena) -> None:
    slot = arena.acquire()
    slot.empty((100,), np.uint8)
    slot.reset()
    assert slot.place(slot.empty((4,), np.uint8)) == (0, None)


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000])
def test_private_memory_is_aligned_too(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    assert memory.nbytes == nbytes
    assert memory.ctypes.data % 64 == 0
