"""`Backend`: what turns the NumPy leaves of a batch into another library's arrays.

Its hooks come in four groups: *arrays* (`convert`, `to_numpy`, `pack`), *devices* (`check`, `place`, `attach`,
`fence`), *random numbers* (`seed`, `rng_state`, `set_rng_state`, `seed_from`, `reseed`) and *environment*
(`world`, `settings`, `enter_worker`, `worker_environment`).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import AgnoloadWarning, BackendUnavailable, OptionError
from agnoload.worker_info import WorkerInfo

PackedArray = tuple[Callable[[npt.NDArray[Any]], Any], npt.NDArray[Any]]
"""What makes a framework's array again from a NumPy array, and that array."""


class Backend:
    """Turns the NumPy leaves of a batch into another library's arrays; subclass it, give `name` and `convert`.

    A package offers a backend through an entry point of the group `agnoload.backends` that names the class. Each loader
    creates one without arguments, so the module and the constructor must be cheap and must not import the framework:
    `require` does that, at the first use. Everything but `name` and `convert` has a default; this class itself is the
    backend of NumPy. `agnoload.testing.check_backend` tests what is promised here.

    The loader calls `check` in its constructor, `attach` for each slot, and for each batch `convert` on every leaf,
    then `place` if `check` gave a device. `to_numpy`, `pack` and the hooks for random numbers run wherever samples are
    loaded, in workers too, but only in a process that has loaded the framework.
    """

    name: str = "numpy"
    framework: str | None = None
    """The framework's top-level module, e.g. `"torch"`; the loader looks in `sys.modules` to see if it is loaded."""
    requirement: str | None = None
    """What to give to `pip install` to get the framework; its own name when None."""

    def require(self) -> Any:
        """The framework's module, imported now; `BackendUnavailable` with the `pip install` line or the reason."""
        if self.framework is None:
            raise OptionError(f"backend {self.name!r} has no framework to import: set its `framework`")
        try:
            return importlib.import_module(self.framework)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == self.framework:
                raise missing_framework(self) from None
            raise BackendUnavailable(
                f"backend {self.name!r} needs {self.framework}, which is installed but cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error

    # ------------------------------------------------------------------------------------------------ arrays

    def convert(self, leaf: Any) -> Any:
        """One leaf of a batch as the framework's array, sharing memory where that is safe.

        A leaf is a NumPy array, or whatever else a batch holds: return it unchanged where the framework has nothing
        better. A writable array's memory belongs to the batch: it stays unchanged as long as anything made from it
        without a copy keeps a reference to it. A read-only array may belong to the dataset: copy it.
        """
        return leaf

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any] | None:
        """An array of the framework as a NumPy array, sharing memory where possible; None for anything else."""
        return leaf if isinstance(leaf, np.ndarray) else None

    def pack(self, value: Any) -> PackedArray | None:
        """How an array of the framework travels to a worker and back: a function that rebuilds it, and its memory.

        Pickle must find the function by its name; it gets an array whose memory it may share. Return None, also for
        anything that is not the framework's, to let it pickle by itself.
        """
        return None

    # ------------------------------------------------------------------------------------------------ devices

    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        """Refuse what cannot work, with `OptionError` or `BackendUnavailable`; remember what `convert` must know.

        Returns `device` in the form that `place` takes, None where `convert` is enough. `pin_memory` where there is
        nothing to pin for gives one `AgnoloadWarning`, not an error.
        """
        if device is not None:
            raise OptionError(f"backend {self.name!r} has no devices: device must be None, got {device!r}")
        if pin_memory:
            text = f"pin_memory=True does nothing with backend {self.name!r}: choose a framework's with backend="
            warnings.warn(text, AgnoloadWarning, stacklevel=3)
        return None

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        """Start to copy a whole converted batch to `device`, and return a function that gives the batch there.

        The loader calls it up to two batches ahead and calls the result, once, when the batch is due. Keep a reference
        to whatever the copy reads until the copy has ended.
        """
        return lambda: batch

    def attach(self, slot: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Page-lock the memory of a slot, and return a function that undoes it; called only with `pin_memory`.

        Called once for each mapping of a slot, and undone before the loader unmaps it or gives its pages back.
        """
        return lambda: None

    def fence(self) -> Callable[[], bool]:
        """A function that says whether the device has run all that was queued until now.

        The user may have queued a copy from an attached slot and dropped the batch. So the loader calls `fence` in its
        own thread when the last view of such a slot has died, and refills the slot only after the result says True.
        """
        return lambda: True

    # ------------------------------------------------------------------------------------------------ random numbers

    def seed(self, number: int) -> None:
        """Seed the framework's global generator with 64 bits; called around a request."""

    def rng_state(self) -> Any:
        """The state of the framework's global generator, for `set_rng_state`."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` gave."""

    def seed_from(self, generator: Any) -> int | None:
        """Draw 63 bits from a generator of the framework; None if it is not one of its own."""
        return None

    def reseed(self, generator: Any, number: int) -> Callable[[], None] | None:
        """Seed a generator object of the framework with 64 bits, and return a function that puts its state back.

        Do nothing and return None for any other object. Called for generators that a dataset keeps.
        """
        return None

    # ------------------------------------------------------------------------------------------------ environment

    def world(self) -> tuple[int, int] | None:
        """This process's rank and the number of processes, if the framework is loaded and knows."""
        return None

    def settings(self) -> Callable[[], None] | None:
        """A function that gives another process the framework's settings of this one; None if they are the defaults.

        Pickle must find it by its name. A worker calls it before and after it rebuilds the dataset, so return one only
        for settings that change results and are worth importing the framework. Asked where the framework is loaded.
        """
        return None

    def enter_worker(self, look: Callable[[], WorkerInfo | None]) -> None:
        """Make the framework's own `get_worker_info`, if it has one, return in workers what `look()` returns there.

        Called in a process that loads samples for a loader, or has threads that do, once it has loaded the framework.
        `look()` returns None outside of workers. To call it is to ask: a stream that asks splits itself.
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
