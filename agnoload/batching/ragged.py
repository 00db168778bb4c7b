"""Items of unequal length in one batch: one array of all rows and one of offsets, in three forms.

`Ragged` holds `values`, the rows of all items one after the other, and `offsets`, where each item begins and the last
one ends. From these come the *list* form (views), the *padded* form (one row of equal width an item) and the *packed*
form (values and offsets).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from agnoload.batching.collate import as_array
from agnoload.batching.stacking import JOINED_BYTES, Array, Column, collate_error, differ, new_array, write_joined
from agnoload.batching.tree import Node, Path, register_node
from agnoload.errors import OptionError
from agnoload.protocols import Empty, IndexArray
from agnoload.validate import array_of, members, number_of, positive, shown, word

Arrays = list[Array]
Form = Literal["padded", "packed", "list"]
Side = Literal["left", "right"]


class Padded(NamedTuple):
    """The padded form: `values` of shape (items, width, ...), and the `lengths` of the items, int64.

    >>> Ragged.from_list([[1, 2, 3], [4]]).padded(value=-1)
    Padded(values=array([[ 1,  2,  3],
           [ 4, -1, -1]]), lengths=array([3, 1]))
    """

    values: Any
    lengths: Any

    def mask(self, side: Side = "right", axis: int = 0) -> npt.NDArray[np.bool_]:
        """Which places hold rows of the item: bool, (items, width), for items padded at `side` along their `axis`.

        >>> Ragged.from_list([[1, 2, 3], [4]]).padded().mask()
        array([[ True,  True,  True],
               [ True, False, False]])
        """
        return _mask(np.asarray(self.lengths), self.values.shape[1 + axis], side)


class Packed(NamedTuple):
    """The packed form: `values` holds the rows of all items, those of item i from `offsets[i]` to `offsets[i + 1]`.

    Behind the last item there may be rows of padding, see `ragged_collate(multiple_of=...)`.

    >>> Ragged.from_list([[1, 2, 3], [4]]).packed()
    Packed(values=array([1, 2, 3, 4]), offsets=array([0, 3, 4]))
    """

    values: Any
    offsets: Any

    def item_of_value(self, axis: int = 0) -> IndexArray:
        """Which item each row (along `axis`) came from, int64; rows of padding have the number of items.

        >>> Ragged.from_list([[1, 2, 3], [4]]).packed().item_of_value()
        array([0, 0, 0, 1])
        """
        offsets = np.asarray(self.offsets, np.int64)
        return np.repeat(np.arange(len(offsets)), np.diff(offsets, append=self.values.shape[axis]))


class Ragged:
    """Arrays of unequal length as one: `values` (all rows, one item after the other) and `offsets` (int64, one more
    than items).

    Make it with `from_list`, `from_padded` or `from_packed`. It has `len`, iterates over items, takes an int (the item,
    a view), a slice (views where the step is 1), a list of numbers or a bool mask (a new `Ragged`), and `==` compares
    values, offsets and dtype. In a batch it travels as its two arrays, and a backend converts these.

    >>> ragged = Ragged.from_list([[1, 2, 3], [4], [], [5, 6]])
    >>> ragged
    Ragged(4 items of lengths 3, 1, 0, 2; int64)
    >>> ragged.packed()
    Packed(values=array([1, 2, 3, 4, 5, 6]), offsets=array([0, 3, 4, 4, 6]))
    >>> ragged[::-1][0]
    array([5, 6])
    """

    __slots__ = ("offsets", "values")
    __hash__ = None  # type: ignore[assignment]  # its arrays can change

    values: Any
    offsets: Any

    def __init__(self, values: Any, offsets: Any) -> None:
        values, offsets = array_of("values", values), array_of("offsets", offsets)
        if values.ndim == 0:
            raise OptionError("values must have a first axis, the rows of all items; got an array without axes")
        flat = offsets.ndim == 1 and offsets.dtype.kind in "iu" and len(offsets) > 0
        if not flat or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets.astype(np.int64)) < 0).any():
            raise OptionError(
                "offsets must be a flat array of integers, one more than there are items, that begin at 0, never fall "
                f"and end at the number of values, {len(values)}; got {shown(offsets)}"
            )
        self.values = values
        self.offsets = offsets.astype(np.int64, copy=False)

    @classmethod
    def from_list(cls, items: Iterable[Any], *, empty: Empty = np.empty) -> Ragged:
        """Gather arrays (or lists, or `bytes`: rows of uint8) that differ in the length of their first axis only.

        Raises `CollateError`, with the places of two items, when other axes or dtypes differ; strings of unequal width
        are widened. The rows are copied once, into what `empty(shape, dtype)` gives.
        """
        rows = checked_rows(list(members("the items of a Ragged", items, "an iterable of arrays")), (), 0)
        return _ragged(*pack_rows(rows, empty))

    @classmethod
    def from_packed(cls, values: Any, offsets: Any) -> Ragged:
        """Take values and offsets as they are, without a copy; `OptionError` if the offsets do not fit."""
        return cls(values, offsets)

    @classmethod
    def from_padded(cls, values: Any, lengths: Any, side: Side = "right") -> Ragged:
        """Gather the rows of a padded array of shape (items, width, ...), leaving out the padding.

        >>> Ragged.from_padded([[1, 2, 3], [4, 0, 0]], [3, 1]).list()
        [array([1, 2, 3]), array([4])]
        """
        values, lengths = array_of("values", values), array_of("lengths", lengths)
        if values.ndim < 2:
            raise OptionError(f"a padded array must have axes (items, width, ...), got shape {values.shape}")
        fit = lengths.shape == values.shape[:1] and (lengths.dtype.kind in "iu" or not lengths.size)
        if not fit or (lengths.size and not 0 <= lengths.min() <= lengths.max() <= values.shape[1]):
            raise OptionError(
                f"lengths must be integers from 0 to the width, {values.shape[1]}, one for each of the {len(values)} "
                f"items; got {shown(lengths)}"
            )
        lengths = lengths.astype(np.int64)
        return _ragged(values[_mask(lengths, values.shape[1], side)], offsets_of(lengths))

    @staticmethod
    def concatenate(parts: Iterable[Ragged]) -> Ragged:
        """Put the items of several `Ragged` one after the other; `CollateError` when rows or dtypes differ.

        >>> Ragged.concatenate([Ragged.from_list([[1, 2]]), Ragged.from_list([[], [3]])]).list()
        [array([1, 2]), array([], dtype=int64), array([3])]
        """
        parts = list(parts)
        rows = checked_rows([part.values for part in parts], (), 0)
        lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        return _ragged(pack_rows(rows, np.empty)[0], offsets_of(lengths))

    def list(self) -> Arrays:
        """The items, as views of `values`."""
        values = self.values
        return [values[start:stop] for start, stop in pairwise(self.offsets.tolist())]

    def padded(self, value: Any = 0, side: Side = "right", multiple_of: int = 1, *, empty: Empty = np.empty) -> Padded:
        """All items at the width of the longest, rounded up to a multiple, filled with `value` at one side.

        `value` must fit into the dtype (`OptionError`); 0 is the dtype's own zero, an empty string for strings.

        >>> Ragged.from_list([[1, 2, 3], [4]]).padded(side="left", multiple_of=4)
        Padded(values=array([[0, 1, 2, 3],
               [0, 0, 0, 4]]), lengths=array([3, 1]))
        """
        positive("multiple_of", multiple_of)
        rows = Rows(self.list(), self.lengths, self.values.dtype, self.values.shape[1:], 0)
        return pad_rows(rows, value, side, multiple_of, empty, self.values)

    def packed(self) -> Packed:
        """The values and the offsets, without a copy."""
        return Packed(self.values, self.offsets)

    def item_of_value(self) -> IndexArray:
        """Which item each row of `values` came from: int64, what graph libraries call the batch vector."""
        return self.packed().item_of_value()

    @property
    def lengths(self) -> IndexArray:
        """The number of rows of each item, int64."""
        lengths: IndexArray = np.diff(self.offsets)
        return lengths

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Array]:
        return iter(self.list())

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, np.integer)):
            count = len(self)
            if not -count <= key < count:
                raise IndexError(f"item {key} of a Ragged of {number_of(count, 'item')}")
            place = int(key) % count
            return self.values[self.offsets[place] : self.offsets[place + 1]]
        if isinstance(key, slice) and key.step in (None, 1):
            start, stop, _ = key.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            return _ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        if not isinstance(key, slice) and not len(key):
            key = slice(0, 0)  # NumPy takes an empty list for floats
        lengths = self.lengths[key]
        return _ragged(self.values[runs(self.offsets[:-1][key], lengths)], offsets_of(lengths))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        if self.values.dtype != other.values.dtype or not np.array_equal(self.offsets, other.offsets):
            return False
        return np.array_equal(self.values, other.values)

    def __repr__(self) -> str:
        lengths = self.lengths.tolist()
        first = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
        rows = f" {tuple(self.values.shape[1:])}" if self.values.ndim > 1 else ""
        return f"Ragged({number_of(len(lengths), 'item')} of lengths {first or 'none'}; {self.values.dtype}{rows})"


def _ragged(values: Any, offsets: Any) -> Ragged:
    """A `Ragged` of parts that fit together, which may be another library's arrays."""
    ragged = object.__new__(Ragged)
    ragged.values = values
    ragged.offsets = offsets
    return ragged


