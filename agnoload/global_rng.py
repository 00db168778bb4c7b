"""The generators that user code draws from: the process's own, and those that it keeps on its objects.

Around each request all of them are put into a state that follows from the request's key, so it does not matter who
loads a batch, or when. In a worker they are the worker's own; inline the user's states are put back afterwards.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from agnoload import plugins, seeding
from agnoload.protocols import Backend
from agnoload.reach import within_reach
from agnoload.seeding import NUMPYS_OWN, PYTHONS_OWN, Purpose, Rewinder, SampleContext

_TWISTER = struct.Struct("=624I")
"""The words of a Mersenne Twister."""
_RAW = _TWISTER.size // 8
"""The numbers of 64 bits that they are made from."""


def _python_state(words: Any, offset: int = 0) -> Any:
    """A state of Python's generator from raw numbers; none of what it gives has been given yet."""
    return 3, (*_TWISTER.unpack_from(words, offset), 624), None


def _mt19937_state(words: Any, offset: int = 0) -> Any:
    key = _TWISTER.unpack_from(words, offset)  # a tuple: NumPy takes an array ten times as slowly
    return {"bit_generator": "MT19937", "state": {"key": key, "pos": 624}}


# ---------------------------------------------------------------------------------------------- the process's own


_source: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
_lend: Callable[[Any], None] = np.random.set_bit_generator  # type: ignore[attr-defined]

_SMALL = np.random.PCG64(0)


@contextmanager
def _over(source: Any) -> Iterator[np.random.RandomState]:
    """The generator of `np.random`, which reads and writes the state of `_SMALL` for a while, not that of `source`.

    So the normal number that it holds back can be had without the words of a Mersenne Twister, a hundred times as slow.
    """
    own: Any = NUMPYS_OWN
    try:
        try:
            own._bit_generator = _SMALL
            yield own
        finally:
            own._bit_generator = source
    finally:
        own._bit_generator = source  # twice: an interrupt may have come before the line above


class ProcessGenerators:
    """What `random`, `np.random` and the loaded frameworks draw from when nobody gives them a generator.

    `np.random` is lent a bit generator of ours, so the user's own is not touched, whatever kind it is.
    """

    def __init__(self) -> None:
        self._lent: Any = np.random.MT19937(0)

    def seed(self, rewinder: Rewinder, context: SampleContext) -> None:
        """Put all of them into the state of the request that `context` stands in."""
        rewinder.rewind(context.seed, context.epoch, Purpose.GLOBALS, context.first, context.rank)
        words = rewinder.philox.random_raw(2 * _RAW + 1)  # at once: a call costs as much as 50 numbers
        PYTHONS_OWN.setstate(_python_state(words))
        self._lent.state = _mt19937_state(words, _TWISTER.size)
        _lend(self._lent)  # which also drops a normal number that was held back
        for backend in plugins.loaded_backends():
            backend.seed(int(words[-1]))  # one for all: which frameworks are loaded here must not change the draws

    def save(self, *, lent: bool = False) -> Any:
        """All their states, for `restore`; with `lent` also that of the bit generator that is lent."""
        source = _source()
        with _over(source) as own:
            held: Any = own.get_state(legacy=False)
        backends = [(backend, backend.rng_state()) for backend in plugins.loaded_backends()]
        return PYTHONS_OWN.getstate(), source, held, self._lent.state if lent else None, backends

    def restore(self, state: Any) -> None:
        python, source, held, lent, backends = state
        PYTHONS_OWN.setstate(python)
        if lent is not None:
            self._lent.state = lent
        _lend(source)
        if held["has_gauss"]:
            with _over(source) as own:
                own.set_state(held)
        for backend, states in backends:
            backend.set_rng_state(states)


class isolated_global_rng:  # noqa: N801  (named like `contextlib.suppress`, another context that is a class)
    """A context in which the process's generators are somebody's own: first as a key says, then as they were left.

    What is run inside neither reads nor advances the user's, and draws the same in every run.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._context = SampleContext(Rewinder())
        self._context.at(seed, epoch, 0, 1, 0)
        self._process = ProcessGenerators()
        self._own: Any = None
        self._users: Any = None

    def __enter__(self) -> None:
        self._users = self._process.save()
        if self._own is None:
            self._process.seed(self._context.rewinder, self._context)
        else:
            self._process.restore(self._own)

    def __exit__(self, *error: object) -> None:
        try:
            self._own = self._process.save()
        finally:
            self.restore()

    def restore(self) -> None:
        """Put back what an interrupt has kept from being put back; called once more around the context."""
        if self._users is not None:
            self._process.restore(self._users)
            self._users = None


class GlobalRngMonitor:
    """Sees whether anybody has drawn from the process's generators since it was made."""

    def __init__(self) -> None:
        self._before = self._look()

    def drawn(self) -> list[str]:
        """The names of those that were drawn from."""
        now = self._look()
        return [name for name in now if repr(now[name]) != repr(self._before.get(name))]

    def _look(self) -> dict[str, Any]:
        state: Any = np.random.get_state(legacy=False)
        found: dict[str, Any] = {"random": random.getstate(), "np.random": (state["state"], state["has_gauss"])}
        for backend in plugins.loaded_backends():
            rng = backend.rng_state()
            array = backend.to_numpy(rng)
            found[backend.name] = rng if array is None else array.tobytes()
        return found


