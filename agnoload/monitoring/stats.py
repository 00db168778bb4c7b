"""What a loader has done and where the time went: an account, a verdict, a timeline."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from agnoload.batching.tree import node_of
from agnoload.messages import Failure, Reply
from agnoload.validate import number_of

TRANSPORT = 300e-6
"""Seconds that a batch's way through a worker costs; what takes less is better loaded here."""
LITTLE = 0.05
"""Who waits for less than this share of the time has nothing to gain."""
KEPT_FAILURES = 1000
"""A bad sample takes some 200 bytes: of more than these only their number is kept."""


@dataclass(frozen=True, slots=True)
class Stats:
    """An account of what a loader has delivered so far, over all its epochs; made by `loader.stats()`, unchangeable.

    Times are in seconds. `seconds`: from asking for the first batch of an epoch to its last one, and what `iter()` took
    before, summed over epochs; the user's work on batches is in it, what is done between epochs is not. `wait_seconds`:
    what `iter()` and `next()` took of it, `wait_first`: what they took until each worker's first batch, while workers
    start and import; `wait_p50` ...: percentiles over batches, within 3%. `bytes`: of the arrays in the batches, before
    a backend converts them. `busy`: the share of its time since its first batch began that each worker was loading;
    without workers, that of the process that iterates. `num_failed`: how many samples were skipped
    or replaced, and `failed`: index and error of the first 1,000 of them. `cache_hits`, `cache_misses`: of every
    `CachedDataset` inside. `num_workers`: how many there are now, and `choice` why. `verdict`: one sentence on whether
    data is the bottleneck, and what to do. `imported_apart`: packages that each worker imports for itself, since their
    import starts a thread or leaves a file open, which processes must not share.

    >>> from agnoload import DataLoader
    >>> loader = DataLoader(range(10), 4)
    >>> for batch in loader: pass
    >>> loader.stats().batches, loader.stats().samples, loader.stats().bytes
    (3, 10, 80)
    """

    batches: int
    samples: int
    bytes: int
    seconds: float
    wait_seconds: float
    wait_first: float
    wait_p50: float
    wait_p95: float
    wait_p99: float
    busy: tuple[float, ...]
    num_failed: int
    failed: tuple[Failure, ...]
    cache_hits: int
    cache_misses: int
    num_workers: int
    choice: str
    verdict: str
    imported_apart: tuple[str, ...] = ()

    def __str__(self) -> str:
        rate = self.samples / self.seconds if self.seconds else 0.0
        busy = ", ".join(f"{share:.0%}" for share in self.busy) or "nothing"
        lines = [
            f"{number_of(self.batches, 'batch')}, {number_of(self.samples, 'sample')}, {self.bytes / 1e6:,.1f} MB in "
            f"{self.seconds:.2f} s: {rate:,.0f} samples/s",
            f"waited {self.wait_seconds:.2f} s; a batch {_time(self.wait_p50)} (half), {_time(self.wait_p95)} (95%), "
            f"{_time(self.wait_p99)} (99%)",
            f"{number_of(self.num_workers, 'worker')} ({self.choice}), busy {busy}",
        ]
        if self.cache_hits or self.cache_misses:
            lines.append(f"cache: {number_of(self.cache_hits, 'hit')}, {number_of(self.cache_misses, 'miss')}")
        if self.imported_apart:
            lines.append(f"each worker imports {', '.join(self.imported_apart)} for itself")
        if self.failed:
            index, error = self.failed[0]
            lines.append(f"{number_of(self.num_failed, 'bad sample')}, the first: {index!r}, {error}")
        return "\n".join([*lines, self.verdict])


def _time(seconds: float) -> str:
    """A duration of any size, in three digits."""
    for unit, scale in (("s", 1), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} \N{MICRO SIGN}s"


