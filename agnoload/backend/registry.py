"""The backends that are installed, found through entry points of the group `agnoload.backends`.

`get_backend` makes the one that a loader asks for. Beside it, each process keeps a backend for every framework that it
has imported, for samples and generators of that framework's: these are `Loaded`. They are made from a table of strings,
which a parent sends to its workers, so that they need not look through the installed packages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from sys import modules
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from agnoload.backend.base import Backend, PackedArray
from agnoload.errors import AgnoloadError, AgnoloadWarning, BackendUnavailable, OptionError
from agnoload.worker_info import framework_worker_info

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint  # 15 ms that a worker, and a user of NumPy only, need not pay

GROUP = "agnoload.backends"


# ---------------------------------------------------------------------------------------------------- installed


@cache
def installed() -> dict[str, EntryPoint]:
    """The entry points of all installed packages by their names, read once a process; this imports none of them."""
    from importlib.metadata import entry_points

    table: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        first = table.setdefault(point.name, point)  # the first on the path
        if first.value != point.value:
            text = f"two packages offer a backend {point.name!r}: {_origin(first)} is used, {_origin(point)} is not"
            warnings.warn(text, AgnoloadWarning, stacklevel=4)
    table.pop("numpy", None)
    return dict(sorted(table.items()))


def list_backends() -> dict[str, str]:
    """Each installed backend's name with `"ready"`, or the reason why it cannot run here.

    It imports the frameworks to find out, which may take some seconds.

    >>> list_backends()["numpy"]
    'ready'
    """
    described = {}
    for name in ("numpy", *installed()):
        try:
            get_backend(name).check()
            described[name] = "ready"
        except AgnoloadError as error:
            described[name] = str(error)
        except Exception as error:
            described[name] = f"its check failed: {type(error).__name__}: {error}"
    return described


def get_backend(backend: str | Backend | type[Backend]) -> Backend:
    """A fresh backend of that name; a `Backend` is returned as it is.

    `OptionError` for an unknown name lists what is installed; `BackendUnavailable` distinguishes a missing framework,
    with the `pip install` line, from a broken plug-in.

    >>> get_backend("numpy").name
    'numpy'
    """
    if isinstance(backend, Backend):
        return backend
    if isinstance(backend, type) and issubclass(backend, Backend):
        return backend()
    if not isinstance(backend, str):
        raise OptionError(f"backend must be a name or an agnoload.Backend, got {backend!r}")
    if backend == "numpy":
        return Backend()  # it need not look through the installed packages
    points = installed()
    if backend not in points:
        from difflib import get_close_matches  # a module that workers do without

        names = ", ".join(map(repr, ["numpy", *points]))
        meant = "".join(f": did you mean {near!r}?" for near in get_close_matches(backend, points, 1))
        raise OptionError(f"backend must be a Backend or one of the installed names {names}; got {backend!r}{meant}")
    made = create(points[backend])
    if made.framework is not None and modules.get(made.framework) is None and find_spec(made.framework) is None:
        made.require()  # which raises, with the line that installs it
    return made


def create(point: EntryPoint) -> Backend:
    """A backend of the class that an entry point names, or `BackendUnavailable` with the plug-in and the cause."""
    broken = f"the plug-in for backend {point.name!r} ({_origin(point)}) is broken: "
    try:
        kind = point.load()
        made = kind() if isinstance(kind, type) and issubclass(kind, Backend) else None
    except Exception as error:
        raise BackendUnavailable(f"{broken}{type(error).__name__}: {error}") from error
    if made is None:
        raise BackendUnavailable(f"{broken}it names {kind!r}, which is no subclass of agnoload.Backend")
    return made


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name}" if point.dist is not None else point.value


# ---------------------------------------------------------------------------------------------------- loaded


class Plugin(NamedTuple):
    """What a worker must know of a backend to create it once its framework is loaded."""

    module: str
    attr: str
    """The class, as the entry point names it in the module."""
    framework: str
    environment: dict[str, str]
    """What it wants in the environment of workers, whether or not its framework is loaded here."""


class Loaded:
    """The backends whose framework this process has imported, kept up to date for a dictionary look-up each."""

    def __init__(self, table: Sequence[Plugin]) -> None:
        self.table = tuple(table)
        # The backends, and the frameworks that are not imported yet: one value, so that no thread sees half a change.
        self._known: tuple[tuple[Backend, ...], list[str]] = (), [plugin.framework for plugin in self.table]
        self._in_worker = False
        self._owners: dict[type, Backend] = {}

    def backends(self) -> tuple[Backend, ...]:
        known, waiting = self._known
        for framework in waiting:
            if modules.get(framework) is not None:
                return self._look()
        return known

    def _look(self) -> tuple[Backend, ...]:
        """Make all backends again; another thread may do so at the same time, and what one misses is still waiting."""
        ready = [plugin for plugin in self.table if modules.get(plugin.framework) is not None]
        backends = tuple(attrgetter(plugin.attr)(import_module(plugin.module))() for plugin in ready)
        if self._in_worker:
            for backend in backends:
                backend.enter_worker(framework_worker_info)
        self._known = backends, [plugin.framework for plugin in self.table if plugin not in ready]
        return backends

    def enter_worker(self) -> None:
        """This process loads samples for a loader, or has threads that do: tell each backend, now or once created."""
        if not self._in_worker:
            self._in_worker = True
            self._look()

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any] | None:
        """An array of a loaded framework as a NumPy array; its type is remembered, for there is one for each sample."""
        owner = self._owners.get(type(leaf))
        if owner is not None:
            return owner.to_numpy(leaf)
        for backend in self.backends():
            array = backend.to_numpy(leaf)
            if array is not None:
                self._owners[type(leaf)] = backend
                return array
        return None


_loaded: Loaded | None = None


def loaded() -> Loaded:
    """What this process knows of its frameworks; the first call looks through the installed packages.

    A plug-in that does not load gives a warning, and does not affect the others.
    """
    global _loaded
    if _loaded is None:
        table = []
        for point in installed().values():
            try:
                backend = create(point)
            except BackendUnavailable as error:
                warnings.warn(str(error), AgnoloadWarning, stacklevel=2)
                continue
            if backend.framework is not None:
                wanted = dict(backend.worker_environment())
                table.append(Plugin(point.module, point.attr, backend.framework, wanted))
        _loaded = Loaded(table)
    return _loaded


def install_table(table: Sequence[Plugin]) -> None:
    """Called by a worker before anything else here: it need not look through the installed packages."""
    global _loaded
    _loaded = Loaded(table)


def loaded_backends() -> tuple[Backend, ...]:
    """One backend for each framework that this process has imported; some 0.2 microseconds when none is new."""
    return (_loaded or loaded()).backends()


def to_numpy(leaf: Any) -> npt.NDArray[Any] | None:
    """An array of any loaded framework as a NumPy array; None for anything else.

    >>> to_numpy("text") is None
    True
    """
    return (_loaded or loaded()).to_numpy(leaf)


def pack(value: Any) -> PackedArray | None:
    """How an array of a loaded framework travels between processes; None for anything else."""
    for backend in loaded_backends():
        packed = backend.pack(value)
        if packed is not None:
            return packed
    return None


def seed_from(generator: Any) -> int | None:
    """Draw 63 bits from a generator of a loaded framework; None for anything else."""
    for backend in loaded_backends():
        number = backend.seed_from(generator)
        if number is not None:
            return number
    return None


def gives_seeds(thing: Any) -> bool:
    """Whether `seed_from` can draw from a thing; it stays as it is."""
    for backend in loaded_backends():
        undo = backend.reseed(thing, 0)
        try:
            if backend.seed_from(thing) is not None:
                return True
        finally:
            if undo is not None:
                undo()
    return False


def rank_and_world(backend: Backend) -> tuple[int, int] | None:
    """This process's rank and the number of processes, as the loader's backend knows it, else any loaded framework."""
    worlds = (candidate.world() for candidate in (backend, *loaded_backends()))
    return next((world for world in worlds if world is not None), None)


def worker_environment() -> dict[str, str]:
    """What the installed backends want in a worker's environment, whichever of their frameworks a dataset imports."""
    return {name: value for plugin in loaded().table for name, value in plugin.environment.items()}


def framework_settings() -> list[Callable[[], None]]:
    """What makes the settings of the loaded frameworks the same in another process, where they are not as imported."""
    return [apply for backend in loaded_backends() if (apply := backend.settings()) is not None]
