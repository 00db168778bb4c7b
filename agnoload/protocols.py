"""The interfaces between rooms: who calls whom, with what, and what must hold.

Each one is small enough to fake in a test; `agnoload.testing.FakePool` is a pool that answers in an order of its own.
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

    The loader calls `submit` while its window has room. A request with an `owner` is for that worker, which answers its
    requests in their order. `receive` waits for the next reply, at most `timeout` seconds, then it raises
    `WorkerTimeout`; `ready` says whether it would return without waiting. `Reply.worker` is the worker's number, and an
    error has a note that names the worker.

    `close` ends everything and leaves nothing behind. It may be called twice, from another thread, or by a signal
    handler while `receive` waits, which then raises `LoaderClosed`.

    While `waiting` is true, an exception out of a signal handler loses nothing: `receive` may be called again. So
    between taking a reply and setting `waiting` to false there must be no step that such an exception can come between.
    """

    @property
    def waiting(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def receive(self, timeout: float | None = None) -> Reply: ...

    def ready(self) -> bool: ...

    def close(self) -> None: ...


class Fetch(Protocol):
    """Turns a request into a reply, wherever it runs.

    An error of a sample comes as `Reply.error`. What is no `Exception`, such as `KeyboardInterrupt`, is raised: a
    worker makes `Reply(number, error=...)` of it.
    """

    def __call__(self, request: Request, empty: Empty) -> Reply: ...


class ClosableFetch(Fetch, Protocol):
    """One that may hold open files: those that a stream reads."""

    def close(self) -> None:
        """Called at the end, in the thread or process that answers."""


class WorkerFetch(ClosableFetch, Protocol):
    """What a worker runs. One object serves one worker: each thread gets `copy.copy(fetch)`, each process a pickle."""

    def begin(self, worker: int) -> None:
        """Called once in the worker, before its first request; never where there are no workers."""

    def parts(self) -> Mapping[str, Any]:
        """The user's objects in it, by the names that an error uses."""


@runtime_checkable
class Stateful(Protocol):
    """Can save its position and return to it: a dataset, a stream, a user's sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...
