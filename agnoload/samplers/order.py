"""An epoch's order, any place at once: what the samplers of this library make of `(seed, epoch)`.

An `Order` is a sequence of indices, a `BatchOrder` a sequence of batches of indices. Both stand in the epoch's *global
sequence*, which all ranks share: its positions key the randomness of the samples, and a saved state is one of them.
"""

from __future__ import annotations

import numpy as np

from agnoload.errors import StateError
from agnoload.protocols import IndexArray

BLOCK = 1 << 13
"""So many indices are computed at once where they are wanted one after the other."""


class Order:
    """The indices of one epoch, in order, any place at once: what a sampler of ours makes of `(seed, epoch)`.

    Item `i` stands at position `first + i * stride` of the epoch's global sequence; on one rank `first` is 0 and
    `stride` 1. Subclasses give `__len__` and `take`.
    """

    first: int = 0
    stride: int = 1

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, start: int, stop: int, step: int = 1) -> IndexArray:
        """The indices at the places `start, start + step, ...` below `stop`; `0 <= start`, `stop <= len(self)`.

        The array may be a view of what others read too: do not write into it.
        """
        raise NotImplementedError

    def reached(self, count: int) -> int:
        """The position that the global sequence has reached when every rank has delivered `count` items."""
        return self.first + count

    @property
    def end(self) -> int:
        """The position where the whole sequence ends, that of all ranks."""
        return self.reached(len(self))

    def after(self, position: int) -> Order:
        """What is left of this order when the global sequence has been delivered up to `position`."""
        return self if position <= self.first else OrderTail(self, position - self.first)


class OrderTail(Order):
    """An order without its first `skip` items."""

    def __init__(self, order: Order, skip: int) -> None:
        self.order = order
        self.skip = min(skip, len(order))
        self.first = order.first + skip

    def __len__(self) -> int:
        return len(self.order) - self.skip

    def take(self, start: int, stop: int, step: int = 1) -> IndexArray:
        return self.order.take(start + self.skip, stop + self.skip, step)


class RangeOrder(Order):
    """0, 1, ... n - 1."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def take(self, start: int, stop: int, step: int = 1) -> IndexArray:
        return np.arange(start, stop, step, dtype=np.int64)


class ArrayOrder(Order):
    """The items of an int64 array."""

    def __init__(self, indices: IndexArray) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, start: int, stop: int, step: int = 1) -> IndexArray:
        return self.indices[start:stop:step]


class PickedOrder(Order):
    """What an array or another order holds at the places that `places` names."""

    def __init__(self, indices: IndexArray, places: Order) -> None:
        self.indices = indices
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def take(self, start: int, stop: int, step: int = 1) -> IndexArray:
        return self.indices[self.places.take(start, stop, step)]


class BatchOrder:
    """The batches of one epoch, any of them at once: what a batch sampler of ours makes of `(seed, epoch)`.

    Subclasses give `__len__`, `batch`, `position`, `reached` and `after`.
    """

    stride: int = 1
    """The distance between the positions of two neighbouring samples of a batch."""

    def __len__(self) -> int:
        """The number of batches."""
        raise NotImplementedError

    def batch(self, number: int) -> IndexArray:
        """The indices of batch `number`, `0 <= number < len(self)`; do not write into them."""
        raise NotImplementedError

    def position(self, number: int) -> int:
        """The position of the first sample of batch `number` in the global sequence."""
        raise NotImplementedError

    def reached(self, number: int) -> int:
        """The position that the global sequence has reached when every rank has delivered `number` batches."""
        raise NotImplementedError

    @property
    def end(self) -> int:
        """The position where the whole sequence ends, that of all ranks."""
        return self.reached(len(self))

    def after(self, position: int) -> BatchOrder:
        """What is left when the global sequence has been delivered up to `position`; `StateError` inside a batch."""
        raise NotImplementedError


class BatchTail(BatchOrder):
    """The batches of an order without its first `skip`."""

    def __init__(self, order: BatchOrder, skip: int) -> None:
        self.order = order
        self.skip = min(skip, len(order))
        self.stride = order.stride

    def __len__(self) -> int:
        return len(self.order) - self.skip

    def batch(self, number: int) -> IndexArray:
        return self.order.batch(number + self.skip)

    def position(self, number: int) -> int:
        return self.order.position(number + self.skip)

    def reached(self, number: int) -> int:
        return self.order.reached(number + self.skip)

    def after(self, position: int) -> BatchOrder:
        return self.order.after(position)


class BatchedOrder(BatchOrder):
    """An order cut into batches of `size`; the last may be shorter, or is left out with `drop_last`.

    It may be cut at any position, so that a run that was stopped goes on with batches of another size.
    """

    def __init__(self, order: Order, size: int, drop_last: bool = False) -> None:
        self.order = order
        self.size = size
        self.drop_last = drop_last
        self.stride = order.stride
        self._items = len(order) - len(order) % size if drop_last else len(order)
        self._per_block = max(1, BLOCK // size)
        self._block = -1
        self._indices: IndexArray = np.empty(0, np.int64)

    def __len__(self) -> int:
        return (self._items + self.size - 1) // self.size

    def batch(self, number: int) -> IndexArray:
        block, place = divmod(number, self._per_block)
        if block != self._block:
            start = block * self._per_block * self.size
            self._indices = self.order.take(start, min(start + self._per_block * self.size, self._items))
            self._block = block
        return self._indices[place * self.size : (place + 1) * self.size]

    def position(self, number: int) -> int:
        return self.order.first + number * self.size * self.stride

    def reached(self, number: int) -> int:
        return self.order.reached(min(number * self.size, self._items))

    @property
    def end(self) -> int:
        return self.order.end

    def after(self, position: int) -> BatchOrder:
        return BatchedOrder(self.order.after(position), self.size, self.drop_last)


class EqualBatches(BatchOrder):
    """The batches of a sampler whose batches all hold `size` samples; subclasses give `batch`."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size

    def __len__(self) -> int:
        return self.number

    def position(self, number: int) -> int:
        return number * self.size

    def reached(self, number: int) -> int:
        return number * self.size

    def after(self, position: int) -> BatchOrder:
        skip, inside = divmod(position, self.size)
        if inside:
            raise inside_a_batch(position, skip * self.size, (skip + 1) * self.size)
        return BatchTail(self, skip)


def inside_a_batch(position: int, before: int, behind: int) -> StateError:
    """The error of a position that lies between two borders of batches."""
    return StateError(
        f"the position must be the border of a batch, got {position}, which lies inside the batch of "
        f"{before}...{behind - 1}: this batch sampler makes its batches as wholes, so a state must be loaded with the "
        "batch size that it was saved with"
    )
