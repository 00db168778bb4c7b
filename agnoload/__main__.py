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
    quota, limit, physical = quota_cores(), memory_limit(), physical_memory()
    quotas = "no quota" if quota is None else f"a quota of {quota:g}"
    machine = "size unknown" if physical is None else f"{physical / 2**30:.1f} GiB"
    allowed = "no limit" if limit is None else f"limited to {limit / 2**30:.1f} GiB"
    lines = [
        f"agnoload {agnoload.__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {sys.platform}",
        f"cores        {usable_cores()} usable: {affine_cores()} by affinity and {quotas} by the control group, of "
        f"{machine_cores()} in the machine",
        f"memory       {machine}, {allowed} by the control group",
        f"workers      {', '.join(available_methods())} (the first is the default)",
        "backends",
    ]
    return "\n".join([*lines, *(f"  {name:<10} {state}" for name, state in agnoload.list_backends().items())])


if __name__ == "__main__":
    argparse.ArgumentParser(
        "python -m agnoload",
        description="Print what this machine offers a loader: usable cores, memory, how workers start, and which "
        "backends are ready or why not.",
    ).parse_args()
    print(report())