register_node(
    Ragged,
    Node(lambda _: ("values", "offsets"), getattr, lambda _, children: _ragged(*children), fixed=True, columns=False),
)


# -- rows, and the two ways to lay them out


def runs(starts: IndexArray, lengths: IndexArray, step: int = 1) -> IndexArray:
    """The numbers `start, start + step, ...`, `length` of them, for each pair."""
    offsets = offsets_of(lengths)
    runs: IndexArray = step * np.arange(offsets[-1]) + np.repeat(starts - step * offsets[:-1], lengths)
    return runs


class Rows(NamedTuple):
    """Items that fit together: `lengths` along `axis`, all else (`trailing`: the other axes) equal."""

    items: Arrays
    lengths: IndexArray
    dtype: np.dtype[Any]
    trailing: tuple[int, ...]
    axis: int

    def shape(self, length: int) -> tuple[int, ...]:
        return (*self.trailing[: self.axis], length, *self.trailing[self.axis :])


def checked_rows(column: Column, path: Path, axis: int) -> Rows:
    """Check the items of one field; `CollateError` names the field and two items that do not fit together."""
    found = [value if type(value) is np.ndarray else _item(value, path, item) for item, value in enumerate(column)]
    first = next((item for item in found if item is not None), np.zeros((0,) * (axis + 1)))
    trailing = _without(first.shape, axis)
    blank = np.empty((*trailing[:axis], 0, *trailing[axis:]), first.dtype)
    items: Arrays = [blank if item is None else item for item in found]
    for place, item in enumerate(items):
        if item.ndim <= axis:
            raise collate_error(
                path,
                (place,),
                f"a ragged field needs arrays of at least {axis + 1} axes, but item {place} has shape {item.shape}; "
                "leave the field out of ragged_collate(fields=...), or give its arrays a first axis",
            )
    flat = first.ndim == 1 and [item.ndim for item in items].count(1) == len(items)
    if not flat and any(_without(item.shape, axis) != trailing for item in items):
        must = f"the items of a ragged field may differ along axis {axis} only"
        advice = "make the other axes equal in the dataset, or name another axis in ragged_collate(axis=...)"
        raise differ(
            path, items, must, lambda item: f"shape {item.shape}", advice, lambda item: _without(item.shape, axis)
        )
    dtypes = [item.dtype for item in items]
    dtype = first.dtype
    if dtypes.count(dtype) != len(dtypes):
        if dtype.kind not in "SU" or any(other.kind != dtype.kind for other in dtypes):
            must = "the items of a ragged field must have one dtype"
            raise differ(path, items, must, lambda item: f"dtype {item.dtype}", "convert them in the dataset")
        dtype = np.result_type(*dtypes)  # the widest strings
    lengths = map(len, items) if axis == 0 else (item.shape[axis] for item in items)
    return Rows(items, np.fromiter(lengths, np.int64, len(items)), dtype, trailing, axis)


