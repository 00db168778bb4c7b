"""`python -m agnoload`: what this machine offers."""

from __future__ import annotations

import os
import platform
import sys

import numpy as np

import agnoload
from agnoload.cores import memory_limit, usable_cores
from agnoload.pools.start import available_methods


def report() -> str:
    """The report, a fact a line."""
    limit = memory_limit()
    lines = [
        f"agnoload {agnoload.__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {sys.platform}",
        f"cores        {usable_cores()} usable of {os.cpu_count()}",
        f"memory       {_gib(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}"
        + (f", {_gib(limit)} by the control group" if limit is not None else ", no limit by a control group"),
        f"workers      {', '.join(available_methods())} (the first is the default)",
        "backends",
    ]
    lines += [f"  {name:<10} {state}" for name, state in agnoload.list_backends().items()]
    return "\n".join(lines)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    print(report())
