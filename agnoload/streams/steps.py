"""The passes of `map`, `filter`, `take` and `shuffle`: each reads from one other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from agnoload.streams.iterators import (
    DerivedIterator,
    Lazy,
    Made,
    OpenOptions,
    StreamIterator,
    force,
    may_ask,
    note_record,
    sample_stopped,
)
from agnoload.streams.shards import open_stream
from agnoload.validate import items, whole

DRAWS = 512
"""Numbers that a shuffle draws at a time."""


class MapIterator(DerivedIterator):
    """Calls nothing: whoever delivers a sample does."""

    def __init__(self, source: StreamIterator, function: Callable[[Any], Any]) -> None:
        super().__init__(source)
        self._function = function

    def next_raw(self) -> Lazy:
        return Lazy((self._function, self._source.next_raw()))


class FilterIterator(DerivedIterator):
    """Must make every sample to see whether it passes."""

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


class HeadIterator(DerivedIterator):
    """The state: how many samples are left, and where the source is."""

    def __init__(self, source: Any, count: int, options: OpenOptions) -> None:
        left, state = (count, None) if options.state is None else items(options.state, "the place in a share", 2)
        self._left = whole(left, "what is left of a share", count)
        super().__init__(open_stream(source, options.inner(state)))

    def next_raw(self) -> Any:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._source.next_raw()

    def state(self) -> Any:
        state = super().state()
        return None if state is None else [self._left, state]


class ShuffleIterator(DerivedIterator):
    """Draws each sample from a buffer. It has no state: that would be the whole buffer."""

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
        pass
