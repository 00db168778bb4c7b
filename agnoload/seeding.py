"""Every random number is a function of `(seed, epoch, rank, position)` and a purpose.

The key of a stream of numbers is a Philox key made from the seed, and a counter whose four 64-bit words are
`(draws, position, rank and purpose, epoch)`: the fields lie side by side, so no two keys can collide, as `seed + index`
would. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from agnoload.backend import registry
from agnoload.errors import AgnoloadError, OptionError

PYTHON_GLOBAL: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of `random`."""
NUMPY_GLOBAL: np.random.RandomState = np.random.standard_normal.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of `np.random`."""


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

    def __init__(self, number: int) -> None:
        self.word = number << 32
        """Its part of a counter's word; shifting a member of an enumeration takes as long as rewinding a generator."""


def draw_seed() -> int:
    """A fresh seed of 63 bits from the operating system."""
    return secrets.randbits(63)


def check_seed(seed: Any, name: str = "seed") -> int:
    """A seed as a non-negative Python int, or `OptionError`."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise OptionError(f"{name} must be a non-negative int or None, got {seed!r}")
    return int(seed)


def draw_from(generator: Any) -> int:
    """A seed of 63 bits from an int, or from a generator of NumPy's, Python's or a loaded framework's."""
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(1 << 63, dtype=np.uint64))
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(1 << 63, dtype=np.uint64))
    if isinstance(generator, random.Random):
        return generator.getrandbits(63)
    if isinstance(generator, (int, np.integer)) and not isinstance(generator, bool):
        return check_seed(generator, "generator")
    seed = registry.seed_from(generator)
    if seed is None:
        raise no_generator(generator)
    return seed


def no_generator(thing: Any) -> OptionError:
    """The error for something that no seed can be drawn from."""
    kind = type(thing)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return OptionError(
        "generator must be a non-negative int, a generator of NumPy's or Python's, or one of a framework with an "
        f"installed backend, got {thing!r:.80} ({name})"
    )


@lru_cache(maxsize=256)
def _philox_key(seed: int) -> tuple[int, int]:
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint64).tolist()
    return first, second


def generator(seed: int, epoch: int, purpose: Purpose, position: int = 0, rank: int = 0) -> np.random.Generator:
    """A fresh generator for one key; some 25 microseconds, so not for use once a sample.

    >>> a, b = (generator(7, 0, Purpose.ORDER).integers(1 << 62) for _ in range(2))
    >>> bool(a == b)
    True
    """
    return Rewinder().rewind(seed, epoch, purpose, position, rank)


class Rewinder:
    """One generator, set to key after key: a microsecond each, where a new one takes 25."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(0)
        self.generator = np.random.Generator(self.philox)
        self._words: dict[str, Any] = {}
        self._state: Any = {"bit_generator": "Philox", "state": self._words, "buffer": (0, 0, 0, 0), "buffer_pos": 4}
        self._state |= {"has_uint32": 0, "uinteger": 0}

    def rewind(
        self, seed: int, epoch: int, purpose: Purpose, position: int, rank: int, *, start: int = 0
    ) -> np.random.Generator:
        """The generator at the key's first number, or `start` times four numbers behind it."""
        self._words["key"] = _philox_key(seed)
        self._words["counter"] = start, position, rank | purpose.word, epoch
        self.philox.state = self._state
        return self.generator


class SampleContext:
    """Where a request stands: what `sample_rng()` and streams look up; moved from sample to sample.

    `item` is the number, within the request, of the sample being loaded.
    """

    __slots__ = ("epoch", "first", "item", "made", "purpose", "rank", "rewinder", "seed", "stride", "undisturbed")

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
        self.undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context behind which all generators are as they were before it, where somebody has set them."""

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


# One for each thread: worker threads load side by side, each its own sample.
_context: ContextVar[SampleContext | None] = ContextVar("agnoload_sample", default=None)


def sample_rng() -> np.random.Generator:
    """The random generator of the sample being loaded, the same whoever loads it and when.

    Call it in `__getitem__` (or in a `collate_fn`, where it belongs to the batch) and draw from what it gives; do not
    keep it for the next sample. It costs a microsecond when it is asked for and nothing otherwise. Anywhere else it is
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


make_current: Callable[[SampleContext | None], Any] = _context.set
"""Put a context, or none, into the place of the current one; whoever does puts the former one back, in a `finally`."""


@contextmanager
def use(context: SampleContext | None) -> Iterator[None]:
    """Make `context` the current one for a while."""
    outer = current()
    try:
        make_current(context)
        yield
    finally:
        make_current(outer)
