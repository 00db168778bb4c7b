"""The requests of one epoch, from a sampler and the place where the epoch stands."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from agnoload.errors import OptionError, StateError
from agnoload.messages import LEFTOVER_LANE, Reply, StreamReport
from agnoload.planning.state import Place
from agnoload.planning.stream_plan import Rest, StreamPlan, StreamRequest
from agnoload.samplers.order import BLOCK, BatchOrder, Order


class Cut(NamedTuple):
    """One batch of a plan: what to load, its key, and the stretch of the global sequence that it covers."""

    indices: Any
    first: int
    stride: int
    rank: int
    reached: int
    """The position that its delivery reaches."""
    owner: int | None = None
    lane: int = 0
    size: int = 0
    start: int = 0
    """The position that was reached before."""
    mark: Any = None
    """What a state needs besides, to go on behind it."""


class Plan:
    """The batches of one epoch that are still to be requested; `exhausted` once the last one has been given.

    `number` is that of the next batch in the epoch. A subclass gives `_cuts`.
    """

    number = 0
    foreseen = True
    """Whether it knows its last batch before all replies have come."""
    source: str | None = None
    """What of the user's is iterated anew for each epoch, if anything is."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.epoch = place.epoch
        self.seed = place.seeds.samples
        self.resumed = place.position > 0 or bool(place.ahead)
        """Whether some of it was delivered before."""
        self.others = False
        """Whether other ranks may have batches left where this one has none, so that it stays in their epoch."""
        self.outstanding = 0
        self.exhausted = False
        self.given = 0
        """How many of its batches have held samples."""
        self.tally = place.tally
        """What has failed of what was delivered, if that is counted."""
        self._iterator = self._cuts(place.position)
        self._broken: Exception | None = None
        self._next = self._pull()

    def _cuts(self, position: int) -> Iterator[Cut]:
        raise NotImplementedError

    def _pull(self) -> Cut | None:
        """The next batch, leaving out what was delivered ahead of the saved position."""
        for cut in self._iterator:
            if not self.place.ahead or not self._was_delivered(cut):
                return cut
            self.number += 1
        self.exhausted = True
        return None

    def _was_delivered(self, cut: Cut) -> bool:
        for start, stop in self.place.ahead:
            if start <= cut.start and cut.reached <= stop:
                return True
            if start < cut.reached and cut.start < stop:
                raise StateError(
                    f"a state saved out of order goes on with the same batches only: positions {start} to {stop - 1} "
                    f"were delivered, this loader's batch holds {cut.start} to {cut.reached - 1}"
                )
        return False

    @property
    def passed(self) -> bool:
        """Whether it had been delivered whole before, so that the next epoch follows; once it has been `exhausted`."""
        return self.resumed and not self.given and not self.others

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
        self._next = None
        number = self.number
        self.number += 1
        self.outstanding += 1
        try:
            self._next = self._pull()
        except Exception as error:  # a sampler's: the batch that it gave before is still good
            self._next, self._broken = None, error
        return cut, number

    def answered(self, cut: Cut, reply: Reply) -> None:
        """The reply to a batch of this plan has come, in whatever order."""

    def delivered(self, cut: Cut) -> None:
        """The user has a batch of this plan, in whatever order."""

    def ended(self) -> None:
        """All of it has been delivered."""

    def place_after(self, cut: Cut | None, ahead: list[Cut]) -> Place:
        """Where the epoch stands when a batch and all before it have been delivered, and some beyond it.

        `cut` is None where it stands where it began.
        """
        position = self.place.position if cut is None else cut.reached
        stretches = sorted([*self.place.ahead, *((other.start, other.reached) for other in ahead)])
        joined: list[tuple[int, int]] = []
        for start, stop in stretches:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif stop > position:
                joined.append((start, stop))
        return Place(self.epoch, position, self.place.seeds, ahead=tuple(joined))

    def end(self) -> Place:
        """Where it stands when all of it has been delivered: the next epoch is to begin."""
        return Place(self.epoch + 1, seeds=self.place.seeds, begun=False)


