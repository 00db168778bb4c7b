"""How a stream is read: in two steps, so that what another worker delivers is never decoded here.

A *cursor* is one run through a stream. `take()` gives the next *draft*: what is needed to tell how the stream goes on,
and no more. `finish(draft)` makes the sample of it, which is where the functions given to `map` run. Reading past a
sample is to take its draft and to drop it. A cursor that can say where it stands does so in `state()`.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

from agnoload import seeding
from agnoload.errors import SampleStopped, StateError, add_note
from agnoload.validate import FARTHEST, fields, integer, name_of, shown, whole
from agnoload.worker_info import peek_worker_info

T_co = TypeVar("T_co", covariant=True)

NODES = 64
"""Streams that one may be made of before two shuffles inside of it could draw the same numbers."""


class Opening(NamedTuple):
    """How a run through a stream begins."""

    state: Any = None
    """What `Cursor.state` gave, to go on from there; None: from the start."""
    again: int = 0
    """How often the stream was run through before in this epoch; mixtures do."""
    node: int = 0
    """Which of the streams that make up the whole this is: part of the key of its random numbers."""
    size: int | None = None
    """The loader's batch size, where there is a loader."""
    direct: bool = False
    """Whether the samples taken are those that the loader counts: nothing in between leaves any out."""
    world: int = 1
    """How many ranks take turns at the samples."""

    def inner(self, state: Any = None, part: int = 0) -> Opening:
        """For a stream that this one is made of."""
        node = (self.node * NODES + part + 1) & 0xFFFFFFFF
        return self._replace(state=state, node=node, direct=False, world=1)


class Cursor(Iterator[Any]):
    """One run through a stream; subclasses give `take` and what else is not as here."""

    deferred: bool = False
    """Whether `finish` runs user code."""

    def take(self) -> Any:
        """The next draft; `StopIteration` at the end."""
        raise NotImplementedError

    def finish(self, draft: Any) -> Any:
        """The sample of a draft, in any order."""
        return draft

    def where(self, draft: Any) -> str:
        """What a person would look up to find the record that a draft is of; empty if it cannot say."""
        return ""

    def state(self) -> Any:
        """Where the run stands: behind the last draft. None if it cannot say."""
        return None

    def inside(self) -> Iterable[Cursor]:
        """The runs that this one is made of, those that are open."""
        return ()

    def close(self) -> None:
        """Let go of what is open: nothing more will be taken, though a `take` may be under way."""
        for cursor in self.inside():
            cursor.close()

    def __next__(self) -> Any:
        draft = self.take()
        try:
            return self.finish(draft)
        except Exception as error:
            note_where(error, self, draft)
            raise


def note_where(error: Exception, cursor: Cursor, draft: Any) -> None:
    """Say in an error which record it is about."""
    where = cursor.where(draft)
    if where:
        add_note(error, where)


class Made(tuple[Any, Any]):
    """A draft that had to be finished to see what comes next: it, and the sample."""

    __slots__ = ()


class CursorStream(Generic[T_co]):
    """What the streams of this library are: read by a cursor of their own, unless a subclass defines `__iter__`."""

    keeps_place: bool = True
    """Whether its cursor says where it stands, if that of its source does."""

    def cursor(self, opening: Opening) -> Cursor:
        """Begin a run."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T_co]:
        return self.cursor(Opening())


def open_stream(stream: Any, opening: Opening) -> Cursor:
    """Begin a run through any stream, ours or the user's."""
    if isinstance(stream, CursorStream) and type(stream).__iter__ is CursorStream.__iter__:
        return stream.cursor(opening)
    number = num_shards_of(stream)
    if number is not None and not _has_iter(stream):
        return ShardsCursor(stream, range(number), opening).exact()
    return ForeignCursor(stream, opening.state)


def _has_iter(stream: Any) -> bool:
    """Whether it says itself how it is read as a whole; else its shards are, in order."""
    method = getattr(type(stream), "__iter__", None)
    return method is not None and not getattr(method, "by_shards", False)


