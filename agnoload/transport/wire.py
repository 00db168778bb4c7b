"""A batch to bytes in a slot and back; the only file that pickles batches.

Pickle protocol 5 walks any nesting and hands out each contiguous array as a buffer. A buffer that already lies in the
slot, because `collate` wrote it there, is known by its address and costs nothing; any other is copied in once. Behind
the arrays lie the header (the pickle without them) and the spans (offset and length of each). Decoding reads the
header and gives arrays that are views of the slot, writable, and hanging from its lease.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, NamedTuple

import numpy as np

from agnoload.transport import byvalue
from agnoload.transport.arena import Arena, Slot, aligned


class Place(NamedTuple):
    """Where in a slot the parts of an encoded batch lie."""

    offset: int
    """Of the header; the spans stand behind it, aligned."""
    nbytes: int
    """Of the header."""
    spans: int
    """How many arrays."""
    end: int
    """Of everything."""


def encode(value: Any, slot: Slot) -> Place:
    """Lay `value` into the slot, behind what `slot.empty` has given out.

    What plain pickle refuses (a class of a notebook, a lambda) travels by value, which is slower.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        header = pickle.dumps(value, 5, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError):
        buffers.clear()
        header = byvalue.dumps(value, buffers.append)
    spans: list[int] = []
    for buffer in buffers:
        with buffer.raw() as raw:
            nbytes = raw.nbytes
            if nbytes == 0:
                spans += (0, 0)
                continue
            address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
            offset = slot.offset_of(address, nbytes)
            spans += (slot.put(raw) if offset is None else offset, nbytes)
    offset = slot.put(header)
    if spans:
        slot.put(struct.pack(f"{len(spans)}q", *spans))
    return Place(offset, len(header), len(buffers), slot.used)


def decode(place: Place, slot: Slot, arena: Arena | None, copy: bool = False) -> Any:
    """The value that was laid into the slot, with a lease from `arena` at the bottom of its arrays.

    With `copy` (or without an arena) the arrays get memory of their own, and nothing refers to the slot afterwards.
    """
    slot.reach(place.end)
    view = slot.view
    header = view[place.offset : place.offset + place.nbytes]
    if not place.spans:
        return pickle.loads(header)
    start = aligned(place.offset + place.nbytes)
    spans = struct.unpack_from(f"{2 * place.spans}q", view, start)
    pairs = zip(spans[::2], spans[1::2], strict=True)
    if copy or arena is None:
        return pickle.loads(header, buffers=[bytearray(view[offset : offset + n]) for offset, n in pairs])
    memory = memoryview(arena.lend(slot, start).array())
    return pickle.loads(header, buffers=[memory[offset : offset + n] for offset, n in pairs])
