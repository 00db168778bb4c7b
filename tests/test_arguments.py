"""Whatever is given for an argument of a public name works, or raises an error of ours at once."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import AgnoloadError, ArrayDataset, DataLoader

DATA = ArrayDataset(np.arange(6))


class Numbers(agnoload.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    agnoload.ragged_collate: {},
    agnoload.PackedList: {"iterable": ["a"]},
    agnoload.FileStream: {"paths": ["a"], "reader": open},
    agnoload.ChainDataset: {"datasets": [Numbers()]},
    agnoload.ConcatDataset: {"datasets": [DATA]},
    agnoload.Subset: {"dataset": DATA, "indices": [1, 2]},
    agnoload.CachedDataset: {"dataset": DATA, "max_bytes": 1000},
    agnoload.Mixture: {"streams_or_datasets": [DATA], "weights": [1.0]},
    agnoload.random_split: {"dataset": DATA, "lengths": [3, 3]},
    agnoload.Ragged.from_list: {"items": [np.zeros(2)]},
    agnoload.Ragged.from_padded: {"values": np.zeros((2, 3)), "lengths": [1, 2]},
    agnoload.Ragged.from_packed: {"values": np.zeros(3), "offsets": [0, 1, 3]},
    agnoload.pack_sequences: {"lengths": [1, 2], "capacity": 4},
    agnoload.SequentialSampler: {"data_source": DATA},
    agnoload.RandomSampler: {"data_source": DATA},
    agnoload.SubsetRandomSampler: {"indices": [1, 2]},
    agnoload.WeightedRandomSampler: {"weights": [1.0, 2.0], "num_samples": 2},
    agnoload.BatchSampler: {"sampler": agnoload.SequentialSampler(DATA), "batch_size": 2, "drop_last": False},
    agnoload.DistributedSampler: {"dataset_or_sampler": DATA, "num_replicas": 2, "rank": 0},
    agnoload.BalancedBatchSampler: {"labels": [0, 1, 1], "batch_size": 2},
    agnoload.ClassUniformBatchSampler: {"labels": [0, 1, 1], "classes_per_batch": 1, "samples_per_class": 1},
    agnoload.CyclicClassBatchSampler: {"labels": [0, 1, 1], "classes_per_batch": 1, "batch_size": 1},
    agnoload.BucketBatchSampler: {"lengths": [1, 2, 3], "batch_size": 2},
    agnoload.imbalance_weights: {"labels": [0, 1, 1]},
    agnoload.get_backend: {"backend": "numpy"},
    agnoload.default_collate: {"batch": [1, 2]},
    DATA.map: {"fn": abs},
    Numbers().map: {"fn": abs},
    Numbers().filter: {"fn": abs},
    Numbers().shuffle: {"buffer_size": 3},
    Numbers().split_by_rank: {"rank": 0, "world_size": 1},
    DataLoader: {"dataset": DATA},
    DataLoader(DATA).steps: {"n": 2},
    DataLoader(DATA).set_epoch: {"epoch": 1},
    DataLoader(DATA).load_state_dict: {"state": {}},
}

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3), st.just(object())
)
ARRAYS = st.sampled_from([np.zeros(0), np.zeros((2, 2)), np.array(3.0), np.array([True, False]), np.array(["a"])])
JUNK = st.one_of(
    SCALARS,
    ARRAYS,
    st.lists(st.one_of(SCALARS, st.just([])), max_size=3),
    st.dictionaries(st.text(max_size=2), SCALARS, max_size=2),
    st.builds(lambda: lambda: 0),
    st.builds(lambda: iter(())),
)


@pytest.mark.parametrize("function", GOOD, ids=lambda function: function.__qualname__)
@pytest.mark.filterwarnings("ignore::agnoload.AgnoloadWarning")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_argument_works_or_raises_an_error_of_ours(function: Callable[..., Any], data: st.DataObject) -> None:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "empty"]
    name = data.draw(st.sampled_from(names), label="argument")
    arguments = GOOD[function] | {name: data.draw(JUNK, label="value")}
    with contextlib.suppress(AgnoloadError):
        made = function(**arguments)
        getattr(made, "close", bool)()
