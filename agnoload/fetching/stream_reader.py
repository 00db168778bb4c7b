"""A worker's side of a stream: it reads what it must, and gives the raw samples of what it delivers.

Who reads a batch changes nothing, because all that a stream may depend on is set by the place in the stream: before the
first sample of every batch, delivered or only read past, `begin` moves the context of randomness there.

A batch is read in two steps: first all its raw samples are pulled out of the stream, here, then `StreamSource` makes
samples of them. The first step is the same for every worker that reads past; the second one, which only one worker
takes, begins with random numbers of its own. So whatever functions given to `map` draw, the stream continues as
everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from agnoload import seeding
from agnoload.errors import AgnoloadError, StateError
from agnoload.fetching.compare import CheckSum
from agnoload.messages import StreamReport, StreamStart
from agnoload.streams.iterators import OpenOptions, StreamIterator, is_stream, set_epoch_of
from agnoload.streams.layout import all_parts_of, first_states, layout_of, parts_of
from agnoload.streams.ranks import has_others
from agnoload.streams.shards import ShardsIterator, num_shards_of, open_stream
from agnoload.worker_info import peek_worker_info

Key = tuple[int, int, int]
"""First position, stride and rank of a batch: what its random numbers follow from."""
Begin = Callable[[int, int, int], None]
"""`begin(first, stride, rank)` moves this thread's sample context to the start of a batch, and seeds the process-wide
generators for it."""


class _Track:
    """One sequence of samples, read in order: a lane, or the whole stream."""

    def __init__(self, iterator: StreamIterator, place: int, start: int) -> None:
        self.iterator = iterator
        self.place = place
        """How many samples were read, or passed over by a state."""
        self.start = start
        """Where the first batch begins."""
        self.begun = -1
        """The place that `begin` was called for last: of a batch, or of a shard that begins within it."""
        self.ended = False
        self.sum = CheckSum(place)


class StreamReader:
    """Reads one stream through one epoch, for the worker that it is made in: `read(batch, lane, size)`.

    `begin` is called before the first sample of each batch. `start` is a plan's `reader_start`; without it reading
    begins with the epoch. `self_sharded` says that the stream splits itself, as one does that asks `get_worker_info()`
    before its first sample. `rank` is this process's among those that train together, looked up when None. A reader
    only reads forward; for an earlier batch make another one.
    """

    def __init__(
        self,
        stream: Any,
        begin: Begin,
        *,
        start: StreamStart | None = None,
        self_sharded: bool = False,
        drop_last: bool = False,
        rank: int | None = None,
    ) -> None:
        self._stream = stream
        self._begin = begin
        self._start = start
        self._drop_last = drop_last
        self._layout = layout_of(stream, rank)
        self._tracks: dict[int, _Track] = {}
        if start is not None:
            first_states(stream, start.first)
        self._info = info = peek_worker_info()
        self._worker, self._workers = (0, 1) if info is None else (info.id, info.num_workers)
        self._untouched = True  # nothing was read yet
        self._self_sharded = not self._layout.lanes and (
            self_sharded or (self._layout.shared and info is not None) or (start is not None and start.self_sharded)
        )
        if info is not None:
            one = all(len(parts_of(part)) < 2 for part in all_parts_of(stream))
            info.divisible = self._self_sharded or (one and not self._layout.lanes)

    def read(self, batch: int, lane: int = 0, size: int = 1) -> tuple[list[Any], Key, StreamReport]:
        """The raw samples of batch number `batch` of the epoch or, with lanes, of `lane`; their key, and a report.

        For a stream that splits itself, batch number `batch // workers` of this worker. Where the report has a list as
        `leftover`, the samples belong there: at the end of a lane they fill no batch.
        """
        track = self._tracks.get(lane)
        if track is None:
            track = self._tracks[lane] = self._open(lane, size)
        if self._info is not None:
            self._info.on_asked = partial(self._asked, lane)
        try:
            place, raws, sums = self._raws(track, batch, lane, size)
        finally:
            if self._info is not None:
                self._info.on_asked = None
        merged = self._layout.lanes or self._self_sharded
        if track.ended and self._drop_last and not merged:
            raws = []
        leftover: list[Any] | None = [] if track.ended and merged else None
        state = None if track.ended else track.iterator.state()
        more = track.place + 1 - track.start >= (size if self._drop_last else 1)  # rank 0 has one sample more
        others = track.ended and more and has_others(track.iterator)
        report = StreamReport(track.ended, leftover, len(raws), state, self._self_sharded, others, sums)
        return raws, self._key(lane, place), report

    def close(self) -> None:
        """Let go of all that is open; only a new reader reads on."""
        for track in list(self._tracks.values()):
            track.iterator.close()
        self._tracks.clear()

    def _open(self, lane: int, size: int) -> _Track:
        part = self._worker if self._self_sharded else lane
        count, at, state = (0, 0, None) if self._start is None else self._start.lanes[part]
        self._begin(*self._stream_key(lane, 0))  # the stream may ask for seed and epoch
        options = OpenOptions(state, size=size, direct=True)
        if self._layout.lanes:
            if not self._tracks:  # only shards are asked for: nothing else calls set_epoch of the stream itself
                for stream in filter(is_stream, all_parts_of(self._stream)):
                    set_epoch_of(stream)
            shards = range(lane, num_shards_of(self._stream) or 0, self._layout.lanes)
            iterator = ShardsIterator(self._stream, shards, options, partial(self._begin_shard, lane))
            if iterator.behind > at:
                taken = iterator.behind
                raise StateError(f"lane {lane} of a state comes after {at} samples, but its shard after {taken}")
            return _Track(iterator, at - iterator.behind, count)
        if state is None:  # from the start; but what comes once for all readers cannot be read again
            at = count if self._layout.shared else 0
        return _Track(open_stream(self._stream, options), at, count)

    def _begin_shard(self, lane: int) -> None:
        """A shard begins with random numbers of its own: it may have to be read again, without the one before it."""
        track = self._tracks.get(lane)
        if track is not None:  # None: another thread has closed this reader
            track.begun = track.place
            self._begin(*self._stream_key(lane, track.place))

    def _raws(self, track: _Track, batch: int, lane: int, size: int) -> tuple[int, list[Any], tuple[int, int] | None]:
        """The place of a batch, its raw samples, and the check sums before and after it."""
        raws: list[Any] = []
        if self._untouched:  # the first sample shows whether the stream splits itself
            self._pull(track, lane, size, track.place + 1, raws)
            self._untouched = False
        number = batch // self._workers if self._self_sharded else batch
        wanted = track.start + number * size
        at = track.place - len(raws)
        if at > wanted:
            raise AgnoloadError(f"a stream is only read forward: sample {wanted} was asked for, but it is at {at}")
        if at < wanted:
            raws = []
            self._pull(track, lane, size, wanted, None)
        before = track.sum.total
        self._pull(track, lane, size, wanted + size, raws)
        if track.ended and track.place <= track.start - size:  # an early last batch counts as a whole one
            raise StateError(
                f"the stream must be the one that the state was saved of: {track.start} samples were delivered then, "
                f"now it ends after {max(0, track.place)}"
            )
        return wanted, raws, (before, track.sum.total) if self._compares else None

    @property
    def _compares(self) -> bool:
        return bool(self._layout.compared) and self._workers > 1 and not self._self_sharded

    def _pull(self, track: _Track, lane: int, size: int, stop: int, raws: list[Any] | None) -> None:
        """Read up to the place `stop`, batch by batch; without a list for the raw samples they are dropped."""
        context, next_raw = seeding.current(), track.iterator.next_raw
        sums = track.sum if self._compares else None
        step = 1 if self._layout.lanes else self._layout.stride
        while track.place < stop and not track.ended:
            batch = (track.place - track.start) // size * size + track.start
            start = max(0, batch)
            if track.begun < 0 and self._layout.lanes:
                self._begin_shard(lane)
            elif track.begun < start:
                self._begin(*self._stream_key(lane, start))
                track.begun = start
            each = sums is not None and track.place < sums.each_below
            try:
                for place in range(track.place, track.place + 1 if each else min(stop, batch + size)):
                    if context is not None:
                        context.item = (place - track.begun) * step  # `begun` moves where a shard begins
                    raw = next_raw()
                    track.place = place + 1
                    if raws is not None:
                        raws.append(raw)
                if sums is not None and (each or track.place == batch + size):
                    sums.note(raw)
            except StopIteration:
                track.ended = True
                track.iterator.close()
            if sums is not None and (track.ended or track.place == batch + size):
                sums.add_noted(track.ended and track.place)

    def _asked(self, lane: int) -> None:
        """The stream asks who reads it, while it is read."""
        if self._self_sharded or self._layout.lanes or self._workers == 1:
            return
        if not self._untouched:
            raise AgnoloadError(
                f"{type(self._stream).__name__} asked get_worker_info() after its first sample: a stream that splits "
                "itself over the workers must ask before, and one that does not must not ask while it is iterated; "
                "functions given to map may"
            )
        if self._start is not None and any(count for count, _, _ in self._start.lanes):
            raise StateError(
                "this stream splits itself over several workers, but the state was saved where it was not split: "
                "resume with one worker or none"
            )
        self._self_sharded = True
        self._begin(*self._stream_key(lane, 0))  # from here on no two workers draw the same

    def _stream_key(self, lane: int, place: int) -> Key:
        """The key of a batch while it is pulled: the same on all ranks that split a stream, as they all read it."""
        layout = self._layout
        if layout.lanes:
            return self._key(lane, place)
        worker, workers = (self._worker, self._workers) if self._self_sharded else (0, 1)
        return place * layout.stride * workers + worker, workers, layout.rank

    def _key(self, lane: int, place: int) -> Key:
        """First position, stride and rank of the batch that begins at a place."""
        layout = self._layout
        if layout.lanes:
            return place * layout.lanes + lane, layout.lanes, layout.rank
        if self._self_sharded:
            rank = layout.rank + layout.first  # one of them is 0: a rank of a split counts as a rank here
            return place * self._workers + self._worker, self._workers, rank
        return layout.first + place * layout.stride, layout.stride, layout.rank
