"""Batches of items of similar length, by count, by a budget of padded tokens, or both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.base import SeededSampler, effective_seed
from agnoload.samplers.classes import ARRAY_BELOW, ClassIndex
from agnoload.samplers.order import BatchOrder, Order, indivisible
from agnoload.samplers.shuffle import shuffled
from agnoload.seeding import Purpose, Rewinder
from agnoload.validate import flag, number_of, positive, word

GROWTH = 1.125
"""Part of the saved format: a default bucket's longest item is at most this much longer than its shortest."""


class BucketBatchSampler(SeededSampler[list[int]]):
    """Batches of items of similar length: at most `batch_size` items, at most `max_tokens` after padding, or both.

    `lengths` is one integer for each item; a batch costs its count times its longest length (an empty item counts as
    1). Items are sorted into buckets of similar length, shuffled within their bucket, and batches are cut one after the
    other from the shortest bucket to the longest; then the batches are shuffled. Each item is counted as long as the
    longest of its bucket, so that the number of batches is the same in each epoch. `buckets` is None (lengths that
    differ by an eighth at most), a number (that many buckets of about the same count) or a rising list of the longest
    length of each. `shuffle=False` makes no random choice: items are sorted by length, each length is a bucket, and
    batches are cut in that order. `largest_first` moves the most expensive batch to the front, so that memory runs out
    at once or never.

    An item longer than `max_tokens` is refused; `oversized="alone"` gives it a batch of its own. `drop_last` leaves
    out `len(lengths) % batch_size` items, different ones in each epoch; it cannot be combined with `max_tokens`.

    >>> sampler = BucketBatchSampler([2, 3, 3, 4, 6, 6, 9], max_tokens=12, shuffle=False)
    >>> list(sampler)
    [[0, 1, 2], [3, 4], [5], [6]]
    >>> round(sampler.padding_share(), 3)
    0.083
    """

    yields_batches = True
    _fixed = ("lengths", "batch_size", "max_tokens", "shuffle", "drop_last", "largest_first")

    def __init__(
        self, lengths: Any, batch_size: int | None = None, max_tokens: int | None = None,
        buckets: int | Sequence[int] | None = None, shuffle: bool = True, drop_last: bool = False, *,
        largest_first: bool = False, oversized: Literal["raise", "alone"] = "raise", seed: int | None = None,
        generator: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(seed=seed, generator=generator)
        if batch_size is None and max_tokens is None:
            raise OptionError("batch_size or max_tokens must be given, got None for both")
        if flag("drop_last", drop_last) and max_tokens is not None:
            raise OptionError(
                "drop_last must be False with max_tokens: batches differ in size, so there is no last one to complete"
            )
        word("oversized", oversized, ("raise", "alone"))
        self.batch_size = None if batch_size is None else positive("batch_size", batch_size)
        self.max_tokens = None if max_tokens is None else positive("max_tokens", max_tokens)
        self.shuffle = flag("shuffle", shuffle)
        self.drop_last = bool(drop_last)
        self.largest_first = flag("largest_first", largest_first)
        self.lengths = lengths
        self.groups = groups = ClassIndex("lengths", lengths)
        names = groups.names
        if names.dtype.kind not in "iu" or names[0] < 0:
            raise OptionError(f"lengths must be integers of at least 0, got {names.dtype}, the least {names[0]}")
        if self.max_tokens is not None and oversized == "raise" and names[-1] > self.max_tokens:
            first = int(np.argmax(names > self.max_tokens))
            raise OptionError(
                f"lengths must be at most max_tokens, got length {names[first]} at index "
                f"{groups.members[groups.offsets[first]]} and max_tokens {self.max_tokens}: raise max_tokens, or pass "
                "oversized='alone'"
            )
        self.data_length = groups.total
        numbers = self._bucket_numbers(buckets)
        firsts = np.flatnonzero(np.append(True, np.diff(numbers) != 0))  # the shortest length of each bucket
        self.offsets: IndexArray = np.append(groups.offsets[firsts], groups.total)
        longest = names[np.append(firsts[1:], len(names)) - 1]
        self.longest: IndexArray = np.maximum(longest, 1).astype(np.int64)
        self.borders = self._cut()
        self.left_out = groups.total % self.batch_size if self.drop_last and self.batch_size else 0
        if self.left_out:
            self.borders = self.borders[:-1]

    def _bucket_numbers(self, buckets: int | Sequence[int] | None) -> IndexArray:
        """A number for each distinct length, the same for those that share a bucket; they rise with the length."""
        numbers: IndexArray
        lengths = np.maximum(self.groups.names.astype(np.int64), 1)
        if buckets is None or not self.shuffle:
            steps = np.log(lengths) / np.log(GROWTH) if self.shuffle else np.arange(len(lengths))
            numbers = np.floor(steps + 1e-9).astype(np.int64)
        elif isinstance(buckets, (int, np.integer)):
            numbers = self.groups.offsets[:-1] * positive("buckets", buckets) // self.groups.total
        else:
            bounds = np.asarray(buckets)
            if bounds.ndim != 1 or not bounds.size or bounds.dtype.kind not in "iuf" or (np.diff(bounds) <= 0).any():
                raise OptionError(f"buckets must be a number or a rising list of lengths, got {buckets!r}")
            numbers = np.searchsorted(bounds, lengths, side="left").astype(np.int64)
        if self.max_tokens is not None:  # an item that is too long does not share a bucket with one that is not
            numbers = 2 * numbers + (lengths > self.max_tokens)
        return numbers

    def _cut(self) -> IndexArray:
        """The borders of the batches in the sequence of all items, bucket after bucket; a batch may span several."""
        total, offsets = self.groups.total, self.offsets.tolist()
        rooms = np.full(len(self.longest), self.batch_size or total)
        if self.max_tokens is not None:
            rooms = np.minimum(rooms, np.maximum(self.max_tokens // self.longest, 1))
        borders = [np.zeros(1, np.int64)]
        held = 0  # items in the open batch
        for start, stop, room in zip(offsets, offsets[1:], rooms.tolist(), strict=False):
            if held >= room:
                borders.append(np.array([start]))
                held = 0
            full = np.arange(start - held + room, stop + 1, room)
            borders.append(full)
            held = stop - int(full[-1]) if full.size else held + stop - start
        if held:
            borders.append(np.array([total]))
        return np.concatenate(borders)

    def __len__(self) -> int:
        return len(self.borders) - 1

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        n, rewinder, offsets = len(self), Rewinder(), self.offsets
        members: IndexArray = self.groups.members
        cuts = np.arange(n)  # the batches of the cut, in the order of the epoch
        hole = n  # the items that `drop_last` leaves out lie before this batch of the cut
        if self.shuffle and n:
            cuts = shuffled(n, seed, epoch).indices(0, n)
            if self.left_out:
                hole = int(rewinder.rewind(seed, epoch, Purpose.ORDER, 0, 1).integers(n + 1))
        if self.largest_first and n:
            largest = int(np.argmax(self.costs()))
            cuts[cuts == largest] = cuts[0]
            cuts[0] = largest
        borders = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.diff(self.borders)[cuts])))

        @cache
        def bucket(number: int) -> Order:
            items = int(offsets[number + 1] - offsets[number])
            purpose = Purpose.WITHIN_CLASS
            return shuffled(items, seed, epoch, purpose, 0, number, array_below=ARRAY_BELOW, rewinder=rewinder)

        def batch(number: int) -> IndexArray:
            cut = int(cuts[number])
            start, stop = (self.borders[cut : cut + 2] + (self.left_out if cut >= hole else 0)).tolist()
            if not self.shuffle:
                return members[start:stop]
            parts: list[IndexArray] = []  # places among the items sorted by length, bucket by bucket
            k = int(np.searchsorted(offsets, start, side="right")) - 1
            while start < stop:
                low, high = offsets[k : k + 2].tolist()
                parts.append(bucket(k).indices(start - low, min(high, stop) - low) + low)
                start, k = min(high, stop), k + 1
            return members[np.concatenate(parts)]

        return indivisible(n, batch, lambda number: int(borders[number]))

    def padding_share(self, epoch: int = 0) -> float:
        """The share of padding in the padded batches of an epoch, from 0 to 1, by this sampler's own seed."""
        batches = self.batches(effective_seed(self, None, self._drawn), epoch)
        lengths = np.asarray(self.lengths)
        found = [lengths[batches.batch(number)] for number in range(len(batches))]
        padded = sum(int(batch.max()) * len(batch) for batch in found)
        return 1 - sum(int(batch.sum()) for batch in found) / padded if padded else 0.0

    def identity(self) -> str:
        options = f"{self.batch_size}, {self.max_tokens}, {self.shuffle}, {self.drop_last}, {self.largest_first}"
        return f"BucketBatchSampler({options}, {len(self.longest)}, {len(self)}, {self.groups.digest()})"

    def costs(self) -> IndexArray:
        """What each batch costs at most, in the order of the cut: its count times the longest of its last bucket."""
        last = np.searchsorted(self.offsets, self.borders[1:], side="left") - 1
        return np.diff(self.borders) * self.longest[last]

    def __repr__(self) -> str:
        costs, total = self.costs().sum(), int((self.groups.names.astype(np.int64) * self.groups.counts).sum())
        share = "" if self.left_out else f", padding at most {1 - total / costs:.1%}"
        return self._repr_of(
            f"{number_of(self.groups.total, 'length')} in {number_of(len(self.longest), 'bucket')}",
            *(f"{name}={getattr(self, name)}" for name in ("batch_size", "max_tokens") if getattr(self, name)),
            f"{number_of(len(self), 'batch')}{share}",
        )
