"""Memory within this process that large arrays are written into again and again, without fresh pages each time."""

from __future__ import annotations

import weakref
from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.transport.arena import aligned_empty

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
    """An `Empty` whose blocks come back when the last array over them has died; keeps at most `blocks` of each size."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._free: dict[int, deque[npt.NDArray[np.uint8]]] = {}
        self._lent: dict[int, _LoanRef] = {}

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALL or dtype.hasobject:
            return np.empty(shape, dtype)
        size = 1 << (nbytes - 1).bit_length()
        free = self._free.setdefault(size, deque())
        try:
            memory = free.pop()
        except IndexError:
            memory = aligned_empty(size)
        loan = _Loan(memory)
        ref = _LoanRef(loan, self._returned)
        ref.memory = memory
        self._lent[id(ref)] = ref
        return np.ndarray(shape, dtype, np.asarray(loan))

    def _returned(self, ref: weakref.ref[_Loan]) -> None:
        """May run in any thread, at any moment: only atomic steps."""
        self._lent.pop(id(ref), None)
        memory = ref.memory  # type: ignore[attr-defined]
        free = self._free[memory.size]
        if len(free) < self._blocks:
            free.append(memory)
