"""A stream split over the processes that train together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, get_args

from agnoload import seeding
from agnoload.errors import OptionError
from agnoload.streams.base import (
    ChainDataset,
    DerivedStream,
    MappedStream,
    Uneven,
    all_parts_of,
    as_stream,
    need_length,
    parts_of,
)
from agnoload.streams.cursor import (
    Cursor,
    Opening,
    ShardsCursor,
    length_or_none,
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
        self._found = rank_and_world() if self._given is None else self._given
        self._known: tuple[Any, list[int]] | None = None
        """The heads of the shards in a pass: see `_heads`."""
        if uneven != "keep" and num_shards_of(source):
            _shard_length(source, 0)

    @property
    def keeps_place(self) -> bool:  # type: ignore[override]
        return self.uneven not in ("pad", "repeat")  # what is repeated would have to be saved, too

    def settle(self, backend_world: tuple[int, int] | None) -> None:
        """Called by a loader with what its backend knows; what was given, or stands in the environment, goes first."""
        if self._given is None:
            self._found = rank_and_world(backend_world)

    @property
    def rank(self) -> int:
        """Which of the ranks this one is."""
        return self._found[0]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._found[1]

    @property
    def num_shards(self) -> int:
        number = num_shards_of(self.source)
        if number is None:
            raise AttributeError(f"{type(self.source).__name__} offers no num_shards")
        return len(self._own()) + (self.uneven in ("pad", "repeat"))

    def _own(self) -> range:
        return range(self.rank, num_shards_of(self.source) or 0, self.world_size)

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
        repeated = self._own() if lengths[self.rank] else range(num_shards_of(self.source) or 0)
        times = -(-missing // max(1, sum(_shard_length(self.source, shard) for shard in repeated)))
        shards = [as_stream(shard_of(self.source, shard)) for _ in range(times) for shard in repeated]
        repeats = ChainDataset(shards) if shards else iter(())
        filler: HeadStream[Any] = HeadStream(repeats, missing if shards else 0, full=True)
        return filler.map(partial(_flagged, False)) if self.uneven == "pad" else filler

    def _lengths(self) -> list[int]:
        """How many samples each rank has."""
        return self._sums(self._shard_lengths())

    def _sums(self, lengths: list[int]) -> list[int]:
        return [sum(lengths[rank :: self.world_size]) for rank in range(self.world_size)]

    def _shard_lengths(self) -> list[int]:
        return [_shard_length(self.source, shard) for shard in range(num_shards_of(self.source) or 0)]

    def _heads(self) -> list[int]:
        """For each own shard, how many samples are left when it begins, until the shortest rank ends.

        Found out once a pass: to ask for a length may be to open a shard.
        """
        context = seeding.current()
        key = self._found, None if context is None else (context.seed, context.epoch)
        if self._known is None or self._known[0] != key:
            lengths = self._shard_lengths()
            shortest = min(self._sums(lengths))
            before = accumulate(lengths[self.rank :: self.world_size], initial=0)
            self._known = key, [max(0, shortest - passed) for passed in before]
        return self._known[1]

    def __len__(self) -> int:
        sharded = num_shards_of(self.source) is not None
        if sharded and (self.world_size > 1 or length_or_none(self.source) is None):
            try:
                lengths = self._lengths()
            except OptionError as error:  # what `len` must raise where there is no length
                raise TypeError(f"the length of a share is not known: {error}") from None
            own = lengths[self.rank]
        else:
            total = need_length(self.source)
            lengths = [len(range(rank, total, self.world_size)) for rank in range(self.world_size)]
            own = lengths[self.rank]
        return {"keep": own, "stop": min(lengths)}.get(self.uneven, max(lengths))

    def cursor(self, opening: Opening) -> Cursor:
        self._known = None
        if num_shards_of(self.source) is not None:
            return ShardsCursor(self, range(self.num_shards), opening).exact()
        return _RankCursor(self, opening)

    def __repr__(self) -> str:
        uneven = "" if self.uneven == "keep" else f", uneven={self.uneven!r}"
        return f"{brief(self.source)}.split_by_rank({self.rank}, {self.world_size}{uneven})"


class _RankCursor(Cursor):
    """Reads whole rounds of one sample for each rank, and keeps its own."""

    def __init__(self, stream: RankStream[Any], opening: Opening) -> None:
        self._rank, self._world, self._uneven = stream.rank, stream.world_size, stream.uneven
        self._direct = opening.direct
        self._source = open_stream(stream.source, opening.inner(opening.state)._replace(world=self._world))
        self._repeats = self._uneven in ("pad", "repeat")
        self._head: list[Any] = []
        self._ended = False
        """The source has: it is not asked again, nor where it stands. It may have gone back to its start."""
        self.others = False
        """It has ended with samples for ranks before this one."""

    @property
    def deferred(self) -> bool:  # type: ignore[override]
        return self._source.deferred

    def take(self) -> Any:
        drafts = self._round()
        if self._repeats and len(self._head) < self._world:
            self._head += drafts[: self._world - len(self._head)]
        if self._rank < len(drafts) and (self._uneven != "stop" or len(drafts) == self._world):
            return drafts[self._rank], True
        if not drafts or not self._repeats:
            self.others |= self._uneven == "keep" and bool(drafts)
            raise StopIteration
        return self._head[(self._rank - len(drafts)) % len(self._head)], False

    def inside(self) -> Iterable[Cursor]:
        return (self._source,)

    def _round(self) -> list[Any]:
        context = seeding.current() if self._direct else None
        start = 0 if context is None else context.item
        drafts = []
        for place in range(0 if self._ended else self._world):
            if context is not None:
                context.item = start + place  # each sample of the source has a position of its own
            try:
                drafts.append(self._source.take())
            except StopIteration:
                self._ended = True
                break
        return drafts

    def finish(self, draft: Any) -> Any:
        inner, real = draft
        sample = self._source.finish(inner)
        return (sample, real) if self._uneven == "pad" else sample

    def where(self, draft: Any) -> str:
        return self._source.where(draft[0])

    def state(self) -> Any:
        return None if self._repeats or self._ended else self._source.state()


def has_others(cursor: Cursor) -> bool:
    """Whether a run has ended where other ranks have samples that this one has not."""
    return getattr(cursor, "others", False) or any(map(has_others, cursor.inside()))


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

    def cursor(self, opening: Opening) -> Cursor:
        return _HeadCursor(self, opening)

    def __repr__(self) -> str:
        return f"{brief(self.source)}.take({self.count})"


class _HeadCursor(Cursor):
    def __init__(self, stream: HeadStream[Any], opening: Opening) -> None:
        state = (stream.count, None) if opening.state is None else items(opening.state, "the place in a share", 2)
        self._left, inner = whole(state[0], "what is left of a share", stream.count), state[1]
        self._source = open_stream(stream.source, opening.inner(inner))
        self.finish = self._source.finish  # type: ignore[method-assign]
        self.where = self._source.where  # type: ignore[method-assign]

    @property
    def deferred(self) -> bool:  # type: ignore[override]
        return self._source.deferred

    def take(self) -> Any:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._source.take()

    def inside(self) -> Iterable[Cursor]:
        return (self._source,)

    def state(self) -> Any:
        inner = self._source.state()
        return None if inner is None else [self._left, inner]


class Split(NamedTuple):
    """How a stream is split over ranks."""

    rank: int
    world: int
    by_shards: bool
    outermost: bool
    """All that comes behind the split leaves one sample for each."""


def split_of(stream: Any) -> Split | None:
    """How a stream is split over ranks, and all that it is made of in the same way; None if it is not."""
    if isinstance(stream, RankStream):
        return Split(stream.rank, stream.world_size, num_shards_of(stream.source) is not None, True)
    parts = {split_of(part) for part in parts_of(stream)}
    split = parts.pop() if len(parts) == 1 else None
    return split if split is None or isinstance(stream, MappedStream) else split._replace(outermost=False)


def settle_ranks(stream: Any, backend_world: tuple[int, int] | None) -> bool:
    """Tell every split in a stream what the loader's backend knows of rank and world size; whether there is one."""
    splits = [part for part in all_parts_of(stream) if isinstance(part, RankStream)]
    for split in splits:
        split.settle(backend_world)
    return bool(splits)


def _flagged(real: bool, sample: Any) -> tuple[Any, bool]:
    return sample, real


def _shard_length(stream: Any, number: int) -> int:
    length = shard_length_of(stream, number)
    if length is None:
        raise OptionError(
            f"to even out the ranks it must be known how long each shard is, but shard {number} of "
            f"{type(stream).__name__} has no length: give the stream shard_length(i), or use uneven='keep'"
        )
    return length
