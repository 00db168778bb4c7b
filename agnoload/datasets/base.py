"""What all map-style datasets share, what their `map` and `+` make, and how a loader asks one for a whole batch.

A dataset is asked in one of three ways. `__getitem__`: one sample. `__getitems__`: the samples of a list of indices in
one call. `__gather__`, which only datasets of this library have: a batch that is collated already, written where the
loader wants it. What wraps a dataset has the last two as properties that are None if nothing inside offers them.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from agnoload._types import Samples
from agnoload.batching.tree import map_leaves, walk
from agnoload.errors import OptionError
from agnoload.protocols import Empty, IndexArray
from agnoload.validate import brief, counted, members, name_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")

Gather = Callable[[IndexArray, Empty], Any]
GetItems = Callable[[list[int]], Any]


class Dataset(Generic[T_co]):
    """Subclass it, give `__getitem__` and `__len__`, and load it; anything else with these two will do as well.

    It adds `dataset + other` (one after the other) and `dataset.map(function)`. A dataset may also offer
    `__getitems__(indices)`, called once a batch with a list of ints: it returns the list of samples, or `Batch(data)`
    for a batch that is put together already.

    >>> class Squares(Dataset[int]):
    ...     def __len__(self): return 4
    ...     def __getitem__(self, index): return index * index
    >>> [*(Squares() + Squares().map(lambda square: -square))]
    [0, 1, 4, 9, 0, -1, -4, -9]
    """

    def __getitem__(self, index: Any, /) -> T_co:
        raise NotImplementedError(f"{type(self).__name__} must define __getitem__")

    def __add__(self, other: Samples[S]) -> ConcatDataset[T_co | S]:
        return ConcatDataset([self, other])

    def __repr__(self) -> str:
        return counted(self)

    def map(self, fn: Callable[[T_co], R]) -> MappedDataset[R]:
        """This dataset with each sample replaced by `fn(sample)`, called when the sample is loaded."""
        return MappedDataset(self, fn)


class MappedDataset(Dataset[R]):
    """`dataset` with each sample replaced by `function(sample)`, called whenever the sample is loaded.

    `function` may draw from `agnoload.sample_rng()`: another number for each sample and epoch.

    >>> MappedDataset(["a", "b"], str.upper)[1]
    'B'
    """

    def __init__(self, dataset: Samples[S], function: Callable[[S], R]) -> None:
        need_map_style(dataset, "MappedDataset")
        if not callable(function):
            raise OptionError(f"map needs a function of one sample, got {function!r}")
        self.dataset: Any = dataset
        self.function = function

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any, /) -> R:
        return self.function(self.dataset[index])

    @property
    def __getitems__(self) -> GetItems | None:
        if getitems_of(self.dataset) is None:
            return None
        return lambda indices: [self.function(sample) for sample in samples_of(self.dataset, indices)]

    def __repr__(self) -> str:
        return f"{brief(self.dataset)}.map({name_of(self.function)})"


class ConcatDataset(Dataset[T_co]):
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
        self._starts = [0, *self.cumulative_sizes]

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def _locate(self, index: Any) -> tuple[int, int]:
        """Which dataset, and the place within it."""
        place = checked_index(index, len(self), "a ConcatDataset")
        number = bisect_right(self.cumulative_sizes, place)
        return number, place - self._starts[number]

    def __getitem__(self, index: Any, /) -> T_co:
        number, place = self._locate(index)
        return self.datasets[number][place]  # type: ignore[no-any-return]

    @property
    def __getitems__(self) -> GetItems | None:
        return self._samples if any(map(getitems_of, self.datasets)) else None

    def _samples(self, indices: list[int]) -> list[T_co]:
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

    @property
    def __gather__(self) -> Gather | None:
        """Only of parts whose rows are alike: else collating promotes their dtypes, or refuses their shapes."""
        gathers = [gather for gather in map(gather_of, self.datasets) if gather is not None]
        if len(gathers) < len(self.datasets):
            return None
        nothing = [gather(np.zeros(0, np.int64), np.empty) for gather in gathers]
        rows = [[(path, leaf.shape[1:], leaf.dtype) for path, leaf in walk(batch)] for batch in nothing]
        return partial(self._gather, gathers) if all(other == rows[0] for other in rows) else None

    def _gather(self, gathers: list[Gather], indices: IndexArray, empty: Empty) -> Any:
        check_indices(indices, len(self), "a ConcatDataset")
        places = indices % len(self) if len(indices) else indices
        numbers = np.searchsorted(self.cumulative_sizes, places, side="right")
        present = np.unique(numbers).tolist() or [0]
        if len(present) == 1:
            return gathers[present[0]](places - self._starts[present[0]], empty)
        batch = None
        for number in present:
            chosen = np.flatnonzero(numbers == number)
            part = gathers[number](places[chosen] - self._starts[number], np.empty)
            if batch is None:
                batch = map_leaves(lambda rows: empty((len(places), *rows.shape[1:]), rows.dtype), part)
            for (_, whole), (_, rows) in zip(walk(batch), walk(part), strict=True):
                whole[chosen] = rows
        return batch

    def __repr__(self) -> str:
        return f"ConcatDataset([{', '.join(map(brief, self.datasets))}])"


class Batch(Generic[T]):
    """A batch that is put together already: return `Batch(data)` from `__getitems__`, and `data` is what is delivered.

    >>> Batch({"x": [1, 2]}).data
    {'x': [1, 2]}
    """

    __slots__ = ("data",)

    def __init__(self, data: T) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"Batch({self.data!r})"


def gather_of(dataset: Any) -> Gather | None:
    """The function that gives a whole batch, collated, for an int64 array of indices; None if there is none.

    It is called as `gather(indices, empty)`: the batch is written into what `empty(shape, dtype)` gives, and is what
    collating the samples would be. A `__getitem__` that a subclass defines wins over a `__gather__` that it inherits.
    """
    gather: Gather | None = _nearest(dataset, "__gather__")
    return gather


def getitems_of(dataset: Any) -> GetItems | None:
    """The function that gives the samples of a list of indices in one call, or a `Batch`; None if there is none.

    A `__getitem__` that a subclass defines wins over a `__getitems__` that it inherits.
    """
    getitems: GetItems | None = _nearest(dataset, "__getitems__")
    return getitems


def _nearest(dataset: Any, name: str) -> Any:
    """The method of that name, or what a property of that name gives; None below a `__getitem__` of a subclass."""
    for base in type(dataset).__mro__:
        if name in vars(base):
            break
        if "__getitem__" in vars(base):
            return None
    method = getattr(dataset, name, None)
    return method if callable(method) else None


def samples_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples of several indices, in one call where the dataset offers that."""
    getitems = getitems_of(dataset)
    if getitems is not None:
        samples = getitems(list(indices))
        if not isinstance(samples, Batch):
            if len(samples) != len(indices):
                raise OptionError(
                    f"__getitems__ of {type(dataset).__name__} must return one sample for each of the {len(indices)} "
                    f"indices, got {len(samples)}"
                )
            return list(samples)
    return [dataset[index] for index in indices]


