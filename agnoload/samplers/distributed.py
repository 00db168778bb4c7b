"""One rank's share of a dataset or of another sampler's order; in turns, the shares are the order of one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import AgnoloadWarning, OptionError
from agnoload.samplers.base import AroundSampler, is_sampler, is_split
from agnoload.samplers.basic import RandomSampler, SequentialSampler
from agnoload.samplers.order import BatchOrder, Order, Tail, every_batch, share
from agnoload.system import check_rank, rank_and_world
from agnoload.validate import brief, flag, integer, number_of, positive, sized, word


class DistributedSampler(AroundSampler[Any]):
    """The share of one of `num_replicas` processes: every `num_replicas`-th index, from number `rank` on.

    `dataset_or_sampler` is a dataset (anything with `len`), shuffled unless `shuffle=False`; or any sampler, whose own
    order is used as it is, so `shuffle` then has no effect. Of a batch sampler each rank gets every
    `num_replicas`-th batch, whole. Taken in turns from all ranks, the shares are the order of one process.

    If the indices cannot be split evenly, `tail="pad"` (the default, as in torch) repeats indices from the beginning
    until they can, see `is_padding`; `"drop"` (or `drop_last=True`) leaves out the remainder on every rank; `"keep"`
    gives each index exactly once, so shares differ by at most one. Where rank and world size are not given, they come
    from the environment, see `agnoload.system`, or from the loader's backend. Without a seed it uses the loader's, or
    else 0, so that ranks agree. The epoch advances by itself.

    >>> [list(DistributedSampler(range(10), 3, rank, shuffle=False, tail="keep")) for rank in range(3)]
    [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    """

    is_split = True
    _fixed = ("dataset", "shuffle")

    def __init__(
        self, dataset_or_sampler: Any, num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True,
        seed: int | None = None, drop_last: bool = False, tail: Tail | None = None,
    ) -> None:  # fmt: skip
        if tail is not None:
            word("tail", tail, ("pad", "drop", "keep"), "None")
        if flag("drop_last", drop_last) and tail not in (None, "drop"):
            raise OptionError(f"drop_last=True means tail='drop', got tail={tail!r}: give one of them")
        flag("shuffle", shuffle)
        sampler = dataset_or_sampler
        if hasattr(dataset_or_sampler, "split_by_rank"):
            raise OptionError(f"a stream is split by its own split_by_rank(), got {dataset_or_sampler!r}")
        if not is_sampler(dataset_or_sampler):
            sized("dataset_or_sampler must be a sampler, or it", dataset_or_sampler)
            sampler = (RandomSampler if shuffle else SequentialSampler)(dataset_or_sampler)
        if is_split(sampler):
            raise OptionError(f"dataset_or_sampler must not be split over ranks already, got {dataset_or_sampler!r}")
        super().__init__(sampler, seed=seed)
        self.tail: Tail = tail or ("drop" if drop_last else "pad")
        self.shuffle = bool(shuffle)
        self.dataset = dataset_or_sampler
        self.yields_batches = bool(getattr(sampler, "yields_batches", False))
        self._given = (rank, num_replicas)
        self._warned = False
        self.resolve_ranks(None)

    @property
    def num_samples(self) -> int:
        """The number of items of an epoch on this rank."""
        return len(self)

    @property
    def total_size(self) -> int:
        """The number of items of an epoch on all ranks, with those that `tail="pad"` adds."""
        items = len(self.sampler)
        return sum(share(items, rank, self.num_replicas, self.tail) for rank in range(self.num_replicas))

    @property
    def drop_last(self) -> bool:
        """Whether items that cannot be split evenly are left out."""
        return self.tail == "drop"

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """For each item of this rank's epoch whether it is a repeat that `tail="pad"` has added: a mask for metrics.

        Of a batch sampler the items are batches.

        >>> DistributedSampler(range(10), 3, 1, shuffle=False).is_padding.tolist()
        [False, False, False, True]
        """
        return np.arange(len(self)) * self.num_replicas + self.rank >= len(self.sampler)

    def __len__(self) -> int:
        return share(len(self.sampler), self.rank, self.num_replicas, self.tail)

    def order(self, seed: int, epoch: int) -> Order:
        whole = self._inner().order(seed, epoch)
        return replace(whole, rank=self.rank, stride=self.num_replicas, tail=self.tail)

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        return every_batch(self._inner().batches(seed, epoch), self.rank, self.num_replicas, self.tail)

    def _select(self, items: Iterator[Any]) -> Iterator[Any]:
        beginning: list[Any] = []
        while group := list(islice(items, self.num_replicas)):
            beginning = beginning or group
            if len(group) < self.num_replicas:
                if self.tail == "pad":
                    group += (beginning * self.num_replicas)[: self.num_replicas - len(group)]
                elif self.tail == "drop":
                    return
            yield from group[self.rank : self.rank + 1]

    def resolve_ranks(self, backend_world: tuple[int, int] | None) -> None:
        """Find rank and world size where they were not given; a loader's backend may know them."""
        rank, world = self._given
        if rank is None or world is None:
            found_rank, found_world = rank_and_world(backend_world)
            rank = found_rank if rank is None else rank
            world = found_world if world is None else world
        rank = integer("rank", rank, 0, "a non-negative int")
        world = positive("num_replicas", world)
        self.rank, self.num_replicas = check_rank(rank, world, "rank and num_replicas")
        items = len(self.sampler) if hasattr(self.sampler, "__len__") else 0
        if self.tail == "pad" and 0 < items < self.num_replicas and not self._warned:
            self._warned = True
            warnings.warn(
                f"DistributedSampler has {number_of(items, 'item')} for {self.num_replicas} ranks, so some are "
                "delivered more than once: pass tail='keep' to deliver each once",
                AgnoloadWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return self._repr_of(brief(self.sampler), f"rank {self.rank} of {self.num_replicas}", f"tail={self.tail!r}")
