"""How many workers are worth having: the choice behind `num_workers="auto"`, made once by a probe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from agnoload.errors import DatasetNotPicklable
from agnoload.messages import Request
from agnoload.monitoring.stats import TRANSPORT, size_of
from agnoload.options import Options
from agnoload.protocols import Pool
from agnoload.streams import MappedStream
from agnoload.streams.layout import layout_of
from agnoload.validate import number_of

PROBE_SECONDS = 0.1
"""What a probe of samples may take, beyond its first sample."""
PROBE_PATIENCE = 10.0
"""Seconds after which a probe is given up."""


class Choice(NamedTuple):
    """A number of workers, and why."""

    workers: int
    reason: str


Load = Callable[[int], tuple[float, int]]
"""Loads a number of samples in one request, in a worker: the seconds that it took, and the bytes of the batch."""


def choose_for_stream(stream: Any, cores: int) -> Choice:
    """Workers for a stream, which cannot be probed without reading it: as many as have something of their own to do."""
    lanes = layout_of(stream).lanes
    if lanes:
        return Choice(min(cores, lanes), f"a stream with {number_of(lanes, 'lane')}, {_usable(cores)}")
    if isinstance(stream, MappedStream):
        return Choice(cores, f"a stream of which each worker maps its own share, {_usable(cores)}")
    return Choice(1, "a stream without shards, which every worker would read as a whole")


def choose_for_dataset(
    options: Options, gathers: bool, start: Callable[[], Pool], pattern: Request, cores: int, memory: int
) -> Choice:
    """Workers for a dataset with indices, from a probe in the one worker that `start` starts.

    `gathers`: it gives whole batches in one indexing call. The probe's requests are made after `pattern`.
    """
    if gathers:
        return Choice(0, "whole batches are gathered in one step, quicker than through a worker")
    length = len(options.dataset) if hasattr(options.dataset, "__len__") else 0
    if not length:
        return Choice(0, "there is nothing to probe")
    try:
        pool = start()
    except DatasetNotPicklable as error:
        return Choice(0, str(error).split(". ")[0])

    def load(count: int) -> tuple[float, int]:
        keys = np.linspace(0, length - 1, count).astype(np.int64)  # from all over the dataset
        pool.submit(pattern._replace(number=count, indices=keys if options.batched else int(keys[0])))
        reply = pool.receive(PROBE_PATIENCE)
        if reply.error is not None:
            raise reply.error
        return reply.finished - reply.started, size_of(reply.batch)

    with closing(pool):
        size = options.cut_size or getattr(options.batch_sampler, "batch_size", None) or 1
        return choose_workers(load, size, options.prefetch, cores, memory)


def choose_workers(load: Load, batch_size: int, prefetch: int, cores: int, memory: int) -> Choice:
    """No workers where a batch costs less than its transport, else one a usable core.

    `load` is asked for one sample first, which may open files, then for as many as fit into `PROBE_SECONDS`, at most a
    batch. The batches under way may fill a quarter of `memory`.
    """
    try:
        seconds, nbytes = load(1)
        count = 1
        if seconds < PROBE_SECONDS:
            count = max(1, min(batch_size, int(PROBE_SECONDS / max(seconds, 1e-6))))
            seconds, nbytes = load(count)
    except Exception as error:  # the user's loop will meet the same error, and raise it
        return Choice(cores, f"a probe failed with {type(error).__name__}, {_usable(cores)}")
    batch = seconds / count * batch_size
    if batch < TRANSPORT:
        return Choice(0, f"a batch takes {batch * 1e6:.0f} microseconds, less than its way through a worker")
    slots = memory // 4 // max(nbytes * batch_size // count, 1)
    most = max(1, min(cores, (slots - 1) // (prefetch + 1)))
    short = "" if most == cores else f", memory for the batches of {most}"
    return Choice(most, f"a sample takes {seconds / count * 1e3:.2g} ms, {_usable(cores)}{short}")


def _usable(cores: int) -> str:
    return number_of(cores, "usable core")
