"""Batches whose classes are balanced, made from an array of labels without reading a sample.

Wherever a class has a target share, it is `w_k = alpha / C + (1 - alpha) * n_k / N`: from the shares of the data at
`alpha` 0 to equal ones at 1, for C classes with n_k of N items each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.apportion import Rotation, class_counts, class_shares, floors
from agnoload.samplers.base import SeededSampler
from agnoload.samplers.classes import ClassIndex, ShuffledCycles
from agnoload.samplers.order import BatchOrder, Order, in_sequence, indivisible
from agnoload.samplers.shuffle import shuffled
from agnoload.seeding import Purpose, Rewinder
from agnoload.validate import integer, number, number_of, positive, word


def imbalance_weights(labels: Any, alpha: float = 1.0) -> npt.NDArray[np.float64]:
    """A weight for each item, for `WeightedRandomSampler`, so that class k is drawn with its target share.

    The mean weight is 1; at `alpha` 1 all classes have the same sum of weights, at 0 all weights are 1.

    >>> imbalance_weights([0, 0, 0, 1]).round(3).tolist()
    [0.667, 0.667, 0.667, 2.0]
    """
    classes = ClassIndex("labels", labels)
    each = class_shares(classes.counts, _checked_alpha(alpha)) * classes.total / classes.counts
    weights = np.empty(classes.total)
    weights[classes.members] = np.repeat(each, classes.counts)
    return weights


class BalancedBatchSampler(SeededSampler[list[int]]):
    """Batches of `batch_size` in which class k has its target share, see `class_shares`; shuffled within the batch.

    `labels` is one label (a number or a string) for each item. `kind="fixed"`: every batch has the same counts, by
    `class_counts`; within a class no sample repeats before all have come, then a fresh shuffle follows. With more
    classes than `batch_size`, the floors of the shares are fixed and the rest rotates over the classes in proportion;
    a batch then takes time in proportion to the number of classes, some 10 milliseconds for a million.
    `kind="random"`: each sample is drawn independently, first the class by its share, then one of its items, with
    replacement. An epoch has `num_batches`, by default as many as hold all items once.

    >>> labels = [0] * 60 + [1] * 30 + [2] * 10
    >>> sampler = BalancedBatchSampler(labels, 10, alpha=0.5, seed=0)
    >>> [np.bincount(np.take(labels, batch)).tolist() for batch in sampler][:2], len(sampler)
    ([[5, 3, 2], [5, 3, 2]], 10)
    """

    yields_batches = True
    _fixed = ("labels", "batch_size", "alpha", "kind", "min_per_class", "num_batches")

    def __init__(
        self,
        labels: Any,
        batch_size: int,
        alpha: float = 1.0,
        kind: Literal["fixed", "random"] = "fixed",
        num_batches: int | None = None,
        min_per_class: int = 1,
        *,
        seed: int | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__(seed=seed, generator=generator)
        word("kind", kind, ("fixed", "random"))
        self.batch_size = positive("batch_size", batch_size)
        self.alpha = _checked_alpha(alpha)
        self.kind = kind
        self.min_per_class = integer("min_per_class", min_per_class, 0, "a non-negative int")
        self.labels = labels
        self.classes = ClassIndex("labels", labels)
        self.data_length = self.classes.total
        self.num_batches = _number_of_batches(num_batches, self.classes.total, self.batch_size)
        self.shares = class_shares(self.classes.counts, self.alpha)

    def __len__(self) -> int:
        return self.num_batches

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        if self.kind == "random":
            return _random_batches(self, seed, epoch)
        return _fixed_batches(self, seed, epoch)

    def identity(self) -> str:
        options = f"{self.batch_size}, {self.alpha}, {self.kind}, {self.num_batches}, {self.min_per_class}"
        return f"BalancedBatchSampler({options}, {self.classes.digest()})"

    def __repr__(self) -> str:
        return self._repr_of(
            f"{number_of(self.classes.total, 'label')} of {number_of(len(self.classes), 'class')}",
            f"batch_size={self.batch_size}",
            f"alpha={self.alpha:g}",
            f"kind={self.kind!r}",
            number_of(self.num_batches, "batch"),
        )


class ClassUniformBatchSampler(SeededSampler[list[int]]):
    """P x K: each batch holds `samples_per_class` samples of each of `classes_per_batch` classes, class after class.

    Classes are visited in cycles, each in a fresh random order, so the visits of any two differ by at most one. Each
    class's samples are taken in such cycles as well: none repeats before its class is used up, nor twice in a row. A
    class with fewer than `samples_per_class` repeats them within the batch; no other ever does. An epoch has
    `num_batches`, by default as many as hold all items once.

    >>> labels = [0] * 10 + [1] * 2 + [2] * 7 + [3] * 4
    >>> sampler = ClassUniformBatchSampler(labels, 2, 3, seed=0)
    >>> [np.unique(np.take(labels, batch), return_counts=True)[1].tolist() for batch in sampler]
    [[3, 3], [3, 3], [3, 3], [3, 3]]
    """

    yields_batches = True
    _fixed = ("labels", "classes_per_batch", "samples_per_class", "batch_size", "num_batches")
    _first_in_order = False

    def __init__(
        self,
        labels: Any,
        classes_per_batch: int,
        samples_per_class: int,
        *,
        num_batches: int | None = None,
        seed: int | None = None,
        generator: Any = None,
    ) -> None:
        super().__init__(seed=seed, generator=generator)
        self.classes_per_batch = positive("classes_per_batch", classes_per_batch)
        self.samples_per_class = positive("samples_per_class", samples_per_class)
        self.labels = labels
        self.classes = ClassIndex("labels", labels)
        if self.classes_per_batch > len(self.classes):
            raise OptionError(
                f"classes_per_batch must be at most the number of classes in labels, got {self.classes_per_batch} and "
                f"{number_of(len(self.classes), 'class')}"
            )
        self.data_length = self.classes.total
        self.batch_size = self.classes_per_batch * self.samples_per_class
        self.num_batches = _number_of_batches(num_batches, self.classes.total, self.batch_size)

    def __len__(self) -> int:
        return self.num_batches

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        return _class_batches(self, self._first_in_order, seed, epoch)

    def identity(self) -> str:
        options = f"{self.classes_per_batch}, {self.samples_per_class}, {self.num_batches}"
        return f"{type(self).__name__}({options}, {self.classes.digest()})"

    def __repr__(self) -> str:
        return self._repr_of(
            f"{number_of(self.classes.total, 'label')} of {number_of(len(self.classes), 'class')}",
            f"{number_of(self.classes_per_batch, 'class')} x {number_of(self.samples_per_class, 'sample')}",
            number_of(self.num_batches, "batch"),
        )


class CyclicClassBatchSampler(ClassUniformBatchSampler):
    """Each batch holds equal counts of `classes_per_batch` classes; the groups of classes take turns.

    The first turn of an epoch goes through the classes in their order: of 6 classes, 3 in a batch of 15, the counts
    are 5, 5, 5, 0, 0, 0, then 0, 0, 0, 5, 5, 5. Each later turn groups the classes at random. A turn that does not
    fill its last batch is completed from the next. Samples are taken as in `ClassUniformBatchSampler`.
    `batch_size` must be a multiple of `classes_per_batch`.

    >>> labels = np.repeat(np.arange(6), 20)
    >>> sampler = CyclicClassBatchSampler(labels, 3, 15, seed=0)
    >>> [np.bincount(labels[batch], minlength=6).tolist() for batch in sampler][:2]
    [[5, 5, 5, 0, 0, 0], [0, 0, 0, 5, 5, 5]]
    """

    _first_in_order = True

    def __init__(
        self,
        labels: Any,
        classes_per_batch: int,
        batch_size: int,
        *,
        num_batches: int | None = None,
        seed: int | None = None,
        generator: Any = None,
    ) -> None:
        classes = positive("classes_per_batch", classes_per_batch)
        each, rest = divmod(positive("batch_size", batch_size), classes)
        if rest:
            raise OptionError(
                f"batch_size must be a multiple of classes_per_batch, got {batch_size} and {classes}: take "
                f"{max(1, each) * classes} or {(each + 1) * classes}"
            )
        super().__init__(labels, classes, each, num_batches=num_batches, seed=seed, generator=generator)


def _random_batches(sampler: BalancedBatchSampler, seed: int, epoch: int) -> BatchOrder:
    """Each sample is drawn independently; a batch's number is its key's position."""
    classes, size = sampler.classes, sampler.batch_size
    running = np.cumsum(sampler.shares)
    running[-1] = 1.0  # what rounding lacks belongs to the last class
    rewinder = Rewinder()

    def batch(number: int) -> IndexArray:
        rng = rewinder.rewind(seed, epoch, Purpose.CLASSES, number, 0)
        drawn = np.searchsorted(running, rng.random(size), side="right")
        return classes.pick(drawn, rng.integers(classes.counts[drawn]))

    return _of_equal_size(sampler.num_batches, size, batch)


def _fixed_batches(sampler: BalancedBatchSampler, seed: int, epoch: int) -> BatchOrder:
    """The same counts in every batch; with more classes than places, the same floors, and the remainders rotate."""
    size, rewinder = sampler.batch_size, Rewinder()
    rotation = None
    if len(sampler.classes) > size:
        wanted = sampler.shares * size
        counts = floors(wanted)
        per_visit = np.ones_like(counts)
        phases = rewinder.rewind(seed, epoch, Purpose.CLASSES, 0, 1).permutation(len(wanted))
        rotation = Rotation(np.maximum(wanted - counts, 0.0), phases, size - int(counts.sum()))
    else:
        counts = per_visit = class_counts(sampler.shares, size, sampler.min_per_class)
    samples = _class_samples(sampler.classes, per_visit, seed, epoch, rewinder)

    def before(number: int) -> IndexArray:
        fixed = counts * number
        return fixed if rotation is None else fixed + rotation.before(number)

    def batch(number: int) -> IndexArray:
        low, high = before(number), before(number + 1)
        made = np.concatenate([samples(k, int(low[k]), int(high[k])) for k in np.flatnonzero(high > low).tolist()])
        rewinder.rewind(seed, epoch, Purpose.CLASSES, number, 0).shuffle(made)
        return made

    return _of_equal_size(sampler.num_batches, size, batch)


def _class_batches(sampler: ClassUniformBatchSampler, first_in_order: bool, seed: int, epoch: int) -> BatchOrder:
    """P classes, K samples of each: the number of a class's visit is that of the cycle through the classes."""
    classes, visits, each = len(sampler.classes), sampler.classes_per_batch, sampler.samples_per_class
    rewinder = Rewinder()

    def shuffle(number: int, below: int) -> Order:
        if first_in_order and not number:
            return in_sequence(classes)
        return shuffled(classes, seed, epoch, Purpose.CLASSES, number, array_below=below, rewinder=rewinder)

    visited = ShuffledCycles(classes, visits, shuffle)
    samples = _class_samples(sampler.classes, np.full(classes, each), seed, epoch, rewinder)

    def batch(number: int) -> IndexArray:
        first = number * visits
        parts = []
        for place, k in enumerate(visited.indices(first, first + visits).tolist(), first):
            start = place // classes * each
            parts.append(samples(k, start, start + each))
        return np.concatenate(parts)

    return _of_equal_size(sampler.num_batches, sampler.batch_size, batch)


def _of_equal_size(number: int, size: int, batch: Callable[[int], IndexArray]) -> BatchOrder:
    return indivisible(number, batch, lambda place: place * size)


def _class_samples(
    classes: ClassIndex, per_visit: IndexArray, seed: int, epoch: int, rewinder: Rewinder
) -> Callable[[int, int, int], IndexArray]:
    """The function that gives the samples of a class, from one to before another, of the cycles that go through it."""

    @cache
    def cycles(k: int) -> ShuffledCycles:
        n = int(classes.counts[k])

        def shuffle(number: int, below: int) -> Order:
            purpose = Purpose.WITHIN_CLASS
            return shuffled(n, seed, epoch, purpose, number, k, array_below=below, rewinder=rewinder)

        return ShuffledCycles(n, int(per_visit[k]), shuffle)

    return lambda k, start, stop: classes.pick(k, cycles(k).indices(start, stop))


def _number_of_batches(number: int | None, items: int, batch_size: int) -> int:
    return -(-items // batch_size) if number is None else positive("num_batches", number)


def _checked_alpha(alpha: Any) -> float:
    return number("alpha", alpha, 0, "a number from 0 to 1", 1)
