"""Thread workers: `python -m benchmarks.threads`.

"sleep": 320 samples of 50 ms each, batch 1, whose time is not spent on a processor: slow storage, a remote service.
32 threads should take a 25th of one thread's time at most. "decode": JPEGs in batches of 32, with a decoder that
releases the interpreter's lock; 2 threads beside 2 processes and beside the floor. "copy": 20 fields of 1 MiB a sample,
batch 4, gathered from memory: what recycled memory is for.

Each figure has a fresh process, kinds take turns; the table gives medians and the range.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import floor
from benchmarks.measure import machine
from benchmarks.workloads import ENDLESS, STREAMS


class Sleeping:
    """Sample i is i, after `seconds`."""

    def __init__(self, seconds: float, length: int) -> None:
        self.seconds = seconds
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Wide:
    """20 fields of 1 MiB, the same memory each time: all work is in writing the batch."""

    def __init__(self) -> None:
        self.fields = {f"field{k:02}": np.full(1 << 18, k, np.float32) for k in range(20)}

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.fields


@dataclass(frozen=True)
class Question:
    """How a dataset is loaded, by whom, and what is told: seconds for all of it, or batches a second."""

    dataset: Callable[[], Any]
    batch_size: int
    kinds: tuple[str, ...]
    unit: str = "batches/s"


QUESTIONS = {
    "sleep": Question(lambda: Sleeping(0.05, 320), 1, ("1 thread", "32 threads"), "s"),
    "decode": Question(STREAMS["decode"].dataset, 32, ("2 threads", "2 processes", "floor")),
    "copy": Question(Wide, 4, ("1 thread", "2 threads", "2 processes")),
}


def measure(name: str, kind: str, seconds: float) -> float:
    """The figure of one question, in this process."""
    question = QUESTIONS[name]
    if kind == "floor":
        return floor.rate(STREAMS[name], seconds)["rate"]
    import agnoload

    number, word = kind.split()
    worker_type = "thread" if word.startswith("thread") else "process"
    loader: Any = agnoload.DataLoader(
        question.dataset(), question.batch_size, num_workers=int(number), worker_type=worker_type, seed=0
    )
    with loader:
        if question.unit == "s":
            begun = time.perf_counter()
            for _ in loader:
                pass
            return time.perf_counter() - begun
        return _rate(iter(loader), seconds)


def _rate(batches: Iterator[Any], seconds: float) -> float:
    for _ in islice(batches, 10):
        pass
    begun, done = time.perf_counter(), 0
    for _ in batches:
        done += 1
        if time.perf_counter() >= begun + seconds:
            break
    return done / (time.perf_counter() - begun)


def in_a_fresh_process(name: str, kind: str, seconds: float) -> float:
    command = [sys.executable, "-m", "benchmarks.threads", "--one", name, kind, str(seconds)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {kind}: {done.stderr.strip() or done.returncode}")
    return float(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"all when none of {', '.join(QUESTIONS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a rate is measured")
    parser.add_argument("--one", nargs=3, metavar=("QUESTION", "KIND", "SECONDS"), help="measure one, here")
    options = parser.parse_args()
    if options.one:
        name, kind, seconds = options.one
        print(json.dumps(measure(name, kind, float(seconds))))
        return
    print(machine(), "\n")
    print("| question | workers | median | range | of the first |\n|---|---|---|---|---|")
    for name in options.questions or QUESTIONS:
        question = QUESTIONS[name]
        found: dict[str, list[float]] = {kind: [] for kind in question.kinds}
        for _ in range(options.rounds):
            for kind in question.kinds:
                found[kind].append(in_a_fresh_process(name, kind, options.seconds))
        first = median(found[question.kinds[0]])
        for kind, figures in found.items():
            middle = median(figures)
            times = first / middle if question.unit == "s" else middle / first
            spread = f"{min(figures):.3g} to {max(figures):.3g}"
            print(f"| {name} | {kind} | {middle:.3g} {question.unit} | {spread} | {times:.3g} x |", flush=True)


if __name__ == "__main__":
    main()
