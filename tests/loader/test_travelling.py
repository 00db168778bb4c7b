"""A loader is pickled and copied with its options and its epoch; its position, workers and iterators stay behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from agnoload import DataLoader, IterableDataset


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 3, "drop_last": True, "timeout": 5, "seed": 3},
        {"batch_sampler": [[1, 3], [5]]},
        {"batch_size": None, "sampler": [4, 2, 0]},
        pytest.param({"batch_size": 4, "num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_a_loader_travels_with_its_options_and_starts_the_epoch_again(options: dict[str, Any]) -> None:
    with DataLoader(range(10), **options) as loader:
        iterator = iter(loader)
        first = next(iterator)
        travelled = [pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)]
        whole = [batch.tolist() if hasattr(batch, "tolist") else batch for batch in (first, *iterator)]
    for other in travelled:
        with other:
            assert [batch.tolist() if hasattr(batch, "tolist") else batch for batch in other] == whole
            assert (other.seed, other.num_workers, other.timeout) == (loader.seed, loader.num_workers, loader.timeout)


def test_a_worker_init_fn_that_was_set_later_splits_no_stream_in_a_copy_either() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

    loader = DataLoader(Numbers(), 5, num_workers=2, worker_type="thread")
    loader.worker_init_fn = lambda worker: None
    with copy.copy(loader) as other:
        assert sorted(index for batch in other for index in batch.tolist()) == [*range(10)]
