"""The generators that user code draws from: the process's own, and those that it keeps on its objects.

Around each request all of them are put into a state that follows from the request's key, so it does not matter who
loads a batch, or when. In a worker they are the worker's own; inline the user's states are put back afterwards.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from agnoload import seeding
from agnoload.backend import registry
from agnoload.backend.base import Backend
from agnoload.inspect import Step, within_reach
from agnoload.memory import (
    NUMPYS_OWN,
    PYTHONS_OWN,
    TWISTER,
    Twister,
    normal_of,
    twister_of_numpy,
    twister_of_python,
)
from agnoload.seeding import Purpose, Rewinder, SampleContext


class Settable(Protocol):
    """A generator that can be put into a state and back."""

    def seed(self, philox: np.random.Philox) -> None: ...

    def save(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class PythonGenerator:
    """A `random.Random`, or the one behind the functions of `random`."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._twister = twister_of_python(generator)

    def seed(self, philox: np.random.Philox) -> None:
        self.fill(philox.random_raw(TWISTER).data)

    def fill(self, words: memoryview) -> None:
        """What `seed` does, with words that were drawn already."""
        if self._twister is None:
            self._generator.setstate((3, (*words.cast("B").cast("I"), 2 * TWISTER), None))
            return
        self._generator.gauss_next = None  # type: ignore[attr-defined]
        self._twister.fill(words)

    def save(self) -> Any:
        if self._twister is None:
            return self._generator.getstate()
        return self._twister.read(), self._generator.gauss_next  # type: ignore[attr-defined]

    def restore(self, state: Any) -> None:
        if self._twister is None:
            self._generator.setstate(state)
            return
        block, self._generator.gauss_next = state  # type: ignore[attr-defined]
        self._twister.write(block)


class NumpyGenerator:
    """A NumPy bit generator, and the `RandomState` around it if there is one, which may hold back a normal number."""

    def __init__(self, source: Any, around: np.random.RandomState | None = None) -> None:
        self._source = source
        self._around = around
        self._twister = twister_of_numpy(source)
        self._held = None if around is None else normal_of(around) or _Normal(around)

    def seed(self, philox: np.random.Philox) -> None:
        if self._held is not None:
            self._held.forget()
        if self._twister is not None:
            self._twister.fill(philox.random_raw(TWISTER).data)
        elif type(self._source) is np.random.PCG64:
            words = int.from_bytes(philox.random_raw(4).tobytes(), "little")
            inner: Any = {"state": words >> 128, "inc": (words & ((1 << 128) - 1)) | 1}  # an increment is odd
            self._source.state = {"bit_generator": "PCG64", "state": inner, "has_uint32": 0, "uinteger": 0}
        else:
            words = int.from_bytes(philox.random_raw(2).tobytes(), "little")
            self._source.state = type(self._source)(words).state

    def save(self) -> Any:
        bits = self._source.state if self._twister is None else self._twister.read()
        return bits, None if self._held is None else self._held.read()

    def restore(self, state: Any) -> None:
        bits, held = state
        if self._held is not None:
            self._held.write(held)
        if self._twister is None:
            self._source.state = bits
        else:
            self._twister.write(bits)


class _Normal:
    """What `memory.Normal` does, through the methods of a `RandomState`; slower."""

    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator = generator

    def read(self) -> dict[str, Any]:
        state: Any = self._generator.get_state(legacy=False)
        return {"has_gauss": state["has_gauss"], "gauss": state["gauss"]}

    def write(self, held: Mapping[str, Any]) -> None:
        state: Any = self._generator.get_state(legacy=False)
        self._generator.set_state({**state, **held})

    def forget(self) -> None:
        self.write({"has_gauss": 0, "gauss": 0.0})


class HeldBack:
    """The normal number that a `RandomState` holds back whose bit generator another generator has as well."""

    def __init__(self, around: np.random.RandomState) -> None:
        self._held = normal_of(around) or _Normal(around)

    def seed(self, philox: np.random.Philox) -> None:
        self._held.forget()

    def save(self) -> Any:
        return self._held.read()

    def restore(self, state: Any) -> None:
        self._held.write(state)


class BackendGenerator:
    """A generator object of a framework, through its backend."""

    def __init__(self, backend: Backend, generator: Any) -> None:
        self._backend = backend
        self._generator = generator

    def seed(self, philox: np.random.Philox) -> None:
        self._backend.reseed(self._generator, int(philox.random_raw()))

    def save(self) -> Any:
        return self._backend.reseed(self._generator, 0)

    def restore(self, state: Any) -> None:
        state()


# ---------------------------------------------------------------------------------------------- the process's own


_source: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
_lend: Callable[[Any], None] = np.random.set_bit_generator  # type: ignore[attr-defined]


