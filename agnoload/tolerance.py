"""How much is borne of samples that cannot be loaded: tries again, and how many may fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agnoload.arguments import number, positive
from agnoload.errors import OptionError, TooManyFailed
from agnoload.messages import Failure

JUDGED_FROM = 100
"""A share of failed samples is judged as if at least so many had been tried, until the epoch has ended."""


@dataclass(frozen=True)
class Retry:
    """Which errors of a sample are tried again, how often, and after which pauses: `retry=Retry(OSError)` of a loader.

    `errors` is an exception type or a tuple of them. A sample that raises one is loaded again up to `times` times,
    after `wait` seconds, then `factor` times as many, and so on, never more than `longest`. Each try draws the same
    random numbers, so a sample that succeeds at last is what it would have been at once; one that never does is up to
    `on_error`. `OptionError` for values that cannot be meant.

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


def check_retry(value: Any) -> Retry | None:
    """The option `retry`: a `Retry`, the exception types alone, or None."""
    return value if value is None or isinstance(value, Retry) else Retry(value)


def check_max_failed(value: Any) -> int | float | None:
    """The option `max_failed`: None, a count, or a share below 1."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, float) and 0 <= value < 1:
        return value
    raise OptionError(
        f"max_failed must be how many samples of an epoch may fail (an int), their share (a float below 1), or None, "
        f"got {value!r}"
    )


class Ceiling:
    """Counts the failed samples of each epoch, in the order of the batches, and says when they are too many.

    A share is judged as if at least `JUDGED_FROM` samples had been tried, so that one bad sample among the first does
    not end an epoch of millions; at its end it is judged as it is.

    >>> ceiling = Ceiling(1)
    >>> ceiling.count(0, 4, [Failure(3, "OSError: gone")]) is None
    True
    >>> print(ceiling.count(0, 4, [Failure(7, "OSError: gone")]))
    2 samples of epoch 0 failed, max_failed=1 allows no more than 1: indices 3, 7; the last error was OSError: gone
    """

    def __init__(self, limit: int | float) -> None:
        self._limit = limit
        self._epochs: dict[int, tuple[list[Failure], int]] = {}

    def count(self, epoch: int, samples: int, failures: Sequence[Failure]) -> TooManyFailed | None:
        """A batch of so many samples comes next, and these had failed."""
        failed, tried = self._epochs.get(epoch, ([], 0))
        failed += failures
        tried += samples + len(failures)
        self._epochs[epoch] = failed, tried
        return self._judged(epoch, max(tried, JUDGED_FROM)) if failures else None

    def ended(self, epoch: int) -> TooManyFailed | None:
        """All batches of an epoch have come."""
        _, tried = self._epochs.get(epoch, ([], 0))
        error = self._judged(epoch, tried)
        self._epochs.pop(epoch, None)
        return error

    def _judged(self, epoch: int, tried: int) -> TooManyFailed | None:
        failed, _ = self._epochs.get(epoch, ([], 0))
        allowed = self._limit if isinstance(self._limit, int) else self._limit * tried
        if len(failed) <= allowed:
            return None
        some = ", ".join(repr(failure.index) for failure in failed[:8]) + ", ..." * (len(failed) > 8)
        of = "" if isinstance(self._limit, int) else f" of {tried} samples"
        return TooManyFailed(
            f"{len(failed)} samples of epoch {epoch} failed, max_failed={self._limit} allows no more than "
            f"{int(allowed)}{of}: indices {some}; the last error was {failed[-1].error}",
            failed,
        )
