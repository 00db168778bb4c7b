"""`python -m agnoload`: what this machine offers."""

from __future__ import annotations

import argparse
import platform
import sys

import numpy as np

import agnoload
from agnoload.system import (
    affine_cores,
    available_methods,
    machine_cores,
    memory_limit,
    physical_memory,
    quota_cores,
    usable_cores,
)


def report() -> str:
    """The report, a fact a line."""
    lines = [
        f"agnoload {agnoload.__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {sys.platform}",
        f"cores        {usable_cores()} usable: {_cores()}",
        f"memory       {_memory()}",
        f"workers      {', '.join(available_methods())} (the first is the default)",
        "backends",
    ]
    lines += [f"  {name:<10} {state}" for name, state in agnoload.list_backends().items()]
    return "\n".join(lines)


def _cores() -> str:
    quota = quota_cores()
    limit = "no quota" if quota is None else f"a quota of {quota:g}"
    return f"{affine_cores()} by affinity and {limit} by the control group, of {machine_cores()} in the machine"


def _memory() -> str:
    limit, physical = memory_limit(), physical_memory()
    machine = "size unknown" if physical is None else _gib(physical)
    return f"{machine}, {'no limit' if limit is None else f'limited to {_gib(limit)}'} by the control group"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    argparse.ArgumentParser(
        "python -m agnoload",
        description="Print what this machine offers a loader: usable cores, memory, how workers start, and which "
        "backends are ready or why not.",
    ).parse_args()
    print(report())
