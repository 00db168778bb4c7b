"""An index of classes, made from an array of labels: which classes there are, and which items each one has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.base import digest, vector


class ClassIndex:
    """Items by class: `members[offsets[k]:offsets[k + 1]]` are the items of class k, in rising order.

    `names` are the distinct labels, sorted; `counts` how many items each has.
    """

    def __init__(self, name: str, labels: Any) -> None:
        array = vector(name, labels)
        if not array.size:
            raise OptionError(f"{name} must not be empty, got none")
        if array.dtype.kind == "f" and np.isnan(array.min()):
            raise OptionError(f"{name} must not be NaN, got one at index {int(np.flatnonzero(np.isnan(array))[0])}")
        self.counts: IndexArray
        self.names, codes, self.counts = _distinct(array)
        self.offsets: IndexArray = np.concatenate(([0], np.cumsum(self.counts)))
        self.members: IndexArray = _sort_stably(codes)

    @property
    def total(self) -> int:
        """The number of items."""
        return len(self.members)

    def __len__(self) -> int:
        """The number of classes."""
        return len(self.names)

    def pick(self, classes: Any, places: IndexArray) -> IndexArray:
        """The items at `places` of a class, or each of a class of its own."""
        items: IndexArray = self.members[self.offsets[classes] + places]
        return items

    def digest(self) -> str:
        """Hexadecimal digits that differ between indexes."""
        return digest(self.members) + digest(self.counts)


def _distinct(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], IndexArray]:
    """The distinct values, sorted; the number of each item's value among them; and how often each comes."""
    if array.dtype.kind in "iub":
        values = array.view(np.uint8) if array.dtype == bool else array
        low, high = int(values.min()), int(values.max())
        if high - low <= 4 * len(values) + 65536 and high <= np.iinfo(np.int64).max:
            shifted = values.astype(np.int64) - low  # few possible values: to count them is quicker than to sort
            counts = np.bincount(shifted)
            present = counts > 0
            codes = (np.cumsum(present) - 1).astype(_code_type(int(present.sum())))[shifted]
            return (np.flatnonzero(present) + low).astype(array.dtype), codes, counts[present]
    names, codes, counts = np.unique(array, return_inverse=True, return_counts=True)
    return names, codes.reshape(-1).astype(_code_type(len(names)), copy=False), counts


def _code_type(classes: int) -> Any:
    return np.uint16 if classes <= 1 << 16 else np.int64


def _sort_stably(codes: npt.NDArray[Any]) -> IndexArray:
    """`argsort(codes, kind="stable")`; NumPy sorts 16-bit integers by radix, which is five times quicker."""
    if codes.dtype == np.uint16:
        return np.argsort(codes, kind="stable")
    order = np.argsort((codes & 0xFFFF).astype(np.uint16), kind="stable")
    high = codes[order] >> 16
    return order[_sort_stably(high.astype(_code_type(int(high.max()) + 1)))]
