"""Streams and datasets for loaders: loaded by path in conftest.py, so that they travel to workers by value."""

from __future__ import annotations

import os
import random
import signal

import numpy as np

import agnoload
from agnoload import IterableDataset, sample_rng


class Count(IterableDataset):
    """0, 1, ... n - 1; `length` is what `len` says, None: it has none. May be split from outside."""

    def __init__(self, n, length=None):
        self.start, self.stop = 0, n
        self.length = length

    def __iter__(self):
        return iter(range(self.start, self.stop))

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length


def split_between(worker):
    """A `worker_init_fn` as torch's documentation has it."""
    info = agnoload.get_worker_info()
    stream = info.dataset
    each = -(-stream.stop // info.num_workers)
    stream.start, stream.stop = worker * each, min((worker + 1) * each, stream.stop)


def nothing(worker):
    """A `worker_init_fn` that does what has nothing to do with the data."""


class SelfSplitting(Count):
    """Splits itself over the workers."""

    def __iter__(self):
        info = agnoload.get_worker_info()
        return iter(range(self.stop) if info is None else range(info.id, self.stop, info.num_workers))


class Named(IterableDataset):
    """Says what it is."""

    def __repr__(self):
        return "Named()"


class OfEpoch(IterableDataset):
    """What a function of the epoch gives."""

    def __init__(self, function):
        self.function = function
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(self.function(self.epoch))


class Shards(IterableDataset):
    """0, 1, ... n - 1 in shards: shard i holds i, i + num_shards, ..."""

    def __init__(self, n, num_shards, lanes=16):
        self.n = n
        self.num_shards = num_shards
        self.lanes = lanes

    def __len__(self):
        return self.n

    def shard(self, number):
        return range(number, self.n, self.num_shards)


class ShardsOfEpoch(Shards):
    """Every value is a hundred more in each epoch."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, number):
        return [100 * self.epoch + value for value in super().shard(number)]


class Sized(IterableDataset):
    """0, 1, ... in shards of given sizes, one after the other."""

    def __init__(self, sizes, lanes=16, num_shards=None):
        self.sizes = sizes
        self.num_shards = len(sizes) if num_shards is None else num_shards
        self.lanes = lanes

    def __len__(self):
        return sum(self.sizes)

    def shard(self, number):
        start = sum(self.sizes[:number])
        return range(start, start + self.sizes[number])


class Resumable(IterableDataset):
    """`start`, ... as many as n, and says where it stands; writes a byte to `log` for each sample that it reads."""

    def __init__(self, n, log=None, start=0):
        self.n = n
        self.log = log
        self.start = start
        self.at = 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            mark(self.log)
            yield self.start + self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class ResumableShards(Shards):
    """Shards that say where they stand."""

    def shard(self, number):
        each = -(-self.n // self.num_shards)
        return Resumable(min(each, self.n - number * each), start=number * each)


class Returned(IterableDataset):
    """The oldest way to write an iterator: it is its own, and counts in itself."""

    def __init__(self, n):
        self.n = n
        self.at = 0

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at - 1


class Restarting(IterableDataset):
    """Its iterator says where it is, and goes back to its start at the end."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return RestartingIterator(self.n)


class RestartingIterator(Returned):
    def __iter__(self):
        return self

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.at = 0
            raise

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.at = state


class OtherBase:
    """A base class of another library's, known by its name alone, with a __getitem__ that only raises, as torch's."""

    def __getitem__(self, index):
        raise NotImplementedError


OtherBase.__name__ = OtherBase.__qualname__ = "IterableDataset"


class Torchlike(OtherBase):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Hublike(OtherBase):
    """As Hugging Face's: `shard(num_shards=, index=)`, `set_epoch`, a state."""

    def __init__(self, n, num_shards, parts=None):
        self.n = n
        self.num_shards = num_shards
        self.parts = range(num_shards) if parts is None else parts
        self.at = 0

    def shard(self, num_shards, index):
        return Hublike(self.n, 1, self.parts[index::num_shards])

    def set_epoch(self, epoch):
        pass

    def __iter__(self):
        each = self.n // 4
        values = [part * each + place for part in self.parts for place in range(each)]
        while self.at < len(values):
            self.at += 1
            yield {"value": values[self.at - 1]}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Rows:
    """A map-style dataset: 1, 2, ... with a sign; writes a byte for each that is loaded."""

    def __init__(self, n, sign=1, log=None):
        self.n = n
        self.sign = sign
        self.log = log

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        mark(self.log)
        return self.sign * (index + 1)


# ------------------------------------------------------------------------------------------------ random numbers


class Drawn(IterableDataset):
    """0, 1, ... n - 1 in an order that depends on what is drawn on the way: a shuffle written by hand."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        buffer = []
        for value in range(self.n):
            buffer.append(value)
            if len(buffer) == 4:
                yield buffer.pop(int(sample_rng().integers(4)))
        while buffer:
            yield buffer.pop(int(sample_rng().integers(len(buffer))))


class Drawing(Count):
    """Each sample draws from all that it can while it is read."""

    def __iter__(self):
        return map(with_draws, range(self.stop))


def draws():
    return {
        "own": sample_rng().integers(1 << 62).item(),
        "numpy": int(np.random.randint(1 << 62)),
        "python": random.getrandbits(62),
    }


def with_draws(value):
    return {"value": value, **draws()}


def with_own_draw(value):
    return {"value": value, "own": sample_rng().integers(1 << 62).item()}


# ------------------------------------------------------------------------------------------------ functions


def is_even(value):
    return value % 2 == 0


def negative(value):
    return -1 - value


def facts(value):
    info = agnoload.get_worker_info()
    return (value, -1, 0, -1) if info is None else (value, info.id, info.num_workers, info.epoch)


def mark(log):
    if log is not None:
        with open(log, "ab") as file:
            file.write(b".")


class Marked:
    """A function that writes a byte for each call."""

    def __init__(self, log):
        self.log = log

    def __call__(self, value):
        mark(self.log)
        return value * 10


# ------------------------------------------------------------------------------------------------ faults


class Broken(IterableDataset):
    """0, 1, ... and in the place of `bad` an error, or a StopIteration out of its own code."""

    def __init__(self, n, bad, stops=False):
        self.n = n
        self.bad = bad
        self.stops = stops

    def __iter__(self):
        for value in range(self.n):
            if value == self.bad:
                if self.stops:
                    next(iter([]))
                raise OSError(5, "the disk is gone")
            yield value


class FailsAt:
    """A function that raises for some values, and gives the others, or `kept` for them."""

    def __init__(self, *bad, kept=None, stops=False):
        self.bad = bad
        self.kept = kept
        self.stops = stops

    def __call__(self, value):
        if value in self.bad:
            if self.stops:
                next(iter([]))
            raise ValueError(f"bad value {value}")
        return value if self.kept is None else self.kept


class FailsAtFirst:
    """Draws, and then raises an OSError at the first try for every third value."""

    def __init__(self):
        self.tried = set()

    def __call__(self, value):
        drawn = with_own_draw(value)
        if value % 3 == 0 and value not in self.tried:
            self.tried.add(value)
            raise OSError(value)
        return drawn


class DiesOnce(IterableDataset):
    """Kills its process before sample `at`, once: `flag` is a file that says whether it still has to."""

    def __init__(self, n, at, flag, num_shards=None):
        self.n, self.at, self.flag = n, at, flag
        if num_shards is not None:
            self.num_shards = num_shards

    def __iter__(self):
        return self._values(range(self.n))

    def shard(self, number):
        return self._values(range(number, self.n, self.num_shards))

    def _values(self, values):
        for value in values:
            if value == self.at:
                die(self.flag)
            yield with_draws(value)


def die(flag):
    try:
        flag.unlink()
    except FileNotFoundError:  # it has died before, or another worker does
        return
    os.kill(os.getpid(), signal.SIGKILL)
