"""The requests of one epoch, from a sampler and the place where the epoch stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from agnoload.errors import StateError
from agnoload.messages import Reply
from agnoload.samplers.order import BatchOrder, Order
from agnoload.state import Place

BLOCK = 1 << 13
"""Indices are asked of an order so many at once."""


class Cut(NamedTuple):
    """One batch of a plan: what to load, its key, and the position that its delivery reaches."""

    indices: Any
    first: int
    stride: int
    rank: int
    reached: int
    owner: int | None = None
    lane: int = 0
    size: int = 0

    @property
    def length(self) -> int:
        """The stretch of the global sequence that it covers."""
        return self.reached - self.first


class Plan:
    """The batches of one epoch that are still to be requested; `exhausted` once the last one has been given.

    `start` is the position before the next batch. A subclass gives `_cuts`.
    """

    def __init__(self, epoch: int, seed: int, place: Place) -> None:
        self.epoch = epoch
        self.seed = seed
        self.place = place
        self.start = place.position
        self.resumed = place.position > 0
        self.number = 0
        self.outstanding = 0
        self.exhausted = False
        self._ahead = dict(place.ahead)
        self._iterator = self._cuts(place.position)
        self._next = self._pull()

    def _cuts(self, position: int) -> Iterator[Cut]:
        raise NotImplementedError

    def _pull(self) -> Cut | None:
        """The next batch, leaving out what was delivered ahead of the saved position."""
        for cut in self._iterator:
            samples = self._ahead.pop(cut.first, None)
            if samples is None:
                return cut
            if samples != cut.length:
                raise StateError(
                    f"a state saved out of order goes on with the same batch size only: a batch of {samples} samples "
                    f"at position {cut.first} was delivered, this loader would load {cut.length} there"
                )
            self.number += 1
            self.start = cut.reached
        self.exhausted = True
        return None

    def next(self) -> tuple[Cut, int] | None:
        """The next batch and its number in the epoch, or None at the end."""
        cut = self._next
        if cut is None:
            return None
        number = self.number
        self.number += 1
        self.outstanding += 1
        self._next = self._pull()
        return cut, number

    def answered(self, cut: Cut, reply: Reply) -> None:
        """The reply to a batch of this plan has come out of the window."""

    def place_after(self, cut: Cut) -> Place:
        """Where the epoch stands when a batch and all before it have been delivered."""
        return Place(self.epoch, cut.reached)


class OrderPlan(Plan):
    """Batches cut from an order of ours; `batch_size` None means single keys."""

    def __init__(
        self, epoch: int, seed: int, place: Place, order: Order, batch_size: int | None, drop_last: bool
    ) -> None:
        self._order = order.after(place.position)
        self._size = batch_size
        self._drop_last = drop_last
        super().__init__(epoch, seed, place)

    def _cuts(self, position: int) -> Iterator[Cut]:
        order, size = self._order, self._size or 1
        total = len(order)
        if self._drop_last:
            total -= total % size
        block = max(BLOCK // size, 1) * size
        first, stride = order.first, order.stride
        for begin in range(0, total, block):
            indices = order.take(begin, min(begin + block, total))
            for low in range(0, len(indices), size):
                batch: Any = indices[low : low + size]
                at = begin + low
                if self._size is None:
                    batch = int(batch[0])
                    yield Cut(batch, first + at * stride, stride, 0, order.reached(at + 1))
                else:
                    yield Cut(batch, first + at * stride, stride, 0, order.reached(at + len(batch)))


class BatchPlan(Plan):
    """The batches of a batch order of ours."""

    def __init__(self, epoch: int, seed: int, place: Place, batches: BatchOrder) -> None:
        self._batches = batches.after(place.position) if place.position else batches
        super().__init__(epoch, seed, place)

    def _cuts(self, position: int) -> Iterator[Cut]:
        batches = self._batches
        for number in range(len(batches)):
            yield Cut(
                batches.batch(number), batches.position(number), batches.stride, 0, batches.reached(number + 1)
            )  # fmt: skip


class ForeignPlan(Plan):
    """Batches of a sampler that we cannot see through: counted here, and passed over one by one after a resume."""

    def __init__(
        self, epoch: int, seed: int, place: Place, items: Iterable[Any], batch_size: int | None, drop_last: bool,
        batched: bool, rank: int,
    ) -> None:  # fmt: skip
        self._items = items
        self._size = batch_size
        self._drop_last = drop_last
        self._batched = batched
        self._rank = rank
        super().__init__(epoch, seed, place)

    def _cuts(self, position: int) -> Iterator[Cut]:
        items = iter(self._items)
        at = 0
        if self._batched:
            for batch in items:
                keys = _keys(batch)
                start, at = at, at + len(keys)
                if start >= position:
                    yield Cut(keys, start, 1, self._rank, at)
                elif at > position:
                    raise StateError(
                        f"position {position} of the state lies inside a batch of positions {start} to {at - 1}"
                    )
            return
        for _ in islice(items, position):
            at += 1
        size = self._size or 1
        while keys := list(islice(items, size)):
            if len(keys) < size and self._drop_last:
                return
            start, at = at, at + len(keys)
            yield Cut(keys[0] if self._size is None else _keys(keys), start, 1, self._rank, at)


def _keys(batch: Any) -> Any:
    """A batch of a stranger's as an int64 array where it is one, else as a list of keys, untouched."""
    keys = batch if isinstance(batch, (list, np.ndarray)) else list(batch)
    if isinstance(keys, np.ndarray):
        return keys.astype(np.int64, copy=False) if keys.dtype.kind in "iu" and keys.ndim == 1 else list(keys)
    if keys and all(type(key) is int for key in keys):
        try:
            return np.array(keys, np.int64)
        except OverflowError:
            return keys
    return keys
