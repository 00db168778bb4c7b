"""A sampler's indices, cut into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from agnoload.arguments import flag, positive
from agnoload.errors import OptionError
from agnoload.samplers.order import BatchedOrder, BatchOrder
from agnoload.samplers.sampler import AroundSampler, SeededSampler, is_transparent
from agnoload.words import brief


class BatchSampler(AroundSampler[list[int]]):
    """What `sampler` yields, in lists of `batch_size`; the last may be shorter, and is left out with `drop_last`.

    `sampler` is any iterable of keys. Seed, epoch and everything else are its own.

    >>> list(BatchSampler(range(5), 2, drop_last=False))
    [[0, 1], [2, 3], [4]]
    """

    yields_batches = True

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        super().__init__()
        if not hasattr(sampler, "__iter__"):
            raise OptionError(f"sampler must be iterable, got {sampler!r}")
        if getattr(sampler, "yields_batches", False):
            raise OptionError(f"sampler must yield indices, got {sampler!r}, which yields batches already")
        self.sampler = sampler
        self.batch_size = positive("batch_size", batch_size)
        self.drop_last = flag("drop_last", drop_last)
        self.data_length = getattr(sampler, "data_length", None)
        self.is_split = getattr(sampler, "is_split", False)
        self.default_seed = getattr(sampler, "default_seed", None)

    def __len__(self) -> int:
        items = len(self.sampler)  # an iterable without a length: its own TypeError says so
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        if not is_transparent(self.sampler):
            raise OptionError(f"{self!r} cannot be asked for batches by number: iterate it")
        return BatchedOrder(self.sampler.order(seed, epoch), self.batch_size, self.drop_last)

    def identity(self) -> str:
        return self.sampler.identity() if isinstance(self.sampler, SeededSampler) else type(self.sampler).__name__

    def settle(self, backend_world: tuple[int, int] | None = None) -> None:
        if isinstance(self.sampler, SeededSampler):
            self.sampler.settle(backend_world)

    @property
    def seed(self) -> int | None:
        return self.sampler.seed if isinstance(self.sampler, SeededSampler) else None

    def _walk(self, epoch: int) -> Iterator[list[Any]]:
        return super()._walk(epoch) if is_transparent(self.sampler) else self._cut(iter(self.sampler))

    def _cut(self, keys: Iterator[Any]) -> Iterator[list[Any]]:
        while batch := list(islice(keys, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __repr__(self) -> str:
        return f"BatchSampler({brief(self.sampler)}, {self.batch_size}, drop_last={self.drop_last})"
