"""A batch to bytes in a slot and back; the only file that pickles batches.

Pickle walks any nesting. Each array is replaced by where it lies in the slot: one that `collate` wrote there costs
nothing, any other is copied in once. Behind the arrays lies the header, which is the pickle without them. Decoding
gives arrays that are views of the slot, writable, and hanging from its lease.
"""

from __future__ import annotations

import io
import pickle
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agnoload.transport import pickling
from agnoload.transport.arena import Arena, Slot
from agnoload.transport.memory import aligned_empty

_WRITABLE = pickle.PickleBuffer(bytearray(1))
_READ_ONLY = pickle.PickleBuffer(b"\0")
"""They stand for the slot's memory in an array's reduced form, and the memory takes their place in decoding."""

SMALL, SHARE = 1 << 16, 64
"""An array below `SMALL` bytes that is less than 1 / `SHARE` of a larger batch gets memory of its own: whoever keeps it
alone, such as the labels, must not keep the whole batch. Many equal fields stay where they are; all would be copied."""


class EncodedSpan(NamedTuple):
    """Where in a slot the parts of an encoded batch lie."""

    offset: int
    """Of the header; all arrays lie before it."""
    nbytes: int
    """Of the header."""
    arrays: int
    """How many arrays."""
    end: int
    """Of everything."""


class _Arrays:
    """Replaces arrays by their place in a slot; a mix-in for the two picklers."""

    def __init__(self, stream: io.BytesIO, slot: Slot) -> None:
        super().__init__(stream, 5, buffer_callback=_in_band)  # type: ignore[call-arg]
        self._slot = slot
        self.arrays = 0

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray:
            return pickling.class_by_name(value) if isinstance(value, type) else pickling.as_array(value)
        dtype = value.dtype
        if dtype.hasobject:
            return NotImplemented
        if not value.nbytes:  # by itself NumPy would lose the byte order of dates
            return np.empty, (value.shape, dtype)
        self.arrays += 1
        kind = dtype.char if dtype.isbuiltin == 1 else dtype
        memory = _WRITABLE if value.flags.writeable else _READ_ONLY
        used = self._slot.used
        place = self._slot.place(value)
        copied_in = self._slot.used != used  # larger ones may follow
        make = _small_array if value.nbytes < SMALL and (copied_in or used >= SMALL) else np.ndarray
        return make, (value.shape, kind, memory, *place)


class _Pickler(_Arrays, pickle.Pickler):
    pass


class _ByValue(_Arrays, pickling.Pickler):
    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        return pickling.Pickler.reducer_override(self, value) if reduced is NotImplemented else reduced


def _small_array(shape: Any, kind: Any, memory: Any, offset: int, strides: Any) -> npt.NDArray[Any]:
    """A small array, with memory of its own if by itself it would keep that of a large batch."""
    array = np.ndarray(shape, kind, memory, offset, strides)
    # Memory that is pinned, or read-only, comes as a memoryview: such arrays stay where they are, and what they are.
    if type(memory) is np.ndarray and memory.nbytes >= SMALL and array.nbytes * SHARE < memory.nbytes:
        return array.copy("K")
    return array


def _in_band(buffer: pickle.PickleBuffer) -> bool:
    """Memory of objects other than arrays travels within the header."""
    return buffer is not _WRITABLE and buffer is not _READ_ONLY


def encode(value: Any, slot: Slot) -> EncodedSpan:
    """Lay `value` into the slot, behind what `slot.empty` has given out.

    What plain pickle refuses (a class of a notebook, a lambda) travels by value, which is slower.
    """
    used = slot.used
    stream = io.BytesIO()
    pickler: _Pickler | _ByValue = _Pickler(stream, slot)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        slot.used = used
        stream = io.BytesIO()
        pickler = _ByValue(stream, slot)
        pickler.dump(value)
    header = stream.getbuffer()
    return EncodedSpan(slot.put(header), len(header), pickler.arrays, slot.used)


def decode(span: EncodedSpan, slot: Slot, arena: Arena | None) -> Any:
    """The value that was laid into the slot, with a lease from `arena` at the bottom of its arrays.

    Without an arena the arrays get memory of their own, and nothing refers to the slot afterwards.
    """
    slot.reach(span.end)
    header = slot.view[span.offset : span.offset + span.nbytes]
    if not span.arrays:
        return pickle.loads(header)
    if arena is not None:
        memory: Any = np.asarray(arena.lend(slot, span.offset))
        if arena.pinned:
            memory = memoryview(memory)
    else:
        memory = aligned_empty(span.offset)
        memory[:] = slot.bytes[: span.offset]
    return pickle.loads(header, buffers=repeat(memory))
