"""`DataLoader`: its options, and how it puts the parts together.

A planner turns `(seed, epoch, position)` into plans, and a plan into requests. The window says which request may go out
and which batch may come out; a pool answers requests in any order. `iterator.py` holds the loop.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, Unpack, overload

import numpy.typing as npt

from agnoload._types import (
    AnyOptions,
    B,
    BatchT,
    K,
    KeywordOptions,
    KnownOptions,
    Leaf,
    Named,
    NumpyOptions,
    S,
    ScalarT,
    Source,
    Unsaid,
)  # fmt: skip
from agnoload.backend import registry
from agnoload.backend.base import Backend
from agnoload.datasets import find_caches
from agnoload.errors import CALLED, LoaderClosed, WarnOnce
from agnoload.fetching.error_policy import ErrorPolicy, FailureBudget, ReplacementKeys
from agnoload.fetching.fetch import Fetcher
from agnoload.fetching.stream_source import StreamSetup, WorkerSetup
from agnoload.iterator import PLACED_AHEAD, Account, LoaderIterator, Supply, end_with_program
from agnoload.messages import Request
from agnoload.monitoring.auto import Choice, choose_for_dataset, choose_for_stream
from agnoload.monitoring.benchmark import Benchmark, RepeatedFetch, run_benchmark
from agnoload.monitoring.logs import WorkerLogRelay
from agnoload.monitoring.stats import Recorder, Stats
from agnoload.options import Option, Options
from agnoload.planning.epochs import EpochCounter
from agnoload.planning.plan import Plan
from agnoload.planning.planner import Planner
from agnoload.planning.state import EpochPosition
from agnoload.planning.stream_plan import StreamPlan
from agnoload.planning.window import Window
from agnoload.pools.inline import InlinePool
from agnoload.pools.keeper import PoolKeeper, Release, window_of
from agnoload.pools.processes import ProcessPool
from agnoload.protocols import Pool
from agnoload.system import local_world_size, usable_cores, usable_memory
from agnoload.validate import integer, number, number_of


class DataLoader(Generic[BatchT]):
    """Loads batches from a dataset, in this process or through workers; iterate it once an epoch.

    Parameters have torch's names and meanings, plus:

    num_workers: a number, or `"auto"`: none where a batch costs less than its way through a worker, else up to one for
        each core that affinity and control group allow. A probe decides, once; `repr` and `stats()` say why.
    backend: a name (`"numpy"`, `"torch"`, `"jax"`, `"cupy"`, or one that is installed) or a `Backend`: whose arrays the
        batches are made of.
    device: where to put the batches, in the backend's own terms; None leaves them in the host's memory.
    seed: a non-negative int that the order and all randomness inside samples follow from. Without it, one is drawn from
        the operating system (0 for a stream that is split over ranks, so that they agree); read it from `loader.seed`.
        The batches are a function of dataset, options, seed and epoch, whatever the number, kind and start method of
        the workers.
    worker_type: `"process"` or `"thread"`.
    on_error: `"raise"`; `"skip"` leaves a bad sample out; `"replace"` takes another sample of the epoch; or a callable
        `(error, index)` that returns one of these.
    max_worker_restarts: how many times a worker that dies is replaced, and its requests loaded again.
    retry: exception types for which a sample is tried again, or a `Retry` that says how often and after which pauses.
    max_failed: how many samples of an epoch may be skipped or replaced before `TooManyFailed` is raised: a count (int)
        or a share (float below 1), which is judged as if at least 100 samples had been tried, and again at the end of
        the epoch. A saved state carries the count.

    Raises `OptionError` for options that cannot work, `BackendUnavailable` for a backend that cannot run here.

    >>> loader = DataLoader(range(10), batch_size=4)
    >>> for batch in loader: print(batch)
    [0 1 2 3]
    [4 5 6 7]
    [8 9]
    >>> len(loader)
    3
    """

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)  # `DataLoader[Batch]`, and torch's `DataLoader[Sample]`

    # fmt: off
    # What a batch is, by the type of a sample: see `_types.py`.
    @overload
    def __init__(self: DataLoader[B], dataset: Source[S], batch_size: int = 1, shuffle: bool | None = None, *,
                 collate_fn: Callable[[list[S]], B], backend: Literal["numpy"] = ...,
                 **options: Unpack[KnownOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[B], dataset: Source[S], batch_size: None, shuffle: bool | None = None, *,
                 collate_fn: Callable[[S], B], backend: Literal["numpy"] = ...,
                 **options: Unpack[KnownOptions]) -> None: ...
    @overload  # another backend converts what `collate_fn` returns
    def __init__(self: DataLoader[Any], dataset: Source[S], batch_size: int | None = 1, shuffle: bool | None = None, *,
                 collate_fn: Callable[[Any], Any], backend: str | Backend,
                 **options: Unpack[KnownOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[npt.NDArray[ScalarT]], dataset: npt.NDArray[ScalarT], batch_size: int = 1,
                 shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[Any], dataset: Source[Unsaid | Named], batch_size: int = 1,
                 shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[S], dataset: Source[S], batch_size: None, shuffle: bool | None = None,
                 **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[npt.NDArray[Any]], dataset: Source[Leaf], batch_size: int = 1,
                 shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[dict[K, Any]], dataset: Source[dict[K, S]], batch_size: int = 1,
                 shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[tuple[Any, ...]], dataset: Source[tuple[Any, ...]], batch_size: int = 1,
                 shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[Any], dataset: Source[Any], batch_size: int | None = 1, shuffle: bool | None = None,
                 sampler: Any = None, batch_sampler: Any = None, num_workers: int | Literal["auto"] = 0,
                 collate_fn: None = None, pin_memory: bool = False, drop_last: bool = False, timeout: float = 0,
                 worker_init_fn: Callable[[int], object] | None = None, multiprocessing_context: Any = None,
                 generator: Any = None, *, backend: str | Backend = ..., **options: Unpack[KeywordOptions]
                 ) -> None: ...
    def __init__(
        self, dataset: Any, batch_size: int | None = 1, shuffle: bool | None = None, sampler: Any = None,
        batch_sampler: Any = None, num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None, pin_memory: bool = False, drop_last: bool = False,
        timeout: float = 0, worker_init_fn: Callable[[int], object] | None = None, multiprocessing_context: Any = None,
        generator: Any = None, *, prefetch_factor: int | None = None, persistent_workers: bool = False,
        pin_memory_device: str = "", in_order: bool = True, backend: str | Backend = "numpy", device: Any = None,
        seed: int | None = None, worker_type: Literal["process", "thread"] = "process",
        on_error: Literal["raise", "skip", "replace"] | Callable[[Exception, Any], str] = "raise",
        max_worker_restarts: int = 0, retry: Any = None, max_failed: int | float | None = None,
    ) -> None:
        # fmt: on
        self._options = options = Options(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor, persistent_workers,
            pin_memory_device, in_order, backend, device, seed, worker_type, on_error, max_worker_restarts, retry,
            max_failed,
        )  # fmt: skip
        options.warn()
        self._device = options.backend.check(device, options.pin_memory)
        self._say = WarnOnce()
        self._planner = planner = Planner(options, registry.rank_and_world(options.backend), self._say)
        self._choice: Choice | None = None
        self._worker_seed: int | None = None
        self._epochs = EpochCounter(planner.user_sampler, options.seed, generator, 0 if planner.is_split else None)
        self._restored: Plan | None = None
        # Weak: an iterator that the user drops ends its workers then, not when the loader goes.
        self._iterators: weakref.WeakValueDictionary[int, LoaderIterator[Any]] = weakref.WeakValueDictionary()
        self._starting = threading.RLock()  # re-entrant: a signal handler may iterate the loader, too
        self._closings = 0
        self._recorder = Recorder()
        self._journal = WorkerLogRelay()
        ahead = PLACED_AHEAD if self._device is not None else 0
        self._keeper = PoolKeeper(options, options.backend, ahead, self._journal.replay, self._say)
        weakref.finalize(self, self._keeper.kept.end)  # `kept` knows no loader: else none would be collected

    dataset = Option[Any]("The dataset.")
    batch_size = Option[int | None]("Samples a batch; None with a batch sampler or without batches.", "cut_size")
    batch_sampler = Option[Any]("The batch sampler that was given, or None.")
    collate_fn = Option[Any]("The function that makes a batch of samples; None for the default.")
    pin_memory = Option[bool]("Whether batches lie in page-locked memory.")
    drop_last = Option[bool]("Whether an incomplete last batch is left out.")
    timeout = Option[float]("Seconds that a batch may take; 0 without limit.")
    multiprocessing_context = Option[Any]("The start method or context that was asked for.")
    generator = Option[Any]("The generator that gives a seed for each epoch, or None.")
    prefetch_factor = Option[int]("Batches under way for each worker.", "prefetch")
    persistent_workers = Option[bool]("Whether workers live on from epoch to epoch.")
    in_order = Option[bool]("Whether batches come in the sampler's order, or as they are ready.")
    backend = Option[Backend]("What turns the leaves of a batch into another library's arrays.")
    device = Option[Any]("Where batches are placed, or None.")

    @property
    def worker_init_fn(self) -> Callable[[int], object] | None:
        """The function that each worker calls with its number before its first sample.

        It may be set, and counts from the next `iter` on; one that splits a stream must be given to the constructor.
        """
        return self._options.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Callable[[int], object] | None) -> None:
        self._options = replace(self._options, worker_init_fn=function)

    @property
    def sampler(self) -> Any:
        """What decides which samples come; None for a stream or with a batch sampler."""
        return None if self._options.batch_sampler is not None else self._planner.sampler

    @property
    def num_workers(self) -> int:
        """Workers that load; 0 means the process that iterates. Chosen when first asked for with `"auto"`."""
        options = self._options
        if isinstance(options.num_workers, int):
            return options.num_workers
        if self._choice is None:
            cores = usable_cores(local_world_size())
            if options.stream:
                self._choice = choose_for_stream(options.dataset, cores)
            else:
                fetcher, pattern = self._fetcher(1), Request(0, self.epoch, 0, None, 0, self.seed)
                start = partial(self._keeper.start, fetcher, 1)
                self._choice = choose_for_dataset(options, fetcher.gathers, start, pattern, cores, usable_memory())
        return self._choice.workers

    @property
    def seed(self) -> int:
        """The seed that order and samples follow from; with `generator`, that of the epoch begun last."""
        return self._epochs.place.seeds.samples

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that the next `iter` begins: after a `break` that is the one after it.

        The state is still that of the epoch that was left, so it resumes within it.

        >>> loader = DataLoader(range(10), 4)
        >>> for batch in loader: break
        >>> loader.epoch, loader.state_dict()["epoch"]
        (1, 0)
        """
        return self._epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter` begin this epoch; not needed for epochs to differ.

        A state that was restored within that very epoch stays in force.
        """
        self._epochs.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of batches of an epoch; `TypeError` where dataset or sampler has no length."""
        return self._planner.length(self.seed, self.epoch)

    def __repr__(self) -> str:
        try:
            options = self._options
            chosen = "" if self._choice is None else f" (auto: {self._choice.reason})"
            words = options.describe(f"num_workers={self.num_workers}{chosen}")
            words.append(f"seed={self.seed}" if options.generator is None else f"generator={options.generator!r}")
            with suppress(TypeError):
                words.append(number_of(len(self), "batch"))
            return f"DataLoader({', '.join(words)}, epoch {self.epoch})"
        except CALLED:  # the constructor has raised, or the repr of a part does
            return object.__repr__(self)

    def __iter__(self) -> LoaderIterator[BatchT]:
        return self._iterate(None)

    def steps(self, n: int) -> LoaderIterator[BatchT]:
        """Iterate `n` batches, across the ends of epochs without a gap; no batch spans two epochs.

        As with `iter`, the first of them is the first of an epoch, unless a state was loaded. `OptionError` at an epoch
        without any batch.

        >>> [len(batch) for batch in DataLoader(range(10), 4).steps(5)]
        [4, 4, 2, 4, 4]
        """
        return self._iterate(integer("steps", n, 0, "a non-negative int"))

    def _iterate(self, limit: int | None) -> LoaderIterator[BatchT]:
        with self._starting:  # threads that start at once begin one epoch after the other
            closings = self._closings
            try:
                iterator = self._begin(limit)
            except Exception as error:
                end_with_program()
                if self._closings == closings:
                    raise
                raise LoaderClosed("the loader was closed while its workers were started") from error
            if self._closings != closings:  # another thread, or a signal handler, has called `close` meanwhile
                iterator.close()
                raise LoaderClosed("the loader was closed while its workers were started")
            return iterator

    def _begin(self, limit: int | None) -> LoaderIterator[BatchT]:
        self._planner.warn_if_unsplit()
        self._planner.user_sampler.leave()
        place = self._epochs.begin()
        plan, self._restored = self._restored, None
        if plan is None or plan.start != place:
            plan = self._planner.plan(place, self.num_workers)
        if plan.exhausted and plan.passed:  # a state of the very end: the next epoch begins
            plan = self._next_plan(plan.end())
        began = time.monotonic()
        pool, release = self._keeper.open(self._fetcher(self.num_workers, plan), self.num_workers)
        self._recorder.opened(time.monotonic() - began, type(pool) is ProcessPool and release is None)
        return self._iterator(plan, pool, release, limit)

    def _next_plan(self, place: EpochPosition) -> Plan:
        """The next epoch, where the one before has ended here."""
        return self._planner.plan(self._epochs.following(place), self.num_workers)

    def _iterator(self, plan: Plan, pool: Pool, release: Release | None, limit: int | None) -> LoaderIterator[BatchT]:
        max_failed = self._options.max_failed
        try:
            budget = None if max_failed is None else FailureBudget(max_failed, plan.epoch, plan.start.failed)
            account = Account(self._recorder, self._journal, self._say, budget)
            window = Window(window_of(self._options, self.num_workers), self._options.in_order)
            supply = Supply(plan, self._next_plan, pool, window, limit, self._options.timeout or None, account)
            iterator: LoaderIterator[BatchT] = LoaderIterator(
                self, supply, account, self.backend, self._device, pool, release
            )
        except BaseException:
            pool.close()
            raise
        self._epochs.began(iterator.progress)
        self._iterators[id(iterator)] = iterator
        return iterator

    def _fetcher(self, workers: int, plan: Plan | None = None) -> Fetcher:
        options, planner = self._options, self._planner
        if self._worker_seed is None:  # kept, though a generator gives others later: kept workers do not learn of it
            self._worker_seed = self.seed if plan is None else plan.seed
        stream = None
        if isinstance(plan, StreamPlan):
            resumed, splits = plan.epoch if plan.resumed else -1, planner.init_splits
            stream = StreamSetup(options.drop_last, splits, resumed, plan.reader_start)
        kind: Any = options.worker_type if workers else "inline"
        ranks, init = (planner.rank, planner.world_size), options.worker_init_fn
        replaces = planner.has_random_access and options.on_error not in ("raise", "skip")
        keys = ReplacementKeys(planner.sampler, self._epochs.order_seed) if replaces else None
        return Fetcher(
            options.dataset,
            options.collate_fn,
            batched=options.batched,
            setup=WorkerSetup(kind, workers, self._worker_seed, *ranks, init),
            policy=ErrorPolicy(options.on_error, options.retry, keys),
            stream=stream,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the batches that were yielded end, for `load_state_dict`; `json.dumps` takes it.

        Under 1 KiB for datasets with indices. After the last batch of an epoch it is the start of the next. Of several
        iterators it is about the one that was made last.
        """
        return self._planner.save(self._epochs.place)

    def load_state_dict(self, state: Any) -> None:
        """Let the next `iter` resume where `state` was taken; reads no data.

        The number of workers, the number of ranks (at the same position) and the batch size may have changed.
        `StateError` with both sides if dataset length, sampler or a given seed differ, or if it is no state at all; the
        loader then stays where it was. An iterator that is under way continues, but moves the state no more.
        """
        place = self._planner.read(state)
        self._epochs.check(place)
        restored = self._planner.restored(place, lambda: self.num_workers)
        self._epochs.restore(place)
        self._restored = restored

    def stats(self) -> Stats:
        """What was loaded so far and where the time went, with a verdict in one sentence.

        >>> loader = DataLoader(range(10), 4)
        >>> loader.stats().verdict
        'nothing was loaded yet'
        """
        workers, preload = self.num_workers, self._keeper.preload
        choice = "as asked for" if self._choice is None else f"auto: {self._choice.reason}"
        cores, caches = usable_cores(local_world_size()), find_caches(self._options.dataset)
        return self._recorder.stats(workers, choice, cores, caches, [] if preload is None else preload.left_out)

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """While the context is open, keep a timeline; at its end, write it for Perfetto and chrome://tracing.

        A row for the consumer (wait, work) and one for each worker (wait, fetch, collate, encode); without workers all
        is in the consumer's row.

        >>> import json, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace.json"
        >>> loader = DataLoader(range(10), 4)
        >>> with loader.trace(path):
        ...     for batch in loader: pass
        >>> sorted({event["name"] for event in json.loads(path.read_text())["traceEvents"]})
        ['collate', 'fetch', 'thread_name', 'wait', 'work']
        """
        return self._recorder.recording(path, inline=self.num_workers == 0)

    def benchmark(self, seconds: float = 5.0) -> Benchmark:
        """Measure the loader by itself, then what it could give if loading took no time; print it to read advice.

        Half of `seconds` goes to each: to a loop that does nothing with its batches, and to one batch that passes
        through the loader and its backend again and again. Position, `stats()` and kept workers stay as they are.

        >>> print(DataLoader(range(100), 10).benchmark(seconds=0.02))
        the loader alone: ... batches/s, ... samples/s, the first batch after ... s
        one batch again and again: ... batches/s, the most that it can give
        ...
        """
        seconds = number("seconds", seconds, 0, "a number of seconds, not negative")
        with self._twin(self.num_workers) as twin, self._twin(0) as inline:
            plan = inline._planner.plan(inline._epochs.begin(), 0)
            pool = InlinePool(RepeatedFetch(inline._fetcher(0, plan)))
            return run_benchmark(twin, lambda: inline._iterator(plan, pool, None, sys.maxsize), seconds)

    def _twin(self, workers: int) -> DataLoader[BatchT]:
        """The same loader once more, for measurements that this one must not notice."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has had them
            twin = DataLoader[BatchT](**self._options.arguments() | {"num_workers": workers})
        twin._planner = self._planner  # with the user's sampler, which must not take the twin's epochs for the user's
        twin._epochs = self._epochs.twin()
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels, and is copied, as its options, its epoch and seed, and what a subclass has put on it.

        No worker and no iterator goes along, and no place within an epoch: that is what `state_dict` is for.
        """
        options, own = self._options.arguments(), vars(DataLoader(()))
        if type(self.backend) is type(registry.get_backend(self.backend.name)):
            options["backend"] = self.backend.name
        attributes = {name: value for name, value in vars(self).items() if name not in own}
        return _rebuild, (type(self), options, self._epochs.start, self._planner.init_splits), attributes

    def close(self) -> None:
        """End all workers, within a second whatever they do; twice is fine, and iterating again starts new ones.

        An iterator that is under way raises `LoaderClosed`, even while another thread waits in it, and so does an
        `iter` that is starting workers; yielded batches stay valid. Any thread and a signal handler may call it.
        """
        self._closings += 1  # before: an iterator that is being made is among them, or sees this
        for known in self._iterators.valuerefs():  # a list: another thread may be making one
            if (iterator := known()) is not None:
                iterator.close()
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rebuild(
    kind: type[DataLoader[Any]], options: dict[str, Any], start: EpochPosition, init_splits: bool
) -> DataLoader[Any]:
    """A loader with these options, at the start of an epoch."""
    loader = kind.__new__(kind)
    DataLoader.__init__(loader, **options)
    loader._planner.init_splits = init_splits
    loader._epochs.restore(start)
    return loader
