"""The samplers that know only how many samples there are: in order, in random order, or a subset in random order."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Any

import numpy as np

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.base import SeededSampler, digest, vector
from agnoload.samplers.order import Order, in_chunks, in_sequence
from agnoload.samplers.shuffle import shuffled
from agnoload.seeding import Purpose, Rewinder
from agnoload.validate import flag, number_of, positive, sized

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
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: Any = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed=seed, generator=generator)
        self.data_source = sized("data_source", data_source)
        self.replacement = flag("replacement", replacement)
        self._num_samples = None if num_samples is None else positive("num_samples", num_samples)
        self._check()

    @property
    def num_samples(self) -> int:
        """The number of indices in an epoch."""
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples

    def _check(self) -> None:
        if self.num_samples and not len(self.data_source):
            raise OptionError(f"num_samples must be 0 for an empty data_source, got {self.num_samples}")

    def order(self, seed: int, epoch: int) -> Order:
        self._check()  # its length may have changed
        n, wanted = len(self.data_source), self.num_samples
        if self.replacement:
            return uniform(n, wanted, seed, epoch)
        return shuffled(n, seed, epoch) if 0 < wanted == n else shuffles(n, wanted, seed, epoch)

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
        self._indices = integer_indices(indices)
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


def integer_indices(indices: Sequence[int] | Any) -> IndexArray:
    """A copy of indices or of a boolean mask as an int64 array, or `OptionError`."""
    array = vector("indices", indices)
    if array.dtype == bool:
        return np.flatnonzero(array)
    if array.size and array.dtype.kind not in "iu":
        raise OptionError(f"indices must be integers or a boolean mask, got {array.dtype}")
    return array.astype(np.int64)


def shuffles(n: int, wanted: int, seed: int, epoch: int) -> Order:
    """Shuffles of n items one after the other, cut off after `wanted`; a shuffle's number is its key's position."""

    @lru_cache(1)
    def shuffle(number: int) -> Order:
        return shuffled(n, seed, epoch, Purpose.ORDER, number)

    return in_chunks(wanted, n, lambda number, picked: shuffle(number).indices(picked.start, picked.stop, picked.step))


def draws(wanted: int, seed: int, epoch: int, draw: Callable[[np.random.Generator, slice], IndexArray]) -> Order:
    """Independent draws; `draw(rng, picked)` makes a whole chunk of `DRAWS` and gives those that the slice picks."""
    rewinder = Rewinder()
    return in_chunks(
        wanted,
        DRAWS,
        lambda number, picked: draw(rewinder.rewind(seed, epoch, Purpose.ORDER, number, 0), picked),
    )


def uniform(n: int, wanted: int, seed: int, epoch: int) -> Order:
    """Independent uniform draws from 0, 1, ... n - 1."""
    return draws(wanted, seed, epoch, lambda rng, picked: rng.integers(n, size=DRAWS)[picked])
