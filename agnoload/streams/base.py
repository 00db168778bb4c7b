"""Streams: datasets that are iterated, and what can be made of them without caring who reads them."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from agnoload import seeding
from agnoload.errors import OptionError
from agnoload.seeding import Purpose, draw_seed, generator
from agnoload.streams.iterators import (
    DerivedIterator,
    Lazy,
    Made,
    OpenableStream,
    OpenOptions,
    StreamIterator,
    force,
    is_indexed,
    is_stream,
    may_ask,
    note_record,
    sample_stopped,
)
from agnoload.streams.shards import (
    LANES,
    IndexIterator,
    ShardsIterator,
    lanes_of,
    need_length,
    need_shards,
    num_shards_of,
    open_stream,
    shard_length_of,
    shard_of,
)
from agnoload.validate import brief, counted, integer, items, members, name_of, whole

if TYPE_CHECKING:
    from agnoload.streams.group import BatchedStream, PackedStream
    from agnoload.streams.ranks import HeadStream, RankStream
    from agnoload.streams.shuffle import ShuffledStream

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")

Uneven = Literal["keep", "stop", "pad", "repeat"]


class IterableDataset(Generic[T_co]):
    """Subclass it, give `__iter__`, and load it: a dataset that can only be read from the start, in order.

    With several workers each reads the whole stream and delivers its share of the batches, so order, sizes and number
    are those of one worker; what is given to `map` at the end runs only for the samples that a worker delivers. A
    stream that can be read in parts should offer `num_shards` and `shard(i)` (an iterable) instead of, or beside,
    `__iter__`: each worker then reads its own. A stream with `state_dict` and `load_state_dict` resumes where it was;
    `set_epoch` is called with the epoch, if the stream has it. A stream that asks `get_worker_info()` before its first
    sample splits itself, and is left alone; so is one with `shared_source = True`, whose items go to one reader each,
    as from a queue. The readers of any other stream must see the same samples, and it is an error if they do not.

    `map`, `filter`, `shuffle`, `take`, `batch`, `pack`, `split_by_rank` and `a + b` make new streams. `__len__`, where
    it can be given, is the number of samples; a loader's `len` needs it.

    >>> class Count(IterableDataset[int]):
    ...     def __iter__(self): return iter(range(6))
    >>> list(Count().filter(lambda n: n % 2).map(lambda n: n * 10) + Count().split_by_rank(1, 3))
    [10, 30, 50, 1, 4]
    """

    lanes: int = LANES
    """How many shards are read at once, in turn, by all workers together: what tf.data calls `cycle_length`. The
    batches depend on it: it belongs to the data, not to the machine."""
    shared_source: bool = False
    """Whether each item goes to one reader only, as from a queue: then each worker delivers all that it reads."""

    def __iter__(self) -> Iterator[T_co]:
        number = num_shards_of(self)
        if number is None:
            raise NotImplementedError(f"{type(self).__name__} must define __iter__, or num_shards and shard")
        return ShardsIterator(self, range(number), OpenOptions())

    __iter__.by_shards = True  # type: ignore[attr-defined]

    def __add__(self, other: Iterable[S]) -> ChainDataset[T_co | S]:
        return ChainDataset([self, other])

    def __repr__(self) -> str:
        return counted(self)

    def map(self, fn: Callable[[T_co], R]) -> MappedStream[R]:
        """This stream with each sample replaced by `fn(sample)`."""
        return MappedStream(self, fn)

    def filter(self, fn: Callable[[T_co], Any]) -> FilteredStream[T_co]:
        """Only the samples for which `fn(sample)` is true."""
        return FilteredStream(self, fn)

    def shuffle(self, buffer_size: int, *, seed: int | None = None) -> ShuffledStream[T_co]:
        """This stream in another order each epoch: every sample is drawn from the next `buffer_size` ones.

        `seed`: the loader's when None.
        """
        from agnoload.streams.shuffle import ShuffledStream  # it is made of this class

        return ShuffledStream(self, buffer_size, seed=seed)

    def take(self, n: int) -> HeadStream[T_co]:
        """The first `n` samples, in the order of a plain `for`: shards one after the other.

        They are read as a stream without shards, by every worker; what was given to `map` runs only where a sample is
        delivered.

        >>> list(ChainDataset([iter("abc"), iter("de")]).take(4))
        ['a', 'b', 'c', 'd']
        """
        from agnoload.streams.ranks import HeadStream  # it is made of this class

        return HeadStream(self, integer("n of take", n, 0, "an int that is not negative"))

    def batch(self, n: int) -> BatchedStream[T_co]:
        """Lists of `n` samples that follow each other, the last one of what is left; see `BatchedStream`.

        To make batches in the stream, give the loader `batch_size=None`: `stream.batch(32).map(default_collate)`.

        >>> list(ChainDataset([iter("abc"), iter("de")]).batch(2))
        [['a', 'b'], ['c', 'd'], ['e']]
        """
        from agnoload.streams.group import BatchedStream  # it is made of this class

        return BatchedStream(self, n)

    def pack(self, length: int, *, key: Any = None, value: int = 0) -> PackedStream:
        """Token sequences as rows of `length` tokens, one sequence after the other; see `PackedStream`.

        >>> for row in ChainDataset([iter([[5, 6, 7], [8, 9]])]).pack(4):
        ...     print(row["tokens"], row["segment_ids"], row["positions"])
        [5 6 7 8] [1 1 1 2] [0 1 2 0]
        [9 0 0 0] [1 0 0 0] [0 0 0 0]
        """
        from agnoload.streams.group import PackedStream  # it is made of this class

        return PackedStream(self, length, key=key, value=value)

    def split_by_rank(
        self, rank: int | None = None, world_size: int | None = None, uneven: Uneven = "keep"
    ) -> RankStream[T_co]:
        """The share of this process among those that train together: see `RankStream`."""
        from agnoload.streams.ranks import RankStream  # it is made of this class

        return RankStream(self, rank, world_size, uneven)


class DerivedStream(OpenableStream[T_co], IterableDataset[T_co]):
    """A stream that is made of one other and has its lanes, its shards and its length."""

    def __init__(self, source: Any) -> None:
        need_stream(source, type(self).__name__)
        self.source = source

    def of(self, source: Any) -> Self:
        """The same, made of another stream."""
        twin = copy.copy(self)
        twin.source = source
        return twin

    @property
    def lanes(self) -> int:  # type: ignore[override]
        return lanes_of(self.source)

    @property
    def num_shards(self) -> int:
        return need_shards(self.source)

    def shard(self, number: int) -> Iterable[T_co]:
        return self.of(as_stream(shard_of(self.source, number)))

    def __len__(self) -> int:
        return need_length(self.source)


class MappedStream(DerivedStream[R]):
    """`source` with each sample replaced by `function(sample)`.

    At the end of a pipeline it is called only for samples that are delivered from here; `function` may draw from
    `agnoload.sample_rng()`, and ask `get_worker_info()`.
    """

    def __init__(self, source: Any, function: Callable[[Any], R]) -> None:
        super().__init__(source)
        self.function = _need_function(function, "map")

    def shard_length(self, number: int) -> int | None:
        return shard_length_of(self.source, number)

    def open(self, options: OpenOptions) -> StreamIterator:
        return _MapIterator(open_stream(self.source, options), self.function)

    def __repr__(self) -> str:
        return f"{brief(self.source)}.map({name_of(self.function)})"


class _MapIterator(DerivedIterator):
    def __init__(self, source: StreamIterator, function: Callable[[Any], Any]) -> None:
        super().__init__(source)
        self._function = function

    def next_raw(self) -> Lazy:
        return Lazy((self._function, self._source.next_raw()))


class FilteredStream(DerivedStream[T_co]):
    """Only those samples of `source` for which `function(sample)` is true; every worker calls it for every sample."""

    def __init__(self, source: Any, function: Callable[[Any], Any]) -> None:
        super().__init__(source)
        self.function = _need_function(function, "filter")

    def __len__(self) -> int:
        raise TypeError("a filtered stream has no length: it is not known before the stream was read")

    def open(self, options: OpenOptions) -> StreamIterator:
        return _FilterIterator(open_stream(self.source, options._replace(direct=False)), self.function)

    def __repr__(self) -> str:
        return f"{brief(self.source)}.filter({name_of(self.function)})"


class _FilterIterator(DerivedIterator):
    def __init__(self, source: StreamIterator, function: Callable[[Any], Any]) -> None:
        super().__init__(source)
        self._function = function

    def next_raw(self) -> Any:
        raw = _DROPPED
        while raw is _DROPPED:
            raw = may_ask(self._kept, self._source.next_raw())
        return raw

    def _kept(self, raw: Any) -> Any:
        try:
            sample = force(raw)
            try:
                passes = self._function(sample)
            except (StopIteration, GeneratorExit) as stop:  # as `guarded` does, without a call more for each sample
                raise sample_stopped(self._function, stop) from stop
            if not passes:
                return _DROPPED
        except Exception as error:
            note_record(error, raw)
            raise
        return raw if sample is raw else Made((sample, raw))


_DROPPED = object()


def _need_function(function: Callable[[Any], R], name: str) -> Callable[[Any], R]:
    if not callable(function):
        raise OptionError(f"{name} needs a function of one sample, got {function!r}")
    return function


class ChainDataset(OpenableStream[T_co], IterableDataset[T_co]):
    """Streams one after the other; `a + b` of two streams is the same.

    If all of them offer shards so does the chain: those of the first stream first.

    >>> list(ChainDataset([iter([1, 2]), iter([3])]))
    [1, 2, 3]
    """

    @overload
    def __init__(self, datasets: Iterable[Iterable[T_co]]) -> None: ...
    @overload  # of different kinds
    def __init__(self: ChainDataset[Any], datasets: Iterable[Any]) -> None: ...
    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(members("the datasets of a ChainDataset", datasets, "an iterable of streams"))
        if not self.datasets:
            raise OptionError("ChainDataset needs at least one stream, got none")
        for part in self.datasets:
            need_stream(part, "ChainDataset")

    @property
    def lanes(self) -> int:  # type: ignore[override]
        return max(map(lanes_of, self.datasets))

    @property
    def num_shards(self) -> int:
        """The shards of all streams together, if each has some."""
        return sum(map(need_shards, self.datasets))

    def shard(self, number: int) -> Iterable[T_co]:
        """One of the shards, counted through the streams in their order."""
        return shard_of(*self._part_with(number))

    def shard_length(self, number: int) -> int | None:
        """How many samples a shard has, None where that is not known."""
        return shard_length_of(*self._part_with(number))

    def _part_with(self, number: int) -> tuple[Any, int]:
        """The stream that a shard is of, and its number there."""
        ends = list(accumulate(map(need_shards, self.datasets)))
        part = bisect_right(ends, number)
        return self.datasets[part], number - (ends[part - 1] if part else 0)

    def __len__(self) -> int:
        return sum(map(need_length, self.datasets))

    def open(self, options: OpenOptions) -> StreamIterator:
        return _ChainIterator(self.datasets, options)

    def __repr__(self) -> str:
        return f"ChainDataset([{', '.join(map(brief, self.datasets))}])"


class _ChainIterator(StreamIterator):
    """The state: the number of the part that is read, and where it is there; None where nothing of it was read."""

    def __init__(self, parts: list[Any], options: OpenOptions) -> None:
        self._parts = parts
        self._options = options
        part, state = (0, None) if options.state is None else items(options.state, "the place in a chain", 2)
        self._begin(whole(part, "the part of a chain", max(0, len(parts) - 1)), state)

    def _begin(self, part: int, state: Any = None) -> None:
        self._part = part
        self._fresh = state is None
        self._source = open_stream(self._parts[part], self._options.inner(state, part))

    def inside(self) -> Iterable[StreamIterator]:
        return (self._source,)

    def next_raw(self) -> Any:
        while True:
            try:
                raw = self._source.next_raw()
            except StopIteration:
                if self._part + 1 == len(self._parts):
                    raise
                self._begin(self._part + 1)
            else:
                self._fresh = False
                return raw

    def state(self) -> Any:
        if self._fresh:
            return [self._part, None]
        state = self._source.state()
        return None if state is None else [self._part, state]


class RowsStream(OpenableStream[T_co], IterableDataset[T_co]):
    """A map-style dataset as a stream; a sample is loaded only where it is delivered.

    `shuffled`: each run through it goes in another order, the same for any workers.
    """

    def __init__(self, dataset: Any, shuffled: bool = False) -> None:
        self.dataset = dataset
        self.shuffled = shuffled

    def __len__(self) -> int:
        return len(self.dataset)

    def open(self, options: OpenOptions) -> StreamIterator:
        order: Any = range(len(self.dataset))
        if self.shuffled:
            seed, epoch = seed_and_epoch(None)
            order = generator(seed, epoch, Purpose.MIXTURE, options.again, options.node).permutation(len(order))
        return IndexIterator(self.dataset, order, options.state)

    def __repr__(self) -> str:
        return repr(self.dataset)


class _Iterated(IterableDataset[T_co]):
    """An iterable that does not look like a stream: a dict that is a shard, say."""

    def __init__(self, iterable: Iterable[T_co]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._iterable)


def as_stream(iterable: Any) -> Any:
    """The same, as something that the streams here can be made of."""
    if is_stream(iterable):
        return iterable
    return RowsStream(iterable) if is_indexed(iterable) else _Iterated(iterable)


def seed_and_epoch(seed: int | None) -> tuple[int, int]:
    """What keys the random numbers of a stream: its own seed or the loader's, and the loader's epoch."""
    context = seeding.current()
    if context is None:
        return (draw_seed() if seed is None else seed), 0
    return (context.seed if seed is None else seed), context.epoch


def need_stream(stream: Any, who: str) -> None:
    """Refuse what is indexed rather than iterated."""
    if not is_stream(stream):
        raise OptionError(
            f"{who} needs a stream (an IterableDataset, or what can only be iterated), got {type(stream).__name__}"
        )
