"""Endless rounds through a few things, each round shuffled afresh, any place at once.

A class's samples are taken in such rounds, and the classes themselves are visited in them: nothing comes twice before
everything came once. Where one round meets the next, two more things hold: nothing comes twice in a row, and, when the
stream is taken `per` at a time, no such group holds a thing twice that need not.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from agnoload.protocols import IndexArray
from agnoload.samplers.order import BLOCK, Order, in_sequence
from agnoload.samplers.permutation import shuffled
from agnoload.seeding import Purpose, Rewinder

ARRAY_BELOW = 1 << 16
"""Part of the saved format: rounds of fewer things are arrays, longer ones keyed bijections."""


class ShuffledCycles:
    """Round r holds the places `r * n ... (r + 1) * n - 1` of the stream, and is a permutation of 0 ... n - 1.

    The stream is taken in groups of `per`. A group that spans two rounds begins in the tail of one and ends in the head
    of another; that head is chosen among what the tail lacks, as far as this goes.

    Any place is computed without all before it. Where a round is long (`n >= 3 * per`), what is changed in its head
    does not reach its tail, so a round depends on the plain shuffle before it and on nothing else. Where it is short,
    the rounds from one common border of round and group to the next, the *cycle* of `per / gcd(n, per)` rounds, are
    made one after the other; if a cycle ends in what the next one begins with, its last two places, which lie in one
    group, are exchanged, so that cycles do not depend on each other.
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
        """`purpose` and `rank` complete the key; with `first_in_order` round 0 is not shuffled."""
        self.n = n
        self.per = per
        self.long = n >= 3 * per
        self.as_array = n < ARRAY_BELOW or not self.long
        self.cycle = per // gcd(n, per)
        self.first_in_order = first_in_order
        self._key = (seed, epoch, purpose, rank)
        self._rewinder = rewinder
        self._made: dict[int, IndexArray] = {}
        self._raw: tuple[int, Order] = (-1, in_sequence(0))
        self._block: tuple[int, int, IndexArray] = (-1, -1, np.empty(0, np.int64))

    def indices(self, start: int, stop: int) -> IndexArray:
        """The things at the places from `start` to before `stop` of the stream."""
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
        """The places from `low` to before `high` of a round."""
        if self.n <= 2:  # two things that never come twice in a row can only alternate
            number = 0
        if self.as_array:
            return self._round(number)[low:high]
        block = low // BLOCK
        if (high - 1) // BLOCK != block:
            return self._long_part(number, low, high)
        if self._block[:2] != (number, block):
            start = block * BLOCK
            self._block = (number, block, self._long_part(number, start, min(self.n, start + BLOCK)))
        return self._block[2][low % BLOCK : low % BLOCK + high - low]

    def _round(self, number: int) -> IndexArray:
        """A whole round."""
        if number not in self._made:
            first = number if self.long else number - number % self.cycle
            last = next(reversed(self._made), -1)
            start = last + 1 if first <= last < number else first
            if start != last + 1:
                self._made.clear()  # what is kept follows one another
            for each in range(start, number + 1):
                self._made[each] = self._head_changed(each) if self.long else self._changed(each)
                for passed in range(each + 1 - len(self._made), self._opened(each)[0]):
                    del self._made[passed]
        return self._made[number]

    def _head_changed(self, number: int) -> IndexArray:
        head = self._head(number)
        return np.concatenate((head, self._shuffle(number).indices(len(head), self.n)))

    def _long_part(self, number: int, low: int, high: int) -> IndexArray:
        part = self._shuffle(number).indices(low, high)
        if low <= self.per:
            head = self._head(number)[low:high]
            part[: len(head)] = head
        return part

    def _head(self, number: int) -> IndexArray:
        """The beginning of a long round, as far as it may differ from the plain shuffle."""
        before = self._tail(number - 1, self.per) if number else None
        raw = self._shuffle(number).indices(0, min(self.n, self.per + 1))
        if before is None:
            return raw
        used = number * self.n % self.per
        return _avoiding(raw, before[self.per - used :], before[-1], self.per - used)

    def _changed(self, number: int) -> IndexArray:
        """A short round; those of its cycle that it depends on have been made."""
        made = self._shuffle(number).indices(0, self.n)
        if number % self.cycle:
            opened, used = self._opened(number)
            room = min(self.n, self.per - number * self.n % self.per)
            made = _avoiding(made, self._tail(opened, used), self._tail(number - 1, 1)[0], room)
        ends = self.n > 2 and (number + 1) % self.cycle == 0
        if ends and made[-1] == self._shuffle(number + 1).indices(0, 1)[0]:
            made = made.copy()
            made[-2:] = made[:-3:-1].copy()
        return made

    def _opened(self, number: int) -> tuple[int, int]:
        """The round in which the group begins that ends or goes on in this one, and how many of its last it takes."""
        start = number * self.n - number * self.n % self.per
        opened, place = divmod(start, self.n)
        return opened, (self.n - place) % self.n

    def _tail(self, number: int, size: int) -> IndexArray:
        if number in self._made:
            return self._made[number][self.n - size :]
        return self._shuffle(number).indices(self.n - size, self.n)

    def _shuffle(self, number: int) -> Order:
        """The plain shuffle that a round is made from."""
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
    """The same things, those of `tail` not among the first `room` if it can be, and `last` not the very first."""
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
