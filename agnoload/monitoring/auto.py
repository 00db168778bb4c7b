"""How many workers are worth having: the choice behind `num_workers="auto"`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from agnoload.monitoring.stats import LITTLE, TRANSPORT, Sums
from agnoload.streams import MappedStream
from agnoload.streams.layout import layout_of
from agnoload.validate import number_of

PROBE_SECONDS = 0.1
"""What a probe of samples may take, beyond its first sample."""
ENOUGH = 10
"""So many batches must have come before an epoch says anything."""


class Choice(NamedTuple):
    """A number of workers, why, and the most that there may be."""

    workers: int
    reason: str
    most: int


Load = Callable[[int], tuple[float, int]]
"""Loads so many samples in one request, in a worker: the seconds that it took, and the bytes of the batch."""


def choose_workers(load: Load, batch_size: int, prefetch: int, cores: int, memory: int) -> Choice:
    """Workers for the first epoch: none where a batch costs less than its transport, else one a usable core.

    `load` is asked for one sample first, which may open files, then for as many as fit into `PROBE_SECONDS`, at most a
    batch. The batches under way may fill a quarter of `memory`.
    """
    try:
        seconds, nbytes = load(1)
        count = 1
        if seconds < PROBE_SECONDS:
            count = max(1, min(batch_size, int(PROBE_SECONDS / max(seconds, 1e-6))))
            seconds, nbytes = load(count)
    except Exception as error:  # the loop will meet it, and say so
        return Choice(cores, f"a probe failed with {type(error).__name__}, {_usable(cores)}", cores)
    batch = seconds / count * batch_size
    if batch < TRANSPORT:
        return Choice(0, f"a batch takes {batch * 1e6:.0f} microseconds, less than its way through a worker", cores)
    slots = memory // 4 // max(nbytes * batch_size // count, 1)
    most = max(1, min(cores, (slots - 1) // (prefetch + 1)))
    short = "" if most == cores else f", memory for the batches of {most}"
    return Choice(most, f"a sample takes {seconds / count * 1e3:.2g} ms, {_usable(cores)}{short}", most)


def choose_for_stream(stream: Any, cores: int) -> Choice:
    """Workers for a stream, which cannot be probed without reading it: as many as have something of their own to do."""
    lanes = layout_of(stream).lanes
    if lanes:
        most = min(cores, lanes)
        return Choice(most, f"a stream with {number_of(lanes, 'lane')}, {_usable(cores)}", most)
    if isinstance(stream, MappedStream):
        return Choice(cores, f"a stream of which each worker maps its own share, {_usable(cores)}", cores)
    return Choice(1, "a stream without shards, which every worker would read as a whole", 1)


def adjusted(choice: Choice, epoch: Sums, cores: int) -> Choice:
    """The choice for the next epoch, from what was measured since the last one.

    As many workers as load a batch in the time in which the user's loop uses one, and a fifth more; none if a batch
    takes less than its transport. Small differences change nothing, and the start of workers says nothing.
    """
    most = min(choice.most, cores)
    if choice.workers > most:
        return choice._replace(workers=most, reason=_usable(cores))
    if epoch.batches < ENOUGH or not most:
        return choice
    a_batch = epoch.loading / epoch.batches
    wanted = max(1, math.ceil(min(1.2 * epoch.workers_needed, most)))
    if choice.workers == 0:
        changes = a_batch > 2 * TRANSPORT and epoch.share_steady > LITTLE
    elif a_batch < TRANSPORT / 2:
        wanted, changes = 0, True
    elif wanted > choice.workers:
        changes = epoch.share_steady > LITTLE and epoch.busy > 0.8
    else:
        changes = wanted < choice.workers and epoch.share_steady < LITTLE
    if not changes:
        return choice
    reason = (
        f"once it had begun, the last epoch waited {epoch.share_steady:.0%} of the time with "
        f"{number_of(choice.workers, 'worker')}, and a batch took {a_batch * 1e3:.2g} ms"
    )
    return choice._replace(workers=wanted, reason=reason)


def _usable(cores: int) -> str:
    return number_of(cores, "usable core")
