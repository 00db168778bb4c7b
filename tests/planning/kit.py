"""Datasets, streams and samplers: loaded by path in conftest.py, so that they travel to workers by value."""

from __future__ import annotations

import random

import numpy as np

import agnoload
from agnoload import IterableDataset, get_worker_info, sample_rng


class Drawing(agnoload.Dataset):
    """Sample i is i and what it draws from each source of random numbers; counts its calls."""

    def __init__(self, n=23):
        self.n = n
        self.calls = 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.calls += 1
        return {
            "index": index,
            "own": sample_rng().integers(1 << 62).item(),
            "numpy": int(np.random.randint(1 << 62)),
            "python": random.getrandbits(62),
        }


class Own(Drawing):
    """Draws from `sample_rng()` only, which threads share with nobody."""

    def __getitem__(self, index):
        return index, sample_rng().random()


class AtOnce(Drawing):
    """A request is loaded in one call."""

    def __getitems__(self, indices):
        rng = sample_rng()
        return [(index, rng.random(), np.random.random(), random.random()) for index in indices]


class Unreadable:
    """Knows how long it is, and nothing more."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        raise RuntimeError(f"sample {index} was read")


class Waiting:
    """Sample 0 takes a byte out of the named pipe `gate`, and waits until there is one; all say who loaded them."""

    def __init__(self, n, gate):
        self.n = n
        self.gate = gate

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == 0:
            with open(self.gate, "rb", buffering=0) as file:
                file.read(1)
        return index, get_worker_info().id


# ------------------------------------------------------------------------------------------------ streams


class Count(IterableDataset):
    def __init__(self, n=13):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Noisy(IterableDataset):
    """Draws from each source while it is read."""

    def __iter__(self):
        for number in range(22):
            yield number, np.random.random(), random.random(), sample_rng().random()


class Placed(IterableDataset):
    """A stream with a state; counts what it has given."""

    def __init__(self, n=13):
        self.n = n
        self.place = self.given = 0

    def __iter__(self):
        while self.place < self.n:
            self.place += 1
            self.given += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        if type(state["place"]) is not int or not 0 <= state["place"] <= self.n:
            raise LookupError(state["place"])
        self.place = state["place"]


class Shards(IterableDataset):
    """Shards that draw while they are read; they end and begin within batches."""

    def __init__(self, sizes=(1, 3, 5, 7, 9), lanes=3):
        self.sizes = sizes
        self.num_shards = len(sizes)
        self.lanes = lanes

    def shard(self, number):
        for place in range(self.sizes[number]):
            yield 100 * number + place, random.random(), np.random.random(), sample_rng().random()


class PlainShards(Shards):
    def shard(self, number):
        return range(100 * number, 100 * number + self.sizes[number])


# ------------------------------------------------------------------------------------------------ users' samplers


class Shuffled:
    """As many people write it: the process's own generators, all in one go."""

    n = 20

    def __len__(self):
        return self.n

    def __iter__(self):
        order = list(range(self.n))
        random.shuffle(order)
        return iter(order)


class DrawnOnTheWay(Shuffled):
    def __iter__(self):
        for _ in range(self.n):
            yield (random.randrange(self.n) + int(np.random.randint(self.n)) + round(random.gauss(0, 9))) % self.n


class UnevenBatches(Shuffled):
    """A batch sampler: its batches differ in size."""

    def __len__(self):
        return 8

    def __iter__(self):
        order = np.random.permutation(self.n)
        for number in range(8):
            yield order[number * 2 : number * 2 + random.randint(1, 3)].tolist()


class ByEpoch(Shuffled):
    """Shuffled by the epoch that it is given, as other libraries' distributed samplers are."""

    def __init__(self, epoch=0):
        self.epoch = epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.n))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class Continues(Shuffled):
    """A source of its own, which goes on from epoch to epoch."""

    def __init__(self):
        self.rng = random.Random(3)

    def __iter__(self):
        order = list(range(self.n))
        self.rng.shuffle(order)
        return iter(order)


class Saves(Continues):
    """The same, with a state."""

    def __init__(self, resets=False):
        super().__init__()
        self.resets = resets
        self.order, self.place = None, 0

    def __iter__(self):
        if self.order is None or self.place == self.n:
            self.order, self.place = list(range(self.n)), 0
            self.rng.shuffle(self.order)
        while self.place < self.n:
            self.place += 1
            yield self.order[self.place - 1]
        if self.resets:
            self.order, self.place = None, 0

    def state_dict(self):
        version, words, gauss = self.rng.getstate()
        return {"order": self.order, "place": self.place, "rng": [version, list(words), gauss]}

    def load_state_dict(self, state):
        self.order, self.place = state["order"], state["place"]
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))


class Walk(Placed):
    """An iterator with a state."""

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == self.n:
            raise StopIteration
        self.place += 1
        return self.place - 1


class Walks(Shuffled):
    def __iter__(self):
        return Walk(self.n)