def need_map_style(dataset: Any, who: str) -> None:
    """Refuse what has no `__getitem__`."""
    if not hasattr(dataset, "__getitem__"):
        raise OptionError(
            f"{who} needs a dataset with __getitem__, got {type(dataset).__name__}; a stream has map, filter, shuffle "
            "and + of its own"
        )
    refuse_table(dataset, who)


def refuse_table(dataset: Any, who: str) -> None:
    """Refuse what is indexed by its columns, or by labels: known by its looks, since no library is imported for it."""
    kind = type(dataset)
    names = next((name for name in ("column_names", "columns") if hasattr(kind, name)), None)
    if names is not None and (hasattr(kind, "schema") or hasattr(kind, "dtypes")) and not hasattr(kind, "__getitems__"):
        raise OptionError(
            f"{who} needs a dataset with a sample for each index, got a table ({kind.__name__}), which is indexed by "
            f"its columns: give agnoload.ArrayDataset(**{{name: table[name] for name in table.{names}}})"
        )
    if hasattr(kind, "iloc") and not np.array_equal(dataset.index, np.arange(len(dataset))):
        raise OptionError(
            f"{who} needs a dataset with a sample for each index from 0 on, got a {kind.__name__}, whose labels are "
            "others: give agnoload.ArrayDataset(series), or its to_numpy()"
        )


def length_of(dataset: Any, who: str) -> int:
    """`len(dataset)`, or `OptionError`."""
    need_map_style(dataset, who)
    try:
        return len(dataset)
    except TypeError:
        raise OptionError(f"{who} needs a dataset with a length, but {type(dataset).__name__} has none") from None


def checked_index(index: Any, length: int, what: str) -> int:
    """`index` as an int from 0 to `length - 1`; negative ones count from the end."""
    place = operator.index(index)
    if not -length <= place < length:
        raise IndexError(f"index {place} is out of range for {what} of length {length}")
    return place + length if place < 0 else place


def check_indices(indices: IndexArray, length: int, what: str) -> None:
    """The same for a whole batch: `IndexError` if one of them is out of range."""
    try:
        _probe(length)[indices]
    except IndexError:
        wrong = indices[(indices < -length) | (indices >= length)]
        raise IndexError(f"index {wrong[0]} is out of range for {what} of length {length}") from None


@lru_cache(maxsize=64)
def _probe(length: int) -> npt.NDArray[np.bool_]:
    """One byte that looks like an array of that length: to index it is the quickest check of indices there is, some
    0.3 microseconds where a look at the smallest and the largest takes 1.3, and 7 once the caches are cold."""
    return np.broadcast_to(np.False_, (length,))
