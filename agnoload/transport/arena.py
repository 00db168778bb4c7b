"""The slots that batches lie in: one sparse file without a name, and who may read or write which part of it.

Slot `s` lies at offset `s * STRIDE`. A stride is far larger than any batch and costs nothing until it is written, so no
size is guessed beforehand: each side maps a slot at the length it needs, and maps it longer when a batch outgrows that.
There is one descriptor for all slots, no name that could be left behind or collide, and `/dev/shm` with its limits is
not involved.

The parent lends a slot to the arrays of a decoded batch by a `Lease`, the object at the bottom of every view of that
memory. When the last view has died the lease dies, and the slot is free again; nobody else can free it.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from agnoload.transport.memory import HUGE, Attach, Mapping, aligned, anonymous_file, interface, punch_hole

STRIDE = 1 << 36
SLOTS = 4096
LENT_LIMIT = 1000
"""Slots lent at once before batches are copied out: Linux allows 65,530 mappings a process."""
LENT_BYTES = 1 << 30
"""Bytes lent at once before batches are copied out, where the user keeps more of them than the loader has under way."""
_FIRST_MAPPING = 1 << 16

Fence = Callable[[], Callable[[], bool]]
"""Marks a point in a device's work; what it gives says whether the device has passed that."""


class Lease:
    """The right to read some memory. `np.asarray` of it is an array of uint8, and all views of that keep it alive."""

    __slots__ = ("__array_interface__", "__weakref__", "memory")

    def __init__(self, memory: Any, address: int, nbytes: int) -> None:
        self.memory = memory  # kept alive
        self.__array_interface__ = interface(address, nbytes)


class LeaseRef(weakref.ref[Lease]):
    """Tells the owner of the memory which part of it a dead lease was for. A class, not a closure: one of these is made
    for every batch."""

    __slots__ = ("part",)
    part: Any


