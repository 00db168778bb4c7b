"""Several iterators over one loader, and a state that is loaded while one is under way."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader

POOLS = {
    "inline": {},
    "processes": {"num_workers": 2},
    "kept": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}
each_pool = pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)


class Draws(agnoload.Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 14

    def __getitem__(self, index):
        return index, agnoload.sample_rng().random(), np.random.random(), random.random(), self.rng.random()


class OwnDraws(Draws):
    def __init__(self):
        """What threads share is not promised."""

    def __getitem__(self, index):
        return index, agnoload.sample_rng().random()


def make(pool, **options):
    return DataLoader((OwnDraws if "worker_type" in pool else Draws)(), 4, shuffle=True, seed=3, **pool, **options)


def plain(batches):
    return [[field.tolist() for field in batch] for batch in batches]


def unbroken(pool, count=3):
    with make(pool) as loader:
        return [plain(loader) for _ in range(count)]


@pytest.mark.slow
@each_pool
def test_each_iterator_is_an_epoch_of_its_own_however_they_take_turns(pool):
    first, second, third = unbroken({**pool, "num_workers": 0})
    with make(pool) as loader:
        one, two = iter(loader), iter(loader)
        found = [[], []]
        for number in (0, 1, 1, 0, 1, 1, 0, 0):
            found[number] += plain([next((one, two)[number])])
        assert found == [first, second]
        assert plain(loader) == third
        assert next(one, None) is next(two, None) is None


@pytest.mark.slow
@each_pool
def test_epoch_and_state_are_those_of_the_iterator_that_was_made_last(pool):
    _, second, third = unbroken({**pool, "num_workers": 0})
    with make(pool) as loader:
        one, two = iter(loader), iter(loader)
        next(two)
        state = loader.state_dict()
        next(one), next(one)
        assert loader.state_dict() == state
        assert (loader.epoch, state["epoch"], state["position"]) == (1, 1, 4)
        with make(pool) as again:
            again.load_state_dict(json.loads(json.dumps(state)))
            assert [plain(again), plain(again)] == [second[1:], third]


@each_pool
def test_a_state_that_is_loaded_counts_for_the_next_iterator_and_not_for_one_under_way(pool):
    first, second, _ = unbroken({**pool, "num_workers": 0})
    with make(pool) as loader:
        one = iter(loader)
        found = plain([next(one)])
        state = loader.state_dict()
        found += plain([next(one)])
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        found += plain(one)
        assert found == first
        assert loader.state_dict() == state  # what the old one delivers does not move it
        assert plain(loader) == first[1:]
        assert plain(loader) == second


@pytest.mark.slow
@each_pool
def test_a_state_may_be_loaded_again_and_again(pool):
    first, second, _ = unbroken({**pool, "num_workers": 0})
    with make(pool) as loader:
        assert plain(loader) == first
        end = loader.state_dict()
        for _ in range(2):
            loader.load_state_dict(end)
            assert plain(loader) == second
        start = make(pool).state_dict()
        loader.load_state_dict(start)
        assert plain(loader) == first


@each_pool
def test_a_refused_state_changes_nothing_for_an_iterator_under_way(pool):
    first, second, _ = unbroken({**pool, "num_workers": 0})
    with make(pool) as loader:
        one = iter(loader)
        found = plain([next(one)])
        with pytest.raises(agnoload.StateError):
            loader.load_state_dict(loader.state_dict() | {"position": 99})
        found += plain(one)
        assert found == first
        assert loader.state_dict()["epoch"] == 1
        assert plain(loader) == second


def test_dropping_the_older_of_two_changes_nothing():
    _, second, third = unbroken({})
    loader = make({})
    one, two = iter(loader), iter(loader)
    next(one)
    found = plain([next(two)])
    del one
    found += plain(two)
    assert found == second
    assert plain(loader) == third
