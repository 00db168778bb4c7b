"""An epoch's order, any place at once: what the samplers of this library make of `(seed, epoch)`."""

from __future__ import annotations

from agnoload.protocols import IndexArray


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
        """The indices at the places `start, start + step, ...` below `stop`; `0 <= start <= stop <= len(self)`."""
        raise NotImplementedError

    def reached(self, count: int) -> int:
        """The position that the global sequence has reached when every rank has delivered `count` items."""
        return self.first + count

    def after(self, position: int) -> Order:
        """What is left of this order when the global sequence has been delivered up to `position`."""
        return self if position == self.first else OrderTail(self, position - self.first)


class OrderTail(Order):
    """An order without its first `skip` items."""

    def __init__(self, order: Order, skip: int) -> None:
        self.order = order
        self.skip = min(skip, len(order))
        self.first = order.first + self.skip

    def __len__(self) -> int:
        return len(self.order) - self.skip

    def take(self, start: int, stop: int, step: int = 1) -> IndexArray:
        return self.order.take(start + self.skip, stop + self.skip, step)


class BatchOrder:
    """The batches of one epoch, any of them at once: what a batch sampler of ours makes of `(seed, epoch)`.

    Subclasses give `__len__`, `batch` and `position`.
    """

    stride: int = 1
    """The distance between the positions of two neighbouring samples of a batch."""

    def __len__(self) -> int:
        """The number of batches."""
        raise NotImplementedError

    def batch(self, number: int) -> IndexArray:
        """The indices of batch `number`, `0 <= number < len(self)`."""
        raise NotImplementedError

    def position(self, number: int) -> int:
        """The position of the first sample of batch `number` in the global sequence."""
        raise NotImplementedError

    def reached(self, number: int) -> int:
        """The position that the global sequence has reached when every rank has delivered `number` batches."""
        raise NotImplementedError

    def after(self, position: int) -> BatchOrder:
        """What is left when the global sequence has been delivered up to `position`; `StateError` inside a batch."""
        raise NotImplementedError
