"""What a backend costs, through the loader: `python -m benchmarks.backends`.

"inmem": shuffled batches of images in memory, without workers; a backend's rate over that of NumPy's, in batches for
each second of the processor, so that other programs on the machine count less.
"leaf": batches of 100 arrays of 1 KiB, aligned as in a slot; the processor time of the loader's thread with a backend,
less that with NumPy's, for one array.

Each figure has a fresh process, backends take turns; medians and the range over the rounds, each against the NumPy run
of its own round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import loaders
from benchmarks.measure import machine
from benchmarks.workloads import ENDLESS

LEAVES = 100


class Fresh:
    """Each batch is 100 float32 arrays of 1 KiB, at addresses that are multiples of 64."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index]).data

    def __getitems__(self, indices: Any) -> Any:
        import agnoload

        memory = np.empty((LEAVES << 10) + 64, np.uint8)
        start = -memory.ctypes.data % 64
        floats = memory[start : start + (LEAVES << 10)].view(np.float32).reshape(LEAVES, 8, 32)
        return agnoload.Batch({f"field{k:02}": floats[k] for k in range(LEAVES)})


def inmem(backend: str, seconds: float) -> float:
    """Batches for a second of the processor."""
    loader = loaders.of_arrays("agnoload", 256, backend=backend)
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    for _ in itertools.islice(batches, 100):
        pass
    end, done, cpu = time.perf_counter() + seconds, 0, time.process_time()
    while time.perf_counter() < end:
        for _ in itertools.islice(batches, 20):
            pass
        done += 20
    return done / (time.process_time() - cpu)


def leaf(backend: str, seconds: float) -> float:
    """Microseconds of this thread for a batch of 100 arrays."""
    import agnoload

    batches = iter(agnoload.DataLoader(Fresh(), 8, backend=backend))
    for _ in itertools.islice(batches, 50):
        pass
    end, chunks = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        begun = time.thread_time()
        for _ in itertools.islice(batches, 20):
            pass
        chunks.append((time.thread_time() - begun) / 20)
    return 1e6 * median(chunks)


QUESTIONS: dict[str, tuple[Callable[[str, float], float], tuple[str, ...]]] = {
    "inmem": (inmem, ("torch",)),
    "leaf": (leaf, ("torch", "jax")),
}


def in_a_fresh_process(question: str, backend: str, seconds: float) -> float:
    command = [sys.executable, "-m", "benchmarks.backends", "--one", question, backend, str(seconds)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{question}, {backend}: {done.stderr.strip() or done.returncode}")
    return float(json.loads(done.stdout))


def against_numpy(question: str, found: float, numpy: float) -> float:
    return found / numpy if question == "inmem" else (found - numpy) / LEAVES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backends", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"all when none of {', '.join(QUESTIONS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each is measured")
    parser.add_argument("--one", nargs=3, metavar=("QUESTION", "BACKEND", "SECONDS"), help="measure one, here")
    options = parser.parse_args()
    if options.one:
        question, backend, seconds = options.one
        print(json.dumps(QUESTIONS[question][0](backend, float(seconds))))
        return
    print(machine(), "\n")
    print("| question | backend | median | range |\n|---|---|---|---|")
    for question in options.questions or QUESTIONS:
        backends = [name for name in QUESTIONS[question][1] if find_spec(name) is not None]
        found: dict[str, list[float]] = {backend: [] for backend in backends}
        for _ in range(options.rounds):
            numpy = in_a_fresh_process(question, "numpy", options.seconds)
            for backend in backends:
                figure = in_a_fresh_process(question, backend, options.seconds)
                found[backend].append(against_numpy(question, figure, numpy))
        unit = "of NumPy's rate" if question == "inmem" else "microseconds a leaf"
        for backend, figures in found.items():
            spread = f"{min(figures):.3g} to {max(figures):.3g}"
            print(f"| {question} | {backend} | {median(figures):.3g} {unit} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
