"""`Backend`: what turns the NumPy leaves of a batch into another library's arrays."""

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
    """Turns the NumPy leaves of a batch into another library's arrays; this class itself is the backend of NumPy.

    To add one, write a subclass and name it in an entry point of your package; `agnoload.testing.check_backend` tests
    what is promised here, and docs/backends.md makes one step by step.

        class MyBackend(Backend):
            name = framework = "mylib"

            def convert(self, leaf):
                if type(leaf) is not np.ndarray or leaf.dtype.kind not in "biuf":
                    return leaf  # what mylib cannot hold stays as it is
                return self.require().from_numpy(leaf if leaf.flags.carray else leaf.copy())

            def to_numpy(self, leaf):
                return leaf.numpy() if isinstance(leaf, self.require().Array) else None

        [project.entry-points."agnoload.backends"]  # in pyproject.toml
        mylib = "my_package:MyBackend"

    Everything else has a default, and is there for what the library has:

    - `framework` is the library's module. It may take seconds to import, so nothing does before it is needed: the
      module and the constructor of the subclass do without it, and methods get it from `require`.
    - *Arrays.* `convert` is called on every leaf of each batch, in the process that iterates the loader. `to_numpy`
      and `pack` let a dataset return the library's arrays, in workers too.
    - *Devices.* `check` is called once, in the loader's constructor. If it returns a device, `place` gets each batch
      after `convert`. `attach` and `fence` serve `pin_memory`.
    - *Random numbers.* `seed`, `rng_state` and `set_rng_state` are called around each request, and `reseed` on
      generators that a dataset keeps, so that samples draw the same for any workers. `seed_from` serves `generator=`.
    - *Environment.* `world` knows the ranks; `settings`, `enter_worker` and `worker_environment` make a worker like the
      process that it works for.

    Each loader makes one object without arguments, so `check` may store what `convert` must know. One more, for samples
    and generators of the library, is made in each process that has imported `framework`; `check` is not called on it.
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
                wanted = self.requirement or self.framework
                raise BackendUnavailable(
                    f"backend {self.name!r} needs {self.framework}, which is not installed: pip install {wanted}"
                ) from None
            raise BackendUnavailable(
                f"backend {self.name!r} needs {self.framework}, which is installed but cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error

    # -- arrays

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

    # -- devices

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

    # -- random numbers

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

    # -- environment

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
