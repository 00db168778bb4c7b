"""Batches of one epoch as lists, a comparison over all kinds and numbers of workers, and resuming at every batch."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest

from agnoload import AgnoloadWarning, DataLoader

WORKERS = [(0, "process"), (1, "process"), (2, "process"), (3, "process"), (1, "thread"), (2, "thread"), (3, "thread")]


def plain(batch: Any) -> Any:
    """A batch as lists and Python's own numbers, so that `==` compares it whole."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(plain, batch))
    return batch.tolist() if isinstance(batch, (np.ndarray, np.generic)) else batch


@pytest.fixture(scope="session")
def load() -> Any:
    """`load(dataset, batch_size, **options)`: the batches of one epoch, or of `epochs`, as lists."""

    def load_epochs(dataset: Any, batch_size: Any = 1, epochs: int = 1, **options: Any) -> list[Any]:
        loader: Any = DataLoader(dataset, batch_size, **options)
        return [plain(batch) for _ in range(epochs) for batch in loader]

    return load_epochs


@pytest.fixture(scope="session")
def deliver() -> Any:
    """`deliver(stream, batch_size, workers=0, epoch=0, state=None)`: the batches of an epoch as lists of samples.

    Workers are threads, which start at once: draws are the same as without only if they come from `sample_rng()`.
    """

    def batches(
        stream: Any, size: Any, workers: int = 0, *, epoch: int = 0, seed: int = 7, state: Any = None, **options: Any
    ) -> list[Any]:
        options = {"num_workers": workers, "worker_type": "thread", "collate_fn": list, "seed": seed} | options
        with warnings.catch_warnings(), DataLoader(stream, size, **options) as loader:
            warnings.simplefilter("ignore", AgnoloadWarning)  # fewer lanes than workers, a stream that is read again
            loader.set_epoch(epoch)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            return list(loader)

    return batches


@pytest.fixture(scope="session")
def everyone() -> list[dict[str, Any]]:
    """Options for each kind and number of workers; the first has none."""
    return [{"num_workers": number, "worker_type": kind} for number, kind in WORKERS]


@pytest.fixture(scope="session")
def same_for_all(load: Any, everyone: Any) -> Any:
    """The batches of a loader, after they were found to be the same for any workers.

    `make()` gives the dataset: a stream that counts in itself must not be shared.
    """

    def compare(make: Any, batch_size: Any = 1, **options: Any) -> list[Any]:
        expected = load(make(), batch_size, **options, **everyone[0])
        for workers in everyone[1:]:
            assert load(make(), batch_size, **options, **workers) == expected, workers
        return expected  # type: ignore[no-any-return]

    return compare
