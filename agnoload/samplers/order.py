"""An epoch's order, any place at once: what the samplers of this library make of `(seed, epoch)`.

All ranks share one *global sequence* for each epoch. Its positions key the randomness of the samples, and a saved state
holds one of them. An `Order` is one rank's part of that sequence; here are ten samples, a to j:

    position       0   1   2   3   4   5   6   7   8   9
    one process    a   b   c   d   e   f   g   h   i   j      first 0, stride 1, end 10
    rank 1 of 3        b           e           h              first 1, stride 3, end 10

Item i of a rank is at position `first + i * stride`. When each of the three ranks has delivered two items, all
positions below `reached(2)`, which is 6, have been delivered. A state saved there holds the 6 and no number of ranks,
so any number of ranks can split what is left: `after(6)` of their orders is

    rank 0 of 2                            g       i          first 6, stride 2, end 10
    rank 1 of 2                                h       j      first 7, stride 2, end 10

A `BatchOrder` is the same for batches: `position(k)` is that of batch k's first sample, and `reached(k)` that where all
ranks are once each has delivered k batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from agnoload.errors import StateError
from agnoload.protocols import IndexArray

BLOCK = 1 << 13
"""The number of indices that are computed at once where they are wanted one after the other."""

Indices = Callable[[int, int, int], IndexArray]
"""Gives the indices at the positions `start, start + step, ...` below `stop`."""

Tail = Literal["pad", "drop", "keep"]
"""What ranks do with the items that cannot be split evenly: repeat from the beginning, leave out, or share unevenly."""


@dataclass(frozen=True, eq=False)
class Order:
    """The indices of one epoch for one rank, in order, any place at once.

    `whole` gives the indices of the global sequence, which ends at `end`. Of those from position `start` on, this rank
    has every `stride`-th, beginning with number `rank`. The drawing in `order.py` shows the rest.

    >>> order = Order(10, lambda start, stop, step: np.arange(start, stop, step))
    >>> order.indices(0, 10).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> replace(order, rank=0, stride=2).after(6).indices(0, 2).tolist()
    [6, 8]
    """

    end: int
    whole: Indices
    start: int = 0
    rank: int = 0
    stride: int = 1
    tail: Tail = "keep"

    def __len__(self) -> int:
        return share(self.end - self.start, self.rank, self.stride, self.tail)

    def __iter__(self) -> Iterator[int]:
        """The indices as Python ints, never more than a block of them at once."""
        for start in range(0, len(self), BLOCK):
            yield from self.indices(start, min(start + BLOCK, len(self))).tolist()

    def indices(self, start: int, stop: int, step: int = 1) -> IndexArray:
        """The indices of the items `start, start + step, ...` below `stop`; `0 <= start`, `stop <= len(self)`.

        The array may be a view of one that others read too: do not write into it.
        """
        if self.stride == 1:
            return self.whole(self.start + start, self.start + stop, step)
        low, stride = self.first + start * self.stride, step * self.stride
        high = self.first + (stop - 1) * self.stride + 1 if stop > start else low
        found = self.whole(low, min(high, self.end), stride) if low < self.end else np.empty(0, np.int64)
        padding = np.arange(low + len(found) * stride, high, stride) - self.end
        if not padding.size:
            return found
        again = [self.whole(place, place + 1, 1) for place in (padding % self.end).tolist()]
        return np.concatenate((found, *again))

    @property
    def first(self) -> int:
        """The position of the first item."""
        return self.start + self.rank

    def reached(self, count: int) -> int:
        """The position up to which all is delivered once every rank has delivered `count` items."""
        return self.start + count * self.stride

    def after(self, position: int) -> Order:
        """This rank's part of what is left once the global sequence has been delivered up to `position`."""
        return replace(self, start=min(max(position, self.start), self.end))


