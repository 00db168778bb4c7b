"""The loader's side of a stream: which batch to ask of whom, what is delivered, and where to go on.

Batches are asked for in an order that is fixed: lane after lane, round after round, where a stream without shards has
one lane and one that splits itself has a lane for each worker. A lane that has ended gives nothing more, so it changes
nothing that others are still asked for, and neither does how far ahead the loader asks. What does not fill a batch at
the end of a lane is kept, and merged in the order of the lanes once all have ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

from agnoload.errors import AgnoloadError, StateError
from agnoload.messages import StreamReport
from agnoload.streams.base import first_states
from agnoload.streams.layout import layout_of
from agnoload.validate import FARTHEST, MOST_RANKS, fields, items, same, shown, whole

Kind = Literal["stream", "lanes", "workers"]


class StreamRequest(NamedTuple):
    """One batch to ask for."""

    batch: int
    lane: int
    owner: int
    """The worker that must read it."""
    size: int


class Rest(NamedTuple):
    """A batch of what was left over at the ends of the lanes, made of samples that have arrived."""

    samples: list[Any]
    first: int
    stride: int
    rank: int


@dataclass(slots=True)
class _Lane:
    start: int = 0
    """The samples delivered before this plan began: its batch number 0 begins there."""
    count: int = 0
    """The samples delivered; what comes next begins there."""
    at: int = 0
    """The number of samples that `state` stands behind."""
    state: Any = None
    asked: int = 0
    """Batches asked for."""
    ended: bool = False
    left: list[Any] = field(default_factory=list)
    left_at: int = 0
    """The place of the first sample that is left."""
    sum: int | None = None
    """The check sum behind the last batch that has arrived, if readers give some."""
    reader: int = 0
    """Who has read that batch."""


@dataclass(slots=True)
class _Entry:
    """One request, from asking to delivery."""

    request: StreamRequest
    report: StreamReport | None = None
    filled: bool = False
    """The batch holds samples."""
    settled: bool = False
    """The plan has drawn its conclusions: this and all before it have arrived."""
    delivered: bool = False
    after: int | None = None
    """The place in the lane behind this batch; None if the lane had ended."""

    @property
    def done(self) -> bool:
        return self.settled and (self.delivered or not self.filled)


class StreamPlan:
    """Plans one epoch of a stream: `next`, `arrived`, `delivered`, at the end `rest`, and `state` at any time.

    `size` is the batch size (1 where samples are not batched). `state` is what another plan's `state()` gave, with any
    number of workers. `self_sharded` and `rank` as for `StreamReader`. `each` is given where batches are delivered as
    they come: no worker then owes more than so many, and no lane waits for another, so a slow worker holds up no other.

    A loader asks for what `next()` gives, as far ahead as it likes (None: nothing for now); calls `arrived(request,
    report, filled)` for each answer, in any order; delivers each that has samples; and calls `delivered(request)` when
    the user has it. When the plan is `over` it delivers what `rest()` gives and calls `delivered_rest` for each.
    """

    def __init__(
        self,
        stream: Any,
        *,
        size: int,
        workers: int = 0,
        drop_last: bool = False,
        self_sharded: bool = False,
        rank: int | None = None,
        state: dict[str, Any] | None = None,
        each: int | None = None,
    ) -> None:
        self._layout = layout_of(stream, rank)
        self._size = size
        self._workers = max(1, workers)
        self._drop_last = drop_last
        own = (self_sharded or self._layout.shared) and workers
        self._kind: Kind = "lanes" if self._layout.lanes else "workers" if own else "stream"
        self._lanes = [_Lane() for _ in range(self._width())]
        self._turn = 0
        self._merged = 0
        self._ahead: set[tuple[int, int]] = set()
        self._each = each
        self._queues: defaultdict[int, deque[_Entry]] = defaultdict(deque)
        """What is under way, in the order of asking: in one queue, or in one for each lane."""
        self._waiting: dict[StreamRequest, _Entry] = {}
        self._over = False
        self.saved_here = False
        """Whether the state that it goes on from was saved on as many ranks."""
        self.resumed = state is not None and self._restore(state)
        """Whether some of it was delivered before."""
        self.start: dict[str, Any] = {**self.state(), "first": first_states(stream)}
        """Where this plan begins: what its readers are given."""

    def _width(self) -> int:
        return {"stream": 1, "lanes": self._layout.lanes, "workers": self._workers}[self._kind]

    @property
    def lanes(self) -> int:
        """The number of lanes, 0 for a stream without shards; more workers than lanes have nothing to do."""
        return self._layout.lanes

    @property
    def rank(self) -> int | None:
        """Which rank this is in a stream that is split sample by sample, so that a state is good for all ranks."""
        return self._layout.first if self._layout.stride > 1 and self._layout.share is None else None

    @property
    def replays(self) -> bool:
        """Whether the readers must go through samples again that were delivered before, from the start of the epoch.

        A stream with shards reads at most the shards again that are open.
        """
        return not self.lanes and not self._layout.shared and any(count > at for count, at, _ in self.start["lanes"])

    @property
    def over(self) -> bool:
        """Whether all that was asked for has arrived, up to the end of the stream."""
        return self._over

    @property
    def finished(self) -> bool:
        """Whether all samples but those of `rest` are delivered: what has not arrived yet cannot hold any."""
        under_way = chain.from_iterable(self._queues.values())
        return self._over and all(entry.delivered for entry in under_way if entry.filled)

    def next(self) -> StreamRequest | None:
        """What to ask for next; None if nothing, now or ever."""
        while (number := self._next_lane()) is not None:
            lane = self._lanes[number]
            self._turn = (number + 1) % len(self._lanes)
            request = self._request(number, lane.asked)
            lane.asked += 1
            entry = _Entry(request)
            self._queue(request).append(entry)
            place = self._place(request)
            if (number, place) not in self._ahead:
                self._waiting[request] = entry
                return request
            self._ahead.discard((number, place))
            entry.delivered = True  # by the loader whose state this plan began with
            entry.after = place + self._size
            self._settle(request)
        return None

    def _next_lane(self) -> int | None:
        """The first lane from `_turn` on that has not ended, of a worker that does not owe enough already."""
        lanes, each = self._lanes, self._each
        owed = None if each is None or len(lanes) == 1 else Counter(request.owner for request in self._waiting)
        for number in chain(range(self._turn, len(lanes)), range(self._turn)):
            if not lanes[number].ended and (owed is None or each is None or owed[number % self._workers] < each):
                return number
        return None

    def _queue(self, request: StreamRequest) -> deque[_Entry]:
        return self._queues[0 if self._each is None else self._lane_of(request)]

    def _request(self, lane: int, turn: int) -> StreamRequest:
        if self._kind == "stream":
            return StreamRequest(turn, 0, turn % self._workers, self._size)
        if self._kind == "lanes":
            return StreamRequest(turn, lane, lane % self._workers, self._size)
        return StreamRequest(lane + turn * self._workers, 0, lane, self._size)

    def _lane_of(self, request: StreamRequest) -> int:
        return 0 if self._kind == "stream" else request.lane if self._kind == "lanes" else request.owner

    def _place(self, request: StreamRequest) -> int:
        """The place in its lane where a batch begins."""
        turn = request.batch // self._workers if self._kind == "workers" else request.batch
        return self._lanes[self._lane_of(request)].start + turn * self._size

    def arrived(self, request: StreamRequest, report: StreamReport, filled: bool) -> None:
        """Take note of an answer; `filled` says whether the batch holds samples."""
        entry = self._waiting.pop(request)
        entry.report, entry.filled = report, filled
        if report.self_sharded and self._kind == "stream":
            self._divide()
        elif report.self_sharded != (self._kind == "workers"):
            raise AgnoloadError(
                "the stream splits itself in some workers and not in others: ask get_worker_info() in all of them, "
                "before the first sample, or in none"
            )
        self._settle(request)

    def _divide(self) -> None:
        """The stream turns out to split itself: every worker has a lane of its own."""
        entries = self._queues.pop(0)
        if any(entry.settled for entry in entries) or self._lanes[0].count:
            raise AgnoloadError("the stream splits itself over the workers, but has not done so from its start")
        asked = self._lanes[0].asked
        self._kind = "workers"
        self._lanes = [_Lane(asked=len(range(worker, asked, self._workers))) for worker in range(self._workers)]
        self._turn = asked % self._workers
        for entry in entries:
            self._queue(entry.request).append(entry)

    def _settle(self, request: StreamRequest) -> None:
        """Draw conclusions about the queue of this request, where all before it has arrived."""
        entries = self._queue(request)
        for entry in entries:
            if not entry.settled:
                if entry.report is None and not entry.delivered:
                    break
                self._compare_sums(entry)
                if entry.report is not None:
                    self._conclude(entry, entry.report)
                entry.settled = True
        self._over = all(lane.ended for lane in self._lanes)
        while entries and entries[0].done:
            self._pass(entries.popleft())

    def _compare_sums(self, entry: _Entry) -> None:
        """Whether the reader of a batch has gone past what others deliver before it; also of one behind the end."""
        sums = None if entry.report is None else entry.report.sums
        lane, owner = self._lanes[0], entry.request.owner
        if sums is not None and lane.sum is not None and sums[0] != lane.sum:
            raise AgnoloadError(
                f"all workers must read the same samples of {self._layout.compared}, but among the first "
                f"{self._place(entry.request)} workers {lane.reader} and {owner} have read different ones: some would "
                "be lost, others come twice. If the stream draws at random or depends on its process (the clock, the "
                "order of a set), draw from agnoload.sample_rng() (in worker processes also from random or np.random), "
                "sort sets, and do what may differ in map(). If workers are to read different samples, ask "
                "get_worker_info() before the first one and split by it, or give the stream num_shards and shard(i), "
                "or shared_source = True if each item goes to one reader only. Or use num_workers=1"
            )
        lane.sum, lane.reader = (None, 0) if sums is None else (sums[1], owner)

    def _conclude(self, entry: _Entry, report: StreamReport) -> None:
        lane = self._lanes[self._lane_of(entry.request)]
        place = self._place(entry.request)
        if lane.ended:
            return  # it was asked before that was known
        lane.ended = report.end
        if report.leftover is not None:
            lane.left, lane.left_at = report.leftover, place
        elif report.places:  # an early last batch counts as a whole one: who goes on finds the end where it was found
            entry.after = place + self._size

    def _pass(self, entry: _Entry) -> None:
        """The batch and all before it are delivered."""
        if entry.after is None:
            return
        lane = self._lanes[self._lane_of(entry.request)]
        lane.count = entry.after
        if entry.report is not None and entry.report.state is not None:
            lane.at, lane.state = entry.after, entry.report.state

    def delivered(self, request: StreamRequest) -> None:
        """The user has the batch of this request."""
        for entry in self._queue(request):
            if entry.request == request:
                entry.delivered = True
                break
        self._settle(request)

    def rest(self) -> list[Rest]:
        """What was left over at the ends of the lanes, merged in their order and cut into batches; once `over`."""
        width, merged = len(self._lanes), []
        for number, lane in enumerate(self._lanes):
            merged += [(sample, (lane.left_at + place) * width + number) for place, sample in enumerate(lane.left)]
        batches = []
        for start in range(self._merged, len(merged), self._size):
            batch = merged[start : start + self._size]
            if len(batch) == self._size or not self._drop_last:
                samples = [sample for sample, _ in batch]
                batches.append(Rest(samples, batch[0][1], width, self._layout.rank))
        return batches

    def delivered_rest(self, rest: Rest) -> None:
        """The user has this one of what `rest` gave; in their order."""
        self._merged += len(rest.samples)

    def state(self) -> dict[str, Any]:
        """What was delivered until now: JSON, as far as the stream's own state is."""
        entries = list(chain.from_iterable(self._queues.values()))
        undone = next((entry for entry in entries if not entry.done), None)
        # What held no samples must be asked for again: it tells of the end of a lane, and what is left there.
        delivered = [entry.request for entry in entries if entry.delivered and (entry.report is None or entry.filled)]
        ahead = self._ahead | {(self._lane_of(request), self._place(request)) for request in delivered}
        return {
            "kind": self._kind,
            "lanes": [[lane.count, lane.at, lane.state] for lane in self._lanes],
            "turn": self._turn if undone is None else self._lane_of(undone.request),
            "merged": self._merged,
            "ahead": sorted(map(list, ahead)),
            "size": self._size,
            "world": self._layout.stride,
            "share": None if self._layout.share is None else list(self._layout.share),
            "shards": self._layout.shards,
        }

    def _compare(self, what: str, saved: Any, here: Any) -> None:
        if not same(saved, here):
            raise StateError(
                f"the state of a stream must be used with the same {what}: {shown(saved)} was saved, here is {here}"
            )

    def _restore(self, state: dict[str, Any]) -> bool:
        """Go on where a state was taken; whether that is behind the start."""
        kind, saved_lanes, turn, merged, saved_ahead, size, world, share, shards = fields(
            state, "stream", "kind", "lanes", "turn", "merged", "ahead", "size", "world", "share", "shards"
        )
        lanes = [_saved_lane(lane) for lane in items(saved_lanes, "lanes")]
        if kind not in get_args(Kind) or not lanes:
            raise StateError(f"a stream's state must have a kind of {get_args(Kind)} and lanes, got {shown(state)}")
        whole(turn, "turn", len(lanes) - 1)
        whole(merged, "merged", FARTHEST)
        if not whole(size, "size") or not whole(world, "world", MOST_RANKS):
            raise StateError(f"size and world in a stream's state must be at least 1, got {size} and {world}")
        ahead = {_saved_ahead(pair, lanes, size) for pair in items(saved_ahead, "ahead")}
        if not any(lane.count for lane in lanes) and not ahead and not merged:
            return False  # nothing was delivered: whoever saved it, all begins
        if kind == "workers" and self._kind == "stream":
            self._kind = "workers"  # it will turn out so
        if kind != self._kind or len(lanes) != self._width():
            raise StateError(
                f"the state was saved of {_words(kind, len(lanes))}, but this loader reads "
                f"{_words(self._kind, self._width())}: go on as it was"
            )
        self._compare("number of shards", shards, self._layout.shards)
        own = None if self._layout.share is None else list(self._layout.share)
        self._compare("rank and number of ranks, of a stream whose every rank has a state of its own", share, own)
        if world != self._layout.stride:
            lanes = [_for_other_ranks(lane, world, self._layout.stride) for lane in lanes]
        if (size, world) != (self._size, self._layout.stride) and (merged or ahead):
            raise StateError(
                f"the state was saved among batches of {size} samples on {world} ranks that cannot be cut anew, but "
                f"here are batches of {self._size} on {self._layout.stride}: go on as it was"
            )
        self._lanes, self._turn, self._merged, self._ahead = lanes, turn, merged, ahead
        self.saved_here = world == self._layout.stride
        return True


