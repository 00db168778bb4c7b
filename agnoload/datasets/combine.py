"""Datasets made of datasets: several side by side, or some samples of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from agnoload._types import Samples
from agnoload.datasets.base import (
    Dataset,
    Gather,
    GetItems,
    check_indices,
    checked_index,
    gather_of,
    getitems_of,
    length_of,
    samples_of,
)
from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.validate import brief

T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")


class StackDataset(Dataset[T_co]):
    """Datasets of one length side by side: sample `i` is the tuple of their samples `i`, or a dict when named.

    >>> StackDataset("ab", [1, 2])[1]
    ('b', 2)
    >>> StackDataset(image="ab", label=[1, 2])[0]
    {'image': 'a', 'label': 1}
    """

    datasets: tuple[Any, ...] | dict[str, Any]

    @overload
    def __init__(self: StackDataset[tuple[A, B]], first: Samples[A], second: Samples[B], /) -> None: ...
    @overload
    def __init__(self: StackDataset[tuple[Any, ...]], *datasets: Samples[Any]) -> None: ...
    @overload
    def __init__(self: StackDataset[dict[str, A]], **named: Samples[A]) -> None: ...
    @overload
    def __init__(self: StackDataset[dict[str, Any]], **named: Samples[Any]) -> None: ...
    def __init__(self, *datasets: Any, **named: Any) -> None:
        if bool(datasets) == bool(named):
            raise OptionError(
                "StackDataset takes at least one dataset, by position or by name but not both; got "
                f"{len(datasets)} by position and {len(named)} by name"
            )
        parts = named or dict(zip(map(str, range(len(datasets))), datasets, strict=True))
        lengths = {name: length_of(part, "StackDataset") for name, part in parts.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise OptionError(f"the datasets of a StackDataset must have the same length, got {listed}")
        self.datasets = named or datasets

    def _parts(self) -> list[Any]:
        return list(self.datasets.values() if isinstance(self.datasets, dict) else self.datasets)

    def _together(self, values: Iterable[Any]) -> Any:
        return tuple(values) if isinstance(self.datasets, tuple) else dict(zip(self.datasets, values, strict=True))

    def __len__(self) -> int:
        return len(self._parts()[0])

    def __getitem__(self, index: Any, /) -> T_co:
        return self._together([part[index] for part in self._parts()])  # type: ignore[no-any-return]

    @property
    def __getitems__(self) -> GetItems | None:
        parts = self._parts()
        if not any(map(getitems_of, parts)):
            return None
        return lambda indices: [*map(self._together, zip(*(samples_of(part, indices) for part in parts), strict=True))]

    @property
    def __gather__(self) -> Gather | None:
        gathers = [gather for gather in map(gather_of, self._parts()) if gather is not None]
        if len(gathers) < len(self.datasets):
            return None
        return lambda indices, empty: self._together([gather(indices, empty) for gather in gathers])

    def __repr__(self) -> str:
        if isinstance(self.datasets, dict):
            return f"StackDataset({', '.join(f'{name}={brief(part)}' for name, part in self.datasets.items())})"
        return f"StackDataset({', '.join(map(brief, self.datasets))})"


class Subset(Dataset[T_co]):
    """Some of a dataset: those at `indices`, in that order, or those where a boolean mask is true.

    `indices` becomes an int64 array. A mask must be as long as the dataset; an index that the dataset cannot have is an
    `OptionError` at once, negative ones count from the end.

    >>> list(Subset("abcd", [3, 0]))
    ['d', 'a']
    >>> list(Subset("abcd", [True, False, False, True]))
    ['a', 'd']
    """

    def __init__(self, dataset: Samples[T_co], indices: Any) -> None:
        self.dataset: Any = dataset
        self.indices = _as_indices(indices, length_of(dataset, "Subset"))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any, /) -> T_co:
        if isinstance(index, (slice, list)):  # several at once, where the dataset has that
            return self.dataset[self.indices[index].tolist()]  # type: ignore[no-any-return]
        return self.dataset[int(self.indices[checked_index(index, len(self), "a Subset")])]  # type: ignore[no-any-return]

    @property
    def __getitems__(self) -> GetItems | None:
        inner = getitems_of(self.dataset)
        return None if inner is None else lambda indices: inner(self._chosen(np.asarray(indices, np.int64)).tolist())

    @property
    def __gather__(self) -> Gather | None:
        inner = gather_of(self.dataset)
        return None if inner is None else lambda indices, empty: inner(self._chosen(indices), empty)

    def _chosen(self, indices: IndexArray) -> IndexArray:
        check_indices(indices, len(self), "a Subset")
        return self.indices[indices]

    def __repr__(self) -> str:
        return f"Subset({len(self)} of {brief(self.dataset)})"


def _as_indices(indices: Any, length: int) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(indices if hasattr(indices, "__len__") else list(indices))
    except (TypeError, ValueError) as error:
        raise OptionError(f"the indices of a Subset must be ints or a boolean mask, got {indices!r}") from error
    if array.dtype == bool:
        if array.shape != (length,):
            raise OptionError(
                f"the mask of a Subset must have one entry for each of the dataset's {length} samples, got shape "
                f"{array.shape}"
            )
        return np.flatnonzero(array).astype(np.int64, copy=False)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise OptionError(
            f"the indices of a Subset must be a list of ints or a boolean mask, got dtype {array.dtype} and shape "
            f"{array.shape}"
        )
    found = array.astype(np.int64)
    try:
        check_indices(found, length, "the dataset of a Subset")
    except IndexError as error:
        raise OptionError(str(error)) from None
    return found
