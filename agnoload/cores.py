"""How many cores and how much memory this process may use, which is not what the machine has."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Where `/proc` and `/sys` are looked for, unless a test says otherwise."""


def usable_cores(sharing: int = 1, root: Path = ROOT) -> int:
    """Cores by CPU affinity and the control group's quota, whichever allows less; at least 1.

    `sharing` processes that do the same divide the machine and the quota among them; an affinity is a process's own.
    `OMP_NUM_THREADS` and the like change nothing.

    >>> usable_cores() >= 1
    True
    """
    quota = quota_cores(root)
    shares = [machine_cores() // sharing] + ([] if quota is None else [math.ceil(quota / sharing)])
    return max(1, min(affine_cores(), *shares))


def machine_cores() -> int:
    """Cores that the machine has."""
    return os.cpu_count() or 1


def affine_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine_cores()


def quota_cores(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the control group, and those above it, allow; None without a limit."""
    return min(_quotas(root), default=None)


def usable_memory(root: Path = ROOT) -> int:
    """Bytes of memory: the machine's, or what the control group allows of them."""
    return min((limit for limit in (physical_memory(), memory_limit(root)) if limit is not None), default=sys.maxsize)


def physical_memory() -> int | None:
    """Bytes of memory in this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the control group, and those above it, allow; None without a limit."""
    limits = []
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def _quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                yield quota_us / int((folder / "cpu.cfs_period_us").read_text())


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, and of those above them, that speak of a controller."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = base / group.lstrip("/")
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(base)))


def resident() -> int:
    """The memory of this process that is resident, in bytes; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return 0