class Slot:
    """One batch's place, as this process sees it: memory to write into, one array after the other."""

    def __init__(self, fd: int, number: int) -> None:
        self.number = number
        self._fd = fd
        self._huge = 0  # how much of it has been given huge pages
        self._map(_FIRST_MAPPING)
        self.reset()

    def _map(self, nbytes: int) -> None:
        self.mapping = Mapping(self._fd, self.number * STRIDE, nbytes)
        self.bytes = self.mapping.array()
        self.view = memoryview(self.bytes)

    def reach(self, nbytes: int) -> None:
        """Map the slot at least `nbytes` long. Arrays over the shorter mapping stay valid: the pages are the same."""
        if nbytes > self.mapping.nbytes:
            if nbytes > STRIDE:
                raise MemoryError(f"a batch of {nbytes} bytes is larger than the {STRIDE} bytes that a slot can hold")
            self._old.append(self.mapping)
            # An eighth more at most: a backend may page-lock all of it.
            step = max(1 << max((nbytes - 1).bit_length() - 4, 0), _FIRST_MAPPING)
            self._map(-(-nbytes // step) * step)

    def reset(self) -> None:
        """Start to write at the beginning again."""
        self.used = 0
        self._old: list[Mapping] = []
        self._given: dict[int, tuple[Any, int]] = {}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        """Uninitialised memory of the slot as an array; `np.empty` for what cannot be shared."""
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        if dtype.hasobject or nbytes == 0:
            return np.empty(shape, dtype)
        start = self.used
        end = start + nbytes
        if end > self.mapping.nbytes:
            self.reach(end)
        if end >= self._huge + HUGE:
            self.mapping.use_huge_pages(self._huge, end & -HUGE)
            self._huge = end & -HUGE
        self.used = aligned(end)
        array = np.ndarray(shape, dtype, self.bytes, start)
        self._given[id(array)] = array, start  # with the array, so that its id stays its own
        return array

    def put(self, data: Any) -> int:
        """Copy bytes behind what is there; gives their offset."""
        view = memoryview(data).cast("B")
        start = self.used
        end = start + view.nbytes
        if end > self.mapping.nbytes:
            self.reach(end)
        self.view[start:end] = view
        self.used = aligned(end)
        return start

    def place(self, array: npt.NDArray[Any]) -> tuple[int, tuple[int, ...] | None]:
        """The offset of an array's first item, and its strides if it is not C-contiguous; copied in if need be."""
        in_order = array.flags.c_contiguous
        if in_order and (known := self._given.get(id(array))):
            return known[1], None
        low, high = byte_bounds(array)
        for mapping in (self.mapping, *self._old):  # it may be a view of memory that lies here already
            if mapping.address <= low and high <= mapping.address + mapping.nbytes:
                return array.ctypes.data - mapping.address, None if in_order else array.strides
        transposed = array.flags.f_contiguous and not in_order
        copy = self.empty(array.shape[::-1], array.dtype).T if transposed else self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy.ctypes.data - self.mapping.address, copy.strides if transposed else None


class Slots:
    """The slots that this process has mapped, made when first asked for."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, number: int) -> Slot:
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = Slot(self.fd, number)
        return slot


class Arena(Slots):
    """The parent's side: who has which slot. Owns the file; `close` lets go of it, and live leases keep their memory.

    `reserved` slots at the beginning are never handed out. `capacity` is how many slots may keep their pages while no
    batch needs them; the pages of others go back to the system.
    """

    def __init__(self, reserved: int, capacity: int, attach: Attach | None = None, fence: Fence | None = None) -> None:
        super().__init__(anonymous_file("agnoload", SLOTS * STRIDE))
        self._reserved = reserved
        self._capacity = capacity
        self._attach = attach
        self.pinned = attach is not None
        """Whether a backend page-locks what is lent."""
        self._fence = fence if attach is not None else None
        self._next = reserved
        self._free: deque[int] = deque()
        self._cold: list[int] = []  # free, and without pages
        self._leases: dict[int, LeaseRef] = {}
        self._died: deque[int] = deque()  # their last view has died, a device may still read them
        self._fenced: deque[tuple[int, Callable[[], bool]]] = deque()
        self._closed = False

    def acquire(self) -> Slot:
        """A free slot, preferably one whose pages are already there."""
        # Here, in the loader's own thread, and not where a lease dies: a fence is the backend's code.
        while self._died and self._fence is not None:
            self._fenced.append((self._died.popleft(), self._fence()))
        for _ in range(len(self._fenced)):
            slot, passed = self._fenced.popleft()
            if passed():
                self.give_back(slot)
            else:
                self._fenced.append((slot, passed))
        try:
            number = self._free.pop()
        except IndexError:
            if self._cold:
                number = self._cold.pop()
            elif self._next < SLOTS:
                number = self._next
                self._next += 1
            else:
                raise MemoryError(
                    f"at most {SLOTS - self._reserved} batches can be under way or in use: lower prefetch_factor"
                ) from None
        return self[number]

    def has(self, number: int) -> bool:
        """Whether it is a slot that a worker may have written to."""
        return 0 < number < self._next

    def give_back(self, slot: int) -> None:
        """A slot that no batch of the user's reads is free again."""
        if not self._closed:
            self._free.append(slot)

    def lend(self, slot: Slot, nbytes: int) -> Lease:
        """A lease over the first bytes of a slot; the slot comes free when the lease dies."""
        slot.reach(nbytes)
        mapping = slot.mapping
        if self._attach is not None:
            try:
                mapping.attach(self._attach)
            except BaseException:
                self.give_back(slot.number)
                raise
        lease = Lease(mapping, mapping.address, nbytes)
        # Kept, because a weak reference that dies before its object never calls back, and the slot would be lost.
        ref = self._leases[slot.number] = LeaseRef(lease, self._returned)
        ref.part = slot.number
        return lease

    def _returned(self, ref: weakref.ref[Lease]) -> None:
        # A lease may die in any thread and within any bytecode, also of ours: so this takes no lock, and each of its
        # steps is atomic.
        slot: int = ref.part  # type: ignore[attr-defined]
        self._leases.pop(slot, None)
        if self._fence is None:
            self.give_back(slot)
        elif not self._closed:
            self._died.append(slot)

    @property
    def lent(self) -> int:
        """How many batches of the user's lie in slots."""
        return len(self._leases)

    def full(self, nbytes: int) -> bool:
        """Whether too much is lent already; `nbytes` is the size of a batch, and all are taken to be that large."""
        lent = self.lent
        return lent >= LENT_LIMIT or (lent > self._capacity and lent * nbytes >= LENT_BYTES)

    def trim(self) -> None:
        """Give the pages of surplus free slots back to the system."""
        while self._free and self._next - self._reserved - len(self._cold) > self._capacity:
            number = self._free.popleft()
            if self._attach is not None:
                self._slots.pop(number, None)  # unmapped and unlocked before its pages go
            punch_hole(self.fd, number * STRIDE, STRIDE)
            self._cold.append(number)

    def nbytes(self) -> int:
        """The memory that the whole file takes at present."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Close the file and forget the slots; memory that a lease covers lives on until the lease dies."""
        if not self._closed:
            self._closed = True  # first: a lease that dies meanwhile gives nothing back
            self._slots.clear()
            self._free.clear()
            os.close(self.fd)