def share(items: int, rank: int, world: int, tail: Tail) -> int:
    """How many of `items` one rank gets."""
    if tail == "drop":
        return items // world
    return -(-items // world) if tail == "pad" else -(-(items - rank) // world)


def in_sequence(n: int) -> Order:
    """0, 1, ... n - 1."""
    return Order(n, lambda start, stop, step: np.arange(start, stop, step, dtype=np.int64))


def from_array(indices: IndexArray) -> Order:
    """The items of an int64 array."""
    return Order(len(indices), lambda start, stop, step: indices[start:stop:step])


def in_chunks(total: int, size: int, chunk: Callable[[int, slice], IndexArray]) -> Order:
    """Chunks of `size` indices; `chunk(number, picked)` makes one and gives those that the slice picks."""

    def whole(start: int, stop: int, step: int) -> IndexArray:
        parts = [np.empty(0, np.int64)]
        while start < stop:
            number, place = divmod(start, size)
            parts.append(chunk(number, slice(place, min(size, place + stop - start), step)))
            start += len(parts[-1]) * step
        return np.concatenate(parts)

    return Order(total, whole)


@dataclass(frozen=True, eq=False)
class BatchOrder:
    """The batches of one epoch for one rank, any of them at once: see `order.py`."""

    length: int
    """The number of batches."""
    batch: Callable[[int], IndexArray]
    """The indices of batch `number`, `0 <= number < length`; do not write into them."""
    position: Callable[[int], int]
    """The position of the first sample of batch `number` in the global sequence."""
    reached: Callable[[int], int]
    """The position up to which all is delivered once every rank has delivered `number` batches."""
    end: int
    """The position where the global sequence ends."""
    after: Callable[[int], BatchOrder]
    """What is left once all is delivered up to a position of the global sequence; `StateError` inside a batch."""
    stride: int = 1
    """The distance between the positions of two neighbouring samples of a batch."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[int]]:
        """The batches as lists of Python ints."""
        for number in range(self.length):
            yield self.batch(number).tolist()


def batched(order: Order, size: int, drop_last: bool = False) -> BatchOrder:
    """An order cut into batches of `size`; the last may be shorter, or is left out with `drop_last`.

    It can be cut at any position, so a run that was stopped can be resumed with batches of another size.
    """
    items = len(order) - len(order) % size if drop_last else len(order)
    first, distance = order.first, size * order.stride
    per_block = max(1, BLOCK // size)
    made, block = -1, np.empty(0, np.int64)

    def batch(number: int) -> IndexArray:
        nonlocal made, block
        wanted, place = divmod(number, per_block)
        if wanted != made:
            start = wanted * per_block * size
            block = order.indices(start, min(start + per_block * size, items))
            made = wanted
        return block[place * size : (place + 1) * size]

    return BatchOrder(
        length=-(-items // size),
        batch=batch,
        position=lambda number: first + number * distance,
        reached=lambda number: order.reached(min(number * size, items)),
        end=order.end,
        after=lambda position: batched(order.after(position), size, drop_last),
        stride=order.stride,
    )


def indivisible(
    total: int, batch: Callable[[int], IndexArray], border: Callable[[int], int], skip: int = 0
) -> BatchOrder:
    """Batches that are made as wholes: batch k covers the positions from `border(k)` to before `border(k + 1)`.

    `skip` of the `total` batches are left out at the beginning.
    """

    def after(position: int) -> BatchOrder:
        number = bisect_left(range(total + 1), position, key=border)
        if number <= total and border(number) != position:
            raise StateError(
                f"the position must be the border of a batch, got {position}, which lies inside the batch of "
                f"{border(number - 1)}...{border(number) - 1}: this batch sampler makes its batches as wholes, so load "
                "the state with the batch size that it was saved with"
            )
        return indivisible(total, batch, border, min(number, total))

    return BatchOrder(
        length=total - skip,
        batch=(lambda number: batch(number + skip)) if skip else batch,
        position=lambda number: border(number + skip),
        reached=lambda number: border(number + skip),
        end=border(total),
        after=after,
    )


def every_batch(whole: BatchOrder, rank: int, world: int, tail: Tail, rest: BatchOrder | None = None) -> BatchOrder:
    """Every `world`-th batch of `rest`, beginning with number `rank`; what pads it is repeated from that of `whole`.

    `rest` is what is left of `whole`, the batches of one process; at first, that is all.
    """
    left = whole if rest is None else rest
    n = len(left)

    def batch(number: int) -> IndexArray:
        place = rank + number * world
        return left.batch(place) if place < n else whole.batch((place - n) % len(whole))

    def position_of(place: int) -> int:  # batches that pad have positions of their own, behind all others
        if place < n:
            return left.position(place)
        again, place = divmod(place - n, max(1, len(whole)))
        return left.reached(n) + again * whole.reached(len(whole)) + whole.reached(place)

    return BatchOrder(
        length=share(n, rank, world, tail),
        batch=batch,
        position=lambda number: position_of(rank + number * world),
        reached=lambda number: position_of(number * world),
        end=whole.end,
        after=lambda position: every_batch(whole, rank, world, tail, left.after(position)),
        stride=left.stride,
    )
