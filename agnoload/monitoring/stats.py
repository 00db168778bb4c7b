"""What a loader has done and where the time went: an account, and a verdict in one sentence."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from agnoload.batching.tree import node_of
from agnoload.messages import Failure, Reply
from agnoload.monitoring.timeline import Timeline
from agnoload.validate import number_of

TRANSPORT = 300e-6
"""Seconds that it costs to hand a batch over from a worker; what takes less is better loaded without workers."""
LITTLE = 0.05
"""A loop that waits for less than this share of the time has nothing to gain."""
KEPT_FAILURES = 1000
"""Failed samples that are kept, some 200 bytes each; the others are only counted."""
KEPT_WAITS = 10_000
"""Percentiles are those of the last waits."""


@dataclass(frozen=True, slots=True)
class Stats:
    """An account of what a loader has delivered so far, over all its epochs; made by `loader.stats()`, unchangeable.

    Times are in seconds. `seconds`: what `iter()` took, and from the first `next()` of an epoch to its last batch,
    summed over epochs; the user's work on batches counts, the time between epochs does not. `wait_seconds`: what
    `iter()` and `next()` took of it. `wait_first`: what they took until each worker's first batch, while workers
    start and import. `wait_p50` ...: percentiles over the last 10,000 batches. `bytes`: of the arrays in the batches,
    before a backend converts them. `busy`: the share of its time since its first batch began that each worker was
    loading; without workers, that of the process that iterates. `num_failed`: how many samples were skipped or
    replaced, and `failed`: index and error of the first 1,000 of them. `cache_hits`, `cache_misses`: of every
    `CachedDataset` inside. `num_workers`: how many there are now, and `choice` why. `verdict`: one sentence on
    whether data is the bottleneck, and what to do. `imported_apart`: packages that each worker imports for itself,
    since their import starts a thread or leaves a file open, which processes must not share.

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
    samples: int = 0
    nbytes: int = 0


