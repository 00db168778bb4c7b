"""Apportionment: how many places each class or source gets, in one batch by largest remainder, and evenly over time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

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
    for _ in range(int(np.maximum(least - counts, 0).sum())):
        above = np.where(counts > least, np.round((counts - wanted) / EPSILON), -np.inf)
        counts[len(above) - 1 - int(np.argmax(above[::-1]))] -= 1
    return np.maximum(counts, least)


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


def rotation(rates: npt.NDArray[np.float64], order: IndexArray, places: int) -> Callable[[int], IndexArray]:
    """Gives `places` in each batch to classes in proportion to `rates`, evenly over time.

    The function that comes back says how often each class has come up before batch `number`, any number at once. Class
    k comes up at the times `(i + phase_k) / rate_k`, i = 0, 1, ...; the places go to the classes in the order of these
    times (a divisor method of apportionment). The phases are evenly spaced; `order` is a random permutation that
    assigns them.
    """
    rates = np.round(rates / EPSILON) * EPSILON
    offsets, total = 1 - (order + 0.5) / len(order), max(rates.sum(), EPSILON)

    def counts_at(time: float) -> IndexArray:
        counts: IndexArray = np.floor(time * rates + offsets).astype(np.int64)
        return counts

    @lru_cache(2)  # the end of one batch is the start of the next
    def before(number: int) -> IndexArray:
        wanted = number * places
        low, high = max(0.0, (wanted - len(rates)) / total), (wanted + len(rates)) / total
        for _ in range(100):  # find by bisection the time at which `wanted` places are taken
            middle = (low + high) / 2
            counts = counts_at(middle)
            taken = int(counts.sum())
            if taken == wanted:
                return counts
            low, high = (middle, high) if taken < wanted else (low, middle)
        counts = counts_at(low)  # several come up at the same time: the first of them
        due = np.flatnonzero(counts_at(high) > counts)
        counts[due[: wanted - int(counts.sum())]] += 1
        return counts

    return before