def _saved_lane(lane: Any) -> _Lane:
    count, at, inner = items(lane, "a lane", 3)
    whole(count, "the samples of a lane", FARTHEST)
    whole(at, "the place of a lane's state", count)
    return _Lane(count, count, at, inner)


def _saved_ahead(pair: Any, lanes: list[_Lane], size: int) -> tuple[int, int]:
    """A lane, and the place where a batch begins that was delivered ahead of others."""
    lane, place = items(pair, "what is ahead", 2)
    whole(lane, "the lane of what is ahead", len(lanes) - 1)
    if whole(place, "the place of what is ahead", FARTHEST) < lanes[lane].count or (place - lanes[lane].count) % size:
        raise StateError(
            f"what is ahead in a stream's state must begin whole batches of {size} behind the {lanes[lane].count} "
            f"samples of lane {lane}, got {place}"
        )
    return lane, place


def _for_other_ranks(lane: _Lane, saved: int, here: int) -> _Lane:
    """Where a rank goes on in a stream that was split over another number of ranks, all at the same place of it."""
    if lane.count * saved % here:
        raise StateError(
            f"the state was saved after {lane.count} samples on each of {saved} ranks, which {here} ranks cannot share "
            "evenly: go on with a number of ranks that divides their product"
        )
    count = lane.count * saved // here
    known = lane.at * saved % here == 0
    return _Lane(count, count, lane.at * saved // here if known else 0, lane.state if known else None)


def _words(kind: str, width: int) -> str:
    if kind == "stream":
        return "a stream that is read as a whole"
    return f"a stream in {width} lanes" if kind == "lanes" else f"a stream that splits itself over {width} workers"
