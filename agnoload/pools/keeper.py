"""The pools of one loader: how one is opened for an iterator, and kept for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from agnoload.backend import registry
from agnoload.backend.base import Backend
from agnoload.inspect import find_large_lists
from agnoload.monitoring.logs import LogRecord, WarningRecord
from agnoload.options import Options
from agnoload.pools.inline import InlinePool
from agnoload.pools.preload import Preload, release_server, start_server, use_server
from agnoload.pools.processes import ProcessPool
from agnoload.pools.threads import ThreadPool
from agnoload.protocols import Pool, WorkerFetch

MOST_UNDER_WAY = 2048
"""Batches under way at most: half of the slots of the shared memory; batches that the user keeps take others."""

Release = Callable[[Any], None]
"""Takes a pool back from an iterator that has ended."""


def window_of(options: Options, workers: int) -> int:
    """How many batches may be under way."""
    return max(min(workers * options.prefetch, MOST_UNDER_WAY), 1)


class KeptPools:
    """Worker processes between two iterators. Threads may take and put back at once: no pool goes to two.

    Finalizers of the loader and of its iterators hold it, so it must not reach them: it knows no loader and no dataset,
    for a dataset may hold its loader.
    """

    def __init__(self) -> None:
        self._pools: list[ProcessPool] = []
        self._over = False

    def take(self) -> ProcessPool | None:
        """A kept pool, unless it belongs to the process that this one was forked from."""
        while self._pools:
            with suppress(IndexError):  # another thread was quicker
                pool = self._pools.pop()
                if pool.is_ours:
                    return pool
        return None

    def put(self, pool: ProcessPool) -> None:
        """Keep a pool for the next iterator."""
        if not pool.whole or any(kept.is_ours for kept in self._pools):
            pool.close()
            return
        try:
            pool.abandon()
        except BaseException:
            pool.close()
            raise
        self._pools.append(pool)
        if self._over:  # the iterator dies after its loader, or together with it in a cycle
            self.close()

    def end(self) -> None:
        """The loader is gone: nobody opens a pool any more."""
        self._over = True
        self.close()

    def close(self) -> None:
        """End the workers that are kept now."""
        while (pool := self.take()) is not None:
            pool.close()


class PoolKeeper:
    """Opens the pools of a loader, and keeps one of worker processes between two iterators if workers are persistent.

    `ahead`: batches beyond the window whose slots are still in use while they are copied to a device. `listen` gets the
    log records of workers, `say` gives a warning once. If the fork server will be needed, it begins here: it imports
    what the dataset needs while the program goes on.
    """

    def __init__(
        self,
        options: Options,
        backend: Backend,
        ahead: int,
        listen: Callable[[Sequence[LogRecord | WarningRecord]], None],
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._backend = backend
        self._ahead = ahead
        self._listen = listen
        self._say = say
        self.kept = KeptPools()
        self._searched = False
        self.preload: Preload | None = None
        """What workers import; kept from epoch to epoch, so that the next server has it loaded."""
        if options.worker_type == "process" and options.num_workers not in (0, "auto"):
            parts = {name: getattr(options, name) for name in ("dataset", "collate_fn", "worker_init_fn", "on_error")}
            self.preload = start_server(self, options.multiprocessing_context, registry.worker_environment(), parts)

    def open(self, fetch: Any, workers: int) -> tuple[Pool, Release | None]:
        """A pool for one iterator, and what takes it back afterwards (None: the iterator closes it)."""
        if not workers or self._options.worker_type == "thread":
            return self.start(fetch, workers, self._say), None
        release = self.kept.put if self._options.persistent_workers else None
        if (pool := self.kept.take()) is not None:
            if pool.reusable(fetch):
                if pool.crew.digest and (path := pool.crew.digest.unseen):
                    self._say(
                        f"the kept workers have a copy of {path}, which is too large to compare in every epoch: "
                        "after a change within it that leaves its length as it is, call loader.close(), or assign a "
                        "new object, so that the workers are started again"
                    )
                return pool, release
            pool.close()
        if not self._searched:
            self._searched = True
            for path in find_large_lists(self._options.dataset):
                self._say(
                    f"{path} holds very many Python objects: each worker gets a copy of every one, and its memory "
                    "grows as they are read. agnoload.PackedList(...) keeps strings, bytes or objects in one buffer "
                    "for all workers"
                )
        return self.start(fetch, workers), release

    def start(self, fetch: WorkerFetch, workers: int, say: Callable[[str], None] | None = None) -> Pool:
        """A new pool of the kind that was asked for: the one place that knows the kinds that there are.

        With `say`, one of threads warns once of what threads share.
        """
        options, window = self._options, window_of(self._options, workers)
        if not workers:
            return InlinePool(fetch)
        if options.worker_type == "thread":
            return ThreadPool(fetch, workers=workers, window=window, owned=options.stream, say=say)
        use_server(self)
        pool = ProcessPool(
            fetch,
            workers=workers,
            window=window + self._ahead,
            context=options.multiprocessing_context,
            owned=options.stream,
            reuse=options.persistent_workers,
            restarts=options.max_worker_restarts,
            attach=self._backend.attach if options.pin_memory else None,
            fence=self._backend.fence,
            environment=registry.worker_environment(),
            listen=self._listen,
            preload=self.preload,
        )
        self.preload = pool.crew.preload
        return pool

    def close(self) -> None:
        """End the kept workers, and the fork server if no other loader uses it."""
        self.kept.close()
        release_server(self)
        self.preload = None
