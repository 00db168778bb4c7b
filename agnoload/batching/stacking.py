"""The arrays of one column in one array, written once, and the errors for a column whose values do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.batching.tree import Path, path_text
from agnoload.errors import CollateError
from agnoload.protocols import Empty

Array = npt.NDArray[Any]
Column = list[Any]
"""The values that one field has in all samples."""

Hook = Callable[[Column, Path], Any]
"""Asked first for every column; `NotImplemented` leaves the column to the rules."""

_dtype = attrgetter("dtype")
_ndim = attrgetter("ndim")
_shape = attrgetter("shape")

JOINED_BYTES = 2048
"""Up to this size of an item `bytes.join` and one copy are faster than `np.concatenate`, which takes 70 ns an item."""


@dataclass(slots=True)
class CollateContext:
    """What all rules of one batch share: where memory comes from, and a hook that batches some columns its own way."""

    empty: Empty
    hook: Hook | None = None


def new_array(empty: Empty, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory for one array. References to objects mean nothing to another process, so these get memory of their own."""
    return np.empty(shape, dtype) if dtype.hasobject else empty(shape, dtype)


def stack(column: Column, path: Path, context: CollateContext) -> Array:
    """Stack plain arrays: find the common dtype, check the shapes, take memory, write."""
    first = column[0]
    count = len(column)
    dtype = first.dtype
    one_dtype = list(map(_dtype, column)).count(dtype) == count
    if not one_dtype:
        dtype = _common_dtype(column, path)
    shape = first.shape
    if len(shape) == 1:  # the lengths of the arrays are read faster than their shapes
        same = list(map(_ndim, column)).count(1) == count and list(map(len, column)).count(shape[0]) == count
    else:
        same = list(map(_shape, column)).count(shape) == count
    if not same:
        must, advice = "arrays must have one shape to be stacked", ragged_advice(path, first)
        raise differ(path, column, must, lambda array: f"shape {array.shape}", advice)
    out = new_array(context.empty, (count, *shape), dtype)
    if one_dtype and write_joined(out, column):
        return out
    if shape:
        np.concatenate(column, out=out.reshape((count * shape[0], *shape[1:])))
    else:
        np.concatenate([array.reshape(1) for array in column], out=out)
    return out


def write_joined(out: Array, arrays: Column) -> bool:
    """Write many small arrays of one dtype into `out`, one after the other, by way of `bytes.join`; False if that would
    not be faster than `np.concatenate`, or is not possible."""
    dtype = out.dtype
    if not 0 < out.nbytes <= JOINED_BYTES * len(arrays) or dtype.kind not in "fiubcUSV" or dtype.hasobject:
        return False
    try:
        joined = b"".join(arrays)
    except (TypeError, ValueError, BufferError):
        return False  # some array is not C-contiguous
    out[...] = np.frombuffer(joined, dtype).reshape(out.shape)
    return True


def _common_dtype(arrays: Column, path: Path) -> np.dtype[Any]:
    """The dtype that holds the values of all arrays, as NumPy promotes; never one that turns numbers into text."""
    distinct = list(dict.fromkeys(map(_dtype, arrays)))
    first = distinct[0]
    for misfit in distinct[1:]:
        try:
            np.result_type(first, misfit)
        except TypeError:
            break
        if _family(first) != _family(misfit) and "O" not in (first.kind, misfit.kind):
            break
    else:
        try:
            dtype: np.dtype[Any] = np.result_type(*distinct)
            return dtype
        except TypeError:  # each fits the first one, but not one another
            misfit = distinct[-1]
    other = next(item for item, array in enumerate(arrays) if array.dtype == misfit)
    raise collate_error(
        path,
        (0, other),
        f"arrays must have dtypes that NumPy can promote to one, but item 0 has dtype {first} and item {other} has "
        f"dtype {misfit}; convert them in the dataset",
    )


def _family(dtype: np.dtype[Any]) -> str:
    """Dtypes of one family mean the same kind of values."""
    if dtype.kind in "fiubc" or (dtype.kind == "V" and dtype.names is None and dtype.isbuiltin == 2):  # bfloat16
        return "number"
    return "T" if dtype.kind == "U" else dtype.kind


# -- errors


def collate_error(path: Path, items: tuple[int, ...], message: str) -> CollateError:
    """The error for a field; its text begins with the path."""
    return CollateError(f"{field_name(path)}: {message}", path_text(path), items)


def field_name(path: Path) -> str:
    return f"field {path_text(path)}" if path else "the samples"


def type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def differ(
    path: Path,
    column: Column,
    must: str,
    shown: Callable[[Any], str],
    advice: str,
    key: Callable[[Any], Any] | None = None,
) -> CollateError:
    """The error for values that must be equal in their `key` (else in what is `shown`): item 0, and one that is not."""
    key = key or shown
    first = key(column[0])
    other = next(item for item, value in enumerate(column) if key(value) != first)
    text = f"{must}, but item 0 has {shown(column[0])} and item {other} has {shown(column[other])}; {advice}"
    return collate_error(path, (0, other), text)


def lengths_differ(column: Column, path: Path) -> CollateError:
    must = f"a {type_name(type(column[0]))} is batched element by element, so all must have one length"
    return differ(path, column, must, lambda value: f"length {len(value)}", ragged_advice(path, column[0]))


def ragged_advice(path: Path, value: Any) -> str:
    if path:
        function = f"ragged_collate(fields=[{path_text(path)!r}])"
    else:
        function = "ragged_collate()" + ("" if hasattr(value, "dtype") else ", which takes samples that are arrays")
    return f"make them equal in the dataset, or batch them as ragged: collate_fn=agnoload.{function}"


def keys_differ(column: Column, path: Path) -> CollateError:
    first = column[0].keys()
    other = next(item for item, value in enumerate(column) if value.keys() != first)
    missing = [key for key in first if key not in column[other]]
    lacks, has = (other, 0) if missing else (0, other)
    keys = missing or [key for key in column[other] if key not in first]
    text = (
        f"all samples must have the same keys, but item {lacks} lacks {', '.join(map(repr, keys))}, which item {has} "
        "has; give every sample all keys, or drop them in the dataset"
    )
    return collate_error(path, (lacks, has), text)
