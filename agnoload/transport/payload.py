"""What every worker is given at its start: one file, packed once for all of them.

cloudpickle carries the objects, so lambdas, closures and the classes of a script or notebook travel by value; their
large arrays lie beside the pickle and each worker maps them privately, so that all workers share one copy of the
pages until somebody writes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np

from agnoload.errors import DatasetNotPicklable, add_note, one_line, warn
from agnoload.inspect import LONG, parts_of, walk_objects
from agnoload.system import free_in_forks
from agnoload.transport import spawning
from agnoload.transport.arena import HUGE, aligned, anonymous_file
from agnoload.transport.arena import Mapping as Memory
from agnoload.transport.mapped import MappedFiles
from agnoload.transport.memory import receiving, sending
from agnoload.transport.pickling import Pickler, learn_classes

_HEAD = struct.Struct("<4q")  # bytes of the surroundings, of the pickle, number of spans, bytes in all
_P = TypeVar("_P", bound=Pickler)
_packing = free_in_forks(threading.RLock())

WHOLE, BUFFERS = 1 << 20, 1 << 24
"""Bytes of a pickle, and of the arrays beside it, that a digest looks at whole: some 20 ms."""
SAMPLE = 64
"""Entries of a long container that an outline looks at."""


def pack(
    value: Any, surroundings: dict[str, Any], parts: Mapping[str, Any], method: str
) -> tuple[int, dict[str, type]]:
    """A descriptor of a file that holds `value`, for `Payload` in another process, and the classes that go by value:
    to be kept as long as instances of them may come back.

    `surroundings` are plain values that must be in place before `value` can be read; afterwards they have the names of
    the modules that this will import, too. `parts` are the user's objects within `value` by name, and `method` the
    start method, for the error: what cannot be pickled is a `DatasetNotPicklable` that names the path to the culprit.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = Pickler(stream, 5, buffer_callback=buffers.append)
    classes = pickler.classes = {}
    modules = pickler.modules = {}
    files = pickler.files = MappedFiles()
    with _packing, _unimportable_by_value(), spawning.starting():
        try:
            pickler.dump((spawning.Parent(), value, classes))  # the last is full when the others have been written
        except Exception as error:
            path, culprit = find_culprit(parts, _pickles)
            if not path and not isinstance(error, _PICKLINGS_OWN):
                raise  # out of a signal handler: it is not about what is packed
            raise _explain(error, path or "the loader", culprit, method) from error
        if files.lost:
            path, _ = find_culprit(parts, _reaches)
            warn(
                f"{path or 'the dataset'} lies in shared memory that has no file, so each worker gets a private copy "
                "and what is written there later reaches nobody else: use multiprocessing.RawArray or SharedMemory, "
                "np.memmap, or multiprocessing_context='fork'"
            )
    header = stream.getbuffer()
    around = pickle.dumps(surroundings, 5)
    surroundings["modules"] = list(modules)
    raws = [buffer.raw() for buffer in buffers]
    offset = aligned(_HEAD.size + len(around) + len(header) + 16 * len(raws))
    spans: list[int] = []
    for raw in raws:
        spans += (offset, raw.nbytes)
        offset = aligned(offset + raw.nbytes)
    total = max(offset, 1)
    fd = anonymous_file("agnoload-payload", total)
    try:
        mapping = Memory(fd, 0, total)
        mapping.back(0, total & -HUGE)
        memory = mapping.array()
        head = _HEAD.pack(len(around), len(header), len(raws), total) + around + bytes(header)
        head += struct.pack(f"<{len(spans)}q", *spans)
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        for raw, start in zip(raws, spans[::2], strict=True):
            if raw.nbytes:
                memory[start : start + raw.nbytes] = np.frombuffer(raw, np.uint8)
    except BaseException:
        os.close(fd)
        raise
    return fd, classes


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
        hasher, _ = _hashed(value, Pickler, WHOLE)
    except _TooLong:
        found = walk_objects(parts)
        long = [(path, id(thing), len(thing)) for path, thing, *_ in found if _Outline.shortens(thing)]
        hasher, pickler = _hashed((value, long), _Outline, math.inf)
        return Digest(hasher.hash.digest(), [*(path for path, *_ in long), "dataset"][0] if pickler.shortened else None)
    return Digest(hasher.hash.digest())


def _hashed(value: Any, kind: type[_P], limit: float) -> tuple[_Hasher, _P]:
    hasher = _Hasher(limit)
    pickler = kind(hasher, 5, buffer_callback=hasher.look_at)
    pickler.files = MappedFiles(names=False)
    with sending() as descriptors, _packing, _unimportable_by_value(), spawning.starting():
        pickler.dump(value)
        hasher.write(repr([os.fstat(fd)[1:3] for fd in descriptors]).encode())
    return hasher, pickler


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


class _Outline(Pickler):
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


