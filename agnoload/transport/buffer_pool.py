"""Memory that worker threads write large arrays into again and again, without fresh pages each time."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.transport.arena import Lease, LeaseRef
from agnoload.transport.memory import aligned_empty

SMALL = 1 << 16
"""Below this the allocator's own lists are as good."""


class BufferPool:
    """Blocks of memory that come back when the last array over them has died; their sizes are powers of two.

    As many are kept of each size as `batches` batches take. All threads share it; each makes a `BatchBuffers` for every
    batch.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._free: dict[int, deque[npt.NDArray[np.uint8]]] = {}
        self._lent: dict[int, LeaseRef] = {}
        self._most: dict[int, int] = {}
        """How many blocks of a size a batch has taken at most."""

    @property
    def kept(self) -> int:
        """Bytes that wait to be used again."""
        return sum(size * len(free) for size, free in self._free.copy().items())

    def lend(self, size: int, taken: int) -> Lease:
        """A block of a size, of which a batch has `taken` some by now; lent for as long as the lease lives.

        No lock: each step is atomic. Threads that race to note how many a batch takes lose a note, and one of the next
        batches makes it again.
        """
        if taken > self._most.get(size, 0):
            self._most[size] = taken
        try:
            block = self._free.setdefault(size, deque()).pop()
        except IndexError:
            block = aligned_empty(size)
        lease = Lease(block, block.ctypes.data, size)
        ref = LeaseRef(lease, self._returned)
        ref.part = block
        self._lent[id(ref)] = ref
        return lease

    def _returned(self, ref: weakref.ref[Lease]) -> None:
        # A lease dies in any thread and within any bytecode, also of ours, so this takes no lock. Two threads that both
        # find room for the last block keep one too many.
        self._lent.pop(id(ref), None)
        block = ref.part  # type: ignore[attr-defined]
        free = self._free[block.size]
        if len(free) < self._batches * self._most[block.size]:
            free.append(block)


class BatchBuffers:
    """The `Empty` of one batch, for one thread."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._taken: Counter[int] = Counter()

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALL or dtype.hasobject:
            return np.empty(shape, dtype)
        size = 1 << (nbytes - 1).bit_length()
        self._taken[size] += 1
        return np.ndarray(shape, dtype, np.asarray(self._pool.lend(size, self._taken[size])))
