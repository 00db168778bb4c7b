"""One rank's share of a dataset or of another sampler's order; what the ranks get together is the order of one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agnoload.arguments import flag, sized, word
from agnoload.errors import AgnoloadWarning, OptionError
from agnoload.protocols import IndexArray
from agnoload.ranks import check_rank, rank_and_world
from agnoload.samplers.basic import RandomSampler, SequentialSampler
from agnoload.samplers.order import BatchOrder, Order
from agnoload.samplers.sampler import AroundSampler, Fixed, SeededSampler, is_sampler, is_transparent
from agnoload.words import brief, number_of

Tail = Literal["pad", "drop", "keep"]


class DistributedSampler(AroundSampler[Any]):
    """The share of one of `num_replicas` processes: every `num_replicas`-th index, from number `rank` on.

    `dataset_or_sampler` is a dataset (anything with `len`), shuffled unless `shuffle=False`; or any sampler, whose own
    order is used as it is, so `shuffle` is then without effect. Of a batch sampler each rank gets every
    `num_replicas`-th batch, whole. Taken in turns from all ranks, the shares are the order of one process.

    What does not come out even: `tail="pad"` (as torch, the default) repeats from the beginning until it does, see
    `is_padding`; `"drop"` (or `drop_last=True`) leaves it out on every rank; `"keep"` gives each index exactly once, so
    that shares differ by at most one. Rank and world size come from the environment, see `agnoload.ranks`, or from the
    loader's backend, when they are not given. Without a seed it uses the loader's, or else 0, so that ranks agree. The
    epoch advances by itself.

    >>> [list(DistributedSampler(range(10), 3, rank, shuffle=False, tail="keep")) for rank in range(3)]
    [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    """

    default_seed = 0
    is_split = True
    dataset = Fixed[Any]()
    shuffle = Fixed[bool]()

    def __init__(
        self,
        dataset_or_sampler: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        tail: Tail | None = None,
    ) -> None:
        super().__init__(seed=seed)
        if tail is not None:
            word("tail", tail, ("pad", "drop", "keep"), "None")
        if flag("drop_last", drop_last) and tail not in (None, "drop"):
            raise OptionError(f"drop_last=True means tail='drop', got tail={tail!r}: give one of them")
        self.tail: Tail = tail or ("drop" if drop_last else "pad")
        self.shuffle = flag("shuffle", shuffle)
        self.dataset = self.sampler = dataset_or_sampler
        if hasattr(dataset_or_sampler, "split_by_rank"):
            raise OptionError(f"a stream is split by its own split_by_rank(), got {dataset_or_sampler!r}")
        if not is_sampler(dataset_or_sampler):
            sized("dataset_or_sampler must be a sampler, or it", dataset_or_sampler)
            self.sampler = (RandomSampler if shuffle else SequentialSampler)(dataset_or_sampler)
        if getattr(self.sampler, "is_split", False):
            raise OptionError(f"dataset_or_sampler must not be split over ranks already, got {dataset_or_sampler!r}")
        self.yields_batches = bool(getattr(self.sampler, "yields_batches", False))
        self.data_length = getattr(self.sampler, "data_length", None)
        self._given = (rank, num_replicas)
        self._warned = False
        self._find_rank(None)

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
        """Whether what does not come out even is left out."""
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
        inner = self._transparent().order(seed, epoch)
        return RankOrder(inner, inner, self.rank, self.num_replicas, self.tail)

    def batches(self, seed: int, epoch: int) -> BatchOrder:
        inner = self._transparent().batches(seed, epoch)
        return RankBatchOrder(inner, inner, self.rank, self.num_replicas, self.tail)

    def identity(self) -> str:
        return self.sampler.identity() if isinstance(self.sampler, SeededSampler) else type(self.sampler).__name__

    def settle(self, backend_world: tuple[int, int] | None = None) -> None:
        if backend_world is not None:
            self._find_rank(backend_world)
        if isinstance(self.sampler, SeededSampler):
            self.sampler.settle(backend_world)

    @property
    def seed(self) -> int | None:
        if self._seed is None and isinstance(self.sampler, SeededSampler):
            return self.sampler.seed
        return self._seed

    def _walk(self, epoch: int) -> Iterator[Any]:
        if is_transparent(self.sampler):
            return super()._walk(epoch)
        return deal(iter(self.sampler), self.rank, self.num_replicas, self.tail)

    def _transparent(self) -> SeededSampler[Any]:
        if not is_transparent(self.sampler):
            raise OptionError(f"{self!r} cannot be asked for items by number: iterate it")
        return self.sampler

    def _find_rank(self, backend_world: tuple[int, int] | None) -> None:
        rank, world = self._given
        if rank is None or world is None:
            found_rank, found_world = rank_and_world(backend_world)
            rank = found_rank if rank is None else rank
            world = found_world if world is None else world
        for name, value in (("rank", rank), ("num_replicas", world)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise OptionError(f"{name} must be an int, got {value!r}")
        self.rank, self.num_replicas = check_rank(int(rank), int(world), "rank and num_replicas")
        self._warn_if_few()

    def _warn_if_few(self) -> None:
        items = len(self.sampler) if hasattr(self.sampler, "__len__") else 0
        if self.tail == "pad" and 0 < items < self.num_replicas and not self._warned:
            self._warned = True
            warnings.warn(
                f"DistributedSampler has {number_of(items, 'item')} for {self.num_replicas} ranks, so some are "
                "delivered more than once: tail='keep' delivers each once",
                AgnoloadWarning,
                stacklevel=4,
            )

    def __repr__(self) -> str:
        words = (brief(self.sampler), f"rank {self.rank} of {self.num_replicas}", f"tail={self.tail!r}")
        own = () if self._seed is None else (f"seed={self._seed}",)
        return f"DistributedSampler({', '.join((*words, *own))})"


def share(items: int, rank: int, world: int, tail: Tail) -> int:
    """How many of `items` one rank gets."""
    if tail == "drop":
        return items // world
    return -(-items // world) if tail == "pad" else -(-(items - rank) // world)


class RankOrder(Order):
    """Every `world`-th item of `rest`, from number `rank` on; what pads it is repeated from the beginning of `whole`.

    After any position the rest is split anew, so another number of ranks can go on.
    """

    def __init__(self, whole: Order, rest: Order, rank: int, world: int, tail: Tail) -> None:
        self.whole = whole
        self.rest = rest
        self.rank = rank
        self.world = world
        self.tail: Tail = tail
        self.first = rest.first + rank * rest.stride
        self.stride = rest.stride * world

    def __len__(self) -> int:
        return share(len(self.rest), self.rank, self.world, self.tail)

    def take(self, start: int, stop: int, step: int = 1) -> IndexArray:
        n = len(self.rest)
        first, stride = self.rank + start * self.world, step * self.world
        end = self.rank + (stop - 1) * self.world + 1 if stop > start else first
        indices = self.rest.take(first, min(end, n), stride) if first < n else np.empty(0, np.int64)
        padding = np.arange(first + len(indices) * stride, end, stride) - n
        if not padding.size:
            return indices
        again = [self.whole.take(place, place + 1) for place in (padding % len(self.whole)).tolist()]
        return np.concatenate((indices, *again))

    def reached(self, count: int) -> int:
        return self.rest.reached(count * self.world)

    @property
    def end(self) -> int:
        return self.whole.end

    def after(self, position: int) -> Order:
        return RankOrder(self.whole, self.rest.after(position), self.rank, self.world, self.tail)


class RankBatchOrder(BatchOrder):
    """Every `world`-th batch of `rest`, from number `rank` on; else as `RankOrder`."""

    def __init__(self, whole: BatchOrder, rest: BatchOrder, rank: int, world: int, tail: Tail) -> None:
        self.whole = whole
        self.rest = rest
        self.rank = rank
        self.world = world
        self.tail: Tail = tail
        self.stride = rest.stride

    def __len__(self) -> int:
        return share(len(self.rest), self.rank, self.world, self.tail)

    def batch(self, number: int) -> IndexArray:
        place = self.rank + number * self.world
        if place < len(self.rest):
            return self.rest.batch(place)
        return self.whole.batch((place - len(self.rest)) % len(self.whole))

    def position(self, number: int) -> int:
        return self._position(self.rank + number * self.world)

    def reached(self, number: int) -> int:
        return self._position(number * self.world)

    @property
    def end(self) -> int:
        return self.whole.end

    def after(self, position: int) -> BatchOrder:
        return RankBatchOrder(self.whole, self.rest.after(position), self.rank, self.world, self.tail)

    def _position(self, place: int) -> int:
        """The position of a batch of the rest, or of one that pads it, which stands behind all others."""
        n = len(self.rest)
        if place < n:
            return self.rest.position(place)
        again, place = divmod(place - n, max(1, len(self.whole)))
        return self.rest.reached(n) + again * self.whole.reached(len(self.whole)) + self.whole.reached(place)


def deal(items: Iterator[Any], rank: int, world: int, tail: Tail) -> Iterator[Any]:
    """One rank's share of what a stranger's sampler yields, without knowing how much that is."""
    beginning: list[Any] = []
    while group := list(islice(items, world)):
        beginning = beginning or group
        if len(group) < world:
            if tail == "pad":
                group += (beginning * world)[: world - len(group)]
            elif tail == "drop":
                return
        yield from group[rank : rank + 1]
