"""What `multiprocessing` and `multiprocess` need on both sides to hand their own objects to a process that starts.

Their locks, queues, shared values and proxies pickle only while one of their own processes is started, so packing looks
like such a start. As in their processes, a worker uses the parent's resource tracker (with one of its own it would
remove the segments of shared memory that it attaches to) and the parent's key, by which proxies log in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

from agnoload.transport.memory import Descriptor, descriptor_folder

LIBRARIES = ("multiprocessing", "multiprocess")


class _Start:
    """Takes the place of the process that is being started."""

    DupFd = Descriptor

    def duplicate_for_child(self, fd: int) -> int:
        return fd


@contextmanager
def starting() -> Iterator[None]:
    """Let objects of both libraries be pickled meanwhile, under `sending`."""
    with ExitStack() as undo:
        for library in LIBRARIES:
            if (context := sys.modules.get(f"{library}.context")) is not None:
                undo.callback(context.set_spawning_popen, context.get_spawning_popen())
                context.set_spawning_popen(_Start())
        yield


def owner_of(value: Any) -> str | None:
    """The library that an object is from, or None."""
    library = type(value).__module__.partition(".")[0]
    return library if library in LIBRARIES else None


def reduce(value: Any) -> Any:
    """An object of either library in the reduced form that pickle takes, where only its own pickler knows that."""
    if owner_of(value) and getattr(getattr(value, "_semlock", ""), "name", "") is None:
        raise TypeError("this semaphore has no name, so only a forked process can use it")
    for library in LIBRARIES:
        if (reduction := sys.modules.get(f"{library}.reduction")) is not None:
            reducer = reduction.ForkingPickler._extra_reducers.get(type(value))
            # Not others' reducers, nor those for sockets and methods.
            if reducer is not None and reducer.__module__ in (f"{library}.{name}" for name in _OWN):
                return reducer(value)
    return NotImplemented


_OWN = ("connection", "heap", "sharedctypes")


class Parent:
    """What a worker takes from its parent: pickled there, and in place in the worker as soon as it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        given = {}
        for library in LIBRARIES:
            tracker = getattr(sys.modules.get(f"{library}.resource_tracker"), "_resource_tracker", None)
            fd = getattr(tracker, "_fd", None)
            key = None
            if f"{library}.managers" in sys.modules:
                key = bytes(sys.modules[f"{library}.process"].current_process().authkey)
            if fd is not None or key is not None:
                given[library] = (f"{descriptor_folder()}/{fd}" if fd is not None else None, key)
        return _join, (given,)


def modules() -> list[str]:
    """What a worker imports to take that, beside the standard library."""
    tracker = getattr(sys.modules.get("multiprocess.resource_tracker"), "_resource_tracker", None)
    return ["multiprocess.resource_tracker"] if getattr(tracker, "_fd", None) is not None else []


def _join(given: dict[str, tuple[str | None, bytes | None]]) -> None:
    for library, (path, key) in given.items():
        if path is not None:
            tracker = import_module(f"{library}.resource_tracker")._resource_tracker
            with suppress(OSError):  # the tracker has been ended since
                if tracker._fd is None:  # else the library has given it to us
                    # Opening a pipe that nobody reads would wait for ever; without waiting it is an OSError.
                    tracker._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                    os.set_blocking(tracker._fd, True)
        if key is not None:
            import_module(f"{library}.process").current_process().authkey = key
