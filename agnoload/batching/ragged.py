"""Items of unequal length in one batch: one array of all rows and one of offsets, in three forms.

`Ragged` holds `values`, the rows of all items one after the other, and `offsets`, where each item begins and the last
one ends. From these come the *list* form (views), the *padded* form (one row of equal width an item) and the *packed*
form (values and offsets). `ragged_collate` makes a collate function that batches fields in one of the forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from agnoload.batching.collate import as_array, collate, holds_arrays
from agnoload.batching.stacking import JOINED_BYTES, Column, collate_error, new_array, write_joined
from agnoload.batching.tree import Node, Path, node_of, path_text, register_node
from agnoload.errors import CollateError, OptionError
from agnoload.protocols import Empty, IndexArray
from agnoload.validate import integer, members, number_of, positive, word

Array = npt.NDArray[Any]
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
        return _items_of(np.diff(offsets, append=self.values.shape[axis]))


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
        values, offsets = np.asarray(values), np.asarray(offsets)
        if values.ndim == 0:
            raise OptionError("values must have a first axis, the rows of all items; got an array without axes")
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
            raise OptionError(
                "offsets must be a flat array of integers, one more than there are items; got shape "
                f"{offsets.shape} and dtype {offsets.dtype}"
            )
        if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets.astype(np.int64)) < 0).any():
            raise OptionError(
                f"offsets must begin at 0, never fall and end at the number of values, {len(values)}; got "
                f"{offsets[0]}...{offsets[-1]}"
            )
        self.values = values
        self.offsets = offsets.astype(np.int64, copy=False)

    @classmethod
    def from_list(cls, items: Iterable[Any], *, empty: Empty = np.empty) -> Ragged:
        """Gather arrays (or lists, or `bytes`: rows of uint8) that differ in the length of their first axis only.

        Raises `CollateError`, with the places of two items, when other axes or dtypes differ; strings of unequal width
        are widened. The rows are copied once, into what `empty(shape, dtype)` gives.
        """
        rows = _rows(list(members("the items of a Ragged", items, "an iterable of arrays")), (), 0)
        return _ragged(*_pack(rows, empty))

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
        values, lengths = np.asarray(values), np.asarray(lengths)
        if values.ndim < 2:
            raise OptionError(f"a padded array must have axes (items, width, ...), got shape {values.shape}")
        if lengths.shape != values.shape[:1] or (lengths.dtype.kind not in "iu" and lengths.size):
            raise OptionError(
                f"lengths must be integers, one for each of the {len(values)} items; got shape {lengths.shape} and "
                f"dtype {lengths.dtype}"
            )
        if lengths.size and (lengths.min() < 0 or lengths.max() > values.shape[1]):
            raise OptionError(
                f"lengths must lie between 0 and the width, {values.shape[1]}; got {lengths.min()} to {lengths.max()}"
            )
        lengths = lengths.astype(np.int64)
        return _ragged(values[_mask(lengths, values.shape[1], side)], _offsets(lengths))

    @staticmethod
    def concatenate(parts: Iterable[Ragged]) -> Ragged:
        """Put the items of several `Ragged` one after the other; `CollateError` when rows or dtypes differ.

        >>> Ragged.concatenate([Ragged.from_list([[1, 2]]), Ragged.from_list([[], [3]])]).list()
        [array([1, 2]), array([], dtype=int64), array([3])]
        """
        parts = list(parts)
        rows = _rows([part.values for part in parts], (), 0)
        lengths = [part.lengths for part in parts]
        return _ragged(
            _pack(rows, np.empty)[0], _offsets(np.concatenate(lengths) if lengths else np.zeros(0, np.int64))
        )

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
        _check_padding(side, multiple_of)
        rows = _Rows(self.list(), self.lengths, self.values.dtype, self.values.shape[1:], 0)
        return _pad(rows, value, side, multiple_of, empty, self.values)

    def packed(self) -> Packed:
        """The values and the offsets, without a copy."""
        return Packed(self.values, self.offsets)

    def item_of_value(self) -> IndexArray:
        """Which item each row of `values` came from: int64, what graph libraries call the batch vector."""
        return _items_of(self.lengths)

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
        return self._taken(np.arange(len(self))[_index(key)])

    def _taken(self, index: IndexArray) -> Ragged:
        lengths = self.lengths[index]
        offsets = _offsets(lengths)
        return _ragged(self.values[_runs(self.offsets[index], lengths)], offsets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        if self.values.dtype != other.values.dtype or not np.array_equal(self.offsets, other.offsets):
            return False
        return np.array_equal(self.values, other.values)

    def __repr__(self) -> str:
        lengths = self.lengths.tolist()
        shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
        rows = f" {tuple(self.values.shape[1:])}" if self.values.ndim > 1 else ""
        return f"Ragged({number_of(len(lengths), 'item')} of lengths {shown or 'none'}; {self.values.dtype}{rows})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _ragged, (self.values, self.offsets)


def _ragged(values: Any, offsets: Any) -> Ragged:
    """A `Ragged` of parts that fit together, which may be another library's arrays."""
    ragged = object.__new__(Ragged)
    ragged.values = values
    ragged.offsets = offsets
    return ragged


