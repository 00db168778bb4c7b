"""A sampler's indices, cut into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from agnoload.errors import OptionError
from agnoload.samplers.base import AroundSampler, has_random_access
from agnoload.samplers.order import BatchOrder, batched
from agnoload.validate import brief, flag, positive


class BatchSampler(AroundSampler[list[int]]):
    """The keys that `sampler` yields, in lists of `batch_size`; `drop_last` leaves out a last one that is shorter.

    `sampler` is any iterable of keys. Its seed and epoch are those of the batches.

    >>> list(BatchSampler(range(5), 2, drop_last=False))
    [[0, 1], [2, 3], [4]]
    """

    yields_batches = True

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        if not hasattr(sampler, "__iter__"):
            raise OptionError(f"sampler must be iterable, got {sampler!r}")
        if getattr(sampler, "yields_batches", False):
            raise OptionError(f"sampler must yield indices, got {sampler!r}, which yields batches already")
        super().__init__(sampler)
        self.batch_size = positive("batch_size", batch_size)
        self.drop_last = flag("drop_last", drop_last)
        self.is_split = getattr(sampler, "is_split", False)

    def __len__(self) -> int:
        items = len(self.sampler)  # without a length, its own TypeError says so
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        return batched(self._inner().order(seed, epoch), self.batch_size, self.drop_last)

    def _walk(self, epoch: int) -> Iterator[list[Any]]:
        return super()._walk(epoch) if has_random_access(self.sampler) else self._cut(iter(self.sampler))

    def _cut(self, keys: Iterator[Any]) -> Iterator[list[Any]]:
        while batch := list(islice(keys, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __repr__(self) -> str:
        return f"BatchSampler({brief(self.sampler)}, {self.batch_size}, drop_last={self.drop_last})"
