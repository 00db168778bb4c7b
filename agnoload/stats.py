"""What a loader has done and where the time went: an account, a verdict, a timeline."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agnoload.messages import Failure, Reply


@dataclass(frozen=True, slots=True)
class Stats:
    """An account of what a loader has delivered so far; times in seconds, `bytes` of the batches as they travelled.

    `wait_seconds` is how long `next()` waited for data in all, `wait_p50` ... the percentiles over batches (within 3%);
    `seconds` the time from asking for the first batch to the last one; `busy` the share of its time that each worker
    was loading; `failed` the index and error of each sample that was skipped or replaced; `cache_hits` and
    `cache_misses` those of a `CachedDataset`; `workers` why there are as many as there are.

    >>> from agnoload import DataLoader
    >>> loader = DataLoader(range(10), 4)
    >>> for batch in loader: pass
    >>> loader.stats().batches, loader.stats().samples
    (3, 10)
    """

    batches: int
    samples: int
    bytes: int
    seconds: float
    wait_seconds: float
    wait_p50: float
    wait_p95: float
    wait_p99: float
    busy: tuple[float, ...]
    failed: tuple[Failure, ...]
    cache_hits: int
    cache_misses: int
    workers: str
    verdict: str


class Histogram:
    """Durations in bins that grow by 5%, from 100 nanoseconds to some hours: constant memory, percentiles within 3%."""

    _LOW = 1e-7
    _STEP = math.log(1.05)
    _BINS = 520

    def __init__(self) -> None:
        self._counts = [0] * self._BINS

    def add(self, seconds: float) -> None:
        place = int(math.log(seconds / self._LOW) / self._STEP) if seconds > self._LOW else 0
        self._counts[min(place, self._BINS - 1)] += 1

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        total = sum(self._counts)
        if not total:
            return [0.0] * len(wanted)
        places = np.searchsorted(np.cumsum(self._counts), [share / 100 * total for share in wanted])
        return [self._LOW * math.exp((int(place) + 0.5) * self._STEP) for place in places]


class Recorder:
    """Counts as batches pass by; about a microsecond a batch."""

    def __init__(self) -> None:
        self._batches = 0
        self._samples = 0
        self._bytes = 0
        self._seconds = 0.0
        self._waited = 0.0
        self._waits = Histogram()
        self._workers: dict[int, list[float]] = {}  # first start, last end, seconds of work
        self._timeline: Timeline | None = None
        self.failed: list[Failure] = []

    def arrived(self, reply: Reply) -> None:
        """A pool has answered."""
        account = self._workers.get(reply.worker)
        if account is None:
            account = self._workers[reply.worker] = [reply.started, reply.started, 0.0]
        account[1] = reply.finished
        account[2] += reply.finished - reply.started
        if self._timeline is not None:
            self._timeline.loaded(reply)

    def delivered(self, reply: Reply, since: float, began: float, now: float) -> None:
        """The user has a batch: asked for at `began`, after the one before it came at `since`."""
        self._batches += 1
        self._samples += reply.samples
        self._bytes += reply.nbytes
        self._seconds += now - since
        self._waited += now - began
        self._waits.add(now - began)
        if self._timeline is not None:
            self._timeline.waited(began, now)

    def share_waited(self) -> float:
        return self._waited / self._seconds if self._seconds else 0.0

    def busy(self) -> tuple[float, ...]:
        return tuple(
            min(work / (end - start), 1.0) if end > start else 0.0
            for _, (start, end, work) in sorted(self._workers.items())
        )

    def stats(self, workers: int, reason: str, caches: Sequence[Any]) -> Stats:
        """The account as it stands."""
        p50, p95, p99 = self._waits.percentiles((50, 95, 99))
        share, busy = self.share_waited(), self.busy()
        return Stats(
            self._batches, self._samples, self._bytes, self._seconds, self._waited, p50, p95, p99, busy,
            tuple(self.failed), sum(cache.hits for cache in caches), sum(cache.misses for cache in caches), reason,
            verdict(share, busy, workers, self._batches),
        )  # fmt: skip

    def trace(self, timeline: Timeline | None) -> None:
        """Begin to keep a timeline, or stop."""
        self._timeline = timeline


def verdict(share: float, busy: Sequence[float], workers: int, batches: int) -> str:
    """One sentence: whether data is the bottleneck, and what to do."""
    if not batches:
        return "nothing was loaded yet"
    waited = f"waited for data {share:.0%} of the time"
    mean = sum(busy) / len(busy) if busy else 0.0
    if share < 0.05:
        faster = f"; the loader is {1 / mean:.1f} times faster than the loop that uses it" if 0 < mean < 0.67 else ""
        return f"{waited}{faster}: nothing to gain here"
    if workers == 0:
        return f"{waited}, loading in this process: workers would load while the loop works, try num_workers=1 or more"
    noun = "worker" if workers == 1 else "workers"
    if mean > 0.8:
        return f"{waited}; {workers} {noun} {mean:.0%} busy: add workers, or make samples cheaper"
    return (
        f"{waited}, but {workers} {noun} only {mean:.0%} busy: loading costs less than the transport, so workers do "
        "not help; use num_workers=0 or larger batches"
    )


class Timeline:
    """Events for Perfetto and chrome://tracing: a row for the consumer, and one for each worker."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._named: set[int] = set()
        self._row(0, "consumer")

    def _row(self, row: int, name: str) -> None:
        if row not in self._named:
            self._named.add(row)
            self._events.append(
                {"ph": "M", "pid": os.getpid(), "tid": row, "name": "thread_name", "args": {"name": name}}
            )

    def _event(self, row: int, name: str, start: float, end: float, **args: Any) -> None:
        if end >= start > 0:
            self._events.append(
                {
                    "ph": "X", "pid": os.getpid(), "tid": row, "name": name, "args": args,
                    "ts": start * 1e6, "dur": (end - start) * 1e6,
                }
            )  # fmt: skip

    def loaded(self, reply: Reply) -> None:
        row = reply.worker + 1
        self._row(row, f"worker {reply.worker}")
        self._event(row, "fetch", reply.started, reply.fetched, request=reply.number, samples=reply.samples)
        self._event(row, "collate", reply.fetched, reply.collated, request=reply.number)
        self._event(row, "encode", reply.collated, reply.finished, request=reply.number)

    def waited(self, began: float, now: float) -> None:
        self._event(0, "wait", began, now)

    def write(self, path: str | os.PathLike[str]) -> None:
        """As a file in the Chrome trace format; times in microseconds."""
        Path(path).write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))
