"""What every worker is given at its start: one file, packed once for all of them.

cloudpickle carries the objects, so lambdas, closures and the classes of a script or notebook travel by value; their
large arrays lie beside the pickle and each worker maps them privately, so that all workers share one copy of the
pages until somebody writes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
import os
import pickle
import struct
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np

from agnoload.errors import DatasetNotPicklable, add_note, one_line, warn
from agnoload.inspect import LONG, parts_of, walk_objects
from agnoload.system import free_in_forks
from agnoload.transport import pickling, spawning
from agnoload.transport.mapped import MappedFiles
from agnoload.transport.memory import HUGE, Receiving, aligned, anonymous_file, sending
from agnoload.transport.memory import Mapping as Memory

_LENGTH = struct.Struct("<q")
_packing = free_in_forks(threading.RLock())
"""cloudpickle's list of modules that go by value, and the start that `spawning` feigns, are the whole process's."""

WHOLE, BUFFERS = 1 << 20, 1 << 24
"""Bytes of a pickle, and of the arrays beside it, that a digest looks at whole: some 20 ms."""
SAMPLE = 64
"""Entries of a long container that an outline looks at."""
_PicklerT = TypeVar("_PicklerT", bound="_Pickler")


class _Pickler(pickling.Pickler):
    """For a worker: arrays in mapped files go as their place there, objects of `multiprocessing` go too, and what a
    worker could not import goes by value."""

    def __init__(self, stream: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(stream, 5, buffer_callback=buffer_callback)
        self.files = MappedFiles()
        self.classes: list[type] = []
        """Those that go by value."""
        self.modules: dict[str, None] = {}
        """Those that a worker will import."""
        self._met: set[str] = set()
        self._strays: list[types.ModuleType] = []

    def dump(self, value: Any) -> None:
        try:
            super().dump(value)
        finally:
            for module in self._strays:
                cloudpickle.unregister_pickle_by_value(module)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.files.reduce(value)
        reduced = spawning.reduce(value)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(value, types.ModuleType):
            self._meet(value.__name__)
            self.modules[value.__name__] = None
        elif isinstance(value, (type, types.FunctionType)):
            self._meet(value.__module__)
            reduced = self.reduce_definition(value)
            if reduced is NotImplemented:
                self.modules[str(value.__module__)] = None
            elif isinstance(value, type):
                self.classes.append(value)
            return reduced
        return super().reducer_override(value)

    def _meet(self, name: str) -> None:
        """Have a module go by value if a worker could not import it: a test, or a helper beside a notebook.

        `__main__` does so anyway; `__mp_main__` is the script in a process that `multiprocessing` has spawned.
        """
        module = sys.modules.get(name)
        if name in self._met or name == "__main__" or not isinstance(module, types.ModuleType):
            return
        self._met.add(name)
        registered = name in cloudpickle.list_registry_pickle_by_value()
        if getattr(module, "__file__", None) and not registered and not is_importable(name, tuple(sys.path)):
            with suppress(ValueError):  # it has another name in `sys.modules` than its own
                cloudpickle.register_pickle_by_value(module)
                self._strays.append(module)


@functools.lru_cache(maxsize=4096)
def is_importable(name: str, path: tuple[str, ...]) -> bool:
    """Whether a fresh process with this `sys.path` finds the package, or the module, that a module is in."""
    for finder in sys.meta_path:  # import hooks of editable installs are there, too; those of pytest are not
        if "pytest" not in type(finder).__module__:
            with suppress(Exception):
                if finder.find_spec(name.partition(".")[0], None) is not None:
                    return True
    return False


def pack(value: Any, environment: Any, parts: Mapping[str, Any], method: str) -> tuple[int, list[type], list[str]]:
    """A descriptor of a file that holds `value`, for `Payload` in another process; the classes that go by value, to be
    kept as long as instances of them may come back; and the names of the modules that the other process will import.

    `environment` is plain data that must be in place before `value` can be read. `parts` are the user's objects
    within `value` by name, and `method` the start method, for the error: what cannot be pickled is a
    `DatasetNotPicklable` that names the path to the culprit.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, buffers.append)
    with _packing, spawning.starting():
        try:
            pickler.dump((spawning.Parent(), value, pickler.classes))  # the last is full when the others are written
        except Exception as error:
            path, culprit = find_culprit(parts, lambda value: _pickled(value) is not None)
            if not path and not isinstance(error, _PICKLERS_OWN):
                raise  # out of a signal handler: it is not about what is packed
            raise _explain(error, path or "the loader", culprit, method) from error
        if pickler.files.lost:
            path, _ = find_culprit(parts, lambda value: (files := _pickled(value)) is None or not files.lost)
            warn(
                f"{path or 'the dataset'} lies in shared memory that has no file, so each worker gets a private copy "
                "and no process sees what another one writes there: use multiprocessing.RawArray or SharedMemory, "
                "np.memmap, or multiprocessing_context='fork'"
            )
    raws = [buffer.raw() for buffer in buffers]
    return _written(environment, stream.getbuffer(), raws), pickler.classes, [*pickler.modules]


