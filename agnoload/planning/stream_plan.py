"""The plan of a stream: which batch to ask of which worker, what is delivered, and where to resume.

Batches are asked for in an order that is fixed: lane after lane, round after round, where a stream without shards has
one lane and one that splits itself has a lane for each worker. A lane that has ended gives nothing more, so it changes
nothing that others are still asked for, and neither does how far ahead the loader asks. The samples that do not fill a
batch at the end of a lane come with the last reply. Once all lanes have ended they are merged, in the order of the
lanes, into leftover batches, which travel to a worker again to be collated.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from agnoload.errors import AgnoloadError
from agnoload.messages import LEFTOVER_LANE, LaneStart, Reply, Request, StreamReport, StreamStart, request_numbers
from agnoload.options import Options
from agnoload.planning.plan import Plan
from agnoload.planning.state import EpochPosition, Kind, StreamPosition, fitted
from agnoload.streams import first_states, length_or_none, part_without_state, split_of
from agnoload.streams.layout import Layout, layout_of
from agnoload.validate import brief, number_of

SPLIT_IN_SOME = (
    "the stream splits itself in some workers and not in others, or not from its start: ask get_worker_info() in all "
    "of them, before the first sample, or in none"
)


@dataclass(slots=True)
class _Lane:
    start: int = 0
    """The samples delivered before this plan began: its batch number 0 begins there."""
    count: int = 0
    """The samples delivered; what comes next begins there."""
    at: int = 0
    """How many samples were taken before `state`."""
    state: Any = None
    asked: int = 0
    """Batches asked for."""
    ended: bool = False
    leftover: list[Any] = field(default_factory=list)
    leftover_at: int = 0
    """The place of the first of them."""
    sum: int | None = None
    """The check sum after the last batch that has arrived, if readers give some."""
    reader: int = 0
    """Who has read that batch."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One batch, from asking to delivery."""

    request: Request
    lane: int
    place: int
    """The place in the lane where it begins."""
    report: StreamReport | None = None
    filled: bool = False
    """The batch holds samples, or the error of some."""
    failed: bool = False
    """Samples of it were left out: they count, but are in no batch."""
    concluded: bool = False
    """This and all before it have arrived, and the plan has drawn its conclusions."""
    delivered: bool = False
    after: int | None = None
    """The place in the lane after it; None if the lane had ended."""

    @property
    def done(self) -> bool:
        return self.concluded and (self.delivered or not self.filled)


class _Shape(NamedTuple):
    """What a loader asks of a stream."""

    layout: Layout
    size: int
    workers: int
    drop_last: bool
    each: int | None
    """Out of order: no worker owes more batches than that, and no lane waits for another, so that a slow worker holds
    up no other."""


@dataclass(slots=True)
class _Leftover:
    """What was left over at the ends of the lanes, as batches."""

    merged: int = 0
    """How many of these samples are delivered."""
    asked: int = 0
    """How many of `requests` are under way."""
    requests: list[Request] | None = None
    """Those that are not delivered yet; None until all lanes have ended and all that was asked for has arrived."""


