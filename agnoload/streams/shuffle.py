"""A stream in random order, through a buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agnoload import seeding
from agnoload.seeding import Purpose, check_seed, draw_seed, generator
from agnoload.streams.base import DerivedStream, as_stream, seed_and_epoch
from agnoload.streams.iterators import DerivedIterator, OpenOptions, StreamIterator
from agnoload.streams.shards import open_stream, shard_length_of, shard_of
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

    keeps_place = False

    def __init__(self, source: Any, buffer_size: int, *, seed: int | None = None) -> None:
        super().__init__(source)
        self.buffer_size = positive("buffer_size of shuffle", buffer_size)
        self.seed = None if seed is None else check_seed(seed)
        self._number = 0  # or 1 more than the shard that this is: part of the key
        self._own_seed: int | None = None

    def shard(self, number: int) -> Iterable[T_co]:
        number = self._source_shard(number)
        shard = self.of(as_stream(shard_of(self.source, number)))
        shard._number = number + 1
        return shard

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

    def open(self, options: OpenOptions) -> StreamIterator:
        seed, epoch = seed_and_epoch(self.seed)
        numbers = generator(seed, epoch, Purpose.STREAM_SHUFFLE, options.again << 32 | self._number, options.node)
        return _ShuffleIterator(open_stream(self.source, options.inner()), self.buffer_size, numbers)

    def __repr__(self) -> str:
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"{brief(self.source)}.shuffle({self.buffer_size}{seed})"


class _ShuffleIterator(DerivedIterator):
    def __init__(self, source: StreamIterator, size: int, numbers: np.random.Generator) -> None:
        super().__init__(source)
        self._size = size
        self._numbers = numbers
        self._draws: list[float] = []
        self._buffer: list[Any] = []
        self._ended = False

    def next_raw(self) -> Any:
        buffer = self._buffer
        while not self._ended and len(buffer) < self._size:
            try:
                buffer.append(self._source.next_raw())
            except StopIteration:
                self._ended = True
        if not buffer:
            raise StopIteration
        if not self._draws:
            self._draws = self._numbers.random(DRAWS)[::-1].tolist()  # backwards: the next one is the last
        place = int(self._draws.pop() * len(buffer))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        return buffer.pop()

    def state(self) -> None:
        """None: that would be the whole buffer."""
