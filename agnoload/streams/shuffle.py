"""A stream in random order, through a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agnoload import seeding
from agnoload.seeding import Purpose, check_seed, draw_seed, generator
from agnoload.streams.base import DerivedStream, as_stream, seed_and_epoch
from agnoload.streams.cursor import Cursor, Opening, open_stream, shard_length_of, shard_of
from agnoload.validate import brief, positive

T_co = TypeVar("T_co", covariant=True)

DRAWS = 512
"""Numbers that are drawn at a time."""


class ShuffledStream(DerivedStream[T_co]):
    """`source` in another order each epoch, the same for any workers: what `stream.shuffle(buffer_size)` gives.

    A buffer holds the next `buffer_size` samples, and each sample is drawn from it: none comes earlier than
    `buffer_size - 1` places before its own. A buffer as large as the stream shuffles all of it; 1 keeps the order. What
    `map` was given before runs when a sample leaves the buffer, so the buffer holds what the stream itself yields. If
    the source offers shards their order is shuffled too, and each has a buffer of its own. `seed`: the loader's when
    None; outside of a loader another one each time.

    On resume the stream is read again from the start of the epoch, or from the start of the shards that are open.
    Source: the buffer is that of reservoir shuffling as loaders of records commonly do it.
    """

    keeps_place = False  # that would be the whole buffer

    def __init__(self, source: Any, buffer_size: int, *, seed: int | None = None, number: int = 0) -> None:
        super().__init__(source)
        self.buffer_size = positive("buffer_size of shuffle", buffer_size)
        self.seed = None if seed is None else check_seed(seed)
        self._number = number  # 0, or 1 more than the shard that this is: part of the key
        self._own_seed: int | None = None

    def shard(self, number: int) -> Iterable[T_co]:
        number = self._source_shard(number)
        source = as_stream(shard_of(self.source, number))
        return ShuffledStream(source, self.buffer_size, seed=self.seed, number=number + 1)

    def shard_length(self, number: int) -> int | None:
        return shard_length_of(self.source, self._source_shard(number))

    def _source_shard(self, number: int) -> int:
        return int(self._shard_order()[number]) if self.buffer_size > 1 else number

    def _shard_order(self) -> npt.NDArray[np.int64]:
        own = self.seed
        if own is None and seeding.current() is None:  # no loader reads it, but all its shards must agree on one
            own = self._own_seed = draw_seed() if self._own_seed is None else self._own_seed
        seed, epoch = seed_and_epoch(own)
        return generator(seed, epoch, Purpose.SHARDS).permutation(self.num_shards)

    def cursor(self, opening: Opening) -> Cursor:
        return _ShuffleCursor(self, opening)

    def __repr__(self) -> str:
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"{brief(self.source)}.shuffle({self.buffer_size}{seed})"


class _ShuffleCursor(Cursor):
    def __init__(self, stream: ShuffledStream[Any], opening: Opening) -> None:
        seed, epoch = seed_and_epoch(stream.seed)
        position = opening.again << 32 | stream._number
        self._draws = _uniform(generator(seed, epoch, Purpose.STREAM_SHUFFLE, position, opening.node))
        self._source = open_stream(stream.source, opening.inner())
        self._size = stream.buffer_size
        self._buffer: list[Any] = []
        self._more = True
        self.finish = self._source.finish  # type: ignore[method-assign]
        self.where = self._source.where  # type: ignore[method-assign]

    @property
    def deferred(self) -> bool:  # type: ignore[override]
        return self._source.deferred

    def inside(self) -> Iterable[Cursor]:
        return (self._source,)

    def take(self) -> Any:
        buffer = self._buffer
        while self._more and len(buffer) < self._size:
            try:
                buffer.append(self._source.take())
            except StopIteration:
                self._more = False
        if not buffer:
            raise StopIteration
        place = int(next(self._draws) * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        return buffer.pop()


def _uniform(numbers: np.random.Generator) -> Iterator[float]:
    while True:
        yield from numbers.random(DRAWS).tolist()
