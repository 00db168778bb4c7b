"""Several iterators over one loader, and states that are loaded while some are under way."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader

POOLS = {
    "processes": {"num_workers": 2},
    "kept": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}
COUNT = 4
"""Batches of an epoch."""


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


def make(kind=Draws, **pool):
    return DataLoader(kind(), 4, shuffle=True, seed=3, **pool)


def plain(batches):
    return [[field.tolist() for field in batch] for batch in batches]


@functools.cache
def unbroken(kind=Draws):
    with make(kind) as loader:
        return [plain(loader) for _ in range(12)]


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from(["iter", "next", "next", "save", "load", "junk"]), st.integers(0, 9))))
def test_each_iterator_is_an_epoch_of_its_own_and_the_state_is_that_of_the_last_one(steps):
    """Against a model: each iterator is at a place, and so is the state that counts for the next one."""
    loader, epochs = make(), unbroken()
    iterators, places, saved = [], [], []
    following, here, latest = (0, 0), (0, 0), None
    for step, choice in steps:
        if step == "iter" and following[0] < len(epochs) - 1:
            iterators.append(iter(loader))
            places.append(following)
            latest, following = len(places) - 1, (following[0] + 1, 0)
        elif step == "next" and places:
            one = choice % len(places)
            epoch, number = places[one]
            wanted = epochs[epoch][number : number + 1]
            assert plain([batch for batch in [next(iterators[one], None)] if batch is not None]) == wanted
            places[one] = epoch, number + len(wanted)
        elif step == "save":
            saved.append((here, json.dumps(loader.state_dict())))
        elif step == "load" and saved:
            following, text = saved[choice % len(saved)]
            loader.load_state_dict(json.loads(text))
            latest = None
        elif step == "junk":
            with pytest.raises(agnoload.StateError):
                loader.load_state_dict(loader.state_dict() | {"position": 99})
        here = following if latest is None else places[latest]
        here = (here[0] + 1, 0) if here[1] == COUNT else here
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (here[0], 4 * here[1])


@pytest.mark.parametrize("name", POOLS)
def test_workers_serve_iterators_that_take_turns_and_states_that_are_loaded_meanwhile(name):
    pool = POOLS[name]
    first, second, third, fourth, *_ = unbroken(OwnDraws if name == "threads" else Draws)
    with make(OwnDraws if name == "threads" else Draws, **pool) as loader:
        one, two = iter(loader), iter(loader)
        found = [[], []]
        for number in (0, 1, 1, 0, 1, 1, 0):
            found[number] += plain([next((one, two)[number])])
        assert found == [first[:3], second]
        state = loader.state_dict()
        assert (loader.epoch, state["epoch"], state["position"]) == (2, 2, 0)
        three = iter(loader)
        assert plain([next(three)]) == third[:1]
        loader.load_state_dict(state)
        with pytest.raises(agnoload.StateError):
            loader.load_state_dict(state | {"position": 99})
        assert [plain(one), plain(three)] == [first[3:], third[1:]]  # neither counts for the next one
        assert loader.state_dict() == state
        assert [plain(loader), plain(loader)] == [third, fourth]


def test_dropping_the_older_of_two_changes_nothing():
    _, second, third, *_ = unbroken()
    loader = make()
    one, two = iter(loader), iter(loader)
    next(one)
    found = plain([next(two)])
    del one
    found += plain(two)
    assert found == second
    assert plain(loader) == third
