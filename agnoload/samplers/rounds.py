"""Endless cycles through a few things, each cycle shuffled on its own, any place at once.

A class's samples are taken in such cycles, and the classes themselves are visited in them: nothing comes twice before
everything came once. Where one cycle meets the next, two more things hold: nothing comes twice in a row, and, when the
sequence is taken `per` at a time, no such group holds a thing twice unless it has to.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from agnoload.protocols import IndexArray
from agnoload.samplers.order import BLOCK, Order, in_sequence
from agnoload.samplers.shuffle import shuffled
from agnoload.seeding import Purpose, Rewinder

ARRAY_BELOW = 1 << 16
"""Part of the saved format: cycles of fewer things are arrays, longer ones keyed bijections."""


class ShuffledCycles:
    """Cycle c fills the places `c * n ... (c + 1) * n - 1` of the sequence with a permutation of 0 ... n - 1.

    The sequence is taken in groups of `per`. A group that spans two cycles begins in the tail of one and ends in the
    head of the next; that head avoids what the tail holds, as far as possible:

        cycles of n = 5      a b c d e   c a b e d   ...
        groups of per = 3    0 0 0 1 1   1 2 2 2 3   ...      in group 1, the head c avoids d and e

    Any place is computed without all before it. The changed head of a long cycle (`n >= 3 * per`) does not reach its
    tail, so a cycle depends on the plain shuffle before it and on nothing else. Short cycles are made one after the
    other, from one common border of cycle and group to the next: a *period* of `per / gcd(n, per)` cycles. If a period
    ends in what the next one begins with, its last two places, which lie in one group, are exchanged, so that periods
    do not depend on each other.
    """

    def __init__(
        self,
        n: int,
        per: int,
        seed: int,
        epoch: int,
        purpose: Purpose,
        rank: int,
        rewinder: Rewinder,
        *,
        first_in_order: bool = False,
    ) -> None:
        """`purpose` and `rank` complete the key; with `first_in_order` cycle 0 is not shuffled."""
        self.n = n
        self.per = per
        self.long = n >= 3 * per
        self.as_array = n < ARRAY_BELOW or not self.long
        self.period = per // gcd(n, per)
        self.first_in_order = first_in_order
        self._key = (seed, epoch, purpose, rank)
        self._rewinder = rewinder
        self._made: dict[int, IndexArray] = {}
        self._raw: tuple[int, Order] = (-1, in_sequence(0))
        self._block: tuple[int, int, IndexArray] = (-1, -1, np.empty(0, np.int64))

    def indices(self, start: int, stop: int) -> IndexArray:
        """The things at the places from `start` to before `stop` of the sequence."""
        number, place = divmod(start, self.n)
        if place + stop - start <= self.n:
            return self._part(number, place, place + stop - start)
        parts = []
        while start < stop:
            number, place = divmod(start, self.n)
            parts.append(self._part(number, place, min(self.n, place + stop - start)))
            start += len(parts[-1])
        return np.concatenate(parts)

    def _part(self, number: int, low: int, high: int) -> IndexArray:
        """The places from `low` to before `high` of a cycle."""
        if self.n <= 2:  # two things that never come twice in a row can only alternate
            number = 0
        if self.as_array:
            return self._cycle(number)[low:high]
        block = low // BLOCK
        if (high - 1) // BLOCK != block:
            return self._long_part(number, low, high)
        if self._block[:2] != (number, block):
            start = block * BLOCK
            self._block = (number, block, self._long_part(number, start, min(self.n, start + BLOCK)))
        return self._block[2][low % BLOCK : low % BLOCK + high - low]

    def _cycle(self, number: int) -> IndexArray:
        """A whole cycle."""
        if number not in self._made:
            first = number if self.long else number - number % self.period
            last = next(reversed(self._made), -1)
            start = last + 1 if first <= last < number else first
            if start != last + 1:
                self._made.clear()  # the cycles that are kept are consecutive
            for each in range(start, number + 1):
                self._made[each] = self._long_part(each, 0, self.n) if self.long else self._short(each)
                for passed in range(each + 1 - len(self._made), self._opened(each)[0]):
                    del self._made[passed]
        return self._made[number]

    def _long_part(self, number: int, low: int, high: int) -> IndexArray:
        """The places from `low` to before `high` of a long cycle."""
        head = self._head(number)[low:high] if low <= self.per else np.empty(0, np.int64)
        rest = self._shuffle(number).indices(low + len(head), high)
        return np.concatenate((head, rest)) if len(head) else rest

    def _head(self, number: int) -> IndexArray:
        """The beginning of a long cycle, as far as it may differ from the plain shuffle."""
        before = self._tail(number - 1, self.per) if number else None
        raw = self._shuffle(number).indices(0, min(self.n, self.per + 1))
        if before is None:
            return raw
        used = number * self.n % self.per
        return _avoiding(raw, before[self.per - used :], before[-1], self.per - used)

    def _short(self, number: int) -> IndexArray:
        """A short cycle; those of its period that it depends on have been made."""
        made = self._shuffle(number).indices(0, self.n)
        if number % self.period:
            opened, used = self._opened(number)
            room = min(self.n, self.per - number * self.n % self.per)
            made = _avoiding(made, self._tail(opened, used), self._tail(number - 1, 1)[0], room)
        ends = self.n > 2 and (number + 1) % self.period == 0
        if ends and made[-1] == self._shuffle(number + 1).indices(0, 1)[0]:
            made = made.copy()
            made[-2:] = made[:-3:-1].copy()
        return made

    def _opened(self, number: int) -> tuple[int, int]:
        """The cycle where the group that is open at the start of this one begins, and how many of its last it takes."""
        start = number * self.n - number * self.n % self.per
        opened, place = divmod(start, self.n)
        return opened, (self.n - place) % self.n

    def _tail(self, number: int, size: int) -> IndexArray:
        if number in self._made:
            return self._made[number][self.n - size :]
        return self._shuffle(number).indices(self.n - size, self.n)

    def _shuffle(self, number: int) -> Order:
        """The plain shuffle that a cycle is made from."""
        if self._raw[0] != number:
            below = ARRAY_BELOW if self.long else self.n + 1
            shuffle: Order = in_sequence(self.n)
            if number or not self.first_in_order:
                seed, epoch, purpose, rank = self._key
                shuffle = shuffled(
                    self.n, seed, epoch, purpose, number, rank, array_below=below, rewinder=self._rewinder
                )
            self._raw = (number, shuffle)
        return self._raw[1]


def _avoiding(raw: IndexArray, tail: IndexArray, last: int, room: int) -> IndexArray:
    """The same things, those of `tail` not among the first `room` if possible, and `last` not the very first."""
    late = 2 * np.isin(raw, tail) + (raw == last)
    if not late[:room].any():
        return raw
    chosen = np.argsort(late, kind="stable")[:room]
    rest = np.ones(len(raw), bool)
    rest[chosen] = False
    made = np.concatenate((raw[chosen], raw[rest]))
    if made[0] == last:
        made[:2] = made[1::-1].copy()
    return made
