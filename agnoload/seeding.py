"""Every random number is a function of `(seed, epoch, rank, position)` and a purpose.

The key of a stream of numbers is a Philox key made from the seed, and a counter whose four 64-bit words are
`(draws, position, rank and purpose, epoch)`: the fields lie side by side, so no two keys can collide, as `seed + index`
would. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import ctypes
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import AgnoloadError, OptionError


class Purpose(IntEnum):
    """What a stream of numbers is for; part of the key, and of the saved format: never renumber."""

    SAMPLE = 0
    COLLATE = 1
    ORDER = 2
    GLOBALS = 3
    REPLACE = 4
    STREAM_SHUFFLE = 5
    MIXTURE = 6
    SPLIT = 7
    CLASSES = 8
    WITHIN_CLASS = 9
    ATTRIBUTES = 10
    SHARDS = 11


def draw_seed() -> int:
    """A fresh seed of 63 bits from the operating system."""
    return secrets.randbits(63)


def check_seed(seed: Any, name: str = "seed") -> int:
    """A seed as a non-negative Python int, or `OptionError`."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise OptionError(f"{name} must be a non-negative int or None, got {seed!r}")
    return int(seed)


@lru_cache(maxsize=256)
def _philox_key(seed: int) -> npt.NDArray[np.uint64]:
    return np.random.SeedSequence(seed).generate_state(2, np.uint64).astype(np.uint64, copy=False)


def counter(epoch: int, rank: int, position: int, purpose: Purpose) -> npt.NDArray[np.uint64]:
    """The four counter words of a key."""
    return np.array([0, position, rank | (purpose << 32), epoch], np.uint64)


def generator(seed: int, epoch: int, purpose: Purpose, position: int = 0, rank: int = 0) -> np.random.Generator:
    """A fresh generator for one key; some 25 microseconds, so not for use once a sample.

    >>> a, b = (generator(7, 0, Purpose.ORDER).integers(1 << 62) for _ in range(2))
    >>> bool(a == b)
    True
    """
    words = counter(epoch, rank, position, purpose)
    return np.random.Generator(np.random.Philox(key=_philox_key(seed), counter=words))


class Rewinder:
    """One generator, set to key after key: some 3 microseconds each instead of the 25 of a new one."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self.generator = np.random.Generator(self._philox)
        self._words = np.zeros(4, np.uint64)
        self._inner: dict[str, Any] = {"counter": self._words, "key": None}
        self._state: Any = {
            "bit_generator": "Philox",
            "state": self._inner,
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def rewind(self, seed: int, epoch: int, purpose: Purpose, position: int, rank: int) -> np.random.Generator:
        words = self._words
        words[0] = 0
        words[1] = position
        words[2] = rank | (purpose << 32)
        words[3] = epoch
        self._inner["key"] = _philox_key(seed)
        self._philox.state = self._state
        return self.generator

    @property
    def philox(self) -> np.random.Philox:
        """The bit generator below."""
        return self._philox


class SampleContext:
    """Where a request stands: what `sample_rng()` and streams look up; moved from sample to sample.

    `item` is the number, within the request, of the sample being loaded.
    """

    __slots__ = ("epoch", "first", "item", "made", "purpose", "rank", "rewinder", "seed", "stride")

    def __init__(self, rewinder: Rewinder) -> None:
        self.rewinder = rewinder
        self.seed = 0
        self.epoch = 0
        self.first = 0
        self.stride = 1
        self.rank = 0
        self.item = 0
        self.purpose = Purpose.SAMPLE
        self.made: tuple[int, int, Purpose] | None = None

    def at(self, seed: int, epoch: int, first: int, stride: int, rank: int) -> None:
        """Move to the first sample of another request."""
        self.seed = seed
        self.epoch = epoch
        self.first = first
        self.stride = stride
        self.rank = rank
        self.item = 0
        self.purpose = Purpose.SAMPLE
        self.made = None

    @property
    def position(self) -> int:
        return self.first + self.item * self.stride

    def rng(self) -> np.random.Generator:
        wanted = (self.epoch, self.position, self.purpose)
        if self.made != wanted:
            self.made = wanted
            self.rewinder.rewind(self.seed, self.epoch, self.purpose, wanted[1], self.rank)
        return self.rewinder.generator


_context: ContextVar[SampleContext | None] = ContextVar("agnoload_sample", default=None)


def sample_rng() -> np.random.Generator:
    """The random generator of the sample being loaded, the same whoever loads it and when.

    Call it in `__getitem__` (or in a `collate_fn`, where it belongs to the batch) and draw from what it gives; do not
    keep it for the next sample. It costs 3 microseconds when it is asked for and nothing otherwise. Anywhere else it is
    an `AgnoloadError`.

    >>> import agnoload
    >>> class Noisy(agnoload.Dataset):
    ...     def __len__(self): return 4
    ...     def __getitem__(self, index): return index + agnoload.sample_rng().random()
    >>> a, b = (next(iter(agnoload.DataLoader(Noisy(), 4, seed=1))) for _ in range(2))
    >>> bool((a == b).all())
    True
    """
    context = _context.get()
    if context is None:
        raise AgnoloadError(
            "sample_rng() must be called while a sample is being loaded (in __getitem__, a stream or a collate_fn); "
            "there is none now: elsewhere make a generator of your own with numpy.random.default_rng(seed)"
        )
    return context.rng()


def current() -> SampleContext | None:
    """The context of the request being loaded in this thread, for streams and samplers of this library."""
    return _context.get()


@contextmanager
def use(context: SampleContext | None) -> Iterator[None]:
    """Make `context` the current one for a while."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


