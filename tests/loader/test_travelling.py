"""A loader is pickled and copied with its options and its epoch; its place in it, workers and iterators stay."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from agnoload import DataLoader

ODD = [[1, 3], [5]]


@pytest.mark.slow
@pytest.mark.parametrize("travel", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 3, "drop_last": True, "timeout": 5, "seed": 3},
        {"batch_sampler": ODD},
        {"batch_size": None, "sampler": [4, 2, 0]},
        {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "spawn"},
    ],
)
def test_a_loader_travels_with_its_options_and_begins_the_epoch(travel: Any, options: dict[str, Any]) -> None:
    loader = DataLoader(range(10), **options)
    iterator = iter(loader)
    first = next(iterator)
    other = travel(loader)
    whole = [batch.tolist() if hasattr(batch, "tolist") else batch for batch in (first, *iterator)]
    found = [batch.tolist() if hasattr(batch, "tolist") else batch for batch in other]
    assert found == whole
    assert other.seed == loader.seed
    assert other.num_workers == loader.num_workers
    assert other.timeout == loader.timeout
    loader.close()
    other.close()
