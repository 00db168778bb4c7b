"""Batches of a stream as lists, whoever reads it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest

from agnoload import AgnoloadWarning, DataLoader

THREADS = {"num_workers": 2, "worker_type": "thread"}
PROCESSES = {"num_workers": 2}
READERS = [
    pytest.param({}, id="inline"),
    pytest.param(THREADS, id="threads"),
    pytest.param(PROCESSES, id="processes", marks=pytest.mark.slow),
]


def plain(batch: Any) -> Any:
    """A batch as lists and Python's own numbers, so that `==` compares it whole."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(plain, batch))
    return batch.tolist() if isinstance(batch, (np.ndarray, np.generic)) else batch


@pytest.fixture(params=READERS)
def readers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options for each kind of reader: the user's thread, two threads, two processes."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def load() -> Any:
    """`load(stream, size, epochs=1, **options)`: the batches of so many epochs as lists; warnings are errors."""

    def batches(stream: Any, size: Any = 1, epochs: int = 1, **options: Any) -> list[Any]:
        with DataLoader(stream, size, **({"seed": 7} | options)) as loader:
            return [plain(batch) for _ in range(epochs) for batch in loader]

    return batches


@pytest.fixture(scope="session")
def deliver() -> Any:
    """`deliver(stream, size, workers=0, epoch=0, state=None)`: the batches of an epoch as lists of samples.

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
