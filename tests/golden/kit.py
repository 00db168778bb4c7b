"""Configurations whose batches are recorded in `sums.json`: a seed must give tomorrow what it gives today.

A configuration is a function that makes the arguments of a `DataLoader`, afresh at each call: nothing that one run
changes is seen by another. Its record is one check sum for each batch of two epochs, and the same for any workers, so
none are named here. All values are integers, or floats that need no libm, and no order depends on a hash.

`python -m tests.golden.kit` writes the file. Do that for a new configuration, or after a change of batches that
`CHANGELOG.md` announces: sums that were there and differ are listed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import agnoload
from agnoload import DataLoader, sample_rng

RECORD = Path(__file__).with_name("sums.json")
SEED = 12
EPOCHS = 2
STEPS = 12
"""Batches that are read of what is endless, or too long."""

CONFIGURATIONS: dict[str, Callable[[], dict[str, Any]]] = {}


def configuration(name: str) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    def add(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        assert name not in CONFIGURATIONS, name
        CONFIGURATIONS[name] = make
        return make

    return add


def configurations(prefix: str, makers: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    for name, make in makers.items():
        configuration(f"{prefix}: {name}")(make)


# ---------------------------------------------------------------------------------------------- sums


def loader(name: str, **options: Any) -> DataLoader[Any, Any]:
    """The loader of a configuration, with the options of workers."""
    arguments = CONFIGURATIONS[name]()
    arguments.pop("steps", None)
    if "generator" not in arguments:
        arguments.setdefault("seed", SEED)
    return DataLoader(**arguments, **options)


def batches(name: str, loader: DataLoader[Any, Any]) -> Iterator[Any]:
    """Two epochs of batches, or the first ones."""
    if "steps" in CONFIGURATIONS[name]():
        yield from loader.steps(STEPS)
    else:
        for _ in range(EPOCHS):
            yield from loader


def sums(name: str, **options: Any) -> list[str]:
    """A check sum for each batch of a configuration."""
    with loader(name, **options) as made:
        return [sum_of(batch) for batch in batches(name, made)]


def sum_of(batch: Any) -> str:
    """A check sum over containers, dtypes, shapes and bytes, the same on every machine."""
    check = hashlib.blake2b(digest_size=6)
    for piece in pieces(batch):
        check.update(len(piece).to_bytes(8, "little") + piece)
    return check.hexdigest()


def pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        assert not array.dtype.hasobject
        array = array.astype(array.dtype.newbyteorder("<"))
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        yield f"{kind} {array.dtype.descr} {array.shape}".encode()
        yield array.tobytes()
    elif dataclasses.is_dataclass(value):
        yield from pieces((type(value).__name__, vars(value)))
    elif isinstance(value, Mapping):
        yield from pieces([type(value).__name__, *value])
        for inner in value.values():
            yield from pieces(inner)
    elif isinstance(value, (list, tuple)):
        yield f"{type(value).__name__} {len(value)} {getattr(value, '_fields', '')}".encode()
        for inner in value:
            yield from pieces(inner)
    else:
        assert isinstance(value, (str, bytes, int, float, bool, type(None))), type(value)
        yield f"{type(value).__name__} {value!r}".encode()


# ---------------------------------------------------------------------------------------------- data


def draw() -> int:
    return int(sample_rng().integers(1 << 62))


class Draws(agnoload.Dataset):
    """Sample i is i and a draw."""

    def __init__(self, n=37):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"index": index, "draw": draw()}


class AllDraws(Draws):
    """The process's own generators, too."""

    def __getitem__(self, index):
        return {
            "index": index,
            "draw": draw(),
            "numpy": np.random.randint(1 << 62, dtype=np.int64),
            "python": random.getrandbits(62),
            "floats": np.random.random(2),
        }


class Keeps(Draws):
    """A generator of its own."""

    def __init__(self, n=37):
        super().__init__(n)
        self.rng = np.random.default_rng(4)
        self.old = random.Random(4)

    def __getitem__(self, index):
        return index, int(self.rng.integers(1 << 62)), self.old.getrandbits(62)


class Whole(Draws):
    """A list for many indices."""

    def __getitems__(self, indices):
        number = draw()
        return [{"index": index, "draw": number} for index in indices]


