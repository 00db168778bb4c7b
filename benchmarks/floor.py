"""The floor: the same samples put into batches with no loader around it.

With workers it is as many plain processes, each with its share of the batches, and nothing is handed over. The memory
of a batch is used again after two more batches, since a loader too has some in flight and one in the user's hands.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.workloads import Stream, in_memory


def collate_into(memory: Any, samples: list[Any]) -> Any:
    """Samples as a batch, field by field, written over the batch before where there is one."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate_into(memory and memory[key], [s[key] for s in samples]) for key in first}
    if isinstance(first, tuple):
        fields = zip(*samples, strict=True)
        return tuple(collate_into(memory and memory[k], list(field)) for k, field in enumerate(fields))
    if isinstance(first, np.ndarray):
        return np.stack(samples, out=memory)
    return np.array(samples)


def batches(stream: Stream, start: int = 0, step: int = 1) -> Iterator[Any]:
    """Every `step`-th batch of the stream, from number `start` on, in this process."""
    dataset = stream.dataset()
    memory: deque[Any] = deque([None] * 3)
    for number in itertools.count(start, step):
        first = number * stream.batch_size
        samples = [dataset[i] for i in range(first, first + stream.batch_size)]
        used = memory.popleft()
        batch = stream.collate_fn(samples) if stream.collate_fn else collate_into(used, samples)
        memory.append(batch)
        yield batch


def _count(stream: Stream, worker: int, ready: Any, seconds: float, answers: Any) -> None:
    mine = batches(stream, worker, max(stream.workers, 1))
    for _ in range(3):
        next(mine)
    ready.wait()
    begun, cpu = time.perf_counter(), time.process_time()
    done = 0
    while time.perf_counter() < begun + seconds:
        next(mine)
        done += 1
    answers.put((done / (time.perf_counter() - begun), done, time.process_time() - cpu))


def rate(stream: Stream, seconds: float) -> dict[str, float]:
    """Batches a second, and the CPU time of one, when nothing else is to be done."""
    context = multiprocessing.get_context("fork")
    ready, answers = context.Barrier(max(stream.workers, 1)), context.SimpleQueue()
    arguments = [(stream, k, ready, seconds, answers) for k in range(max(stream.workers, 1))]
    processes = [context.Process(target=_count, args=a) for a in arguments]
    for process in processes:
        process.start()
    rates, counts, cpu = zip(*[answers.get() for _ in processes], strict=True)
    for process in processes:
        process.join()
    return {"rate": sum(rates), "batches": sum(counts), "cpu_ms": 1000 * sum(cpu) / sum(counts)}


def kept(stream: Stream, count: int) -> float:
    """Seconds for `count` batches, all kept: new memory for each."""

    def keep(worker: int) -> None:
        dataset = stream.dataset()
        firsts = range(worker * stream.batch_size, count * stream.batch_size, stream.workers * stream.batch_size)
        _all = [collate_into(None, [dataset[i] for i in range(f, f + stream.batch_size)]) for f in firsts]

    context = multiprocessing.get_context("fork")
    begun = time.perf_counter()
    processes = [context.Process(target=keep, args=(k,)) for k in range(stream.workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return time.perf_counter() - begun


def in_memory_epochs(batch_size: int) -> Callable[[], Iterator[Any]]:
    """A bare NumPy loop: a shuffle and two indexing calls a batch."""
    images, labels = in_memory()
    rng = np.random.default_rng(0)

    def epoch() -> Iterator[Any]:
        order = rng.permutation(len(labels))
        for first in range(0, len(labels), batch_size):
            indices = order[first : first + batch_size]
            yield images[indices], labels[indices]

    return epoch