def _written(environment: Any, header: memoryview, raws: list[memoryview]) -> int:
    """Lay out a file: the length of the table, the table, the pickle, and the buffers at aligned offsets."""
    table = pickle.dumps((environment, header.nbytes, [raw.nbytes for raw in raws]), 5)
    head = _LENGTH.pack(len(table)) + table + header
    spans = list(_spans(len(head), [raw.nbytes for raw in raws]))
    total = sum(spans[-1]) if spans else len(head)
    fd = anonymous_file("agnoload-payload", total)
    try:
        mapping = Memory(fd, 0, total)
        mapping.use_huge_pages(0, total & -HUGE)
        view = memoryview(mapping.array())
        view[: len(head)] = head
        for raw, (start, nbytes) in zip(raws, spans, strict=True):
            view[start : start + nbytes] = raw
    except BaseException:
        os.close(fd)
        raise
    return fd


def _spans(start: int, sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The offset and the size of each buffer behind `start`."""
    for nbytes in sizes:
        start = aligned(start)
        yield start, nbytes
        start += nbytes


class Payload:
    """The receiving side of `pack`."""

    def __init__(self, fd: int) -> None:
        self._view = memoryview(Memory(fd, 0, os.fstat(fd).st_size, private=True).array())
        self._start = _LENGTH.size + _LENGTH.unpack_from(self._view)[0]
        self.environment: Any
        self.environment, self._header, self._sizes = pickle.loads(self._view[_LENGTH.size : self._start])

    def value(self, extra: list[int]) -> Any:
        """Unpickle what was packed, with the descriptors that were sent beside it; runs the user's code."""
        end = self._start + self._header
        buffers = [self._view[start : start + nbytes] for start, nbytes in _spans(end, self._sizes)]
        with Receiving(extra):
            try:
                _, value, classes = pickle.loads(self._view[self._start : end], buffers=buffers)
            except Exception as error:
                _note_rebuilding(error)
                raise
        pickling.learn_classes(classes)
        return value


# ---------------------------------------------------------------------------------------------------- the same again?


class Digest(NamedTuple):
    """What tells one payload from another; only those of the same process can be compared."""

    value: bytes
    unseen: str | None = None
    """The path to a container that was too large to be looked at whole."""


def digest(value: Any, parts: Mapping[str, Any]) -> Digest:
    """The digest of what `pack` would be given.

    Of a pickle beyond `WHOLE` only a sample of each long container counts, with its identity and its length. Of arrays
    beyond `BUFFERS` in all, the address, the length and some bytes.
    """
    try:
        return Digest(_hashed(value, _Pickler, WHOLE)[0])
    except _TooLong:
        found = walk_objects(parts)
        long = [(path, id(thing), len(thing)) for path, thing, *_ in found if _Outline.shortens(thing)]
        hashed, outline = _hashed((value, long), _Outline, math.inf)
        return Digest(hashed, [*(path for path, *_ in long), "dataset"][0] if outline.shortened else None)


def _hashed(value: Any, kind: type[_PicklerT], limit: float) -> tuple[bytes, _PicklerT]:
    hasher = _Hasher(limit)
    pickler = kind(hasher, hasher.look_at)
    with sending() as descriptors, _packing, spawning.starting():
        pickler.dump(value)
        hasher.write(repr([os.fstat(fd)[1:3] for fd in descriptors]).encode())
    return hasher.hash.digest(), pickler


class _TooLong(Exception):
    pass


class _Hasher:
    """A stream, with buffers beside it, that is hashed instead of kept."""

    def __init__(self, limit: float) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._left = limit
        self._whole = BUFFERS

    def write(self, data: bytes) -> None:
        self.hash.update(data)
        self._left -= len(data)
        if self._left < 0:
            raise _TooLong

    def look_at(self, buffer: pickle.PickleBuffer) -> None:
        data = np.frombuffer(buffer.raw(), np.uint8)
        if data.nbytes > self._whole:
            self.write(struct.pack("<2q", data.__array_interface__["data"][0], data.nbytes))
            data = data[:: data.nbytes >> 12 | 1].copy()  # an odd step meets each byte of the numbers
        self._whole -= data.nbytes
        self.hash.update(data.data)
        self.write(bytes(512))  # each costs as much time as half a kilobyte of the pickle


class _Outline(_Pickler):
    """Writes a long container as its length and some of what it holds."""

    shortened = False

    @staticmethod
    def shortens(value: Any) -> bool:
        return type(value) in (dict, list, tuple, set, frozenset, deque) and len(value) > LONG

    def persistent_id(self, value: Any) -> Any:
        if not self.shortens(value):
            return None
        self.shortened = True
        if isinstance(value, (list, tuple)):
            return len(value), [*value[:: len(value) // SAMPLE]]
        return len(value), [*itertools.islice(value.items() if isinstance(value, dict) else value, SAMPLE)]


# ---------------------------------------------------------------------------------------------------- errors

_PICKLERS_OWN = (pickle.PickleError, TypeError, AttributeError, RecursionError)
"""What a pickler raises by itself."""


def _explain(error: Exception, path: str, culprit: Any, method: str) -> DatasetNotPicklable:
    kind = f" ({type(culprit).__module__}.{type(culprit).__qualname__})" if culprit is not None else ""
    way_out = "use worker_type='thread' or num_workers=0"
    if hasattr(type(culprit), "close"):  # a file, a connection
        way_out = (
            "open it on first use and keep it in a threading.local(), which also works in worker threads, "
            "or use num_workers=0"
        )
    remedy = (
        f"With the start method {method!r}, everything that a worker uses must be picklable: create this object in "
        f"worker_init_fn or on first use in __getitem__, leave it out in __getstate__, or {way_out}"
    )
    if spawning.owner_of(culprit):
        remedy = (
            "Only a forked process can inherit it: make it with multiprocessing.get_context('spawn'), whose locks have "
            "names that every worker can open, or use multiprocessing_context='fork', worker_type='thread', or for "
            "data a multiprocessing.RawArray or np.memmap"
        )
    if isinstance(culprit, types.GeneratorType):
        remedy = "A generator can be read only once: write an agnoload.IterableDataset whose __iter__ starts again"
    return DatasetNotPicklable(f"{path}{kind} cannot be sent to a worker process: {one_line(error)}. {remedy}")


def _note_rebuilding(error: Exception) -> None:
    """Say where the error comes from; where a `__getattr__` is to blame, name its class and the remedy."""
    add_note(error, "while the worker rebuilt the dataset and what belongs to it from its pickle")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        method = code.co_name == "__getattr__" and code.co_argcount == 2
        if method and isinstance(error, (RecursionError, AttributeError)):
            kind = type(frame.f_locals.get(code.co_varnames[0]))
            add_note(
                error,
                f"pickle looks up __setstate__ before {kind.__module__}.{kind.__qualname__} has any attribute, and "
                "its __getattr__ cannot handle that: let it raise AttributeError(name) for names that begin with '__'",
            )
            return


def _pickled(value: Any) -> MappedFiles | None:
    """Pickle a value; gives the mapped files that it lies in, None if it cannot be pickled."""
    pickler = _Pickler(io.BytesIO(), lambda _: None)
    try:
        pickler.dump(value)
    except Exception:
        return None
    return pickler.files


def find_culprit(parts: Mapping[str, Any], works: Callable[[Any], bool]) -> tuple[str, Any]:
    """The path to what does not work by itself, as deep as it goes within half a second, and what lies there; an empty
    path if all parts work."""
    deadline = time.monotonic() + 0.5
    path, value = "", None
    seen: set[int] = set()
    children: Iterable[tuple[str, Any]] = parts.items()
    looking = True
    while looking:
        looking = False
        for step, child in children:
            if id(child) not in seen and not works(child):
                seen.add(id(child))
                path, value = path + step, child
                # What a lock or a pipe of `multiprocessing` is made of is not the user's.
                children = () if spawning.owner_of(child) else parts_of(child)
                looking = time.monotonic() < deadline
                break
            if path and time.monotonic() > deadline:
                break
    return path, value
