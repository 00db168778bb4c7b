"""The seams: who calls whom, with what, and what must hold.

Each one is small enough to be faked in a test; `agnoload.testing` has the fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    left of it. `ready` says whether `receive` would return without waiting.
    """

    def submit(self, request: Request) -> None: ...

    def receive(self, timeout: float | None = None) -> Reply: ...

    def ready(self) -> bool: ...

    def close(self) -> None: ...


class Fetch(Protocol):
    """Turns a request into a reply; the same object in this thread, in a thread pool and in a worker process."""

    def __call__(self, request: Request, empty: Empty) -> Reply: ...


@runtime_checkable
class Stateful(Protocol):
    """Has a place to save and to go back to: a dataset, a stream, a sampler of the user's."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class Backend:
    """Turns the NumPy leaves of a batch into another library's arrays; subclass it, give `name` and `convert`.

    A backend is found through an entry point of the group `agnoload.backends` that names the class; it is created
    without arguments, so its constructor must be cheap and must not import the framework. Everything but `name` and
    `convert` has a default that does nothing.
    """

    name: str = "numpy"
    framework: str | None = None
    """The framework's top-level module, e.g. `"torch"`: whether it is loaded is looked up in `sys.modules`."""

    def check(self, device: Any = None, pin_memory: bool = False) -> None:
        """Called in the loader's constructor: raise `BackendUnavailable` or `OptionError` if this cannot work."""

    def convert(self, leaf: npt.NDArray[Any]) -> Any:
        """One NumPy array of a batch as the framework's array, sharing its memory where that is safe.

        The array is writable and its memory belongs to the batch: it stays as it is for as long as anything made from
        it, without a copy, keeps a reference to it. Return the leaf itself for what the framework cannot hold.
        """
        return leaf

    def attach(self, slot: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Page-lock the memory of a slot, once, and return what undoes it; called only with `pin_memory`."""
        return lambda: None

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        """Start to copy a whole converted batch to `device`, and return what gives the batch there.

        The loader calls it up to two batches ahead and calls the result when the batch is due. Whatever the copy reads
        must stay referenced until the copy has ended.
        """
        return lambda: batch

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any]:
        """An array of the framework, found in a sample, as a NumPy array; sharing memory is fine."""
        return np.asarray(leaf)

    def seed(self, number: int) -> None:
        """Seed the framework's global generator (64 bits), called around a request if the framework is loaded."""

    def rng_state(self) -> Any:
        """The state of the framework's global generator, for `set_rng_state`."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` gave."""

    def seed_from(self, generator: Any) -> int | None:
        """Draw 63 bits from a generator of the framework; None if it is not one of its own."""
        return None

    def world(self) -> tuple[int, int] | None:
        """This process's rank and the number of processes, if the framework knows."""
        return None

    def worker_environment(self) -> Mapping[str, str]:
        """Environment variables for worker processes, set before anything of the framework is loaded there."""
        return {}
