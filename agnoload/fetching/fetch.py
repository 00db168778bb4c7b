"""A request becomes samples, and samples a batch: the same code in this thread, in threads and in worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from agnoload import seeding
from agnoload.backend import registry
from agnoload.batching.collate import collate, default_convert, install_registry, registry_snapshot
from agnoload.datasets import Batch, gather_of, getitems_of
from agnoload.errors import CollateError, OptionError, SampleStopped, add_note, attributes_of, one_line
from agnoload.fetching.copies import Copies
from agnoload.fetching.error_policy import Retry
from agnoload.fetching.stream_reader import COLLATING, StreamReader
from agnoload.global_rng import RequestGenerators
from agnoload.messages import EMPTY, LEFTOVER_LANE, Failure, Reply, Request, StreamReport
from agnoload.protocols import Empty, IndexArray
from agnoload.seeding import Purpose, Rewinder, SampleContext
from agnoload.streams import first_states, is_indexed
from agnoload.streams.layout import is_shared
from agnoload.validate import number_of
from agnoload.worker_info import WorkerInfo, set_worker_info

REPLACEMENTS = 100
"""How many other samples `on_error="replace"` tries for one bad one."""

Choose = Callable[[int, int, np.random.Generator, int], IndexArray]
"""(seed, epoch, generator, count) to indices of that epoch, at random: where replacements come from."""


class Fetcher:
    """Loads what a request names from one dataset. Picklable; `begin` is called once where it works."""

    def __init__(
        self,
        dataset: Any,
        *,
        stream: bool,
        batched: bool,
        collate_fn: Callable[[Any], Any] | None,
        seed: int,
        workers: int,
        rank: int = 0,
        world_size: int = 1,
        isolated: bool = False,
        threaded: bool = False,
        on_error: Any = "raise",
        choose: Choose | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        init_splits: bool = False,
        retry: Retry | None = None,
        drop_last: bool = False,
        stream_start: tuple[int, Any] | None = None,
        stream_first: Any = None,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.worker_init_fn = worker_init_fn
        self._init_splits = init_splits
        """Whether `worker_init_fn` is taken to split a stream."""
        self._stream = stream
        self._batched = batched
        self._seed = seed
        self._workers = workers
        self._rank = rank
        self._world_size = world_size
        self._isolated = isolated
        self._threaded = threaded
        self._on_error = on_error
        self._choose = choose
        self._retry = retry
        self._drop_last = drop_last
        self._stream_start = stream_start
        self._stream_first = stream_first
        self._copies: Copies | None = None
        self._failures: list[Failure] = []
        self._registry = registry_snapshot()
        self._plugins = registry.plugin_table() if isolated else None
        self._worker = 0
        self._info: WorkerInfo | None = None
        self._prepare()

    def _prepare(self) -> None:
        """What does not travel: made again in each worker."""
        self._rewinder = Rewinder()
        self._context = SampleContext(self._rewinder)
        roots = {"dataset": self.dataset, "collate_fn": self.collate_fn}
        self._generators = RequestGenerators(self._context, roots, own=self._isolated, shared=self._threaded)
        self._culprit: Failure | None = None
        self._report: StreamReport | None = None  # of the batch of a stream that is being made
        self._reader: StreamReader | None = None
        self._read = (-1, -1)  # epoch and batch that the reader was asked for last
        self._doubtful = False  # worker_init_fn has left the stream as it was
        self._getitems = None if self._stream else getitems_of(self.dataset)
        plain = self._batched and self.collate_fn is None and not self._stream
        careful = callable(self._on_error) or self._on_error != "raise" or self._retry is not None
        self._gather = gather_of(self.dataset) if plain and not careful else None
        self._collate_into = getattr(self.collate_fn, "accepts_empty", False)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_rewinder", "_context", "_generators", "_reader", "_getitems", "_gather", "_info", "_copies"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._info = None
        self._copies = None
        self._prepare()

    def __copy__(self) -> Fetcher:
        """For another thread: a dataset with indices is shared, of a stream each thread reads a copy of its own."""
        made = Fetcher.__new__(Fetcher)
        state = self.__getstate__()
        if self._stream:
            self._copies = self._copies or Copies("dataset", self.dataset, is_indexed)
            state["dataset"] = self._copies.make()
        made.__setstate__(state)
        return made

    @property
    def gathers(self) -> bool:
        """Whether the dataset gives whole batches, without a sample in between."""
        return self._gather is not None

    def parts(self) -> Mapping[str, Any]:
        """The user's objects in it, by the names that an error shall use."""
        parts = {"dataset": self.dataset, "collate_fn": self.collate_fn, "worker_init_fn": self.worker_init_fn}
        return parts | {"on_error": self._on_error, "retry": self._retry}

    def begin(self, worker: int) -> None:
        """Called in a worker before its first request."""
        self._worker = worker
        self._info = WorkerInfo(
            worker, self._workers, self._seed, self.dataset, rank=self._rank, world_size=self._world_size
        )
        set_worker_info(self._info)
        if self._plugins is not None:  # a process of its own
            install_registry(self._registry)
            registry.install_table(self._plugins)
        registry.enter_worker()
        if self._stream_first is not None:
            first_states(self.dataset, self._stream_first)
        if self.worker_init_fn is not None:
            before = _attributes(self.dataset)
            self.worker_init_fn(worker)
            same = before == _attributes(self.dataset)
            self._doubtful = self._stream and self._workers > 1 and same and not is_shared(self.dataset)

    def close(self) -> None:
        """Let go of what a stream has open; a request that comes later opens it anew."""
        reader, self._reader = self._reader, None  # the two refer to each other
        if reader is not None:
            reader.close()

    # ------------------------------------------------------------------------------------------------ one request

    def __call__(self, request: Request, empty: Empty) -> Reply:
        started = time.monotonic()
        context = self._context
        context.at(request.seed, request.epoch, request.first, request.stride, request.rank)
        if self._info is not None:
            self._info.epoch, self._info.seed = request.epoch, request.seed
        if self._gather is not None:
            return self._gathered(request, empty, started)
        try:
            with self._generators:
                try:
                    reply = (self._streamed if self._stream else self._mapped)(request, empty, started)
                except (Exception, GeneratorExit) as error:
                    reply = self._failed(request, error, started)
                except BaseException as error:  # it ends the loop, here or, sent by the worker, in the user's process
                    _named(error, request)
                    raise
        finally:
            self._generators.restore()
        if notices := self._generators.notices:
            reply = reply._replace(notices=notices[:])
            notices.clear()
        try:
            return reply
        finally:
            del reply  # the traceback of its error knows this frame: it would hold itself, and the loop's iterator

    def _gathered(self, request: Request, empty: Empty, started: float) -> Reply:
        try:
            batch = self._gather(request.indices, empty)  # type: ignore[misc]
        except (Exception, GeneratorExit) as error:
            return self._failed(request, error, started)
        return self._reply(request, batch, len(request.indices), started, time.monotonic())

    def _failed(self, request: Request, error: BaseException, started: float) -> Reply:
        error = _named(_stopped(error), request)
        failed, self._culprit = [] if self._culprit is None else [self._culprit], None
        # Without a report the stream itself has raised: it cannot be read on.
        end = self._stream and request.lane != LEFTOVER_LANE and self._report is None
        return Reply(
            request.number, self._worker, error=error, end=end, failed=failed, stream=self._report, started=started,
            finished=time.monotonic(),
        )  # fmt: skip

    def _mapped(self, request: Request, empty: Empty, started: float) -> Reply:
        self._generators.seed()
        if not self._batched:
            keys = [request.indices]
        else:
            keys = request.indices.tolist() if isinstance(request.indices, np.ndarray) else list(request.indices)
        failed: list[Failure] = []
        if callable(self._on_error) or self._on_error != "raise":
            samples, kept, failed = self._tolerant(keys, request)
        else:
            samples, kept = self._all(keys, request), keys
        fetched = time.monotonic()
        if isinstance(samples, Batch):
            return self._reply(request, samples.data, len(keys), started, fetched)
        if not samples and keys:
            return self._reply(request, EMPTY, 0, started, fetched, failed)
        batch = self._collated(samples if self._batched else samples[0], kept, request, empty)
        return self._reply(request, batch, len(samples), started, fetched, failed)

    def _reply(
        self, request: Request, batch: Any, samples: int, started: float, fetched: float,
        failed: Sequence[Failure] = (), report: StreamReport | None = None,
    ) -> Reply:  # fmt: skip
        now = time.monotonic()
        times = (started, fetched, now, now)
        return Reply(request.number, self._worker, batch, None, samples, False, failed, (), (), report, *times)

    # ------------------------------------------------------------------------------------------------ samples

    def _all(self, keys: list[Any], request: Request) -> Any:
        """The samples of a request, in one call or one by one; or a `Batch`."""
        if self._getitems is not None and self._batched:
            return self._many(keys, request)
        context, samples = self._context, []
        load = self.dataset.__getitem__ if self._retry is None else self._again(self.dataset.__getitem__, self._retry)
        try:
            for context.item, key in enumerate(keys):
                samples.append(load(key))
        except BaseException as error:
            raise self._at_sample(error, keys[context.item], request, context.item)
        return samples

    def _at_sample(self, error: BaseException, key: Any, request: Request, item: int) -> BaseException:
        """A sample's error, which says which one it was; remembered, for the account of what failed."""
        self._culprit = Failure(key, one_line(error))
        where = f"while index {key!r} was loaded (item {item} of batch {request.batch}, epoch {request.epoch})"
        if isinstance(error, KeyError) and isinstance(self.dataset, Mapping):
            where += ": this dataset is indexed by names; agnoload.ArrayDataset(**dataset) has a sample for each row"
        return _stopped(error, where)

    def _many(self, keys: list[Any], request: Request) -> Any:
        getitems: Any = self._getitems
        load = getitems if self._retry is None else self._again(getitems, self._retry)
        try:
            samples = load(keys)
        except BaseException as error:
            raise _stopped(error, f"while {len(keys)} indices were loaded by one call of __getitems__")
        if not isinstance(samples, Batch) and len(samples) != len(keys):
            raise OptionError(
                f"__getitems__ of {type(self.dataset).__name__} must return one sample for each of the {len(keys)} "
                f"indices, or agnoload.Batch(data), got {number_of(len(samples), 'sample')} (batch {request.batch})"
            )
        return samples

    def _again(self, load: Callable[[Any], Any], retry: Retry) -> Callable[[Any], Any]:
        """`load` with further tries; each of them draws the same numbers from `sample_rng()`."""

        def loaded(key: Any) -> Any:
            for pause in retry.pauses:
                try:
                    return load(key)
                except retry.errors:
                    time.sleep(pause)
                    self._context.made = None
            return load(key)

        return loaded

    def _tolerant(self, keys: list[Any], request: Request) -> tuple[Any, list[Any], list[Failure]]:
        """Samples that could be loaded, their keys, and what failed."""
        if self._getitems is not None and self._batched:
            try:
                return self._many(keys, request), keys, []
            except Exception:
                self._generators.seed()  # one by one, as if nothing had been tried
        load = self.dataset.__getitem__ if self._retry is None else self._again(self.dataset.__getitem__, self._retry)
        samples: list[Any] = []
        kept: list[Any] = []
        failures: list[Any] = []
        for item, key in enumerate(keys):
            self._context.item = item
            try:
                got = load(key), key
            except (Exception, GeneratorExit) as error:
                raised = self._at_sample(error, key, request, item)
                failures.append(self._culprit)
                if self._action(raised, key) == "skip":
                    continue
                got = self._replacement(load, keys, item, request, raised)
            except BaseException as error:
                raise self._at_sample(error, key, request, item)
            samples.append(got[0])
            kept.append(got[1])
        self._context.item = 0
        self._culprit = None
        return samples, kept, failures

    def _action(self, error: BaseException, key: Any) -> str:
        """What `on_error` says to do; "raise" is done at once."""
        action = self._on_error(error, key) if callable(self._on_error) else self._on_error
        if action == "raise":
            raise error
        if action not in ("skip", "replace"):
            raise OptionError(f"on_error must return 'raise', 'skip' or 'replace', got {action!r}") from error
        return str(action)

    def _replacement(
        self, load: Callable[[Any], Any], keys: list[Any], item: int, request: Request, cause: BaseException
    ) -> tuple[Any, Any]:
        """Another sample of the epoch in the place of a bad one: the first good one of a random row."""
        context = self._context
        position = context.first + item * context.stride
        rng = seeding.generator(request.seed, request.epoch, Purpose.REPLACE, position, request.rank)
        if self._choose is not None:
            chosen = self._choose(request.seed, request.epoch, rng, REPLACEMENTS)
            candidates = list(dict.fromkeys(chosen.tolist()))
        else:
            candidates = [keys[place] for place in rng.permutation(len(keys))[:REPLACEMENTS] if place != item]
        for key in candidates:
            context.made = None
            try:
                return load(key), key
            except Exception:
                continue
        add_note(cause, f"none of {len(candidates)} other samples of the epoch could be loaded in its place")
        raise cause

    # ------------------------------------------------------------------------------------------------ batches

    def _collated(self, samples: Any, keys: list[Any] | None, request: Request, empty: Empty) -> Any:
        """A batch of a list of samples, or, without batches, what becomes of the one sample."""
        self._context.item = 0
        self._context.purpose = Purpose.COLLATE
        try:
            if self.collate_fn is None:
                return collate(samples, empty) if self._batched else default_convert(samples)
            if self._collate_into:
                return self.collate_fn(samples, empty=empty)  # type: ignore[call-arg]
            return self.collate_fn(samples)
        except CollateError as error:
            named = [keys[item] for item in error.items if keys is not None and item < len(keys)]
            if named:
                error.add_note(
                    f"indices {' and '.join(map(repr, named))} of batch {request.batch}, epoch {request.epoch}"
                )
            raise
        except BaseException as error:
            raise _stopped(error, f"while batch {request.batch} of epoch {request.epoch} was collated")

    # ------------------------------------------------------------------------------------------------ streams

    def _streamed(self, request: Request, empty: Empty, started: float) -> Reply:
        self._report = report = None
        failed: list[Failure] = []
        if request.lane == LEFTOVER_LANE:
            samples, first, stride, rank = list(request.indices), request.first, request.stride, request.rank
        else:
            reader = self._reader_for(request, failed)
            samples, first, stride, rank, self._report, error = reader.read(request.first, request.lane, request.size)
            if self._doubtful and self._report.self_sharded:
                self._doubt()
            if error is not None:
                raise error
            report = None if self._report == StreamReport(places=request.size) else self._report
        fetched = time.monotonic()
        if not samples:
            return self._reply(request, EMPTY, 0, started, fetched, failed, report)
        self._context.at(request.seed, request.epoch, first, stride, rank | COLLATING)
        if self.collate_fn is not None:
            self._generators.seed()
        batch = self._collated(samples if self._batched else samples[0], None, request, empty)
        return self._reply(request, batch, len(samples), started, fetched, failed, report)

    def _reader_for(self, request: Request, failures: list[Failure]) -> StreamReader:
        """The reader of the request's epoch; it goes forward only, so whoever begins again has a new one."""
        self._failures = failures
        if self._reader is None or self._read[0] != request.epoch or self._read[1] >= request.batch:
            self.close()
            epoch, start = self._stream_start or (-1, None)
            self._reader = StreamReader(
                self.dataset,
                worker=self._worker,
                workers=self._workers,
                begin=self._begin_batch,
                start=start if epoch == request.epoch else None,
                self_sharded=self._workers > 0 and self._init_splits,
                drop_last=self._drop_last,
                rank=self._rank,
                failed=self._sample_failed if self._on_error != "raise" else None,
                tried=None if self._retry is None else partial(self._again, retry=self._retry),
            )
        self._read = (request.epoch, request.batch)
        return self._reader

    def _doubt(self) -> None:
        """The stream counts as split by `worker_init_fn`: say so if nothing speaks for it."""
        self._doubtful = False
        if self._info is not None and not self._info.asked:
            self._generators.notices.append(
                f"worker_init_fn is taken to split the stream over the {self._workers} workers, but nobody has asked "
                "get_worker_info() and the stream is as it was: unless it is split in some other way, every sample "
                "comes once for each worker. Do elsewhere what worker_init_fn does, or give the stream num_shards and "
                "shard(i)"
            )

    def _begin_batch(self, first: int, stride: int, rank: int) -> None:
        context = self._context
        context.at(context.seed, context.epoch, first, stride, rank)
        self._generators.seed()

    def _sample_failed(self, error: Exception, position: int) -> bool:
        """Whether to leave a sample of a stream out; another one cannot be asked for."""
        action = self._on_error(error, position) if callable(self._on_error) else self._on_error
        if action == "skip":
            notes = attributes_of(error).get("__notes__", ())  # which record of which file
            self._failures.append(Failure(position, "; ".join([one_line(error), *notes])))
            return True
        if action == "replace":
            add_note(error, "on_error='replace' needs a dataset with indices: use 'skip' for a stream")
        elif action != "raise":
            raise OptionError(f"on_error must return 'raise' or 'skip', got {action!r}") from error
        return False


def _attributes(dataset: Any) -> dict[str, int]:
    """What an object holds, by identity; other threads may be at work on it."""
    return {name: id(value) for name, value in dict.copy(getattr(dataset, "__dict__", {})).items()}


def _named(error: BaseException, request: Request) -> BaseException:
    """An error of a request always tells which one it was."""
    if not any("batch" in note for note in attributes_of(error).get("__notes__", ())):
        add_note(error, f"in batch {request.batch} of epoch {request.epoch}")
    return error


def _stopped(error: BaseException, where: str = "") -> BaseException:
    """User code's StopIteration must not be taken for the end of the data; anything else stays what it is."""
    if isinstance(error, (StopIteration, GeneratorExit)):
        name = type(error).__name__
        what = f"{name} was raised {where}".strip()
        stopped = SampleStopped(f"{what}: it is an error there, not the end of the data")
        stopped.__cause__ = error
        return stopped
    if where:
        add_note(error, where)
    return error
