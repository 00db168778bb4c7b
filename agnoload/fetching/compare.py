"""What readers of one stream compare: check sums over what each has gone past, its own samples and the others'.

Batch `k` is right only if whoever delivers it has gone past the very samples that the others deliver before it. So each
answer carries the sum before its batch and the sum after it, and the one before must be the one after the batch that
precedes it, whoever has read that.
"""

from __future__ import annotations

import marshal
import zlib
from mmap import mmap
from types import NoneType
from typing import Any

import numpy as np

from agnoload.backend import registry
from agnoload.streams.iterators import LAZY

THOROUGH = 128
"""Samples from the start that readers compare one by one."""
PLAIN = frozenset((int, float, bool, complex, NoneType))
"""Types whose values stand for themselves."""
WIDTH = 256
"""Characters up to which a text is looked at as a whole; of a longer one, about as many at even distances."""
PIXELS = 64
"""The same for the elements of an array."""
BREADTH = 16
"""The same for the parts of a container; half of it for the parts of each of them."""
PRINTED = frozenset(("datetime", "decimal", "fractions", "pathlib", "uuid"))
"""Modules whose values say all that they are in `str`."""


class CheckSum:
    """Over the samples of one sequence: of each of the first ones, then of the last of each batch.

    Where a sample is lost or comes twice all later ones differ, and where two change places across batches, that one.
    """

    def __init__(self, place: int) -> None:
        self.total = 0
        """Up to the start of a batch, or to the end; the same for all readers that began at `place`."""
        self.each_below = place + THOROUGH
        self._noted: list[Any] = []

    def note(self, raw: Any) -> None:
        """Take a sample into account."""
        self._noted.append(sketch(raw))

    def add_noted(self, end: int | bool) -> None:
        """A batch ends, and with it the sequence where `end` is its length."""
        # Version 2 of the format gives the same bytes for equal values, whether or not they are one object.
        self.total = zlib.crc32(marshal.dumps([*self._noted, end], 2), self.total)
        self._noted.clear()


def sketch(value: Any, breadth: int = BREADTH) -> Any:
    """Little that is equal for equal values in any process, and most likely another for others; `marshal` takes it.

    Of what cannot be looked into in a microsecond or so, the type only.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is str or kind is bytes or kind is bytearray:
        value = bytes(value) if kind is bytearray else value  # its owner may fill it again
        return value if len(value) <= WIDTH else (len(value), value[:: len(value) // WIDTH])
    name = kind.__name__
    if kind is np.ndarray:
        return _of_array(value)
    if kind in LAZY:  # what it is made of: a function may add to it what is its worker's own
        return sketch(value[1], breadth)
    if breadth > 0 and issubclass(kind, (tuple, list)):
        base: Any = tuple if issubclass(kind, tuple) else list  # a subclass may load when it is asked
        length = base.__len__(value)
        # Of a tuple, which is what streams of this library make around the samples, parts of parts matter more.
        inner = breadth - 1 if kind is tuple else breadth // 2
        some = base.__getitem__(value, slice(None, None, max(1, length // breadth)))
        return name, length, [sketch(part, inner) for part in some]
    if breadth > 0 and issubclass(kind, dict):
        return name, dict.__len__(value), _entries(value, breadth)
    if breadth > 0 and (fields := getattr(kind, "__dataclass_fields__", None)) is not None:
        return name, [sketch(getattr(value, field, None), breadth // 2) for field in list(fields)[:breadth]]
    if issubclass(kind, (set, frozenset)):
        return name, len(value)
    if issubclass(kind, np.generic):
        return name, sketch(_in_python(value), breadth // 2) if _has_gaps(value.dtype) else value.tobytes()
    if issubclass(kind, (str, int)):  # members of enumerations, say
        return name, sketch(str.__str__(value) if issubclass(kind, str) else int.__int__(value))
    if kind.__module__.partition(".")[0] in PRINTED:
        return name, str(value)
    try:
        array = value if issubclass(kind, np.ndarray) else registry.to_numpy(value)
        return name if array is None else (name, _of_array(array))
    except Exception:  # a tensor of a layout that no array has, say: what is wrong with it, whoever delivers it says
        return name


def _entries(value: dict[Any, Any], breadth: int) -> list[Any]:
    """Of a dictionary: by the names, as it may have been filled in any order."""
    try:
        names = sorted(dict.keys(value)) if dict.__len__(value) <= WIDTH else []
    except TypeError:
        return []
    step = max(1, len(names) // breadth)
    return [
        (name if type(name) is str else sketch(name, 0), sketch(dict.__getitem__(value, name), breadth // 2))
        for name in names[::step]
    ]


def _of_array(array: Any) -> Any:
    what, root = (array.dtype.str, array.shape), array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if isinstance(root.base, mmap):  # its file is not to be read for what others deliver: where it lies says enough
        return what, array.ctypes.data - root.ctypes.data
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    some = flat[:: max(1, array.size // PIXELS)]
    if _has_gaps(array.dtype):
        return what, [sketch(part, BREADTH // 2) for part in _in_python(some)]
    return what, some.tobytes()


def _has_gaps(dtype: np.dtype[Any]) -> bool:
    """Whether equal elements may have other bytes: addresses, or what lies between fields and behind 80-bit numbers."""
    return dtype.hasobject or dtype.kind in "TV" or dtype.char in "gG"


def _in_python(value: Any) -> Any:
    """The elements of an array, or a scalar, as Python's objects; 80-bit numbers are rounded."""
    return value.astype(complex).tolist() if value.dtype.char in "gG" else value.tolist()
