"""The seams: who calls whom, with what, and what must hold.

Each one is small enough to be faked in a test; `agnoload.testing` has the fakes.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from agnoload.errors import AgnoloadWarning, BackendUnavailable, OptionError
from agnoload.messages import Reply, Request
from agnoload.worker_info import WorkerInfo

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


class Backend:
    """Turns the NumPy leaves of a batch into another library's arrays; subclass it, give `name` and `convert`.

    A backend is found through an entry point of the group `agnoload.backends` that names the class. It is created
    without arguments, once for each loader, so its module and its constructor must be cheap and must not import the
    framework: `require` does that, at the first use. Everything but `name` and `convert` has a default; this class
    itself is the backend of NumPy. `agnoload.testing.check_backend` tests what is promised here.

    The loader calls `check` in its constructor, `attach` for each slot, and for each batch `convert` on every leaf,
    then `place` if `check` gave a device. `to_numpy` and the methods on random numbers are called where samples are
    loaded, in workers too, and only in a process where the framework is loaded already.
    """

    name: str = "numpy"
    framework: str | None = None
    """The framework's top-level module, e.g. `"torch"`: whether it is loaded is looked up in `sys.modules`."""
    requirement: str | None = None
    """What `pip install` must be given to get the framework; its own name when None."""

    def require(self) -> Any:
        """The framework's module, imported now; `BackendUnavailable` with the `pip install` line or the reason."""
        if self.framework is None:
            raise OptionError(f"backend {self.name!r} has no framework to import: set its `framework`")
        try:
            return importlib.import_module(self.framework)
        except ModuleNotFoundError as error:
            if error.name != self.framework:
                raise _broken_framework(self, error) from error
            raise missing_framework(self) from None
        except Exception as error:
            raise _broken_framework(self, error) from error

    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        """Refuse what cannot work, with `OptionError` or `BackendUnavailable`; remember what `convert` must know.

        Returns `device` in the form that `place` takes, None where `convert` is all that is needed. `pin_memory` where
        there is nothing to pin for is one `AgnoloadWarning`, not an error.
        """
        if device is not None:
            raise OptionError(f"backend {self.name!r} has no devices: device must be None, got {device!r}")
        if pin_memory:
            text = f"pin_memory=True does nothing with backend {self.name!r}: name a framework's with backend="
            warnings.warn(text, AgnoloadWarning, stacklevel=3)
        return None

    def convert(self, leaf: Any) -> Any:
        """One leaf of a batch as the framework's array, sharing memory where that is safe.

        A leaf is a NumPy array, or whatever else a batch holds: return it as it is where the framework has nothing
        better. A writable array's memory belongs to the batch: it stays as it is for as long as anything made from it
        without a copy keeps a reference to it. A read-only array may be the dataset's own: copy it.
        """
        return leaf

    def attach(self, slot: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Page-lock the memory of a slot, and return what undoes it; called only with `pin_memory`.

        Called once for each mapping of a slot; undone before the mapping goes or its pages are given back.
        """
        return lambda: None

    def fence(self) -> Callable[[], bool]:
        """Whether a device may still read an attached slot: True when what was queued until this call has run.

        The loader calls it, in its own thread, when the last view of an attached slot has died, and refills the slot
        only after the result has said True: the user may have queued a copy and dropped the batch.
        """
        return lambda: True

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        """Start to copy a whole converted batch to `device`, and return what gives the batch there.

        The loader calls it up to two batches ahead and calls the result, once, when the batch is due. Whatever the copy
        reads must stay referenced until the copy has ended.
        """
        return lambda: batch

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any] | None:
        """An array of the framework as a NumPy array, sharing memory where possible; None for anything else."""
        return leaf if isinstance(leaf, np.ndarray) else None

    def pack(self, value: Any) -> tuple[Callable[[npt.NDArray[Any]], Any], npt.NDArray[Any]] | None:
        """How an array of the framework travels to a worker and back: what makes it again, and its memory.

        The first must be found by its name when pickled, and gets an array that it may share; None, also for anything
        that is not the framework's: as it pickles by itself. It is called in any process that has loaded the framework.
        """
        return None

    def seed(self, number: int) -> None:
        """Seed the framework's global generator with 64 bits; called around a request."""

    def rng_state(self) -> Any:
        """The state of the framework's global generator, for `set_rng_state`."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` gave."""

    def drawn(self) -> bool:
        """Whether anybody has drawn from the framework's global generator since it was seeded last, or imported.

        Asked where the framework was imported while a batch was loaded, too late for `seed`.
        """
        return False

    def seed_from(self, generator: Any) -> int | None:
        """Draw 63 bits from a generator of the framework; None if it is not one of its own."""
        return None

    def reseed(self, generator: Any, number: int) -> Callable[[], None] | None:
        """Seed a generator object of the framework with 64 bits, and return what puts its state back.

        None, and nothing done, for what is none of its own. Called for generators that a dataset keeps.
        """
        return None

    def world(self) -> tuple[int, int] | None:
        """This process's rank and the number of processes, if the framework is loaded and knows."""
        return None

    def settings(self) -> Callable[[], None] | None:
        """What gives another process the settings that the framework has in this one, None if they are as imported.

        It must be found by its name when pickled. A worker calls it before and after it rebuilds the dataset: only
        what changes results is worth an import of the framework. Asked where the framework is loaded.
        """
        return None

    def enter_worker(self, look: Callable[[], WorkerInfo | None]) -> None:
        """Let the framework's own function of this kind, if it has one, say in workers what `look()` gives there.

        Called in a process that loads samples for a loader, or has threads that do, once the framework is loaded there.
        `look()` gives None outside of workers. It counts as asking: a stream that looks splits itself.
        """

    def worker_environment(self) -> Mapping[str, str]:
        """Environment variables for worker processes, set before anything of the framework is loaded there."""
        return {}


def missing_framework(backend: Backend) -> BackendUnavailable:
    """The error for a framework that is not installed, with the line that installs it."""
    wanted = backend.requirement or backend.framework
    return BackendUnavailable(
        f"backend {backend.name!r} needs {backend.framework}, which is not installed: pip install {wanted}"
    )


def _broken_framework(backend: Backend, error: Exception) -> BackendUnavailable:
    return BackendUnavailable(
        f"backend {backend.name!r} needs {backend.framework}, which is installed but cannot be imported: "
        f"{type(error).__name__}: {error}"
    )
