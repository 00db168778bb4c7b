"""The values that cross from room to room: requests, replies, and what a worker is given at its start."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

_NUMBERS = struct.Struct("<7q")


class Request(NamedTuple):
    """One numbered batch to load.

    The randomness of item `i` is keyed by `(seed, epoch, rank, first + i * stride)`: `first` is the position of the
    request's first sample in the epoch's global sequence, `stride` the distance to the next one (the number of ranks
    that share the sequence).
    """

    number: int
    """Grows from request to request, across epochs and iterators; no two of a process have the same."""
    epoch: int
    batch: int
    """The batch's number within its epoch."""
    indices: Any
    """An int64 array, a list of keys, one key (no automatic batching), or None for a stream."""
    first: int
    seed: int = 0
    stride: int = 1
    rank: int = 0
    owner: int | None = None
    """The worker that must answer, for streams; None when any may."""
    lane: int = 0
    """The lane of a stream in shards; `LEFTOVER_LANE` where `indices` are samples, left over at the ends of lanes."""
    lane_batch: int = 0
    """The number of the batch within its lane; in a stream that splits itself, over all workers."""
    size: int = 0
    """Samples wanted of a stream."""
    start: int = 0
    """The position in the epoch's sequence that was reached before this batch, over all ranks; not sent to workers."""
    stop: int = 0
    """The position that its delivery reaches; not sent to workers."""

    def packed(self) -> bytes | None:
        """What a worker needs of it as bytes, far quicker than a pickle; None if they are not all int64."""
        indices = self.indices
        if type(indices) is not np.ndarray or indices.dtype != np.int64 or indices.ndim != 1:
            return None
        try:
            numbers = _NUMBERS.pack(*self[:3], *self[4:8])
        except struct.error:
            return None
        return numbers + indices.tobytes()

    @classmethod
    def unpacked(cls, data: memoryview) -> Request:
        """The request of which `packed` gave the bytes; its indices are a copy."""
        number, epoch, batch, *place = _NUMBERS.unpack_from(data)
        return cls(number, epoch, batch, np.frombuffer(data, np.int64, offset=_NUMBERS.size).copy(), *place)


def plain_indices(indices: Any) -> Any:
    """Indices of a request as a list of ints, for an error."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


def describe_request(request: Request) -> str:
    """A request for an error: its batch, and of its indices all of a few, the ends of many."""
    values, batch = plain_indices(request.indices), f"batch {request.batch}"
    if values is None:
        return batch
    if isinstance(values, list) and len(values) > 8:
        return f"{batch} ({len(values)} indices: {', '.join(map(repr, values[:4]))}, ..., {values[-1]!r})"
    return f"{batch} (indices {values!r})" if isinstance(values, list) else f"{batch} (index {values!r})"


LEFTOVER_LANE = -1
request_numbers = count()
"""The numbers of requests, none used twice in a process: one pool may serve several iterators."""


class LaneStart(NamedTuple):
    """Where a reader begins in one lane of a stream."""

    delivered: int = 0
    """The samples that were delivered before; what comes next begins there."""
    at: int = 0
    """How many samples were taken before `state`."""
    state: Any = None
    """The stream's own; None for its start."""


class StreamStart(NamedTuple):
    """What the readers of an epoch begin with."""

    self_sharded: bool
    """The stream splits itself over the workers: the lanes are theirs."""
    lanes: Sequence[LaneStart]
    first: Any
    """The state that each stream in it had before anything was read, as `first_states` gave it."""


class Failure(NamedTuple):
    """A sample that could not be loaded and was left out or replaced."""

    index: Any
    error: str


class FailureCount(NamedTuple):
    """How many samples of an epoch have failed, of how many that were tried."""

    failed: int = 0
    tried: int = 0

    def plus(self, reply: Reply) -> FailureCount:
        """With those of another batch."""
        failed = len(reply.failed)
        return FailureCount(self.failed + failed, self.tried + failed + reply.samples)


class StreamReport(NamedTuple):
    """What the reader of a stream says about a batch beside its samples."""

    end: bool = False
    """The lane has no more, or the stream where there are no lanes."""
    leftover: list[Any] | None = None
    """At the end of a lane: the samples that do not fill a batch."""
    places: int = 0
    """The number of places that were read: those of the batch or `leftover`, and of samples that were left out."""
    state: Any = None
    """Where the lane is after this batch; None if the stream cannot say."""
    self_sharded: bool = False
    """The stream splits itself over the workers."""
    others: bool = False
    """At the end: ranks before this one have one sample more, counted from where reading began."""
    sums: tuple[int, int] | None = None
    """Where several workers read the same: the check sums of all that was read before the batch, and after it."""


class Reply(NamedTuple):
    """The answer to one request: a batch or an error, and what else there is to say about it."""

    number: int
    worker: int = 0
    batch: Any = None
    error: BaseException | None = None
    samples: int = 0
    end: bool = False
    """Nothing can come after this: an error that is the end, such as one of a stream itself."""
    failed: Sequence[Failure] = ()
    """The samples that were left out or replaced, or the one that raised `error`."""
    notices: Sequence[str] = ()
    """Warnings for the user, each to be given once."""
    log_records: Sequence[Any] = ()
    """What user code has logged and warned of meanwhile in a worker process: see `monitoring/logs.py`."""
    stream: StreamReport | None = None
    """Of a batch of a stream; None for a full batch with nothing to report."""
    started: float = 0.0
    fetched: float = 0.0
    collated: float = 0.0
    finished: float = 0.0
    """When the request was started, its samples loaded, its batch collated, its reply encoded (`time.monotonic()`)."""
    nbytes: int = 0


class Start(NamedTuple):
    """What a worker is given at its start; the fields from `payload` on are descriptors."""

    worker: int
    workers: int
    parent: int
    payload: int
    arena: int
    requests: int
    replies: int


class _Empty:
    """In the place of a batch without samples: all were skipped, or a stream was at its end."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "EMPTY"

    def __reduce__(self) -> str:
        return "EMPTY"


EMPTY = _Empty()
