"""`DataLoader`: its options, and how it puts the parts together.

A loader is a policy over a pool of two methods. A plan turns `(seed, epoch, position)` into requests; the window says
which may go out and which batch may come out; a pool answers them in any order. `loop.py` holds the loop.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from functools import partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from agnoload import seeding
from agnoload._types import (
    AnyOptions,
    Array,
    B,
    FieldsT,
    K,
    KeywordOptions,
    LeafT,
    LeavesT,
    NamedT,
    NumberT,
    NumpyOptions,
    Options,
    PairT,
    S,
    ScalarT,
    Source,
    TextT,
    TupleT,
    Unsaid,
)
from agnoload.backend import registry
from agnoload.backend.base import Backend
from agnoload.datasets import find_caches
from agnoload.errors import CALLED, DatasetNotPicklable, LoaderClosed, OptionError, StateError, warn
from agnoload.fetching.error_policy import Ceiling
from agnoload.fetching.fetch import Fetcher
from agnoload.global_rng import GlobalRngMonitor
from agnoload.inspect import find_large_lists
from agnoload.iterator import PLACED_AHEAD, LoaderIterator, end_with_program
from agnoload.messages import Reply, Request
from agnoload.monitoring.auto import ENOUGH, Choice, adjusted, choose_for_stream, choose_workers
from agnoload.monitoring.logs import Journal
from agnoload.monitoring.stats import Benchmark, Recorder, Stats, Timeline, size_of
from agnoload.options import check_callable, check_options
from agnoload.planning.epochs import Epochs
from agnoload.planning.plan import BatchPlan, OrderPlan, Plan, StreamedPlan
from agnoload.planning.state import Place, capture, restore
from agnoload.planning.stream_plan import StreamPlan
from agnoload.planning.user_sampler import ForeignPlan, Stranger, checked
from agnoload.planning.window import Window
from agnoload.pools.inline import InlinePool
from agnoload.pools.launcher import Preload, release_server, start_server, use_server
from agnoload.pools.processes import ProcessPool
from agnoload.pools.threads import ThreadPool
from agnoload.protocols import ClosableFetch, Empty, IndexArray, Pool
from agnoload.samplers.base import SeededSampler, effective_seed, has_random_access
from agnoload.samplers.basic import RandomSampler, SequentialSampler
from agnoload.seeding import Rewinder, SampleContext
from agnoload.streams import length_or_none, need_length, part_without_state, settle_ranks, split_of
from agnoload.system import local_world_size, rank_and_world, usable_cores, usable_memory
from agnoload.validate import brief, integer, name_of, number, number_of, shown

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    SampleT = TypeVar("SampleT", default=Any)
    BatchT = TypeVar("BatchT", default=Any)
else:
    from typing import TypeVar

    SampleT, BatchT = TypeVar("SampleT"), TypeVar("BatchT")

UNDER_WAY = 2048
"""Batches under way at most: half of the slots of the shared memory; the user's own and abandoned ones take others."""

PROBE_PATIENCE = 10.0
"""Seconds after which a probe for `num_workers="auto"` is given up."""


