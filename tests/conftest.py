"""What holds around every test: nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "local")

PATIENCE = 5.0
"""Seconds that a process or thread may take to end once nobody holds it; a leak is what stays for longer."""


def served_for_all(process: psutil.Process) -> bool:
    """The fork server of a loader that lives, and the resource tracker, are there for the whole program."""
    line = " ".join(process.cmdline())
    return process.ppid() == os.getpid() and (
        "agnoload.pools.forkserver import" in line
        or "forkserver import main" in line
        or "resource_tracker import main" in line
    )


def children() -> set[psutil.Process]:
    """All that this process started, and they in turn, without what stays for the whole program."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if not served_for_all(process):
                found.add(process)
    return found


def descriptors() -> dict[int, str]:
    """Open descriptors, and what each leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def kinds(open_ones: dict[int, str]) -> dict[str, int]:
    """How many descriptors of each kind, whatever their numbers."""
    counts: dict[str, int] = {}
    for target in open_ones.values():
        kind = target.split(":[")[0]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def shared_memory() -> set[str]:
    """Files in `/dev/shm`, without those that bear the number of a process that is not ours: others use it, too."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    others = set(psutil.pids()) - ours
    names = {path.name for path in Path("/dev/shm").glob("*")}
    return {name for name in names if not others & {int(n) for n in re.findall(r"\d{2,}", name)}}


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes, threads, descriptors and shared memory are as many after a test as before it."""
    servers = len(psutil.Process().children())
    processes, threads, memory = children(), set(threading.enumerate()), shared_memory()
    opened = kinds(descriptors())
    yield
    gc.collect()
    _, alive = psutil.wait_procs(children() - processes, timeout=PATIENCE)
    assert not alive, f"processes left: {[p.as_dict(['pid', 'status', 'cmdline']) for p in alive]}"
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"a thread is left: {thread}"
    deadline = time.monotonic() + PATIENCE  # other programs come and go there, too
    while not shared_memory() <= memory and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared_memory() <= memory
    if len(psutil.Process().children()) > servers:
        return  # the fork server was started by this test: its pipes stay, too
    more = {kind: n for kind, n in kinds(descriptors()).items() if n > opened.get(kind, 0)}
    assert not more, f"descriptors left (kind: how many now): {more}, before: {opened}"
