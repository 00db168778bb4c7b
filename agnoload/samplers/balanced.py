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
from agnoload.samplers.apportion import class_counts, class_shares, floors, rotation
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
    share = class_shares(classes.counts, number("alpha", alpha, 0, "a number from 0 to 1", 1))
    each = share * classes.total / classes.counts
    weights = np.empty(classes.total)
    weights[classes.members] = np.repeat(each, classes.counts)
    return weights


class _ClassBatchSampler(SeededSampler[list[int]]):
    """Batches of one size, made of an array of labels."""

    yields_batches = True
    _options: tuple[str, ...]
    """Attributes that, with the labels, make the order."""

    def __init__(self, labels: Any, batch_size: int, num_batches: int | None, seed: Any, generator: Any) -> None:
        super().__init__(seed=seed, generator=generator)
        self.labels = labels
        self.classes = ClassIndex("labels", labels)
        self.data_length = self.classes.total
        self.batch_size = positive("batch_size", batch_size)
        enough = -(-self.classes.total // self.batch_size)
        self.num_batches = enough if num_batches is None else positive("num_batches", num_batches)

    def __len__(self) -> int:
        return self.num_batches

    def identity(self) -> str:
        options = ", ".join(str(getattr(self, name)) for name in self._options)
        return f"{type(self).__name__}({options}, {self.classes.digest()})"

    def _repr_of(self, *parts: str) -> str:
        labels = f"{number_of(self.classes.total, 'label')} of {number_of(len(self.classes), 'class')}"
        return super()._repr_of(labels, *parts, number_of(self.num_batches, "batch"))

    def _batches_of(self, batch: Callable[[int], IndexArray]) -> BatchOrder:
        return indivisible(self.num_batches, batch, lambda number: number * self.batch_size)

    def _samples(self, per_visit: IndexArray, seed: int, epoch: int) -> Callable[[int, int, int], IndexArray]:
        """The function that gives the samples of a class, from one to before another, of its endless cycles."""
        classes, rewinder = self.classes, Rewinder()

        @cache
        def cycles(k: int) -> ShuffledCycles:
            n = int(classes.counts[k])

            def shuffle(number: int, below: int) -> Order:
                purpose = Purpose.WITHIN_CLASS
                return shuffled(n, seed, epoch, purpose, number, k, array_below=below, rewinder=rewinder)

            return ShuffledCycles(n, int(per_visit[k]), shuffle)

        return lambda k, start, stop: classes.pick(k, cycles(k).indices(start, stop))


class BalancedBatchSampler(_ClassBatchSampler):
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

    _options = ("batch_size", "alpha", "kind", "num_batches", "min_per_class")
    _fixed = ("labels", *_options)

    def __init__(
        self, labels: Any, batch_size: int, alpha: float = 1.0, kind: Literal["fixed", "random"] = "fixed",
        num_batches: int | None = None, min_per_class: int = 1, *, seed: int | None = None, generator: Any = None,
    ) -> None:  # fmt: skip
        self.kind = word("kind", kind, ("fixed", "random"))
        self.alpha = number("alpha", alpha, 0, "a number from 0 to 1", 1)
        self.min_per_class = integer("min_per_class", min_per_class, 0, "a non-negative int")
        super().__init__(labels, batch_size, num_batches, seed, generator)
        self.shares = class_shares(self.classes.counts, self.alpha)

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        return self._batches_of((self._random if self.kind == "random" else self._of_fixed_counts)(seed, epoch))

    def _random(self, seed: int, epoch: int) -> Callable[[int], IndexArray]:
        """Each sample is drawn independently; a batch's number is its key's position."""
        classes, size, rewinder = self.classes, self.batch_size, Rewinder()
        running = np.cumsum(self.shares)
        running[-1] = 1.0  # what rounding lacks belongs to the last class

        def batch(number: int) -> IndexArray:
            rng = rewinder.rewind(seed, epoch, Purpose.CLASSES, number, 0)
            drawn = np.searchsorted(running, rng.random(size), side="right")
            return classes.pick(drawn, rng.integers(classes.counts[drawn]))

        return batch

    def _of_fixed_counts(self, seed: int, epoch: int) -> Callable[[int], IndexArray]:
        """The same counts in every batch; with more classes than places, the same floors, and the remainders rotate."""
        size, rewinder = self.batch_size, Rewinder()
        if len(self.classes) > size:
            wanted = self.shares * size
            counts = floors(wanted)
            phases = rewinder.rewind(seed, epoch, Purpose.CLASSES, 0, 1).permutation(len(wanted))
            rotating = rotation(np.maximum(wanted - counts, 0.0), phases, size - int(counts.sum()))
            samples = self._samples(np.ones_like(counts), seed, epoch)
        else:
            counts, rotating = class_counts(self.shares, size, self.min_per_class), None
            samples = self._samples(counts, seed, epoch)

        def before(number: int) -> IndexArray:
            """How many of each class come before a batch."""
            return counts * number + (0 if rotating is None else rotating(number))

        def batch(number: int) -> IndexArray:
            low, high = before(number), before(number + 1)
            made = np.concatenate([samples(k, int(low[k]), int(high[k])) for k in np.flatnonzero(high > low).tolist()])
            rewinder.rewind(seed, epoch, Purpose.CLASSES, number, 0).shuffle(made)
            return made

        return batch

    def __repr__(self) -> str:
        return self._repr_of(f"batch_size={self.batch_size}", f"alpha={self.alpha:g}", f"kind={self.kind!r}")


class ClassUniformBatchSampler(_ClassBatchSampler):
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

    _options = ("classes_per_batch", "samples_per_class", "num_batches")
    _fixed = ("labels", "batch_size", *_options)
    _first_in_order = False

    def __init__(
        self, labels: Any, classes_per_batch: int, samples_per_class: int, *, num_batches: int | None = None,
        seed: int | None = None, generator: Any = None,
    ) -> None:  # fmt: skip
        self.classes_per_batch = positive("classes_per_batch", classes_per_batch)
        self.samples_per_class = positive("samples_per_class", samples_per_class)
        super().__init__(labels, self.classes_per_batch * self.samples_per_class, num_batches, seed, generator)
        if self.classes_per_batch > len(self.classes):
            raise OptionError(
                f"classes_per_batch must be at most the number of classes in labels, got {self.classes_per_batch} and "
                f"{number_of(len(self.classes), 'class')}"
            )

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        classes, visits, each = len(self.classes), self.classes_per_batch, self.samples_per_class
        rewinder = Rewinder()

        def shuffle(number: int, below: int) -> Order:
            if self._first_in_order and not number:
                return in_sequence(classes)
            return shuffled(classes, seed, epoch, Purpose.CLASSES, number, array_below=below, rewinder=rewinder)

        visited = ShuffledCycles(classes, visits, shuffle)
        samples = self._samples(np.full(classes, each), seed, epoch)

        def batch(number: int) -> IndexArray:
            parts = []
            first = number * visits
            for place, k in enumerate(visited.indices(first, first + visits).tolist(), first):
                start = place // classes * each  # the cycle through the classes is the number of the class's visit
                parts.append(samples(k, start, start + each))
            return np.concatenate(parts)

        return self._batches_of(batch)

    def __repr__(self) -> str:
        words = f"{number_of(self.classes_per_batch, 'class')} x {number_of(self.samples_per_class, 'sample')}"
        return self._repr_of(words)


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
        self, labels: Any, classes_per_batch: int, batch_size: int, *, num_batches: int | None = None,
        seed: int | None = None, generator: Any = None,
    ) -> None:  # fmt: skip
        classes = positive("classes_per_batch", classes_per_batch)
        each, rest = divmod(positive("batch_size", batch_size), classes)
        if rest:
            raise OptionError(
                f"batch_size must be a multiple of classes_per_batch, got {batch_size} and {classes}: take "
                f"{max(1, each) * classes} or {(each + 1) * classes}"
            )
        super().__init__(labels, classes, each, num_batches=num_batches, seed=seed, generator=generator)
