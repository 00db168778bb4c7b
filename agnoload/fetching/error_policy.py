"""How many failed samples are tolerated: tries again, what is done with a bad one, and how many there may be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from agnoload.errors import OptionError, TooManyFailed
from agnoload.messages import Failure, FailureCount, Reply
from agnoload.protocols import IndexArray
from agnoload.samplers.base import SeededSampler, effective_seed
from agnoload.seeding import SampleContext
from agnoload.validate import number, number_of, positive

JUDGED_FROM = 100
"""A share of failed samples is judged as if at least this many had been tried, until the epoch has ended."""
REPLACEMENTS = 100
"""How many other samples `on_error="replace"` tries for one bad one."""
_NONE = FailureCount()

Choose = Callable[[int, int, np.random.Generator, int], IndexArray]
"""(seed, epoch, generator, count) to indices of that epoch, at random: where replacements come from."""


@dataclass(frozen=True)
class Retry:
    """Which errors of a sample are tried again, how often, and after which pauses: `retry=Retry(OSError)` of a loader.

    `errors` is an exception type or a tuple of them. A sample that raises one is loaded again up to `times` times,
    after `wait` seconds, then `factor` times as many, and so on, never more than `longest`. Each try draws the same
    numbers from `sample_rng()`; other generators go on. What a sample that never succeeds means is up to `on_error`.
    `OptionError` for values that cannot work.

    >>> Retry((OSError, TimeoutError), times=4, wait=0.5).pauses
    (0.5, 1.0, 2.0, 4.0)
    """

    errors: type[Exception] | tuple[type[Exception], ...]
    times: int = 3
    wait: float = 0.1
    factor: float = 2.0
    longest: float = 30.0

    def __post_init__(self) -> None:
        kinds = self.errors if isinstance(self.errors, tuple) else (self.errors,)
        if not kinds or not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise OptionError(f"retry must be for an exception type or a tuple of them, got {self.errors!r}")
        positive("times of a Retry", self.times)
        for name, low in (("wait", 0.0), ("factor", 1.0), ("longest", 0.0)):
            number(f"{name} of a Retry", getattr(self, name), low, f"a number from {low:g} on")

    @property
    def pauses(self) -> tuple[float, ...]:
        """Seconds before each further try."""
        return tuple(min(self.wait * self.factor**n, self.longest) for n in range(self.times))


@dataclass(frozen=True)
class ErrorPolicy:
    """What is done about a sample that cannot be loaded."""

    on_error: Literal["raise", "skip", "replace"] | Callable[[Exception, Any], str] = "raise"
    retry: Retry | None = None
    choose: Choose | None = None
    """Where replacements come from; None: from the same batch."""

    @property
    def tolerant(self) -> bool:
        """Whether a bad sample may be left out or replaced."""
        return callable(self.on_error) or self.on_error != "raise"

    def action(self, error: BaseException, key: Any) -> str:
        """What `on_error` says to do."""
        return self.on_error(error, key) if callable(self.on_error) else self.on_error  # type: ignore[arg-type]

    def retrying(self, load: Callable[[Any], Any], context: SampleContext) -> Callable[[Any], Any]:
        """`load` with further tries, for each of which `sample_rng()` begins again."""
        retry = self.retry
        if retry is None:
            return load

        def loaded(key: Any) -> Any:
            for pause in retry.pauses:
                try:
                    return load(key)
                except retry.errors:
                    time.sleep(pause)
                    context.made = None
            return load(key)

        return loaded


def check_retry(name: str, value: Any) -> Retry | None:
    """The option `retry`: a `Retry`, the exception types alone, or None."""
    return value if value is None or isinstance(value, Retry) else Retry(value)


def check_max_failed(name: str, value: Any) -> int | float | None:
    """The option `max_failed`: None, a count, or a share below 1."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, float) and 0 <= value < 1:
        return value
    raise OptionError(
        f"{name} must be how many samples of an epoch may fail (an int), their share (a float below 1), or None, "
        f"got {value!r}"
    )


class FailureBudget:
    """Counts the failed samples of each epoch, in the order of the batches, and says when they are too many.

    A share is judged as if at least `JUDGED_FROM` samples had been tried, so that one bad sample among the first does
    not end an epoch of millions; at its end it is judged as it is.

    `before` counts what had failed of `epoch` before, where the loader resumes within it.

    >>> budget = FailureBudget(1)
    >>> budget.count(0, Reply(0, samples=4, failed=[Failure(3, "OSError: gone")])) is None
    True
    >>> print(budget.count(0, Reply(1, samples=4, failed=[Failure(7, "OSError: gone")])))
    2 samples of epoch 0 failed, max_failed=1 allows no more than 1: indices 3, 7; the last error was OSError: gone
    """

    def __init__(self, limit: int | float, epoch: int = 0, before: FailureCount = _NONE) -> None:
        self._limit = limit
        self._epoch = epoch
        self._before = before.failed
        self._count = before
        self._failed: list[Failure] = []

    def count(self, epoch: int, reply: Reply) -> TooManyFailed | None:
        """A batch comes next; the first one of an epoch ends the one before."""
        error = None
        if epoch != self._epoch:
            error = self.ended()
            self._epoch, self._before, self._count, self._failed = epoch, 0, _NONE, []
        failures = reply.failed
        self._failed += failures
        self._count = self._count.plus(reply)
        if error is None and failures:
            error = self._judged(max(self._count.tried, JUDGED_FROM))
        return error

    def ended(self) -> TooManyFailed | None:
        """All batches of the epoch have come."""
        return self._judged(self._count.tried)

    def _judged(self, tried: int) -> TooManyFailed | None:
        allowed = self._limit if isinstance(self._limit, int) else self._limit * tried
        if self._count.failed <= allowed:
            return None
        of = "" if isinstance(self._limit, int) else f" of {number_of(tried, 'sample')}"
        text = (
            f"{number_of(self._count.failed, 'sample')} of epoch {self._epoch} failed, max_failed={self._limit} allows "
            f"no more than {int(allowed)}{of}: "
        )
        if self._before:
            text += f"{self._before} before the state was saved that the epoch resumes from" + ", " * bool(self._failed)
        if self._failed:
            some = ", ".join(repr(failure.index) for failure in self._failed[:8]) + ", ..." * (len(self._failed) > 8)
            text += f"indices {some}; the last error was {self._failed[-1].error}"
        return TooManyFailed(text, self._failed)


class ReplacementKeys:
    """Random indices of an epoch, for `on_error="replace"`; travels to workers with its sampler.

    `order_seed`: None where the order of each epoch has the seed of its samples.
    """

    def __init__(self, sampler: SeededSampler[Any], order_seed: int | None) -> None:
        self._sampler = sampler
        self._order_seed = order_seed

    def __call__(self, seed: int, epoch: int, rng: np.random.Generator, count: int) -> IndexArray:
        order_seed = effective_seed(self._sampler, seed, seed) if self._order_seed is None else self._order_seed
        if self._sampler.yields_batches:
            batches = self._sampler.batches(order_seed, epoch)
            picked = batches.batch(int(rng.integers(len(batches))))
            return rng.permutation(picked)[:count]
        order = self._sampler.order(order_seed, epoch)
        n = len(order)
        places = rng.permutation(n)[:count] if n <= count else rng.integers(n, size=count)
        return np.concatenate([order.indices(place, place + 1) for place in places.tolist()])
