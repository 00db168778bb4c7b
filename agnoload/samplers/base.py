"""What a sampler is, which seed it uses, and how it counts epochs.

A sampler of this library makes an `Order` (a `BatchOrder` if it yields batches) from `(seed, epoch)`: see `order.py`.
Iterating it by itself and loading through it both read that order; nothing else about it is random.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError
from agnoload.samplers.order import BatchOrder, Order
from agnoload.seeding import check_seed, draw_from, draw_seed
from agnoload.validate import array_of, counted

T_co = TypeVar("T_co", covariant=True)

DEPTH = 8
"""How many samplers within each other are looked at; a user-defined one may contain itself."""


class Sampler(Generic[T_co]):
    """Chooses which samples are loaded, in which order: subclass it and define `__iter__`, and `__len__` if known.

    It yields keys of the dataset, or lists of keys if it is used as a batch sampler. A loader iterates it once an
    epoch, and calls `set_epoch` before if it has one.

    >>> class Backwards(Sampler[int]):
    ...     def __init__(self, n): self.n = n
    ...     def __iter__(self): return iter(range(self.n - 1, -1, -1))
    ...     def __len__(self): return self.n
    >>> list(Backwards(3))
    [2, 1, 0]
    """

    def __init__(self, data_source: Any = None) -> None:
        pass  # samplers written for torch pass `data_source` on, which is not used

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError(f"{type(self).__name__} must define __iter__")

    def __repr__(self) -> str:
        return counted(self)


loader_epoch: ContextVar[tuple[int, int] | None] = ContextVar("agnoload_loader_epoch", default=None)
"""The seed and the epoch for which a loader iterates a user-defined sampler: samplers of ours inside it follow them.

A context variable, since loaders in other threads may iterate the same samplers."""


class SeededSampler(Sampler[T_co]):
    """A sampler whose order is a function of `(seed, epoch)`: subclasses define `__len__` and `order` or `batches`.

    Iterated by itself it moves on to the next epoch each time; `set_epoch(n)` makes the next iteration epoch n. A
    loader asks for orders by number and seed instead, see `effective_seed`.
    """

    yields_batches: bool = False
    """Whether it yields lists of indices: then it defines `batches`, else `order`."""
    data_length: int | None = None
    """How many samples the dataset must have, if the sampler was given one label, weight or length for each."""
    is_split: bool = False
    """Whether it yields only one rank's share; then it uses seed 0 where none was given, so that ranks agree."""
    _fixed: tuple[str, ...] = ()
    """Attributes that only the constructor sets: setting one later is an error, since it would have no effect."""

    def __init__(self, *, seed: Any = None, generator: Any = None) -> None:
        if seed is not None and generator is not None:
            raise OptionError("seed and generator must not both be given: a generator only gives the seed")
        self._seed: int | None = None if seed is None else check_seed(seed)
        if generator is not None:
            self._seed = draw_from(generator)
        self._drawn = draw_seed()
        """The seed outside of a loader, where none was given."""
        self._epoch = 0
        self._asked: int | None = None
        """The epoch that the user has set; None once an iteration or a loader has begun it."""
        self._followed: tuple[int, int] | None = None
        """The `loader_epoch` of the last iteration."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and vars(self).get(name, value) is not value:  # a subclass may set what it passes on
            raise AttributeError(f"{name} of a {type(self).__name__} cannot be changed: make a new sampler")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__")

    def order(self, seed: int, epoch: int) -> Order:
        """The indices of an epoch."""
        raise NotImplementedError(f"{type(self).__name__} must define order")

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        """The batches of an epoch, of a sampler that `yields_batches`."""
        raise NotImplementedError(f"{type(self).__name__} must define batches")

    def identity(self) -> str:
        """What must be equal for a saved state to fit: the kind of sampler and a digest of what it was given.

        The batch size and the number of ranks are not part of it: a state can be resumed with others.
        """
        return f"{type(self).__name__}({len(self)})"

    @property
    def seed(self) -> int | None:
        """The seed that was given to this sampler, or to the one inside it; None if there was none."""
        return given_seed(self)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration, here or through a loader, is this epoch; passed on to the sampler inside."""
        self._epoch = self._asked = check_seed(epoch, "epoch")

    def __iter__(self) -> Iterator[Any]:
        loader, asked = loader_epoch.get(), pop_epoch(self)
        epoch = self._epoch if asked is None else asked
        if loader and loader is not self._followed and asked is None:  # iterated again for the same one, epochs follow
            epoch = loader[1]
        items = self._walk(effective_seed(self, loader[0] if loader else None, self._drawn), epoch)
        self._followed, self._epoch = loader, epoch + 1
        return items

    def _walk(self, seed: int, epoch: int) -> Iterator[Any]:
        return iter(self.batches(seed, epoch) if self.yields_batches else self.order(seed, epoch))

    def _repr_of(self, *parts: str) -> str:
        """The text of `repr`: the class, its parts, and the seed if there is one."""
        seed = () if self._seed is None else (f"seed={self._seed}",)
        return f"{type(self).__name__}({', '.join((*parts, *seed))})"


