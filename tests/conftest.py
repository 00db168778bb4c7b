"""What holds around every test: nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections import Counter
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


def children(pid: int | str = "self") -> set[int]:
    """The processes that one has started."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, task.read_text().split()))
    return found


def is_server(pid: int) -> bool:
    """Whether a child is the fork server or the resource tracker: started once a program, and there to stay."""
    with suppress(OSError):
        return bool(re.search(rb"(forkserver|resource_tracker) import", Path(f"/proc/{pid}/cmdline").read_bytes()))
    return False


def family() -> set[int]:
    """All that this process started, and they in turn."""
    found, new = set(), children()
    while new:
        found |= new
        new = {pid for parent in new for pid in children(parent)} - found
    return found


def descriptors() -> Counter[str]:
    """How many descriptors of each kind are open, whatever their numbers."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return found


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def left_by_us(names: set[str]) -> set[str]:
    """Those files in `/dev/shm` that stay although no other program has them in use."""
    others = set(psutil.pids()) - family() - {os.getpid()} if names else set()
    names = {name for name in names if not others & {int(n) for n in re.findall(r"\d{2,}", name)}}
    for pid in others:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            names = {name for name in names if name not in maps}
    return names & shared_memory()


def running(pids: set[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Processes, threads, descriptors and shared memory are as many after a test as before it."""
    servers = {pid for pid in children() if is_server(pid)}
    processes, threads, memory, opened = family(), set(threading.enumerate()), shared_memory(), descriptors()
    yield
    more = family() - processes or set(threading.enumerate()) - threads or shared_memory() - memory
    if not more and descriptors() <= opened:
        return
    gc.collect()
    new_servers = {pid for pid in children() if is_server(pid)} - servers
    _, alive = psutil.wait_procs(running(family() - processes - new_servers), timeout=PATIENCE)
    assert not alive, f"processes left: {[p.as_dict(['pid', 'status', 'cmdline']) for p in alive]}"
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"a thread is left: {thread}"
    left = left_by_us(shared_memory() - memory)
    assert not left, f"shared memory left: {left}"
    if not new_servers:  # or else its pipes stay, too
        assert descriptors() <= opened, f"descriptors left: {descriptors() - opened}"
