"""The requests of one epoch, from a sampler and the place where the epoch stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from agnoload.errors import StateError
from agnoload.messages import Reply
from agnoload.samplers.order import BatchOrder, Order
from agnoload.state import Place
from agnoload.streams import Portion, Rest, StreamPlan, StreamRequest

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
        self.given = 0
        """How many of its batches have held samples."""
        self._ahead = dict(place.ahead)
        self._iterator = self._cuts(place.position)
        self._broken: Exception | None = None
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

    @property
    def complete(self) -> bool:
        """Whether all of it has been delivered."""
        return self.exhausted and not self.outstanding

    @property
    def barren(self) -> bool:
        """Whether the whole epoch is over and none of its batches has held a sample."""
        return self.complete and not (self.given or self.resumed)

    def next(self) -> tuple[Cut, int] | None:
        """The next batch and its number in the epoch, or None at the end."""
        cut = self._next
        if cut is None:
            if self._broken is not None:
                raise self._broken
            return None
        number = self.number
        self.number += 1
        self.outstanding += 1
        try:
            self._next = self._pull()
        except Exception as error:  # a sampler's: the batch that it gave before is still good
            self._next, self._broken = None, error
        return cut, number

    def answered(self, cut: Cut, reply: Reply) -> None:
        """The reply to a batch of this plan has come out of the window."""

    def delivered(self, cut: Cut) -> None:
        """The user has a batch of this plan, in whatever order."""

    def place_after(self, cut: Cut) -> Place:
        """Where the epoch stands when a batch and all before it have been delivered."""
        return Place(self.epoch, cut.reached)

    def ended(self) -> None:
        """All of it has been delivered."""

    def place_ahead(self, place: Place, cuts: list[Cut]) -> Place:
        """`place`, beyond which these batches have been delivered too."""
        return place._replace(ahead=tuple((cut.first, cut.length) for cut in cuts))


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


REST = -1
"""The lane of a request that brings its samples along: what was left over at the ends of a stream's lanes."""


class StreamedPlan(Plan):
    """The batches of a stream: `StreamPlan` says which to ask for, this speaks the loop's language to it."""

    def __init__(
        self, epoch: int, seed: int, place: Place, plan: StreamPlan, drop_last: bool, warn: Callable[[str], None],
        length: int | None,
    ) -> None:  # fmt: skip
        self._stream = plan
        self._requests: dict[Cut, StreamRequest | Rest] = {}
        self._rests: deque[Rest] | None = None
        self._drop_last = drop_last
        self._warn = warn
        self._length = length
        self._samples = place.position
        self._left_out = 0
        self._ended = False
        super().__init__(epoch, seed, place)
        self.resumed = place.stream is not None

    @property
    def reader_start(self) -> dict[str, Any]:
        """What the readers of this epoch begin with."""
        return self._stream.start

    @property
    def complete(self) -> bool:
        return self._stream.finished and not self._stream.rest()

    def _cuts(self, position: int) -> Iterator[Cut]:
        return iter(())

    def next(self) -> tuple[Cut, int] | None:
        cut = self._ask()
        if cut is None:
            return None
        number = self.number
        self.number += 1
        self.outstanding += 1
        return cut, number

    def _pull(self) -> Cut | None:
        return None

    def _ask(self) -> Cut | None:
        request = self._stream.next()
        if request is not None:
            cut = Cut(None, request.batch, 1, 0, 0, request.owner, request.lane, request.size)
            self._requests[cut] = request
            return cut
        if not self._stream.over:
            return None
        if self._rests is None:
            self._rests = deque(self._stream.rest())
        if self._rests:
            rest = self._rests.popleft()
            cut = Cut(_Samples(rest.samples), rest.first, rest.stride, rest.rank, 0, 0, REST)
            self._requests[cut] = rest
            return cut
        if not self.exhausted:
            self.exhausted = True
        return None

    def answered(self, cut: Cut, reply: Reply) -> None:
        self._samples += reply.samples
        self._left_out += len((reply.extras or {}).get("failed", ()))
        request = self._requests[cut]
        if reply.error is None and isinstance(request, StreamRequest):
            told = (reply.extras or {}).get("portion", Told(places=request.size))
            samples = [True] * min(reply.samples, 1)
            self._stream.arrived(
                request,
                Portion(samples, told.end, told.left, told.places, 0, 1, 0, told.state, told.self_sharded),
            )

    def delivered(self, cut: Cut) -> None:
        request = self._requests.pop(cut)
        if isinstance(request, StreamRequest):
            self._stream.delivered(request)
        else:
            self._stream.delivered_rest(request)

    def place_after(self, cut: Cut) -> Place:
        return Place(self.epoch, self._samples, stream=self._stream.state)

    def place_ahead(self, place: Place, cuts: list[Cut]) -> Place:
        return Place(self.epoch, self._samples, stream=self._stream.state)

    def ended(self) -> None:
        """All has been delivered: compare with the length that the stream says it has."""
        if self._length is None or self.resumed or self._ended:
            return
        self._ended = True
        expected, found = self._length, self._samples + self._left_out
        if found != expected and not (self._drop_last and found <= expected and expected - found < self._stream_size()):
            self._warn(
                f"the stream says that it has {expected} samples (len), but it gave {found}: mend its __len__, or "
                "leave it out"
            )

    def _stream_size(self) -> int:
        return int(self._stream.state()["size"])


class Told(NamedTuple):
    """What a reader tells about a batch beside its samples."""

    end: bool = False
    left: list[Any] | None = None
    places: int = 0
    state: Any = None
    self_sharded: bool = False


class _Samples(list[Any]):
    """Samples that travel in a request; compared by identity, so that a `Cut` can be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
