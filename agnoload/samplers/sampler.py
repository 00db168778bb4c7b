"""What a sampler is, which seed it runs on, and how it counts epochs.

A sampler of this library makes an `Order` (a `BatchOrder` if it yields batches) of `(seed, epoch)`: see `order.py`.
Iterating it alone and loading through it both read that order; nothing else about it is random.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Generic, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError
from agnoload.samplers.order import BLOCK, BatchOrder, Order
from agnoload.seeding import check_seed, draw_from, draw_seed
from agnoload.words import counted

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Sampler(Generic[T_co]):
    """Says which samples come, in which order: subclass it and give `__iter__`, and `__len__` if it is known.

    It yields keys of the dataset, or lists of keys if it is used as a batch sampler. A loader iterates it once an
    epoch; if it has `set_epoch`, that is called before.

    >>> class Backwards(Sampler[int]):
    ...     def __init__(self, n): self.n = n
    ...     def __iter__(self): return iter(range(self.n - 1, -1, -1))
    ...     def __len__(self): return self.n
    >>> list(Backwards(3))
    [2, 1, 0]
    """

    def __init__(self, data_source: Any = None) -> None:
        """`data_source` is not used; it is there because torch's samplers may pass one."""

    def __iter__(self) -> Iterator[T_co]:
        raise NotImplementedError(f"{type(self).__name__} must define __iter__")

    def __repr__(self) -> str:
        return counted(self)


class Fixed(Generic[T]):
    """An attribute of a sampler that its constructor sets: to set it later is an error, since it would not count."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, sampler: Any, owner: type | None = None) -> T:
        if sampler is None:
            return self  # type: ignore[return-value]
        try:
            return vars(sampler)[self._name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"{type(sampler).__name__} has no {self._name} yet") from None

    def __set__(self, sampler: Any, value: T) -> None:
        if vars(sampler).get(self._name, value) is not value:  # a subclass may keep what it passes on
            raise AttributeError(f"{self._name} of a {type(sampler).__name__} cannot be changed: make a new sampler")
        vars(sampler)[self._name] = value


class SeededSampler(Sampler[T_co]):
    """A sampler whose order is a function of `(seed, epoch)`: subclasses give `__len__` and `order` or `batches`.

    Iterated by itself it moves on to the next epoch each time; `set_epoch(n)` makes the next iteration epoch n. The
    seed is the one that it was given, else `default_seed`, else one drawn once from the operating system; a loader
    passes its own, see `effective_seed`.
    """

    yields_batches: bool = False
    """Whether it yields lists of indices, so that `batches` and not `order` holds."""
    default_seed: int | None = None
    """The seed where neither the sampler nor the loader was given one; None: one is drawn."""
    data_length: int | None = None
    """How many samples the dataset must have, if the sampler was given one label, weight or length for each."""
    is_split: bool = False
    """Whether it yields only one rank's share."""

    def __init__(self, *, seed: Any = None, generator: Any = None) -> None:
        if seed is not None and generator is not None:
            raise OptionError("seed and generator must not both be given: a generator only gives the seed")
        self._seed: int | None = None if seed is None else check_seed(seed)
        self._drawn: int | None = None
        self._lent: int | None = None
        self._epoch = 0
        self._asked: int | None = None
        if generator is not None:
            self._seed = draw_from(generator)

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

        The batch size and the number of ranks are not part of it, since another one may go on.
        """
        return f"{type(self).__name__}({len(self)})"

    def settle(self, backend_world: tuple[int, int] | None = None) -> None:
        """Called by a loader, before anything else, with the rank and the world size that its backend knows.

        Passed on to what is inside.
        """

    @property
    def seed(self) -> int | None:
        """The seed that was given to this sampler, or to what is inside it; None if there was none."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration runs through."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration, here or through a loader, is this epoch; passed on to what is inside."""
        self._epoch = self._asked = check_seed(epoch, "epoch")

    def pop_epoch(self) -> int | None:
        """The epoch that `set_epoch` has asked for, here or inside, since this was last called; None if it has not.

        A loader calls it before each epoch, and then hands its own number down.
        """
        asked, self._asked = self._asked, None
        return asked

    @property
    def sees_through(self) -> bool:
        """Whether `order` or `batches` says all: not with a stranger's sampler inside, nor with an own `__iter__`."""
        return type(self).__iter__ is SeededSampler.__iter__

    def __iter__(self) -> Iterator[Any]:
        asked = self.pop_epoch()
        epoch = self._epoch if asked is None else asked
        items = self._walk(epoch)
        self._epoch = epoch + 1
        return items

    def standalone_seed(self) -> int:
        """The seed that it runs on when it is iterated by itself."""
        return effective_seed(self, None, self.draw_seed_once()) if self._lent is None else self._lent

    def lend_seed(self, seed: int) -> None:
        """Called by a loader that has to iterate it, with the seed that it runs on there."""
        self._lent = seed

    def draw_seed_once(self, seed: int | None = None) -> int:
        """The seed that stands in where none was given; drawn at the first call, unless that names it."""
        if self._drawn is None:
            self._drawn = draw_seed() if seed is None else seed
        return self._drawn

    def _walk(self, epoch: int) -> Iterator[Any]:
        seed = self.standalone_seed()
        return walk_batches(self.batches(seed, epoch)) if self.yields_batches else walk(self.order(seed, epoch))

    def _words(self, *words: str) -> str:
        """The text of `repr`: the class, the words, and the seed if there is one."""
        seed = () if self.seed is None else (f"seed={self.seed}",)
        return f"{type(self).__name__}({', '.join((*words, *seed))})"