class DataLoader(Generic[SampleT, BatchT]):
    """Loads batches from a dataset, in this process or through workers; iterate it once an epoch.

    Parameters have torch's names and meanings, plus:

    num_workers: a number, or `"auto"`: none where a batch costs less than its way through a worker, else up to one for
        each core that affinity and control group allow; adjusted before each epoch by what the last one has shown.
        `repr` and `stats()` say how many, and why.
    backend: a name (`"numpy"`, `"torch"`, `"jax"`, `"cupy"`, or one that is installed) or a `Backend`: whose arrays the
        batches are made of.
    device: where the batches shall be, in the backend's own terms; None leaves them in the host's memory.
    seed: a non-negative int that the order and all randomness inside samples follow from; drawn from the operating
        system when None (0 for a stream that is split over ranks, so that they agree), and readable as `loader.seed`.
        The batches are a function of dataset, options, seed and epoch, whatever the number, kind and start method of
        the workers.
    worker_type: `"process"` or `"thread"`.
    on_error: `"raise"`; `"skip"` leaves a bad sample out; `"replace"` takes another sample of the epoch; or a callable
        `(error, index)` that returns one of these.
    max_worker_restarts: how many deaths of workers are survived by loading their requests again.
    retry: exception types for which a sample is tried again, or a `Retry` that says how often and after which pauses.
    max_failed: how many samples of an epoch may be skipped or replaced before it is a `TooManyFailed`: a count (int) or
        a share (float below 1). Counted in the order of the batches; a share is judged as if at least 100 samples had
        been tried, and once more at the end of the epoch. A saved state carries the count.

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
        __class_getitem__ = classmethod(GenericAlias)  # `DataLoader[Sample]`, with or without the type of a batch

    # fmt: off
    # What a batch is, by the type of a sample: see `typed.py`.
    @overload
    def __init__(self: DataLoader[S, B], dataset: Source[S],
                 batch_size: int = 1, shuffle: bool | None = None, *, collate_fn: Callable[[list[S]], B],
                 backend: Literal["numpy"] = ..., **options: Unpack[Options]) -> None: ...
    @overload
    def __init__(self: DataLoader[S, B], dataset: Source[S],
                 batch_size: None, shuffle: bool | None = None, *, collate_fn: Callable[[S], B],
                 backend: Literal["numpy"] = ..., **options: Unpack[Options]) -> None: ...
    @overload
    def __init__(self: DataLoader[S, Any], dataset: Source[S],
                 batch_size: int | None = 1, shuffle: bool | None = None, *, collate_fn: Callable[[Any], Any],
                 backend: str | Backend, **options: Unpack[Options]) -> None: ...
    @overload
    def __init__(self: DataLoader[Any, NDArray[ScalarT]], dataset: NDArray[ScalarT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[Any, Any], dataset: Source[Unsaid],
                 batch_size: int | None = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[S, S], dataset: Source[S],
                 batch_size: None, shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[NDArray[ScalarT], NDArray[ScalarT]], dataset: Source[NDArray[ScalarT]],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[NumberT, Array], dataset: Source[NumberT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[TextT, list[TextT]], dataset: Source[TextT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[NamedT, Any], dataset: Source[NamedT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[tuple[Any, ...], tuple[Any, ...]], dataset: Source[tuple[Unsaid, ...]],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[PairT, tuple[Array, Array]], dataset: Source[PairT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[LeavesT, tuple[Array, ...]], dataset: Source[LeavesT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[TupleT, tuple[Any, ...]], dataset: Source[TupleT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[dict[K, Any], dict[K, Any]], dataset: Source[dict[K, Unsaid]],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[dict[K, LeafT], dict[K, Array]], dataset: Source[dict[K, LeafT]],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[NumpyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[dict[K, S], dict[K, Any]], dataset: Source[dict[K, S]],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[FieldsT, dict[str, Any]], dataset: Source[FieldsT],
                 batch_size: int = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload
    def __init__(self: DataLoader[S, Any], dataset: Source[S],
                 batch_size: int | None = 1, shuffle: bool | None = None, **options: Unpack[AnyOptions]) -> None: ...
    @overload  # more by position than people do
    def __init__(
        self: DataLoader[Any, Any], dataset: Any, batch_size: int | None, shuffle: bool | None, sampler: Any, /,
        batch_sampler: Any = None, num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None, pin_memory: bool = False, drop_last: bool = False,
        timeout: float = 0, worker_init_fn: Callable[[int], object] | None = None, multiprocessing_context: Any = None,
        generator: Any = None, *, backend: str | Backend = ..., **options: Unpack[KeywordOptions],
    ) -> None: ...
    # fmt: on
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        backend: str | Backend = "numpy",
        device: Any = None,
        seed: int | None = None,
        worker_type: Literal["process", "thread"] = "process",
        on_error: Literal["raise", "skip", "replace"] | Callable[[Exception, Any], str] = "raise",
        max_worker_restarts: int = 0,
        retry: Any = None,
        max_failed: int | float | None = None,
    ) -> None:
        self._options = options = check_options(
            dataset=dataset, batch_size=batch_size, shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler,
            num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory, drop_last=drop_last, timeout=timeout,
            worker_init_fn=worker_init_fn, multiprocessing_context=multiprocessing_context, generator=generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers, pin_memory_device=pin_memory_device,
            in_order=in_order, device=device, seed=seed, worker_type=worker_type, on_error=on_error,
            max_worker_restarts=max_worker_restarts, retry=retry, max_failed=max_failed,
        )  # fmt: skip
        self._backend = registry.get_backend(backend)
        self._place_on = self._backend.check(device, options.pin_memory)
        world = registry.rank_and_world(self._backend)
        split = options.stream and settle_ranks(options.dataset, world)
        self._sampler = self._make_sampler(world)
        self._stranger = Stranger(self._sampler)
        self._init_splits = options.worker_init_fn is not None
        self._rank, self._world_size = self._stranger.share() or rank_and_world(world)
        self._warned = False
        self._say_once = _Once()
        self._choice: Choice | None = None
        self._settle(Epochs(self._stranger, options.seed, options.generator, default=0 if split else None))
        if options.num_workers and options.worker_type == "process":
            start_server(self, options.context)

    def _settle(self, epochs: Epochs) -> None:
        """Be a loader that has not been iterated yet."""
        self._epochs = epochs
        self._restored: Plan | None = None
        self._worker_seed: int | None = None
        self._iterators: weakref.WeakValueDictionary[int, LoaderIterator[Any]] = weakref.WeakValueDictionary()
        self._idle = _Idle()
        self._preload: Preload | None = None
        weakref.finalize(self, _Idle.end, self._idle)
        self._beginning = threading.RLock()
        self._closings = 0
        self._recorder = Recorder()
        self._counted = self._recorder.sums()
        self._journal = Journal()

    # ------------------------------------------------------------------------------------------------ what it has

    @property
    def dataset(self) -> Any:
        """The dataset."""
        return self._options.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples a batch; None with a batch sampler or without batching."""
        return self._options.batch_size

    @property
    def num_workers(self) -> int:
        """Workers that load; 0 means the process that iterates. Chosen when first asked for with `"auto"`."""
        if self._options.num_workers is not None:
            return self._options.num_workers
        if self._choice is None:
            self._choice = self._choose_workers()
        return self._choice.workers

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return self._options.drop_last

    @property
    def sampler(self) -> Any:
        """What says which samples come, None for a stream or with a batch sampler."""
        return None if self._options.batch_sampler is not None else self._sampler

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler that was given, or None."""
        return self._options.batch_sampler

    @property
    def collate_fn(self) -> Callable[[list[SampleT]], BatchT] | None:
        """The function that makes a batch of samples; None for the default."""
        return self._options.collate_fn

    @property
    def pin_memory(self) -> bool:
        """Whether batches lie in page-locked memory."""
        return self._options.pin_memory

    @property
    def timeout(self) -> float:
        """Seconds that a batch may take; 0 without limit."""
        return self._options.timeout or 0

    @property
    def worker_init_fn(self) -> Callable[[int], object] | None:
        """What each worker calls with its number before its first sample.

        It can be set, as trainers do, and counts from the next `iter` on. A function that splits a stream over the
        workers must be given to the constructor.
        """
        return self._options.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Callable[[int], object] | None) -> None:
        check_callable("worker_init_fn", function)
        self._options = dataclasses.replace(self._options, worker_init_fn=function)

    @property
    def multiprocessing_context(self) -> Any:
        """The start method or context that was asked for."""
        return self._options.context

    @property
    def generator(self) -> Any:
        """The generator that gives a seed for each epoch, or None."""
        return self._options.generator

    @property
    def prefetch_factor(self) -> int:
        """Batches under way for each worker."""
        return self._options.prefetch_factor

    @property
    def persistent_workers(self) -> bool:
        """Whether workers live on from epoch to epoch."""
        return self._options.persistent_workers

    @property
    def in_order(self) -> bool:
        """Whether batches come in the sampler's order, or as they are ready."""
        return self._options.in_order

    @property
    def backend(self) -> Backend:
        """What turns the leaves of a batch into another library's arrays."""
        return self._backend

    @property
    def device(self) -> Any:
        """Where batches are placed, or None."""
        return self._options.device

    @property
    def seed(self) -> int:
        """The seed that order and samples follow from; with `generator`, that of the epoch begun last."""
        return self._epochs.place.seeds.samples

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that the next `iter` begins: after a `break` that is the one after it.

        The state is still that of the epoch that was left, so it goes on within it.

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
        options = self._options
        if options.batch_sampler is not None:
            return len(options.batch_sampler)
        total = self._stream_length() if options.stream else len(self._sampler)
        if options.batch_size is None:
            return total
        return total // options.batch_size if options.drop_last else -(-total // options.batch_size)

    def _stream_length(self) -> int:
        """The samples of this epoch: where shards are shuffled and then split, a rank has others in each."""
        context = SampleContext(Rewinder())
        context.at(self.seed, self.epoch, 0, 1, 0)
        with seeding.use(context):
            return need_length(self._options.dataset)

    def __repr__(self) -> str:
        try:
            return f"DataLoader({', '.join(self._described())}, epoch {self.epoch})"
        except CALLED:  # the constructor has refused, or the user's code does not say what a part is
            return object.__repr__(self)

    def _described(self) -> list[str]:
        options = self._options
        words = [brief(options.dataset)]
        if options.batch_sampler is not None:
            words.append(f"batch_sampler={brief(options.batch_sampler)}")
        else:
            words.append(f"batch_size={options.batch_size}")
        if options.shuffle:
            words.append("shuffle=True")
        if options.sampler is not None:
            words.append(f"sampler={brief(options.sampler)}")
        words.append(f"num_workers={self.num_workers}")
        if self._choice is not None:
            words[-1] += f" (auto: {self._choice.reason})"
        if options.worker_type != "process":
            words.append(f"worker_type={options.worker_type!r}")
        if options.collate_fn is not None:
            words.append(f"collate_fn={name_of(options.collate_fn)}")
        if options.drop_last:
            words.append("drop_last=True")
        if options.on_error != "raise":
            words.append(f"on_error={options.on_error!r}")
        if self._backend.name != "numpy":
            words.append(f"backend={self._backend.name!r}")
        if options.device is not None:
            words.append(f"device={options.device!r}")
        words.append(f"seed={self.seed}" if options.generator is None else f"generator={options.generator!r}")
        with suppress(TypeError):
            words.append(number_of(len(self), "batch"))
        return words

    # ------------------------------------------------------------------------------------------------ iteration

    def __iter__(self) -> LoaderIterator[BatchT]:
        return self._iterate(None)

    def steps(self, n: int) -> LoaderIterator[BatchT]:
        """Iterate `n` batches, across the ends of epochs without a gap; no batch spans two epochs.

        As with `iter`, the first of them is the first of an epoch, unless a state was loaded. `OptionError` once an
        epoch comes that has no batch at all.

        >>> [len(batch) for batch in DataLoader(range(10), 4).steps(5)]
        [4, 4, 2, 4, 4]
        """
        return self._iterate(integer("steps", n, 0, "a non-negative int"))

    def _iterate(self, limit: int | None) -> LoaderIterator[BatchT]:
        with self._beginning:  # threads that begin at once begin one epoch after the other
            closings = self._closings
            try:
                iterator = self._begin(limit)
            except Exception as error:
                end_with_program()
                if self._closings == closings:
                    raise
                raise LoaderClosed("the loader was closed while its workers were started") from error
            if self._closings != closings:
                iterator.close()
                raise LoaderClosed("the loader was closed while its workers were started")
            return iterator

    def _begin(self, limit: int | None) -> LoaderIterator[BatchT]:
        self._adjust_workers()
        self._warn_if_unsplit()
        self._stranger.leave()
        place = self._epochs.begin()
        plan, self._restored = self._restored, None
        if plan is None or plan.place != place:
            plan = self._plan(place)
        if plan.exhausted and plan.passed:  # a state of the very end: the next epoch begins
            plan = self._next_plan(plan.end())
        began = time.monotonic()
        pool, release = self._open_pool(plan)
        self._recorder.opened(time.monotonic() - began, type(pool) is ProcessPool and release is None)
        return self._iterator(plan, pool, release, limit)

    def _iterator(
        self, plan: Plan, pool: Pool, release: Callable[[Any], None] | None, limit: int | None
    ) -> LoaderIterator[BatchT]:
        max_failed = self._options.max_failed
        try:
            iterator: LoaderIterator[BatchT] = LoaderIterator(
                self,
                plan,
                pool,
                next_plan=self._next_plan,
                say=self._say_once,
                limit=limit,
                window=Window(self._window(self.num_workers), self._options.in_order),
                timeout=self._options.timeout,
                backend=self._backend,
                device=self._place_on,
                recorder=self._recorder,
                journal=self._journal,
                ceiling=None if max_failed is None else Ceiling(max_failed, plan.epoch, plan.tally),
                release=release,
            )
        except BaseException:
            pool.close()
            raise
        self._epochs.began(iterator.progress)
        self._iterators[id(iterator)] = iterator
        return iterator

    def _next_plan(self, place: Place) -> Plan:
        """The next epoch, where the one before has ended here: a sampler with a state stands there already."""
        return self._plan(self._epochs.following(place._replace(sampler=None)))

    def _window(self, workers: int) -> int:
        return max(min(workers * self._options.prefetch_factor, UNDER_WAY), 1)

    # ------------------------------------------------------------------------------------------------ assembly

    def _make_sampler(self, world: tuple[int, int] | None) -> Any:
        """The sampler or batch sampler that orders the samples; None for a stream."""
        options = self._options
        if options.stream:
            return None
        sampler = options.batch_sampler if options.batch_sampler is not None else options.sampler
        if sampler is None:
            if options.shuffle:
                return RandomSampler(options.dataset) if len(options.dataset) else SequentialSampler(options.dataset)
            return SequentialSampler(options.dataset)
        if isinstance(sampler, SeededSampler):
            sampler.resolve_ranks(world)
        wanted = getattr(sampler, "data_length", None)
        if wanted is not None and wanted != len(options.dataset):
            raise OptionError(
                f"the sampler was made for {number_of(wanted, 'sample')} (one label, weight or length each), "
                f"but the dataset has {len(options.dataset)}"
            )
        return sampler

    def _plan(self, place: Place) -> Plan:
        """The requests of an epoch from `place` on."""
        options, sampler, order_seed = self._options, self._sampler, place.seeds.order
        if options.stream:
            return self._stream_plan(place)
        if not has_random_access(sampler):
            batched = options.batch_sampler is not None
            return ForeignPlan(
                place, self._stranger, options.batch_size, options.drop_last, batched=batched, rank=self._rank
            )
        if options.batch_sampler is not None:
            return BatchPlan(place, sampler.batches(order_seed, place.epoch))
        return OrderPlan(place, sampler.order(order_seed, place.epoch), options.batch_size, options.drop_last)

    def _new_stream_plan(self, place: Place) -> StreamPlan:
        options = self._options
        workers = self.num_workers
        return StreamPlan(
            options.dataset,
            size=options.batch_size or 1,
            workers=workers,
            drop_last=options.drop_last,
            self_sharded=workers > 0 and self._init_splits,
            rank=self._rank,
            state=place.stream,
            each=None if options.in_order else options.prefetch_factor,
        )

    def _stream_plan(self, place: Place) -> StreamedPlan:
        options, workers, plan = self._options, self.num_workers, self._new_stream_plan(place)
        if plan.replays:
            self._say_once(
                f"the stream has no state_dict of its own ({brief(part_without_state(options.dataset))} has none), so "
                "resuming replays it: it reads it again from the start of the epoch up to where it was. Give it "
                "state_dict and load_state_dict to spare that"
            )
        if 0 < plan.lanes < workers:
            self._say_once(
                f"the stream has {number_of(plan.lanes, 'lane')} for {workers} workers: the others have nothing "
                "to do. Use fewer workers, or a stream with more shards (and `lanes`)"
            )
        length = None if split_of(options.dataset) else length_or_none(options.dataset)  # of a share it is worked out
        return StreamedPlan(place, plan, options.drop_last, self._say_once, length)

    def _open_pool(self, plan: Plan) -> tuple[Pool, Callable[[Any], None] | None]:
        """A pool for one iterator, and what takes it back afterwards (None: the iterator ends it)."""
        options = self._options
        if self.num_workers == 0:
            return InlinePool(self._fetcher(isolated=False, plan=plan)), None
        if options.worker_type == "thread":
            threads = self._make_pool(self._fetcher(isolated=False, plan=plan), self.num_workers)
            return _Watched(threads, self._say_once), None
        fetcher = self._fetcher(isolated=True, plan=plan)
        take_back = self._idle.put if options.persistent_workers else None
        if (pool := self._idle.take()) is not None:
            if pool.reusable(fetcher):
                if (path := pool.unseen) is not None:
                    self._say_once(
                        f"the kept workers have a copy of {path}, which is too large to be compared in every epoch: "
                        "after a change within it that leaves its length as it is, call loader.close(), or assign a "
                        "new object, so that they are started again"
                    )
                return pool, take_back
            pool.close()
        self._warn_once()
        return self._make_pool(fetcher, self.num_workers), take_back

    def _make_pool(self, fetcher: Fetcher, workers: int) -> Pool:
        """Workers of the kind that was asked for."""
        options = self._options
        window = self._window(workers)
        if options.worker_type == "thread":
            return ThreadPool(fetcher, workers=workers, window=window, owned=options.stream)
        use_server(self)
        pool = ProcessPool(
            fetcher,
            workers=workers,
            window=window + (PLACED_AHEAD if self._place_on is not None else 0),
            context=options.context,
            owned=options.stream,
            reuse=options.persistent_workers,
            restarts=options.max_worker_restarts,
            attach=self._backend.attach if options.pin_memory else None,
            fence=self._backend.fence,
            environment=registry.worker_environment(),
            listen=self._journal.replay,
        )
        self._preload = pool.preload  # kept for the next epoch
        return pool

    def _warn_once(self) -> None:
        """Once a loader: what will be slow or large in workers."""
        if self._warned:
            return
        self._warned = True
        for path in find_large_lists(self._options.dataset):
            warn(
                f"{path} holds very many Python objects: each worker gets a copy of every one, and its memory grows as "
                "they are read. agnoload.PackedList(...) keeps strings, bytes or objects in one buffer for all workers"
            )

    def _warn_if_unsplit(self) -> None:
        """Once a loader: that every rank loads everything, as far as it can be known."""
        if self._world_size > 1 and has_random_access(self._sampler) and self._stranger.share() is None:
            self._say_once(
                f"this process is rank {self._rank} of {self._world_size}, and nothing splits the dataset over the "
                "ranks: each loads all samples. Pass sampler=agnoload.DistributedSampler(dataset), or ignore this if "
                "that is meant or each rank has a dataset of its own"
            )

    def _fetcher(self, isolated: bool, workers: int | None = None, plan: Plan | None = None) -> Fetcher:
        options = self._options
        workers = self.num_workers if workers is None else workers
        if self._worker_seed is None:  # kept, though a generator gives others later: kept workers are not told
            self._worker_seed = self.seed if plan is None else plan.seed
        return Fetcher(
            options.dataset,
            stream=options.stream,
            batched=options.batch_size is not None or options.batch_sampler is not None,
            collate_fn=options.collate_fn,
            seed=self._worker_seed,
            workers=workers,
            rank=self._rank,
            world_size=self._world_size,
            isolated=isolated,
            threaded=options.worker_type == "thread" and workers > 0,
            on_error=options.on_error,
            choose=_Choose(self._sampler, self._epochs.order_seed) if self._may_replace() else None,
            worker_init_fn=options.worker_init_fn,
            init_splits=self._init_splits,
            retry=options.retry,
            drop_last=options.drop_last,
            stream_start=(plan.epoch, plan.reader_start) if isinstance(plan, StreamedPlan) and plan.resumed else None,
            stream_first=plan.reader_start["first"] if isinstance(plan, StreamedPlan) else None,
        )

    def _may_replace(self) -> bool:
        on_error = self._options.on_error
        return (on_error == "replace" or callable(on_error)) and has_random_access(self._sampler)

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Where the batches that were yielded end, for `load_state_dict`; `json.dumps` takes it.

        Under 1 KiB for datasets with indices. After the last batch of an epoch it is the start of the next. Of several
        iterators it is about the one that was made last.
        """
        place = self._epochs.place
        return capture(place, self._facts(bool(place.ahead)))

    def load_state_dict(self, state: Any) -> None:
        """Let the next `iter` go on where `state` was taken; reads no data.

        Any number of workers may go on, any number of ranks at the same position, and another batch size. `StateError`
        with both sides if dataset length, sampler or a given seed differ, or if it is no state at all; the loader then
        stays where it was. An iterator that is under way goes on by itself, and moves the state no more.
        """
        out_of_order = isinstance(state, Mapping) and bool(state.get("ahead"))
        place = restore(state, self._facts(out_of_order))
        self._epochs.check(place)
        # What comes of a position shows here already; a stranger's sampler is not touched before it is needed.
        restored = None
        transparent = has_random_access(self._sampler)
        if self._options.stream:
            self._check_absent("sampler", place.sampler)
            if place.position and place.stream is None:
                raise StateError(f"the state of a stream at position {place.position} must say where the stream stands")
            self._new_stream_plan(place)
        else:
            self._check_absent("stream", place.stream)
            if transparent:
                self._check_absent("sampler", place.sampler)
                restored = self._plan(place) if place.begun else None
            else:
                checked(place.sampler, place.position)
        self._epochs.restore(place)
        self._restored = restored

    def _check_absent(self, name: str, saved: Any) -> None:
        if saved is not None:
            raise StateError(f"this state says where a {name} stands, but this loader has none such: {shown(saved)}")

    def _facts(self, out_of_order: bool) -> dict[str, Any]:
        """What must be equal for a state to fit."""
        options = self._options
        facts: dict[str, Any] = {"kind": "stream", "dataset": type(options.dataset).__name__}
        if not options.stream:
            facts = {"kind": "map", "length": len(options.dataset), "sampler": self._stranger.identity()}
        if out_of_order:  # it lists batches of one rank
            facts |= {"batch_size": options.batch_size, "rank": self._rank}
        if out_of_order or not (options.stream or has_random_access(self._sampler)):
            facts["world_size"] = self._world_size
        if options.generator is not None:
            facts["seeds"] = "from a generator"
        return facts

    # ------------------------------------------------------------------------------------------------ the rest

    def stats(self) -> Stats:
        """What was loaded so far and where the time went, with a verdict in one sentence.

        >>> loader = DataLoader(range(10), 4)
        >>> loader.stats().verdict
        'nothing was loaded yet'
        """
        workers = self.num_workers
        choice = "as asked for" if self._choice is None else f"auto: {self._choice.reason}"
        stats = self._recorder.stats(workers, choice, self._cores(), find_caches(self._options.dataset))
        apart = () if self._preload is None else tuple(sorted(self._preload.left_out))
        return dataclasses.replace(stats, imported_apart=apart)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """While the context is open, keep a timeline; at its end, write it for Perfetto and chrome://tracing.

        A row for the consumer (wait, work) and one for each worker (wait, fetch, collate, encode). What is loaded
        without workers stands on the consumer's row.

        >>> import json, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace.json"
        >>> loader = DataLoader(range(10), 4)
        >>> with loader.trace(path):
        ...     for batch in loader: pass
        >>> sorted({event["name"] for event in json.loads(path.read_text())["traceEvents"]})
        ['collate', 'fetch', 'thread_name', 'wait', 'work']
        """
        with open(path, "w", encoding="utf-8") as file:  # now: a path that cannot be written shall not cost a run
            timeline = Timeline(inline=self.num_workers == 0)
            self._recorder.trace(timeline)
            try:
                yield
            finally:
                self._recorder.end_trace(timeline)
                timeline.write(file)

    def benchmark(self, seconds: float = 5.0) -> Benchmark:
        """Measure the loader by itself, then what it could give if loading took no time; print it to read advice.

        Half of `seconds` goes to each: to a loop that does nothing with its batches, and to one batch that goes through
        the loader and its backend again and again. The place in the data, `stats()` and kept workers stay as they are.

        >>> print(DataLoader(range(100), 10).benchmark(seconds=0.02))
        the loader alone: ... batches/s, ... samples/s, the first batch after ... s
        one batch again and again: ... batches/s, the most that it can give
        ...
        """
        half = max(number("seconds", seconds, 0, "a number of seconds, not negative"), 0.02) / 2
        with self._twin(self.num_workers) as twin:
            alone, first = _rate(lambda: twin, half)
            told = twin.stats()
        with self._twin(0) as twin:
            plan = twin._plan(twin._epochs.begin())
            pool = InlinePool(_Again(twin._fetcher(isolated=False, plan=plan)))
            ceiling, _ = _rate(lambda: twin._iterator(plan, pool, None, sys.maxsize), half)
        return Benchmark(alone, ceiling, first, told.samples / told.batches, told.verdict)

    def _twin(self, workers: int) -> DataLoader[SampleT, BatchT]:
        """The same loader once more, for measurements that this one shall not notice."""
        twin = object.__new__(type(self))  # a copy would share no plan, no backend and no sampler with this one
        twin.__dict__.update(self.__dict__)
        twin._options = dataclasses.replace(self._options, num_workers=workers)
        twin._settle(self._epochs.twin())
        return twin

    def _choose_workers(self) -> Choice:
        """The choice for `num_workers="auto"`: from a look at the dataset, and a probe in a worker of its own."""
        options = self._options
        cores = self._cores()
        if options.stream:
            return choose_for_stream(options.dataset, cores)
        fetcher = self._fetcher(isolated=options.worker_type == "process", workers=1)
        if fetcher.gathers:
            return Choice(0, "whole batches are gathered in one step, quicker than through a worker", 0)
        if not hasattr(options.dataset, "__len__") or not len(options.dataset):
            return Choice(0, "there is nothing to probe", cores)
        try:
            pool = self._make_pool(fetcher, 1)
        except DatasetNotPicklable as error:
            return Choice(0, str(error).split(". ")[0], 0)
        size = options.batch_size or getattr(options.batch_sampler, "batch_size", None) or 1
        with closing(pool):
            return choose_workers(
                partial(self._probe, pool), size, options.prefetch_factor, cores, usable_memory()
            )  # fmt: skip

    def _probe(self, pool: Pool, count: int) -> tuple[float, int]:
        """Load samples from all over the dataset: the seconds in the worker, and the bytes of the batch."""
        keys: Any = np.linspace(0, len(self._options.dataset) - 1, count).astype(np.int64)
        if self._options.batch_size is None and self._options.batch_sampler is None:
            keys = int(keys[0])
        pool.submit(Request(count, self.epoch, 0, keys, 0, self.seed))
        reply = pool.receive(PROBE_PATIENCE)
        if reply.error is not None:
            raise reply.error
        return reply.finished - reply.started, size_of(reply.batch)

    def _cores(self) -> int:
        """Those that are this process's to use, beside others that train with it on this machine."""
        return usable_cores(local_world_size())

    def _adjust_workers(self) -> None:
        """Before an epoch: what the last one has shown about the choice."""
        if self._choice is not None:
            sums = self._recorder.sums()
            choice = adjusted(self._choice, sums.since(self._counted), self._cores())
            if choice is not self._choice or sums.batches - self._counted.batches >= ENOUGH:
                self._counted = sums
            self._choice = choice

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels, and is copied, as its options, its epoch and seed, and what a subclass has put on it.

        No worker and no iterator goes along, and no place within an epoch: that is what `state_dict` is for.
        """
        options = {field.name: getattr(self._options, field.name) for field in fields(self._options)}
        del options["stream"]
        options["multiprocessing_context"] = options.pop("context")
        options["num_workers"] = "auto" if self._options.num_workers is None else self._options.num_workers
        options["timeout"] = self._options.timeout or 0
        if self._options.batch_sampler is not None:
            options["batch_size"] = 1
        if self._options.sampler is not None or self._options.stream or self._options.batch_sampler is not None:
            options["shuffle"] = None
        foreign = type(self._backend) is not type(registry.get_backend(self._backend.name))
        options["backend"] = self._backend if foreign else self._backend.name
        own = vars(DataLoader(()))
        attributes = {name: value for name, value in vars(self).items() if name not in own}
        return _again, (type(self), options, self._epochs.start, self._init_splits), attributes

    def close(self) -> None:
        """End all workers, within a second whatever they do; twice is fine, and iterating again starts afresh.

        An iterator that was under way raises `LoaderClosed`, also where another thread waits in it, and so does an
        `iter` that is starting workers; batches that were yielded stay valid. Any thread and a signal handler may call
        this.
        """
        self._closings += 1  # before: an iterator that is being made is among them, or sees this
        for known in self._iterators.valuerefs():  # a list: another thread may be making one
            if (iterator := known()) is not None:
                iterator.close()
        self._idle.close()
        release_server(self)
        self._preload = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Again:
    """Loads once, and answers every request with that."""

    def __init__(self, fetch: ClosableFetch) -> None:
        self._fetch = fetch
        self._reply: Reply | None = None

    def __call__(self, request: Request, empty: Empty) -> Reply:
        if self._reply is None:
            self._reply = self._fetch(request, empty)._replace(
                failed=(), notices=(), log_records=(), stream=None, end=False
            )
        return self._reply._replace(number=request.number)

    def close(self) -> None:
        self._fetch.close()


def _rate(batches: Callable[[], Iterable[Any]], seconds: float) -> tuple[float, float]:
    """Go through batches, and through them again, for a while: batches a second after the first, and when that came."""
    began = now = time.monotonic()
    first, count = 0.0, 0
    while now - began < seconds:
        before = count
        for _ in batches():
            now = time.monotonic()
            count += 1
            first = first or now - began
            if now - began >= seconds:
                break
        if count == before:
            raise OptionError("benchmark needs at least one batch, this loader has none")
    return (count - 1) / (now - began - first) if count > 1 else 1 / first, first


def _again(
    kind: type[DataLoader[Any, Any]], options: dict[str, Any], start: Place, init_splits: bool
) -> DataLoader[Any, Any]:
    """A loader with these options, at the start of an epoch."""
    loader = kind.__new__(kind)
    DataLoader.__init__(loader, **options)
    loader._init_splits = init_splits
    loader._epochs.restore(start)
    return loader


class _Once:
    """Gives a loader's warnings, each of them once. It does not know the loader: finalizers hold it."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warn(text)


