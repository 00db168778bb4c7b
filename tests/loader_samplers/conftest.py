"""A fork server that stays while a module is tested, the datasets of kit.py, and one of every sampler."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
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
from agnoload.pools.start import kept_server

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


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """Loaders of one module share a fork server, instead of starting one each."""
    with kept_server():
        yield


@pytest.fixture(scope="session")
def kit() -> Iterator[ModuleType]:
    """Datasets in a module that no worker can import: it would import pytest along with a test's own module."""
    name = "agnoload_loader_samplers_kit"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("kit.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(params=SAMPLERS.values(), ids=SAMPLERS.keys())
def make_sampler(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes a sampler over 26 items, of each kind."""
    made: Callable[[], Any] = request.param
    return made


@pytest.fixture(params=BATCH_SAMPLERS.values(), ids=BATCH_SAMPLERS.keys())
def make_batch_sampler(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes a batch sampler over 26 items, of each kind."""
    made: Callable[[], Any] = request.param
    return made