class AroundSampler(SeededSampler[T_co]):
    """A sampler that yields what another one, `sampler`, says: what it is told of epochs reaches that one too."""

    sampler: Any

    @property
    def sees_through(self) -> bool:
        return super().sees_through and is_transparent(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        tell = getattr(self.sampler, "set_epoch", None)  # a stranger's may have none
        if callable(tell):
            tell(epoch)

    def pop_epoch(self) -> int | None:
        inside = self.sampler.pop_epoch() if isinstance(self.sampler, SeededSampler) else None
        asked = super().pop_epoch()
        return inside if asked is None else asked


def walk(order: Order) -> Iterator[int]:
    """The indices of an order as Python ints, never more than a block of them at once."""
    for start in range(0, len(order), BLOCK):
        yield from order.take(start, min(start + BLOCK, len(order))).tolist()


def walk_batches(batches: BatchOrder) -> Iterator[list[int]]:
    """The batches of an order as lists of Python ints."""
    for number in range(len(batches)):
        yield batches.batch(number).tolist()


def effective_seed(sampler: Any, given: int | None, drawn: int) -> int:
    """The seed that a sampler runs on: its own, else the loader's `given`, else its default, else the `drawn` one.

    The default is 0 for whatever splits over ranks, so that they agree without being told. A sampler inside another
    takes what this gives for the outer one.
    """
    own, default = (sampler.seed, sampler.default_seed) if isinstance(sampler, SeededSampler) else (None, None)
    return next((seed for seed in (own, given, default) if seed is not None), drawn)


def is_transparent(sampler: Any) -> TypeGuard[SeededSampler[Any]]:
    """Whether its `order` (or `batches`, if it `yields_batches`) gives the whole epoch, any place at once.

    False for samplers of strangers, for a subclass of ours that overrides `__iter__`, and for ours around such a one:
    those are iterated.
    """
    return isinstance(sampler, SeededSampler) and sampler.sees_through


def is_sampler(thing: Any) -> bool:
    """Whether it is a sampler rather than a dataset: it can be iterated, but not indexed."""
    return isinstance(thing, Sampler) or (hasattr(thing, "__iter__") and not hasattr(thing, "__getitem__"))


def vector(name: str, values: Any) -> npt.NDArray[Any]:
    """A list, array, tensor or column as a NumPy array of one dimension, without a copy where that can be."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise OptionError(f"{name} must have one dimension, got an array of shape {array.shape}")
    return array


def digest(array: npt.NDArray[Any]) -> str:
    """Eight hexadecimal digits that tell one array of numbers from another; of a long one, a regular sample counts."""
    sample = np.ascontiguousarray(array[:: 1 + (len(array) >> 20)])
    return f"{zlib.crc32(sample.view(np.uint8).data):08x}"