class ProcessGenerators:
    """What `random`, `np.random` and the loaded frameworks draw from when nobody gives them a generator.

    `np.random` is lent a bit generator of ours, so the user's own is not touched, whatever kind it is.
    """

    def __init__(self) -> None:
        self._python = PythonGenerator(PYTHONS_OWN)
        self._lent: Any = np.random.MT19937(0)
        self._numpy = Twister(self._lent.ctypes.state_address, place_first=False)
        self._held = normal_of(NUMPYS_OWN) or _Normal(NUMPYS_OWN)
        self._backends: tuple[Backend, ...] = ()
        self._modules = 0

    def seed(self, rewinder: Rewinder, context: SampleContext) -> None:
        """Put all of them into the state of the request that `context` stands in."""
        rewinder.rewind(context.seed, context.epoch, Purpose.GLOBALS, context.first, context.rank)
        words = rewinder.philox.random_raw(2 * TWISTER + 1).data  # at once: a call costs as much as 50 of them
        self._python.fill(words[:TWISTER])
        _lend(self._lent)  # and forget a normal number held back
        self._numpy.fill(words[TWISTER:-1])
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._backends = registry.loaded_backends()
        for backend in self._backends:
            backend.seed(words[-1])  # one for all: who else is loaded here must change nothing

    def imported(self) -> bool:
        """Whether anything at all has been imported since `seed`."""
        return len(sys.modules) != self._modules

    def missed(self) -> list[Backend]:
        """Whose frameworks have been imported since `seed`, and drawn from already."""
        backends = registry.loaded_backends()
        return [backend for backend in backends if backend not in self._backends and backend.drawn()]

    def save(self) -> Any:
        """All their states, for `restore`."""
        source = _source()
        bits = self._numpy.read() if source is self._lent else None  # the user's own is not touched
        backends = [(backend, backend.rng_state()) for backend in registry.loaded_backends()]
        return self._python.save(), source, bits, self._held.read(), backends

    def restore(self, state: Any) -> None:
        python, source, bits, held, backends = state
        self._python.restore(python)
        _lend(source)
        if bits is not None:
            self._numpy.write(bits)
        self._held.write(held)
        for backend, states in backends:
            backend.set_rng_state(states)


class Private:
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
            self.settle()

    def settle(self) -> None:
        """Put back what an interrupt has kept from being put back; called once more around the context."""
        if self._users is not None:
            self._process.restore(self._users)
            self._users = None


class Watch:
    """Tells whether anybody has drawn from the process's generators since it was made."""

    def __init__(self) -> None:
        self._before = self._look()

    def drawn(self) -> list[str]:
        """By what name they go that were drawn from."""
        now = self._look()
        return [name for name in now if repr(now[name]) != repr(self._before.get(name))]

    def _look(self) -> dict[str, Any]:
        state: Any = np.random.get_state(legacy=False)
        found: dict[str, Any] = {"random": random.getstate(), "np.random": (state["state"], state["has_gauss"])}
        for backend in registry.loaded_backends():
            rng = backend.rng_state()
            array = backend.to_numpy(rng)
            found[backend.name] = rng if array is None else array.tobytes()
        return found


# ---------------------------------------------------------------------------------------------- on the user's objects


class Found(NamedTuple):
    """A generator that lives on the user's objects."""

    path: str
    generator: Any
    settable: Settable | None
    """None: it cannot be put into a state of ours."""
    way: tuple[Step, ...] = ()
    """How it was come to."""

    def replaced(self) -> bool:
        """Whether another object lies where it, or something on the way to it, lay."""
        try:
            return any(look(place) is not thing for look, place, thing in self.way)
        except (LookupError, AttributeError, ValueError):  # nothing lies there
            return True


def find_generators(roots: Mapping[str, Any]) -> list[Found]:
    """The generators within reach of some objects, each with the path to it, in an order that is always the same.

    See `within_reach` for what is looked at.

    >>> class Noisy: ...
    >>> noisy = Noisy()
    >>> noisy.transform = Noisy()
    >>> noisy.transform.rng = np.random.default_rng(0)
    >>> [found.path for found in find_generators({"dataset": noisy})]
    ['dataset.transform.rng']
    """
    found: list[Found] = []
    seen: dict[int, Any] = {id(generator): generator for generator in (NUMPYS_OWN, PYTHONS_OWN)}
    for reached in within_reach(roots):
        path, thing = reached.path, reached.thing
        known = None if id(thing) in seen else settable(thing)
        if known is None:
            continue
        made = None if reached.one_of_many else known.made
        if id(core := _core(thing)) not in seen:
            seen[id(core)] = core
            found.append(Found(path, thing, made, reached.way))
        elif made is not None and issubclass(type(thing), np.random.RandomState):  # they share one stream of bits
            found.append(Found(path, thing, HeldBack(thing), reached.way))
    return found


class _Known(NamedTuple):
    made: Settable | None


def settable(thing: Any) -> _Known | None:
    """How to set a generator; None for what is none."""
    kind = type(thing)  # and not isinstance, which asks an object for the class that it pretends to be
    if issubclass(kind, np.random.Generator):
        return _Known(_numpy(thing.bit_generator, None))
    if issubclass(kind, np.random.RandomState):
        return _Known(_numpy(thing._bit_generator, thing))
    if issubclass(kind, np.random.BitGenerator):
        return _Known(_numpy(thing, None))
    if issubclass(kind, random.Random):
        own = kind.random is random.Random.random and kind.getrandbits is random.Random.getrandbits
        try:
            return _Known(PythonGenerator(thing) if own else None)
        except AttributeError:  # it was never initialized
            return _Known(None)
    for backend in registry.loaded_backends():
        if kind.__module__.partition(".")[0] == backend.framework:
            undo = backend.reseed(thing, 0)
            if undo is not None:
                undo()
                return _Known(BackendGenerator(backend, thing))
    return None


