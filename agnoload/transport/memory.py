"""Memory that several processes map at once, and how it reaches a worker: by descriptor, never by name.

A `SharedFile` has no name that could collide or be left behind: it is gone when the last process that maps it is. So
it cannot be pickled in general, only while a payload is packed for a worker:

    with sending() as descriptors:                    in the parent
        payload = pickle.dumps(dataset)
    ...                                               the payload and the descriptors go to the worker, each its own way
    with receiving(descriptors):                      in the worker, with the numbers that they have there
        dataset = pickle.loads(payload)
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import AgnoloadError

_fcntl: Any
try:
    import fcntl as _fcntl
except ImportError:  # not a POSIX system: there, no such file reaches another process
    _fcntl = None


class _Arrived:
    """The descriptors that came with a payload, and which of them belong to a file by now."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = list(descriptors)
        self.taken: set[int] = set()


_sending: ContextVar[list[int] | None] = ContextVar("agnoload_sending", default=None)
_receiving: ContextVar[_Arrived | None] = ContextVar("agnoload_receiving", default=None)


class SharedFile:
    """`nbytes` of zeroed memory that this process and its workers write to and read from.

    Pages take memory once they are written to. `bytes` is all of it as a writable uint8 array. Whoever made it closes
    it, at the latest when it is collected; in a forked child that does nothing. A closed one must not be used, arrays
    of it stay readable.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = max(nbytes, 1)
        fd = _new_file()
        try:
            os.ftruncate(fd, nbytes)
            self._take_over(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def _take_over(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        # Before Python 3.13 a mapping keeps a descriptor of its own.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self._mapping = mmap.mmap(fd, nbytes, **options)
        self._fd = fd
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        self._mutex = threading.Lock()
        self._mutex_pid = os.getpid()
        self._close = weakref.finalize(self, _close, fd, os.getpid())

    def fileno(self) -> int:
        """The descriptor; it stays this object's."""
        return self._fd

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other threads and processes out that lock this file; the kernel unlocks it if this process dies."""
        if self._mutex_pid != os.getpid():  # forked while a thread of the parent may have held it
            self._mutex = threading.Lock()
            self._mutex_pid = os.getpid()
        with self._mutex:
            if _fcntl is None:
                yield
                return
            _fcntl.lockf(self._fd, _fcntl.LOCK_EX)
            try:
                yield
            finally:
                _fcntl.lockf(self._fd, _fcntl.LOCK_UN)

    def forget(self, start: int, stop: int) -> None:
        """Give the memory of whole pages between two offsets back; they read as zeros from then on."""
        start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if stop <= start:
            return
        if hasattr(mmap, "MADV_REMOVE"):
            self._mapping.madvise(mmap.MADV_REMOVE, start, stop - start)
        else:
            self.bytes[start:stop] = 0

    def close(self) -> None:
        """Give back the descriptor; the memory follows when no array shows it any more. Twice is fine."""
        self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (_send(self._fd), self.nbytes)

    def __repr__(self) -> str:
        return f"SharedFile({self.nbytes})"


class Descriptor:
    """A descriptor within a payload; it stays its owner's. `detach` gives the number that it has in the worker."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _Sent, (_send(self._fd),)


class _Sent:
    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        return _arrived(self._place)


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


class _Receiving:
    """No generator function: see `seeding.use`."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._arrived = _Arrived(descriptors)

    def __enter__(self) -> None:
        self._token = _receiving.set(self._arrived)

    def __exit__(self, *error: object) -> None:
        _receiving.reset(self._token)
        for fd in set(self._arrived.descriptors) - self._arrived.taken:
            os.close(fd)


def receiving(descriptors: Sequence[int]) -> AbstractContextManager[None]:
    """Let what was pickled under `sending` be unpickled, given its descriptors in their order.

    The descriptors are taken over: a file that is unpickled owns its own, the others are closed at the end.
    """
    return _Receiving(descriptors)


def _send(fd: int) -> int:
    """Send a descriptor along; gives its place among those that are sent."""
    descriptors = _sending.get()
    if descriptors is None:
        raise AgnoloadError(
            "shared memory can be pickled only while a payload is packed for a worker; pickle what it was made from"
        )
    if fd not in descriptors:
        descriptors.append(fd)
    return descriptors.index(fd)


def _arrived(place: int) -> int:
    """A descriptor that has come with the payload; the caller owns it."""
    arrived = _receiving.get()
    if arrived is None:
        raise AgnoloadError("shared memory can be unpickled only in the worker that it was packed for")
    fd = arrived.descriptors[place]
    if fd in arrived.taken:  # it was pickled more than once
        return os.dup(fd)
    arrived.taken.add(fd)
    return fd


def _receive(place: int, nbytes: int) -> SharedFile:
    file = SharedFile.__new__(SharedFile)
    file._take_over(_arrived(place), nbytes)
    return file


def descriptors() -> str:
    """The folder in which another process finds this one's descriptors, and can open for itself what they show."""
    return f"/proc/{os.readlink('/proc/self')}/fd"


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("agnoload", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # on POSIX it has no name from the start
        return os.dup(file.fileno())


def _close(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(fd)
