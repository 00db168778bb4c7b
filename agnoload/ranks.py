"""Which of how many processes that train together this one is."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache

import numpy as np

from agnoload.errors import OptionError

VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""The pairs of environment variables that are looked up, in this order: torchrun and most others, SLURM, Open MPI."""


def rank_and_world(
    backend_world: tuple[int, int] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """This process's rank and the number of processes: from the environment, else from a backend, else (0, 1).

    A pair of variables counts when both are set; that of SLURM only in a process that `srun` has started, one for each
    task: an interactive shell and a batch script have it as well. Where there are several ranks, a log record (INFO)
    says once which one this is. `OptionError` for what is no rank: `0 <= rank < world size` must hold.

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
    """Whether SLURM has started this process as one of its tasks, as far as the environment shows it."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS")
    if tasks:
        return tasks == environ.get("SLURM_NTASKS")
    interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return bool(environ.get("SLURM_STEP_ID")) or not (environ.get("SLURM_JOB_ID") or interactive)


@cache
def _say(rank: int, world: int, source: str) -> None:
    logging.getLogger("agnoload").info("this process is rank %d of %d, from %s", rank, world, source)


LOCAL_VARIABLES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """How many processes that train together share this machine, as torchrun and Open MPI say; else 1.

    >>> local_world_size({"LOCAL_WORLD_SIZE": "8"})
    8
    """
    found = os.environ if environ is None else environ
    told = next((found[name] for name in LOCAL_VARIABLES if found.get(name)), "1")
    return max(1, int(told)) if told.isdecimal() else 1


def check_rank(rank: int, world: int, where: str) -> tuple[int, int]:
    """`(rank, world)` if they can be, else `OptionError` that begins with `where`."""
    numbers = all(isinstance(number, (int, np.integer)) for number in (rank, world))
    if not numbers or world < 1 or not 0 <= rank < world:
        raise OptionError(f"{where} must satisfy 0 <= rank < world size, got rank {rank!r} and world size {world!r}")
    return int(rank), int(world)