def _core(thing: Any) -> Any:
    """The bit generator below a generator of NumPy's; anything else itself."""
    if issubclass(type(thing), np.random.Generator):
        return thing.bit_generator
    return thing._bit_generator if issubclass(type(thing), np.random.RandomState) else thing


def _numpy(source: Any, around: np.random.RandomState | None) -> Settable | None:
    if type(source) not in (np.random.MT19937, np.random.PCG64):
        try:
            _ = type(source)(0).state
        except Exception:  # a stranger's bit generator, which cannot be made from a number or has no state; or none
            return None
    return NumpyGenerator(source, around)


LOOKS = 16
"""So often, and no more, it is looked for generators after a request: some datasets make a new one for each sample."""


class RequestGenerators:
    """A context around one request: its `SampleContext` is the current one and all generators are as its key says;
    afterwards the former one and the user's own states are put back.

    `roots` are the user's objects by name. In a worker process (`own`) nothing needs to be put back. In a worker thread
    (`shared`) the generators belong to all threads at once: they are left alone, and who keeps one is told so.
    `notices` are words for the user.
    """

    def __init__(self, context: SampleContext, roots: Mapping[str, Any], *, own: bool, shared: bool) -> None:
        self._context = context
        self._roots = roots
        self._own = own
        self._shared = shared
        self._process = ProcessGenerators()
        self._found: list[Found] | None = None
        self._kept: list[tuple[int, Settable]] = []
        self._looks = LOOKS
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
        self.settle()
        if not self._shared and self._process.imported():
            self._tell_missed()
        if self._looks == LOOKS or (self._found and self._looks and not self._shared and self._replaced()):
            self._looks -= 1
            self.find()

    def settle(self) -> None:
        """Put back what is the user's; called once more around the context, as an interrupt may come at any step."""
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None
        if self._outer is not None:
            seeding.make_current(self._outer[0])
            self._context.undisturbed = nullcontext  # the two must not keep each other alive
            self._outer = None

    def _replaced(self) -> bool:
        return any(found.replaced() for found in self._found or ())

    def mark(self) -> None:
        """Remember where all generators stand, for `back`."""
        if not self._shared:
            self._marked = self._save()
            self._restore(self._marked)  # to look has moved them

    def back(self) -> None:
        """Let the sample that is loaded draw again what it has drawn since `mark`."""
        self._context.made = None
        if not self._shared:
            self._restore(self._marked)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Whatever is run within, all generators are as before behind it: a state that is loaded may hold some."""
        states = self._save()
        self._restore(states)
        try:
            yield
        finally:
            self._restore(states)

    def seed(self) -> None:
        """Put all generators into the state of the request, or of the batch, that the context stands in."""
        self._context.made = None
        if not self._shared:
            self._tell_missed()
            self._seed()

    def _tell_missed(self) -> None:
        self.notices += (
            f"{backend.framework} was first imported while a batch was loaded, so what was drawn from its global "
            "generator for that batch does not follow from the loader's seed. Import it where the dataset is defined"
            for backend in self._process.missed()
        )

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
        states: list[Any] = []
        self._save_kept(states)
        return self._process.save(), states

    def _save_kept(self, states: list[Any]) -> None:
        for _, kept in self._kept:  # a look may move one, so each is noted at once
            states.append((kept, kept.save()))

    def _restore(self, state: Any) -> None:
        process, states = state
        self._process.restore(process)
        for kept, each in states:
            kept.restore(each)

    def find(self) -> None:
        """Look for generators on the user's objects; called before the first request, after it, and after one that has
        put another generator into the place of one.
        """
        known = None if self._found is None else {id(found.generator) for found in self._found}
        self._found = find_generators(self._roots)
        for path, generator, kept, _ in self._found:
            if known is not None and id(generator) in known:
                continue
            if self._shared:
                self.notices.append(
                    f"{path} is a random generator that all worker threads share: what it gives depends on which "
                    f"thread comes first. {_INSTEAD}"
                )
            elif kept is None:
                self.notices.append(
                    f"{path} ({type(generator).__qualname__}) is a random generator that cannot be put into a state "
                    f"that follows from the loader's seed. {_INSTEAD}"
                )
            elif known is not None:
                self.notices.append(
                    f"{path} is a random generator that was made while a batch was loaded, so what it gave for that "
                    f"batch does not follow from the loader's seed. Make it before. {_INSTEAD}"
                )
        numbers = ((zlib.crc32(path.encode()), kept) for path, _, kept, _ in self._found)
        self._kept = [(number, kept) for number, kept in numbers if kept is not None]


_INSTEAD = "Draw from agnoload.sample_rng() instead, which is the sample's own"
