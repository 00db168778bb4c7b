"""The backends that are installed, found through entry points of the group `agnoload.backends`.

A name becomes a backend in steps, each a function of the entry points: `by_name`, `load`, `make`. What a process knows
of the frameworks that it has imported is one `Loaded`, built from a table of strings. A parent sends that table to its
workers, so that they need not look through the installed packages.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from sys import modules
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from agnoload.backend.base import Backend, PackedArray, missing_framework
from agnoload.errors import AgnoloadError, AgnoloadWarning, BackendUnavailable, OptionError
from agnoload.system import free_in_forks
from agnoload.worker_info import framework_worker_info

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint  # 15 ms that a worker, and a user of NumPy only, need not pay

GROUP = "agnoload.backends"


class Plugin(NamedTuple):
    """What a worker must know of a backend to create it once its framework is loaded."""

    name: str
    target: str
    """`module:class`, as in the entry point."""
    framework: str


# ---------------------------------------------------------------------------------------------------- installed


@cache
def installed() -> tuple[EntryPoint, ...]:
    """The entry points of all installed packages, read once a process; this imports none of the packages."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=GROUP))


def by_name(points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    """One entry point a name, sorted; of two packages with one name the first on the path wins, with a warning."""
    table: dict[str, EntryPoint] = {}
    for point in points:
        first = table.setdefault(point.name, point)
        if first.value != point.value:
            text = f"two packages offer a backend {point.name!r}: {_origin(first)} is used, {_origin(point)} is not"
            _warn_once(text)
    table.pop("numpy", None)
    return dict(sorted(table.items()))


def load(point: EntryPoint) -> type[Backend]:
    """The class that an entry point names, or `BackendUnavailable` with the plug-in and the cause."""
    try:
        found = point.load()
    except Exception as error:
        raise _broken(point, f"{type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise _broken(point, f"it names {found!r}, which is no subclass of agnoload.Backend")
    return found


def make(name: str, points: Iterable[EntryPoint]) -> Backend:
    """A fresh backend of that name; `OptionError` for an unknown one, `BackendUnavailable` if it cannot run here."""
    if name == "numpy":
        return Backend()
    table = by_name(points)
    if name not in table:
        from difflib import get_close_matches  # a module that workers do without

        names = ", ".join(map(repr, ["numpy", *table]))
        meant = "".join(f": did you mean {near!r}?" for near in get_close_matches(str(name), table, 1))
        raise OptionError(f"backend must be a Backend or one of the installed names {names}; got {name!r}{meant}")
    backend = _create(table[name])
    if backend.framework is not None and not _is_importable(backend.framework):
        raise missing_framework(backend)
    return backend


def describe(points: Iterable[EntryPoint]) -> dict[str, str]:
    """Each backend's name with `"ready"`, or the reason why it cannot run here."""
    table = by_name(points)
    described = {"numpy": "ready"}
    for name, point in table.items():
        try:
            make(name, [point]).check()
            described[name] = "ready"
        except AgnoloadError as error:
            described[name] = str(error)
        except Exception as error:
            described[name] = f"its check failed: {type(error).__name__}: {error}"
    return described


def list_backends() -> dict[str, str]:
    """Each installed backend's name with `"ready"`, or the reason why it cannot run here.

    It imports the frameworks to find out, which may take some seconds.

    >>> list_backends()["numpy"]
    'ready'
    """
    return describe(installed())


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
    return make(backend, () if backend == "numpy" else installed())


def table_of(points: Iterable[EntryPoint]) -> tuple[Plugin, ...]:
    """The plug-ins that load and have a framework; one warning for each that does not load."""
    table = []
    for name, point in by_name(points).items():
        try:
            framework = load(point).framework
        except BackendUnavailable as error:
            _warn_once(str(error))
        else:
            if framework is not None:
                table.append(Plugin(name, point.value, framework))
    return tuple(table)


def _create(point: EntryPoint) -> Backend:
    kind = load(point)
    try:
        return kind()
    except Exception as error:
        raise _broken(point, f"{type(error).__name__}: {error}") from error


def _create_or_warn(plugin: Plugin) -> Backend | None:
    from importlib.metadata import EntryPoint

    try:
        return _create(EntryPoint(plugin.name, plugin.target, GROUP))
    except BackendUnavailable as error:
        _warn_once(str(error))
        return None


def _is_importable(module: str) -> bool:
    if module in modules:
        return modules[module] is not None
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _broken(point: EntryPoint, cause: str) -> BackendUnavailable:
    return BackendUnavailable(f"the plug-in for backend {point.name!r} ({_origin(point)}) is broken: {cause}")


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name}" if point.dist is not None else point.value


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    """Once a process and text: a plug-in that is broken stays broken."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, AgnoloadWarning, stacklevel=4)


# ---------------------------------------------------------------------------------------------------- loaded

_creating = free_in_forks(threading.Lock())


class Loaded:
    """The backends whose framework this process has imported, kept up to date for a dictionary look-up each."""

    def __init__(self, table: Sequence[Plugin]) -> None:
        self.table = tuple(table)
        self._waiting = [(plugin.framework, plugin) for plugin in table]
        self._backends: tuple[Backend, ...] = ()
        self._in_worker = False
        self._owners: dict[type, Backend] = {}

    def backends(self) -> tuple[Backend, ...]:
        for framework, _ in self._waiting:
            if modules.get(framework) is not None:
                self._create_new()
                break
        return self._backends

    def _create_new(self) -> None:
        with _creating:  # two threads may see the framework at once: each backend must be created once
            ready = [plugin for framework, plugin in self._waiting if modules.get(framework) is not None]
            created = [backend for plugin in ready if (backend := _create_or_warn(plugin)) is not None]
            self._backends += tuple(created)
            if self._in_worker:
                for backend in created:
                    backend.enter_worker(framework_worker_info)
            self._waiting = [pair for pair in self._waiting if pair[1] not in ready]

    def enter_worker(self) -> None:
        """This process loads samples for a loader, or has threads that do: tell each backend, now or once created."""
        self.backends()
        with _creating:
            if not self._in_worker:
                self._in_worker = True
                for backend in self._backends:
                    backend.enter_worker(framework_worker_info)

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any] | None:
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
    """What this process knows of its frameworks; the first call looks through the installed packages."""
    global _loaded
    if _loaded is None:
        _loaded = Loaded(table_of(installed()))
    return _loaded


def plugin_table() -> tuple[Plugin, ...]:
    """What `install_table` needs in a worker: plain strings."""
    return loaded().table


def install_table(table: Sequence[Plugin]) -> None:
    """Called by a worker before anything else here: it need not look through the installed packages."""
    global _loaded
    _loaded = Loaded(table)


def loaded_backends() -> tuple[Backend, ...]:
    """One backend for each framework that this process has imported; some 0.2 microseconds when none is new."""
    return (_loaded or loaded()).backends()


def enter_worker() -> None:
    """Called by each worker before any user code runs in it: frameworks then answer as in a worker of their own."""
    loaded().enter_worker()


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
    for candidate in (backend, *loaded_backends()):
        world = candidate.world()
        if world is not None:
            return world
    return None


def worker_environment() -> dict[str, str]:
    """What the installed backends want in a worker's environment, whichever of their frameworks a dataset imports."""
    environment: dict[str, str] = {}
    for plugin in plugin_table():
        backend = _create_or_warn(plugin)
        wanted: Mapping[str, str] = backend.worker_environment() if backend is not None else {}
        environment.update(wanted)
    return environment


def framework_settings() -> list[Callable[[], None]]:
    """What makes the settings of the loaded frameworks the same in another process, where they are not as imported."""
    return [apply for backend in loaded_backends() if (apply := backend.settings()) is not None]
