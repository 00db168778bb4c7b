"""Batches whose classes are balanced, made from an array of labels; no sample is ever read.

Wherever a class has a target share, it is `w_k = alpha / C + (1 - alpha) * n_k / N`: from the shares of the data at
`alpha` 0 to equal ones at 1, for C classes with n_k of N items each.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agnoload.arguments import integer, number, positive, word
from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.classes import Groups
from agnoload.samplers.order import BatchOrder, EqualBatches
from agnoload.samplers.rounds import Rounds
from agnoload.samplers.sampler import Fixed, SeededSampler
from agnoload.seeding import Purpose, Rewinder
from agnoload.words import number_of

_EPSILON = 1e-9
"""Shares that differ by less are equal: they are sums and products of fractions that float64 does not hold exactly."""


def imbalance_weights(labels: Any, alpha: float = 1.0) -> npt.NDArray[np.float64]:
    """A weight for each item, for `WeightedRandomSampler`, so that class k is drawn with its target share.

    The mean weight is 1; at `alpha` 1 all classes have the same sum of weights, at 0 all weights are 1.

    >>> imbalance_weights([0, 0, 0, 1]).round(3).tolist()
    [0.667, 0.667, 0.667, 2.0]
    """
    groups = Groups("labels", labels)
    each = class_shares(groups.counts, _checked_alpha(alpha)) * groups.total / groups.counts
    weights = np.empty(groups.total)
    weights[groups.members] = np.repeat(each, groups.counts)
    return weights


def class_shares(counts: IndexArray, alpha: float) -> npt.NDArray[np.float64]:
    """The target share of each class; they sum to 1."""
    shares: npt.NDArray[np.float64] = alpha / len(counts) + (1 - alpha) * counts / counts.sum()
    return shares


def class_counts(shares: npt.NDArray[np.float64], batch_size: int, min_per_class: int = 0) -> IndexArray:
    """How many of each class a batch of `batch_size` holds, by largest remainder, at least `min_per_class` of each.

    Floors first, then one more for the largest remainders, ties to the first class. If a class then lacks some, they
    are taken one by one from the class that is most above its share, ties from the last; a minimum that does not fit
    into the batch is lowered to what does.

    >>> class_counts(np.array([0.6, 0.3, 0.1]), 8).tolist()
    [5, 2, 1]
    """
    wanted = shares * batch_size
    counts = np.floor(wanted + _EPSILON).astype(np.int64)
    rest = np.round((wanted - counts) / _EPSILON)
    counts[np.argsort(-rest, kind="stable")[: batch_size - counts.sum()]] += 1
    least = min(min_per_class, batch_size // len(shares))
    if lacking := int(np.maximum(least - counts, 0).sum()):
        have, want = counts.tolist(), wanted.tolist()  # Python's own numbers are quicker one by one
        givers = [(round((want[k] - have[k]) / _EPSILON), -k) for k in range(len(have)) if have[k] > least]
        heapify(givers)
        for _ in range(lacking):
            k = -givers[0][1]
            have[k] -= 1
            if have[k] > least:
                heapreplace(givers, (round((want[k] - have[k]) / _EPSILON), -k))
            else:
                heappop(givers)
        counts = np.maximum(have, least)
    return counts


class BalancedBatchSampler(SeededSampler[list[int]]):
    """Batches of `batch_size` in which class k has its target share, see `class_shares`; shuffled within the batch.

    `labels` is one label (a number or a string) for each item. `kind="fixed"`: every batch has the same counts, by
    `class_counts`; within a class no sample comes twice before all came, then follows a fresh shuffle. Where there are
    more classes than `batch_size`, the floors of the shares are fixed and the rest rotates over the classes in
    proportion; a batch then takes time in proportion to the number of classes, some 10 milliseconds for a million.
    `kind="random"`: every sample is drawn by itself, first the class by its share, then one of its items, with
    replacement. An epoch has `num_batches`, by default as many as hold all items once.

    >>> labels = [0] * 60 + [1] * 30 + [2] * 10
    >>> sampler = BalancedBatchSampler(labels, 10, alpha=0.5, seed=0)
    >>> [np.bincount(np.take(labels, batch)).tolist() for batch in sampler][:2], len(sampler)
    ([[5, 3, 2], [5, 3, 2]], 10)
    """

    yields_batches = True
    labels = Fixed[Any]()
    batch_size = Fixed[int]()
    alpha = Fixed[float]()
    kind = Fixed[str]()
    min_per_class = Fixed[int]()
    num_batches = Fixed[int]()

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
        integer("min_per_class", min_per_class, 0, "a non-negative int")
        self.batch_size = positive("batch_size", batch_size)
        self.alpha = _checked_alpha(alpha)
        self.kind = kind
        self.min_per_class = int(min_per_class)
        self.labels = labels
        self.groups = Groups("labels", labels)
        self.data_length = self.groups.total
        self.num_batches = _number_of_batches(num_batches, self.groups.total, self.batch_size)
        self.shares = class_shares(self.groups.counts, self.alpha)

    def __len__(self) -> int:
        return self.num_batches

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        if self.kind == "random":
            return _RandomBatches(self, seed, epoch)
        if len(self.groups) > self.batch_size:
            return _RotatingBatches(self, seed, epoch)
        return _FixedBatches(self, seed, epoch)

    def identity(self) -> str:
        options = f"{self.batch_size}, {self.alpha}, {self.kind}, {self.num_batches}, {self.min_per_class}"
        return f"BalancedBatchSampler({options}, {self.groups.digest()})"

    def __repr__(self) -> str:
        return self._words(
            f"{number_of(self.groups.total, 'label')} of {number_of(len(self.groups), 'class')}",
            f"batch_size={self.batch_size}",
            f"alpha={self.alpha:g}",
            f"kind={self.kind!r}",
            number_of(self.num_batches, "batch"),
        )


class ClassUniformBatchSampler(SeededSampler[list[int]]):
    """P x K: each batch holds `samples_per_class` samples of each of `classes_per_batch` classes, class after class.

    Classes are visited in rounds, each in a fresh random order, so the visits of any two differ by at most one; each
    class's samples are taken in such rounds as well, so none comes twice before its class is used up, nor twice in a
    row. A class with fewer than `samples_per_class` repeats them within the batch; no other ever does. An epoch has
    `num_batches`, by default as many as hold all items once.

    >>> labels = [0] * 10 + [1] * 2 + [2] * 7 + [3] * 4
    >>> sampler = ClassUniformBatchSampler(labels, 2, 3, seed=0)
    >>> [np.unique(np.take(labels, batch), return_counts=True)[1].tolist() for batch in sampler]
    [[3, 3], [3, 3], [3, 3], [3, 3]]
    """

    yields_batches = True
    labels = Fixed[Any]()
    classes_per_batch = Fixed[int]()
    samples_per_class = Fixed[int]()
    batch_size = Fixed[int]()
    num_batches = Fixed[int]()
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
        self.groups = Groups("labels", labels)
        if self.classes_per_batch > len(self.groups):
            raise OptionError(
                f"classes_per_batch must be at most the number of classes in labels, got {self.classes_per_batch} and "
                f"{number_of(len(self.groups), 'class')}"
            )
        self.data_length = self.groups.total
        self.batch_size = self.classes_per_batch * self.samples_per_class
        self.num_batches = _number_of_batches(num_batches, self.groups.total, self.batch_size)

    def __len__(self) -> int:
        return self.num_batches

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        return _ClassBatches(self, self._first_in_order, seed, epoch)

    def identity(self) -> str:
        options = f"{self.classes_per_batch}, {self.samples_per_class}, {self.num_batches}"
        return f"{type(self).__name__}({options}, {self.groups.digest()})"

    def __repr__(self) -> str:
        return self._words(
            f"{number_of(self.groups.total, 'label')} of {number_of(len(self.groups), 'class')}",
            f"{number_of(self.classes_per_batch, 'class')} x {number_of(self.samples_per_class, 'sample')}",
            number_of(self.num_batches, "batch"),
        )


class CyclicClassBatchSampler(ClassUniformBatchSampler):
    """Each batch holds equal counts of `classes_per_batch` classes; the groups of classes take turns.

    The first turn of an epoch goes through the classes in their order: of 6 classes, 3 in a batch of 15, the counts
    are 5, 5, 5, 0, 0, 0, then 0, 0, 0, 5, 5, 5. Then the classes are grouped afresh, at random, turn after turn. A turn
    that does not come out even is completed from the next. Samples are taken as in `ClassUniformBatchSampler`.
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