# ---------------------------------------------------------------------------------------------- on the user's objects


class FoundGenerator(NamedTuple):
    """A generator that lives on the user's objects."""

    path: str
    generator: Any
    settable: bool
    """Whether it can be put into a state that follows from a key."""
    backend: Backend | None = None
    """Of the framework that it belongs to."""

    def seed(self, philox: np.random.Philox) -> None:
        """Put it into the state that follows from the next numbers of `philox`."""
        if self.backend is not None:
            self.backend.reseed(self.generator, int(philox.random_raw()))
        else:
            _set_state(self.generator, _new_state(self.generator, philox))

    def save(self) -> Callable[[], object]:
        """What puts it back into the state that it has now; a framework's may have moved by then."""
        if self.backend is not None:
            return self.backend.reseed(self.generator, 0) or (lambda: None)
        return partial(_set_state, self.generator, _state(self.generator))


def find_generators(roots: Mapping[str, Any]) -> list[FoundGenerator]:
    """The generators within reach of some objects, each with the path to it, in an order that is always the same.

    See `within_reach` for what is looked at.

    >>> class Noisy: ...
    >>> noisy = Noisy()
    >>> noisy.transform = Noisy()
    >>> noisy.transform.rng = np.random.default_rng(0)
    >>> [found.path for found in find_generators({"dataset": noisy})]
    ['dataset.transform.rng']
    """
    generators: list[FoundGenerator] = []
    seen: dict[int, Any] = {id(generator): generator for generator in (NUMPYS_OWN, PYTHONS_OWN)}
    for path, thing, one_of_many in within_reach(roots):
        if id(thing) in seen or (found := _found(path, thing)) is None:
            continue
        source = _source_of(thing)
        if id(source) not in seen or issubclass(type(thing), np.random.RandomState):  # it has a held normal of its own
            seen[id(source)] = source
            generators.append(found._replace(settable=False) if one_of_many else found)
    return generators


def _found(path: str, thing: Any) -> FoundGenerator | None:
    kind = type(thing)  # and not isinstance, which asks an object for the class that it pretends to be
    if issubclass(kind, random.Random):
        as_python = kind.random is random.Random.random and kind.getrandbits is random.Random.getrandbits
        return FoundGenerator(path, thing, as_python and hasattr(thing, "gauss_next"))  # it has none before __init__
    if issubclass(kind, (np.random.Generator, np.random.RandomState, np.random.BitGenerator)):
        return FoundGenerator(path, thing, type(_source_of(thing)) in _NUMPYS)
    for backend in plugins.loaded_backends():
        if kind.__module__.partition(".")[0] == backend.framework and (undo := backend.reseed(thing, 0)) is not None:
            undo()
            return FoundGenerator(path, thing, True, backend)
    return None


_NUMPYS = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)


