"""`get_worker_info()`: what user code can ask about the worker that runs it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class WorkerInfo:
    """What `get_worker_info()` gives inside a worker.

    `id` counts from 0 to `num_workers - 1`; `seed` is the loader's seed; `dataset` is this worker's copy; `epoch` is
    the epoch of the request being loaded; `rank` and `world_size` are this process's among those that train together.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    asked: int = 0
    """How often user code has called `get_worker_info()`: a stream that asks splits itself."""
    on_asked: Callable[[], None] | None = field(default=None, repr=False, compare=False)
    """Called each time that user code asks; set while a stream is read, where the answer changes what is read."""
    divisible: bool = True
    """Whether the stream being read may split itself: not where each worker reads lanes, or where only some parts would
    split."""


_current: ContextVar[WorkerInfo | None] = ContextVar("agnoload_worker_info", default=None)


def get_worker_info() -> WorkerInfo | None:
    """The facts about the worker that runs this code; None in the process or thread that iterates the loader.

    >>> get_worker_info() is None
    True
    """
    info = _current.get()
    if info is not None:
        info.asked += 1
        if info.on_asked is not None:
            info.on_asked()
    return info


def framework_worker_info() -> WorkerInfo | None:
    """The same for code that was written for a framework's loader and asks the framework.

    None, as without workers, while a stream is read that must not split itself: such code would always split it.
    """
    info = _current.get()
    return None if info is not None and info.on_asked is not None and not info.divisible else get_worker_info()


def peek_worker_info() -> WorkerInfo | None:
    """The same for this library itself, which does not count as asking."""
    return _current.get()


def set_worker_info(info: WorkerInfo | None) -> None:
    """Called by a worker once, before any user code runs in it."""
    _current.set(info)
