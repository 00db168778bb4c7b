"""How many cores this process may use, which is not how many the machine has, and how many workers are worth having."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TRANSPORT = 300e-6
"""Seconds that a batch's way through a worker costs; samples of a batch that cost less are better loaded here."""
PROBE_SECONDS = 0.1
"""A probe of samples ends after this."""


def usable_cores(root: Path = Path("/")) -> int:
    """Cores by CPU affinity and the control group's quota, whichever allows less; at least 1.

    `OMP_NUM_THREADS` and the like change nothing. `root` is where `/proc` and `/sys` are looked for.

    >>> usable_cores() >= 1
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the control group allows; None without a limit."""
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
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = base / group.lstrip("/")
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(base)))


class Choice(NamedTuple):
    """A number of workers, and why."""

    workers: int
    reason: str


def choose_workers(load: Callable[[int], object] | None, length: int, batch_size: int, cores: int) -> Choice:
    """Workers for `num_workers="auto"`: none where samples cost less than their transport, else the cores there are.

    `load(index)` loads one sample, for a probe of a few; None: whole batches are gathered in one step.
    """
    if load is None:
        return Choice(0, "whole batches are gathered in one step, which is quicker than any transport")
    if length == 0:
        return Choice(0, "there are no samples")
    began = time.monotonic()
    times = []
    for index in dict.fromkeys((0, length // 2, length - 1)):
        start = time.monotonic()
        try:
            load(index)
        except Exception:  # the loop will meet it, and say so
            return Choice(cores, f"a probe failed; {cores} usable cores")
        times.append(time.monotonic() - start)
        if time.monotonic() - began > PROBE_SECONDS:
            break
    batch = min(times) * batch_size  # the first one may have opened files
    if batch < TRANSPORT:
        return Choice(0, f"a batch of samples takes {batch * 1e6:.0f} microseconds, less than its transport")
    return Choice(cores, f"a sample takes {min(times) * 1e3:.2g} ms; {cores} usable cores")


def adjusted(choice: Choice, waited: float, busy: tuple[float, ...], cores: int) -> Choice:
    """The choice for the next epoch, from the share of time that was waited and each worker's share of work."""
    workers = choice.workers
    if workers == 0 or not busy:
        return choice
    mean = sum(busy) / len(busy)
    if waited > 0.1 and mean > 0.9 and workers < cores:
        return Choice(workers + 1, f"waited {waited:.0%} of the last epoch with {workers} workers {mean:.0%} busy")
    if waited < 0.01 and mean < 0.5 and workers > 1:
        return Choice(workers - 1, f"waited {waited:.0%} of the last epoch with {workers} workers {mean:.0%} busy")
    return choice
