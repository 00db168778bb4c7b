"""One of every sampler of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agnoload import (
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

N = 26
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), (11, 2, 8, 5)))
LENGTHS = np.random.default_rng(1).integers(1, 50, N)

SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(N)),
    "random": lambda: RandomSampler(range(N)),
    "random, more than all": lambda: RandomSampler(range(N), num_samples=31),
    "random, replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=20),
    "subset": lambda: SubsetRandomSampler([7, 3, 5, 11, 20, 25, 1]),
    "weighted": lambda: WeightedRandomSampler(LENGTHS, 20),
    "weighted, no replacement": lambda: WeightedRandomSampler(LENGTHS, 20, replacement=False),
}
BATCH_SAMPLERS: dict[str, Callable[[], Any]] = {
    "batch": lambda: BatchSampler(RandomSampler(range(N)), 4, drop_last=False),
    "batch, drop_last": lambda: BatchSampler(WeightedRandomSampler(LENGTHS, 22), 4, drop_last=True),
    "balanced": lambda: BalancedBatchSampler(LABELS, 6),
    "balanced, rotating": lambda: BalancedBatchSampler(LABELS, 3, alpha=0.5),
    "balanced, random": lambda: BalancedBatchSampler(LABELS, 6, kind="random"),
    "class uniform": lambda: ClassUniformBatchSampler(LABELS, 2, 3),
    "cyclic": lambda: CyclicClassBatchSampler(LABELS, 2, 6),
    "buckets": lambda: BucketBatchSampler(LENGTHS, max_tokens=120),
    "buckets by count": lambda: BucketBatchSampler(LENGTHS, batch_size=4, drop_last=True),
}


@pytest.fixture(scope="session")
def samplers() -> dict[str, Callable[[], Any]]:
    """By name, what makes a sampler of 26 items."""
    return SAMPLERS


@pytest.fixture(scope="session")
def batch_samplers() -> dict[str, Callable[[], Any]]:
    """By name, what makes a batch sampler of 26 items."""
    return BATCH_SAMPLERS
