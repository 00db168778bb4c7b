"""Streams and datasets for loaders: loaded by path in conftest.py, so that they travel to workers by value."""

from __future__ import annotations

import os
import random
import signal

import numpy as np

import agnoload
from agnoload import IterableDataset, sample_rng


class Count(IterableDataset):
    """0, 1, ... n - 1; `length` is what `len` says, None: it has none."""

    def __init__(self, n, length=None):
        self.n = n
        self.length = length

    def __iter__(self):
        return iter(range(self.n))

    def __len__(self):
        if self.length is None:
            raise TypeError("no length")
        return self.length


class Named(IterableDataset):
    """Says what it is."""

    def __repr__(self):
        return "Named()"


class Varying(IterableDataset):
    """0, 1, ... as many as `sizes` says for the epoch."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.sizes[self.epoch]))


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


class Sized(IterableDataset):
    """0, 1, ... in shards of given sizes, one after the other."""

    def __init__(self, sizes, lanes=16):
        self.sizes = sizes
        self.num_shards = len(sizes)
        self.lanes = lanes

    def __len__(self):
        return sum(self.sizes)

    def shard(self, number):
        start = sum(self.sizes[:number])
        return range(start, start + self.sizes[number])


class Resumable(IterableDataset):
    """0, 1, ... n - 1, and says where it stands; writes a byte to `log` for each sample that it reads."""

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

    def __init__(self, n, num_shards, log=None, lanes=16):
        super().__init__(n, num_shards, lanes)
        self.log = log

    def shard(self, number):
        each = -(-self.n // self.num_shards)
        return Resumable(min(each, self.n - number * each), self.log, number * each)


class Restarting(IterableDataset):
    """Its iterator says where it is, and goes back to its start at the end."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return RestartingIterator(self.n)


class RestartingIterator:
    def __init__(self, n):
        self.n = n
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.n:
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.at = state


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


class SelfSplitting(IterableDataset):
    """Splits 0, 1, ... n - 1 over the workers by itself, one after the other."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = agnoload.get_worker_info()
        return iter(range(self.n)) if info is None else iter(range(info.id, self.n, info.num_workers))


class Drawn(IterableDataset):
    """0, 1, ... n - 1 in an order that depends on what is drawn on the way: a shuffle written by hand."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        buffer = []
        for value in range(self.n):
            buffer.append(value)
            if len(buffer) == 4:
                yield buffer.pop(int(drawn(4)))
        while buffer:
            yield buffer.pop(int(drawn(len(buffer))))


def drawn(n):
    try:
        return sample_rng().integers(n)
    except agnoload.AgnoloadError:  # outside of a loader
        return 0


class Between(IterableDataset):
    """From `start` to before `stop`; split from outside."""

    def __init__(self, start, stop):
        self.start, self.stop = start, stop

    def __iter__(self):
        return iter(range(self.start, self.stop))


def split_between(worker):
    """A `worker_init_fn` as torch's documentation has it."""
    info = agnoload.get_worker_info()
    stream = info.dataset
    each = -(-(stream.stop - stream.start) // info.num_workers)
    first, last = stream.start, stream.stop
    stream.start = first + worker * each
    stream.stop = min(stream.start + each, last)


def nothing(worker):
    """A `worker_init_fn` that does what has nothing to do with the data."""


class Drawing(IterableDataset):
    """Each sample draws from all that it can while it is read."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for value in range(self.n):
            yield {"value": value, **draws()}


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


def facts(value):
    info = agnoload.get_worker_info()
    if info is None:
        return (value, -1, 0, -1)
    return (value, info.id, info.num_workers, info.epoch)


class IterableDatasetBase:
    """A stranger's: another library's base class, known by its name alone."""

    def __getitem__(self, index):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


IterableDatasetBase.__name__ = IterableDatasetBase.__qualname__ = "IterableDataset"


class Torchlike(IterableDatasetBase):
    """As torch's: its base class has a __getitem__ that only raises."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Hublike(IterableDatasetBase):
    """As Hugging Face's: `n_shards`, `shard(num_shards=, index=)`, `set_epoch`, a state."""

    def __init__(self, n, num_shards, parts=None):
        self.n = n
        self.num_shards = num_shards
        self.parts = range(num_shards) if parts is None else parts
        self.epoch = 0
        self.at = 0

    def shard(self, num_shards, index):
        return Hublike(self.n, 1, self.parts[index::num_shards])

    def set_epoch(self, epoch):
        self.epoch = epoch

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


class WithEpoch(IterableDataset):
    """Yields the epoch that it was told, three times."""

    def __init__(self):
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] * 3)


class ShardsOfEpoch(Shards):
    """Every value is a hundred more in each epoch that it is told of."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, number):
        return [100 * self.epoch + value for value in super().shard(number)]


class Rows:
    """A map-style dataset of the same numbers; writes a byte for each that is loaded."""

    def __init__(self, n, sign=1, log=None):
        self.n = n
        self.sign = sign
        self.log = log

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        mark(self.log)
        return self.sign * (index + 1)


class Broken(IterableDataset):
    """0, 1, ... and an error in the place of `bad`."""

    def __init__(self, n, bad):
        self.n = n
        self.bad = bad

    def __iter__(self):
        for value in range(self.n):
            if value == self.bad:
                raise OSError(5, "the disk is gone")
            yield value


class Stopping(IterableDataset):
    """Lets a StopIteration out of its own code at 5."""

    def __iter__(self):
        for value in range(8):
            if value == 5:
                next(iter([]))
            yield value


class StoppingNext(Returned):
    def __next__(self):
        if self.at == 5:
            raise GeneratorExit
        return super().__next__()


def fails_at_3_and_7(value):
    if value in (3, 7):
        raise ValueError(f"bad value {value}")
    return value


class FailsAtFirst:
    """Draws, and then raises an OSError at the first try for every third value."""

    def __init__(self):
        self.tried = set()

    def __call__(self, value):
        drawn = drawn_for(value)
        if value % 3 == 0 and value not in self.tried:
            self.tried.add(value)
            raise OSError(value)
        return drawn


def drawn_for(value):
    return value, int(sample_rng().integers(1 << 62))


def fails(value):
    raise ValueError(f"bad value {value}")


def stops_at_5(value):
    return next(iter([])) if value == 5 else value


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
            if value == self.at and die(self.flag):
                os.kill(os.getpid(), signal.SIGKILL)
            yield with_draws(value)


def die(flag):
    try:
        os.unlink(flag)
    except FileNotFoundError:
        return False
    return True


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


def is_even(value):
    return value % 2 == 0


def negative(value):
    return -1 - value


def is_third(value):
    return value % 3 == 0


def as_text(sample):
    return {"key": sample["__key__"], "text": sample["txt"].decode(), "label": int(sample["cls"])}


def summed(samples):
    return (
        sum(int(sample) for sample in samples),
        sample_rng().integers(1 << 62).item(),
        int(np.random.randint(1 << 62)),
    )
