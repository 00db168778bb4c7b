"""The interfaces between rooms: who calls whom, with what, and what must hold.

Each one is small enough to fake in a test; `agnoload.testing` has the fakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from agnoload.messages import Reply, Request

IndexArray = npt.NDArray[np.int64]


class Empty(Protocol):
    """Gives the memory that a batch is written into: `np.empty`, or a place in a slot.

    Called by `collate` and by datasets that gather whole batches, once an array. What comes back is an uninitialised,
    writable, C-contiguous array of that shape and dtype.
    """

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]: ...


class Pool(Protocol):
    """Answers requests, in any order; each request is answered exactly once, or `receive` raises.

    The loader calls `submit` while its window has room, `receive` when it needs a batch that is not there yet, and
    `close` at the end, at the latest when the loader is closed. `close` may be called twice and leaves nothing behind.
    `ready` says whether `receive` would return without waiting. While `waiting` is true, an exception out of a signal
    handler loses nothing: `receive` may be called again.
    """

    @property
    def waiting(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def receive(self, timeout: float | None = None) -> Reply: ...

    def ready(self) -> bool: ...

    def close(self) -> None: ...


class Fetch(Protocol):
    """Turns a request into a reply; the same object in this thread, in a thread pool and in a worker process."""

    def __call__(self, request: Request, empty: Empty) -> Reply: ...


class ClosableFetch(Fetch, Protocol):
    """One that may hold open files: those that a stream reads."""

    def close(self) -> None:
        """Called at the end, in the thread or process that answers."""


class WorkerFetch(ClosableFetch, Protocol):
    """What a worker runs. It learns once, before its first request, which worker it serves."""

    def begin(self, worker: int) -> None: ...

    def parts(self) -> Mapping[str, Any]:
        """The user's objects in it, by the names that an error uses."""


@runtime_checkable
class Stateful(Protocol):
    """Can save its position and return to it: a dataset, a stream, a user's sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...
