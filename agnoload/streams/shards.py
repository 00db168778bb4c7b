"""Streams that are read in parts: how a shard is asked for, and the passes through indices, shards and chains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from agnoload.errors import StateError
from agnoload.streams.iterators import (
    DerivedIterator,
    Lazy,
    OpenOptions,
    StreamIterator,
    UserIterator,
    guarded,
    is_indexed,
    is_ours,
)
from agnoload.validate import FARTHEST, fields, integer, items, positive, whole

LANES = 16
"""Through how many lanes shards are read where the stream does not say."""


def open_stream(stream: Any, options: OpenOptions) -> StreamIterator:
    """Begin a pass through any stream, ours or the user's, or through a shard that is a map-style dataset."""
    if is_ours(stream):
        return stream.open(options)  # type: ignore[no-any-return]
    if is_indexed(stream):
        return IndexIterator(stream, range(len(stream)), options.state)
    # A class with shards may define `__iter__` beside them, and is then read by it where nothing splits it.
    number = num_shards_of(stream)
    iterates = getattr(type(stream), "__iter__", None)
    if number is not None and (iterates is None or getattr(iterates, "by_shards", False)):
        return ShardsIterator(stream, range(number), options)
    return UserIterator(stream, options.state)


class IndexIterator(StreamIterator):
    """A pass through a map-style dataset; a sample is loaded only where it is delivered."""

    def __init__(self, dataset: Any, order: Sequence[int], state: int | None = None) -> None:
        self._load = dataset.__getitem__
        self._order = order
        self._place = 0 if state is None else whole(state, "the place in a dataset", len(order))

    def next_raw(self) -> Lazy:
        if self._place >= len(self._order):
            raise StopIteration
        index = int(self._order[self._place])
        self._place += 1
        return Lazy((self._load, index))

    def state(self) -> int:
        return self._place


class ShardsIterator(DerivedIterator):
    """A pass through some shards of a stream, one after the other.

    The state is the number of shards that are done, how many samples of the next one were taken, and where that one is.
    If it cannot say, it can only be read again. Whoever gives `on_shard`, which is called before the first sample of
    each further shard, does so: this iterator then begins at the start of that shard, `behind` by the samples that were
    taken. Anyone else reads more than these shards, and a shard that is read again alone, among the random numbers of
    another place, need not give what it gave: then this iterator has no state where the open shard has none.
    """

    def __init__(
        self, stream: Any, shards: Sequence[int], options: OpenOptions, on_shard: Callable[[], None] | None = None
    ) -> None:
        self._stream = stream
        self._shards = shards
        self._options = options
        self._on_shard = on_shard
        state = {"done": 0, "taken": 0, "inner": None} if options.state is None else options.state
        done, taken, inner = fields(state, "the place among shards", "done", "taken", "inner")
        self._done = whole(done, "done", len(shards))
        self._taken = whole(taken, "taken", FARTHEST if done < len(shards) else 0)
        self._source = self._open(inner)
        self.behind = 0
        if self._taken and inner is None:
            if on_shard is None:
                raise StateError("the state of a shard must say where it is, got none")
            self.behind, self._taken = self._taken, 0

    def close(self) -> None:
        super().close()
        self._on_shard = None  # it refers to whoever reads

    def _open(self, state: Any) -> StreamIterator:
        if self._done == len(self._shards):
            return UserIterator(())  # it gives nothing, and holds nothing open
        return open_stream(shard_of(self._stream, self._shards[self._done]), self._options.inner(state))

    def next_raw(self) -> Any:
        while True:
            try:
                raw = self._source.next_raw()
            except StopIteration:
                if self._done == len(self._shards):
                    raise
                self._done += 1
                self._taken = 0
                if self._on_shard is not None:
                    self._on_shard()
                self._source = self._open(None)
            else:
                self._taken += 1
                return raw

    def state(self) -> dict[str, Any] | None:
        # Of a shard that has not begun nothing is saved: it may be opened in another process, by a copy of the stream.
        inner = self._source.state() if self._taken else None
        if inner is None and self._taken and self._on_shard is None:
            return None
        return {"done": self._done, "taken": self._taken, "inner": inner}


class ChainIterator(DerivedIterator):
    """A pass through streams, one after the other.

    The state: the number of the part that is read, and where it is there; None where nothing of it was read.
    """

    def __init__(self, parts: Sequence[Any], options: OpenOptions) -> None:
        self._parts = parts
        self._options = options
        part, state = (0, None) if options.state is None else items(options.state, "the place in a chain", 2)
        self._part = whole(part, "the part of a chain", max(0, len(parts) - 1))
        self._begin(state)

    def _begin(self, state: Any) -> None:
        self._fresh = state is None
        part: Any = self._parts[self._part] if self._parts else ()
        self._source = open_stream(part, self._options.inner(state, self._part))

    def next_raw(self) -> Any:
        while True:
            try:
                raw = self._source.next_raw()
            except StopIteration:
                if self._part + 1 >= len(self._parts):
                    raise
                self._part += 1
                self._begin(None)
            else:
                self._fresh = False
                return raw

    def state(self) -> Any:
        state = None if self._fresh else self._source.state()
        return [self._part, state] if self._fresh or state is not None else None


def num_shards_of(stream: Any) -> int | None:
    """The number of shards that a stream offers; None if it does not."""
    number = getattr(stream, "num_shards", None)
    if number is None or not callable(getattr(stream, "shard", None)):
        return None
    return integer(f"num_shards of {type(stream).__name__}", number, 0, "an int that is not negative")


def need_shards(stream: Any) -> int:
    """The number of shards; AttributeError, so that `hasattr` is false, if there are none."""
    number = num_shards_of(stream)
    if number is None:
        raise AttributeError(f"{type(stream).__name__} offers no num_shards")
    return number


def lanes_of(stream: Any) -> int:
    """Through how many lanes the shards of a stream are read."""
    return positive(f"lanes of {type(stream).__name__}", getattr(stream, "lanes", LANES))


def shard_of(stream: Any, number: int) -> Iterable[Any]:
    """Shard `number` of a stream: `stream.shard(number)`, or `stream.shard(num_shards=..., index=...)`."""
    try:
        names = set(inspect.signature(stream.shard).parameters)
    except (TypeError, ValueError):
        names = set()
    if {"num_shards", "index"} <= names:
        return guarded(partial(stream.shard, num_shards=stream.num_shards, index=number))  # type: ignore[no-any-return]
    return guarded(stream.shard, number)  # type: ignore[no-any-return]


def shard_length_of(stream: Any, number: int) -> int | None:
    """How many samples a shard has: what `stream.shard_length(number)` or else its `len` says; None if neither does."""
    shard_length: Callable[[int], int | None] | None = getattr(stream, "shard_length", None)
    length = None if shard_length is None else shard_length(number)
    return length_or_none(shard_of(stream, number)) if length is None else int(length)


def length_or_none(thing: Any) -> int | None:
    """`len(thing)`, None if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def need_length(stream: Any) -> int:
    """`len(stream)`; TypeError, which is what `len` gives, if it has none."""
    length = length_or_none(stream)
    if length is None:
        raise TypeError(f"the length is not known: {type(stream).__name__} has no __len__")
    return length