class Payload:
    """The receiving side of `pack`."""

    def __init__(self, fd: int) -> None:
        total = os.fstat(fd).st_size
        self._view = memoryview(Memory(fd, 0, total, private=True).array())
        around, self._header, self._spans, _ = _HEAD.unpack_from(self._view, 0)
        self._start = _HEAD.size + around
        self.surroundings: dict[str, Any] = pickle.loads(self._view[_HEAD.size : self._start])

    def value(self, extra: list[int]) -> Any:
        """Unpickle what was packed, with the descriptors that were sent beside it; runs the user's code."""
        end = self._start + self._header
        spans = struct.unpack_from(f"<{2 * self._spans}q", self._view, end)
        buffers = [self._view[o : o + n] for o, n in zip(spans[::2], spans[1::2], strict=True)]
        with receiving(extra):
            try:
                _, value, classes = pickle.loads(self._view[self._start : end], buffers=buffers)
            except Exception as error:
                _note_rebuilding(error)
                raise
        learn_classes(classes)
        return value


@functools.lru_cache(maxsize=4096)
def _importable(name: str, path: tuple[str, ...]) -> bool:
    """Whether a fresh process with this `sys.path` finds the top-level module `name`."""
    if name in sys.builtin_module_names:
        return True
    try:
        return importlib.machinery.PathFinder.find_spec(name, list(path)) is not None
    except Exception:
        return False


@contextmanager
def _unimportable_by_value() -> Iterator[None]:
    """While packing, let what a worker could not import (a test module, a notebook's helper) travel by value."""
    path = tuple(sys.path)
    found = []
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if (
            isinstance(module, types.ModuleType)
            and getattr(module, "__file__", None)
            and name != "__main__"  # cloudpickle sends that by value; `__mp_main__` is the script in a spawned process
            and not _importable(top, path)
            and not _installed_by_hook(sys.modules.get(top))
        ):
            try:
                cloudpickle.register_pickle_by_value(module)
                found.append(module)
            except ValueError:  # registered by the user already, or not a real module
                continue
    try:
        yield
    finally:
        for module in found:
            cloudpickle.unregister_pickle_by_value(module)


def _installed_by_hook(module: Any) -> bool:
    """An import hook (an editable install) finds this module, in a worker too."""
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return False
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder or "pytest" in type(finder).__module__:
            continue
        try:
            if finder.find_spec(spec.name, None) is not None:
                return True
        except Exception:
            continue
    return False


_PICKLINGS_OWN = (pickle.PickleError, TypeError, AttributeError, RecursionError)
"""What a pickler raises by itself."""


def _explain(error: Exception, path: str, culprit: Any, method: str) -> DatasetNotPicklable:
    kind = f" ({type(culprit).__module__}.{type(culprit).__qualname__})" if culprit is not None else ""
    way_out = "use worker_type='thread' or num_workers=0"
    if hasattr(type(culprit), "close"):  # a file, a connection
        way_out = (
            "open it on first use into a threading.local(), which suits worker threads too (they must not share it), "
            "or use num_workers=0"
        )
    remedy = (
        f"With the start method {method!r} everything that a worker uses must pickle: make this object in "
        f"worker_init_fn or on first use in __getitem__, leave it out in __getstate__, or {way_out}"
    )
    if spawning.owner_of(culprit):
        remedy = (
            "It can be inherited by a fork alone: make it with multiprocessing.get_context('spawn'), whose locks have "
            "names and reach workers of every start method, or use multiprocessing_context='fork', "
            "worker_type='thread', or for data a multiprocessing.RawArray or np.memmap"
        )
    if isinstance(culprit, types.GeneratorType):
        remedy = "It could be read only once, too: write an agnoload.IterableDataset whose __iter__ begins anew"
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
                f"pickle asks for __setstate__ before {kind.__module__}.{kind.__qualname__} has any attribute, which "
                "its __getattr__ does not expect: let it raise AttributeError(name) for names that begin with '__'",
            )
            return


def find_culprit(parts: Mapping[str, Any], works: Callable[[Any], bool]) -> tuple[str, Any]:
    """The path to what does not work by itself, as deep as it goes within half a second, and what lies there; an empty
    path if all parts work."""
    deadline = time.monotonic() + 0.5
    for name, part in parts.items():
        if not works(part):
            return _descend(name, part, works, deadline)
    return "", None


def _pickles(value: Any) -> bool:
    return _pickled(value) is not None


def _reaches(value: Any) -> bool:
    """Whether no shared memory in a value becomes a copy."""
    files = _pickled(value)
    return files is None or not files.lost


def _pickled(value: Any) -> MappedFiles | None:
    """Pickle a value; gives the mapped files that it lies in, None if it cannot be pickled."""
    pickler = Pickler(io.BytesIO(), 5, buffer_callback=lambda _: None)
    files = pickler.files = MappedFiles()
    try:
        pickler.dump(value)
    except Exception:
        return None
    return files


def _descend(path: str, value: Any, works: Callable[[Any], bool], deadline: float) -> tuple[str, Any]:
    """Follow the first child that does not work, as deep as it goes."""
    seen = {id(value)}
    while time.monotonic() < deadline:
        # What a lock or a pipe of `multiprocessing` is made of is not the user's.
        for step, child in () if spawning.owner_of(value) else parts_of(value):
            if id(child) not in seen and not works(child):
                path, value = path + step, child
                seen.add(id(child))
                break
            if time.monotonic() > deadline:
                return path, value
        else:
            break
    return path, value
