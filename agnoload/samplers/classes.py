"""Items by class, made from an array of labels, and the cycles in which a class's items, and the classes, are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.base import digest, vector
from agnoload.samplers.order import BLOCK, Order, from_array, in_chunks

ARRAY_BELOW = 1 << 16
"""Part of the saved format: shuffles of fewer items of a class are arrays, longer ones keyed bijections."""


class ClassIndex:
    """Items by class: `members[offsets[k]:offsets[k + 1]]` are the items of class k, in rising order.

    `names` are the distinct labels, sorted; `counts` how many items each has; `total` the number of items.
    """

    def __init__(self, name: str, labels: Any) -> None:
        array = vector(name, labels)
        if not array.size:
            raise OptionError(f"{name} must not be empty, got none")
        if array.dtype.kind == "f" and np.isnan(array.min()):
            raise OptionError(f"{name} must not be NaN, got one at index {int(np.flatnonzero(np.isnan(array))[0])}")
        self.total = len(array)
        self.counts: IndexArray
        self.names, codes, self.counts = _distinct(array)
        if len(self.names) <= 1 << 16:
            codes = codes.astype(np.uint16)  # NumPy sorts 16-bit integers by radix, which is five times quicker
        self.offsets: IndexArray = np.concatenate(([0], np.cumsum(self.counts)))
        self.members: IndexArray = np.argsort(codes, kind="stable")

    def __len__(self) -> int:
        """The number of classes."""
        return len(self.names)

    def pick(self, classes: Any, places: IndexArray) -> IndexArray:
        """The items at `places` of a class, or each of a class of its own."""
        items: IndexArray = self.members[self.offsets[classes] + places]
        return items

    def digest(self) -> str:
        """Hexadecimal digits that differ between indexes."""
        return digest(self.members) + digest(self.counts)


def _distinct(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], IndexArray]:
    """The distinct values, sorted; the number of each item's value among them; and how often each comes."""
    if array.dtype.kind in "iub":
        values = array.view(np.uint8) if array.dtype == bool else array
        low, high = int(values.min()), int(values.max())
        if high - low <= 4 * len(values) + 65536 and high <= np.iinfo(np.int64).max:
            shifted = values.astype(np.int64) - low  # few possible values: to count them is quicker than to sort
            counts = np.bincount(shifted)
            present = counts > 0
            codes = (np.cumsum(present) - 1)[shifted]
            return (np.flatnonzero(present) + low).astype(array.dtype), codes, counts[present]
    try:
        names, codes, counts = np.unique(array, return_inverse=True, return_counts=True)
    except TypeError as error:
        raise OptionError(f"labels must be of one type that can be sorted, such as ints or texts: {error}") from None
    return names, codes.reshape(-1), counts


class ShuffledCycles:
    """Endless cycles through 0 ... n - 1, each shuffled on its own: nothing comes twice before everything came once.

    Cycle c fills the places `c * n ... (c + 1) * n - 1`, by a shuffle of its own. The sequence is taken in groups
    of `per`. A group that spans two cycles begins in the tail of one and ends in the head of the next; that head avoids
    what the tail holds, as far as possible, and nothing comes twice in a row:

        cycles of n = 5      a b c d e   c a b e d   ...
        groups of per = 3    0 0 0 1 1   1 2 2 2 3   ...      in group 1, the head c avoids d and e

    Any place is computed without all before it. The changed head of a *long* cycle (`n >= 3 * per`) does not reach its
    tail, so a cycle depends on the plain shuffle before it and on nothing else. Short cycles are made one after the
    other, from one common border of cycle and group to the next: a *period* of `per / gcd(n, per)` cycles. If a period
    ends in what the next one begins with, its last two places, which lie in one group, are exchanged, so that periods
    do not depend on each other.
    """

    def __init__(self, n: int, per: int, shuffle: Callable[[int, int], Order]) -> None:
        """`shuffle(number, array_below)` is a shuffle of the n things, an array if they are fewer than that."""
        self.n = n
        self.per = per
        self.long = n >= 3 * per
        self.period = 1 if self.long else per // gcd(n, per)
        below = ARRAY_BELOW if self.long else n + 1
        self._shuffle = lru_cache(2)(lambda number: shuffle(number, below))
        self._first = -1
        self._made: list[Order] = []
        """The cycles of one period, from number `_first` on, as far as they were needed."""

    def indices(self, start: int, stop: int) -> IndexArray:
        """The things at the places from `start` to before `stop` of the sequence."""
        number, place = divmod(start, self.n)
        if place + stop - start <= self.n:  # most of the calls, and there are as many in a batch as it has classes
            return self._cycle(number).whole(place, place + stop - start, 1)
        parts = []
        while start < stop:
            number, place = divmod(start, self.n)
            parts.append(self._cycle(number).whole(place, min(self.n, place + stop - start), 1))
            start += len(parts[-1])
        return np.concatenate(parts)

    def _cycle(self, number: int) -> Order:
        if self.n <= 2:  # two things that never come twice in a row can only alternate
            number = 0
        first = number - number % self.period
        if first != self._first:
            self._first, self._made = first, []
        while len(self._made) <= number - first:
            make = self._long if self.long else self._short
            self._made.append(make(first + len(self._made)))
        return self._made[number - first]

    def _long(self, number: int) -> Order:
        shuffle, n, per = self._shuffle(number), self.n, self.per
        head = shuffle.indices(0, min(n, per + 1))
        if number:
            tail = self._shuffle(number - 1).indices(n - per, n)
            room = per - number * n % per
            head = _avoiding(head, tail[room:], tail[-1], room)
        if n < ARRAY_BELOW:
            return from_array(np.concatenate((head, shuffle.indices(len(head), n))))

        @lru_cache(1)  # a bijection makes a block of its places as quickly as one of them
        def block(place: int) -> IndexArray:
            low, high = place * BLOCK, min(n, (place + 1) * BLOCK)
            return np.concatenate((head[low:high], shuffle.indices(min(max(low, len(head)), high), high)))

        return in_chunks(n, BLOCK, lambda place, picked: block(place)[picked])

    def _short(self, number: int) -> Order:
        """A short cycle; those of its period that it depends on have been made."""
        n, per = self.n, self.per
        made = self._shuffle(number).indices(0, n)
        if number % self.period:
            opened = number * n - number * n % per  # where the group that is open here begins
            taken = self._made[opened // n - self._first].indices(opened % n, n) if opened % n else made[:0]
            last = self._made[-1].indices(n - 1, n)[0]
            made = _avoiding(made, taken, last, min(n, per - number * n % per))
        ends = n > 2 and (number + 1) % self.period == 0
        if ends and made[-1] == self._shuffle(number + 1).indices(0, 1)[0]:
            made = made.copy()
            made[-2:] = made[:-3:-1].copy()
        return from_array(made)


def _avoiding(raw: IndexArray, tail: IndexArray, last: int, room: int) -> IndexArray:
    """The same things, those of `tail` not among the first `room` if possible, and `last` not the very first."""
    late = 2 * np.isin(raw, tail) + (raw == last)
    if not late[:room].any():
        return raw
    chosen = np.argsort(late, kind="stable")[:room]
    rest = np.ones(len(raw), bool)
    rest[chosen] = False
    return np.concatenate((raw[chosen], raw[rest]))