class _Idle:
    """The kept workers of a loader between two iterators. Threads may take and put at once: no pool goes to two."""

    def __init__(self) -> None:
        self._pools: list[ProcessPool] = []
        self._over = False

    def take(self) -> ProcessPool | None:
        """A pool, if there is one and it is this process's, not that of the one it was forked from."""
        while self._pools:
            with suppress(IndexError):  # another thread was quicker
                pool = self._pools.pop()
                if pool.is_ours:
                    return pool
        return None

    def put(self, pool: ProcessPool) -> None:
        if not pool.whole or any(kept.is_ours for kept in self._pools):
            pool.close()
            return
        try:
            pool.abandon()
        except BaseException:
            pool.close()
            raise
        self._pools.append(pool)
        if self._over:  # an iterator that dies after its loader, or at once with it in a cycle
            self.close()

    def close(self) -> None:
        while (pool := self.take()) is not None:
            pool.close()

    def end(self) -> None:
        """The loader is gone: nobody takes a pool any more."""
        self._over = True
        self.close()


class _Watched:
    """A pool of threads that tells, once, if samples draw from generators that are not theirs alone.

    Between the first request and the first reply the user's own thread waits here, so it is not the one who draws.
    """

    def __init__(self, pool: Pool, say: Callable[[str], None]) -> None:
        self._pool = pool
        self._say = say
        self._watch: GlobalRngMonitor | None = None
        self._told = False

    def submit(self, request: Request) -> None:
        if self._watch is None and not self._told:
            self._watch = GlobalRngMonitor()
        self._pool.submit(request)

    def receive(self, timeout: float | None = None) -> Reply:
        reply = self._pool.receive(timeout)
        watch, self._watch = self._watch, None
        if watch is not None and not self._told and (names := watch.drawn()):
            self._say(
                f"samples draw from {' and '.join(names)}, which all threads of this process share, so what they draw "
                "depends on which thread comes first. Draw from agnoload.sample_rng() instead, or use worker processes"
            )
        self._told = True
        return reply

    @property
    def waiting(self) -> bool:
        return self._pool.waiting

    def ready(self) -> bool:
        return self._pool.ready()

    def close(self) -> None:
        self._pool.close()


class _Choose:
    """Indices of an epoch at random, for replacements; travels to workers with its sampler.

    `order_seed`: None where each epoch has its own, that of its samples.
    """

    def __init__(self, sampler: Any, order_seed: int | None) -> None:
        self._sampler = sampler
        self._order_seed = order_seed

    def __call__(self, seed: int, epoch: int, rng: np.random.Generator, count: int) -> IndexArray:
        order_seed = effective_seed(self._sampler, seed, seed) if self._order_seed is None else self._order_seed
        if self._sampler.yields_batches:
            batches = self._sampler.batches(order_seed, epoch)
            picked = batches.batch(int(rng.integers(len(batches))))
            return rng.permutation(picked)[:count]
        order = self._sampler.order(order_seed, epoch)
        n = len(order)
        places = rng.permutation(n)[:count] if n <= count else rng.integers(n, size=count)
        return np.concatenate([order.indices(place, place + 1) for place in places.tolist()])