class Histogram:
    """Durations in bins that grow by 5%, from 100 nanoseconds to some hours: bounded memory, percentiles within 3%."""

    _LOW = 1e-7
    _STEP = math.log(1.05)
    _BINS = 520

    def __init__(self) -> None:
        self._counts = np.zeros(self._BINS, np.int64)

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Many at once: one by one they would cost a hundred times as much."""
        bins = np.log(np.maximum(seconds, self._LOW) / self._LOW) / self._STEP
        self._counts += np.bincount(np.minimum(bins, self._BINS - 1).astype(np.int64), minlength=self._BINS)

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        total = int(self._counts.sum())
        if not total:
            return [0.0] * len(wanted)
        places = np.searchsorted(np.cumsum(self._counts), [share / 100 * total for share in wanted])
        return [self._LOW * math.exp((int(place) + 0.5) * self._STEP) for place in places]


class Sums(NamedTuple):
    """Totals since a loader was made."""

    batches: int
    seconds: float
    waited: float
    first: float
    """What was waited for the start of workers, and for the first batch of each."""
    loading: float
    """Seconds of work of all workers."""
    alive: float
    """Seconds in which workers could have worked, all of them together."""

    @property
    def share_waited(self) -> float:
        """How much of the time the user waited for data."""
        return self.waited / self.seconds if self.seconds > 0 else 0.0

    @property
    def share_steady(self) -> float:
        """The same once the workers had started, which more or fewer of them do not change."""
        seconds = self.seconds - self.first
        return (self.waited - self.first) / seconds if seconds > 0 else 0.0

    @property
    def busy(self) -> float:
        """How much of their time workers loaded."""
        return min(self.loading / self.alive, 1.0) if self.alive > 0 else 0.0

    @property
    def workers_needed(self) -> float:
        """How many workers load a batch in the time in which the user's loop uses one."""
        own = self.seconds - self.waited
        return self.loading / own if own > 0 else math.inf


