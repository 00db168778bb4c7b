"""What `stats()` costs: microseconds of a batch's account, and its share of the quickest loops there are.

`python -m benchmarks.account`. Each figure is the best of many, in the CPU time of this process; the loops run with the
account and with one that notes nothing, in random order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from agnoload import ArrayDataset, DataLoader
from agnoload.messages import Reply
from agnoload.monitoring.stats import Recorder, size_of

BATCHES: dict[str, Any] = {
    "an array": np.zeros(3),
    "a pair of arrays": (np.zeros(3), np.zeros(3)),
    "a dict of 20 arrays": {str(name): np.zeros(3) for name in range(20)},
}
LOOPS = {
    "1024 rows of 20 float32": (ArrayDataset(x=np.zeros((200_000, 20), np.float32)), 1024),
    "256 images of 32 x 32 x 3 uint8 and labels": (
        ArrayDataset(np.zeros((20_000, 32, 32, 3), np.uint8), np.zeros(20_000, np.int64)),
        256,
    ),
    "32 samples one by one": ([np.zeros(1024, np.uint8)] * 6_400, 32),
}


class Nothing(Recorder):
    """Notes nothing."""

    def arrived(self, reply: Reply, ends: dict[int, float]) -> None: ...

    def delivered(self, reply: Reply, since: float | None, began: float, now: float) -> None: ...


def best(function: Callable[[], object], times: int, repeats: int = 400) -> float:
    """Microseconds of one call."""
    found = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(times):
            function()
        found = min(found, time.process_time() - began)
    return found / times * 1e6


def account(batch: Any) -> tuple[float, float]:
    """Of one batch's account, and of what in it looks for the batch's size."""
    recorder, ends = Recorder(), dict[int, float]()
    reply = Reply(1, 0, batch, samples=32, started=1.0, fetched=1.1, collated=1.2, finished=1.3)

    def one() -> None:
        recorder.arrived(reply, ends)
        recorder.delivered(reply, 1.0, 1.1, 1.2)

    return best(one, Recorder.CHUNK), best(lambda: size_of(batch), 1000)


def loop(dataset: Any, batch_size: int, recorder: Recorder) -> float:
    """Microseconds a batch of an epoch without workers."""
    loader = DataLoader(dataset, batch_size, seed=0)
    loader._recorder = recorder
    batches = iter(loader)
    next(batches)
    began = time.process_time()
    count = sum(1 for _ in batches)
    return (time.process_time() - began) / count * 1e6


def main() -> None:
    for name, batch in BATCHES.items():
        whole, size = account(batch)
        print(f"the account of {name}: {whole:.2f} microseconds, {size:.2f} of them for its size")
    for name, (dataset, batch_size) in LOOPS.items():
        found: dict[type[Recorder], list[float]] = {Recorder: [], Nothing: []}
        for _ in range(60):
            for kind in random.sample([Recorder, Nothing], 2):
                found[kind].append(loop(dataset, batch_size, kind()))
        with_it, without = (sorted(times)[len(times) // 10] for times in found.values())
        print(f"{name}: {with_it:.1f} microseconds a batch, {without:.1f} without the account")


if __name__ == "__main__":
    main()
