"""The samplers that know only how many samples there are: in order, in random order, a subset of them, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.base import AroundSampler, SeededSampler, digest, vector
from agnoload.samplers.order import BatchOrder, Order, batched, in_chunks, in_sequence
from agnoload.samplers.shuffle import shuffled
from agnoload.seeding import Purpose, Rewinder
from agnoload.validate import brief, flag, number_of, positive, sized

DRAWS = 1 << 12
"""Part of the saved format: draws with replacement are made in chunks of this size, each with a key of its own."""


class SequentialSampler(SeededSampler[int]):
    """0, 1, ... `len(data_source) - 1`.

    >>> list(SequentialSampler("abc"))
    [0, 1, 2]
    """

    def __init__(self, data_source: Sized) -> None:
        super().__init__()
        self.data_source = sized("data_source", data_source)

    def __len__(self) -> int:
        return len(self.data_source)

    def order(self, seed: int, epoch: int) -> Order:
        return in_sequence(len(self))

    def __repr__(self) -> str:
        return f"SequentialSampler({len(self)})"


class RandomSampler(SeededSampler[int]):
    """All indices of `data_source` in a random order, a different one each epoch.

    `num_samples` draws that many instead. Without replacement, shuffles follow one another, so no index repeats before
    all have come; with `replacement`, each draw is uniform over all. Only `len(data_source)` is used. Below 2**20 items
    the order is an array; from there on it is a keyed bijection that needs no memory, see `shuffle.py`.
    `generator` (an int or a generator of NumPy's, Python's or the loader's backend) gives the seed, once.

    >>> sampler = RandomSampler(range(5), seed=0)
    >>> sorted(sampler)
    [0, 1, 2, 3, 4]
    >>> next(iter(RandomSampler(range(10**12), seed=0))) < 10**12
    True
    """

    _fixed = ("replacement",)

    def __init__(
        self, data_source: Sized, replacement: bool = False, num_samples: int | None = None, generator: Any = None, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(seed=seed, generator=generator)
        self.data_source = sized("data_source", data_source)
        self.replacement = flag("replacement", replacement)
        self._num_samples = None if num_samples is None else positive("num_samples", num_samples)
        if self._num_samples and not len(data_source):
            raise OptionError(f"num_samples must be 0 for an empty data_source, got {num_samples}")

    @property
    def num_samples(self) -> int:
        """The number of indices in an epoch."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

    def order(self, seed: int, epoch: int) -> Order:
        n, wanted = len(self.data_source), self.num_samples
        if self.replacement:
            return draws(wanted, seed, epoch, lambda rng, picked: rng.integers(n, size=DRAWS)[picked])
        if 0 < wanted == n:
            return shuffled(n, seed, epoch)

        @lru_cache(1)
        def shuffle(number: int) -> Order:
            return shuffled(n, seed, epoch, Purpose.ORDER, number)

        return in_chunks(
            wanted, n, lambda number, picked: shuffle(number).indices(picked.start, picked.stop, picked.step)
        )

    def identity(self) -> str:
        return f"RandomSampler({len(self.data_source)}, {self.num_samples}, {self.replacement})"

    def __repr__(self) -> str:
        drawn = () if self._num_samples is None else (f"num_samples={self._num_samples}",)
        return self._repr_of(str(len(self.data_source)), *(("replacement=True",) if self.replacement else ()), *drawn)


class SubsetRandomSampler(SeededSampler[int]):
    """The given indices, in a random order, a different one each epoch.

    `indices` are integers in a list, array or tensor, or a boolean mask over the dataset. They can be set, with effect
    from the next epoch on; the array that reading `indices` returns is read-only.

    >>> sorted(SubsetRandomSampler([7, 3, 5], seed=0))
    [3, 5, 7]
    """

    def __init__(self, indices: Any, generator: Any = None, *, seed: int | None = None) -> None:
        super().__init__(seed=seed, generator=generator)
        self.indices = indices

    @property
    def indices(self) -> IndexArray:
        """The indices that are shuffled."""
        return self._indices

    @indices.setter
    def indices(self, indices: Any) -> None:
        array = vector("indices", indices)
        if array.dtype != bool and array.size and array.dtype.kind not in "iu":
            raise OptionError(f"indices must be integers or a boolean mask, got {array.dtype}")
        self._indices: IndexArray = np.flatnonzero(array) if array.dtype == bool else array.astype(np.int64)
        self._indices.flags.writeable = False

    def __len__(self) -> int:
        return len(self.indices)

    def order(self, seed: int, epoch: int) -> Order:
        indices, places = self._indices, shuffled(len(self), seed, epoch)
        return Order(len(places), lambda start, stop, step: indices[places.indices(start, stop, step)])

    def identity(self) -> str:
        return f"SubsetRandomSampler({len(self)}, {digest(self.indices)})"

    def __repr__(self) -> str:
        return self._repr_of(number_of(len(self), "index", "indices"))


class BatchSampler(AroundSampler[list[int]]):
    """The keys that `sampler` yields, in lists of `batch_size`; `drop_last` leaves out a last one that is shorter.

    `sampler` is any iterable of keys. Its seed and epoch are those of the batches.

    >>> list(BatchSampler(range(5), 2, drop_last=False))
    [[0, 1], [2, 3], [4]]
    """

    yields_batches = True

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        if not hasattr(sampler, "__iter__"):
            raise OptionError(f"sampler must be iterable, got {sampler!r}")
        if getattr(sampler, "yields_batches", False):
            raise OptionError(f"sampler must yield indices, got {sampler!r}, which yields batches already")
        super().__init__(sampler)
        self.batch_size = positive("batch_size", batch_size)
        self.drop_last = flag("drop_last", drop_last)

    def __len__(self) -> int:
        items = len(self.sampler)  # without a length, its own TypeError says so
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        return batched(self._inner().order(seed, epoch), self.batch_size, self.drop_last)

    def _select(self, items: Iterator[Any]) -> Iterator[list[Any]]:
        while batch := list(islice(items, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __repr__(self) -> str:
        return f"BatchSampler({brief(self.sampler)}, {self.batch_size}, drop_last={self.drop_last})"


def draws(wanted: int, seed: int, epoch: int, draw: Callable[[np.random.Generator, slice], IndexArray]) -> Order:
    """Independent draws; `draw(rng, picked)` makes a whole chunk of `DRAWS` and gives those that the slice picks."""
    rewinder = Rewinder()
    return in_chunks(
        wanted,
        DRAWS,
        lambda number, picked: draw(rewinder.rewind(seed, epoch, Purpose.ORDER, number, 0), picked),
    )