register_node(
    Ragged,
    Node(
        keys=lambda _: ("values", "offsets"),
        get=getattr,
        rebuild=lambda _, children: _ragged(*children),
        fixed=True,
        columns=False,
    ),
)


# -- rows, and the two ways to lay them out


class _Rows(NamedTuple):
    """Items that fit together: `lengths` along `axis`, all else (`trailing`: the other axes) equal."""

    items: Arrays
    lengths: IndexArray
    dtype: np.dtype[Any]
    trailing: tuple[int, ...]
    axis: int

    def shape(self, length: int) -> tuple[int, ...]:
        return (*self.trailing[: self.axis], length, *self.trailing[self.axis :])


def _rows(column: Column, path: Path, axis: int) -> _Rows:
    """Check the items of one field; `CollateError` names the field and two items that do not fit together."""
    found = [value if type(value) is np.ndarray else _item(value, path, item) for item, value in enumerate(column)]
    first = next((item for item in found if item is not None), np.zeros((0,) * (axis + 1)))
    trailing = _without(first.shape, axis)
    blank = np.empty((*trailing[:axis], 0, *trailing[axis:]), first.dtype)
    items: Arrays = [blank if item is None else item for item in found]
    ndims = [item.ndim for item in items]
    if min(ndims, default=first.ndim) <= axis:
        raise _no_axis(items, path, axis)
    if first.ndim > 1 or ndims.count(1) != len(ndims):
        shapes = [_without(item.shape, axis) for item in items]
        if shapes.count(trailing) != len(shapes):
            raise _rows_differ(items, path, axis)
    dtype = _one_dtype(items, first.dtype, path)
    lengths = map(len, items) if axis == 0 else (item.shape[axis] for item in items)
    return _Rows(items, np.fromiter(lengths, np.int64, len(items)), dtype, trailing, axis)


def _item(value: Any, path: Path, place: int) -> Array | None:
    """One item as an array; None for an empty list, which fits to every dtype."""
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


def _one_dtype(items: Arrays, first: np.dtype[Any], path: Path) -> np.dtype[Any]:
    dtypes = [item.dtype for item in items]
    if dtypes.count(first) == len(dtypes):
        return first
    if first.kind in "SU" and all(dtype.kind == first.kind for dtype in dtypes):
        return np.result_type(*dtypes)
    one = dtypes.index(first)
    other = next(place for place, dtype in enumerate(dtypes) if dtype != first)
    raise collate_error(
        path,
        (one, other),
        f"the items of a ragged field must have one dtype, but item {one} has {first} and item {other} has "
        f"{dtypes[other]}; convert them in the dataset",
    )


