"""Samples of a stream: a reader for each epoch, and what the error policy does about samples that cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agnoload.errors import OptionError, add_note, attributes_of, one_line
from agnoload.fetching.error_policy import ErrorPolicy
from agnoload.fetching.samples import Loaded
from agnoload.fetching.stream_reader import StreamReader
from agnoload.global_rng import RequestGenerators
from agnoload.messages import EMPTY, LEFTOVER_LANE, Failure, Request, StreamReport, StreamStart
from agnoload.seeding import SampleContext
from agnoload.streams import first_states
from agnoload.streams.iterators import LAZY, Lazy, force, note_record
from agnoload.streams.layout import is_shared
from agnoload.worker_info import WorkerInfo, peek_worker_info

FINISHING = 1 << 31
"""Added to the rank in the keys of the second step, which makes samples of raw ones."""
COLLATING = 1 << 30
"""Added to it in the key of what puts the batch together."""


@dataclass(frozen=True)
class WorkerSetup:
    """Who loads: this thread, threads of this process, or processes; and what `get_worker_info()` says there."""

    kind: Literal["inline", "thread", "process"]
    workers: int
    """0 where the user's thread loads."""
    seed: int
    rank: int = 0
    world_size: int = 1
    init: Callable[[int], object] | None = None


@dataclass(frozen=True)
class StreamSetup:
    """How a stream is read."""

    drop_last: bool
    init_splits: bool
    """Whether `worker_init_fn` is taken to split it over the workers."""
    epoch: int
    """The epoch that is resumed within, -1 if none is."""
    start: StreamStart
    """Where that one begins."""


class StreamSource:
    """Loads the samples of a stream; `rank` is that of this process."""

    def __init__(
        self, stream: Any, setup: StreamSetup, rank: int, policy: ErrorPolicy, context: SampleContext,
        generators: RequestGenerators,
    ) -> None:  # fmt: skip
        self._stream = stream
        self._setup = setup
        self._rank = rank
        self._policy = policy
        self._context = context
        self._generators = generators
        self._reader: StreamReader | None = None
        self._read = (-1, -1)
        """Epoch and batch that the reader was asked for last."""
        self._doubtful: WorkerInfo | None = None
        """Set while it may turn out that `worker_init_fn` has not split the stream."""
        self.report: StreamReport | None = None
        """Of the request that is being answered; None until the stream has been read for it."""
        self.culprit: Failure | None = None

    def begin(self, info: WorkerInfo) -> None:
        """Called in a worker before its first request."""
        first_states(self._stream, self._setup.start.first)
        if self._setup.init_splits and info.num_workers > 1 and not is_shared(self._stream):
            self._doubtful = info

    def close(self) -> None:
        """Let go of what is open; a request that comes later opens it again."""
        reader, self._reader = self._reader, None  # the two refer to each other
        if reader is not None:
            reader.close()

    def load(self, request: Request) -> Loaded:
        """The samples of a request."""
        self.report = report = None
        failed: list[Failure] = []
        if request.lane == LEFTOVER_LANE:
            samples, key = list(request.indices), (request.first, request.stride, request.rank)
        else:
            try:
                raws, key, report = self._reader_for(request).read(request.lane_batch, request.lane, request.size)
            except Exception as error:
                if self._policy.tolerant:
                    add_note(error, "on_error cannot leave this out: the stream itself raised, and cannot be read on")
                raise
            self.report = report._replace(leftover=None)  # from here on an error is that of a sample
            samples = self._made(raws, *key, failed)
            if report.leftover is not None:
                samples, report = [], report._replace(leftover=samples)
            self.report = report
            if self._doubtful is not None and report.self_sharded:
                self._warn_if_unsplit(self._doubtful)
            if report == StreamReport(places=request.size):
                report = None  # a full batch, and nothing to report: most replies
        if not samples:
            return Loaded(EMPTY, 0, None, failed, report)
        first, stride, rank = key
        self._context.at(request.seed, request.epoch, first, stride, rank | COLLATING)
        return Loaded(samples, len(samples), None, failed, report)

    def _reader_for(self, request: Request) -> StreamReader:
        """The reader of the request's epoch; it goes forward only, so an earlier batch needs a new one."""
        if self._reader is None or self._read[0] != request.epoch or self._read[1] >= request.batch:
            self.close()
            setup = self._setup
            self._reader = StreamReader(
                self._stream,
                self._begin_batch,
                start=setup.start if setup.epoch == request.epoch else None,
                self_sharded=setup.init_splits and peek_worker_info() is not None,
                drop_last=setup.drop_last,
                rank=self._rank,
            )
        self._read = (request.epoch, request.batch)
        return self._reader

    def _begin_batch(self, first: int, stride: int, rank: int) -> None:
        context = self._context
        context.at(context.seed, context.epoch, first, stride, rank)
        self._generators.seed()

    def _made(self, raws: list[Any], first: int, stride: int, rank: int, failed: list[Failure]) -> list[Any]:
        """The samples of raw ones, but for those that are left out, which are added to `failed`."""
        kinds = set(map(type, raws))
        if Lazy not in kinds:  # nothing that runs user code
            return raws if kinds.isdisjoint(LAZY) else list(map(force, raws))
        self._begin_batch(first, stride, rank | FINISHING)
        context, make = self._context, self._policy.retrying(force, self._context)
        samples = []
        for item, raw in enumerate(raws):
            context.item = item
            try:
                samples.append(make(raw))
            except Exception as error:
                note_record(error, raw)
                position = first + item * stride
                action = self._policy.action(error, position)
                if action == "replace":
                    add_note(error, "on_error='replace' needs a dataset with indices: use 'skip' for a stream")
                elif action not in ("raise", "skip"):
                    raise OptionError(f"on_error must return 'raise' or 'skip', got {action!r}") from error
                if action != "skip":
                    raise
                notes = attributes_of(error).get("__notes__", ())  # which record of which file
                failed.append(Failure(position, "; ".join([one_line(error), *notes])))
        return samples

    def _warn_if_unsplit(self, info: WorkerInfo) -> None:
        """The stream counts as split by `worker_init_fn`: warn if nobody can have done that."""
        self._doubtful = None
        if not info.asked:
            self._generators.notices.append(
                f"worker_init_fn is taken to split the stream over the {info.num_workers} workers, but nobody has "
                "asked get_worker_info(): unless it is split in some other way, every sample comes once for each "
                "worker. Do elsewhere what worker_init_fn does, or give the stream num_shards and shard(i)"
            )
