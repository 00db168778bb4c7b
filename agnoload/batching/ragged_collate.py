"""A collate function for fields of unequal length, which a batch holds in one of three forms: padded, packed, list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from agnoload.batching.collate import collate, holds_arrays
from agnoload.batching.ragged import (
    Form,
    Packed,
    Rows,
    Side,
    checked_rows,
    offsets_of,
    pack_rows,
    pad_rows,
    rows_along,
)
from agnoload.batching.stacking import Array, Column, Hook, collate_error
from agnoload.batching.tree import Path, node_of, path_text
from agnoload.errors import CollateError, OptionError
from agnoload.protocols import Empty
from agnoload.validate import integer, members, positive, word


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
        return collate(samples, empty, self._hook(samples, empty) if samples else None)

    def _hook(self, samples: Column, empty: Empty) -> Hook:
        """What batches the ragged fields of these samples; the options name fields, a hook is given their paths."""
        find = partial(_find, samples[0])
        fields = None if self.fields is None else set(map(find, self.fields))
        shift = {find(name): find(counted) for name, counted in self.shift.items()}
        axes = {find(name): axis for name, axis in self.axes.items()}
        fills = {find(name): value for name, value in self.fills.items()}
        multiple_of = 1 if self.form == "list" else self.multiple_of

        def ragged(column: Column, path: Path) -> Any:
            if fields is None:
                if not holds_arrays(column):
                    return NotImplemented
            elif path not in fields or any(value is None for value in column):
                return NotImplemented
            rows = checked_rows(column, path, axes.get(path, self.axis))
            fill = fills.get(path, -1 if path in shift else self.fill)
            try:
                if self.form == "padded":
                    return pad_rows(rows, fill, self.side, multiple_of, empty)
                values, offsets = pack_rows(rows, empty, fill, multiple_of)
            except OptionError as error:  # the padding does not fit into the dtype of the field
                raise collate_error(path, (), f"{error}; give ragged_collate(value=...) or another dtype") from None
            if self.form == "list":
                return [rows_along(rows.axis, values, start, stop) for start, stop in pairwise(offsets.tolist())]
            if path in shift:
                counted = shift[path]
                counts = _counts(samples, counted, axes.get(counted, self.axis))
                _add_starts(rows_along(rows.axis, values, 0, int(offsets[-1])), rows, counts, path, counted)
            return Packed(values, offsets)

        return ragged


def _counts(samples: Column, path: Path, axis: int) -> list[int]:
    """How many things each sample has that an index field counts: the rows of a field, or the number that it holds."""
    counts = []
    for item, sample in enumerate(samples):
        value = sample
        try:
            for key in path:
                node = node_of(type(value))
                value = None if node is None else node.get(value, key)
            if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
                counts.append(int(value))
            else:
                counts.append(int(value.shape[axis] if hasattr(value, "shape") else len(value)))
        except (AttributeError, LookupError, TypeError):
            message = f"an index field counts it, so it must have rows or be an int, but item {item} is {value!r}"
            raise collate_error(path, (item,), message) from None
    return counts


def _add_starts(values: Array, rows: Rows, counts: list[int], path: Path, counted: Path) -> None:
    """Add to each item's indices, in place, the number of counted things in the items before it."""
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


def _find(sample: Any, name: Any) -> Path:
    """The path of a named field in a sample, or `CollateError` with the names that there are."""
    node = node_of(type(sample))
    keys = [] if node is None else list(node.keys(sample))
    if name in keys:
        return (name,)
    path = _search(sample, path_text(name) if isinstance(name, tuple) else str(name), ())
    if path is None:
        fields = ", ".join(path_text((key,)) for key in keys) or f"none: a sample is {type(sample).__name__}"
        message = f"ragged_collate names the field {name!r}, which the samples do not have; their fields are {fields}"
        raise CollateError(message, str(name), (0,))
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
