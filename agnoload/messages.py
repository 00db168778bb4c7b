"""The values that cross a seam: what a pool is asked, and what it answers; what a worker is told at its start."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_NUMBERS = struct.Struct("<10q")


class Request(NamedTuple):
    """One numbered batch to load.

    The randomness of item `i` is keyed by `(seed, epoch, rank, first + i * stride)`: `first` is the position of the
    request's first sample in the epoch's global sequence, `stride` the distance to the next one (the number of ranks
    that share the sequence).
    """

    number: int
    """Counts the requests of one iterator without a gap, across epochs; what the window orders by."""
    epoch: int
    batch: int
    """The batch's number within its epoch, for words and for streams."""
    indices: Any
    """An int64 array, a list of keys, one key (no automatic batching), or None for a stream."""
    first: int
    """Of a stream: the number of the batch within its lane."""
    seed: int = 0
    stride: int = 1
    rank: int = 0
    owner: int | None = None
    """The worker that must answer, for streams; None when any may."""
    lane: int = 0
    """The lane of a sharded stream."""
    size: int = 0
    """Samples wanted of a stream."""

    def packed(self) -> bytes | None:
        """As bytes, far quicker than a pickle; None if its indices are not plain int64 or a number is too large."""
        indices = self.indices
        if type(indices) is not np.ndarray or indices.dtype != np.int64 or indices.ndim != 1:
            return None
        owner = -1 if self.owner is None else self.owner
        try:
            numbers = _NUMBERS.pack(*self[:3], *self[4:8], owner, *self[9:])
        except struct.error:
            return None
        return numbers + indices.tobytes()

    @classmethod
    def unpacked(cls, data: memoryview) -> Request:
        """The request that `packed` made; its indices are a copy."""
        number, epoch, batch, first, seed, stride, rank, owner, lane, size = _NUMBERS.unpack_from(data)
        indices = np.frombuffer(data, np.int64, offset=_NUMBERS.size).copy()
        return cls(number, epoch, batch, indices, first, seed, stride, rank, None if owner < 0 else owner, lane, size)


def plain_indices(indices: Any) -> Any:
    """Indices of a request as a list of ints, for words."""
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
"""The lane of a request that brings its samples along: what was left over at the ends of a stream's lanes."""


class Failure(NamedTuple):
    """A sample that could not be loaded and was left out or replaced."""

    index: Any
    error: str


class Tally(NamedTuple):
    """How many samples of an epoch have failed, of how many that were tried."""

    failed: int = 0
    tried: int = 0

    def plus(self, reply: Reply) -> Tally:
        """With those of another batch."""
        failed = len(reply.failed)
        return Tally(self.failed + failed, self.tried + failed + reply.samples)


class StreamReport(NamedTuple):
    """What the reader of a stream says about a batch beside its samples."""

    end: bool = False
    """The lane has no more, or the stream where there are no lanes."""
    leftover: list[Any] | None = None
    """At the end of a lane: the samples that do not fill a batch."""
    places: int = 0
    """The number of places that were read: those of the batch or `leftover`, and of samples that were left out."""
    state: Any = None
    """Where the lane is behind this batch; None if the stream cannot say."""
    self_sharded: bool = False
    """The stream splits itself over the workers."""
    others: bool = False
    """At the end: ranks before this one have a sample more, behind where reading began."""
    sums: tuple[int, int] | None = None
    """Where several workers read the same: the check sums of all that was read before the batch, and behind it."""


class Reply(NamedTuple):
    """The answer to one request: a batch or an error, with what the worker has to say about it."""

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
    """Seconds of `time.monotonic`: the request was taken up, its samples were there, its batch, its way was paved."""
    nbytes: int = 0


class Start(NamedTuple):
    """What a worker is told at its start; the fields from `payload` on are descriptors."""

    worker: int
    workers: int
    parent: int
    payload: int
    arena: int
    requests: int
    replies: int


class _Empty:
    """The batch that is none: every sample was skipped, or a stream was at its end."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "EMPTY"

    def __reduce__(self) -> str:
        return "EMPTY"


EMPTY = _Empty()
