"""Shared memory for batches: one sparse file without a name, cut into slots; the only file that knows what memory is.

Slot `s` lies at offset `s * STRIDE` of a `memfd`. A stride is far larger than any batch and costs nothing until it is
written, so no size is guessed beforehand: each side maps a slot at the length it needs, and maps it longer when a
batch outgrows that. There is one descriptor for all slots, no name that could be left behind or collide, and
`/dev/shm` with its limits is not involved.

The parent lends a slot to the arrays of a decoded batch by a `Lease`, the object at the bottom of every view of that
memory. When the last view has died the lease dies, and the slot is free again; nobody else can free it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

STRIDE = 1 << 36
SLOTS = 4096
LENT_LIMIT = 1000
"""Slots lent at once before batches are copied out: Linux allows 65,530 mappings a process."""
LENT_BYTES = 1 << 30
"""Bytes lent at once before batches are copied out, where the user keeps more of them than the loader has under way."""
ALIGNMENT = 64
HUGE = 1 << 21
"""The size of a huge page: one page fault and one entry in the processor's table of addresses instead of 512."""
_FIRST_MAPPING = 1 << 16
_FIXED = 0x10  # MAP_FIXED
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1; before that an error, and everything stays as it was
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE

Fence = Callable[[], Callable[[], bool]]
Attach = Callable[[npt.NDArray[np.uint8]], Callable[[], None]]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def _room(nbytes: int) -> int:
    """How long to map what must hold so many bytes: an eighth more at most, which a backend may page-lock, too."""
    step = max(1 << max((nbytes - 1).bit_length() - 4, 0), _FIRST_MAPPING)
    return -(-nbytes // step) * step


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised private memory at a multiple of `ALIGNMENT`."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def anonymous_file(name: str, nbytes: int) -> int:
    """A descriptor of a file that has memory but no name, of `nbytes` zeros that take no memory until written."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EFBIG:
            error.add_note(
                "files may not be that large here, and shared memory is one: lift the limit (ulimit -f unlimited), or "
                "use worker_type='thread' or num_workers=0"
            )
        raise
    return fd


class Mapping:
    """A piece of a file in this process's memory; unmapped when nothing refers to it any more.

    `mmap.mmap` is not used because it keeps a descriptor of its own for each mapping.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, private: bool = False) -> None:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = self.address = _mapped(fd, offset, nbytes, flags)
        self.nbytes = nbytes
        self.attached = False
        self.__array_interface__ = _interface(address, nbytes)
        self._undo: list[Callable[[], None]] = []
        # Not at exit: arrays may still be read there, and the process's end unmaps everything anyway.
        weakref.finalize(self, _unmap, self._undo, address, nbytes).atexit = False

    def attach(self, attach: Attach) -> None:
        """Have a backend page-lock this memory, once; undone before the memory is unmapped."""
        if not self.attached:
            self.attached = True
            # Through an array of its own: one made from `self` would keep the mapping alive for ever.
            borrowed = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
            self._undo.append(attach(np.ctypeslib.as_array(borrowed)))

    def array(self) -> Any:
        """All bytes, as an array of uint8 that keeps the mapping alive."""
        return np.asarray(self)

    def back(self, start: int, stop: int) -> None:
        """Give a part that is about to be written for the first time huge pages where the system can.

        `start` and `stop` are multiples of `HUGE`; what was written there before stays.
        """
        if start >= stop:
            return
        self.array()[start:stop:HUGE].sum()  # the system only enlarges pages, so each needs a small one to begin with
        _libc.madvise(self.address + start, stop - start, _COLLAPSE)


