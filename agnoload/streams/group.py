"""Several samples of a stream as one: batches, and rows of a fixed length."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agnoload.batching.packing import PackedRows
from agnoload.errors import OptionError, StateError
from agnoload.streams.base import DerivedStream, IterableDataset
from agnoload.streams.iterators import (
    DerivedIterator,
    Lazy,
    OpenableStream,
    OpenOptions,
    StreamIterator,
    force,
    may_ask,
    note_record,
)
from agnoload.streams.shards import (
    ShardsIterator,
    lanes_of,
    need_length,
    need_shards,
    num_shards_of,
    open_stream,
    shard_length_of,
)
from agnoload.validate import brief, integer, items, positive

T_co = TypeVar("T_co", covariant=True)


class GroupedStream(DerivedStream[T_co]):
    """A stream whose every sample is made of some of `source` that follow each other.

    Of a source with shards each lane is grouped by itself, and is one shard here. So whoever reads it, a loader with
    any number of workers or a plain `for`, finds the same groups.
    """

    @property
    def num_shards(self) -> int:
        return max(1, min(lanes_of(self.source), need_shards(self.source)))

    def shard(self, number: int) -> Iterable[T_co]:
        return self.of(_Lane(self.source, number, self.num_shards))

    def open(self, options: OpenOptions) -> StreamIterator:
        if num_shards_of(self.source) is not None:
            return ShardsIterator(self, range(self.num_shards), options)
        return self.group(options)

    def group(self, options: OpenOptions) -> StreamIterator:
        """Begin a pass through a source without shards."""
        raise NotImplementedError


class _Lane(OpenableStream[T_co], IterableDataset[T_co]):
    """One lane of a stream with shards."""

    def __init__(self, source: Any, number: int, lanes: int) -> None:
        self.source = source
        self._shards = range(number, need_shards(source), lanes)

    def __len__(self) -> int:
        lengths = [shard_length_of(self.source, shard) for shard in self._shards]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            raise TypeError(f"the length is not known: a shard of {type(self.source).__name__} has none")
        return sum(known)

    def open(self, options: OpenOptions) -> StreamIterator:
        return ShardsIterator(self.source, self._shards, options)


class BatchedStream(GroupedStream[list[T_co]]):
    """Lists of `size` samples each, the last one of what is left: what `stream.batch(size)` gives.

    A source with shards is cut lane by lane, as a loader cuts it, so each of its lanes may end with a shorter list.
    What `map` was given before runs only for the samples that are delivered from here.
    """

    def __init__(self, source: Any, size: int) -> None:
        super().__init__(source)
        self.size = positive("the size of batch", size)

    def __len__(self) -> int:
        if num_shards_of(self.source) is None:
            return (need_length(self.source) + self.size - 1) // self.size
        return sum(len(self.of(_Lane(self.source, lane, self.num_shards))) for lane in range(self.num_shards))

    def group(self, options: OpenOptions) -> StreamIterator:
        return _BatchIterator(self, options)

    def __repr__(self) -> str:
        return f"{brief(self.source)}.batch({self.size})"


class _GroupIterator(DerivedIterator):
    """The state: that of the source, None where it has ended; whether it has; and what a subclass adds.

    A source that has ended is not asked for more, nor where it is: it may have gone back to its start.
    """

    def __init__(self, source: Any, options: OpenOptions, *added: Any) -> None:
        state = [None, False, *added] if options.state is None else options.state
        inner, self._ended, *self._added = items(state, "the place in a grouped stream", 2 + len(added))
        if not isinstance(self._ended, bool):
            raise StateError(f"whether a source has ended must be a bool in a state, got {self._ended!r:.200}")
        super().__init__(open_stream(source, options.inner(inner)))

    def more(self) -> tuple[Any, ...]:
        """The next raw sample of the source; none at its end."""
        if not self._ended:
            try:
                return (self._source.next_raw(),)
            except StopIteration:
                self._ended = True
        return ()

    def state(self) -> Any:
        inner = None if self._ended else self._source.state()
        return None if inner is None and not self._ended else [inner, self._ended]


class _BatchIterator(_GroupIterator):
    def __init__(self, stream: BatchedStream[Any], options: OpenOptions) -> None:
        super().__init__(stream.source, options._replace(size=stream.size))
        self._size = stream.size

    def next_raw(self) -> Lazy:
        raws: list[Any] = []
        while len(raws) < self._size and (more := self.more()):
            raws += more
        if not raws:
            raise StopIteration
        return Lazy((_force_all, raws))


def _force_all(raws: list[Any]) -> list[Any]:
    samples = []
    for raw in raws:
        try:
            samples.append(force(raw))
        except Exception as error:
            note_record(error, raw)
            raise
    return samples


class PackedStream(GroupedStream[dict[str, npt.NDArray[Any]]]):
    """Rows of `length` token ids, cut from the sequences of `source` one after the other: `stream.pack(length)`.

    A sample of the source is a flat array or list of integers, or a dict that holds one under `key`; what else is in
    the dict is dropped. A sequence that does not fit into its row continues in the next one. Rows are dicts of
    `tokens` (of the dtype of the sequences), `segment_ids` and `positions` (int32), as `PackedRows` has them: the
    pieces of a row are numbered from 1, 0 is padding, and places are counted from 0 within each piece. Only the last
    row is padded, with the token `value`; of a source with shards each lane has a last row. Every worker that reads the
    source must know how long its sequences are, so what `map` was given before runs in each.
    """

    def __init__(self, source: Any, length: int, *, key: Any = None, value: int = 0) -> None:
        super().__init__(source)
        self.length = positive("the length of pack", length)
        self.key = key
        self.value = integer("value of pack", value, -(1 << 63), "the token id of padding, an int")

    def __len__(self) -> int:
        raise TypeError("a packed stream has no length: it is not known before the stream was read")

    def group(self, options: OpenOptions) -> StreamIterator:
        return _PackIterator(self, options)

    def __repr__(self) -> str:
        return f"{brief(self.source)}.pack({self.length})"


class _PackIterator(_GroupIterator):
    """Its state adds what is left of the sequence that was cut last, and the dtype of that."""

    def __init__(self, stream: PackedStream, options: OpenOptions) -> None:
        super().__init__(stream.source, options, "", "int64")
        self._stream = stream
        self._rest = _saved_tokens(*self._added)

    def next_raw(self) -> Lazy:
        pieces, room = [], self._stream.length
        while room:
            if not self._rest.size:
                if not (more := self.more()):
                    break
                self._rest = self._tokens(*more)
                continue
            pieces.append(self._rest[:room])
            self._rest = self._rest[room:]
            room -= len(pieces[-1])
        if not pieces:
            raise StopIteration
        return Lazy((self._row, pieces))

    def _tokens(self, raw: Any) -> npt.NDArray[Any]:
        """The sequence of one sample of the source."""
        key = self._stream.key
        try:
            sample = may_ask(force, raw)
            found = sample if key is None else sample[key]
            tokens = np.asarray(found)
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise OptionError(
                    "pack needs token ids, flat arrays or lists of integers"
                    + (" or, with key=, dicts that hold one" if key is None else "")
                    + f", got {type(found).__name__} (shape {tokens.shape}, dtype {tokens.dtype})"
                )
        except Exception as error:
            note_record(error, raw)
            raise
        return tokens if tokens.size else _NONE

    def _row(self, pieces: list[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        lengths = np.array(list(map(len, pieces)))
        capacity, total = self._stream.length, int(lengths.sum())
        rows = PackedRows(np.zeros_like(lengths), np.cumsum(lengths) - lengths, lengths, 1, capacity, total / capacity)
        return {
            "tokens": rows.place(pieces, self._stream.value)[0],
            "segment_ids": rows.segment_ids[0],
            "positions": rows.positions[0],
        }

    def state(self) -> Any:
        state = super().state()
        if state is None:
            return None
        # As text: a list of ints takes 30 times as long, and this is asked for behind every batch.
        return [*state, base64.b64encode(self._rest.tobytes()).decode(), self._rest.dtype.str]


_NONE = np.zeros(0, np.int64)


def _saved_tokens(tokens: Any, dtype: Any) -> npt.NDArray[Any]:
    try:
        kind = np.dtype(dtype if isinstance(dtype, str) else "O")
        return np.frombuffer(base64.b64decode(tokens, validate=True), kind if kind.kind in "iu" else "O")
    except (TypeError, ValueError) as error:
        raise StateError(
            f"tokens in a state must be integers in base64, and their dtype, got {tokens!r:.200} and {dtype!r:.200}"
        ) from error
