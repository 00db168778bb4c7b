"""A request becomes samples, and samples a batch: the same code in this thread, in threads and in worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agnoload.backend import registry
from agnoload.batching.collate import collate, default_convert, install_registry, registry_snapshot
from agnoload.datasets import Batch, gather_of
from agnoload.errors import CollateError, add_note, attributes_of
from agnoload.fetching.copies import Copies
from agnoload.fetching.error_policy import ErrorPolicy
from agnoload.fetching.samples import IndexedSource, stopped
from agnoload.fetching.stream_source import StreamSetup, StreamSource, WorkerSetup
from agnoload.global_rng import RequestGenerators
from agnoload.messages import EMPTY, LEFTOVER_LANE, Failure, Reply, Request, StreamReport
from agnoload.protocols import Empty
from agnoload.seeding import Purpose, Rewinder, SampleContext
from agnoload.streams import is_indexed
from agnoload.worker_info import WorkerInfo, set_worker_info


class Fetcher:
    """Loads what a request names from one dataset. Picklable; `begin` is called once where it works."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any] | None, *, batched: bool, setup: WorkerSetup,
        policy: ErrorPolicy, stream: StreamSetup | None,
    ) -> None:  # fmt: skip
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._batched = batched
        self._setup = setup
        self._policy = policy
        self._stream = stream
        own = setup.kind == "process"
        self._tables = (registry_snapshot(), registry.loaded().table) if own else None
        """What user code has registered in the parent, for a process of its own."""
        self._copies: Copies | None = None
        self._prepare()

    def _prepare(self) -> None:
        """What does not travel: made again in each worker."""
        self._worker = 0
        self._info: WorkerInfo | None = None
        self._context = context = SampleContext(Rewinder())
        roots = {"dataset": self.dataset, "collate_fn": self.collate_fn}
        kind = self._setup.kind
        self._generators = RequestGenerators(context, roots, own=kind == "process", shared=kind == "thread")
        self._source: IndexedSource | StreamSource
        self._gather: Any = None
        if self._stream is not None:
            self._source = StreamSource(
                self.dataset, self._stream, self._setup.rank, self._policy, context, self._generators
            )
            return
        self._source = IndexedSource(self.dataset, self._batched, self._policy, context, self._generators)
        if self._batched and self.collate_fn is None and not self._policy.tolerant and self._policy.retry is None:
            self._gather = gather_of(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("dataset", "collate_fn", "_batched", "_setup", "_policy", "_stream", "_tables")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copies = None
        self._prepare()

    def __copy__(self) -> Fetcher:
        """For another thread: a dataset with indices is shared, of a stream each thread reads a copy of its own."""
        made = Fetcher.__new__(Fetcher)
        state = self.__getstate__()
        if self._stream is not None:
            self._copies = self._copies or Copies("dataset", self.dataset, is_indexed)
            state["dataset"] = self._copies.make()
        made.__setstate__(state)
        return made

    @property
    def gathers(self) -> bool:
        """Whether the dataset gives whole batches, without a sample in between."""
        return self._gather is not None

    def parts(self) -> Mapping[str, Any]:
        """The user's objects in it, by the names that an error must use."""
        return {
            "dataset": self.dataset,
            "collate_fn": self.collate_fn,
            "worker_init_fn": self._setup.init,
            "on_error": self._policy.on_error,
            "retry": self._policy.retry,
        }

    def begin(self, worker: int) -> None:
        """Called in a worker before its first request."""
        setup = self._setup
        self._worker = worker
        self._info = WorkerInfo(
            worker, setup.workers, setup.seed, self.dataset, rank=setup.rank, world_size=setup.world_size
        )
        set_worker_info(self._info)
        if self._tables is not None:
            install_registry(self._tables[0])
            registry.install_table(self._tables[1])
        registry.loaded().enter_worker()
        if isinstance(self._source, StreamSource):
            self._source.begin(self._info)
        if setup.init is not None:
            setup.init(worker)

    def close(self) -> None:
        """Let go of what a stream has open; a request that comes later opens it again."""
        self._source.close()

    # ------------------------------------------------------------------------------------------------ one request

    def __call__(self, request: Request, empty: Empty) -> Reply:
        started = time.monotonic()
        self._context.at(request.seed, request.epoch, request.first, request.stride, request.rank)
        if self._info is not None:
            self._info.epoch, self._info.seed = request.epoch, request.seed
        if self._gather is not None:
            try:
                batch = self._gather(request.indices, empty)
            except (Exception, GeneratorExit) as error:
                return self._failed(request, error, started)
            return self._reply(request, batch, len(request.indices), started, time.monotonic())
        try:
            with self._generators:
                try:
                    reply = self._loaded(request, empty, started)
                except (Exception, GeneratorExit) as error:
                    reply = self._failed(request, error, started)
                except BaseException as error:  # it ends the loop, here or, sent by the worker, in the user's process
                    _named(error, request)
                    raise
        finally:  # an interrupt may come at any step, also before the context has put anything back
            self._generators.restore()
        if notices := self._generators.notices:
            reply = reply._replace(notices=notices[:])
            notices.clear()
        try:
            return reply
        finally:
            del reply  # the traceback of its error knows this frame: it would hold itself, and the loop's iterator

    def _loaded(self, request: Request, empty: Empty, started: float) -> Reply:
        samples, count, keys, failed, report = self._source.load(request)
        fetched = time.monotonic()
        if isinstance(samples, Batch):
            return self._reply(request, samples.data, count, started, fetched, failed, report)
        if samples is EMPTY:
            return self._reply(request, EMPTY, count, started, fetched, failed, report)
        function: Any = self.collate_fn
        if self._stream is not None and function is not None:
            self._generators.seed()
        self._context.item = 0
        self._context.purpose = Purpose.COLLATE
        given = samples if self._batched else samples[0]
        try:
            if function is None:
                batch = collate(given, empty) if self._batched else default_convert(given)
            else:
                batch = function(given, empty=empty) if getattr(function, "accepts_empty", False) else function(given)
        except CollateError as error:
            named = [keys[item] for item in error.items if keys is not None and item < len(keys)]
            if named:
                error.add_note(
                    f"indices {' and '.join(map(repr, named))} of batch {request.batch}, epoch {request.epoch}"
                )
            raise
        except BaseException as error:
            raise stopped(error, f"while batch {request.batch} of epoch {request.epoch} was collated")
        return self._reply(request, batch, count, started, fetched, failed, report)

    def _reply(
        self, request: Request, batch: Any, samples: int, started: float, fetched: float,
        failed: Sequence[Failure] = (), report: StreamReport | None = None,
    ) -> Reply:  # fmt: skip
        now = time.monotonic()
        times = (started, fetched, now, now)
        return Reply(request.number, self._worker, batch, None, samples, False, failed, (), (), report, *times)

    def _failed(self, request: Request, error: BaseException, started: float) -> Reply:
        error = _named(stopped(error), request)
        culprit, self._source.culprit = self._source.culprit, None
        report = self._source.report
        # Without a report the stream itself has raised: it cannot be read on.
        end = self._stream is not None and request.lane != LEFTOVER_LANE and report is None
        return Reply(
            request.number, self._worker, error=error, end=end, failed=() if culprit is None else (culprit,),
            stream=report, started=started, finished=time.monotonic(),
        )  # fmt: skip


def _named(error: BaseException, request: Request) -> BaseException:
    """An error of a request always says which one it was."""
    if not any("batch" in note for note in attributes_of(error).get("__notes__", ())):
        add_note(error, f"in batch {request.batch} of epoch {request.epoch}")
    return error
