"""Memory that is used again, and only when nobody can see it any more."""

from __future__ import annotations

import gc
import queue
import threading
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agnoload.transport.buffer_pool import SMALL, BatchBuffers, BufferPool

LARGE = (4, SMALL)
DTYPES = st.sampled_from(["u1", "<i2", ">f8", "<c16", "S7", "<U3", "M8[s]", "O"])


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@given(shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=60), dtype=DTYPES)
def test_arrays_have_the_shape_and_dtype_that_was_asked_for(shape: tuple[int, ...], dtype: str) -> None:
    array = BatchBuffers(BufferPool(2))(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert array.nbytes < SMALL or array.dtype.hasobject or address(array) % 64 == 0


@given(steps=st.lists(st.integers(0, 7), max_size=30))
def test_no_two_arrays_share_memory_and_what_is_kept_is_bounded(steps: list[int]) -> None:
    memory, batches = BufferPool(2), []
    for number, step in enumerate(steps):
        if step < 4:  # a batch of some arrays, the first of them twice as large
            empty = BatchBuffers(memory)
            batch = [empty((SMALL << (item == 0),), np.uint8) for item in range(step)]
            for array in batch:
                array[:: SMALL // 4] = number
            batches.append((number, batch))
        elif batches:  # one of the batches dies
            batches.pop(step % len(batches))
        assert all((array[:: SMALL // 4] == number).all() for number, batch in batches for array in batch)
    batches.clear()
    assert memory.kept <= 2 * (2 * SMALL + 2 * SMALL)  # two of the largest batches


def test_a_block_comes_back_when_its_last_view_has_died() -> None:
    memory = BufferPool(2)
    array = BatchBuffers(memory)(LARGE, np.uint8)
    first = address(array)
    views: list[Any] = [array[1:], memoryview(array), array.reshape(-1).view(np.int16), np.asarray(array)]
    del array
    while views:
        other = BatchBuffers(memory)(LARGE, np.uint8)
        assert address(other) != first
        del other
        views.pop()
    other, more = BatchBuffers(memory)(LARGE, np.uint8), BatchBuffers(memory)(LARGE, np.uint8)
    assert first in (address(other), address(more))


def test_a_pool_keeps_as_many_blocks_as_its_batches_take() -> None:
    memory = BufferPool(2)
    for _ in range(5):
        empty = BatchBuffers(memory)
        batch = [empty(LARGE, np.uint8) for _ in range(3)]
        del batch
    lent = [BatchBuffers(memory)(LARGE, np.uint8) for _ in range(20)]
    lent.clear()
    assert memory.kept == 2 * 3 * 4 * SMALL


def test_arrays_outlive_their_pool() -> None:
    memory = BufferPool(2)
    array = BatchBuffers(memory)(LARGE, np.uint8)
    array[...] = 7
    del memory
    gc.collect()
    assert (array == 7).all()


def test_threads_that_take_and_threads_that_drop_never_share_a_block() -> None:
    memory, handed, wrong = BufferPool(3), queue.SimpleQueue(), []

    def take(number: int) -> None:
        empty = BatchBuffers(memory)
        for turn in range(150):
            array = empty((SMALL + turn,), np.uint8)
            array[...] = number
            handed.put((number, array))
        handed.put(None)

    def drop() -> None:
        kept, over = [], 0
        while over < 4:
            item = handed.get()
            over += item is None
            if item is not None:
                kept.append(item)
            if len(kept) > 5:
                number, array = kept.pop(0)
                wrong.extend([] if (array == number).all() else [number])
                del array

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    threads.append(threading.Thread(target=drop))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