class AroundSampler(SeededSampler[T_co]):
    """A sampler that yields what another one, `sampler`, chooses: seeds and epochs reach that one too.

    `sampler` may be user-defined.
    """

    def __init__(self, sampler: Any, *, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self.sampler = sampler
        self.data_length = getattr(sampler, "data_length", None)

    def identity(self) -> str:
        return self.sampler.identity() if isinstance(self.sampler, SeededSampler) else type(self.sampler).__name__

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if callable(inner := getattr(self.sampler, "set_epoch", None)):
            inner(epoch)

    def _inner(self) -> SeededSampler[Any]:
        """The sampler inside, to ask for its order."""
        if not has_random_access(self.sampler):
            raise OptionError(f"{self!r} has a user-defined sampler inside and no random access: iterate it")
        return self.sampler

    def _walk(self, seed: int, epoch: int) -> Iterator[Any]:
        return super()._walk(seed, epoch) if has_random_access(self.sampler) else self._select(iter(self.sampler))

    def _select(self, items: Iterator[Any]) -> Iterator[Any]:
        """What it yields of the items of a user-defined sampler, without knowing how many there are."""
        raise NotImplementedError


def parts_of(sampler: Any) -> list[Any]:
    """A sampler and those inside it: each is the `sampler`, else the `batch_sampler`, of the one before."""
    parts = [sampler]
    while len(parts) < DEPTH:
        inner = getattr(parts[-1], "sampler", None)
        inner = getattr(parts[-1], "batch_sampler", None) if inner is None else inner
        if not hasattr(inner, "__iter__"):
            break
        parts.append(inner)
    return parts


def given_seed(sampler: Any) -> int | None:
    """The seed that was given to a sampler of ours, else to the next one inside it; None if there was none."""
    seeds = [part._seed for part in parts_of(sampler) if isinstance(part, SeededSampler)]
    return next((seed for seed in seeds if seed is not None), None)


def effective_seed(sampler: Any, given: int | None, drawn: int) -> int:
    """The seed that a sampler uses: its own, else the loader's `given`, else 0 if it is split, else the `drawn` one.

    A sampler inside another uses the seed of the outer one.
    """
    own = given_seed(sampler)
    known = given if own is None else own
    if known is None:
        return 0 if is_split(sampler) else drawn
    return known


def is_split(sampler: Any) -> bool:
    """Whether it, or one inside it, yields only one rank's share."""
    return any(getattr(part, "is_split", False) for part in parts_of(sampler))


def pop_epoch(sampler: Any) -> int | None:
    """The epoch that the user has set on a sampler, or on one of ours inside it, since the last call; None if none."""
    ours = [part for part in parts_of(sampler) if isinstance(part, SeededSampler)]
    asked = [part._asked for part in ours if part._asked is not None]
    for part in ours:
        part._asked = None
    return asked[0] if asked else None


def has_random_access(sampler: Any) -> TypeGuard[SeededSampler[Any]]:
    """Whether its `order` (or `batches`, if it `yields_batches`) gives the whole epoch, any place at once.

    False for user-defined samplers, for a subclass of ours that overrides `__iter__`, and for ours around such a one:
    those have to be iterated.
    """
    if not isinstance(sampler, SeededSampler) or type(sampler).__iter__ is not SeededSampler.__iter__:
        return False
    return not isinstance(sampler, AroundSampler) or has_random_access(sampler.sampler)


def is_sampler(thing: Any) -> bool:
    """Whether it is a sampler rather than a dataset: it can be iterated, but not indexed."""
    return isinstance(thing, Sampler) or (hasattr(thing, "__iter__") and not hasattr(thing, "__getitem__"))


def vector(name: str, values: Any) -> npt.NDArray[Any]:
    """A list, array, tensor or column as a NumPy array of one dimension, without a copy where possible."""
    array = array_of(name, values)
    if array.ndim != 1:
        raise OptionError(f"{name} must have one dimension, got an array of shape {array.shape}")
    return array


def digest(array: npt.NDArray[Any]) -> str:
    """Eight hexadecimal digits that differ between arrays of numbers; of a long array only a regular sample counts."""
    sample = np.ascontiguousarray(array[:: 1 + (len(array) >> 20)])
    return f"{zlib.crc32(sample.view(np.uint8).data):08x}"
