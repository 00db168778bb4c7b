"""One of every sampler, small, for the tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agnoload.samplers import (
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), (20, 2, 9, 15, 7)))
LENGTHS = np.random.default_rng(1).integers(0, 50, 53)

EVERY: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(53)),
    "random": lambda: RandomSampler(range(53)),
    "random, one item": lambda: RandomSampler(range(1)),
    "random, none": lambda: RandomSampler(range(0)),
    "random, more than all": lambda: RandomSampler(range(10), num_samples=25),
    "random, some": lambda: RandomSampler(range(10), num_samples=4),
    "random, replacement": lambda: RandomSampler(range(10), replacement=True, num_samples=53),
    "subset": lambda: SubsetRandomSampler([7, 3, 5, 11]),
    "weighted": lambda: WeightedRandomSampler(LENGTHS, 20),
    "weighted, no replacement": lambda: WeightedRandomSampler(LENGTHS, 20, replacement=False),
    "batch": lambda: BatchSampler(RandomSampler(range(53)), 4, drop_last=False),
    "batch, drop_last": lambda: BatchSampler(RandomSampler(range(53)), 4, drop_last=True),
    "balanced": lambda: BalancedBatchSampler(LABELS, 8),
    "balanced, rotating": lambda: BalancedBatchSampler(LABELS, 3, alpha=0.5),
    "balanced, random": lambda: BalancedBatchSampler(LABELS, 8, kind="random"),
    "class uniform": lambda: ClassUniformBatchSampler(LABELS, 2, 3),
    "cyclic": lambda: CyclicClassBatchSampler(LABELS, 2, 6),
    "buckets": lambda: BucketBatchSampler(LENGTHS, max_tokens=120),
    "buckets by count": lambda: BucketBatchSampler(LENGTHS, batch_size=4, drop_last=True, largest_first=True),
    "buckets in order": lambda: BucketBatchSampler(LENGTHS, batch_size=5, max_tokens=120, shuffle=False),
    "one rank": lambda: DistributedSampler(range(53), 3, 1),
    "one rank, keep": lambda: DistributedSampler(range(53), 3, 2, tail="keep"),
    "one rank of a sampler": lambda: DistributedSampler(WeightedRandomSampler(LENGTHS, 20), 3, 0, tail="drop"),
    "one rank of a batch sampler": lambda: DistributedSampler(BucketBatchSampler(LENGTHS, max_tokens=120), 3, 1),
    "batches of one rank": lambda: BatchSampler(DistributedSampler(range(53), 3, 1), 4, drop_last=False),
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Samplers start and open nothing: looking for what is left would take ten times as long as the tests do."""


@pytest.fixture(params=EVERY.values(), ids=EVERY.keys())
def make_sampler(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes a fresh sampler of one kind."""
    made: Callable[[], Any] = request.param
    return made
