"""How a stream is read: by an iterator that says where it is, and yields samples that may still have to be made.

`next_raw()` gives the next *raw* sample: often a `Lazy(function, raw)`, what was given to `map` and what to call it
with. Who delivers the sample calls `force(raw)`; who only reads past it, as the other workers do, drops it. So whatever
lies between passes raw samples on unopened, but for `filter` and `pack`, which must look at them.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

from agnoload import seeding
from agnoload.errors import SampleStopped, StateError, add_note
from agnoload.seeding import draw_seed
from agnoload.validate import name_of, shown
from agnoload.worker_info import peek_worker_info

T_co = TypeVar("T_co", covariant=True)

NODES = 64
"""Streams that one may be made of before two shuffles inside of it could draw the same numbers."""


class Lazy(tuple[Any, ...]):
    """A sample that is not made yet: `Lazy((function, raw))` will be `function(force(raw))`.

    A tuple, since one is made for each sample, also for those that are only read past.
    """

    __slots__ = ()


class Made(Lazy):
    """`Made((sample, raw))`: a sample that had to be made to see whether it passes a filter."""

    __slots__ = ()


class Record(Lazy):
    """`Record((path, sample, number))`: a sample that comes from a file."""

    __slots__ = ()


def force(raw: Any) -> Any:
    """The sample that a raw one becomes: here the functions given to `map` run."""
    kind = type(raw)  # not `isinstance`: a sample may be a tuple of the user's own, and this is called for each
    if kind is Lazy:
        function, inner = raw
        sample = force(inner) if type(inner) in LAZY else inner
        try:
            return function(sample)
        except (StopIteration, GeneratorExit) as stop:
            raise sample_stopped(function, stop) from stop
    if kind is Made:
        return raw[0]
    return raw[1] if kind is Record else raw


LAZY = frozenset((Lazy, Made, Record))
"""What `force` takes apart; all else is a sample already."""


def note_record(error: BaseException, raw: Any) -> None:
    """Say in an error which record of which file a raw sample is made of, if that is known."""
    while type(raw) in (Lazy, Made):
        raw = raw[1]
    if type(raw) is Record:
        path, _, number = raw
        note_place(error, path, number)


def note_place(error: BaseException, path: Any, number: int) -> None:
    """Say in an error that it is about record `number`, counted from 0, of a file."""
    add_note(error, f"at record {number + 1} of {os.fspath(path)} (the first is record 1)")


def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call user code; a StopIteration out of it must not be taken for the end of the data."""
    try:
        return function(*arguments)
    except (StopIteration, GeneratorExit) as stop:
        raise sample_stopped(function, stop) from stop


def sample_stopped(function: Any, stop: BaseException) -> SampleStopped:
    """The error for a StopIteration or GeneratorExit that came out of a user's function."""
    name = name_of(getattr(function, "func", function))  # of a partial function, what it calls
    kind = type(stop).__name__
    return SampleStopped(f"{name} raised {kind}, which would look like the end of the data; catch it there")


