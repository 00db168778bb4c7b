"""The machine and the job: cores, memory and start methods, this process's rank, locks across a fork."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agnoload.errors import OptionError

ROOT = Path("/")
"""Where to look for `/proc` and `/sys`; tests give another folder."""


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
    """The cores' worth of time that the control group and its parents allow; None without a limit."""
    quotas: list[float] = []
    for folder in control_groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):  # version 1, where -1 is no limit
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            quotas.append(int(quota) / int(period))
    return min((quota for quota in quotas if quota > 0), default=None)


def usable_memory(root: Path = ROOT) -> int:
    """Bytes of memory: the machine's, or fewer if the control group allows fewer."""
    return min((limit for limit in (physical_memory(), memory_limit(root)) if limit is not None), default=sys.maxsize)


def physical_memory() -> int | None:
    """Bytes of memory in this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the control group and its parents allow; None without a limit."""
    limits = []
    for folder in control_groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < 1 << 60), default=None)


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, and of their parents, for one controller."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = base / group.lstrip("/")
            yield from (folder, *(above for above in folder.parents if above.is_relative_to(base)))


def available_methods() -> list[str]:
    """The start methods of this platform, the default first."""
    return ["forkserver", "spawn", "fork"] if hasattr(os, "fork") else ["spawn"]


def method_of(context: Any) -> str:
    """The name of the start method that an option asks for; `OptionError` for anything else."""
    methods = available_methods()
    if context is None:
        return methods[0]
    name = context if isinstance(context, str) else getattr(context, "get_start_method", lambda: None)()
    if name not in methods:
        raise OptionError(
            f"multiprocessing_context must be one of {', '.join(map(repr, methods))}, a context of multiprocessing or "
            f"multiprocess, or None, got {context!r}"
        )
    return str(name)


VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""The pairs of environment variables, in the order of look-up: torchrun and most others, SLURM, Open MPI."""


def rank_and_world(
    backend_world: tuple[int, int] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """This process's rank and the number of processes: from the environment, else from a backend, else (0, 1).

    A pair of variables counts when both are set. SLURM's counts only in a process that `srun` has started, one for each
    task, because interactive shells and batch scripts have it too. With several ranks, a log record (INFO) says once
    which one this is. `OptionError` unless `0 <= rank < world size`.

    >>> rank_and_world(environ={"RANK": "1", "WORLD_SIZE": "4"})
    (1, 4)
    >>> rank_and_world(backend_world=(2, 3), environ={})
    (2, 3)
    >>> rank_and_world(environ={})
    (0, 1)
    """
    found = os.environ if environ is None else environ
    for rank_name, world_name in VARIABLES:
        if found.get(rank_name) and found.get(world_name) and (rank_name != "SLURM_PROCID" or _is_srun(found)):
            where = f"the environment variables {rank_name}={found[rank_name]} and {world_name}={found[world_name]}"
            try:
                rank, world = int(found[rank_name]), int(found[world_name])
            except ValueError:
                raise OptionError(f"{where} must be integers: correct or unset them") from None
            check_rank(rank, world, where)
            if environ is None and world > 1:
                _say(rank, world, f"{rank_name} and {world_name}")
            return rank, world
    if backend_world is not None:
        return check_rank(*backend_world, "the backend's rank and world size")
    return 0, 1


def _is_srun(environ: Mapping[str, str]) -> bool:
    """Whether SLURM has started this process as one of its tasks, as far as the environment shows."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if tasks:
        return tasks == environ.get("SLURM_NTASKS")
    interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return bool(environ.get("SLURM_STEP_ID")) or not (environ.get("SLURM_JOB_ID") or interactive)


@cache
def _say(rank: int, world: int, source: str) -> None:
    logging.getLogger("agnoload").info("this process is rank %d of %d, from %s", rank, world, source)


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """How many processes that train together share this machine, as torchrun and Open MPI report; else 1.

    >>> local_world_size({"LOCAL_WORLD_SIZE": "8"})
    8
    """
    found = os.environ if environ is None else environ
    size = found.get("LOCAL_WORLD_SIZE") or found.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    return max(1, int(size)) if size.isdecimal() else 1


def check_rank(rank: int, world: int, where: str) -> tuple[int, int]:
    """`(rank, world)` if they are legal, else an `OptionError` that begins with `where`."""
    numbers = all(isinstance(number, (int, np.integer)) for number in (rank, world))
    if not numbers or world < 1 or not 0 <= rank < world:
        raise OptionError(f"{where} must satisfy 0 <= rank < world size, got rank {rank!r} and world size {world!r}")
    return int(rank), int(world)


LockT = TypeVar("LockT")


def free_in_forks(lock: LockT) -> LockT:
    """The lock itself, which a forked child finds free: the thread that may hold it at the fork is not in the child.

    For locks that live as long as the process, because each stays registered.
    """
    renewed: Any = lock
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renewed._at_fork_reinit)  # as `logging` does
    return lock
