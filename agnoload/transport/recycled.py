"""Memory within this process that large arrays are written into again and again, without fresh pages each time."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.transport.memory import aligned_empty

SMALL = 1 << 16
"""Below this the allocator's own lists are as good."""


class _Loan:
    """What the arrays over one block hang from."""

    __slots__ = ("__array_interface__", "__weakref__", "memory")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__


class _LoanRef(weakref.ref[_Loan]):
    __slots__ = ("memory",)
    memory: npt.NDArray[np.uint8]


class Recycled:
    """Blocks of memory that come back when the last array over them has died; their sizes are powers of two.

    As many are kept of each size as `batches` batches take. Threads share it: each asks `batch()` for the `Empty` of
    every batch that it makes.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._free: dict[int, deque[npt.NDArray[np.uint8]]] = {}
        self._lent: dict[int, _LoanRef] = {}
        self._most: Counter[int] = Counter()
        """How many blocks of a size a batch has taken at most."""
        self._growing = threading.Lock()

    def batch(self) -> BatchMemory:
        """The `Empty` for one more batch."""
        return BatchMemory(self)

    @property
    def kept(self) -> int:
        """Bytes that wait to be used again."""
        return sum(size * len(free) for size, free in self._free.copy().items())

    def lend(self, size: int) -> _Loan:
        """A block; it is lent for as long as the loan lives."""
        try:
            memory = self._free.setdefault(size, deque()).pop()
        except IndexError:
            memory = aligned_empty(size)
        loan = _Loan(memory)
        ref = _LoanRef(loan, self._returned)
        ref.memory = memory
        self._lent[id(ref)] = ref
        return loan

    def took(self, taken: Counter[int]) -> None:
        """What a batch has taken up to now."""
        if any(count > self._most[size] for size, count in taken.items()):
            with self._growing:
                self._most |= taken

    def _returned(self, ref: weakref.ref[_Loan]) -> None:
        """Runs in any thread, at any moment, even within a lock of ours: so it takes none.

        Each step is atomic by itself. If two threads both find room for one block, one block too many is kept.
        """
        self._lent.pop(id(ref), None)
        memory = ref.memory  # type: ignore[attr-defined]
        free = self._free[memory.size]
        if len(free) < self._batches * max(self._most[memory.size], 1):
            free.append(memory)


class BatchMemory:
    """The `Empty` of one batch, for one thread."""

    def __init__(self, recycled: Recycled) -> None:
        self._recycled = recycled
        self._taken: Counter[int] = Counter()

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALL or dtype.hasobject:
            return np.empty(shape, dtype)
        size = 1 << (nbytes - 1).bit_length()
        self._taken[size] += 1
        self._recycled.took(self._taken)
        return np.ndarray(shape, dtype, np.asarray(self._recycled.lend(size)))
