"""Datasets made of datasets: side by side, one after the other, some of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from agnoload._types import Samples
from agnoload.datasets.arrays import Row
from agnoload.datasets.base import (
    Dataset,
    Forwarding,
    check_indices,
    checked_index,
    getitems_of,
    length_of,
    rows_of,
    samples_of,
)
from agnoload.errors import OptionError
from agnoload.protocols import Empty, IndexArray
from agnoload.validate import brief, members

T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")


class StackDataset(Dataset[T_co], Forwarding):
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

    def _together(self, values: list[Any]) -> Any:
        return tuple(values) if isinstance(self.datasets, tuple) else dict(zip(self.datasets, values, strict=True))

    def __len__(self) -> int:
        return len(self._parts()[0])

    def __getitem__(self, index: Any, /) -> T_co:
        return self._together([part[index] for part in self._parts()])  # type: ignore[no-any-return]

    def __getitems__(self, indices: list[int], /) -> list[Any]:
        columns = [samples_of(part, indices) for part in self._parts()]
        return [self._together(list(values)) for values in zip(*columns, strict=True)]

    def forwards(self) -> bool:
        """Whether whole batches of samples are asked of what is inside."""
        return any(getitems_of(part) for part in self._parts())

    def __rows__(self) -> Any:
        rows = [rows_of(part) for part in self._parts()]
        return None if None in rows else self._together(rows)

    def __gather__(self, indices: IndexArray, empty: Empty) -> Any:
        return self._together([part.__gather__(indices, empty) for part in self._parts()])

    def __repr__(self) -> str:
        if isinstance(self.datasets, dict):
            return f"StackDataset({', '.join(f'{name}={brief(part)}' for name, part in self.datasets.items())})"
        return f"StackDataset({', '.join(map(brief, self.datasets))})"


class ConcatDataset(Dataset[T_co], Forwarding):
    """Datasets one after the other; `a + b` of two datasets is the same.

    `cumulative_sizes` lists where each one ends. Negative indices count from the end.

    >>> both = ConcatDataset(["ab", "cde"])
    >>> both[2], both[-1], both.cumulative_sizes
    ('c', 'e', [2, 5])
    """

    @overload
    def __init__(self, datasets: Iterable[Samples[T_co]]) -> None: ...
    @overload  # of different kinds
    def __init__(self: ConcatDataset[Any], datasets: Iterable[Any]) -> None: ...
    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets: list[Any] = list(members("the datasets of a ConcatDataset", datasets, "an iterable of datasets"))
        if not self.datasets:
            raise OptionError("ConcatDataset needs at least one dataset, got none")
        self.cumulative_sizes = list(accumulate(length_of(part, "ConcatDataset") for part in self.datasets))

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def _locate(self, index: Any) -> tuple[int, int]:
        """Which dataset, and the place within it."""
        place = checked_index(index, len(self), "a ConcatDataset")
        number = bisect_right(self.cumulative_sizes, place)
        return number, place - self._start(number)

    def _start(self, number: int) -> int:
        return self.cumulative_sizes[number - 1] if number else 0

    def __getitem__(self, index: Any, /) -> T_co:
        number, place = self._locate(index)
        return self.datasets[number][place]  # type: ignore[no-any-return]

    def __getitems__(self, indices: list[int], /) -> list[T_co]:
        samples: list[Any] = [None] * len(indices)
        shares: dict[int, list[tuple[int, int]]] = {}
        for item, index in enumerate(indices):
            number, place = self._locate(index)
            shares.setdefault(number, []).append((item, place))
        for number, share in shares.items():
            found = samples_of(self.datasets[number], [place for _, place in share])
            for (item, _), sample in zip(share, found, strict=True):
                samples[item] = sample
        return samples

    def forwards(self) -> bool:
        """Whether whole batches of samples are asked of what is inside."""
        return any(getitems_of(part) for part in self.datasets)

    def __rows__(self) -> Any:
        rows = [rows_of(part) for part in self.datasets]
        return rows[0] if all(other == rows[0] for other in rows[1:]) else None

    def __gather__(self, indices: IndexArray, empty: Empty) -> Any:
        check_indices(indices, len(self), "a ConcatDataset")
        places = indices % len(self) if len(indices) else indices
        numbers = np.searchsorted(self.cumulative_sizes, places, side="right")
        present = np.unique(numbers).tolist()
        if len(present) < 2:
            number = present[0] if present else 0
            return self.datasets[number].__gather__(places - self._start(number), empty)
        batch = _empty_batch(self.__rows__(), len(places), empty)
        for number in present:
            chosen = np.flatnonzero(numbers == number)
            _scatter(batch, chosen, self.datasets[number].__gather__(places[chosen] - self._start(number), np.empty))
        return batch

    def __repr__(self) -> str:
        return f"ConcatDataset([{', '.join(map(brief, self.datasets))}])"


def _empty_batch(rows: Any, size: int, empty: Empty) -> Any:
    if isinstance(rows, Row):
        return empty((size, *rows.shape), rows.dtype)
    if isinstance(rows, dict):
        return {name: _empty_batch(row, size, empty) for name, row in rows.items()}
    return tuple([_empty_batch(row, size, empty) for row in rows])


def _scatter(batch: Any, chosen: IndexArray, part: Any) -> None:
    """Write a part of a batch to its places."""
    if isinstance(batch, np.ndarray):
        batch[chosen] = part
    elif isinstance(batch, dict):
        for name, whole in batch.items():
            _scatter(whole, chosen, part[name])
    else:
        for whole, piece in zip(batch, part, strict=True):
            _scatter(whole, chosen, piece)


class Subset(Dataset[T_co], Forwarding):
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

    def __getitems__(self, indices: list[int], /) -> Any:
        chosen = self._chosen(np.asarray(indices, np.int64)).tolist()
        getitems = getitems_of(self.dataset)
        return samples_of(self.dataset, chosen) if getitems is None else getitems(chosen)

    def forwards(self) -> bool:
        """Whether whole batches of samples are asked of what is inside."""
        return getitems_of(self.dataset) is not None

    def __rows__(self) -> Any:
        return rows_of(self.dataset)

    def __gather__(self, indices: IndexArray, empty: Empty) -> Any:
        return self.dataset.__gather__(self._chosen(indices), empty)

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