class _RandomBatches(EqualBatches):
    """Each sample drawn by itself; a batch's number is its key's position."""

    def __init__(self, sampler: BalancedBatchSampler, seed: int, epoch: int) -> None:
        super().__init__(sampler.num_batches, sampler.batch_size)
        self.groups = sampler.groups
        self.running = np.cumsum(sampler.shares)
        self.running[-1] = 1.0  # what rounding lacks belongs to the last class
        self.key = (seed, epoch)
        self.rewinder = Rewinder()

    def batch(self, number: int) -> IndexArray:
        rng = self.rewinder.rewind(*self.key, Purpose.CLASSES, number, 0)
        classes = np.searchsorted(self.running, rng.random(self.size), side="right")
        places = rng.integers(self.groups.counts[classes])
        return self.groups.pick(classes, places)


class _FixedBatches(EqualBatches):
    """The same counts in every batch."""

    def __init__(self, sampler: BalancedBatchSampler, seed: int, epoch: int) -> None:
        super().__init__(sampler.num_batches, sampler.batch_size)
        self.key = (seed, epoch)
        self.rewinder = Rewinder()
        self.counts = class_counts(sampler.shares, sampler.batch_size, sampler.min_per_class)
        self.samples = _Samples(sampler.groups, self.counts, seed, epoch, self.rewinder)

    def batch(self, number: int) -> IndexArray:
        return self._shuffled(number, self.counts * number, self.counts)

    def _shuffled(self, number: int, before: IndexArray, counts: IndexArray) -> IndexArray:
        """The next `counts` samples of each class of which `before` have been delivered, in a random order."""
        batch = np.concatenate(
            [self.samples.take(k, int(before[k]), int(before[k] + counts[k])) for k in np.flatnonzero(counts).tolist()]
        )
        self.rewinder.rewind(*self.key, Purpose.CLASSES, number, 0).shuffle(batch)
        return batch


