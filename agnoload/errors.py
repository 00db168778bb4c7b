"""What can go wrong, and the class of each error.

AgnoloadError
├── OptionError (ValueError)                      an option that cannot work, rejected by a constructor
├── CollateError (TypeError)                      samples that do not fit into one batch: path, indices, both sides
├── StateError (ValueError)                       a saved state that does not belong to this loader
├── DatasetNotPicklable (TypeError)               something that cannot reach a worker, by its path
├── SampleStopped (RuntimeError)                  StopIteration or GeneratorExit out of user code
├── WorkerDied (RuntimeError)                     a worker process ended before it answered
├── WorkerTimeout (RuntimeError, TimeoutError)    no batch came within `timeout`
├── TooManyFailed (RuntimeError)                  more samples failed than `max_failed` allows
├── LoaderClosed (RuntimeError)                   the loader was closed before the end of its data
└── BackendUnavailable (ImportError)              a backend that this machine cannot run

AgnoloadWarning (UserWarning)                     the category of every warning of this library

An exception that user code raises is never wrapped: it keeps its type, arguments and attributes; notes (`__notes__`)
add the worker, the batch and the index.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any


class AgnoloadError(Exception):
    """The base of every error that this library raises by itself."""


class OptionError(AgnoloadError, ValueError):
    """An option cannot work; the text says what must hold, what was given and what to do."""


class CollateError(AgnoloadError, TypeError):
    """Samples do not fit into one batch; the text names the path to the field, the indices and both sides.

    `path` leads to the leaf inside a sample (`"target.boxes"`, empty for the sample itself), `items` are the positions
    of the two samples within the batch.
    """

    def __init__(self, message: str, path: str = "", items: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.items = tuple(items)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.path, self.items), self.__dict__


class StateError(AgnoloadError, ValueError):
    """A saved state does not belong to this loader; the text shows both sides."""


class DatasetNotPicklable(AgnoloadError, TypeError):
    """A dataset or function cannot be sent to a worker; the text names the path to the culprit."""


class SampleStopped(AgnoloadError, RuntimeError):
    """User code raised StopIteration or GeneratorExit, which must not look like the end of the data."""


class WorkerDied(AgnoloadError, RuntimeError):
    """A worker process ended before it answered.

    `worker` is its number and `pid` its process; `exitcode` is as in `multiprocessing` (negative: minus the signal;
    None: other code in this program has collected it); `batch` and `indices` are what it was loading (None when it was
    idle); `oom_kills` is the number of out-of-memory kills that the control group counted meanwhile; `rss` is its peak
    resident memory in bytes, None where the system does not report it (start method spawn).
    """

    def __init__(
        self,
        message: str,
        worker: int | None = None,
        pid: int | None = None,
        exitcode: int | None = None,
        batch: int | None = None,
        indices: Any = None,
        oom_kills: int = 0,
        rss: int | None = None,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.pid = pid
        self.exitcode = exitcode
        self.batch = batch
        self.indices = indices
        self.oom_kills = oom_kills
        self.rss = rss


class WorkerTimeout(AgnoloadError, RuntimeError, TimeoutError):
    """No batch came within `timeout` seconds; the text names worker, indices, seconds and the worker's stack."""


class TooManyFailed(AgnoloadError, RuntimeError):
    """More samples of an epoch failed than `max_failed` allows; `failed` lists them, with their errors as text."""

    def __init__(self, message: str, failed: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.failed = tuple(failed)


class LoaderClosed(AgnoloadError, RuntimeError):
    """The loader was closed, perhaps by another thread, before this iterator reached its end."""


class BackendUnavailable(AgnoloadError, ImportError):
    """A backend cannot run here; the text gives the reason and, if a package is missing, the `pip install` line."""


CALLED = (Exception, GeneratorExit, SystemExit)
"""What user code may raise while we only describe something; a `KeyboardInterrupt` must still get through."""


def add_note(error: BaseException, text: str) -> None:
    """`error.add_note(text)`, also for a class that allows no assignment, such as a frozen dataclass."""
    try:
        error.add_note(text)
    except CALLED:
        with contextlib.suppress(*CALLED):
            attributes_of(error).setdefault("__notes__", []).append(text)


def attributes_of(error: BaseException) -> dict[str, Any]:
    """`error.__dict__`, even if the user's class overrides attribute access."""
    try:
        found: dict[str, Any] = object.__getattribute__(error, "__dict__")
    except CALLED:
        return {}
    return found


def text_of(error: BaseException) -> str:
    """`str(error)`, or a placeholder if the user's class raises."""
    try:
        return str(error)
    except CALLED as broken:
        return f"<its text cannot be made: {type(broken).__name__}>"


def one_line(error: BaseException) -> str:
    """An exception in one line: its type and its text."""
    return f"{type(error).__name__}: {text_of(error)}"


class AgnoloadWarning(UserWarning):
    """The category of every warning of this library."""


def warn(text: str) -> None:
    """Give an `AgnoloadWarning` that points to the innermost line of user code."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("agnoload."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, AgnoloadWarning, stacklevel=level)


class WarnOnce:
    """Gives a loader's warnings, each of them once. It does not know the loader, because finalizers hold it."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warn(text)