def guarded(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call user code; a StopIteration out of it must not be taken for the end of the data."""
    try:
        return function(*arguments, **named)
    except (StopIteration, GeneratorExit) as stop:
        raise SampleStopped(
            f"{name_of(function)} raised {type(stop).__name__}, which would look like the end of the data; catch it "
            "there"
        ) from stop


def applied(function: Callable[[Any], Any], sample: Any) -> Any:
    """Call a function on a sample; that it asks who runs it does not mean that the stream splits itself."""
    info = peek_worker_info()
    if info is None or info.on_asked is None:
        return guarded(function, sample)
    on_asked, info.on_asked = info.on_asked, None
    try:
        return guarded(function, sample)
    finally:
        info.on_asked = on_asked


class ForeignCursor(Cursor):
    """A run through a stream of the user's: anything that can be iterated.

    Its `set_epoch` is called before, if it has one. If it has `state_dict` and `load_state_dict`, or its iterator has,
    these say where it stands. A new run then begins where the first one ever began, however far the last one went: what
    an epoch delivers must not depend on how much of the one before was read.
    """

    def __init__(self, stream: Any, state: Any = None) -> None:
        self._stream = stream
        self._state = state
        self._iterator: Any = None

    def take(self) -> Any:
        if self._iterator is None:
            self._iterator = guarded(self._begin)
        try:
            return next(self._iterator)  # no name for it here: the traceback of an error would keep it open
        except StopIteration:
            self._iterator = iter(())  # for good: some begin anew
            raise
        except GeneratorExit as stop:
            raise _stopped(self._stream) from stop
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # what Python makes of one that leaves a generator
                raise _stopped(self._stream) from error
            raise

    def _begin(self) -> Iterator[Any]:
        stream = self._stream
        tell_epoch(stream)
        stateful, state = is_stateful(stream), self._state
        if stateful:
            first = first_state(stream)
            if state is not None or first:
                go_back(stream, first[0] if state is None and first else state)
        iterator: Any = iter(stream)
        if state is not None and (iterator is stream or not stateful):  # its own iterator may start afresh in `iter`
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
        # A copy: the stream may go on changing what it gave.
        return copy.deepcopy(holder.state_dict()) if is_stateful(holder) else None


def _stopped(stream: Any) -> SampleStopped:
    return SampleStopped(
        f"code inside of the stream {type(stream).__name__} raised StopIteration or GeneratorExit, which would look "
        "like the end of the data; catch it there, or use next(iterator, default)"
    )


def tell_epoch(stream: Any) -> None:
    """Call its `set_epoch`, if it has one, where a loader reads it."""
    context, tell = seeding.current(), getattr(stream, "set_epoch", None)
    if context is not None and callable(tell):
        tell(context.epoch)


def is_stateful(thing: Any) -> bool:
    """Whether it can say where it stands and go back there."""
    able = callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
    return able and not has_buffer(thing)


def has_buffer(thing: Any) -> bool:
    """Whether it is a stream of Hugging Face's that shuffles through a buffer: its state leaves out what lies there."""
    waiting: list[Any] = [getattr(thing, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if hasattr(part, "buffer_size"):
            return True
        waiting += [part.ex_iterable] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", ())
    return False


def go_back(thing: Any, state: Any) -> None:
    """Give user code a copy of the state that it has saved; what it sets besides, generators stay as they are due."""
    context = seeding.current()
    try:
        with nullcontext() if context is None else context.undisturbed():
            thing.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise StateError(
            f"{type(thing).__name__} must take what its state_dict() gave, but load_state_dict({shown(state)}) raised "
            f"{type(error).__name__}: {error}"
        ) from error


FirstState = tuple[Any] | None
"""In a tuple, since a state can be anything; None where there is none, and the stream must begin by itself."""

_first_states: dict[int, FirstState] = {}


def first_state(stream: Any, known: FirstState = None) -> FirstState:
    """The state that a stream had before anything was read of it; `known` where another process has said so."""
    number = id(stream)
    if number not in _first_states:
        try:
            weakref.finalize(stream, _first_states.pop, number, None)
            _first_states[number] = known or (copy.deepcopy(stream.state_dict()),)
        except Exception:  # it cannot be watched, or has no state before it is read
            return None
    return _first_states[number]


class RowsCursor(Cursor):
    """A run through a map-style dataset, by index; a sample is loaded when its draft is finished."""

    deferred = True

    def __init__(self, dataset: Any, order: Sequence[int], state: int | None = None) -> None:
        self._dataset = dataset
        self._order = order
        self._place = 0 if state is None else whole(state, "the place in a dataset", len(order))

    def take(self) -> int:
        if self._place >= len(self._order):
            raise StopIteration
        index = int(self._order[self._place])
        self._place += 1
        return index

    def finish(self, draft: int) -> Any:
        return applied(self._dataset.__getitem__, draft)

    def state(self) -> int:
        return self._place


class ShardsCursor(Cursor):
    """A run through some shards of a stream, one after the other.

    The state is the number of shards that are done, and where it stands in the next one. If that shard has no state of
    its own it can only be read again: the cursor then begins at its start and is `behind` by so many samples.
    """

    def __init__(self, stream: Any, shards: Sequence[int], opening: Opening) -> None:
        self._stream = stream
        self._shards = shards
        self._opening = opening
        state = {"done": 0, "taken": 0, "inner": None} if opening.state is None else opening.state
        done, taken, inner = fields(state, "the place among shards", "done", "taken", "inner")
        self._done = whole(done, "done", len(shards))
        self._taken = whole(taken, "taken", FARTHEST if done < len(shards) else 0)
        self._inner = self._open(inner)
        self.opens: Callable[[], None] | None = None
        """Called before the first sample of each shard that is begun on the way."""
        self.behind = 0
        self._exact = False
        if self._taken and inner is None:
            self.behind, self._taken = self._taken, 0

    def exact(self) -> ShardsCursor:
        """This cursor, which from now on says where it stands only if the open shard does: it is never `behind`.

        For who reads more than these shards. A shard that is read again alone, among the random numbers of another
        place, need not give what it gave.
        """
        if self.behind:
            raise StateError("the state of a shard must say where it stands, got none")
        self._exact = True
        return self

    def inside(self) -> Iterable[Cursor]:
        return () if self._inner is None else (self._inner,)

    def close(self) -> None:
        super().close()
        self.opens = None  # it refers to whoever reads

    def _open(self, state: Any) -> Cursor | None:
        if self._done >= len(self._shards):
            return None
        number = self._shards[self._done]
        shard = shard_of(self._stream, number)
        if is_indexed(shard):
            cursor: Cursor = RowsCursor(shard, range(len(shard)), state)  # type: ignore[arg-type]
        else:
            cursor = open_stream(shard, self._opening.inner(state))
        self.deferred = cursor.deferred
        return cursor

    def take(self) -> Any:
        while self._inner is not None:
            try:
                draft = self._inner.take()
            except StopIteration:
                self._done += 1
                self._taken = 0
                if self.opens is not None:
                    self.opens()
                self._inner = self._open(None)
                continue
            self._taken += 1
            return self._inner, draft
        raise StopIteration

    def finish(self, draft: Any) -> Any:
        cursor, inner = draft
        return cursor.finish(inner)

    def where(self, draft: Any) -> str:
        cursor, inner = draft
        return str(cursor.where(inner))

    def state(self) -> dict[str, Any] | None:
        inner = self._inner.state() if self._inner is not None and self._taken else None
        if inner is None and self._taken and self._exact:
            return None
        return {"done": self._done, "taken": self._taken, "inner": inner}


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


def num_shards_of(stream: Any) -> int | None:
    """The number of shards that a stream offers; None if it does not."""
    number = getattr(stream, "num_shards", None)
    if number is None or not callable(getattr(stream, "shard", None)):
        return None
    return integer(f"num_shards of {type(stream).__name__}", number, 0, "an int that is not negative")


def shard_of(stream: Any, number: int) -> Iterable[Any]:
    """Shard `number` of a stream: `stream.shard(number)`, or `stream.shard(num_shards=..., index=...)`."""
    try:
        names = set(inspect.signature(stream.shard).parameters)
    except (TypeError, ValueError):
        names = set()
    if {"num_shards", "index"} <= names:
        return guarded(stream.shard, num_shards=stream.num_shards, index=number)  # type: ignore[no-any-return]
    return guarded(stream.shard, number)  # type: ignore[no-any-return]


def shard_length_of(stream: Any, number: int) -> int | None:
    """How many samples a shard has: what `stream.shard_length(number)` or else its `len` says; None if neither does."""
    tell: Callable[[int], int | None] | None = getattr(stream, "shard_length", None)
    told = None if tell is None else tell(number)
    return length_or_none(shard_of(stream, number)) if told is None else int(told)


def length_or_none(thing: Any) -> int | None:
    """`len(thing)`, None if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None