class OrderPlan(Plan):
    """Batches cut from an order of ours; `batch_size` None means single keys."""

    def __init__(self, place: Place, order: Order, batch_size: int | None, drop_last: bool) -> None:
        _check_within(place, order.end)
        self._order = order.after(place.position)
        self._size = batch_size
        self._drop_last = drop_last
        self.number = -(-place.position // ((batch_size or 1) * order.stride))
        rest, size = self._order, batch_size or 1
        total = len(rest) - len(rest) % size if drop_last else len(rest)
        _check_ahead(place, -(-total // size), lambda count: rest.reached(min(count * size, total)))
        super().__init__(place)
        self.others = self.exhausted and place.position < order.end

    def _cuts(self, position: int) -> Iterator[Cut]:
        order, size = self._order, self._size or 1
        total = len(order)
        if self._drop_last:
            total -= total % size
        block = max(BLOCK // size, 1) * size
        first, stride = order.first, order.stride
        reached = position
        for begin in range(0, total, block):
            indices = order.indices(begin, min(begin + block, total))
            for low in range(0, len(indices), size):
                batch: Any = indices[low : low + size]
                at = begin + low
                start, reached = reached, order.reached(at + len(batch))
                if self._size is None:
                    batch = int(batch[0])
                yield Cut(batch, first + at * stride, stride, 0, reached, start=start)


class BatchPlan(Plan):
    """The batches of a batch order of ours."""

    def __init__(self, place: Place, batches: BatchOrder) -> None:
        _check_within(place, batches.end)
        self._batches = batches.after(place.position) if place.position else batches
        self.number = max(0, len(batches) - len(self._batches))
        _check_ahead(place, len(self._batches), self._batches.reached)
        super().__init__(place)
        self.others = self.exhausted and place.position < batches.end

    def _cuts(self, position: int) -> Iterator[Cut]:
        batches = self._batches
        reached = position
        for number in range(len(batches)):
            start, reached = reached, batches.reached(number + 1)
            yield Cut(batches.batch(number), batches.position(number), batches.stride, 0, reached, start=start)


def _check_within(place: Place, total: int) -> None:
    if place.position > total:
        raise StateError(f"position {place.position} of the state lies beyond the {total} samples of the epoch")


def _check_ahead(place: Place, batches: int, reached: Callable[[int], int]) -> None:
    """What was delivered ahead must be whole batches; `reached` says where a number of them ends."""
    for border in chain(*place.ahead):
        number = bisect_left(range(batches + 1), border, key=lambda count: reached(count) if count else place.position)
        if number > batches or border != (reached(number) if number else place.position):
            delivered = ", ".join(f"{start} to {stop - 1}" for start, stop in place.ahead[:8])
            raise StateError(
                f"a state saved out of order goes on with the same batches only: positions {delivered} were delivered, "
                f"but no batch of this loader begins or ends at {border}"
            )


def keys_of(batch: Any) -> Any:
    """A batch of a stranger's as an int64 array where it is one, else as a list of keys."""
    if isinstance(batch, np.ndarray) and batch.ndim == 1 and batch.dtype.kind in "iu":
        if np.can_cast(batch.dtype, np.int64):
            return batch.astype(np.int64, copy=False)
        batch = batch.tolist()
    try:
        batch = iter(batch)
    except TypeError:
        raise OptionError(
            f"a batch_sampler must yield batches of indices, got {batch!r}: a sampler of single indices is sampler="
        ) from None
    keys = [key_of(key) for key in batch]
    if keys and all(type(key) is int for key in keys):
        try:
            return np.array(keys, np.int64)
        except OverflowError:
            return keys
    return keys


def key_of(key: Any) -> Any:
    """A key of a stranger's: untouched, but an index is a Python int, also one in an array or tensor without axes."""
    if type(key) is int or getattr(key, "ndim", None) != 0:
        return key
    try:
        index = operator.index(key)
    except TypeError:  # not an integer
        return key
    return index if isinstance(key, np.generic) or "bool" not in str(key.dtype) else key


class StreamedPlan(Plan):
    """The batches of a stream: `StreamPlan` says which to ask for, this speaks the loop's language to it."""

    foreseen = False
    source = "stream"

    def __init__(
        self, place: Place, plan: StreamPlan, drop_last: bool, warn: Callable[[str], None], length: int | None
    ) -> None:
        self._stream = plan
        self._requests: dict[Cut, StreamRequest | Rest] = {}
        self._rests: deque[Rest] | None = None
        self._drop_last = drop_last
        self._warn = warn
        self._length = length
        self._sizes: dict[Cut, int] = {}
        self._samples = place.position
        self._left_out = 0
        self._ended = False
        super().__init__(place)
        self.resumed = plan.resumed
        self._own = place.rank == plan.rank and plan.saved_here

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
            cut = Cut(_Samples(rest.samples), rest.first, rest.stride, rest.rank, 0, 0, LEFTOVER_LANE)
            self._requests[cut] = rest
            return cut
        self.exhausted = True
        return None

    def answered(self, cut: Cut, reply: Reply) -> None:
        self._left_out += len(reply.failed)
        request, failed = self._requests[cut], reply.error is not None
        if not isinstance(request, StreamRequest):
            self._sizes[cut] = len(request.samples)
            return
        report = reply.stream or StreamReport(places=request.size)
        self._sizes[cut] = report.places if failed else reply.samples
        if not (failed and reply.end):
            self.others |= report.others and not self._own
            self._stream.arrived(request, report, failed or reply.samples > 0)

    def delivered(self, cut: Cut) -> None:
        self._samples += self._sizes.pop(cut)
        request = self._requests.pop(cut)
        if isinstance(request, StreamRequest):
            self._stream.delivered(request)
        else:
            self._stream.delivered_rest(request)

    def place_after(self, cut: Cut | None, ahead: list[Cut]) -> Place:
        stream = self._stream
        return Place(self.epoch, self._samples, self.place.seeds, stream=stream.state(), rank=stream.rank)

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


class _Samples(list[Any]):
    """Samples that travel in a request; compared by identity, so that a `Cut` can be a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
