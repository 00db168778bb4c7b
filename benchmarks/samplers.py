"""Every sampler at 1e6 and 1e8 items, against torch's where it has one: `python -m benchmarks.samplers`.

Each measurement has a process of its own; a table of medians goes to standard output. "make" is the constructor,
"first" the time from `iter` to the first batch, "batch" the mean of the next 200 batches (a batch is 256 indices where
the sampler yields indices), "peak" the memory beside that of the labels, weights or lengths.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.measure import machine

BATCH, BATCHES = 256, 200
CLASSES = 1000


def _labels(n: int) -> Any:
    return np.random.default_rng(0).integers(0, CLASSES, n, dtype=np.int16)


def _weights(n: int) -> Any:
    return np.random.default_rng(0).random(n)


def _lengths(n: int) -> Any:
    return np.random.default_rng(0).integers(1, 513, n, dtype=np.int16)


QUESTIONS: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Any]]] = {
    "sequential": (range, lambda m, data: m.SequentialSampler(data)),
    "random": (range, lambda m, data: m.RandomSampler(data)),
    "random-replacement": (range, lambda m, data: m.RandomSampler(data, replacement=True)),
    "subset": (np.arange, lambda m, data: m.SubsetRandomSampler(data)),
    "weighted": (_weights, lambda m, data: m.WeightedRandomSampler(data, 100_000)),
    "weighted-distinct": (_weights, lambda m, data: m.WeightedRandomSampler(data, 100_000, replacement=False)),
    "distributed": (range, lambda m, data: m.DistributedSampler(data, 8, 3)),
    "balanced": (_labels, lambda m, data: m.BalancedBatchSampler(data, 2048)),
    "balanced-rotating": (_labels, lambda m, data: m.BalancedBatchSampler(data, BATCH)),
    "balanced-random": (_labels, lambda m, data: m.BalancedBatchSampler(data, BATCH, kind="random")),
    "class-uniform": (_labels, lambda m, data: m.ClassUniformBatchSampler(data, 64, 4)),
    "cyclic": (_labels, lambda m, data: m.CyclicClassBatchSampler(data, 16, BATCH)),
    "buckets": (_lengths, lambda m, data: m.BucketBatchSampler(data, max_tokens=BATCH * 256)),
}


def module(library: str) -> Any:
    if library == "agnoload":
        import agnoload.samplers

        return agnoload.samplers
    import torch.utils.data

    return torch.utils.data


def peak_mib(forget: bool = False) -> float:
    """The most memory that this process has had, since `forget` if that was ever said."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(library: str, question: str, n: int) -> dict[str, float]:
    """The figures of one sampler, in this process."""
    make_data, make = QUESTIONS[question]
    samplers, data = module(library), make_data(n)
    peak, begun = peak_mib(forget=True), time.perf_counter()
    sampler = make(samplers, data)
    made = time.perf_counter()
    items: Iterator[Any] = iter(sampler)
    first = next(items)
    if not isinstance(first, list):
        _ = list(islice(items, BATCH - 1))
    begins = time.perf_counter()
    wanted = BATCHES if isinstance(first, list) else BATCHES * BATCH
    came = sum(1 for _ in islice(items, wanted))
    ended = time.perf_counter()
    return {
        "make_ms": 1000 * (made - begun),
        "first_ms": 1000 * (begins - made),
        "batch_us": 1e6 * (ended - begins) * wanted / max(came, 1) / BATCHES,
        "peak_mib": peak_mib() - peak,
    }


def in_a_fresh_process(library: str, question: str, n: int) -> dict[str, float] | str:
    """The figures, or why there are none."""
    command = [sys.executable, "-m", "benchmarks.samplers", "--one", library, question, str(n)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def row(question: str, n: int, rounds: int) -> str:
    """One line of the table: ours, and torch's in brackets."""
    libraries = ["agnoload"] + ["torch"] * hasattr(module("torch"), type(_small(question)).__name__)
    runs: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
    failed = {}
    for _ in range(rounds):
        for library in [name for name in libraries if name not in failed]:
            figures = in_a_fresh_process(library, question, n)
            if isinstance(figures, str):
                failed[library] = figures
            else:
                runs[library].append(figures)
    if "agnoload" in failed:
        return f"| {question} | {n:.0e} | {failed['agnoload']} | | | |"
    cells = []
    for key in ("make_ms", "first_ms", "batch_us", "peak_mib"):
        ours, theirs = (
            f"{median(run[key] for run in runs[name]):,.3g}" if runs.get(name) else "" for name in ("agnoload", "torch")
        )
        cells.append(ours + (f" ({theirs})" if theirs else " (refused)" if "torch" in failed else ""))
    return f"| {question} | {n:.0e} | {' | '.join(cells)} |"


def _small(question: str) -> Any:
    make_data, make = QUESTIONS[question]
    return make(module("agnoload"), make_data(200_000))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.samplers", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="sampler", help=f"all when none of {', '.join(QUESTIONS)}")
    parser.add_argument("--sizes", default="1e6,1e8", help="numbers of items, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "SAMPLER", "ITEMS"), help="measure one, here")
    options = parser.parse_args()
    if options.one:
        library, question, n = options.one
        print(json.dumps(measure(library, question, int(n))))
        return
    print(machine(), "\n")
    print("| sampler | items | make (ms) | first (ms) | batch (µs) | peak (MiB) |\n|---|---|---|---|---|---|")
    for question in options.questions or QUESTIONS:
        for size in options.sizes.split(","):
            print(row(question, int(float(size)), options.rounds), flush=True)


if __name__ == "__main__":
    main()
