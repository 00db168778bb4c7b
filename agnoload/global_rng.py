"""The random generators that user code draws from: the process's own, and those that the user's objects keep.

Each request seeds them from its key before its first sample, so the draws do not depend on which process loads a batch,
or when. In a worker process the generators are the worker's own. In the user's process their states are put back.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from agnoload import seeding
from agnoload.backend import registry
from agnoload.backend.base import Backend
from agnoload.inspect import walk_objects
from agnoload.seeding import NUMPY_GLOBAL, PYTHON_GLOBAL, Purpose, Rewinder, SampleContext

Restore = Callable[[], object]
"""Puts a state back; it may be called more than once."""

_current_bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
_lend: Callable[[Any], None] = np.random.set_bit_generator  # type: ignore[attr-defined]


class GlobalRng:
    """What `random`, `np.random` and the loaded frameworks draw from when nobody passes a generator.

    `np.random` borrows a bit generator of ours, so the user's own is not touched, whatever its kind. It is an MT19937,
    as NumPy's own: user code may call `np.random.seed`. Borrowing costs 1 microsecond where `np.random.get_state` and
    `set_state` cost 200; the price is that `np.random` drops the second normal number of a pair that it holds back.
    """

    def __init__(self) -> None:
        self._lent = np.random.MT19937(0)

    def seed(self, philox: np.random.Philox) -> None:
        """Seed all of them, as a user would, from the next numbers of `philox`."""
        python, numpy, frameworks = philox.random_raw(3).tolist()  # one number for all frameworks, loaded or not
        random.seed(python)
        _lend(self._lent)
        np.random.seed(numpy & 0xFFFFFFFF)  # one number: NumPy takes 20 microseconds to check an array of two
        for backend in registry.loaded_backends():
            backend.seed(frameworks)

    @staticmethod
    def save() -> Restore:
        """Returns what puts their states back. The bit generator of `np.random` is kept as an object, not copied."""
        python, source = random.getstate(), _current_bit_generator()
        frameworks = [(backend, backend.rng_state()) for backend in registry.loaded_backends()]

        def restore() -> None:
            random.setstate(python)
            _lend(source)
            for backend, state in frameworks:
                backend.set_rng_state(state)

        return restore


class IsolatedGlobalRng:
    """A context in which the global generators continue a stream of their own, which a key starts.

    Code inside neither reads nor advances the user's generators, and draws the same in every run.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        rewinder = Rewinder()
        rewinder.rewind(seed, epoch, Purpose.ORDER, 0, 0)
        self._philox = rewinder.philox
        self._global = GlobalRng()
        self._own: Restore | None = None
        self._users: Restore | None = None

    def __enter__(self) -> None:
        self._users = self._global.save()
        if self._own is None:
            self._global.seed(self._philox)
        else:
            self._own()

    def __exit__(self, *error: object) -> None:
        try:
            self._own = self._global.save()
        finally:
            self.restore()

    def restore(self) -> None:
        """Put back what is the user's. Call it once more around the context: an interrupt may come at any step."""
        if self._users is not None:
            self._users()
            self._users = None


class GlobalRngMonitor:
    """Says whether anybody has drawn from the global generators since it was made."""

    def __init__(self) -> None:
        self._before = self._states()

    def drawn(self) -> list[str]:
        """The names of the generators that were drawn from."""
        now = self._states()
        return [name for name in now if repr(now[name]) != repr(self._before.get(name))]

    def _states(self) -> dict[str, Any]:
        state: Any = np.random.get_state(legacy=False)
        found: dict[str, Any] = {"random": random.getstate(), "np.random": (state["state"], state["has_gauss"])}
        for backend in registry.loaded_backends():
            rng = backend.rng_state()
            array = backend.to_numpy(rng)
            found[backend.name] = rng if array is None else array.tobytes()
        return found


# ---------------------------------------------------------------------------------------------- on the user's objects


class FoundGenerator(NamedTuple):
    """A generator that the user's objects keep."""

    path: str
    generator: Any
    seed: Callable[[np.random.Philox], object]
    """Seed it from the next numbers of a Philox."""
    save: Callable[[], Restore]
    """Return what puts its state back; it may move the state."""
    reached: bool = True
    """Whether a seed reaches all that is drawn: not where a user's class draws from elsewhere, nor in a long container,
    of which only the first entry was looked at."""

    def works(self) -> bool:
        """Whether it can be seeded and put back. Some were never initialised, or have no state, or take no seed."""
        if not self.reached:
            return False
        try:
            restore = self.save()
            self.seed(np.random.Philox(0))
            restore()
        except Exception:
            return False
        return True


def find_generators(roots: Mapping[str, Any]) -> list[FoundGenerator]:
    """The generators that some objects keep, each with the path to it, in the same order in every process.

    >>> class Noisy: ...
    >>> noisy = Noisy()
    >>> noisy.transform = Noisy()
    >>> noisy.transform.rng = np.random.default_rng(0)
    >>> [found.path for found in find_generators({"dataset": noisy})]
    ['dataset.transform.rng']
    """
    return [found for visited in walk_objects(roots) if (found := _generator_at(*visited)) is not None]


