"""What all map-style datasets share, and how a loader asks one for a whole batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from agnoload._types import Samples
from agnoload.errors import OptionError
from agnoload.protocols import Empty, IndexArray
from agnoload.validate import brief, counted, name_of

if TYPE_CHECKING:
    from agnoload.datasets.combine import ConcatDataset

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")


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
        from agnoload.datasets.combine import ConcatDataset  # it is made of this class

        return ConcatDataset([self, other])

    def __repr__(self) -> str:
        return counted(self)

    def map(self, fn: Callable[[T_co], R]) -> MappedDataset[R]:
        """This dataset with each sample replaced by `fn(sample)`, called when the sample is loaded."""
        return MappedDataset(self, fn)


class Forwarding:
    """A dataset whose `__getitems__` only hands on: it offers it when something inside does."""

    def forwards(self) -> bool:
        raise NotImplementedError


class MappedDataset(Dataset[R], Forwarding):
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

    def __getitems__(self, indices: list[int], /) -> list[R]:
        return [self.function(sample) for sample in samples_of(self.dataset, indices)]

    def forwards(self) -> bool:
        return getitems_of(self.dataset) is not None

    def __repr__(self) -> str:
        return f"{brief(self.dataset)}.map({name_of(self.function)})"


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


Gather = Callable[[IndexArray, Empty], Any]
GetItems = Callable[[list[int]], Any]


def gather_of(dataset: Any) -> Gather | None:
    """The method that gives a whole batch, collated, for an int64 array of indices; None if there is none.

    It is called as `gather(indices, empty)`: the batch is written into what `empty(shape, dtype)` gives, and is what
    collating the samples would be. Nobody is asked who would need the samples one by one: a dataset around one that
    cannot, or a subclass with a `__getitem__` of its own.
    """
    return None if rows_of(dataset) is None else dataset.__gather__


def rows_of(dataset: Any) -> Any:
    """What the rows of a dataset look like that can be gathered: a dict, a tuple or a `Row`; None if they cannot."""
    if _has_nearer_getitem(type(dataset), "__gather__"):
        return None
    rows = getattr(dataset, "__rows__", None)
    return None if rows is None else rows()


def getitems_of(dataset: Any) -> GetItems | None:
    """The method that gives the samples of a list of indices in one call, or a `Batch`; None if there is none.

    A `__getitem__` that a subclass defines wins over a `__getitems__` that it inherits.
    """
    method = getattr(dataset, "__getitems__", None)
    if not callable(method) or _has_nearer_getitem(type(dataset), "__getitems__"):
        return None
    if isinstance(dataset, Forwarding) and not dataset.forwards():
        return None
    return method  # type: ignore[no-any-return]


def _has_nearer_getitem(kind: type, method: str) -> bool:
    """Whether `__getitem__` is defined in a subclass of the class that defines `method`."""
    for base in kind.__mro__:
        if method in vars(base):
            return False
        if "__getitem__" in vars(base):
            return True
    return False


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
