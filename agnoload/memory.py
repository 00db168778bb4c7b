"""Where generators of Python and NumPy keep their state: read and written there, ten times as fast as by methods.

Whoever holds one of these holds the generator too. Each place is found by what it must hold, never by a number that is
right for one version. Where it is not found, the answer is None, and the methods serve.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
import sys
from typing import Any

import numpy as np

PYTHONS_OWN: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
"""Behind the functions of `random`."""
NUMPYS_OWN: np.random.RandomState = np.random.standard_normal.__self__  # type: ignore[attr-defined]
"""Behind the functions of `np.random`."""

TWISTER = 312
"""A Mersenne Twister is this many words of 64 bits."""

_WORDS = TWISTER * 8
_UINT64: Any = np.dtype(np.uint64).char  # "L" or "Q", by the machine; views are copied where they say the same
_PHILOX = struct.Struct("=ii32xiI16s4Q")
"""A place among four numbers drawn at once, these, whether half a number is left and that half; key; counter."""


def _span(address: int, length: int) -> memoryview:
    """So many bytes of memory, to read and to write; whose they are must be kept alive."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _inside(thing: Any, kind: Any) -> bytes:
    """What an object holds by itself; nothing where objects do not lie at their `id`."""
    return ctypes.string_at(id(thing), kind.__basicsize__) if sys.implementation.name == "cpython" else b""


class Twister:
    """The memory of one Mersenne Twister, 624 words and a place among them."""

    def __init__(self, address: int, place_first: bool) -> None:
        self._all = _span(address, 4 + _WORDS)
        self._words = (self._all[4:] if place_first else self._all[:_WORDS]).cast(_UINT64)
        self._place = (self._all[:4] if place_first else self._all[_WORDS:]).cast("I")

    def read(self) -> bytes:
        return self._all.tobytes()

    def write(self, block: bytes) -> None:
        self._all[:] = block

    def fill(self, words: memoryview) -> None:
        """New words, `TWISTER` of them as `uint64`; none of what they give has been given yet."""
        self._words[:] = words
        self._place[0] = 2 * TWISTER


def twister_of_python(generator: random.Random) -> Twister | None:
    words = random.Random.getstate(generator)[1]
    offset = _inside(generator, _random.Random).find(struct.pack("=625I", words[624], *words[:624]))
    return None if offset < 0 else Twister(id(generator) + offset, place_first=True)


def twister_of_numpy(source: Any) -> Twister | None:
    if type(source) is not np.random.MT19937:
        return None
    return Twister(source.ctypes.state_address, place_first=False)


class Philox:
    """The memory of one Philox: what it has drawn but not given yet, its key and its counter."""

    def __init__(self, address: int) -> None:
        self._all = _span(address, _PHILOX.size)

    def rewind(self, key: bytes, start: int, position: int, purpose: int, epoch: int) -> None:
        """To the first number of a key and a counter."""
        _PHILOX.pack_into(self._all, 0, 4, 0, 0, 0, key, start, position, purpose, epoch)


def philox_of(source: np.random.Philox) -> Philox | None:
    """The memory of a Philox; its state is lost."""
    number = iter(range(0x1122334455667788, 1 << 62, 0x0102030405060708))
    key, counter, buffer = (np.array([next(number) for _ in range(n)], np.uint64) for n in (2, 4, 4))
    half = 0x5A6B7C8D
    source.state = {
        "bit_generator": "Philox", "state": {"counter": counter, "key": key}, "buffer": buffer, "buffer_pos": 3,
        "has_uint32": 1, "uinteger": half,
    }  # fmt: skip
    memory = _inside(source, np.random.Philox)
    drawn = struct.pack("=i4x", 3) + buffer.tobytes() + struct.pack("=iI", 1, half)
    offset = memory.find(drawn + key.tobytes() + counter.tobytes())
    return None if offset < 0 else Philox(id(source) + offset)


class Normal:
    """The normal number that a `RandomState` may hold back, and whether it does."""

    def __init__(self, address: int) -> None:
        self._all = _span(address, 16)

    def read(self) -> bytes:
        return self._all.tobytes()

    def write(self, held: bytes) -> None:
        self._all[:] = held

    def forget(self) -> None:
        self._all[:] = bytes(16)


def normal_of(generator: np.random.RandomState) -> Normal | None:
    if type(generator) is not np.random.RandomState or _NORMAL < 0:
        return None
    return Normal(id(generator) + _NORMAL)


def _find_normal() -> int:
    """How far into a `RandomState` it lies."""
    generator = np.random.RandomState(1)
    generator.standard_normal()
    held: Any = generator.get_state(legacy=False)
    return _inside(generator, np.random.RandomState).find(struct.pack("=i4xd", 1, held["gauss"]))


_NORMAL = _find_normal()
