"""What a loader has done and where the time went."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from agnoload.messages import Failure, Reply


@dataclass(frozen=True, slots=True)
class Stats:
    """An account of what a loader has delivered so far; times in seconds, `bytes` of the batches as they travelled.

    `wait_*` is how long `next()` waited for data, in all and as percentiles over batches; `busy` the share of the time
    that each worker was loading; `failed` the index and error of each sample that was skipped or replaced.

    >>> from agnoload import DataLoader
    >>> loader = DataLoader(range(10), 4)
    >>> for batch in loader: pass
    >>> loader.stats().batches, loader.stats().samples
    (3, 10)
    """

    batches: int
    samples: int
    bytes: int
    wait_seconds: float
    wait_p50: float
    wait_p95: float
    wait_p99: float
    busy: tuple[float, ...]
    failed: tuple[Failure, ...]
    verdict: str


class Recorder:
    """Counts as batches pass by; a few hundred nanoseconds a batch."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._began = time.monotonic()
        self._last = self._began
        self._batches = 0
        self._samples = 0
        self._bytes = 0
        self._waits: list[float] = []
        self._busy = [0.0] * max(workers, 1)
        self.failed: list[Failure] = []

    def arrived(self, reply: Reply) -> None:
        self._busy[reply.worker] += reply.finished - reply.started
        if reply.extras:
            self.failed += reply.extras.get("failed", ())

    def delivered(self, reply: Reply, waited: float, now: float) -> None:
        self._batches += 1
        self._samples += reply.samples
        self._bytes += reply.nbytes
        self._waits.append(waited)
        self._last = now

    def stats(self) -> Stats:
        waits = np.array(self._waits or [0.0])
        elapsed = max(self._last - self._began, 1e-9)
        p50, p95, p99 = np.percentile(waits, [50, 95, 99]).tolist()
        busy = tuple(min(seconds / elapsed, 1.0) for seconds in self._busy)
        total = float(waits.sum())
        share = total / elapsed
        verdict = _verdict(share, busy, self._workers, self._batches)
        return Stats(
            self._batches, self._samples, self._bytes, total, p50, p95, p99, busy, tuple(self.failed), verdict
        )  # fmt: skip


def _verdict(share: float, busy: tuple[float, ...], workers: int, batches: int) -> str:
    if not batches:
        return "nothing was loaded yet"
    mean = sum(busy) / len(busy)
    if share < 0.05:
        return f"waited for data {share:.0%} of the time: the loader keeps up, there is nothing to gain here"
    if workers == 0:
        return f"waited for data {share:.0%} of the time, loading in this process: try num_workers=1 or more"
    if mean > 0.9:
        return f"waited for data {share:.0%} of the time; {workers} workers {mean:.0%} busy: add workers"
    return (
        f"waited for data {share:.0%} of the time; {workers} workers only {mean:.0%} busy: samples cost less than "
        "their transport, so workers do not help; try num_workers=0 or larger batches"
    )