class Recorder:
    """Counts batches. It notes two tuples for each batch and sums them up many at a time, which is a hundred times
    cheaper than one by one."""

    CHUNK = 1024

    def __init__(self) -> None:
        self._work: list[tuple[int, float, float, float]] = []
        """Of replies: the worker, where it ended before, when it took this up and when it ended."""
        self._given: list[tuple[float, float, float, int, int]] = []
        """Of batches: when the one before was given out, when it was asked for and given out, its samples and bytes."""
        self._sums = Sums(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._first = 0.0
        self._renewed = False
        """Whether each epoch starts worker processes of its own."""
        self._epochs = 0
        self._first_epoch = 0.0
        """What of `_first` the first epoch has waited, which imports for the others."""
        self._opening: set[int] = set()
        """Replies that are the first of their worker, and not yet delivered: a wait for one is one for the start."""
        self._waits = np.zeros(0)
        self._alive = np.zeros(0)
        self._loading = np.zeros(0)
        self._num_failed = 0
        self._failed: list[Failure] = []
        self._timelines: tuple[Timeline, ...] = ()

    def opened(self, seconds: float, renewed: bool) -> None:
        """An epoch has its workers; to start them took `seconds`."""
        self._renewed = renewed
        self._first_epoch = self._first if self._epochs == 1 else self._first_epoch
        self._epochs += 1
        self._first += seconds
        sums = self._sums
        self._sums = sums._replace(seconds=sums.seconds + seconds, waited=sums.waited + seconds)

    def arrived(self, reply: Reply, ends: dict[int, float]) -> None:
        """A pool has answered; `ends` is where that pool's workers ended before, kept by its iterator."""
        finished = reply.finished
        if not finished:  # the pool's own, about a death
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
        """The totals up to now."""
        given, self._given = self._given, []  # swapped first: an iterator in another thread may append
        work, self._work = self._work, []
        if work:
            workers, ends, started, finished = zip(*work, strict=True)
            count = max(max(workers) + 1, len(self._alive))
            more = count - len(self._alive)
            alive, loading = (np.bincount(workers, np.subtract(finished, since), count) for since in (ends, started))
            self._alive = np.pad(self._alive, (0, more)) + alive
            self._loading = np.pad(self._loading, (0, more)) + loading
        if given:
            since, began, now, samples, nbytes = zip(*given, strict=True)
            waits = np.subtract(now, began)
            self._waits = np.concatenate([self._waits, waits])[-KEPT_WAITS:]
            seconds = float(np.subtract(now, since).sum())
            old = self._sums
            self._sums = old._replace(
                batches=old.batches + len(given), seconds=old.seconds + seconds, waited=old.waited + float(waits.sum()),
                samples=old.samples + sum(samples), nbytes=old.nbytes + sum(nbytes),
            )  # fmt: skip
        self._sums = self._sums._replace(
            first=self._first, loading=float(self._loading.sum()), alive=float(self._alive.sum())
        )
        return self._sums

    def stats(
        self, workers: int, choice: str, cores: int, caches: Sequence[Any], imported_apart: Iterable[str] = ()
    ) -> Stats:
        """The account up to now."""
        sums = self.sums()
        p50, p95, p99 = np.percentile(self._waits if len(self._waits) else [0.0], (50, 95, 99)).tolist()
        busy = np.minimum(self._loading / np.maximum(self._alive, 1e-9), 1.0).tolist()
        apart = tuple(sorted(imported_apart))  # what each worker imports is paid for in each epoch
        once = not apart and (self._epochs == 1 or self._first_epoch > sums.first / 2)
        return Stats(
            sums.batches, sums.samples, sums.nbytes, sums.seconds, sums.waited, sums.first, p50, p95, p99, tuple(busy),
            self._num_failed, tuple(self._failed), sum(cache.hits for cache in caches),
            sum(cache.misses for cache in caches), workers, choice,
            verdict(sums, workers, cores, self._num_failed, self._renewed, once), apart,
        )  # fmt: skip

    @contextmanager
    def recording(self, path: str | os.PathLike[str], inline: bool) -> Iterator[None]:
        """Keep a timeline as well, and write it at the end."""
        with open(path, "w", encoding="utf-8") as file:  # now: a path that cannot be written must not cost a run
            timeline = Timeline(inline)
            self._timelines += (timeline,)
            try:
                yield
            finally:
                self._timelines = tuple(other for other in self._timelines if other is not timeline)
                timeline.write(file)


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
    own = sums.seconds - sums.waited  # what the user's loop itself takes
    steady = sums.seconds - sums.first  # once the workers had started, which more or fewer of them do not change
    share = sums.waited / sums.seconds if sums.seconds > 0 else 0.0
    calm = steady <= 0 or (sums.waited - sums.first) / steady < LITTLE
    busy = min(sums.loading / sums.alive, 1.0) if sums.alive > 0 else 0.0
    waited = f"waited for data {share:.0%} of the time"
    if share < LITTLE:
        faster = f"; the loader is {1 / busy:.1f} times faster than the loop that uses it" if 0 < busy < 0.67 else ""
        return f"{waited}{faster}: nothing to gain here"
    a_batch = sums.loading / sums.batches
    handing_over = "about what it costs to hand one over from a worker"
    if workers == 0:
        if a_batch < TRANSPORT:
            return f"{waited}, but a batch takes {_time(a_batch)}, {handing_over}: workers do not help"
        wanted = max(1, min(math.ceil(sums.loading / own), cores)) if own > 0 else cores
        return f"{waited}, loading in this process: workers load while the loop works, try num_workers={wanted}"
    started = calm or sums.first > sums.waited / 2
    kept = "persistent_workers=True, so that they start only once"
    if started:
        waited += f", {sums.first / sums.waited:.0%} of it until the workers had started"
    if_calm = ". Otherwise there is nothing to gain here" if calm else ""
    crew = f"{workers} worker{'s' * (workers > 1)} {busy:.0%} busy"
    if not calm and (a_batch < TRANSPORT or (busy < 0.8 and sums.loading + own < 1.1 * steady)):
        return (
            f"{waited}, with {crew}: a batch takes {_time(a_batch)}, {handing_over}: workers do not help, use "
            f"num_workers=0 or {kept if started and renewed and not once else 'larger batches'}"
        )
    if started and renewed and once:
        return (
            f"{waited}: the first start imports the dataset's modules for all of them. Make the loader earlier, so "
            "that it imports while the program goes on, or use multiprocessing_context='fork' or "
            f"worker_type='thread', which import nothing{if_calm}"
        )
    if started:
        return (
            f"{waited}: {f'use {kept}' if renewed else 'iterate by steps(), which has no gap between epochs'}; make "
            f"the loader before it is needed, and move heavy imports out of the dataset's module{if_calm}"
        )
    if busy < 0.8:
        return (
            f"{waited}, with {crew}: some batches take much longer than others: raise prefetch_factor, or use "
            "in_order=False"
        )
    if workers < cores:
        return f"{waited}; {crew}: add workers ({cores} usable cores), or make samples cheaper"
    return (
        f"{waited}; {crew}, on all usable cores ({cores}): add workers if samples wait for a disk or a network, else "
        "make samples cheaper, or keep them in a CachedDataset"
    )
