"""Arrays in mapped files travel as their place in the file, so that a worker maps what this process has mapped.

These are memory-mapped files, and whatever processes share: `multiprocessing.RawArray`, `SharedMemory`, `mmap`, a
framework's tensors in shared memory. `/proc/self/maps` shows the file by the address, whoever made the mapping. Where
it has no name, or was replaced, a worker opens it through a descriptor of the parent's.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agnoload.errors import AgnoloadError
from agnoload.transport.memory import descriptor_folder

_COPIED = 1 << 20
"""A private mapping is copied, as a fork copies it; only a large one that nobody has changed yet is mapped instead."""
_PAGES = 1 << 20
"""Pages whose state is read at a time."""
_PICKLING = ("__reduce__", "__reduce_ex__", "__setstate__")
_SKIPPED = ("[", "/memfd:agnoload")
"""Stacks and the heap, and what this library shares by its own means."""


class _Area(NamedTuple):
    """A line of `/proc/self/maps`."""

    start: int
    stop: int
    modes: str
    offset: int
    inode: int
    path: str


class _Piece(NamedTuple):
    """A mapped piece of a file. It is pickled once, however many arrays lie in it, and unpickled as an `mmap`."""

    path: str
    file: tuple[int, int]
    """Its device and inode."""
    offset: int
    nbytes: int
    access: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _map, (*self, descriptor_folder())


class MappedFiles:
    """The files that this process has mapped, looked up when the first array asks for them."""

    def __init__(self) -> None:
        self._areas: list[_Area] | None = None
        self._pieces: dict[tuple[int, int], _Piece | None] = {}
        self.lost = 0
        """Arrays in the user's own shared memory that no other process can open."""

    def reduce(self, array: npt.NDArray[Any]) -> Any:
        """An array in the reduced form that pickle takes; NotImplemented if it pickles well by itself."""
        kind = type(array)
        if kind is np.ndarray and array.base is None:
            return NotImplemented
        plain = all(getattr(kind, name) is getattr(np.ndarray, name) for name in _PICKLING)
        if not plain or array.dtype.hasobject or not array.nbytes:
            return NotImplemented
        owner: Any = array
        while isinstance(owner, (np.ndarray, memoryview)):
            owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
        attributes = {name: value for name, value in getattr(array, "__dict__", {}).items() if name != "_mmap"}
        if owner is not None and (found := self._find(array, isinstance(owner, mmap.mmap))) is not None:
            piece, start = found
            offset = array.__array_interface__["data"][0] - start
            layout = (array.shape, array.dtype, piece, offset, array.strides)
            return _mapped_array, (kind, layout, array.flags.writeable, attributes)
        if kind is np.ndarray:
            return NotImplemented
        # NumPy would write the bytes of a subclass into the pickle, and each worker would read a copy of its own.
        return _subclassed, (kind, array.view(np.ndarray), attributes)

    def _find(self, array: npt.NDArray[Any], own: bool) -> tuple[_Piece, int] | None:
        """The piece that an array lies in, and where that begins in memory."""
        low, high = np.lib.array_utils.byte_bounds(array)
        if self._areas is None:
            self._areas = _areas()
        place = bisect.bisect_right(self._areas, low, key=lambda area: area.start) - 1
        if place < 0 or high > (area := self._areas[place]).stop:
            return None
        shared = area.modes[3] == "s"
        if not shared and (high - low < _COPIED or _is_changed(low, high)):
            return None
        if shared and area.modes[1] == "w":
            access = mmap.ACCESS_WRITE
        else:
            access = mmap.ACCESS_COPY if array.flags.writeable else mmap.ACCESS_READ
        key = area.start, access
        if key not in self._pieces:
            self._pieces[key] = _piece(area, access)
        piece = self._pieces[key]
        if piece is None:
            self.lost += own and access == mmap.ACCESS_WRITE
            return None
        return piece, area.start


def _piece(area: _Area, access: int) -> _Piece | None:
    """What another process can map; None if no path leads to the file."""
    deleted = area.path.endswith(" (deleted)")
    for path in chain([area.path], _opened(area.path)):
        with suppress(OSError):
            found = os.stat(path)
            # A path that is not deleted leads to that file; some file systems show another inode in `maps`.
            if found.st_ino == area.inode or not deleted:
                nbytes = min(area.stop - area.start, found.st_size - area.offset)
                return _Piece(path, (found.st_dev, found.st_ino), area.offset, nbytes, access)
    return None


def _areas() -> list[_Area]:
    """What is mapped of files, but for programs and devices."""
    areas: list[_Area] = []
    with suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as lines:
        for line in lines:
            ends, modes, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if not path or modes[0] != "r" or modes[2] == "x" or path[0].startswith(_SKIPPED):
                continue
            if path[0].startswith("/dev/") and not path[0].startswith(("/dev/shm/", "/dev/zero")):
                continue
            start, stop = (int(end, 16) for end in ends.split("-"))
            area = _Area(start, stop, modes, int(offset, 16), int(inode), path[0])
            if areas and areas[-1] == (areas[-1].start, start, modes, area.offset - start + areas[-1].start, *area[4:]):
                area = area._replace(start=areas[-1].start, offset=areas.pop().offset)  # `madvise` has divided it
            areas.append(area)
    return areas


def _opened(path: str) -> Iterator[str]:
    """The descriptors of this process that show a file, as paths by which another process opens it."""
    with suppress(OSError):
        folder = descriptor_folder()
        for number in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(f"{folder}/{number}") == path:
                    yield f"{folder}/{number}"


def _is_changed(low: int, high: int) -> bool:
    """Whether this process has pages of its own in a private mapping; True if the system does not say."""
    first, last = low // mmap.PAGESIZE, -(-high // mmap.PAGESIZE)
    with suppress(OSError), open("/proc/self/pagemap", "rb", 0) as pages:
        for start in range(first, last, _PAGES):
            count = min(_PAGES, last - start)
            words = np.frombuffer(os.pread(pages.fileno(), 8 * count, 8 * start), np.uint64)
            states = words >> np.uint64(61)  # 4: in memory, 2: swapped out, 1: the file's own page
            if len(words) < count or np.any((states > 1) & (states % 2 == 0)):
                return True
        return False
    return True  # a copy is always right


def _map(path: str, file: tuple[int, int], offset: int, nbytes: int, access: int, folder: str) -> mmap.mmap:
    paths = [path]
    with suppress(OSError):  # in case the file was removed or replaced since, or a descriptor closed
        paths += [f"{folder}/{number}" for number in os.listdir(folder)]
    for each in paths:
        with suppress(FileNotFoundError):
            found = os.stat(each)
            if (found.st_dev, found.st_ino) == file:
                fd = os.open(each, (os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY) | os.O_CLOEXEC)
                try:
                    return mmap.mmap(fd, nbytes, access=access, offset=offset)
                finally:
                    os.close(fd)
    raise AgnoloadError(f"the mapped file {path} cannot be opened any more: it was removed or replaced")


def _mapped_array(
    kind: type[npt.NDArray[Any]], layout: tuple[Any, ...], writeable: bool, attributes: dict[str, Any]
) -> npt.NDArray[Any]:
    array = np.ndarray.__new__(kind, *layout)
    array.flags.writeable = writeable
    if issubclass(kind, np.memmap):
        attributes["_mmap"] = array.base
    return _subclassed(kind, array, attributes)


def _subclassed(kind: type[npt.NDArray[Any]], array: npt.NDArray[Any], attributes: dict[str, Any]) -> npt.NDArray[Any]:
    array = array if type(array) is kind else array.view(kind)
    if attributes:
        vars(array).update(attributes)
    return array