def _generator_at(path: str, thing: Any, one_of_many: bool) -> FoundGenerator | None:
    kind, reached = type(thing), not one_of_many  # not isinstance, which believes an object that pretends
    controls: tuple[Callable[[np.random.Philox], object], Callable[[], Restore]]
    if thing is PYTHON_GLOBAL or thing is NUMPY_GLOBAL:
        return None
    if issubclass(kind, random.Random):
        # A user's class may draw from elsewhere, as SystemRandom does.
        reached &= (kind.random, kind.getrandbits) == (random.Random.random, random.Random.getrandbits)
        controls = (
            lambda philox: random.Random.seed(thing, int(philox.random_raw())),
            lambda: partial(random.Random.setstate, thing, random.Random.getstate(thing)),
        )
    elif issubclass(kind, np.random.RandomState):
        controls = (
            lambda philox: thing.seed(philox.random_raw(1).view(np.uint32)),
            lambda: partial(thing.set_state, thing.get_state(legacy=False)),
        )
    elif issubclass(kind, (np.random.Generator, np.random.BitGenerator)):
        source = thing.bit_generator if issubclass(kind, np.random.Generator) else thing
        controls = partial(_seed_bits, source), lambda: partial(setattr, source, "state", source.state)
    elif (backend := _backend_of(thing)) is not None:
        controls = (
            lambda philox: backend.reseed(thing, int(philox.random_raw())),
            lambda: backend.reseed(thing, 0) or nullcontext,
        )
    else:
        return None
    seed, save = controls
    return FoundGenerator(path, thing, seed, save, reached)


def _seed_bits(generator: Any, philox: np.random.Philox) -> None:
    if type(generator) is np.random.PCG64:  # NumPy's default; a tenth of the time that making a new one takes
        words = int.from_bytes(philox.random_raw(4).tobytes(), "little")
        inner: Any = {"state": words >> 128, "inc": (words & ((1 << 128) - 1)) | 1}  # an increment is odd
        generator.state = {"bit_generator": "PCG64", "state": inner, "has_uint32": 0, "uinteger": 0}
    else:
        generator.state = type(generator)(int(philox.random_raw())).state


def _backend_of(thing: Any) -> Backend | None:
    """The backend whose framework a generator belongs to; None for anything else."""
    module = str(type(thing).__module__).partition(".")[0]
    for backend in registry.loaded_backends():
        if module == backend.framework and (undo := backend.reseed(thing, 0)) is not None:
            undo()
            return backend
    return None


class RequestGenerators:
    """A context around one request: its `SampleContext` is the current one, and `seed` seeds all generators from its
    key. Afterwards the former context and the user's own states are put back.

    `roots` are the user's objects by name. In a worker process (`own`) no states need to be put back. In a worker
    thread (`shared`) the generators belong to all threads at once, so they are left alone. `notices` are warnings for
    the user.
    """

    def __init__(self, context: SampleContext, roots: Mapping[str, Any], *, own: bool, shared: bool) -> None:
        self._context = context
        self._roots = roots
        self._own = own
        self._shared = shared
        self._global = GlobalRng()
        self._kept: list[tuple[int, FoundGenerator]] = []
        self._known: dict[int, FoundGenerator] = {}  # by id, with the generator, so that no other object gets its id
        self._looks = 2
        self._outer: tuple[SampleContext | None] | None = None
        self._users: list[Restore] = []
        self.notices: list[str] = []

    def __enter__(self) -> None:
        if self._looks == 2:
            self._look()
        self._outer = (seeding.current(),)
        seeding.make_current(self._context)
        if not self._shared:
            self._context.undisturbed = self.undisturbed
            if not self._own:
                self._save(self._users)

    def __exit__(self, *error: object) -> None:
        self.restore()
        if self._looks == 1:
            self._look()

    def restore(self) -> None:
        """Put back what is the user's. Call it once more around the context: an interrupt may come at any step."""
        for restore in self._users:
            restore()
        self._users.clear()
        if self._outer is not None:
            seeding.make_current(self._outer[0])
            self._context.undisturbed = nullcontext  # the two must not keep each other alive
            self._outer = None

    def seed(self) -> None:
        """Seed all generators for the request, or for the batch of a stream, whose key the context has."""
        context, rewinder = self._context, self._context.rewinder
        context.made = None
        if self._shared:
            return
        key = context.seed, context.epoch
        rewinder.rewind(*key, Purpose.GLOBALS, context.first, context.rank)
        self._global.seed(rewinder.philox)
        for number, kept in self._kept:
            rewinder.rewind(*key, Purpose.ATTRIBUTES, context.first, context.rank, start=number << 32)
            kept.seed(rewinder.philox)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Whatever runs inside, the generators are as before behind it: a state that is loaded may hold some."""
        states: list[Restore] = [partial(NUMPY_GLOBAL.set_state, NUMPY_GLOBAL.get_state(legacy=False))]
        self._save(states)
        try:
            for restore in reversed(states):  # to look has moved some
                restore()
            yield
        finally:
            for restore in reversed(states):  # `np.random` gets its bit generator back before its state
                restore()

    def _save(self, states: list[Restore]) -> None:
        states.append(self._global.save())
        for _, kept in self._kept:  # `save` may move one, so that what puts it back is noted at once
            states.append(kept.save())

    def _look(self) -> None:
        """Find the generators that the user's objects keep: before the first request, and once more after it."""
        late, self._looks = self._looks == 1, self._looks - 1
        for found in find_generators(self._roots):
            if id(found.generator) in self._known:
                continue
            self._known[id(found.generator)] = found
            if self._shared:
                why = "all worker threads share: its draws depend on which thread comes first"
            elif not found.works():
                why = "the loader cannot seed: its draws do not follow from the loader's seed, and may repeat"
            else:
                self._kept.append((zlib.crc32(found.path.encode()), found))
                if not late:
                    continue
                why = "was made while a batch was loaded: its draws for that batch do not follow from the loader's seed"
            self.notices.append(
                f"{found.path} ({type(found.generator).__qualname__}) is a random generator that {why}. Draw from "
                "agnoload.sample_rng() instead, which belongs to the sample"
            )