class _RotatingBatches(_FixedBatches):
    """More classes than places: the floors of the shares in every batch, and the remainders rotate."""

    def __init__(self, sampler: BalancedBatchSampler, seed: int, epoch: int) -> None:
        super().__init__(sampler, seed, epoch)
        wanted = sampler.shares * sampler.batch_size
        self.counts = np.floor(wanted + _EPSILON).astype(np.int64)
        self.samples = _Samples(sampler.groups, np.ones_like(self.counts), seed, epoch, self.rewinder)
        phases = self.rewinder.rewind(seed, epoch, Purpose.CLASSES, 0, 1).permutation(len(wanted))
        self.rotation = _Rotation(np.maximum(wanted - self.counts, 0.0), phases, self.size - int(self.counts.sum()))

    def batch(self, number: int) -> IndexArray:
        before, after = self.rotation.before(number), self.rotation.before(number + 1)
        return self._shuffled(number, self.counts * number + before, self.counts + after - before)


class _Rotation:
    """Gives `places` in each batch to classes in proportion to `rates`, evenly over time.

    Class k comes up at the times `(i + phase_k) / rate_k`, i = 0, 1, ...; the places go to the classes in the order of
    these times (a divisor method of apportionment). The phases are evenly spaced and randomly assigned.
    """

    def __init__(self, rates: npt.NDArray[np.float64], order: IndexArray, places: int) -> None:
        self.rates = np.round(rates / _EPSILON) * _EPSILON
        self.offsets = 1 - (order + 0.5) / len(order)
        self.places = places
        self._known: dict[int, IndexArray] = {}

    def before(self, number: int) -> IndexArray:
        """How often each class has come up before batch `number`."""
        if number not in self._known:
            self._known = {n: counts for n, counts in self._known.items() if n == number - 1}
            self._known[number] = self._count(number * self.places)
        return self._known[number]

    def _count(self, wanted: int) -> IndexArray:
        """The counts at the time when `wanted` places are taken, found by bisection."""
        classes, total = len(self.rates), max(self.rates.sum(), _EPSILON)
        low, high = max(0.0, (wanted - classes) / total), (wanted + classes) / total
        for _ in range(100):
            middle = (low + high) / 2
            counts = self._count_at(middle)
            taken = int(counts.sum())
            if taken == wanted:
                return counts
            low, high = (middle, high) if taken < wanted else (low, middle)
        counts = self._count_at(low)  # several come up at the same time: the first of them
        due = np.flatnonzero(self._count_at(high) > counts)
        counts[due[: wanted - int(counts.sum())]] += 1
        return counts

    def _count_at(self, time: float) -> IndexArray:
        counts: IndexArray = np.floor(time * self.rates + self.offsets).astype(np.int64)
        return counts


class _ClassBatches(EqualBatches):
    """P classes, K samples of each: a class's visit number is the number of the round through the classes."""

    def __init__(self, sampler: ClassUniformBatchSampler, first_in_order: bool, seed: int, epoch: int) -> None:
        super().__init__(sampler.num_batches, sampler.batch_size)
        self.visited = sampler.classes_per_batch
        self.each = sampler.samples_per_class
        self.classes = len(sampler.groups)
        rewinder = Rewinder()
        self.turns = Rounds(
            self.classes, self.visited, seed, epoch, Purpose.CLASSES, 0, rewinder, first_in_order=first_in_order
        )
        per = np.full(self.classes, self.each)
        self.samples = _Samples(sampler.groups, per, seed, epoch, rewinder)

    def batch(self, number: int) -> IndexArray:
        first = number * self.visited
        parts = []
        for place, k in enumerate(self.turns.take(first, first + self.visited).tolist(), first):
            start = place // self.classes * self.each
            parts.append(self.samples.take(k, start, start + self.each))
        return np.concatenate(parts)


class _Samples:
    """The samples of each class, in rounds that are made when they are first asked for."""

    def __init__(self, groups: Groups, per: IndexArray, seed: int, epoch: int, rewinder: Rewinder) -> None:
        self.groups = groups
        self.per = per
        self.key = (seed, epoch)
        self.rewinder = rewinder
        self.rounds: dict[int, Rounds] = {}

    def take(self, k: int, start: int, stop: int) -> IndexArray:
        rounds = self.rounds.get(k)
        if rounds is None:
            n, per = int(self.groups.counts[k]), int(self.per[k])
            rounds = Rounds(n, per, *self.key, Purpose.WITHIN_CLASS, k, self.rewinder)
            self.rounds[k] = rounds
        return self.groups.pick(k, rounds.take(start, stop))


def _number_of_batches(number: int | None, items: int, batch_size: int) -> int:
    return -(-items // batch_size) if number is None else positive("num_batches", number)


def _checked_alpha(alpha: Any) -> float:
    return number("alpha", alpha, 0, "a number from 0 to 1", 1)
