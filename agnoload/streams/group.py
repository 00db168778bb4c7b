"""Several samples of a stream as one: the passes of `batch` and `pack`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.batching.packing import PackedRows
from agnoload.errors import OptionError, StateError
from agnoload.streams.iterators import DerivedIterator, Lazy, OpenOptions, force, may_ask, note_record
from agnoload.streams.shards import open_stream
from agnoload.validate import items


class GroupIterator(DerivedIterator):
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


class BatchIterator(GroupIterator):
    def __init__(self, size: int, source: Any, options: OpenOptions) -> None:
        super().__init__(source, options._replace(size=size))  # for a mixture inside, whose shares are of these batches
        self._size = size

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


class PackIterator(GroupIterator):
    """Its state adds what is left of the sequence that was cut last, and the dtype of that."""

    def __init__(self, length: int, key: Any, value: int, source: Any, options: OpenOptions) -> None:
        super().__init__(source, options, "", "int64")
        self._length = length
        self._key = key
        self._value = value
        tokens, kind = self._added
        try:
            dtype = np.dtype(kind if isinstance(kind, str) else "O")
            self._rest = np.frombuffer(base64.b64decode(tokens, validate=True), dtype if dtype.kind in "iu" else "O")
        except (TypeError, ValueError) as error:
            raise StateError(
                f"tokens in a state must be integers in base64, and their dtype, got {tokens!r:.200} and {kind!r:.200}"
            ) from error

    def next_raw(self) -> Lazy:
        pieces, room = [], self._length
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
        try:
            sample = may_ask(force, raw)
            found = sample if self._key is None else sample[self._key]
            tokens = np.asarray(found)
            if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
                raise OptionError(
                    "pack needs token ids, flat arrays or lists of integers"
                    + (" or, with key=, dicts that hold one" if self._key is None else "")
                    + f", got {type(found).__name__} (shape {tokens.shape}, dtype {tokens.dtype})"
                )
        except Exception as error:
            note_record(error, raw)
            raise
        return tokens if tokens.size else np.zeros(0, np.int64)  # an empty list is an array of floats

    def _row(self, pieces: list[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        lengths = np.array(list(map(len, pieces)))
        fill = int(lengths.sum()) / self._length
        rows = PackedRows(np.zeros_like(lengths), np.cumsum(lengths) - lengths, lengths, 1, self._length, fill)
        return {
            "tokens": rows.place(pieces, self._value)[0],
            "segment_ids": rows.segment_ids[0],
            "positions": rows.positions[0],
        }

    def state(self) -> Any:
        state = super().state()
        if state is None:
            return None
        # As text: a list of ints takes 30 times as long, and this is asked for after every batch.
        return [*state, base64.b64encode(self._rest.tobytes()).decode(), self._rest.dtype.str]
