"""Memory that is used again, and only when nobody can see it any more."""

from __future__ import annotations

import gc
import queue
import threading

import numpy as np
import pytest

from agnoload.transport.buffer_pool import SMALL, BatchBuffers, BufferPool

LARGE = (4, SMALL)


def address(array):
    return array.__array_interface__["data"][0]


def test_it_gives_what_was_asked_for():
    empty = BatchBuffers(BufferPool(2))
    for shape, dtype in (((3, 50_001), np.int16), ((2, 40_000), "<c16"), ((70_000,), ">f8"), ((4, 30_000), "S7")):
        array = empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert address(array) % 64 == 0
        array[...] = np.ones((), array.dtype) if array.dtype.kind != "S" else b"x"
    assert empty((100_000,), object).tolist() == [None] * 100_000
    assert empty((0, 5), np.float32).shape == (0, 5)
    assert empty((), np.float32).shape == ()


def test_a_block_comes_back_when_its_last_view_has_died():
    memory = BufferPool(2)
    array = BatchBuffers(memory)(LARGE, np.uint8)
    first, views = address(array), [array[1:], memoryview(array), array.reshape(-1).view(np.int16), np.asarray(array)]
    del array
    while views:
        other = BatchBuffers(memory)(LARGE, np.uint8)
        assert address(other) != first
        del other
        views.pop()
    other, more = BatchBuffers(memory)(LARGE, np.uint8), BatchBuffers(memory)(LARGE, np.uint8)
    assert first in (address(other), address(more))


def test_it_keeps_as_many_blocks_as_so_many_batches_take_and_no_more():
    memory = BufferPool(2)
    empty = BatchBuffers(memory)
    for _ in range(5):
        del empty
        empty = BatchBuffers(memory)
        batch = [empty(LARGE, np.uint8) for _ in range(3)]
        del batch
    lent = [BatchBuffers(memory)(LARGE, np.uint8) for _ in range(20)]
    lent.clear()
    assert memory.kept == 2 * 3 * 4 * SMALL


def test_it_can_be_dropped_while_arrays_live():
    memory = BufferPool(2)
    array = BatchBuffers(memory)(LARGE, np.uint8)
    array[...] = 7
    del memory
    gc.collect()
    assert (array == 7).all()


@pytest.mark.parametrize("threads", [4])
def test_threads_that_take_and_threads_that_drop_never_share_a_block(threads):
    memory, handed, wrong = BufferPool(3), queue.SimpleQueue(), []

    def take(number):
        empty = BatchBuffers(memory)
        for turn in range(150):
            array = empty((SMALL + turn,), np.uint8)
            array[...] = number
            handed.put((number, array))
        handed.put(None)

    def drop():
        kept, over = [], 0
        while over < threads:
            item = handed.get()
            if item is None:
                over += 1
                continue
            kept.append(item)
            if len(kept) > 5:
                number, array = kept.pop(0)
                if not (array == number).all():
                    wrong.append(number)
                del array

    workers = [threading.Thread(target=take, args=(number,)) for number in range(threads)]
    workers.append(threading.Thread(target=drop))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