class Recorder:
    """Counts as batches pass by. What is noted of each is two tuples; they are summed up many at a time."""

    CHUNK = 1024

    def __init__(self) -> None:
        self._work: list[tuple[int, float, float, float]] = []
        """Of replies: the worker, where it ended before, when it took this up and when it ended."""
        self._given: list[tuple[float, float, float, int, int]] = []
        """Of batches: when the one before was given out, when it was asked for and given out, its samples and bytes."""
        self._samples = self._bytes = 0
        self._sums = Sums(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._first = 0.0
        self._renewed = False
        """Whether each epoch starts worker processes of its own."""
        self._epochs = 0
        self._first_epoch = 0.0
        """What of `_first` the first epoch has waited, which imports for the others."""
        self._opening: set[int] = set()
        """Replies under way that are the first of their worker: who waits for one waits for the worker's start."""
        self._waits = Histogram()
        self._alive = np.zeros(0)
        self._loading = np.zeros(0)
        self._num_failed = 0
        self._failed: list[Failure] = []
        self._timelines: tuple[Timeline, ...] = ()

    def opened(self, seconds: float, renewed: bool) -> None:
        """An epoch has its workers, after so long."""
        self._renewed = renewed
        self._first_epoch = self._first if self._epochs == 1 else self._first_epoch
        self._epochs += 1
        self._first += seconds
        sums = self._sums
        self._sums = sums._replace(seconds=sums.seconds + seconds, waited=sums.waited + seconds)

    def arrived(self, reply: Reply, ends: dict[int, float]) -> None:
        """A pool has answered; `ends` is where that pool's workers ended before, kept by its iterator."""
        finished = reply.finished
        if not finished:  # it tells of a death
            return
        worker, started = reply.worker, reply.started
        if worker not in ends:
            self._opening.add(reply.number)
        end = ends.get(worker, started)
        ends[worker] = finished
        self._work.append((worker, end, started, finished))
        for timeline in self._timelines:
            timeline.loaded(reply, end)

    def noted(self, failed: Sequence[Failure]) -> None:
        """Samples that could not be loaded, when the turn of their batch has come."""
        self._num_failed += len(failed)
        self._failed += failed[: KEPT_FAILURES - len(self._failed)]

    def delivered(self, reply: Reply, since: float | None, began: float, now: float) -> None:
        """The user has a batch: asked for at `began`, after the one before it came at `since`."""
        if since is None or reply.number in self._opening:
            self._opening.discard(reply.number)
            self._first += now - began
        if since is None:
            since = began
        self._given.append((since, began, now, reply.samples, size_of(reply.batch)))
        if len(self._given) >= self.CHUNK:
            self.sums()
        for timeline in self._timelines:
            timeline.waited(since, began, now)

    def sums(self) -> Sums:
        """The totals as they stand."""
        given, self._given = self._given, []
        work, self._work = self._work, []
        if work:
            self._count_work(work)
        seconds = waited = 0.0
        if given:
            since, began, now, samples, nbytes = zip(*given, strict=True)
            waits = np.subtract(now, began)
            self._waits.add(waits)
            seconds, waited = float(np.subtract(now, since).sum()), float(waits.sum())
            self._samples += sum(samples)
            self._bytes += sum(nbytes)
        old = self._sums
        self._sums = Sums(
            old.batches + len(given), old.seconds + seconds, old.waited + waited, self._first,
            float(self._loading.sum()), float(self._alive.sum()),
        )  # fmt: skip
        return self._sums

    def _count_work(self, work: list[tuple[int, float, float, float]]) -> None:
        workers, ends, started, finished = zip(*work, strict=True)
        count = max(max(workers) + 1, len(self._alive))
        more = count - len(self._alive)
        self._alive = np.pad(self._alive, (0, more)) + np.bincount(workers, np.subtract(finished, ends), count)
        self._loading = np.pad(self._loading, (0, more)) + np.bincount(workers, np.subtract(finished, started), count)

    def stats(self, workers: int, choice: str, cores: int, caches: Sequence[Any]) -> Stats:
        """The account as it stands."""
        sums = self.sums()
        p50, p95, p99 = self._waits.percentiles((50, 95, 99))
        busy = np.minimum(self._loading / np.maximum(self._alive, 1e-9), 1.0).tolist()
        once = self._epochs == 1 or self._first_epoch > sums.first / 2
        return Stats(
            sums.batches, self._samples, self._bytes, sums.seconds, sums.waited, sums.first, p50, p95, p99, tuple(busy),
            self._num_failed, tuple(self._failed), sum(cache.hits for cache in caches),
            sum(cache.misses for cache in caches), workers, choice,
            verdict(sums, workers, cores, self._num_failed, self._renewed, once),
        )  # fmt: skip

    def trace(self, timeline: Timeline) -> None:
        """Keep a timeline, too."""
        self._timelines += (timeline,)

    def end_trace(self, timeline: Timeline) -> None:
        self._timelines = tuple(other for other in self._timelines if other is not timeline)


def size_of(batch: Any) -> int:
    """The bytes of the arrays in a batch."""
    kind = type(batch)
    if kind is np.ndarray:
        return batch.nbytes  # type: ignore[no-any-return]
    if kind is dict or kind is tuple or kind is list:
        leaves = batch.values() if kind is dict else batch
        if kind is list and batch and type(batch[0]) in (str, bytes):
            return 0
        total = 0
        for leaf in leaves:  # the usual batch without another call
            total += leaf.nbytes if type(leaf) is np.ndarray else size_of(leaf)
        return total
    try:
        node = node_of(kind)
        if node is not None:
            return sum(size_of(node.get(batch, key)) for key in node.keys(batch))
        nbytes = batch.nbytes
    except Exception:  # an account must not end a run
        return 0
    return nbytes if isinstance(nbytes, int) else 0


def verdict(sums: Sums, workers: int, cores: int, failed: int = 0, renewed: bool = True, once: bool = False) -> str:
    """One sentence: whether data is the bottleneck, and what to do.

    `renewed`: each epoch starts its own processes; `once`: the first start took most of what all of them took.
    """
    if not sums.batches:
        return f"nothing could be loaded: {number_of(failed, 'sample')} failed" if failed else "nothing was loaded yet"
    share, busy = sums.share_waited, sums.busy
    waited = f"waited for data {share:.0%} of the time"
    if share < LITTLE:
        faster = f"; the loader is {1 / busy:.1f} times faster than the loop that uses it" if 0 < busy < 0.67 else ""
        return f"{waited}{faster}: nothing to gain here"
    a_batch = sums.loading / sums.batches
    if workers == 0:
        if a_batch < TRANSPORT:
            return f"{waited}, but a batch takes {_time(a_batch)}, no more than a worker's way: workers do not help"
        wanted = max(1, math.ceil(min(sums.workers_needed, cores)))
        return f"{waited}, loading in this process: workers load while the loop works, try num_workers={wanted}"
    calm = sums.share_steady < LITTLE
    started = calm or sums.first > sums.waited / 2
    kept = "persistent_workers=True, so that they start only once"
    if started:
        waited += f", {sums.first / sums.waited:.0%} of it until the workers had started"
    crew = f"{workers} worker{'s' * (workers > 1)} {busy:.0%} busy"
    alone = sums.loading + sums.seconds - sums.waited  # what the same would have taken in one process
    if not calm and (a_batch < TRANSPORT or (busy < 0.8 and alone < 1.1 * (sums.seconds - sums.first))):
        return (
            f"{waited}, with {crew}: a batch takes {_time(a_batch)}, its way from a worker no less, so workers do not "
            f"help: use num_workers=0, or {kept if started and renewed and not once else 'larger batches'}"
        )
    if started and renewed and once:
        return (
            f"{waited}: the first start imports the dataset's modules for all of them. Make the loader earlier, so "
            "that it imports while the program goes on, or use multiprocessing_context='fork' or "
            "worker_type='thread', which import nothing" + (". Otherwise there is nothing to gain here" if calm else "")
        )
    if started:
        return (
            f"{waited}: {f'use {kept}' if renewed else 'iterate by steps(), which has no gap between epochs'}; make "
            "the loader before it is needed, and move heavy imports out of the dataset's module"
            + (". Otherwise there is nothing to gain here" if calm else "")
        )
    if busy < 0.8:
        return (
            f"{waited}, with {crew}: some batches take much longer than others: raise prefetch_factor, or take them as "
            "they come with in_order=False"
        )
    if workers < cores:
        return f"{waited}; {crew}: add workers ({cores} usable cores), or make samples cheaper"
    return (
        f"{waited}; {crew}: add workers if samples wait for a disk or a network, else make them cheaper, or keep them "
        f"in a CachedDataset: all usable cores ({cores}) are taken"
    )


class _Span(NamedTuple):
    """One box of a timeline."""

    row: int
    name: str
    start: float
    end: float
    request: int | None = None
    samples: int | None = None


class Timeline:
    """Events for Perfetto and chrome://tracing: a row for the consumer and one for each worker.

    What is loaded in the consumer's own thread (`inline`) stands on its row, inside of its waiting.
    """

    CONSUMER = 0

    def __init__(self, inline: bool) -> None:
        self._inline = inline
        self._spans: list[_Span] = []

    def loaded(self, reply: Reply, since: float) -> None:
        """A reply has come from a worker that had ended what it did before at `since`."""
        row, number, add = (self.CONSUMER if self._inline else reply.worker + 1), reply.number, self._spans.append
        if not self._inline:
            add(_Span(row, "wait", since, reply.started))
        add(_Span(row, "fetch", reply.started, reply.fetched, number, reply.samples))
        add(_Span(row, "collate", reply.fetched, reply.collated, number))
        if not self._inline:
            add(_Span(row, "encode", reply.collated, reply.finished, number))

    def waited(self, since: float, began: float, now: float) -> None:
        """The consumer worked on a batch from `since` to `began`, and then waited."""
        self._spans.append(_Span(self.CONSUMER, "work", since, began))
        self._spans.append(_Span(self.CONSUMER, "wait", began, now))

    def write(self, file: TextIO) -> None:
        """As JSON in the Chrome trace format; times in microseconds."""
        pid = os.getpid()
        spans = [span for span in self._spans if span.end > span.start > 0]
        names = {self.CONSUMER: "consumer"}
        names.update({row: f"worker {row - 1}" for row in sorted({span.row for span in spans} - {self.CONSUMER})})
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in names.items()
        ]
        for row, name, start, end, *said in spans:
            args = {key: value for key, value in zip(("request", "samples"), said, strict=True) if value is not None}
            box = {"ph": "X", "pid": pid, "tid": row, "name": name, "cat": "agnoload", "args": args}
            events.append({**box, "ts": start * 1e6, "dur": (end - start) * 1e6})
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
