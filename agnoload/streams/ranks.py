"""A stream split over the processes that train together, and the first samples of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, get_args

from agnoload import seeding
from agnoload.errors import OptionError
from agnoload.streams.base import ChainDataset, DerivedStream, MappedStream, Uneven, as_stream
from agnoload.streams.iterators import DerivedIterator, Lazy, OpenOptions, StreamIterator
from agnoload.streams.shards import (
    ShardsIterator,
    length_or_none,
    need_length,
    need_shards,
    num_shards_of,
    open_stream,
    shard_length_of,
    shard_of,
)
from agnoload.system import check_rank, rank_and_world
from agnoload.validate import brief, items, whole, word

T_co = TypeVar("T_co", covariant=True)


class RankStream(DerivedStream[T_co]):
    """The share of one rank: what `stream.split_by_rank(rank, world_size)` gives.

    With shards, rank r has the shards r, r + world_size, ...; without, the samples r, r + world_size, ...: each rank
    then reads the whole stream, but what was given to `map` runs only for its own samples. `rank` and `world_size` are
    those of this process when not given, from the environment (`RANK`, `WORLD_SIZE`; SLURM; Open MPI) or the loader's
    backend. All ranks must see the same stream: give their loaders the same `seed`, or none, which is 0 here.

    `uneven` says what happens where the shares differ in length: `"keep"`: nothing, each sample comes once on exactly
    one rank. `"stop"`: all ranks end with the shortest. `"repeat"`: shorter ones repeat samples until all are as long
    as the longest. `"pad"`: the same, and every sample becomes a pair `(sample, real)` where `real` is False for a
    repeat, so a batch comes with its mask. If there are shards, all but the first need to know how long each shard is,
    from `len(shard)` or from the stream's `shard_length(i)`.

    >>> from agnoload.streams import IterableDataset
    >>> class Count(IterableDataset[int]):
    ...     def __iter__(self): return iter(range(5))
    >>> [list(Count().split_by_rank(rank, 2, uneven="pad")) for rank in (0, 1)]
    [[(0, True), (2, True), (4, True)], [(1, True), (3, True), (0, False)]]
    """

    def __init__(
        self, source: Any, rank: int | None = None, world_size: int | None = None, uneven: Uneven = "keep"
    ) -> None:
        super().__init__(source)
        if (rank is None) != (world_size is None):
            raise OptionError(f"split_by_rank needs rank and world_size, or neither; got {rank!r} and {world_size!r}")
        self.uneven: Uneven = word("uneven", uneven, get_args(Uneven))
        self._given = None if rank is None or world_size is None else check_rank(rank, world_size, "split_by_rank")
        self._resolved = self._given or rank_and_world()
        self._known: tuple[Any, list[int]] | None = None
        """The heads of the shards in a pass: see `_heads`."""
        if uneven != "keep" and num_shards_of(source):
            _shard_length(source, 0)

    @property
    def _repeats(self) -> bool:
        return self.uneven in ("pad", "repeat")

    @property
    def keeps_place(self) -> bool:  # type: ignore[override]
        return not self._repeats  # what is repeated would have to be saved, too

    def resolve_rank(self, backend_world: tuple[int, int] | None) -> None:
        """A loader says what its backend knows; what was given, or is in the environment, goes first."""
        self._resolved = self._given or rank_and_world(backend_world)

    @property
    def rank(self) -> int:
        """Which of the ranks this one is."""
        return self._resolved[0]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._resolved[1]

    @property
    def num_shards(self) -> int:
        return len(self._own()) + self._repeats

    def _own(self) -> range:
        return range(self.rank, need_shards(self.source), self.world_size)

    def shard(self, number: int) -> Iterable[Any]:
        own = self._own()
        if number == len(own):
            return self._filler()
        shard = as_stream(shard_of(self.source, own[number]))
        if self.uneven == "stop":
            return HeadStream(shard, self._heads()[number], full=True)
        return MappedStream(shard, partial(_flagged, True)) if self.uneven == "pad" else shard

    def _filler(self) -> Iterable[Any]:
        """What a rank repeats until it has as many samples as the longest: its own shards, or any if it has none."""
        lengths = self._lengths()
        missing = max(lengths) - lengths[self.rank]
        repeated = self._own() if lengths[self.rank] else range(need_shards(self.source))
        times = -(-missing // max(1, sum(_shard_length(self.source, shard) for shard in repeated)))
        shards = [as_stream(shard_of(self.source, shard)) for _ in range(times) for shard in repeated]
        filler: HeadStream[Any] = HeadStream(
            ChainDataset(shards) if shards else iter(()), missing if shards else 0, full=True
        )
        return filler.map(partial(_flagged, False)) if self.uneven == "pad" else filler

    def _shard_lengths(self) -> list[int]:
        return [_shard_length(self.source, shard) for shard in range(need_shards(self.source))]

    def _lengths(self) -> list[int]:
        """How many samples each rank has."""
        if num_shards_of(self.source) is None:
            total = need_length(self.source)
            return [len(range(rank, total, self.world_size)) for rank in range(self.world_size)]
        return _by_rank(self._shard_lengths(), self.world_size)

    def _heads(self) -> list[int]:
        """For each own shard, how many samples are left when it begins, until the shortest rank ends.

        Found out once a pass: to ask for a length may be to open a shard.
        """
        context = seeding.current()
        key = self._resolved, None if context is None else (context.seed, context.epoch)
        if self._known is None or self._known[0] != key:
            lengths = self._shard_lengths()
            shortest = min(_by_rank(lengths, self.world_size))
            passed = accumulate(lengths[self.rank :: self.world_size], initial=0)
            self._known = key, [max(0, shortest - count) for count in passed]
        return self._known[1]

    def __len__(self) -> int:
        if self.world_size == 1 and (length := length_or_none(self.source)) is not None:
            return length
        try:
            lengths = self._lengths()
        except OptionError as error:  # what `len` must raise where there is no length
            raise TypeError(f"the length of a share is not known: {error}") from None
        return {"keep": lengths[self.rank], "stop": min(lengths)}.get(self.uneven, max(lengths))

    def open(self, options: OpenOptions) -> StreamIterator:
        self._known = None
        if num_shards_of(self.source) is not None:
            return ShardsIterator(self, range(self.num_shards), options)
        return _RankIterator(self, options)

    def __repr__(self) -> str:
        uneven = "" if self.uneven == "keep" else f", uneven={self.uneven!r}"
        return f"{brief(self.source)}.split_by_rank({self.rank}, {self.world_size}{uneven})"


class _RankIterator(DerivedIterator):
    """Reads whole rounds of one sample for each rank, and keeps its own."""

    def __init__(self, stream: RankStream[Any], options: OpenOptions) -> None:
        self._rank, self._world, self._uneven = stream.rank, stream.world_size, stream.uneven
        self._direct = options.direct
        super().__init__(open_stream(stream.source, options.inner(options.state)._replace(world=self._world)))
        self._head: list[Any] | None = [] if self._uneven in ("pad", "repeat") else None
        """The first samples, one for each rank: what is repeated."""
        self._ended = False
        """The source has: it is not asked for more, nor where it is. It may have gone back to its start."""
        self.others = False
        """It has ended with samples for ranks before this one."""

    def next_raw(self) -> Any:
        raws, head = self._round(), self._head
        if head is not None and len(head) < self._world:
            head += raws[: self._world - len(head)]
        if self._rank < len(raws) and (self._uneven != "stop" or len(raws) == self._world):
            return raws[self._rank] if self._uneven != "pad" else Lazy((partial(_flagged, True), raws[self._rank]))
        if not raws or head is None:
            self.others |= self._uneven == "keep" and bool(raws)
            raise StopIteration
        raw = head[(self._rank - len(raws)) % len(head)]
        return raw if self._uneven != "pad" else Lazy((partial(_flagged, False), raw))

    def _round(self) -> list[Any]:
        context = seeding.current() if self._direct else None
        start = 0 if context is None else context.item
        raws: list[Any] = []
        try:
            for place in range(0 if self._ended else self._world):
                if context is not None:
                    context.item = start + place  # each sample of the source has a position of its own
                raws.append(self._source.next_raw())
        except StopIteration:
            self._ended = True
        return raws

    def state(self) -> Any:
        return None if self._head is not None or self._ended else super().state()


def has_others(iterator: StreamIterator) -> bool:
    """Whether a pass has ended where other ranks have samples that this one has not."""
    return getattr(iterator, "others", False) or any(map(has_others, iterator.inside()))


class HeadStream(DerivedStream[T_co]):
    """The first `count` samples of a stream; `full`: it is known to have as many."""

    def __init__(self, source: Any, count: int, full: bool = False) -> None:
        super().__init__(source)
        self.count = count
        self._full = full

    @property
    def num_shards(self) -> int:
        raise AttributeError("the head of a stream has no shards")

    def __len__(self) -> int:
        length = length_or_none(self.source)
        return self.count if self._full and length is None else min(self.count, need_length(self.source))

    def open(self, options: OpenOptions) -> StreamIterator:
        return _HeadIterator(self, options)

    def __repr__(self) -> str:
        return f"{brief(self.source)}.take({self.count})"


class _HeadIterator(DerivedIterator):
    """The state: how many samples are left, and where the source is."""

    def __init__(self, stream: HeadStream[Any], options: OpenOptions) -> None:
        state = (stream.count, None) if options.state is None else items(options.state, "the place in a share", 2)
        self._left = whole(state[0], "what is left of a share", stream.count)
        super().__init__(open_stream(stream.source, options.inner(state[1])))

    def next_raw(self) -> Any:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._source.next_raw()

    def state(self) -> Any:
        state = super().state()
        return None if state is None else [self._left, state]


def _flagged(real: bool, sample: Any) -> tuple[Any, bool]:
    return sample, real


def _by_rank(lengths: list[int], world: int) -> list[int]:
    """The samples of each rank, of shards that are dealt out in turn."""
    return [sum(lengths[rank::world]) for rank in range(world)]


def _shard_length(stream: Any, number: int) -> int:
    length = shard_length_of(stream, number)
    if length is None:
        raise OptionError(
            f"to even out the ranks it must be known how long each shard is, but shard {number} of "
            f"{type(stream).__name__} has no length: give the stream shard_length(i), or use uneven='keep'"
        )
    return length
