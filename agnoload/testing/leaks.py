"""Whether a piece of code leaves nothing behind: processes, threads, descriptors, shared memory."""

from __future__ import annotations

import gc
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agnoload.pools.launcher import SERVER

PATIENCE = 20.0
"""Seconds that a process or thread may take to end once nobody holds it; a leak is what stays for longer."""

_SERVERS = ("agnoload.pools.server import serve", "forkserver import main", "resource_tracker import main")
"""Started once a program and meant to stay: our fork server, and the two helpers of `multiprocessing`."""
_TEMPLATE = SERVER.decode()
"""What our server forks for a loader, with the modules of its dataset loaded; it lives as long as the loader."""


@dataclass(frozen=True)
class _Process:
    pid: int
    started: int
    """In ticks since the machine started; with the pid, what tells a process from a later one."""
    parent: int = field(compare=False)
    command: str = field(compare=False)

    name: str = field(compare=False)


class _Open(NamedTuple):
    processes: set[_Process]
    servers: set[_Process]
    threads: set[threading.Thread]
    descriptors: Counter[str]
    shared_memory: set[str]


@contextmanager
def no_leaks() -> Iterator[None]:
    """Assert that the block leaves no process, thread, descriptor or file in `/dev/shm` that was not there before.

    Processes are looked for among all descendants; agnoload's fork server, which a program starts once and keeps until
    its last loader is closed, does not count, and neither do the helpers of `multiprocessing`. Nor do files in
    `/dev/shm` that belong to another user, that only another program has open or mapped, or that bear the number of a
    living process of another program. What is about to end gets 20 seconds. `AssertionError` says what was left. Linux
    only.

    >>> import agnoload
    >>> with no_leaks(), agnoload.DataLoader(range(4), 2) as loader:
    ...     batches = list(loader)
    """
    before = _look()
    yield
    if _left(before, _look()):
        gc.collect()
        if left := _left(before, _settled(before)):
            raise AssertionError(f"left behind: {'; '.join(left)}")


def _left(before: _Open, after: _Open) -> list[str]:
    known = before.processes | before.servers  # a worker that was just forked still has the name of its template
    left = [f"process {p.pid} ({p.command})" for p in after.processes - known]
    left += [f"thread {thread.name}" for thread in after.threads - before.threads]
    started = len(after.servers - before.servers)
    allowed = before.descriptors + Counter({"socket": 2 * started, "pipe": 4 * started})
    left += [f"{n} more of descriptor {kind}" for kind, n in sorted((after.descriptors - allowed).items())]
    files = after.shared_memory - before.shared_memory
    files -= _used_by_others(files, after.processes)
    # Another program that ended meanwhile took its files along; what is left by us is still there.
    left += [f"/dev/shm/{name}" for name in sorted(files) if os.path.exists(f"/dev/shm/{name}")]
    return left


def _look() -> _Open:
    processes = set(_descendants())
    # Workers that a server has forked have its command line, but not its parent, nor a server's name.
    ours = {process for process in processes if process.parent == os.getpid() or process.name == _TEMPLATE}
    servers = {process for process in ours if any(mark in process.command for mark in _SERVERS)}
    return _Open(processes - servers, servers, set(threading.enumerate()), _descriptors(), _shared_memory(processes))


def _settled(before: _Open) -> _Open:
    """What is there once everything that is about to end has ended."""
    deadline = time.monotonic() + PATIENCE
    now = _look()
    for process in now.processes - before.processes:
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(process.pid)  # readable once the process has ended, whoever its parent is
            try:
                poll = select.poll()
                poll.register(ended, select.POLLIN)
                poll.poll(max(0, int((deadline - time.monotonic()) * 1000)))
            finally:
                os.close(ended)
    for thread in now.threads - before.threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    files = now.shared_memory - before.shared_memory
    files -= _used_by_others(files, now.processes)  # nobody need wait for those
    while time.monotonic() < deadline and any(os.path.exists(f"/dev/shm/{name}") for name in files):
        time.sleep(0.01)  # others make some, too, and remove them at once
    later = _look()
    return later._replace(shared_memory=later.shared_memory & files)


def _descendants(pid: int | str = "self") -> Iterator[_Process]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                with suppress(OSError):  # it has ended
                    entry = Path("/proc", child)
                    name, _, stat = (entry / "stat").read_text().partition("(")[2].rpartition(")")
                    state, parent, *fields = stat.split()
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if state != "Z" or int(parent) == os.getpid():  # the dead of others are theirs to collect
                        yield _Process(int(child), int(fields[17]), int(parent), command or f"state {state}", name)
                yield from _descendants(child)


def _descriptors() -> Counter[str]:
    """How many descriptors of each kind are open, whatever their numbers."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return kinds


def _shared_memory(processes: set[_Process]) -> set[str]:
    """Files of this user in `/dev/shm`, without those that bear the number of a living process that is not ours."""
    files = []
    for entry in os.scandir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        with suppress(OSError):  # it is gone
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                files.append(entry.name)
    ours = {process.pid for process in processes} | {os.getpid()}
    others = {name for name in os.listdir("/proc") if files and name.isdigit()} - set(map(str, ours))
    return {name for name in files if not others & set(re.split(r"[\W_]", name))}


def _used_by_others(names: set[str], ours: set[_Process]) -> set[str]:
    """Those of these files in `/dev/shm` that a process of another program has open or mapped, and none of ours."""
    own = {process.pid for process in ours} | {os.getpid()}
    used: dict[bool, set[str]] = {True: set(), False: set()}
    for entry in Path("/proc").iterdir() if names else ():
        if entry.name.isdigit():
            with suppress(OSError):
                held = {line.rpartition("/dev/shm/")[2] for line in (entry / "maps").read_text().splitlines()}
                held |= {os.readlink(fd).rpartition("/dev/shm/")[2] for fd in (entry / "fd").iterdir()}
                used[int(entry.name) in own] |= held & names
    return used[False] - used[True]
