"""How the processes that train together share a stream: the pass of one rank, and the lengths of all shares."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

from agnoload import seeding
from agnoload.errors import OptionError
from agnoload.streams.iterators import DerivedIterator, Lazy, OpenOptions, StreamIterator, paired
from agnoload.streams.shards import need_length, need_shards, num_shards_of, open_stream, shard_length_of, shard_of


class RankIterator(DerivedIterator):
    """Reads whole rounds of one sample for each rank, and keeps its own; `uneven` is that of `RankStream`."""

    def __init__(self, source: Any, rank: int, world: int, uneven: str, options: OpenOptions) -> None:
        # `world`: so that a mixture inside gives each rank its exact shares.
        super().__init__(open_stream(source, options.inner(options.state)._replace(world=world)))
        self._rank, self._world, self._uneven = rank, world, uneven
        self._direct = options.direct
        self._head: list[Any] | None = [] if uneven in ("pad", "repeat") else None
        """The first samples, one for each rank: what is repeated."""
        self._ended = False
        """The source has: it is not asked for more, nor where it is. It may have gone back to its start."""
        self.others = False
        """It has ended with samples for ranks before this one."""

    def next_raw(self) -> Any:
        # A round: one sample for each rank, each with a position of its own in the sequence that the loader counts.
        context = seeding.current() if self._direct else None
        start = 0 if context is None else context.item
        raws: list[Any] = []
        try:
            for place in range(0 if self._ended else self._world):
                if context is not None:
                    context.item = start + place
                raws.append(self._source.next_raw())
        except StopIteration:
            self._ended = True
        head = self._head
        if head is not None and len(head) < self._world:
            head += raws[: self._world - len(head)]
        if self._rank < len(raws) and (self._uneven != "stop" or len(raws) == self._world):
            return raws[self._rank] if self._uneven != "pad" else Lazy((partial(paired, True), raws[self._rank]))
        if not raws or head is None:
            self.others |= self._uneven == "keep" and bool(raws)
            raise StopIteration
        raw = head[(self._rank - len(raws)) % len(head)]
        return raw if self._uneven != "pad" else Lazy((partial(paired, False), raw))

    def state(self) -> Any:
        return None if self._head is not None or self._ended else super().state()


def has_others(iterator: StreamIterator) -> bool:
    """Whether a pass has ended where other ranks have samples that this one has not."""
    return getattr(iterator, "others", False) or any(map(has_others, iterator.inside()))


def need_shard_length(stream: Any, number: int) -> int:
    """How many samples a shard has, or `OptionError`."""
    length = shard_length_of(stream, number)
    if length is None:
        raise OptionError(
            f"to even out the ranks it must be known how long each shard is, but shard {number} of "
            f"{type(stream).__name__} has no length: give the stream shard_length(i), or use uneven='keep'"
        )
    return length


def rank_lengths(stream: Any, world: int) -> list[int]:
    """How many samples each rank has."""
    if num_shards_of(stream) is None:
        total = need_length(stream)
        return [len(range(rank, total, world)) for rank in range(world)]
    lengths = [need_shard_length(stream, shard) for shard in range(need_shards(stream))]
    return [sum(lengths[rank::world]) for rank in range(world)]


def shard_limits(stream: Any, rank: int, world: int) -> list[int]:
    """For each shard of a rank, how many samples are left when it begins, until the shortest rank ends."""
    lengths = [need_shard_length(stream, shard) for shard in range(need_shards(stream))]
    shortest = min(sum(lengths[rank::world]) for rank in range(world))
    return [max(0, shortest - passed) for passed in accumulate(lengths[rank::world], initial=0)]


def repeated_shards(stream: Any, rank: int, world: int) -> tuple[list[Any], int]:
    """What a rank repeats until it has as many samples as the longest, and how many: its own shards, or any."""
    lengths = rank_lengths(stream, world)
    missing = max(lengths) - lengths[rank]
    repeated = range(rank if lengths[rank] else 0, need_shards(stream), world if lengths[rank] else 1)
    times = -(-missing // max(1, sum(need_shard_length(stream, shard) for shard in repeated)))
    return [shard_of(stream, shard) for _ in range(times) for shard in repeated], missing
