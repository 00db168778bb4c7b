"""Datasets for loaders: loaded by path in conftest.py, so that they travel to workers by value."""

from __future__ import annotations

import random

import numpy as np

from agnoload import Batch, get_worker_info, sample_rng


class Drawing:
    """Sample i is i and what it draws from each source of random numbers."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {
            "index": index,
            "own": sample_rng().integers(1 << 62).item(),
            "numpy": int(np.random.randint(1 << 62)),
            "python": random.getrandbits(62),
        }


class Unreadable:
    """Knows how long it is, and nothing more."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        raise RuntimeError(f"sample {index} was read")


class Whole:
    """Gives a batch in one call; writes a byte to `log` for each."""

    def __init__(self, n, log, together=False):
        self.n = n
        self.log = log
        self.together = together

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        raise RuntimeError("one by one")

    def __getitems__(self, indices):
        with open(self.log, "ab") as file:
            file.write(b".")
        assert all(type(index) is int for index in indices)
        if self.together:
            return Batch({"twice": np.array(indices) * 2, "words": [str(index) for index in indices], "none": None})
        return [index * 2 for index in indices]


class Slow:
    """A decode that is worth keeping: each writes a byte to `log`."""

    def __init__(self, n, log):
        self.n = n
        self.log = log

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        with open(self.log, "ab") as file:
            file.write(b".")
        return np.full(1000, index, np.int64)


def noisy(sample):
    return {"value": int(sample[0]), "sum": int(sample.sum()), "noise": sample_rng().integers(1 << 62).item()}


class Waiting:
    """Sample 0 waits until the file `gate` exists; all say who loaded them."""

    def __init__(self, n, gate):
        self.n = n
        self.gate = gate

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == 0:
            with open(self.gate, "rb") as file:  # a named pipe: opening it waits for whoever writes
                file.read()
        return index, get_worker_info().id