def _mapped(fd: int, offset: int, nbytes: int, flags: int) -> int:
    """Map a piece of a file; a large one at an address where it can have huge pages."""
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if nbytes < HUGE:
        return _mmap(None, nbytes, writable, flags, fd, offset)
    room = nbytes + HUGE
    reserved = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    start = -(-reserved // HUGE) * HUGE
    end = -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if start > reserved:
        _libc.munmap(reserved, start - reserved)
    _libc.munmap(end, reserved + room - end)
    return _mmap(start, nbytes, writable, flags | _FIXED, fd, offset)


def _mmap(at: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    address: int | None = _libc.mmap(at, nbytes, protection, flags, fd, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {nbytes} bytes of shared memory: {os.strerror(error)}")
    return address


def _unmap(undo: list[Callable[[], None]], address: int, nbytes: int) -> None:
    try:
        for detach in undo:
            detach()
    finally:
        _libc.munmap(address, nbytes)


def _interface(address: int, nbytes: int) -> dict[str, Any]:
    return {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


class Lease:
    """The right to read one slot: the object that all arrays over that memory hang from."""

    __slots__ = ("__array_interface__", "__weakref__", "mapping")

    def __init__(self, mapping: Mapping, nbytes: int) -> None:
        self.mapping = mapping
        self.__array_interface__ = _interface(mapping.address, nbytes)

    def array(self) -> Any:
        """The bytes that it is for, as an array of uint8 that keeps it alive."""
        return np.asarray(self)


class Slot:
    """One batch's place, as this process sees it: memory to write into, one array after the other."""

    def __init__(self, fd: int, number: int) -> None:
        self.number = number
        self._fd = fd
        self._backed = 0
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
            self._map(_room(nbytes))

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
        if end >= self._backed + HUGE:
            self.mapping.back(self._backed, end & -HUGE)
            self._backed = end & -HUGE
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
        offset = self._offset_of(low, high - low)
        if offset is not None:
            return offset + array.ctypes.data - low, None if in_order else array.strides
        transposed = array.flags.f_contiguous and not in_order
        copy = self.empty(array.shape[::-1], array.dtype).T if transposed else self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy.ctypes.data - self.mapping.address, copy.strides if transposed else None

    def _offset_of(self, address: int, nbytes: int) -> int | None:
        """The offset of memory that already lies in this slot, in the present mapping or one it has outgrown."""
        for mapping in (self.mapping, *self._old):
            offset = address - mapping.address
            if offset >= 0 and offset + nbytes <= mapping.nbytes:
                return offset
        return None


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


class _LeaseRef(weakref.ref[Lease]):
    """Tells the arena which slot a dead lease was for."""

    __slots__ = ("slot",)
    slot: int


class Arena(Slots):
    """The parent's side: who has which slot. Owns the file; `close` lets go of it, and live leases keep their memory.

    `reserved` slots at the beginning are never handed out. `capacity` is how many slots may keep their pages while no
    batch needs them; the pages of others go back to the system.
    """

    def __init__(self, reserved: int, capacity: int, attach: Attach | None = None, fence: Fence | None = None) -> None:
        super().__init__(anonymous_file("agnoload", SLOTS * STRIDE))
        self._attach = attach
        self._fence = fence if attach is not None else None
        self._died: deque[int] = deque()  # their last view has died, a device may still read them
        self._fenced: deque[tuple[int, Callable[[], bool]]] = deque()
        self._capacity = capacity
        self._next = reserved
        self._reserved = reserved
        self._free: deque[int] = deque()  # a lease may die in any thread, within any bytecode: only appends then
        self._cold: list[int] = []
        self._leases: dict[int, _LeaseRef] = {}
        self._closed = False

    def take(self) -> Slot:
        """A free slot, preferably one whose pages are already there."""
        if self._died or self._fenced:
            self._pass_fences()
        try:
            number = self._free.pop()
        except IndexError:
            number = self._cold.pop() if self._cold else self._new()
        return self[number]

    def _new(self) -> int:
        if self._next >= SLOTS:
            raise MemoryError(f"more than {SLOTS - self._reserved} batches in flight: lower prefetch_factor")
        self._next += 1
        return self._next - 1

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
        if self._attach is not None:
            try:
                slot.mapping.attach(self._attach)
            except BaseException:
                self.give_back(slot.number)
                raise
        lease = Lease(slot.mapping, nbytes)
        ref = _LeaseRef(lease, self._returned)
        ref.slot = slot.number
        self._leases[slot.number] = ref
        return lease

    def _returned(self, ref: weakref.ref[Lease]) -> None:
        slot = ref.slot  # type: ignore[attr-defined]
        self._leases.pop(slot, None)
        if self._fence is None:
            self.give_back(slot)
        elif not self._closed:
            self._died.append(slot)

    def _pass_fences(self) -> None:
        """In the loader's own thread: free the slots that no device reads any more."""
        while self._died and self._fence is not None:
            self._fenced.append((self._died.popleft(), self._fence()))
        for _ in range(len(self._fenced)):
            slot, passed = self._fenced.popleft()
            if passed():
                self.give_back(slot)
            else:
                self._fenced.append((slot, passed))

    @property
    def pinned(self) -> bool:
        """Whether a backend page-locks what is lent."""
        return self._attach is not None

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
            _libc.fallocate(self.fd, _PUNCH_HOLE, number * STRIDE, STRIDE)
            self._cold.append(number)

    def nbytes(self) -> int:
        """The memory that the whole file takes at present."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Close the file and forget the slots; memory that a lease covers lives on until the lease dies."""
        if not self._closed:
            self._closed = True
            self._slots.clear()
            self._free.clear()
            os.close(self.fd)