class ProcessGenerators:
    """The process-wide generators `random` and `np.random`: seeded, saved and put back in microseconds.

    The state of a Mersenne Twister is 2,496 bytes and a position. NumPy's own way to read or set it takes 30
    microseconds, so the bytes are copied directly. Whether `np.random` holds back a second normal number, which is part
    of its state too, is found by drawing one: if the twister has not moved, it was the one held back.
    """

    _BYTES = 624 * 4

    def __init__(self) -> None:
        self._source: Any = None
        self._address = 0
        self._saved: tuple[Any, Any, Any] | None = None

    def seed(self, philox: np.random.Philox) -> None:
        """Seed both from what a generator gives next."""
        random.seed(int.from_bytes(philox.random_raw(2).tobytes(), "little"))
        words = philox.random_raw(self._BYTES // 8).tobytes()
        if not self._find():  # something else drives np.random: a twister stands in for it
            np.random.set_bit_generator(np.random.MT19937())  # type: ignore[attr-defined]
            self._find()
        np.random.seed(0)  # forgets a normal number held back
        ctypes.memmove(self._address, words, self._BYTES)

    def save(self) -> None:
        """Remember both states, for `restore`; NumPy's generator may have moved until then."""
        self._saved = (random.getstate(), np.random.get_bit_generator(), self._numpy_state())  # type: ignore[attr-defined]

    def restore(self, keep: bool = False) -> None:
        """Put back what was saved; `keep` it to do so again."""
        if self._saved is None:
            return
        python, source, state = self._saved
        if not keep:
            self._saved = None
        random.setstate(python)
        if np.random.get_bit_generator() is not source:  # type: ignore[attr-defined]
            np.random.set_bit_generator(source)  # type: ignore[attr-defined]
        if isinstance(state, bytes) and self._find():
            np.random.seed(0)
            ctypes.memmove(self._address, state, len(state))
        else:
            np.random.set_state(state)

    def _find(self) -> bool:
        """Look up where the twister's state lies; False if `np.random` runs on something else."""
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if source is not self._source:
            self._source = source
            self._address = source.ctypes.state_address if type(source) is np.random.MT19937 else 0
        return self._address != 0

    def _numpy_state(self) -> Any:
        if not self._find():
            return np.random.get_state(legacy=False)
        before = ctypes.string_at(self._address, self._BYTES + 4)
        held = np.random.standard_normal()
        if ctypes.string_at(self._address, self._BYTES + 4) != before:
            return before  # nothing was held back; restoring the bytes undoes this draw
        state = np.random.get_state(legacy=False)
        state["has_gauss"], state["gauss"] = 1, held
        return state
