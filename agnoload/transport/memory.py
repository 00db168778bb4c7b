"""Memory that several processes map at once, and how it reaches a worker: by descriptor, never by name.

A file without a name cannot collide with another or be left behind: it is gone when the last process that maps it is.
It cannot be pickled in general, only while a payload is packed for a worker:

    with sending() as descriptors:                    in the parent
        payload = pickle.dumps(dataset)
    ...                                               payload and descriptors go to the worker, each its own way
    with Receiving(descriptors):                      in the worker, with the numbers that they have there
        dataset = pickle.loads(payload)

What only one system has (memfd, huge pages, holes in a file) is looked up when it is used, not at import.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import AgnoloadError

ALIGNMENT = 64
HUGE = 1 << 21
"""The size of a huge page: one page fault and one entry in the processor's table of addresses instead of 512."""
_NO_ACCESS, _FIXED = 0, 0x10  # PROT_NONE, MAP_FIXED
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1; an older system refuses it and changes nothing
_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE

Attach = Callable[[npt.NDArray[np.uint8]], Callable[[], None]]
"""Page-locks memory for a device; what it gives undoes that."""


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised private memory at a multiple of `ALIGNMENT`."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def interface(address: int, nbytes: int) -> dict[str, Any]:
    """`__array_interface__` of bytes at an address: arrays made of an object that has it keep that object alive."""
    return {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


# ---------------------------------------------------------------------------------------------------- files


def anonymous_file(name: str, nbytes: int) -> int:
    """A descriptor of a file without a name, of `nbytes` zeros that take no memory until they are written."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)  # a program that a sample starts must not keep the memory
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EFBIG:
            error.add_note(
                "shared memory is a file, and the limit on file sizes is too low for it: lift it "
                "(ulimit -f unlimited), or use worker_type='thread' or num_workers=0"
            )
        raise
    return fd


def punch_hole(fd: int, start: int, nbytes: int) -> None:
    """Give the memory of whole pages in a part of a file back to the system; they read as zeros from then on."""
    _libc().fallocate(fd, _PUNCH_HOLE, start, nbytes)


class Mapping:
    """A piece of a file in this process's memory, unmapped when nothing refers to it any more.

    Not `mmap.mmap`, which keeps a descriptor of its own for each mapping.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, private: bool = False) -> None:
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        at: int | None = None
        start, whole = 0, nbytes
        if nbytes >= HUGE:  # their address must be a multiple of their size: reserve enough to have one, map over that
            whole += HUGE
            start = _mmap(None, whole, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            at, flags = -(-start // HUGE) * HUGE, flags | _FIXED
        self.address = _mmap(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        self.nbytes = nbytes
        self.__array_interface__ = interface(self.address, nbytes)
        self._detach: list[Callable[[], None]] = []
        # Not at exit: arrays may still be read there, and the end of the process unmaps everything anyway.
        weakref.finalize(self, _unmap, self._detach, start or self.address, whole).atexit = False

    def attach(self, attach: Attach) -> None:
        """Have a backend page-lock this memory, once; undone before the memory is unmapped."""
        if not self._detach:
            # An array made of `self` would keep the mapping alive for ever: the backend may hold on to what it locks.
            borrowed = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
            self._detach.append(attach(np.ctypeslib.as_array(borrowed)))

    def array(self) -> Any:
        """All bytes, as an array of uint8 that keeps the mapping alive."""
        return np.asarray(self)

    def use_huge_pages(self, start: int, stop: int) -> None:
        """Let a part that is about to be written have huge pages where the system can; what is there already stays.

        `start` and `stop` are multiples of `HUGE`.
        """
        if start < stop:
            self.array()[start:stop:HUGE].sum()  # the system only enlarges pages, so each needs a small one first
            _libc().madvise(self.address + start, stop - start, _COLLAPSE)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _mmap(at: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    address: int | None = _libc().mmap(at, nbytes, protection, flags, fd, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {nbytes} bytes of shared memory: {os.strerror(error)}")
    return address


def _unmap(detach: list[Callable[[], None]], address: int, nbytes: int) -> None:
    try:
        for undo in detach:
            undo()
    finally:
        _libc().munmap(address, nbytes)


class SharedFile:
    """`nbytes` of zeroed memory that this process and its workers write to and read from.

    Pages take memory once they are written. `bytes` is all of it as a writable uint8 array. Its owner closes it, at the
    latest when it is collected; arrays of it stay readable afterwards.
    """

    def __init__(self, nbytes: int, received: Descriptor | None = None) -> None:
        self.nbytes = max(nbytes, 1)
        self._fd = anonymous_file("agnoload", self.nbytes) if received is None else received.detach()
        # The finalizer knows its process: a forked child must not close the parent's number, which it may reuse.
        self._close = weakref.finalize(self, _close, self._fd, os.getpid())
        self.bytes: npt.NDArray[np.uint8] = Mapping(self._fd, 0, self.nbytes).array()
        self._mutex = os.getpid(), threading.Lock()

    def fileno(self) -> int:
        """The descriptor; it stays this object's."""
        return self._fd

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other threads and processes out that lock this file; the kernel unlocks it if this process dies.

        The kernel's lock belongs to the whole process, so threads need one of their own.
        """
        import fcntl

        if self._mutex[0] != os.getpid():  # forked while a thread of the parent may have held it
            self._mutex = os.getpid(), threading.Lock()
        with self._mutex[1]:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def forget(self, start: int, stop: int) -> None:
        """Give the memory of whole pages between two offsets back; they read as zeros from then on."""
        punch_hole(self._fd, start, stop - start)

    def close(self) -> None:
        """Give back the descriptor; the memory follows when no array shows it any more. Twice is fine."""
        self._close()  # a finalizer runs once, whoever calls it

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedFile, (self.nbytes, Descriptor(self._fd))


def _close(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(fd)


# ---------------------------------------------------------------------------------------------------- descriptors

_sending: ContextVar[list[int] | None] = ContextVar("agnoload_sending", default=None)
_receiving: ContextVar[Receiving | None] = ContextVar("agnoload_receiving", default=None)


@contextmanager
def sending() -> Iterator[list[int]]:
    """Let shared files be pickled meanwhile; the list collects the descriptors that must go along.

    They stay the files' own: pass them on, or duplicate them, before the files are closed.
    """
    descriptors: list[int] = []
    token = _sending.set(descriptors)
    try:
        yield descriptors
    finally:
        _sending.reset(token)


def is_sending() -> bool:
    """Whether what is being pickled goes to a worker that gets the descriptors too."""
    return _sending.get() is not None


class Receiving:
    """Let what was pickled under `sending` be unpickled meanwhile, given its descriptors in their order.

    They are taken over: a file that is unpickled owns its own, the others are closed at the end. No generator function,
    since `contextlib` writes into the exceptions that pass through it, and a user's may refuse that.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = descriptors
        self.owned: set[int] = set()

    def __enter__(self) -> None:
        self._token = _receiving.set(self)

    def __exit__(self, *error: object) -> None:
        _receiving.reset(self._token)
        for fd in set(self.descriptors) - self.owned:
            os.close(fd)


class Descriptor:
    """A descriptor within a payload, whoever owns it; `detach` gives the number that it has in the worker."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        """The number; the caller owns it."""
        return self._fd

    def __getstate__(self) -> int:
        descriptors = _sending.get()
        if descriptors is None:
            raise AgnoloadError(
                "shared memory can be pickled only while a payload is packed for a worker; pickle what it was made from"
            )
        if self._fd not in descriptors:
            descriptors.append(self._fd)
        return descriptors.index(self._fd)

    def __setstate__(self, position: int) -> None:
        received = _receiving.get()
        if received is None:
            raise AgnoloadError("shared memory can be unpickled only in the worker that it was packed for")
        fd = received.descriptors[position]
        self._fd = os.dup(fd) if fd in received.owned else fd  # it was pickled more than once
        received.owned.add(self._fd)


def descriptor_folder() -> str:
    """Where another process finds this one's descriptors, and can open for itself what they show."""
    return f"/proc/{os.readlink('/proc/self')}/fd"
