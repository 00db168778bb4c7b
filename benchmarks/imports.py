"""A dataset whose module imports torch, and does nothing with it: what is left is the start of workers."""

from __future__ import annotations

import torch  # noqa: F401

from benchmarks.workloads import Rows


class Light(Rows):
    """Small arrays."""