class Together(Draws):
    """A batch for many indices."""

    def __getitems__(self, indices):
        return agnoload.Batch({"index": np.array(indices, np.int32), "names": [str(i) for i in indices], "none": None})


class Bad(Draws):
    """Every fifth sample cannot be loaded."""

    def __getitem__(self, index):
        if index % 5 == 2:
            raise ValueError(f"sample {index}")
        return super().__getitem__(index)


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    values: np.ndarray


class Nested(Draws):
    """All kinds of leaves in all kinds of containers."""

    def __getitem__(self, index):
        return {
            "point": Point(index, np.float32(index) / 8),
            "record": Record(f"n{index}", np.arange(3, dtype=np.int16) + index),
            "list": [index % 2 == 0, b"b" * (index % 3)],
            "half": np.full((2, 2), index, np.float16),
            "complex": complex(index, -index),
            "time": np.datetime64("2020-01-01") + np.timedelta64(index, "D"),
            "none": None,
            "text": np.array(f"t{index}", "U4"),
            "structure": np.array((index, index / 2), [("a", "i4"), ("b", "f8")]),
            "scalar": np.uint8(index),
        }


class Ragged(Draws):
    """Fields of unequal length; faces number the verts of their sample."""

    def __getitem__(self, index):
        n = 1 + index * 7 % 5
        return {
            "verts": np.arange(3 * n, dtype=np.float32).reshape(n, 3) + index,
            "faces": (np.arange(2 * n) % n).reshape(2 * n, 1),
            "ids": np.full(n + 2, index, np.int16),
            "label": index,
        }


class Mixed(Draws):
    """Samples whose numbers have different types: the batch has the common one."""

    def __getitem__(self, index):
        return (np.float32(index) if index % 3 == 2 else np.int16(index)), (float(index) if index % 2 else index)


def arrays() -> dict[str, Any]:
    numbers = np.arange(37)
    return {
        "rows": numbers.astype(np.float32)[:, None] * np.array([1, 2], np.float32),
        "labels": numbers % 5,
        "names": np.array([f"n{i}" for i in numbers]),
    }


class Count(agnoload.IterableDataset):
    """0, 1, ... n - 1 with draws."""

    def __init__(self, n=37, sample=draw):
        self.n = n
        self.sample = sample

    def __iter__(self):
        return ((number, self.sample()) for number in range(self.n))


class Shards(agnoload.IterableDataset):
    """Shard i holds i + 2 samples."""

    def __init__(self, num_shards=7, lanes=4):
        self.num_shards = num_shards
        self.lanes = lanes

    def shard(self, number):
        return ((100 * number + place, draw()) for place in range(number + 2))

    def shard_length(self, number):
        return number + 2

    def __len__(self):
        return sum(map(self.shard_length, range(self.num_shards)))


class Saves(agnoload.IterableDataset):
    """Says where it stands."""

    def __init__(self, n=37):
        self.n = n
        self.at = 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            yield self.at - 1, draw()
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Knows(Count):
    """Another order in each epoch that it hears of."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return ((number * (2 * self.epoch + 5) % self.n, draw()) for number in range(self.n))


def read(path, start=0):
    """A reader of files that are not there."""
    return (f"{path}{number}" for number in range(start, 3 + len(path)))


def read_from_the_start(path):
    return ((path, number, draw()) for number in range(2 * len(path)))


def with_draw(sample):
    return sample, draw(), np.random.randint(1 << 62, dtype=np.int64), random.getrandbits(62)


def doubled(sample):
    return sample[0] * 2, sample[1], draw()


def odd(sample):
    return sample[0] % 2 == 1


def sometimes(sample):
    return sample_rng().random() < 0.6


def broken(sample):
    if sample[0] % 5 == 2:
        raise ValueError(f"sample {sample[0]}")
    return sample


def drawing_collate(samples):
    batch = agnoload.default_collate(samples)
    batch["collated"] = sample_rng().random(2)
    batch["numpy collated"] = np.random.random(2)
    batch["python collated"] = [random.random()]
    return batch


def calm_collate(samples):
    return {"rows": samples, "draw": draw()}


class Shuffled:
    """A user's sampler: draws from the process's generator, in one go."""

    def __init__(self, n=37):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        return iter(order)


class OnTheWay(Shuffled):
    """Draws one by one."""

    def __iter__(self):
        return ((random.randrange(self.n) + int(np.random.randint(self.n))) % self.n for _ in range(self.n))


class Hears(Shuffled):
    """Hears of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(random.Random(self.epoch).sample(range(self.n), self.n))


