"""A collate function for fields of unequal length, which a batch holds in one of three forms: padded, packed, list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from agnoload.batching.collate import collate, holds_arrays
from agnoload.batching.ragged import Packed, Rows, Side, checked_rows, offsets_of, pack_rows, pad_rows, rows_along
from agnoload.batching.stacking import Array, Column, collate_error
from agnoload.batching.tree import Path, node_of, path_text
from agnoload.errors import CollateError, OptionError
from agnoload.protocols import Empty
from agnoload.validate import integer, members, positive, word

Form = Literal["padded", "packed", "list"]


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
    that come before the item in the batch. It holds for the packed form; in the others indices keep their own numbers.
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
    word("side", side, ("left", "right"))
    positive("multiple_of", multiple_of)
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
        return collate(samples, empty, _RaggedHook(self, samples, empty) if samples else None)


class _RaggedHook:
    """The hook of one batch: the options of `ragged_collate` by the paths of the fields."""

    def __init__(self, options: RaggedCollate, samples: Column, empty: Empty) -> None:
        self.options = options
        self.samples = samples
        self.empty = empty
        find = partial(_find, samples[0])
        self.fields = None if options.fields is None else set(map(find, options.fields))
        self.shift = {find(name): find(counted) for name, counted in options.shift.items()}
        self.axes = {find(name): axis for name, axis in options.axes.items()}
        self.fills = {find(name): value for name, value in options.fills.items()}

    def __call__(self, column: Column, path: Path) -> Any:
        if self.fields is not None:
            if path not in self.fields or any(value is None for value in column):
                return NotImplemented
        elif not holds_arrays(column):
            return NotImplemented
        options = self.options
        rows = checked_rows(column, path, self.axes.get(path, options.axis))
        fill = self.fills.get(path, -1 if path in self.shift else options.fill)
        multiple_of = 1 if options.form == "list" else options.multiple_of
        try:
            if options.form == "padded":
                return pad_rows(rows, fill, options.side, multiple_of, self.empty)
            values, offsets = pack_rows(rows, self.empty, fill, multiple_of)
        except OptionError as error:  # the padding does not fit into the dtype of the field
            raise collate_error(path, (), f"{error}; give ragged_collate(value=...) or another dtype") from None
        if options.form == "list":
            return [rows_along(rows.axis, values, start, stop) for start, stop in pairwise(offsets.tolist())]
        if path in self.shift:
            self.add_starts(rows_along(rows.axis, values, 0, int(offsets[-1])), rows, path)
        return Packed(values, offsets)

    def add_starts(self, values: Array, rows: Rows, path: Path) -> None:
        """Add to each item's indices the number of counted things in the items before it, in place."""
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
        starts = offsets_of(counts)[:-1].astype(rows.dtype)
        shape = [1] * values.ndim
        shape[rows.axis] = -1
        values += np.repeat(starts, rows.lengths).reshape(shape)

    def count(self, sample: Any, path: Path, item: int) -> int:
        """How many things an item has that an index field counts: its rows, or the number that it holds."""
        value = sample
        try:
            for key in path:
                node = node_of(type(value))
                value = None if node is None else node.get(value, key)
            if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
                return int(value)
            shape = getattr(value, "shape", None)
            return int(len(value) if shape is None else shape[self.axes.get(path, self.options.axis)])
        except (AttributeError, LookupError, TypeError):
            raise collate_error(
                path,
                (item,),
                f"an index field counts it, so it must have rows or be an int, but item {item} is {value!r}",
            ) from None


def _find(sample: Any, name: Any) -> Path:
    """The path of a named field in a sample, or `CollateError` with the names that there are."""
    node = node_of(type(sample))
    keys = [] if node is None else list(node.keys(sample))
    if name in keys:
        return (name,)
    path = _search(sample, path_text(name) if isinstance(name, tuple) else str(name), ())
    if path is None:
        fields = ", ".join(path_text((key,)) for key in keys) or f"none: a sample is {type(sample).__name__}"
        raise CollateError(
            f"ragged_collate names the field {name!r}, which the samples do not have; their fields are {fields}",
            str(name),
            (0,),
        )
    return path


def _search(tree: Any, name: str, path: Path) -> Path | None:
    """The path whose text is `name`, at or below a node of the sample at `path`; only what it begins with is opened."""
    node = node_of(type(tree))
    if node is None:
        return None
    for key in node.keys(tree):
        text = path_text(here := (*path, key))
        if text == name:
            return here
        if name.startswith(text) and (found := _search(node.get(tree, key), name, here)) is not None:
            return found
    return None
