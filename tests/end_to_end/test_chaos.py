"""Long runs: workers killed again and again, and a hundred thousand batches."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest

from agnoload import DataLoader, sample_rng


class Draws:
    """Each sample has its index, and draws from everything that can be drawn from."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float, float, float, np.ndarray]:
        return index, sample_rng().random(), random.random(), np.random.random(), np.full(index, index)


def collate(samples: list) -> tuple:
    return (*(np.array([sample[place] for sample in samples]) for place in range(4)), samples[0][4], samples[1][4])


def bits(batch: tuple) -> bytes:
    return b"|".join(leaf.tobytes() for leaf in batch)


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and anonymous memory (in bytes) of this process, whoever has a copy of its pages."""
    anonymous = re.search(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert anonymous is not None
    return psutil.Process().num_fds(), threading.active_count(), int(anonymous[1]) << 10


def chaos(epochs: int, method: str, seed: int) -> None:
    """A kill at a random moment of every epoch."""
    rng = random.Random(seed)
    options = {"shuffle": True, "seed": 11, "collate_fn": collate}
    calm = DataLoader(Draws(), 2, **options)
    loader = DataLoader(Draws(), 2, num_workers=2, max_worker_restarts=1, multiprocessing_context=method, **options)
    before = None
    for epoch in range(epochs):
        at, victim = rng.randrange(50), rng.randrange(2)
        batches = iter(loader)
        for number, (batch, undisturbed) in enumerate(zip(batches, calm, strict=True)):
            assert bits(batch) == bits(undisturbed)
            if number == at:
                pids = sorted(batches._pool.pids().values())
                os.kill(pids[victim], signal.SIGKILL)
        assert number == 49
        del batches, batch
        if epoch == min(20, epochs // 4):
            before = resources()
    after = resources()
    assert before is not None
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 2 << 20
    loader.close()


def kill(process: int) -> None:
    """By its descriptor: its number may be that of another by now."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "epochs"), [("forkserver", 40), ("fork", 20)])
def test_epochs_in_which_a_worker_is_killed_are_bit_identical_and_nothing_grows(method, epochs) -> None:
    chaos(epochs, method, seed=2)


@pytest.mark.slow
def test_kills_at_moments_that_nobody_chose() -> None:
    """A thread kills workers by the clock, so deaths come between any two lines."""
    rng = random.Random(0)
    calm = list(DataLoader(Draws(), 2, shuffle=True, seed=11, collate_fn=collate))
    for _ in range(40):
        loader = DataLoader(Draws(), 2, shuffle=True, seed=11, collate_fn=collate, num_workers=2, max_worker_restarts=1)
        batches = iter(loader)
        victim = os.pidfd_open(rng.choice(list(batches._pool.pids().values())))
        timer = threading.Timer(rng.random() * 0.03, kill, (victim,))
        timer.start()
        assert list(map(bits, batches)) == list(map(bits, calm))
        timer.join()
        loader.close()
        os.close(victim)


LONG = """
import os, sys, psutil
import numpy as np
import agnoload

class Data:
    def __len__(self): return 400_000
    def __getitem__(self, index): return np.full(8, index), index

def private(pid):
    return psutil.Process(pid).memory_full_info().uss

loader = agnoload.DataLoader(Data(), 4, num_workers=2, prefetch_factor=8)
batches = iter(loader)
pids = [os.getpid(), *batches._pool.pids().values()]
for number, batch in enumerate(batches):
    if number == 10_000:
        before = [private(pid) for pid in pids]
    if number == 99_968:
        after = [private(pid) for pid in pids]
assert number == 99_999
print(*[(b - a) / 2**20 for a, b in zip(before, after)])
"""


@pytest.mark.slow
def test_the_memory_of_a_run_of_a_hundred_thousand_batches_is_flat(program) -> None:
    """Five bytes a batch would be too many."""
    out, err = program(LONG).process.communicate()
    assert err == ""
    assert all(float(grown) <= 0.5 for grown in out.split()), out
