"""Arrays whose first axis counts the samples: the dataset that needs no Python call for a row."""

from __future__ import annotations

import operator
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from agnoload.datasets.base import Dataset, Gather, check_indices
from agnoload.errors import OptionError
from agnoload.protocols import Empty, IndexArray
from agnoload.validate import number_of

Array = npt.NDArray[Any]
T_co = TypeVar("T_co", covariant=True)


class ArrayDataset(Dataset[T_co]):
    """One sample for each row of the arrays: a tuple of their rows, or a dict when they are given by name.

    `arrays` are anything that `np.asarray` takes, all with the same length; another library's arrays are converted
    once, here, and NumPy's are used as they are, without a copy. Sample `i` holds row `i` of each array, as a copy that
    the caller may write to, or a NumPy scalar where the array has one axis; a slice or a list of indices gives several
    rows at once. Whole batches are gathered in one indexing call an array. `OptionError` if lengths differ or an array
    has no axis, `IndexError` beyond the end.

    >>> import numpy as np
    >>> dataset = ArrayDataset(x=np.arange(6).reshape(3, 2), y=[0.5, 1.5, 2.5])
    >>> dataset[-1]
    {'x': array([4, 5]), 'y': np.float64(2.5)}
    >>> ArrayDataset(["a", "b"], [1, 2])[0]
    (np.str_('a'), np.int64(1))
    """

    arrays: tuple[Array, ...] | dict[str, Array]
    """What was given, as NumPy arrays."""

    @overload
    def __init__(self: ArrayDataset[tuple[Array, Array]], first: Any, second: Any, /) -> None: ...
    @overload
    def __init__(self: ArrayDataset[tuple[Array, ...]], *arrays: Any) -> None: ...
    @overload
    def __init__(self: ArrayDataset[dict[str, Array]], **named: Any) -> None: ...
    def __init__(self, *arrays: Any, **named: Any) -> None:
        if arrays and named:
            raise OptionError(
                f"ArrayDataset takes arrays by position or by name, not both; got {len(arrays)} and "
                f"{', '.join(named)}: name them all"
            )
        if not arrays and not named:
            raise OptionError("ArrayDataset needs at least one array, got none")
        given = named or dict(zip(map(str, range(len(arrays))), arrays, strict=True))
        converted = {name: _as_array(array, name) for name, array in given.items()}
        lengths = {name: len(array) for name, array in converted.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise OptionError(f"the arrays of an ArrayDataset must have the same length, got {listed}")
        self.arrays = converted if named else tuple(converted.values())

    @property
    def tensors(self) -> tuple[Array, ...]:
        """The arrays as a tuple, by the name that `TensorDataset` has for them elsewhere."""
        return self.arrays if isinstance(self.arrays, tuple) else tuple(self.arrays.values())

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any, /) -> T_co:
        try:
            place: Any = operator.index(index)
        except TypeError:
            if not isinstance(index, (slice, list, np.ndarray)):
                raise
            place = index
        try:
            rows = [array[place] for array in self.tensors]
        except IndexError:
            raise IndexError(f"index {place} is out of range for an ArrayDataset of length {len(self)}") from None
        # A view would let the caller's writing, in a transform say, reach the data of all later epochs.
        samples = [row.copy() if type(row) is np.ndarray else row for row in rows]
        sample: Any = tuple(samples) if isinstance(self.arrays, tuple) else dict(zip(self.arrays, samples, strict=True))
        return sample  # type: ignore[no-any-return]

    @property
    def __gather__(self) -> Gather | None:
        """Of numbers in the machine's byte order: there, rows of the array are what collating rows one by one gives."""
        dtypes = [array.dtype for array in self.tensors]
        numbers = [dtype.kind in "fiubc" or (dtype.kind == "V" and dtype.isbuiltin == 2) for dtype in dtypes]
        return self._gather if all(numbers) and all(dtype.isnative for dtype in dtypes) else None

    def _gather(self, indices: IndexArray, empty: Empty) -> Any:
        check_indices(indices, len(self), "an ArrayDataset")
        if isinstance(self.arrays, tuple):
            return tuple([_take(array, indices, empty) for array in self.arrays])
        return {name: _take(array, indices, empty) for name, array in self.arrays.items()}

    def __repr__(self) -> str:
        names = [f"{name}: " for name in self.arrays] if isinstance(self.arrays, dict) else [""] * len(self.tensors)
        shapes = [f"[{', '.join(map(str, array.shape[1:]))}]" if array.ndim > 1 else "" for array in self.tensors]
        fields = [f"{name}{array.dtype}{shape}" for name, array, shape in zip(names, self.tensors, shapes, strict=True)]
        return f"ArrayDataset({number_of(len(self), 'sample')} of {', '.join(fields)})"


TensorDataset = ArrayDataset


def _as_array(value: Any, name: str) -> Array:
    try:
        array = np.asarray(value)
    except Exception as error:
        raise OptionError(
            f"array {name} of an ArrayDataset must be something that np.asarray takes, got "
            f"{type(value).__name__}: {error}"
        ) from error
    if array.ndim == 0:
        hint = ": give its items by name, ArrayDataset(**arrays)" if isinstance(value, dict) else ""
        raise OptionError(
            f"array {name} of an ArrayDataset must have a first axis that counts the samples, got "
            f"{type(value).__name__} without axes{hint}"
        )
    return array


def _take(array: Array, indices: IndexArray, empty: Empty) -> Array:
    """`array[indices]`, written into new memory; the indices were checked, negative ones are fine."""
    out = empty((len(indices), *array.shape[1:]), array.dtype)
    if not array.flags.c_contiguous or not array.flags.aligned:  # `take` would copy the whole array to make it so
        out[...] = array[indices]
    elif len(indices):
        array.take(indices, axis=0, out=out, mode="wrap")  # with mode="raise" it would go through a buffer
    return out
