"""`loader.benchmark()`: how fast a loader is by itself, and how fast it could be if loading took no time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from agnoload.errors import OptionError
from agnoload.messages import Reply, Request
from agnoload.protocols import ClosableFetch, Empty


class Benchmark(NamedTuple):
    """What `loader.benchmark()` has measured; printed, it says so in three lines.

    `loader`: batches a second of the loader by itself, after its first one; `ceiling`: batches a second when one batch
    goes through the loader again and again, so that loading takes no time. `first_batch`: seconds until the first
    batch, with the start of the workers. `batch_size`: samples a batch, on average. `verdict`: what `loader.stats()`
    said of it.

    >>> found = Benchmark(loader=50.0, ceiling=1000.0, first_batch=0.25, batch_size=32.0, verdict="add workers")
    >>> found.advice
    'a loop that spends 20 ms or more on a batch need not wait. add workers'
    """

    loader: float
    ceiling: float
    first_batch: float
    batch_size: float
    verdict: str

    def __str__(self) -> str:
        return (
            f"the loader alone: {self.loader:,.1f} batches/s, {self.loader * self.batch_size:,.0f} samples/s, "
            f"the first batch after {self.first_batch:.2f} s\n"
            f"one batch again and again: {self.ceiling:,.1f} batches/s, the most that it can give\n{self.advice}"
        )

    @property
    def advice(self) -> str:
        """What to do with these numbers."""
        if self.loader > 0.5 * self.ceiling:
            return "loading takes little: the rest is a batch's way to the user, and larger batches make it cheaper"
        return f"a loop that spends {1e3 / self.loader:.3g} ms or more on a batch need not wait. {self.verdict}"


class RepeatedFetch:
    """Loads once, and answers every request with that batch."""

    def __init__(self, fetch: ClosableFetch) -> None:
        self._fetch = fetch
        self._reply: Reply | None = None

    def __call__(self, request: Request, empty: Empty) -> Reply:
        if self._reply is None:
            self._reply = self._fetch(request, empty)._replace(failed=(), notices=(), log_records=(), stream=None)
        return self._reply._replace(number=request.number)

    def close(self) -> None:
        self._fetch.close()


def run_benchmark(loader: Any, again: Callable[[], Iterable[Any]], seconds: float) -> Benchmark:
    """Measure a loader for one half of the time, and for the other what `again` gives: one batch, without end."""
    half = max(seconds, 0.02) / 2
    alone, first = _rate(lambda: loader, half)
    ceiling, _ = _rate(again, half)
    stats = loader.stats()
    return Benchmark(alone, ceiling, first, stats.samples / stats.batches, stats.verdict)


def _rate(batches: Callable[[], Iterable[Any]], seconds: float) -> tuple[float, float]:
    """Iterate batches again and again for a while: batches a second after the first one, and when that one came."""
    began = now = time.monotonic()
    first, count = 0.0, 0
    while now - began < seconds:
        before = count
        for _ in batches():
            now = time.monotonic()
            count += 1
            first = first or now - began
            if now - began >= seconds:
                break
        if count == before:
            raise OptionError("benchmark needs at least one batch, this loader has none")
    return (count - 1) / (now - began - first) if count > 1 else 1 / first, first