def _no_axis(items: Arrays, path: Path, axis: int) -> CollateError:
    place = next(place for place, item in enumerate(items) if item.ndim <= axis)
    return collate_error(
        path,
        (place,),
        f"a ragged field needs arrays of at least {axis + 1} axes, but item {place} has shape {items[place].shape}; "
        "leave the field out of ragged_collate(fields=...), or give its arrays a first axis",
    )


def _rows_differ(items: Arrays, path: Path, axis: int) -> CollateError:
    first = _without(items[0].shape, axis)
    other = next(place for place, item in enumerate(items) if _without(item.shape, axis) != first)
    return collate_error(
        path,
        (0, other),
        f"the items of a ragged field may differ along axis {axis} only, but item 0 has shape {items[0].shape} and "
        f"item {other} has {items[other].shape}; make the other axes equal in the dataset, or name another axis in "
        "ragged_collate(axis=...)",
    )


def _offsets(lengths: Any, empty: Empty = np.empty) -> IndexArray:
    offsets = empty((len(lengths) + 1,), np.int64)
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _items_of(lengths: IndexArray) -> IndexArray:
    return np.repeat(np.arange(len(lengths)), lengths)


def _mask(lengths: IndexArray, width: int, side: Side) -> npt.NDArray[np.bool_]:
    _check_padding(side, 1)
    places = np.arange(width)
    limit = lengths[:, None]
    mask: npt.NDArray[np.bool_] = places < limit if side == "right" else places >= width - limit
    return mask


def _index(key: Any) -> Any:
    """A key for an array of places; an empty list is a list of no numbers, not of no floats."""
    return key if isinstance(key, slice) or len(key) else np.zeros(0, np.int64)


def _check_padding(side: str, multiple_of: int) -> None:
    word("side", side, ("left", "right"))
    positive("multiple_of", multiple_of)


def _pack(rows: _Rows, empty: Empty, value: Any = 0, multiple_of: int = 1) -> tuple[Array, IndexArray]:
    """Values and offsets of the items, written once, and behind them padding up to a multiple."""
    offsets = _offsets(rows.lengths, empty)
    total = int(offsets[-1])
    length = _rounded(total, multiple_of)
    values = new_array(empty, rows.shape(length), rows.dtype)
    room = values
    if length > total:
        before = (slice(None),) * rows.axis
        room = values[(*before, slice(0, total))]
        values[(*before, slice(total, length))] = _fill_value(value, rows.dtype)
    items = rows.items
    plain = rows.axis == 0 and rows.dtype.kind not in "SU"
    if items and not (plain and write_joined(room, items)):
        np.concatenate(items, axis=rows.axis, out=room)
    return values, offsets


