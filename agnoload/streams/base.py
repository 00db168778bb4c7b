"""Streams: datasets that are iterated, and what can be made of them.

Each says here how long it is, which shards it has, and how a pass through it begins; the passes are those of `steps`,
`group`, `ranks` and `shards`. They stand in one file because every stream makes all the others.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Generic, Literal, Self, TypeVar, get_args, overload

import numpy.typing as npt

from agnoload import seeding
from agnoload.errors import OptionError
from agnoload.seeding import Purpose, check_seed, draw_seed, generator
from agnoload.streams.group import BatchIterator, PackIterator
from agnoload.streams.iterators import (
    OpenableStream,
    OpenedBy,
    OpenOptions,
    StreamIterator,
    is_stream,
    paired,
    seed_and_epoch,
)
from agnoload.streams.ranks import RankIterator, need_shard_length, rank_lengths, repeated_shards, shard_limits
from agnoload.streams.shards import (
    LANES,
    ChainIterator,
    ShardsIterator,
    lanes_of,
    length_or_none,
    need_length,
    need_shards,
    num_shards_of,
    open_stream,
    shard_length_of,
    shard_of,
)
from agnoload.streams.steps import FilterIterator, HeadIterator, MapIterator, ShuffleIterator
from agnoload.system import check_rank, rank_and_world
from agnoload.validate import brief, counted, integer, members, name_of, positive, word

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
        """This stream with each sample replaced by `fn(sample)`.

        At the end of a pipeline `fn` is called only for samples that are delivered from here; it may draw from
        `agnoload.sample_rng()`, and ask `get_worker_info()`.
        """
        return MappedStream(self, fn)

    def filter(self, fn: Callable[[T_co], Any]) -> FilteredStream[T_co]:
        """Only the samples for which `fn(sample)` is true; every worker calls it for every sample."""
        return FilteredStream(self, fn)

    def shuffle(self, buffer_size: int, *, seed: int | None = None) -> ShuffledStream[T_co]:
        """This stream in another order each epoch, the same for any workers.

        A buffer holds the next `buffer_size` samples, and each sample is drawn from it: none comes earlier than
        `buffer_size - 1` places before its own. A buffer as large as the stream shuffles all of it; 1 keeps the order.
        What `map` was given before runs when a sample leaves the buffer, so the buffer holds what the stream itself
        yields. If there are shards their order is shuffled too, and each has a buffer of its own. `seed`: the loader's
        when None; outside of a loader another one each time.

        On resume the stream is read again from the start of the epoch, or from the start of the shards that are open.
        Source: the buffer is that of reservoir shuffling as loaders of records commonly do it.
        """
        return ShuffledStream(self, buffer_size, seed)

    def take(self, n: int) -> HeadStream[T_co]:
        """The first `n` samples, in the order of a plain `for`: shards one after the other.

        They are read as a stream without shards, by every worker; what was given to `map` runs only where a sample is
        delivered.

        >>> list(ChainDataset([iter("abc"), iter("de")]).take(4))
        ['a', 'b', 'c', 'd']
        """
        return HeadStream(self, integer("n of take", n, 0, "an int that is not negative"))

    def batch(self, n: int) -> BatchedStream[T_co]:
        """Lists of `n` samples that follow each other, the last one of what is left.

        A stream with shards is cut lane by lane, as a loader cuts it, so each of its lanes may end with a shorter list.
        What `map` was given before runs only for the samples that are delivered from here. To make batches in the
        stream, give the loader `batch_size=None`: `stream.batch(32).map(default_collate)`.

        >>> list(ChainDataset([iter("abc"), iter("de")]).batch(2))
        [['a', 'b'], ['c', 'd'], ['e']]
        """
        return BatchedStream(self, n)

    def pack(self, length: int, *, key: Any = None, value: int = 0) -> PackedStream:
        """Token sequences as rows of `length` tokens, cut from one sequence after the other.

        A sample of this stream is a flat array or list of integers, or a dict that holds one under `key`; what else is
        in the dict is dropped. A sequence that does not fit into its row continues in the next one. Rows are dicts of
        `tokens` (of the dtype of the sequences), `segment_ids` and `positions` (int32), as `PackedRows` has them: the
        pieces of a row are numbered from 1, 0 is padding, and places are counted from 0 within each piece. Only the
        last row is padded, with the token `value`; of a stream with shards each lane has a last row. Every worker that
        reads the stream must know how long its sequences are, so what `map` was given before runs in each.

        >>> for row in ChainDataset([iter([[5, 6, 7], [8, 9]])]).pack(4):
        ...     print(row["tokens"], row["segment_ids"], row["positions"])
        [5 6 7 8] [1 1 1 2] [0 1 2 0]
        [9 0 0 0] [1 0 0 0] [0 0 0 0]
        """
        return PackedStream(self, length, key, value)

    def split_by_rank(
        self, rank: int | None = None, world_size: int | None = None, uneven: Uneven = "keep"
    ) -> RankStream[T_co]:
        """The share of this process among those that train together.

        With shards, rank r has the shards r, r + world_size, ...; without, the samples r, r + world_size, ...: each
        rank then reads the whole stream, but what was given to `map` runs only for its own samples. `rank` and
        `world_size` are those of this process when not given, from the environment (`RANK`, `WORLD_SIZE`; SLURM; Open
        MPI) or the loader's backend. All ranks must see the same stream: give their loaders the same `seed`, or none,
        which is 0 here.

        `uneven` says what happens where the shares differ in length: `"keep"`: nothing, each sample comes once on
        exactly one rank. `"stop"`: all ranks end with the shortest. `"repeat"`: shorter ones repeat samples until all
        are as long as the longest. `"pad"`: the same, and every sample becomes a pair `(sample, real)` where `real` is
        False for a repeat, so a batch comes with its mask. If there are shards, all but the first need to know how long
        each shard is, from `len(shard)` or from the stream's `shard_length(i)`.

        >>> class Count(IterableDataset[int]):
        ...     def __iter__(self): return iter(range(5))
        >>> [list(Count().split_by_rank(rank, 2, uneven="pad")) for rank in (0, 1)]
        [[(0, True), (2, True), (4, True)], [(1, True), (3, True), (0, False)]]
        """
        return RankStream(self, rank, world_size, uneven)


class DerivedStream(OpenableStream[T_co], IterableDataset[T_co]):
    """A stream that is made of one other and has its lanes, its shards and its length."""

    def __init__(self, source: Any, call: str) -> None:
        self.source = source
        self._call = call  # how it was made of the source

    def of(self, source: Any) -> Self:
        """The same, made of another stream, or of a shard."""
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
        return self.of(shard_of(self.source, number))

    def __len__(self) -> int:
        return need_length(self.source)

    def __repr__(self) -> str:
        return f"{brief(self.source)}.{self._call}"


class MappedStream(DerivedStream[R]):
    """What `stream.map(function)` gives."""

    def __init__(self, source: Any, function: Callable[[Any], R]) -> None:
        super().__init__(source, f"map({name_of(function)})")
        self.function = _need_function(function, "map")

    def shard_length(self, number: int) -> int | None:
        return shard_length_of(self.source, number)

    def open(self, options: OpenOptions) -> StreamIterator:
        return MapIterator(open_stream(self.source, options), self.function)


class FilteredStream(DerivedStream[T_co]):
    """What `stream.filter(function)` gives."""

    def __init__(self, source: Any, function: Callable[[Any], Any]) -> None:
        super().__init__(source, f"filter({name_of(function)})")
        self.function = _need_function(function, "filter")

    def __len__(self) -> int:
        raise TypeError("a filtered stream has no length: it is not known before the stream was read")

    def open(self, options: OpenOptions) -> StreamIterator:
        # Not `direct`: samples are left out, so their places in the source are not those that the loader counts.
        return FilterIterator(open_stream(self.source, options._replace(direct=False)), self.function)


def _need_function(function: Callable[[Any], R], name: str) -> Callable[[Any], R]:
    if not callable(function):
        raise OptionError(f"{name} needs a function of one sample, got {function!r}")
    return function


class ShuffledStream(DerivedStream[T_co]):
    """What `stream.shuffle(buffer_size)` gives."""

    keeps_place = False  # its state would be the whole buffer

    def __init__(self, source: Any, buffer_size: int, seed: int | None = None) -> None:
        super().__init__(source, f"shuffle({buffer_size}{'' if seed is None else f', seed={seed}'})")
        self.buffer_size = positive("buffer_size of shuffle", buffer_size)
        self.seed = None if seed is None else check_seed(seed)
        self._number = 0  # or 1 more than the shard that this is: part of the key
        self._own_seed = draw_seed()  # where no loader reads it: all its shards must agree on one

    def shard(self, number: int) -> Iterable[T_co]:
        number = self._source_shard(number)
        shard = self.of(shard_of(self.source, number))
        shard._number = number + 1
        return shard

    def shard_length(self, number: int) -> int | None:
        return shard_length_of(self.source, self._source_shard(number))

    def _source_shard(self, number: int) -> int:
        if self.buffer_size == 1:
            return number
        own = self._own_seed if self.seed is None and seeding.current() is None else self.seed
        seed, epoch = seed_and_epoch(own)
        return int(generator(seed, epoch, Purpose.SHARDS).permutation(self.num_shards)[number])

    def open(self, options: OpenOptions) -> StreamIterator:
        seed, epoch = seed_and_epoch(self.seed)
        numbers = generator(seed, epoch, Purpose.STREAM_SHUFFLE, options.again << 32 | self._number, options.node)
        return ShuffleIterator(open_stream(self.source, options.inner()), self.buffer_size, numbers)


class HeadStream(DerivedStream[T_co]):
    """What `stream.take(count)` gives."""

    def __init__(self, source: Any, count: int) -> None:
        super().__init__(source, f"take({count})")
        self.count = count

    @property
    def num_shards(self) -> int:
        raise AttributeError("the head of a stream has no shards")

    def __len__(self) -> int:
        return min(self.count, need_length(self.source))

    def open(self, options: OpenOptions) -> StreamIterator:
        return HeadIterator(self.source, self.count, options)


class GroupedStream(DerivedStream[T_co]):
    """A stream whose every sample is made of some of `source` that follow each other.

    Of a source with shards each lane is grouped by itself, and is one shard here. So whoever reads it, a loader with
    any number of workers or a plain `for`, finds the same groups.
    """

    def __init__(self, source: Any, call: str, group: Callable[[Any, OpenOptions], StreamIterator]) -> None:
        super().__init__(source, call)
        self._group = group  # begins a pass through a source without shards

    @property
    def num_shards(self) -> int:
        return max(1, min(lanes_of(self.source), need_shards(self.source)))

    def shard(self, number: int) -> Iterable[T_co]:
        return self.of(OpenedBy(partial(ShardsIterator, self.source, self._lane(number))))

    def _lane(self, number: int) -> range:
        return range(number, need_shards(self.source), self.num_shards)

    def open(self, options: OpenOptions) -> StreamIterator:
        if num_shards_of(self.source) is not None:
            return ShardsIterator(self, range(self.num_shards), options)
        return self._group(self.source, options)


class BatchedStream(GroupedStream[list[T_co]]):
    """What `stream.batch(size)` gives."""

    def __init__(self, source: Any, size: int) -> None:
        self.size = positive("the size of batch", size)
        super().__init__(source, f"batch({size})", partial(BatchIterator, self.size))

    def shard_length(self, number: int) -> int | None:
        lengths = [shard_length_of(self.source, shard) for shard in self._lane(number)]
        return None if None in lengths else -(-sum(filter(None, lengths)) // self.size)

    def __len__(self) -> int:
        if num_shards_of(self.source) is None:
            return (need_length(self.source) + self.size - 1) // self.size
        lengths = [self.shard_length(number) for number in range(self.num_shards)]
        if None in lengths:
            raise TypeError(f"the length is not known: a shard of {type(self.source).__name__} has none")
        return sum(filter(None, lengths))


class PackedStream(GroupedStream[dict[str, npt.NDArray[Any]]]):
    """What `stream.pack(length)` gives."""

    def __init__(self, source: Any, length: int, key: Any, value: int) -> None:
        length = positive("the length of pack", length)
        value = integer("value of pack", value, -(1 << 63), "the token id of padding, an int")
        super().__init__(source, f"pack({length})", partial(PackIterator, length, key, value))

    def __len__(self) -> int:
        raise TypeError("a packed stream has no length: it is not known before the stream was read")


class RankStream(DerivedStream[T_co]):
    """What `stream.split_by_rank(rank, world_size, uneven)` gives."""

    def __init__(self, source: Any, rank: int | None, world_size: int | None, uneven: Uneven) -> None:
        super().__init__(source, "split_by_rank")
        if (rank is None) != (world_size is None):
            raise OptionError(f"split_by_rank needs rank and world_size, or neither; got {rank!r} and {world_size!r}")
        self.uneven: Uneven = word("uneven", uneven, get_args(Uneven))
        self._given = None if rank is None or world_size is None else check_rank(rank, world_size, "split_by_rank")
        self.resolve_rank(None)
        self._limits: tuple[Any, list[int]] | None = None
        """What `shard_limits` gives, and for which pass: to ask for a length may be to open a shard."""
        if uneven != "keep" and num_shards_of(source):
            need_shard_length(source, 0)

    def resolve_rank(self, backend_world: tuple[int, int] | None) -> None:
        """A loader says what its backend knows; what was given, or is in the environment, goes first."""
        self.rank, self.world_size = self._given or rank_and_world(backend_world)
        uneven = "" if self.uneven == "keep" else f", uneven={self.uneven!r}"
        self._call = f"split_by_rank({self.rank}, {self.world_size}{uneven})"

    @property
    def keeps_place(self) -> bool:  # type: ignore[override]
        return self.uneven in ("keep", "stop")  # what is repeated would have to be saved, too

    @property
    def num_shards(self) -> int:
        return len(range(self.rank, need_shards(self.source), self.world_size)) + (not self.keeps_place)

    def shard(self, number: int) -> Iterable[Any]:
        share: Any = self.source, self.rank, self.world_size
        if number == self.num_shards - 1 and not self.keeps_place:
            shards, missing = repeated_shards(*share)
            filler: HeadStream[Any] = HeadStream(OpenedBy(partial(ChainIterator, shards)), missing)
            return filler.map(partial(paired, False)) if self.uneven == "pad" else filler
        shard = shard_of(self.source, self.rank + number * self.world_size)
        if self.uneven == "stop":
            context = seeding.current()
            key = share[1:], None if context is None else (context.seed, context.epoch)
            # A loader opens the shards one by one, so only the seed and the epoch show that a new pass has begun.
            if self._limits is None or self._limits[0] != key:
                self._limits = key, shard_limits(*share)
            return HeadStream(shard, self._limits[1][number])
        return MappedStream(shard, partial(paired, True)) if self.uneven == "pad" else shard

    def __len__(self) -> int:
        if self.world_size == 1 and (length := length_or_none(self.source)) is not None:
            return length
        try:
            lengths = rank_lengths(self.source, self.world_size)
        except OptionError as error:  # what `len` must raise where there is no length
            raise TypeError(f"the length of a share is not known: {error}") from None
        return {"keep": lengths[self.rank], "stop": min(lengths)}.get(self.uneven, max(lengths))

    def open(self, options: OpenOptions) -> StreamIterator:
        self._limits = None
        if num_shards_of(self.source) is not None:
            return ShardsIterator(self, range(self.num_shards), options)
        return RankIterator(self.source, self.rank, self.world_size, self.uneven, options)


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
            if not is_stream(part):
                raise OptionError(
                    "ChainDataset needs streams (an IterableDataset, or what can only be iterated), got "
                    f"{type(part).__name__}"
                )

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
        return ChainIterator(self.datasets, options)

    def __repr__(self) -> str:
        return f"ChainDataset([{', '.join(map(brief, self.datasets))}])"
