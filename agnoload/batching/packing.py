"""Sequences packed into rows of a fixed length: for models that take full rows and tell sequences apart by segment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agnoload.batching.ragged import Ragged, fill_value, runs
from agnoload.batching.stacking import Array, new_array
from agnoload.errors import OptionError
from agnoload.protocols import Empty, IndexArray
from agnoload.validate import array_of, positive


class PackedRows(NamedTuple):
    """Where `pack_sequences` puts sequences: `rows` rows of `capacity` places, no sequence split.

    `row` and `start` (int64, one a sequence) say where it begins, `lengths` how long it is; `fill` is the share of the
    places that are not padding.

    >>> packing = pack_sequences([2, 3, 1], capacity=4)
    >>> packing.rows, packing.row, packing.start, packing.fill
    (2, array([1, 0, 0]), array([0, 0, 3]), 0.75)
    """

    row: IndexArray
    start: IndexArray
    lengths: IndexArray
    rows: int
    capacity: int
    fill: float

    @property
    def segment_ids(self) -> npt.NDArray[np.int32]:
        """Which sequence of its row each place belongs to, counted from 1, 0 for padding: int32, (rows, capacity)."""
        number = np.zeros(len(self.row), np.int64)
        kept = np.flatnonzero(self.lengths)  # a sequence without tokens has no number
        order = kept[np.lexsort((self.start[kept], self.row[kept]))]
        _, first, counts = np.unique(self.row[order], return_index=True, return_counts=True)
        number[order] = np.arange(len(order)) - np.repeat(first, counts) + 1
        return self._spread(np.repeat(number, self.lengths), np.zeros((self.rows, self.capacity), np.int32))

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Which place of its sequence each place is, 0 for padding: int32, (rows, capacity)."""
        places = runs(np.zeros_like(self.lengths), self.lengths)
        return self._spread(places, np.zeros((self.rows, self.capacity), np.int32))

    def _spread(self, numbers: Array, out: Array) -> Array:
        """Write numbers, one for each token, sequence by sequence, into an array of (rows, capacity, ...)."""
        flat = out.reshape((self.rows * self.capacity, *out.shape[2:]))
        flat[runs(self.row * self.capacity + self.start, self.lengths)] = numbers
        return out

    def place(self, sequences: Ragged | Iterable[Any], value: Any = 0, *, empty: Empty = np.empty) -> Array:
        """Write the sequences, of those lengths, into one array of shape (rows, capacity, ...), the rest is `value`.

        >>> packing = pack_sequences([2, 3, 1], capacity=4)
        >>> packing.place([[1, 2], [3, 4, 5], [6]])
        array([[3, 4, 5, 6],
               [1, 2, 0, 0]])
        """
        ragged = sequences if isinstance(sequences, Ragged) else Ragged.from_list(sequences)
        if not np.array_equal(ragged.lengths, self.lengths):
            raise OptionError("the sequences must have the lengths that were packed, in the same order")
        values = ragged.values
        out = new_array(empty, (self.rows, self.capacity, *values.shape[1:]), values.dtype)
        out[...] = fill_value(value, values.dtype)
        return self._spread(values, out)


def pack_sequences(lengths: Any, capacity: int) -> PackedRows:
    """Pack sequences into as few rows of `capacity` places as first-fit decreasing finds, none of them split.

    The longest come first (equal ones in their own order), each into the first row that has room: at most 11/9 of the
    least possible number of rows, plus one (Dosa, "The tight bound of first fit decreasing bin-packing algorithm",
    ESCAPE 2007). Work goes with the number of *different* lengths times that of rows. `OptionError` for a sequence
    longer than a row.

    >>> packing = pack_sequences([2, 3, 1], capacity=4)
    >>> packing.segment_ids
    array([[1, 1, 1, 2],
           [1, 1, 0, 0]], dtype=int32)
    >>> packing.positions
    array([[0, 1, 2, 0],
           [0, 1, 0, 0]], dtype=int32)
    >>> packing.row, packing.fill
    (array([1, 0, 0]), 0.75)
    """
    positive("capacity", capacity)
    array = array_of("lengths", lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise OptionError(f"lengths must be a flat list of integers, got shape {array.shape} and dtype {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array > capacity))
    if bad.size:
        raise OptionError(
            f"every length must lie between 0 and the capacity, {capacity}, but sequence {bad[0]} has length "
            f"{array[bad[0]]}; cut it, leave it out, or raise the capacity"
        )
    array = array.astype(np.int64, copy=False)
    row, start, rows = _first_fit(array, capacity)
    fill = int(array.sum()) / (rows * capacity) if rows else 1.0
    return PackedRows(row, start, array, rows, int(capacity), fill)


def _first_fit(lengths: IndexArray, capacity: int) -> tuple[IndexArray, IndexArray, int]:
    """Row and start of each sequence, and the number of rows; all sequences of one length are placed at once.

    Equal sequences fill the first row with room until it has none, then the next: each row takes as many as fit into
    its room, until there are no more. Rows that are not open yet come last, with all their room.
    """
    row = np.zeros(len(lengths), np.int64)
    start = np.zeros(len(lengths), np.int64)
    room = np.full(len(lengths), capacity)
    rows = 0
    order = np.argsort(-lengths, kind="stable")
    sizes, begins, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    for size, begin, count in zip((-sizes).tolist(), begins.tolist(), counts.tolist(), strict=True):
        members = order[begin : begin + count]
        if size == 0:  # needs no room: at the end of the first row
            start[members] = capacity - room[0]
            rows = max(rows, 1)
            break
        open_to = np.flatnonzero(room[: rows + count] >= size)[:count]
        fits = room[open_to] // size
        taken = np.clip(count - (np.cumsum(fits) - fits), 0, fits)
        row[members] = np.repeat(open_to, taken)
        start[members] = runs(capacity - room[open_to], taken, size)
        room[open_to] -= size * taken
        rows = max(rows, int(row[members[-1]]) + 1)
    return row, start, rows
