"""What a process and its children have used, and what machine this is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psutil


def family(process: psutil.Process | None = None) -> list[psutil.Process]:
    """A process (this one when None) and all that it started, and they in turn."""
    process = process or psutil.Process()
    return [process, *process.children(recursive=True)]


def cpu_seconds() -> float:
    """CPU time that this process and its living children have used."""
    total = 0.0
    for member in family():
        with suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def private_mib(process: psutil.Process) -> float:
    """Memory that would come free if the process ended."""
    return process.memory_full_info().uss / 2**20


def worker_mib() -> float | None:
    """Private memory of the largest worker: of a process that this one has started and that has started none."""
    found = []
    for member in family()[1:]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if not member.children() and not any("resource_tracker" in word for word in member.cmdline()):
                found.append(private_mib(member))
    return max(found, default=None)


def family_mib(process: psutil.Process) -> float:
    """Memory of a process and its children; a page that k of them map counts 1/k in each."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        for member in family(process):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                total += member.memory_full_info().pss / 2**20
    return total


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Date, machine and versions: what a figure is worth nothing without."""
    versions = {}
    for package in ["agnoload", "numpy", "torch", "torchvision", "grain", "spdl", "jax-dataloader", "jax"]:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": versions,
    }