class KeepsState(Shuffled):
    """Says where it stands."""

    def __init__(self, n=37):
        super().__init__(n)
        self.place = 0

    def __iter__(self):
        while self.place < self.n:
            self.place += 1
            yield self.place * 5 % self.n
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class InBatches(Shuffled):
    """Batches that differ in size."""

    def __len__(self):
        return 8

    def __iter__(self):
        for _ in range(8):
            yield [random.randrange(self.n) for _ in range(random.randint(1, 3))]


# ---------------------------------------------------------------------------------------------- samplers


def on(dataset: Any, batch_size: Any = 5, **options: Any) -> Callable[[], dict[str, Any]]:
    """Arguments whose dataset, sampler and the like are functions that make them."""

    def make() -> dict[str, Any]:
        arguments = {"dataset": dataset, "batch_size": batch_size, **options}
        if "batch_sampler" in arguments:
            del arguments["batch_size"]
        for name in ("dataset", "sampler", "batch_sampler", "generator"):
            if name in arguments:
                arguments[name] = arguments[name]()
        return arguments

    return make


N = 37
MANY = (1 << 20) + 7
LABELS = np.arange(60) % 10 // 3  # four classes of 18, 18, 18 and 6
SKEWED = np.repeat(np.arange(30), np.arange(30) // 6 * 9 + 1)
LENGTHS = np.arange(N) * 7 % 23 + 1


def sampled(make: Callable[[], Any], n: int = N, **options: Any) -> Callable[[], dict[str, Any]]:
    return on(lambda: Draws(n), sampler=make, **options)


def batched(make: Callable[[], Any], n: int = N, **options: Any) -> Callable[[], dict[str, Any]]:
    return on(lambda: Draws(n), batch_sampler=make, **options)


configurations(
    "order",
    {
        "sequential": on(Draws),
        "sequential, last dropped": on(Draws, drop_last=True),
        "shuffled": on(Draws, shuffle=True),
        "shuffled, last dropped": on(Draws, shuffle=True, drop_last=True),
        "shuffled, single samples": on(Draws, None, shuffle=True),
        "shuffled, very many": on(lambda: Draws(MANY), 50, shuffle=True, steps=True),
        "shuffled, NumPy's generator": on(Draws, shuffle=True, generator=lambda: np.random.default_rng(3)),
        "shuffled, Python's generator": on(Draws, shuffle=True, generator=lambda: random.Random(3)),
        "sequential, a generator": on(Draws, generator=lambda: np.random.default_rng(3)),
    },
)
configurations(
    "sampler",
    {
        "a list": sampled(lambda: [3, 1, 3, 36, 0, 7]),
        "random": sampled(lambda: agnoload.RandomSampler(range(N))),
        "random, a seed of its own": sampled(lambda: agnoload.RandomSampler(range(N), seed=5)),
        "random, a generator of its own": sampled(
            lambda: agnoload.RandomSampler(range(N), generator=np.random.default_rng(5))
        ),
        "random, fewer": sampled(lambda: agnoload.RandomSampler(range(N), num_samples=21)),
        "random, more": sampled(lambda: agnoload.RandomSampler(range(N), num_samples=80)),
        "replacement": sampled(lambda: agnoload.RandomSampler(range(N), replacement=True)),
        "replacement, very many": sampled(
            lambda: agnoload.RandomSampler(range(MANY), replacement=True), MANY, batch_size=50, steps=True
        ),
        "subset": sampled(lambda: agnoload.SubsetRandomSampler(range(5, 30, 2))),
        "weighted": sampled(lambda: agnoload.WeightedRandomSampler(np.arange(N) % 4, 40)),
        "weighted, no replacement": sampled(lambda: agnoload.WeightedRandomSampler(np.arange(N) % 4, 25, False)),
        "batches": batched(lambda: agnoload.BatchSampler(agnoload.RandomSampler(range(N)), 6, False)),
        "batches, last dropped": batched(lambda: agnoload.BatchSampler(agnoload.RandomSampler(range(N)), 6, True)),
        "distributed, in order": sampled(lambda: agnoload.DistributedSampler(range(N), 3, 2, shuffle=False)),
        "distributed, padded": sampled(lambda: agnoload.DistributedSampler(range(N), 3, 2)),
        "distributed, dropped": sampled(lambda: agnoload.DistributedSampler(range(N), 3, 1, tail="drop")),
        "distributed, kept": sampled(lambda: agnoload.DistributedSampler(range(N), 3, 0, tail="keep")),
        "distributed, hardly more than ranks": sampled(
            lambda: agnoload.DistributedSampler(agnoload.RandomSampler(range(N), num_samples=5), 4, 3)
        ),
        "distributed, very many": sampled(
            lambda: agnoload.DistributedSampler(range(MANY), 8, 7, seed=2), MANY, batch_size=50, steps=True
        ),
        "distributed, weighted": sampled(
            lambda: agnoload.DistributedSampler(agnoload.WeightedRandomSampler(np.arange(N) % 4, 41), 2, 1)
        ),
        "distributed, batches": batched(
            lambda: agnoload.DistributedSampler(agnoload.BalancedBatchSampler(LABELS, 6), 3, 1), 60
        ),
        "user's": sampled(Shuffled),
        "user's, drawing on the way": sampled(OnTheWay),
        "user's, by epoch": sampled(Hears),
        "user's, with a state": sampled(KeepsState),
        "user's batches": batched(InBatches),
        "user's batches, a list": batched(lambda: [[3, 1], [2], [36, 20, 19, 0]]),
        "user's, distributed": sampled(lambda: agnoload.DistributedSampler(Hears(), 2, 1)),
    },
)
configurations(
    "classes",
    {
        "balanced": batched(lambda: agnoload.BalancedBatchSampler(LABELS, 7), 60),
        "balanced by half": batched(lambda: agnoload.BalancedBatchSampler(LABELS, 7, alpha=0.5, min_per_class=0), 60),
        "balanced as the data, two of each": batched(
            lambda: agnoload.BalancedBatchSampler(SKEWED, 70, alpha=0, min_per_class=2, num_batches=8), len(SKEWED)
        ),
        "balanced, many below the minimum": batched(
            lambda: agnoload.BalancedBatchSampler(np.r_[np.arange(300), np.zeros(3000, int)], 700, alpha=0), 3300
        ),
        "balanced, more classes than places": batched(
            lambda: agnoload.BalancedBatchSampler(SKEWED, 11, alpha=0.3), len(SKEWED)
        ),
        "balanced, many more classes than places": batched(
            lambda: agnoload.BalancedBatchSampler(np.arange(6000) ** 2 % 4001, 16, alpha=0.5), 6000, steps=True
        ),
        "balanced, equal rates": batched(lambda: agnoload.BalancedBatchSampler(np.arange(200) % 50, 8), 200),
        "balanced, random": batched(lambda: agnoload.BalancedBatchSampler(LABELS, 7, kind="random"), 60),
        "uniform": batched(lambda: agnoload.ClassUniformBatchSampler(LABELS, 3, 4), 60),
        "uniform, small classes": batched(lambda: agnoload.ClassUniformBatchSampler(SKEWED, 7, 5), len(SKEWED)),
        "uniform, many times a class": batched(
            lambda: agnoload.ClassUniformBatchSampler(np.arange(37) % 5, 2, 300, num_batches=6)
        ),
        "cyclic": batched(lambda: agnoload.CyclicClassBatchSampler(LABELS, 2, 8), 60),
        "cyclic, uneven": batched(lambda: agnoload.CyclicClassBatchSampler(SKEWED, 7, 14), len(SKEWED)),
    },
)
configurations(
    "buckets",
    {
        "by tokens": batched(lambda: agnoload.BucketBatchSampler(LENGTHS, max_tokens=60)),
        "by count": batched(lambda: agnoload.BucketBatchSampler(LENGTHS, 6, buckets=4)),
        "both, given": batched(lambda: agnoload.BucketBatchSampler(LENGTHS, 6, 60, buckets=[5, 12, 23])),
        "in order": batched(lambda: agnoload.BucketBatchSampler(LENGTHS, max_tokens=60, shuffle=False)),
        "last dropped": batched(lambda: agnoload.BucketBatchSampler(LENGTHS, 5, drop_last=True)),
        "largest first": batched(lambda: agnoload.BucketBatchSampler(LENGTHS, max_tokens=60, largest_first=True)),
        "alone": batched(lambda: agnoload.BucketBatchSampler(LENGTHS, max_tokens=15, oversized="alone")),
    },
)

# ---------------------------------------------------------------------------------------------- datasets

configurations(
    "dataset",
    {
        "arrays": on(lambda: agnoload.ArrayDataset(*arrays().values()), shuffle=True),
        "named arrays": on(lambda: agnoload.ArrayDataset(**arrays()), shuffle=True),
        "one array": on(lambda: np.arange(74, dtype=np.uint16).reshape(37, 2), shuffle=True),
        "a list": on(lambda: [(i, str(i)) for i in range(N)], shuffle=True),
        "stack": on(lambda: agnoload.StackDataset(Draws(), agnoload.ArrayDataset(np.arange(N) * 2)), shuffle=True),
        "named stack": on(lambda: agnoload.StackDataset(a=Draws(), b=range(N)), shuffle=True),
        "concatenation": on(lambda: agnoload.ConcatDataset([Draws(9), Draws(17), Whole(11)]), shuffle=True),
        "concatenated arrays": on(
            lambda: agnoload.ConcatDataset([agnoload.ArrayDataset(np.arange(n) + n) for n in (9, 17)]), shuffle=True
        ),
        "subset": on(lambda: agnoload.Subset(Draws(), [5, 3, 30, 3, -1]), 2, shuffle=True),
        "masked arrays": on(lambda: agnoload.Subset(agnoload.ArrayDataset(**arrays()), np.arange(N) % 3 > 0)),
        "random split": on(lambda: agnoload.random_split(Draws(), [0.7, 0.3], 5)[0], shuffle=True),
        "mapped": on(lambda: Draws().map(with_draw), shuffle=True),
        "mapped arrays": on(lambda: agnoload.ArrayDataset(np.arange(N)).map(with_draw)),
        "packed list": on(lambda: agnoload.PackedList(f"text {i}" for i in range(N)), shuffle=True),
        "cached": on(lambda: agnoload.CachedDataset(agnoload.ArrayDataset(**arrays()), 1 << 20).map(with_draw)),
        "many at a time": on(Whole, shuffle=True),
        "batches at a time": on(Together, shuffle=True),
    },
)

# ---------------------------------------------------------------------------------------------- within a batch

configurations(
    "within",
    {
        "all draws": on(AllDraws, shuffle=True),
        "all draws, single samples": on(AllDraws, None),
        "a collate function draws": on(AllDraws, shuffle=True, collate_fn=drawing_collate),
        "a collate function of one's own": on(Draws, shuffle=True, collate_fn=calm_collate),
        "kept generators": on(Keeps, shuffle=True),
        "nested": on(Nested, shuffle=True),
        "common types": on(Mixed, 7),
        "skipped": on(Bad, shuffle=True, on_error="skip"),
        "skipped, whole batches": on(Bad, 1, on_error="skip"),
        "replaced": on(Bad, shuffle=True, on_error="replace"),
        "skipped in batches": batched(lambda: [[0, 1, 2], [2, 7], [3]], on_error="skip"),
        "skipped in a stream": on(lambda: Count().map(broken), on_error="skip"),
        "ragged, padded": on(Ragged, shuffle=True, collate_fn=agnoload.ragged_collate(value={"ids": 9})),
        "ragged, packed": on(
            Ragged, shuffle=True, collate_fn=agnoload.ragged_collate("packed", shift={"faces": "verts"})
        ),
        "ragged, padded from the left": on(
            Ragged, collate_fn=agnoload.ragged_collate(shift={"faces": "verts"}, side="left", multiple_of=4)
        ),
        "ragged, a list": on(Ragged, shuffle=True, collate_fn=agnoload.ragged_collate("list", multiple_of=1)),
    },
)

# ---------------------------------------------------------------------------------------------- streams


def mixed(stop: str, per: str, **options: Any) -> Callable[[], agnoload.Mixture]:
    return lambda: agnoload.Mixture([Count(11), Shards(), Saves(20)], [5, 3, 1], stop, per, **options)


configurations(
    "stream",
    {
        "unsharded": on(Count),
        "unsharded, last dropped": on(Count, drop_last=True),
        "unsharded, single samples": on(lambda: Count(9), None),
        "sharded": on(Shards),
        "sharded, last dropped": on(Shards, drop_last=True),
        "sharded, two lanes": on(lambda: Shards(9, 2)),
        "with a state": on(Saves),
        "by epoch": on(Knows),
        "a generator": on(Count, generator=lambda: np.random.default_rng(3)),
        "mapped": on(lambda: Count().map(doubled).map(with_draw)),
        "sharded, mapped": on(lambda: Shards().map(doubled).map(with_draw)),
        "filtered": on(lambda: Count().filter(odd)),
        "filtered by chance": on(lambda: Count().filter(sometimes).map(with_draw)),
        "sharded, filtered": on(lambda: Shards().filter(odd).map(doubled)),
        "shuffled": on(lambda: Count().shuffle(8)),
        "shuffled, a seed of its own": on(lambda: Count().shuffle(8, seed=3)),
        "sharded, shuffled": on(lambda: Shards().shuffle(5)),
        "with a state, shuffled": on(lambda: Saves().map(doubled).shuffle(5)),
        "shuffled, filtered, mapped": on(lambda: Shards().shuffle(5).filter(odd).map(with_draw)),
        "chain": on(lambda: Count(9) + Saves(11) + Count(3)),
        "sharded chain": on(lambda: agnoload.ChainDataset([Shards(3), Shards(4, 2)]).map(with_draw)),
        "files": on(lambda: agnoload.FileStream(["a", "bb", "ccc", "dddd"], read, lanes=2)),
        "files, shuffled": on(lambda: agnoload.FileStream(["a", "bb", "ccc", "dddd"], read_from_the_start).shuffle(4)),
        "ranks": on(lambda: Count().split_by_rank(1, 3)),
        "ranks, padded": on(lambda: Count().map(doubled).split_by_rank(2, 3, "pad")),
        "ranks, sharded": on(lambda: Shards().split_by_rank(1, 3)),
        "ranks, sharded, stopped": on(lambda: Shards().split_by_rank(2, 3, "stop")),
        "ranks, sharded, repeated": on(lambda: Shards().split_by_rank(1, 3, "repeat").map(with_draw)),
        "ranks, sharded, padded": on(lambda: Shards().shuffle(4).split_by_rank(0, 3)),
        "ranks, no seed": on(lambda: Shards().split_by_rank(1, 2).shuffle(4), seed=None),
        "mixture": on(mixed("first", "sample")),
        "mixture, until all ended": on(mixed("last", "sample")),
        "mixture, for ever": on(mixed("never", "sample", with_source=True), steps=True),
        "mixture by batch": on(mixed("last", "batch"), 9),
        "mixture by batch, given": on(mixed("first", "batch", batch_size=4, seed=8), 9),
        "mixture of datasets": on(
            lambda: agnoload.Mixture([Draws(9), Draws(21)], [1, 2], "last", shuffle=True).map(with_draw)
        ),
        "mixture of mixtures": on(
            lambda: agnoload.Mixture([mixed("last", "sample")(), Count(9).filter(odd)], [2, 1], "last").shuffle(5)
        ),
    },
)


def main() -> None:
    """Write the file, and name what has changed."""
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    now = {name: sums(name) for name in CONFIGURATIONS}
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in now.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    changed = [name for name, found in before.items() if now.get(name) != found]
    print(f"{len(now)} configurations, {len(now.keys() - before.keys())} new, changed or gone: {changed or 'none'}")


if __name__ == "__main__":
    main()