def _source_of(generator: Any) -> Any:
    """The bit generator below a generator of NumPy's; anything else itself."""
    if issubclass(type(generator), np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if issubclass(type(generator), np.random.RandomState) else generator


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return random.Random.getstate(generator)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _source_of(generator).state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        random.Random.setstate(generator, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _source_of(generator).state = state


def _new_state(generator: Any, philox: np.random.Philox) -> Any:
    """A state from the next numbers of `philox`; part of what a seed means, so it stays as it is."""
    if isinstance(generator, random.Random):
        return _python_state(philox.random_raw(_RAW))
    kind = type(_source_of(generator))
    if kind is np.random.MT19937:
        return _mt19937_state(philox.random_raw(_RAW))
    if kind is np.random.PCG64:
        words = int.from_bytes(philox.random_raw(4).tobytes(), "little")
        inner = {"state": words >> 128, "inc": (words & ((1 << 128) - 1)) | 1}  # an increment is odd
        return {"bit_generator": "PCG64", "state": inner, "has_uint32": 0, "uinteger": 0}
    return kind(int.from_bytes(philox.random_raw(2).tobytes(), "little")).state


# ---------------------------------------------------------------------------------------------- around a request


_LOOKS = {4**k for k in range(16)}
"""After so many requests it is looked again for generators: some are made while samples are loaded."""


class RequestGenerators:
    """A context around one request: its `SampleContext` is the current one and all generators are as its key says;
    afterwards the former one and the user's own states are put back.

    `roots` are the user's objects by name. In a worker process (`own`) nothing needs to be put back. In a worker thread
    (`shared`) the generators belong to all threads at once: they are left alone, and a warning names those that are
    kept. `notices` are words for the user.
    """

    def __init__(self, context: SampleContext, roots: Mapping[str, Any], *, own: bool, shared: bool) -> None:
        self._context = context
        self._roots = roots
        self._own = own
        self._shared = shared
        self._process = ProcessGenerators()
        self._found: list[FoundGenerator] | None = None
        self._kept: list[tuple[int, FoundGenerator]] = []
        self._requests = 0
        self._outer: tuple[SampleContext | None] | None = None
        self._saved: Any = None
        self._marked: Any = None
        self.notices: list[str] = []

    def __enter__(self) -> None:
        if self._found is None:
            self.find()
        self._outer = (seeding.current(),)
        seeding.make_current(self._context)
        if self._shared:
            return
        self._context.undisturbed = self.undisturbed
        if not self._own:
            self._saved = self._process.save(), []
            self._save_kept(self._saved[1])
        self._seed()

    def __exit__(self, *error: object) -> None:
        self.restore()
        self._requests += 1
        if self._requests in _LOOKS:
            self.find()

    def restore(self) -> None:
        """Put back what is the user's; called once more around the context, as an interrupt may come at any step."""
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None
        if self._outer is not None:
            seeding.make_current(self._outer[0])
            self._context.undisturbed = nullcontext  # the two must not keep each other alive
            self._outer = None

    def mark(self) -> None:
        """Remember where all generators stand, for `back`."""
        if not self._shared:
            self._marked = self._save()

    def back(self) -> None:
        """Let the sample that is loaded draw again what it has drawn since `mark`."""
        self._context.made = None
        if not self._shared:
            self._restore(self._marked)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Whatever is run within, all generators are as before behind it: a state that is loaded may hold some."""
        states = self._save()
        try:
            yield
        finally:
            self._restore(states)

    def seed(self) -> None:
        """Put all generators into the state of the request, or of the batch, that the context stands in."""
        self._context.made = None
        if not self._shared:
            self._seed()

    def _seed(self) -> None:
        context, rewinder = self._context, self._context.rewinder
        context.made = None
        self._process.seed(rewinder, context)
        for sub_key, kept in self._kept:
            rewinder.rewind(
                context.seed, context.epoch, Purpose.ATTRIBUTES, context.first, context.rank, start=sub_key << 32
            )
            kept.seed(rewinder.philox)

    def _save(self) -> Any:
        """The states of all, which are as they were when it returns."""
        states: list[Any] = []
        self._save_kept(states)
        saved = self._process.save(lent=True), states
        for put_back in states:
            put_back()
        return saved

    def _save_kept(self, states: list[Any]) -> None:
        for _, kept in self._kept:  # a look may move one, so each is noted at once
            states.append(kept.save())

    def _restore(self, state: Any) -> None:
        process, states = state
        self._process.restore(process)
        for put_back in states:
            put_back()

    def find(self) -> None:
        """Look for generators on the user's objects: before the first request, and after some."""
        known = None if self._found is None else {id(found.generator) for found in self._found}
        self._found = find_generators(self._roots)
        for path, generator, settable, _ in self._found:
            if known is not None and id(generator) in known:
                continue
            if self._shared:
                self.notices.append(
                    f"{path} is a random generator that all worker threads share: what it gives depends on which "
                    f"thread comes first. {_INSTEAD}"
                )
            elif not settable:
                self.notices.append(
                    f"{path} ({type(generator).__qualname__}) is a random generator that cannot be put into a state "
                    f"that follows from the loader's seed. {_INSTEAD}"
                )
            elif known is not None:
                self.notices.append(
                    f"{path} is a random generator that was made while batches were loaded, so what it gave until now "
                    f"does not follow from the loader's seed. Make it before. {_INSTEAD}"
                )
        self._kept = [(zlib.crc32(found.path.encode()), found) for found in self._found if found.settable]


_INSTEAD = "Draw from agnoload.sample_rng() instead, which is the sample's own"