def _item(value: Any, path: Path, place: int) -> Array | None:
    """One item as an array; None for an empty list, which fits every dtype."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, (list, tuple)):
        if not value:
            return None
        try:
            return np.asarray(value)
        except (TypeError, ValueError) as error:
            raise collate_error(path, (place,), f"item {place}, a {type(value).__name__}: {error}") from error
    return as_array(value, path, place)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def rows_along(axis: int, values: Array, start: int, stop: int) -> Array:
    """A view of the rows from `start` to before `stop` along an axis."""
    part: Array = values[(*(slice(None),) * axis, slice(start, stop))]
    return part


def offsets_of(lengths: Any, empty: Empty = np.empty) -> IndexArray:
    offsets = empty((len(lengths) + 1,), np.int64)
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _mask(lengths: IndexArray, width: int, side: Side) -> npt.NDArray[np.bool_]:
    word("side", side, ("left", "right"))
    places = np.arange(width)
    limit = lengths[:, None]
    mask: npt.NDArray[np.bool_] = places < limit if side == "right" else places >= width - limit
    return mask


def pack_rows(rows: Rows, empty: Empty, value: Any = 0, multiple_of: int = 1) -> tuple[Array, IndexArray]:
    """Values and offsets of the items, written once, and behind them padding up to a multiple."""
    offsets = offsets_of(rows.lengths, empty)
    total = int(offsets[-1])
    length = -(-total // multiple_of) * multiple_of
    values = new_array(empty, rows.shape(length), rows.dtype)
    room = values
    if length > total:
        room = rows_along(rows.axis, values, 0, total)
        rows_along(rows.axis, values, total, length)[...] = fill_value(value, rows.dtype)
    items = rows.items
    plain = rows.axis == 0 and rows.dtype.kind not in "SU"
    if items and not (plain and write_joined(room, items)):
        np.concatenate(items, axis=rows.axis, out=room)
    return values, offsets


def pad_rows(rows: Rows, value: Any, side: Side, multiple_of: int, empty: Empty, packed: Array | None = None) -> Padded:
    """The padded form of the items, each written once; `packed` are the same rows in one array, if there is one."""
    fill = fill_value(value, rows.dtype)
    width = -(-int(rows.lengths.max(initial=0)) // multiple_of) * multiple_of
    out = new_array(empty, (len(rows.items), *rows.shape(width)), rows.dtype)
    lengths = empty((len(rows.items),), np.int64)
    lengths[...] = rows.lengths
    if rows.axis == 0 and out.nbytes <= JOINED_BYTES * len(rows.items):
        if packed is None:
            packed = pack_rows(rows, np.empty)[0]
        out[...] = fill
        out[_mask(lengths, width, side)] = packed
        return Padded(out, lengths)
    for place, item, length in zip(out, rows.items, rows.lengths.tolist(), strict=True):
        start = 0 if side == "right" else width - length
        rows_along(rows.axis, place, 0, start)[...] = fill
        rows_along(rows.axis, place, start, start + length)[...] = item
        rows_along(rows.axis, place, start + length, width)[...] = fill
    return Padded(out, lengths)


def fill_value(value: Any, dtype: np.dtype[Any]) -> Array:
    """The padding as an array without axes, or `OptionError` if the dtype would change it."""
    fill = np.zeros((), dtype)
    if isinstance(value, int) and value == 0:
        return fill
    try:
        with np.errstate(all="ignore"):
            fill[...] = value
            exact = dtype.kind not in "iubSU" or bool(fill == value)
            kept = exact and (dtype.kind not in "fc" or bool(np.isfinite(fill) == np.isfinite(value)))
    except (TypeError, ValueError, OverflowError):
        kept = False
    if not kept:
        raise OptionError(f"the padding must fit into the dtype of the field, but {dtype} cannot hold {value!r}")
    return fill