def _rounded(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def _pad(rows: _Rows, value: Any, side: Side, multiple_of: int, empty: Empty, packed: Array | None = None) -> Padded:
    """The padded form of the items, each written once; `packed` are the same rows in one array, if there is one."""
    fill = _fill_value(value, rows.dtype)
    longest = int(rows.lengths.max(initial=0))
    width = _rounded(longest, multiple_of)
    out = new_array(empty, (len(rows.items), *rows.shape(width)), rows.dtype)
    lengths = empty((len(rows.items),), np.int64)
    lengths[...] = rows.lengths
    if rows.axis == 0 and out.nbytes <= JOINED_BYTES * len(rows.items):
        if packed is None:
            packed = _pack(rows, np.empty)[0]
        out[...] = fill
        out[_mask(lengths, width, side)] = packed
        return Padded(out, lengths)
    items: Iterable[Array] = rows.items
    places = out
    if rows.axis:  # the ragged axis to the front, by views
        items = (np.moveaxis(item, rows.axis, 0) for item in items)
        places = np.moveaxis(out, rows.axis + 1, 1)
    for place, item, length in zip(places, items, rows.lengths.tolist(), strict=True):
        if side == "right":
            place[:length] = item
            place[length:] = fill
        else:
            place[width - length :] = item
            place[: width - length] = fill
    return Padded(out, lengths)


def _fill_value(value: Any, dtype: np.dtype[Any]) -> Array:
    """The padding as an array without axes, or `OptionError` if the dtype would change it."""
    fill = np.zeros((), dtype)
    if isinstance(value, int) and value == 0:
        return fill
    try:
        with np.errstate(all="ignore"):
            fill[...] = value
            exact = dtype.kind not in "iubSU" or bool(fill == value)
            kept = exact and (dtype.kind != "f" or bool(np.isfinite(fill) == np.isfinite(value)))
    except (TypeError, ValueError, OverflowError):
        kept = False
    if not kept:
        raise OptionError(f"the padding must fit into the dtype of the field, but {dtype} cannot hold {value!r}")
    return fill


# -- the collate function


def ragged_collate(
    form: Form = "padded",
    fields: Sequence[Any] | str | None = None,
    shift: Mapping[Any, Any] | None = None,
    *,
    axis: int | Mapping[Any, int] = 0,
    value: Any = 0,
    side: Side = "right",
    multiple_of: int = 1,
) -> RaggedCollate:
    """Make a collate function that batches fields of unequal length, and all else as `default_collate` does.

    `fields` are named as errors name them: `"boxes"`, `"target.boxes"`, `"[1]"` or `1` for places in a tuple; None
    takes every field that holds arrays with a first axis. A field becomes `Padded(values, lengths)`,
    `Packed(values, offsets)` or, as a list, views of one array. Named fields may also hold lists and `bytes`.

    `shift={"faces": "verts"}` adds to the index field `faces` the number of `verts` (rows, or an int field's value)
    that stand before the item in the batch. It holds for the packed form; in the others indices keep their own numbers.
    `axis` is the one that differs, for all fields or by field (`{"edge_index": 1}`). `value` is the padding, for all or
    by field, 0 where it is not given, and -1 for index fields. `side` and `multiple_of` are those of `Ragged.padded`;
    in the packed form the rows of all items together are padded at the end up to a multiple, so that batches have few
    different shapes.

    The function pickles, and a loader lets it write straight into a batch's memory. `OptionError` for options that
    cannot work; while batching, `CollateError` names the field and two items whose other axes or dtypes differ.

    >>> samples = [{"tokens": np.array([5, 6, 7]), "label": 0}, {"tokens": np.array([8]), "label": 1}]
    >>> ragged_collate("packed")(samples)
    {'tokens': Packed(values=array([5, 6, 7, 8]), offsets=array([0, 3, 4])), 'label': array([0, 1])}
    """
    word("form", form, ("padded", "packed", "list"))
    _check_padding(side, multiple_of)
    if not isinstance(fields, (str, int, type(None))):
        fields = tuple(members("fields", fields, "a name, names or None"))
    named = (fields,) if isinstance(fields, (str, int)) else fields
    axes, axis = (dict(axis), 0) if isinstance(axis, Mapping) else ({}, axis)
    fills, value = (dict(value), 0) if isinstance(value, Mapping) else ({}, value)
    if shift is not None and not isinstance(shift, Mapping):
        raise OptionError(f"shift must name for each index field what it counts, {{field: counted}}, got {shift!r}")
    shift = dict(shift or {})
    for option, mapping in (("shift", shift), ("axis", axes), ("value", fills)):
        for name in mapping:
            if named is not None and name not in named:
                raise OptionError(f"{option} names the field {name!r}, which must be one of fields={list(named)!r}")
    for number in (axis, *axes.values()):
        integer("axis", number, 0, "a non-negative int, or one for each field")
    return RaggedCollate(form, named, shift, axes, fills, axis, value, side, multiple_of)


@dataclass(frozen=True)
class RaggedCollate:
    """What `ragged_collate` makes; `accepts_empty` tells a loader that it writes into the memory it is given."""

    accepts_empty: ClassVar[bool] = True

    form: Form
    fields: tuple[Any, ...] | None
    shift: dict[Any, Any]
    axes: dict[Any, int]
    fills: dict[Any, Any]
    axis: int
    fill: Any
    side: Side
    multiple_of: int

    def __call__(self, samples: Iterable[Any], empty: Empty = np.empty) -> Any:
        samples = list(samples)
        return collate(samples, empty, _Plan(self, samples, empty) if samples else None)


class _Plan:
    """One batch in the making: the options of `ragged_collate` by the paths of the fields."""

    def __init__(self, options: RaggedCollate, samples: Column, empty: Empty) -> None:
        first = samples[0]
        self.options = options
        self.samples = samples
        self.empty = empty
        self.fields = None if options.fields is None else {_find(first, name) for name in options.fields}
        self.shift = {_find(first, name): _find(first, counted) for name, counted in options.shift.items()}
        self.axes = {_find(first, name): axis for name, axis in options.axes.items()}
        self.fills = {_find(first, name): value for name, value in options.fills.items()}

    def __call__(self, column: Column, path: Path) -> Any:
        if self.fields is not None:
            if path not in self.fields or any(value is None for value in column):
                return NotImplemented
        elif not holds_arrays(column):
            return NotImplemented
        rows = _rows(column, path, self.axes.get(path, self.options.axis))
        if self.options.form == "padded":
            return self.padded(rows, path)
        if self.options.form == "packed":
            return self.packed(rows, path)
        values, offsets = _pack(rows, self.empty)
        before = (slice(None),) * rows.axis
        return [values[(*before, slice(start, stop))] for start, stop in pairwise(offsets.tolist())]

    def padded(self, rows: _Rows, path: Path) -> Padded:
        with self.naming(path):
            return _pad(rows, self.fill(path), self.options.side, self.options.multiple_of, self.empty)

    def packed(self, rows: _Rows, path: Path) -> Packed:
        with self.naming(path):
            values, offsets = _pack(rows, self.empty, self.fill(path), self.options.multiple_of)
        if path in self.shift:
            self.add_starts(values[(*(slice(None),) * rows.axis, slice(0, int(offsets[-1])))], rows, path)
        return Packed(values, offsets)

    def fill(self, path: Path) -> Any:
        return self.fills.get(path, -1 if path in self.shift else self.options.fill)

    @contextmanager
    def naming(self, path: Path) -> Iterator[None]:
        """The padding may not fit into a field's dtype."""
        try:
            yield
        except OptionError as error:
            raise collate_error(path, (), f"{error}; give ragged_collate(value=...) or another dtype") from None

    def add_starts(self, values: Array, rows: _Rows, path: Path) -> None:
        """Raise each item's indices by the number of things that stand before it, in place."""
        counted = self.shift[path]
        counts = [self.count(sample, counted, item) for item, sample in enumerate(self.samples)]
        total = sum(counts)
        if rows.dtype.kind not in "iu" or total - 1 > np.iinfo(rows.dtype).max:
            raise collate_error(
                path,
                (),
                f"an index field that is shifted needs an integer dtype that holds {total - 1}, the last number of "
                f"{path_text(counted)} in the batch, but it has {rows.dtype}; convert it to int64 in the dataset",
            )
        starts = _offsets(counts)[:-1].astype(rows.dtype)
        along = [1] * values.ndim
        along[rows.axis] = -1
        values += np.repeat(starts, rows.lengths).reshape(along)

    def count(self, sample: Any, path: Path, item: int) -> int:
        try:
            value = _at(sample, path)
        except LookupError:
            value = None
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return int(value)
        try:
            shape = getattr(value, "shape", None)
            return int(len(value) if shape is None else shape[self.axes.get(path, self.options.axis)])
        except (TypeError, IndexError):
            raise collate_error(
                path,
                (item,),
                f"an index field counts it, so it must have rows or be an int, but item {item} is {value!r}",
            ) from None


_PIECE = re.compile(r"""\[(-?\d+)\]|\[(['"])(.*?)\2\]|([^.\[\]]+)""")


def _paths(name: Any) -> list[Path]:
    """The ways that a field's name can be read: a key as it stands, or a path as errors write it."""
    if isinstance(name, tuple):
        return [name]
    if not isinstance(name, str):
        return [(name,)]
    pieces = _PIECE.finditer(name)
    return [(name,), tuple(int(p[1]) if p[1] else p[3] if p[2] else p[4] for p in pieces)]


def _find(sample: Any, name: Any) -> Path:
    """The path of a named field in a sample, or `CollateError` with the names that there are."""
    for path in _paths(name):
        try:
            _at(sample, path)
        except LookupError:
            continue
        return path
    node = node_of(type(sample))
    names = [path_text((key,)) for key in node.keys(sample)] if node else []
    raise CollateError(
        f"ragged_collate names the field {name!r}, which the samples do not have; their fields are "
        f"{', '.join(names) or 'none: a sample is ' + type(sample).__name__}",
        str(name),
        (0,),
    )


def _at(sample: Any, path: Path) -> Any:
    for key in path:
        node = node_of(type(sample))
        if node is None or key not in node.keys(sample):
            raise LookupError(key)
        sample = node.get(sample, key)
    return sample


# -- rows of a fixed length


class PackedRows(NamedTuple):
    """Where `pack_sequences` puts sequences: `rows` rows of `capacity` places, no sequence split.

    `row` and `start` (int64, one a sequence) say where it begins, `lengths` how long it is; `fill` is the share of the
    places that are not padding.

    >>> packing = pack_sequences([2, 3, 1], capacity=4)
    >>> packing.rows, packing.row, packing.start, packing.fill
    (2, array([1, 0, 0]), array([0, 0, 3]), 0.75)
    """

    row: IndexArray
    start: IndexArray
    lengths: IndexArray
    rows: int
    capacity: int
    fill: float

    @property
    def segment_ids(self) -> npt.NDArray[np.int32]:
        """Which sequence of its row each place belongs to, counted from 1, 0 for padding: int32, (rows, capacity)."""
        return self._spread(np.repeat(_number_in_row(self.row, self.start, self.lengths), self.lengths))

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Which place of its sequence each place is, 0 for padding: int32, (rows, capacity)."""
        return self._spread(_runs(np.zeros_like(self.lengths), self.lengths))

    def _places(self) -> IndexArray:
        """For each token, sequence by sequence, its place among all `rows * capacity`."""
        return _runs(self.row * self.capacity + self.start, self.lengths)

    def _spread(self, numbers: IndexArray) -> npt.NDArray[np.int32]:
        out = np.zeros(self.rows * self.capacity, np.int32)
        out[self._places()] = numbers
        return out.reshape(self.rows, self.capacity)

    def place(self, sequences: Ragged | Iterable[Any], value: Any = 0, *, empty: Empty = np.empty) -> Array:
        """Write the sequences, of those lengths, into one array of shape (rows, capacity, ...), the rest is `value`.

        >>> packing = pack_sequences([2, 3, 1], capacity=4)
        >>> packing.place([[1, 2], [3, 4, 5], [6]])
        array([[3, 4, 5, 6],
               [1, 2, 0, 0]])
        """
        ragged = sequences if isinstance(sequences, Ragged) else Ragged.from_list(sequences)
        if not np.array_equal(ragged.lengths, self.lengths):
            raise OptionError("the sequences must have the lengths that were packed, in the same order")
        values = ragged.values
        fill = _fill_value(value, values.dtype)
        out = new_array(empty, (self.rows, self.capacity, *values.shape[1:]), values.dtype)
        out[...] = fill
        out.reshape((self.rows * self.capacity, *values.shape[1:]))[self._places()] = values
        return out


def pack_sequences(lengths: Any, capacity: int) -> PackedRows:
    """Pack sequences into as few rows of `capacity` places as first-fit decreasing finds, none of them split.

    The longest come first (equal ones in their own order), each into the first row that has room: at most 11/9 of the
    least possible number of rows, plus one (Dosa, "The tight bound of first fit decreasing bin-packing algorithm",
    ESCAPE 2007). Work goes with the number of *different* lengths times that of rows. `OptionError` for a sequence
    longer than a row.

    >>> packing = pack_sequences([2, 3, 1], capacity=4)
    >>> packing.segment_ids
    array([[1, 1, 1, 2],
           [1, 1, 0, 0]], dtype=int32)
    >>> packing.positions
    array([[0, 1, 2, 0],
           [0, 1, 0, 0]], dtype=int32)
    >>> packing.row, packing.fill
    (array([1, 0, 0]), 0.75)
    """
    lengths = _checked_lengths(lengths, capacity)
    row, start, rows = _first_fit(lengths, capacity)
    fill = int(lengths.sum()) / (rows * capacity) if rows else 1.0
    return PackedRows(row, start, lengths, rows, int(capacity), fill)


def _checked_lengths(lengths: Any, capacity: int) -> IndexArray:
    positive("capacity", capacity)
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise OptionError(f"lengths must be a flat list of integers, got shape {array.shape} and dtype {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array > capacity))
    if bad.size:
        item = int(bad[0])
        raise OptionError(
            f"every length must lie between 0 and the capacity, {capacity}, but sequence {item} has {array[item]}; cut "
            "it, leave it out, or raise the capacity"
        )
    return array.astype(np.int64, copy=False)


def _first_fit(lengths: IndexArray, capacity: int) -> tuple[IndexArray, IndexArray, int]:
    """Row and start of each sequence, and the number of rows; all sequences of one length are placed at once.

    Equal sequences fill the first row with room until it has none, then the next: each row takes as many as fit into
    its room, until there are no more. Rows that are not open yet stand behind the others, with all their room.
    """
    row = np.zeros(len(lengths), np.int64)
    start = np.zeros(len(lengths), np.int64)
    room = np.full(len(lengths), capacity)
    rows = 0
    order = np.argsort(-lengths, kind="stable")
    sizes, begins, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    for size, begin, count in zip((-sizes).tolist(), begins.tolist(), counts.tolist(), strict=True):
        members = order[begin : begin + count]
        if size == 0:  # needs no room: at the end of the first row
            start[members] = capacity - room[0]
            rows = max(rows, 1)
            break
        open_to = np.flatnonzero(room[: rows + count] >= size)[:count]
        fits = room[open_to] // size
        taken = np.clip(count - (np.cumsum(fits) - fits), 0, fits)
        row[members] = np.repeat(open_to, taken)
        start[members] = _runs(capacity - room[open_to], taken, size)
        room[open_to] -= size * taken
        rows = max(rows, int(row[members[-1]]) + 1)
    return row, start, rows


def _runs(starts: IndexArray, lengths: IndexArray, step: int = 1) -> IndexArray:
    """The numbers `start, start + step, ...`, `length` of them, for each pair."""
    offsets = _offsets(lengths)
    runs: IndexArray = step * np.arange(offsets[-1]) + np.repeat(starts - step * offsets[:-1], lengths)
    return runs


def _number_in_row(row: IndexArray, start: IndexArray, lengths: IndexArray) -> IndexArray:
    """Each sequence's number among those of its row, from 1; sequences without places have 0."""
    number = np.zeros(len(row), np.int64)
    kept = np.flatnonzero(lengths)
    order = kept[np.lexsort((start[kept], row[kept]))]
    _, first, counts = np.unique(row[order], return_index=True, return_counts=True)
    number[order] = np.arange(len(order)) - np.repeat(first, counts) + 1
    return number
