"""Apportionment: how many places each class or source gets, in one batch by largest remainder, and evenly over time."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np
import numpy.typing as npt

from agnoload.protocols import IndexArray

EPSILON = 1e-9
"""Shares that differ by less are equal: they are sums and products of fractions that float64 does not hold exactly."""


def class_shares(counts: IndexArray, alpha: float) -> npt.NDArray[np.float64]:
    """The target share of each class, `alpha / C + (1 - alpha) * n_k / N`; they sum to 1."""
    shares: npt.NDArray[np.float64] = alpha / len(counts) + (1 - alpha) * counts / counts.sum()
    return shares


def floors(wanted: npt.NDArray[np.float64]) -> IndexArray:
    """The whole places in a wanted number of places each."""
    whole: IndexArray = np.floor(wanted + EPSILON).astype(np.int64)
    return whole


def class_counts(shares: npt.NDArray[np.float64], batch_size: int, min_per_class: int = 0) -> IndexArray:
    """How many of each class a batch of `batch_size` holds, by largest remainder, at least `min_per_class` of each.

    Floors first, then one more for the largest remainders, ties to the first class. If a class is then below the
    minimum, it takes places one by one from the class that is most above its share, ties from the last. A minimum that
    does not fit into the batch is lowered until it does.

    >>> class_counts(np.array([0.6, 0.3, 0.1]), 8).tolist()
    [5, 2, 1]
    """
    wanted = shares * batch_size
    counts = floors(wanted)
    remainders = np.round((wanted - counts) / EPSILON)
    counts[np.argsort(-remainders, kind="stable")[: batch_size - counts.sum()]] += 1
    least = min(min_per_class, batch_size // len(shares))
    if lacking := int(np.maximum(least - counts, 0).sum()):
        have, want = counts.tolist(), wanted.tolist()  # Python's own numbers are quicker one by one
        givers = [(round((want[k] - have[k]) / EPSILON), -k) for k in range(len(have)) if have[k] > least]
        heapify(givers)
        for _ in range(lacking):
            k = -givers[0][1]
            have[k] -= 1
            if have[k] > least:
                heapreplace(givers, (round((want[k] - have[k]) / EPSILON), -k))
            else:
                heappop(givers)
        counts = np.maximum(have, least)
    return counts


def exact_shares(weights: list[int], size: int, owed: list[int]) -> tuple[list[int], list[int]]:
    """How many of a batch's samples come from each source, by largest remainder, and what each is owed after it.

    What is owed is counted in samples times the sum of the weights, so that nothing is ever rounded away.

    >>> exact_shares([6, 3, 1], 16, [0, 0, 0])
    ([10, 5, 1], [-4, -2, 6])
    >>> exact_shares([6, 3, 1], 16, [-4, -2, 6])
    ([9, 5, 2], [2, -4, 2])
    """
    one = sum(weights)
    due = [weight * size + before for weight, before in zip(weights, owed, strict=True)]
    counts = [max(0, share // one) for share in due]
    if sum(counts) > size:  # a source that had too much takes more back than its share: give out one by one
        counts = [0] * len(due)
    left = [share - count * one for share, count in zip(due, counts, strict=True)]
    for _ in range(size - sum(counts)):
        source = left.index(max(left))
        counts[source] += 1
        left[source] -= one
    return counts, left


class Rotation:
    """Gives `places` in each batch to classes in proportion to `rates`, evenly over time, any batch at once.

    Class k comes up at the times `(i + phase_k) / rate_k`, i = 0, 1, ...; the places go to the classes in the order of
    these times (a divisor method of apportionment). The phases are evenly spaced; `order` is a random permutation that
    assigns them.
    """

    def __init__(self, rates: npt.NDArray[np.float64], order: IndexArray, places: int) -> None:
        self.rates = np.round(rates / EPSILON) * EPSILON
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
        classes, total = len(self.rates), max(self.rates.sum(), EPSILON)
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
