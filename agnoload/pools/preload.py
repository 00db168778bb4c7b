"""What workers import before they start: once for all of them, in a template that the fork server forks.

A loader that is made names the modules that its objects show at a glance, and a template imports them while the program
goes on. The payload names the rest when a pool opens, and what workers had to import by themselves the next template
imports. Each is forked from the last one: so what has been imported once stays as it was, whatever becomes of the
files.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agnoload.backend import registry
from agnoload.inspect import modules_of, specs_of_users_files
from agnoload.pools import worker
from agnoload.pools.environment import ImportEnvironment, import_environment
from agnoload.pools.launcher import ForkServer, interrupts_held, servers, standard_streams
from agnoload.system import method_of
from agnoload.transport import spawning
from agnoload.transport.payload import is_importable

_OURS = {*sys.stdlib_module_names, "agnoload", "numpy", "cloudpickle", "__main__", "__mp_main__"}
"""What the base has loaded, or must not load."""

_apart: set[str] = set()
"""Packages whose import starts a thread, leaves a file open or ends a process: never shared, as long as we live."""


class Preload:
    """The modules that workers of like loaders need, and the server that has them loaded."""

    def __init__(self, around: ImportEnvironment, where: bytes) -> None:
        self.where = where
        self._around = around
        self._backends = [(plugin.framework, plugin.module) for plugin in registry.loaded().table]
        self._specs = specs_of_users_files()
        self._wanted: dict[str, None] = {}
        self._tried: dict[str, None] = {}
        self._server: ForkServer | None = None
        self._coming: tuple[ForkServer, list[str]] | None = None
        """The next server, and what it is importing."""
        self._waiting: list[list[str]] = []
        """What servers after that one import."""

    def fits(self, where: bytes) -> bool:
        """Whether the program still has these surroundings, and has not loaded a file of the user's again since."""
        now = specs_of_users_files()
        fits = self.where == where and all(now.get(name, spec) is spec for name, spec in self._specs.items())
        if fits:
            self._specs.update(now)
        return fits

    def learn(self, modules: Iterable[str]) -> None:
        """Workers will import these."""
        self._wanted.update(dict.fromkeys(modules))

    @property
    def left_out(self) -> set[str]:
        """Packages that each worker imports for itself."""
        return _apart.intersection(map(_top, self._wanted))

    def begin(self) -> None:
        """Have what is new imported; does not wait for it."""
        with _guard:
            base = _server()
            if self._server is None or not self._server.running():
                self._server, self._tried, self._coming, self._waiting = base, {}, None, []
            self._waiting.append([n for n in self._wanted if n not in self._tried and _top(n) not in _OURS])
            self._tried.update(self._wanted)
            while self._coming is None and self._waiting:
                if names := [name for name in self._waiting.pop() if _top(name) not in _apart]:
                    self._coming = ForkServer(self._server, (self._around, names, self._backends)), names

    def server(self) -> ForkServer:
        """What forks the workers, with everything imported that they may share; the base if that is nothing."""
        with _warming:
            self.begin()
            assert self._server is not None
            while (coming := self._coming) is not None:
                server, names = coming
                culprit = server.verdict()
                with _guard:
                    self._coming = None
                    if culprit is None:
                        self._server = server
                    elif not self._server.running():  # somebody has ended them all: the workers import for themselves
                        return _server()
                    else:  # first what came before the culprit, so that one import that fails costs nothing twice
                        _apart.update([_top(culprit)] if culprit else map(_top, names))
                        place = names.index(culprit) if culprit in names else 0
                        self._waiting += [names[place:], names[:place]]
                    self.begin()
            return self._server


_preloads: weakref.WeakValueDictionary[tuple[bytes, frozenset[str]], Preload] = weakref.WeakValueDictionary()
_warming = threading.RLock()
"""Held while somebody waits for imports."""


def preload(around: ImportEnvironment, modules: Iterable[str], given: Preload | None = None) -> Preload:
    """What imports these modules for workers: what was given, if it still fits the program, else one for all loaders
    that need the same packages and live at once."""
    modules = [*modules, *spawning.modules()]
    where = pickle.dumps((around.path, around.environ))
    key = where, frozenset(map(_top, modules)) - _OURS
    with _guard:
        for found in (given, _preloads.get(key)):
            if found is not None and found.fits(where):
                break
        else:
            found = _preloads[key] = Preload(around, where)
        found.learn(modules)
        return found


def _top(module: str) -> str:
    return module.partition(".")[0]


# ---------------------------------------------------------------------------------------------- who uses the server

_current: ForkServer | None = None
_users: weakref.WeakSet[Any] = weakref.WeakSet()  # one that is dropped without being closed must not keep the server
_guard = threading.RLock()  # a finalizer of a user may run in the thread that holds it


def _server() -> ForkServer:
    global _current
    with _guard:
        if _current is not None and not _current.running():
            _current.stop()
            _current = None
        if _current is None:
            with standard_streams(), interrupts_held():
                _current = ForkServer()
        return _current


def use_server(user: Any) -> None:
    """`user` (a loader) wants the fork server to stay for as long as it lives or until it releases it."""
    with _guard:
        _users.add(user)


def start_server(user: Any, context: Any, environment: Mapping[str, str], parts: Mapping[str, Any]) -> Preload | None:
    """If `user` will need the fork server, have it start now, and import what `parts`, the user's objects, need.

    It ends with a user that has never needed it.
    """
    if method_of(context) != "forkserver" or worker.reading:
        return None
    # Whoever needs it will say what is missing; a container may change while another thread fills it: no guess, then.
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        with standard_streams():
            around = import_environment(environment)
            path = tuple(around.path)
            names = modules_of(parts, lambda name: is_importable(name, path))
            found = preload(around, names)
            found.begin()
        weakref.finalize(user, _end_server, unused=True)
        use_server(user)
        return found
    return None


def release_server(user: Any) -> None:
    """The last user that releases the fork server ends it, so that closing a loader leaves no process at all."""
    with _guard:
        _users.discard(user)
        _end_server()


def _end_server(unused: bool = False) -> None:
    """End it if it has no user; with `unused` only if it has not forked a worker, either."""
    global _current
    with _guard:
        if not _users and _current is not None and not (unused and _current.used):
            _current.stop()
            _current = None


class _Keeper:
    """Uses the fork server for no loader's sake."""


@contextlib.contextmanager
def kept_server() -> Iterator[None]:
    """Keep the fork server while many loaders come and go, so that it is not started again for each of them."""
    keeper = _Keeper()
    use_server(keeper)
    try:
        yield
    finally:
        release_server(keeper)


def _forget() -> None:
    """A forked child has no server, no users and nobody who holds a lock."""
    global _current, _users, _guard, _warming
    for server in list(servers):
        server.forget()
    servers.clear()
    _guard, _warming, _users = threading.RLock(), threading.RLock(), weakref.WeakSet()
    _preloads.clear()
    _current = None


os.register_at_fork(after_in_child=_forget)
