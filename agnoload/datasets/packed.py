"""Lists of strings, bytes or any picklable objects in one piece of memory."""

from __future__ import annotations

import pickle
import reprlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from agnoload.datasets.base import Dataset
from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.validate import members

T = TypeVar("T")

Kind = Literal["str", "bytes", "object"]
Bytes = npt.NDArray[np.uint8]
CHUNK = 1 << 12
"""Items that are encoded at a time, so that a generator of any length can be packed."""


class PackedList(Dataset[T], Sequence[T]):
    """An unchangeable list of strings, bytes or picklable objects, kept as one buffer of bytes and int64 offsets.

    Use it where a dataset would hold a long list: Python counts references inside each object, so every worker that
    reads such a list gets its own copy of it, page by page. A packed list has two arrays instead of objects, which
    workers share; an item is made when it is asked for and belongs to the caller. It reads like a list, slices are
    views, and it can be loaded as a dataset. `iterable` is read once, item by item; if all are `str` or all `bytes`
    they are kept as such (the text and 8 bytes each), else as pickles. `OptionError` if an item does not pickle.

    >>> names = PackedList(f"image-{i}.png" for i in range(1000))
    >>> names[-1], list(names[:2]), len(names)
    ('image-999.png', ['image-0.png', 'image-1.png'], 1000)
    >>> PackedList([{"a": 1}, None]) == [{"a": 1}, None]
    True
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, iterable: Iterable[T]) -> None:
        if isinstance(iterable, (str, bytes)):
            raise OptionError(f"PackedList needs an iterable of items, got one {type(iterable).__name__}")
        self._fill(*_pack(iter(members("PackedList", iterable, "made of an iterable of items"))))

    def _fill(self, kind: Kind, buffer: Bytes, offsets: IndexArray, places: range | None = None) -> PackedList[T]:
        self._kind: Kind = kind
        self._buffer = buffer
        self._offsets = offsets
        self._places = range(len(offsets) - 1) if places is None else places
        # A memoryview gives Python ints and byte strings some times faster than an array does.
        self._bytes = buffer.data
        self._ends = offsets.data
        return self

    @property
    def nbytes(self) -> int:
        """The bytes that the buffer and the offsets take, also when this is only a slice of them."""
        return self._buffer.nbytes + self._offsets.nbytes

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> T: ...
    @overload
    def __getitem__(self, index: slice, /) -> PackedList[T]: ...
    def __getitem__(self, index: Any, /) -> Any:
        try:
            place = self._places[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for a PackedList of length {len(self)}") from None
        if isinstance(place, range):
            return _unpack(self._kind, self._buffer, self._offsets, place)
        item = self._bytes[self._ends[place] : self._ends[place + 1]]
        if self._kind == "str":
            return str(item, "utf-8", "surrogatepass")
        return bytes(item) if self._kind == "bytes" else pickle.loads(item)

    def __iter__(self) -> Iterator[T]:  # that of Sequence would take an IndexError of an item for the end
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (PackedList, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        places = self._places
        if places.step == 1 or len(places) < 2:  # what lies around a slice stays here
            start = places.start if len(places) else 0
            offsets = self._offsets[start : start + len(places) + 1]
            low, high = int(offsets[0]), int(offsets[-1])
            return _unpack, (self._kind, self._buffer[low:high], offsets - low if low else offsets)
        items = [self._bytes[self._ends[place] : self._ends[place + 1]] for place in places]
        return _unpack, (self._kind, np.frombuffer(b"".join(items), np.uint8), np.cumsum([0, *map(len, items)]))

    def __repr__(self) -> str:
        shown = ", ".join(reprlib.repr(item) for item in self[:3])
        kind = "objects" if self._kind == "object" else self._kind
        return f"PackedList([{shown}{', ...' if len(self) > 3 else ''}], {len(self)} {kind}, {self.nbytes} bytes)"


def _unpack(kind: Kind, buffer: Bytes, offsets: IndexArray, places: range | None = None) -> PackedList[Any]:
    packed: PackedList[Any] = PackedList.__new__(PackedList)
    return packed._fill(kind, buffer, offsets, places)


def _pack(items: Iterator[Any], kind: Kind | None = None) -> tuple[Kind, Bytes, IndexArray]:
    """The buffer and the offsets of the items; `kind` is found from the items, unless it is given."""
    buffer, lengths = bytearray(), array("q", [0])
    while chunk := list(islice(items, CHUNK)):
        kinds = set(map(type, chunk))
        alike: Kind = "str" if kinds <= {str, np.str_} else "bytes" if kinds <= {bytes, np.bytes_} else "object"
        kind = kind or alike
        if kind not in ("object", alike):  # all were alike until now: begin again, as pickles
            before = _unpack(kind, np.frombuffer(buffer, np.uint8), np.cumsum(lengths))
            return _pack(chain(before, chunk, items), "object")
        encoded = chunk
        if kind == "str":
            encoded = [item.encode("utf-8", "surrogatepass") for item in chunk]
        elif kind == "object":
            encoded = [_pickled(item, place) for place, item in enumerate(chunk, len(lengths) - 1)]
        buffer += b"".join(encoded)
        lengths.extend(map(len, encoded))
    return kind or "object", np.frombuffer(buffer, np.uint8), np.cumsum(lengths)


def _pickled(item: Any, place: int) -> bytes:
    try:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise OptionError(
            f"the items of a PackedList must be str, bytes or picklable; item {place} "
            f"({type(item).__qualname__}) is not: {error}"
        ) from error