def may_ask(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call what runs user code that may call `get_worker_info()`: here the stream does not split itself by that."""
    info = peek_worker_info()
    if info is None or info.on_asked is None:
        return function(argument)
    on_asked, info.on_asked = info.on_asked, None
    try:
        return function(argument)
    finally:
        info.on_asked = on_asked


class OpenOptions(NamedTuple):
    """How a stream is opened."""

    state: Any = None
    """What `StreamIterator.state` gave, to resume there; None: from the start."""
    again: int = 0
    """How often the stream was read before in this epoch; a mixture may read it many times."""
    node: int = 0
    """Which of the streams that make up the whole this is: part of the key of its random numbers."""
    size: int | None = None
    """The loader's batch size, where there is a loader."""
    direct: bool = False
    """Whether its samples are those that the loader counts: nothing in between leaves any out."""
    world: int = 1
    """How many ranks take turns at the samples."""

    def inner(self, state: Any = None, part: int = 0) -> OpenOptions:
        """For a stream that this one is made of."""
        node = (self.node * NODES + part + 1) & 0xFFFFFFFF
        return self._replace(state=state, node=node, direct=False, world=1)


class StreamIterator(Iterator[Any]):
    """One pass through a stream; subclasses give `next_raw`."""

    def next_raw(self) -> Any:
        """The next raw sample; `StopIteration` at the end, from then on always."""
        raise NotImplementedError

    def state(self) -> Any:
        """Where it is, after the last raw sample: what `OpenOptions.state` takes. None if it cannot say."""
        return None

    def inside(self) -> Iterable[StreamIterator]:
        """The iterators that this one reads from, those that are open."""
        return ()

    def close(self) -> None:
        """Let go of what is open: nothing more will be read, though a `next_raw` may be under way."""
        # Called from another thread when a loader is closed, so it only drops what is held and waits for nothing.
        for iterator in self.inside():
            iterator.close()

    def __next__(self) -> Any:
        raw = self.next_raw()
        try:
            return may_ask(force, raw)
        except Exception as error:
            note_record(error, raw)
            raise


class DerivedIterator(StreamIterator):
    """One that reads from one other at a time."""

    def __init__(self, source: StreamIterator) -> None:
        self._source = source

    def inside(self) -> Iterable[StreamIterator]:
        return (self._source,)

    def state(self) -> Any:
        return self._source.state()


class OpenableStream(Generic[T_co]):
    """What the streams of this library are: read by an iterator of ours, unless a subclass defines `__iter__`."""

    keeps_place: bool = True
    """Whether its iterator says where it is, if that of its source does."""

    def open(self, options: OpenOptions) -> StreamIterator:
        """Begin a pass."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T_co]:
        return self.open(OpenOptions())


class OpenedBy(OpenableStream[T_co]):
    """A stream that a function opens: a part of another one."""

    def __init__(self, function: Callable[[OpenOptions], StreamIterator]) -> None:
        self._function = function

    def open(self, options: OpenOptions) -> StreamIterator:
        return self._function(options)


def is_ours(stream: Any) -> bool:
    """Whether a stream is read by an iterator of ours."""
    return getattr(type(stream), "__iter__", None) is OpenableStream.__iter__


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterated rather than indexed.

    It is if it can be iterated and not be indexed, or if a class of its family is called `IterableDataset`: those of
    other libraries inherit a `__getitem__` that only raises.
    """
    if any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def is_indexed(dataset: Any) -> bool:
    """Whether a dataset is indexed from 0 to its length."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return indexed and not is_stream(dataset) and not isinstance(dataset, Mapping)


def paired(second: Any, sample: Any) -> tuple[Any, Any]:
    """What a sample becomes that comes with its source, or with a mask: what a `partial` of this makes of it."""
    return sample, second


def seed_and_epoch(seed: int | None) -> tuple[int, int]:
    """What keys the random numbers of a stream: its own seed or the loader's, and the loader's epoch."""
    context = seeding.current()
    if context is None:
        return (draw_seed() if seed is None else seed), 0
    return (context.seed if seed is None else seed), context.epoch


# ------------------------------------------------------------------------------------------------ the user's own


class UserIterator(StreamIterator):
    """A pass through a stream of the user's: anything that can be iterated.

    Its `set_epoch` is called before, if it has one. If it has `state_dict` and `load_state_dict`, or its iterator has,
    these say where it is. A new pass then begins where the first one ever began, however far the last one went: what
    an epoch delivers must not depend on how much of the one before was read.
    """

    def __init__(self, stream: Any, state: Any = None) -> None:
        self._stream = stream
        self._state = state
        self._iterator: Any = None

    def next_raw(self) -> Any:
        if self._iterator is None:
            self._iterator = guarded(self._begin)
        try:
            return next(self._iterator)  # no name for it here: the traceback of an error would keep it open
        except StopIteration:
            self._iterator = iter(())  # for good: some iterators start again when they are asked once more
            raise
        except (GeneratorExit, RuntimeError) as error:
            # A RuntimeError that a StopIteration caused is what Python makes of one that leaves a generator.
            if isinstance(error, RuntimeError) and not isinstance(error.__cause__, StopIteration):
                raise
            raise SampleStopped(
                f"code inside of the stream {type(self._stream).__name__} raised StopIteration or GeneratorExit, which "
                "would look like the end of the data; catch it there, or use next(iterator, default)"
            ) from error

    def _begin(self) -> Iterator[Any]:
        stream, state = self._stream, self._state
        set_epoch_of(stream)  # before its state, which may hold the epoch, too
        stateful = is_stateful(stream)
        if stateful:
            first = first_state(stream)
            if state is not None or first:
                go_back(stream, first[0] if state is None and first else state)
        iterator: Any = iter(stream)
        if state is not None and (iterator is stream or not stateful):  # `iter` may have set it back to its start
            go_back(iterator, state)
        return iterator  # type: ignore[no-any-return]

    def close(self) -> None:
        # Not by its own close(): whoever iterates one and the same generator in each epoch still has it. One that
        # nobody has any more ends here, with what it is made of; what its `finally` raises, Python reports.
        self._iterator = self._stream = iter(())  # a shard may be its own iterator

    def state(self) -> Any:
        if self._iterator is None:
            return self._state
        holder: Any = self._stream if is_stateful(self._stream) else self._iterator
        # A copy: the stream may change later what it gave.
        return copy.deepcopy(holder.state_dict()) if is_stateful(holder) else None


def set_epoch_of(stream: Any) -> None:
    """Call its `set_epoch`, if it has one, where a loader reads it."""
    context, set_epoch = seeding.current(), getattr(stream, "set_epoch", None)
    if context is not None and callable(set_epoch):
        set_epoch(context.epoch)


def is_stateful(thing: Any) -> bool:
    """Whether it can say where it is and go back there."""
    if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
        return False
    # A stream of Hugging Face's that shuffles through a buffer leaves the buffer out of its state.
    waiting: list[Any] = [getattr(thing, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if hasattr(part, "buffer_size"):
            return False
        waiting += [part.ex_iterable] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", ())
    return True


def go_back(thing: Any, state: Any) -> None:
    """Give user code a copy of the state that it has saved; generators that it sets besides are put back."""
    context = seeding.current()
    try:
        with nullcontext() if context is None else context.undisturbed():
            thing.load_state_dict(copy.deepcopy(state))  # a copy: it may keep it, and change it as it is read
    except Exception as error:
        raise StateError(
            f"{type(thing).__name__} must take what its state_dict() gave, but load_state_dict({shown(state)}) raised "
            f"{type(error).__name__}: {error}"
        ) from error


FirstState = tuple[Any] | None
"""In a tuple, since a state can be anything; None where there is none, and the stream must begin by itself."""

_first_states: dict[int, FirstState] = {}
"""By the stream's `id`, as it need not be hashable; an entry ends with its stream."""


def first_state(stream: Any, known: FirstState = None) -> FirstState:
    """The state that a stream had before anything was read of it; `known` where another process has said so."""
    number = id(stream)
    if number not in _first_states:
        try:
            # An id may be given to another object once the stream has gone, so the entry must go with it.
            weakref.finalize(stream, _first_states.pop, number, None)
            _first_states[number] = known or (copy.deepcopy(stream.state_dict()),)
        except Exception:  # it cannot be watched, or has no state before it is read
            return None
    return _first_states[number]
