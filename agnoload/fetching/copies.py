"""Copies of a stream for threads: each counts in its own, and all show the same arrays."""

from __future__ import annotations

import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, MutableSequence
from typing import Any

import numpy as np

from agnoload.errors import DatasetNotPicklable, one_line
from agnoload.seeding import NUMPY_GLOBAL, PYTHON_GLOBAL
from agnoload.transport.payload import find_culprit

_SHARED = (type, types.FunctionType, types.ModuleType, np.ndarray, threading.local)


class Copies:
    """Takes a value apart once, and makes as many copies as there are threads.

    Code, arrays, and what `shared(value)` says (datasets with indices) are the same in all copies; containers and what
    the standard library has are copied whatever it says. `DatasetNotPicklable`, naming the path below `name`, for what
    cannot be copied: a lock, an open file, a generator.
    """

    def __init__(self, name: str, value: Any, shared: Callable[[Any], bool]) -> None:
        self._kept: list[Any] = []
        self._shared = shared
        try:
            self._data = self._dump(value)
        except Exception as error:
            raise self._explain(name, value, error) from error

    def make(self) -> Any:
        """One more copy."""
        reader = _Reader(io.BytesIO(self._data))
        reader.kept = self._kept
        return reader.load()

    def _dump(self, value: Any) -> bytes:
        stream = io.BytesIO()
        writer = _Writer(stream, 5)
        writer.kept, writer.shared = self._kept, self._shared
        writer.dump(value)
        return stream.getvalue()

    def _copies(self, value: Any) -> bool:
        try:
            self._dump(value)
        except Exception:
            return False
        return True

    def _explain(self, name: str, value: Any, error: Exception) -> DatasetNotPicklable:
        path, culprit = find_culprit({name: value}, self._copies)
        return DatasetNotPicklable(
            f"{path or name} ({type(culprit).__module__}.{type(culprit).__qualname__}) cannot be copied: "
            f"{one_line(error)}. Every thread reads a copy of a stream: make this object when the stream "
            "is iterated, leave it out in __getstate__, or use num_workers=0"
        )


class _Writer(pickle.Pickler):
    kept: list[Any]
    shared: Callable[[Any], bool]

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if kind in (int, str, float, bytes, bool, type(None)):
            return None
        alike = isinstance(value, _SHARED) or value is PYTHON_GLOBAL or value is NUMPY_GLOBAL
        if kind is types.BuiltinFunctionType:  # but a method that is bound to an object goes with its copy
            alike = isinstance(value.__self__, (type, types.ModuleType, type(None)))
        if not alike:
            # Containers, which a stream may change while it is read, and what Python itself comes with.
            plain = issubclass(kind, (MutableSequence, dict, tuple))
            if plain or kind.__module__.partition(".")[0] in sys.stdlib_module_names or not self.shared(value):
                return None
        self.kept.append(value)
        return len(self.kept) - 1


class _Reader(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, place: int) -> Any:
        return self.kept[place]
