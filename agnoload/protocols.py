"""The seams: who calls whom, with what, and what must hold.

Each one is small enough to be faked in a test; `agnoload.testing` has the fakes.
"""

from __future__ import annotations

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
    `close` at the end, at the latest when the loader is closed; after `close`, which may be called twice, nothing is
    left of it. `ready` says whether `receive` would return without waiting. `waiting` is true where an exception that a
    signal handler raises leaves everything as it was: `receive` may be called again.
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
    """One that may have something open: files that a stream reads."""

    def close(self) -> None:
        """Called at the end, in the thread or process that answers."""


@runtime_checkable
class Stateful(Protocol):
    """Has a place to save and to go back to: a dataset, a stream, a sampler of the user's."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...