class StreamPlan(Plan):
    """The batches of one epoch of a stream; `self_sharded` and `rank` are as for `StreamReader`."""

    source = "stream"
    ends_by_reply = True

    def __init__(
        self, start: EpochPosition, options: Options, workers: int, *, self_sharded: bool, rank: int | None
    ) -> None:
        size, stream = options.batch_size or 1, options.dataset
        super().__init__(start, -(-start.position // size))
        self.batches = 0
        each = None if options.in_order else options.prefetch
        self._shape = _Shape(layout_of(stream, rank), size, max(1, workers), options.drop_last, each)
        lanes = self._shape.layout.lanes
        own = (self_sharded or self._shape.layout.shared) and workers
        self._kind: Kind = "lanes" if lanes else "workers" if own else "stream"
        self._lanes = [_Lane() for _ in range(lanes or (max(1, workers) if own else 1))]
        self._turn = 0
        self._queues: defaultdict[int, deque[_Entry]] = defaultdict(deque)
        """What is not done yet, in the order of asking: in one queue, or in one for each lane."""
        self._entries: dict[int, _Entry] = {}
        """What was asked for and is not delivered, by the numbers of the requests."""
        self._ahead: set[tuple[int, int]] = set()
        """What the loader that saved the state had delivered ahead and this one has not reached yet."""
        self._leftover = _Leftover()
        self._samples = start.position
        self.resumed = False
        if start.stream is not None:
            here = self._saved()
            found = fitted(start.stream, here, self._shape.workers)
            self.resumed = found is not here  # else nothing had been delivered
            if self.resumed:
                self._kind, self._turn, self._ahead = found.kind, found.turn, found.ahead
                self._leftover.merged = found.merged
                self._lanes = [_Lane(lane.delivered, *lane) for lane in found.lanes]
        begin = [LaneStart(lane.count, lane.at, lane.state) for lane in self._lanes]
        self.reader_start = StreamStart(self._kind == "workers", begin, first_states(stream))
        """What the readers of this epoch begin with."""
        # The length of a rank's share is computed, not the user's to say.
        self._counted = None if self.resumed or split_of(stream) else length_or_none(stream), 0
        """The samples that it says it has, if that is to be compared, and those that came or were left out."""

    def doubts(self, stream: Any) -> Iterator[str]:
        """What to warn of when the epoch begins."""
        lanes, workers = self._shape.layout.lanes, self._shape.workers
        # A stream with shards reads at most the shards again that are open.
        if not lanes and not self._shape.layout.shared and any(n > at for n, at, _ in self.reader_start.lanes):
            yield (
                f"the stream has no state_dict of its own ({brief(part_without_state(stream))} has none), so "
                "resuming replays it: it reads the stream again from the start of the epoch. Give it state_dict and "
                "load_state_dict to avoid that"
            )
        if 0 < lanes < workers:
            yield (
                f"the stream has {number_of(lanes, 'lane')} for {workers} workers: the others have nothing "
                "to do. Use fewer workers, or a stream with more shards (and `lanes`)"
            )

    @property
    def _rank(self) -> int | None:
        """Which rank this is in a stream that is split sample by sample, so that a state is good for all ranks."""
        layout = self._shape.layout
        return layout.first if layout.stride > 1 and layout.share is None else None

    # ------------------------------------------------------------------------------------------------ asking

    def next(self) -> Request | None:
        size, workers = self._shape.size, self._shape.workers
        while (number := self._next_lane()) is not None:
            lane = self._lanes[number]
            self._turn = (number + 1) % len(self._lanes)
            turn, place = lane.asked, lane.start + lane.asked * size
            lane.asked += 1
            owner = (turn if self._kind == "stream" else number) % workers
            # Of a stream that splits itself, each worker reads one lane of its own, and knows no others.
            asked = (0, number + turn * workers) if self._kind == "workers" else (number, turn)
            request = Request(
                next(request_numbers), self.epoch, self.batches, None, 0, self.seed, owner=owner, lane=asked[0],
                lane_batch=asked[1], size=size,
            )  # fmt: skip
            entry = _Entry(request, number, place)
            queue = self._queue_of(entry)
            queue.append(entry)
            if (number, place) not in self._ahead:
                self._entries[request.number] = entry
                self.batches += 1
                return request
            self._ahead.discard((number, place))  # delivered by the loader whose state this plan began with
            entry.delivered, entry.after = True, place + size
            self._advance(queue)
        leftover = self._leftover
        if leftover.requests is None:
            return None
        if leftover.asked == len(leftover.requests):
            self.exhausted = True
            return None
        if leftover.asked and self._shape.each is not None:
            return None  # a state counts those that were delivered, so they must not overtake each other
        leftover.asked += 1
        self.batches += 1
        return leftover.requests[leftover.asked - 1]

    def _next_lane(self) -> int | None:
        """The first lane from `_turn` on that has not ended, of a worker that does not owe enough already."""
        lanes, each, workers = self._lanes, self._shape.each, self._shape.workers
        owed: Counter[int | None] = Counter()
        if each is not None and len(lanes) > 1:
            owed.update(entry.request.owner for entry in self._entries.values() if entry.report is None)
        for number in chain(range(self._turn, len(lanes)), range(self._turn)):
            if not lanes[number].ended and (each is None or owed[number % workers] < each):
                return number
        return None

    # ------------------------------------------------------------------------------------------------ replies

    def answered(self, request: Request, reply: Reply) -> None:
        if request.lane == LEFTOVER_LANE or (reply.error is not None and reply.end):
            return
        report, saved = _report_of(request, reply), self.start.stream
        entry = self._entries[request.number]
        entry.report, entry.filled = report, reply.error is not None or reply.samples > 0
        entry.failed = bool(reply.failed)
        if report.others:  # unless this rank has saved the state itself, on as many ranks: it has had its last
            same_ranks = self.resumed and saved is not None and saved.world == self._shape.layout.stride
            self.others |= not (same_ranks and self.start.rank == self._rank)
        if report.self_sharded and self._kind == "stream":
            self._divide()
        elif report.self_sharded != (self._kind == "workers"):
            raise AgnoloadError(SPLIT_IN_SOME)
        self._advance(self._queue_of(entry))

    def _queue_of(self, entry: _Entry) -> deque[_Entry]:
        return self._queues[0 if self._shape.each is None else entry.lane]

    def _divide(self) -> None:
        """The stream turns out to split itself: every worker has a lane of its own."""
        entries = self._queues.pop(0)
        if any(entry.concluded for entry in entries) or self._lanes[0].count:
            raise AgnoloadError(SPLIT_IN_SOME)
        asked, workers = self._lanes[0].asked, self._shape.workers
        self._kind = "workers"
        self._lanes = [_Lane(asked=len(range(worker, asked, workers))) for worker in range(workers)]
        self._turn = asked % workers
        for entry in entries:
            turn, entry.lane = divmod(entry.request.lane_batch, workers)
            entry.place = turn * self._shape.size
            self._queue_of(entry).append(entry)

    def _advance(self, entries: deque[_Entry]) -> None:
        """Draw conclusions about this queue, as far as all has arrived, and drop what is done."""
        for entry in entries:
            if entry.concluded:
                continue
            lane, report = self._lanes[entry.lane], entry.report
            if report is None and not entry.delivered:
                break
            self._compare_sums(entry)
            if report is not None and not lane.ended:  # else it was asked for before the end was known
                lane.ended = report.end
                if report.leftover is not None:
                    lane.leftover, lane.leftover_at = report.leftover, entry.place
                elif report.places:  # an early last batch counts as a whole one, so that a resume finds the same end
                    entry.after = entry.place + self._shape.size
            entry.concluded = True
        if self._leftover.requests is None and all(lane.ended for lane in self._lanes):
            self._leftover.requests = self._merge()
        while entries and entries[0].done:
            entry = entries.popleft()
            if entry.after is not None:
                lane = self._lanes[entry.lane]
                lane.count = entry.after
                if entry.report is not None and entry.report.state is not None:
                    lane.at, lane.state = entry.after, entry.report.state

    def _compare_sums(self, entry: _Entry) -> None:
        """Whether the reader of a batch has gone past what others deliver before it; also of one behind the end."""
        sums = None if entry.report is None else entry.report.sums
        lane, owner = self._lanes[0], entry.request.owner or 0
        if sums is not None and lane.sum is not None and sums[0] != lane.sum:
            raise AgnoloadError(
                f"all workers must read the same samples of {self._shape.layout.compared}, but among the first "
                f"{entry.place} workers {lane.reader} and {owner} have read different ones: some would be lost, others "
                "come twice. If the stream draws at random or depends on its process (the clock, the order of a set), "
                "draw from agnoload.sample_rng() (in worker processes also from random or np.random), sort sets, and "
                "do what may differ in map(). If workers are to read different samples, ask get_worker_info() before "
                "the first one and split by it, or give the stream num_shards and shard(i), or shared_source = True if "
                "each item goes to one reader only. Or use num_workers=1"
            )
        lane.sum, lane.reader = (None, 0) if sums is None else (sums[1], owner)

    def _merge(self) -> list[Request]:
        """The leftover batches that were not delivered before the start."""
        size, width, merged = self._shape.size, len(self._lanes), []
        for number, lane in enumerate(self._lanes):
            merged += [(sample, (lane.leftover_at + n) * width + number) for n, sample in enumerate(lane.leftover)]
        batches: list[Request] = []
        for start in range(self._leftover.merged, len(merged), size):
            part = merged[start : start + size]
            if len(part) == size or not self._shape.drop_last:
                number, batch, samples = next(request_numbers), self.batches + len(batches), [one for one, _ in part]
                key = part[0][1], self.seed, width, self._shape.layout.rank
                batches.append(Request(number, self.epoch, batch, samples, *key, lane=LEFTOVER_LANE))
        return batches

    # ------------------------------------------------------------------------------------------------ delivery

    def delivered(self, request: Request, reply: Reply) -> None:
        super().delivered(request, reply)
        leftover = self._leftover
        if leftover.requests and request.lane == LEFTOVER_LANE:
            samples = len(request.indices)
            leftover.merged += samples
            leftover.asked -= 1
            leftover.requests.remove(request)
        else:
            samples = reply.samples or (_report_of(request, reply).places if reply.error is not None else 0)
            entry = self._entries.pop(request.number)
            entry.delivered = True
            self._advance(self._queue_of(entry))
        self._samples += samples
        self._counted = self._counted[0], self._counted[1] + samples + len(reply.failed)

    @property
    def delivered_all(self) -> bool:
        """Whether what is still under way cannot hold samples: all lanes have ended before it."""
        if self._leftover.requests is None or self._leftover.requests:
            return False
        return not any(entry.filled or entry.failed for entry in self._entries.values())

    def complaint(self) -> str | None:
        """Compare with the length that the stream says it has."""
        (expected, found), self._counted = self._counted, (None, 0)
        if expected is None or found == expected:
            return None
        if self._shape.drop_last and 0 < expected - found < self._shape.size:
            return None
        return f"the stream says that it has {expected} samples (len), but it gave {found}: mend or remove its __len__"

    def position(self) -> EpochPosition:
        if self.delivered_all:
            return self.end()
        return EpochPosition(self.epoch, self._samples, self.start.seeds, stream=self._saved(), rank=self._rank)

    def _saved(self) -> StreamPosition:
        """What was delivered until now: JSON, as far as the stream's own state is."""
        entries = list(chain.from_iterable(self._queues.values()))
        undone = next((entry for entry in entries if not entry.done), None)
        # What held no samples must be asked for again: its report says that a lane has ended, and what is left there.
        known = (entry for entry in entries if entry.delivered and (entry.report is None or entry.filled))
        layout = self._shape.layout
        return StreamPosition(
            self._kind,
            [LaneStart(lane.count, lane.at, lane.state) for lane in self._lanes],
            self._turn if undone is None else undone.lane,
            self._leftover.merged,
            self._ahead | {(entry.lane, entry.place) for entry in known},
            self._shape.size,
            layout.stride,
            layout.share,
            layout.shards,
        )


def _report_of(request: Request, reply: Reply) -> StreamReport:
    """What a full batch of which the reader has nothing to report would say."""
    return reply.stream or StreamReport(places=request.size)
