"""What is no state of a loader is refused when it is loaded; what is accepted is one that the loader goes on from."""

from __future__ import annotations

import copy
import json
import random
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader, StateError
from agnoload.samplers import is_transparent


class Count(agnoload.IterableDataset):
    def __iter__(self):
        return iter(range(13))


class Placed(agnoload.IterableDataset):
    """A stream with a state, which it checks."""

    place = 0

    def __iter__(self):
        while self.place < 13:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        if type(state["place"]) is not int or not 0 <= state["place"] <= 13:
            raise LookupError(state["place"])
        self.place = state["place"]


class Shards(agnoload.IterableDataset):
    num_shards = 5
    lanes = 2

    def shard(self, number):
        return range(10 * number, 10 * number + number + 2)


class Stranger:
    """A sampler that is gone through again."""

    def __len__(self):
        return 13

    def __iter__(self):
        return iter(range(12, -1, -1))


class Saves(Placed):
    """A sampler with a state."""

    __len__ = Stranger.__len__


def out_of_order(loader, state):
    """As if the third and the fourth batch had come before the second."""
    return state | {"position": 3, "ahead": [[6, 12]], "facts": loader._facts(True)}


LOADERS = {
    "in order": lambda: DataLoader(range(13), 3, seed=2),
    "shuffled": lambda: DataLoader(range(13), 3, shuffle=True),
    "without batches": lambda: DataLoader(range(13), None, shuffle=True),
    "one rank": lambda: DataLoader(range(13), 2, sampler=agnoload.DistributedSampler(range(13), 2, 1)),
    "balanced": lambda: DataLoader(range(13), batch_sampler=agnoload.BalancedBatchSampler(np.arange(13) % 2, 4)),
    "buckets": lambda: DataLoader(range(13), batch_sampler=agnoload.BucketBatchSampler(range(1, 14), max_tokens=20)),
    "generator": lambda: DataLoader(range(13), 3, shuffle=True, generator=random.Random(4)),
    "a stranger's": lambda: DataLoader(range(13), 3, sampler=Stranger()),
    "a stranger's with a state": lambda: DataLoader(range(13), 3, sampler=Saves()),
    "stream": lambda: DataLoader(Count(), 3, seed=2),
    "stream with a state": lambda: DataLoader(Placed(), 3, seed=2),
    "shards": lambda: DataLoader(Shards(), 3, seed=2),
    "shuffled stream": lambda: DataLoader(Count().shuffle(4), 3, seed=2),
    "rank of a stream": lambda: DataLoader(Placed().split_by_rank(1, 2, uneven="stop"), 3, seed=2),
    "chain": lambda: DataLoader(agnoload.ChainDataset([Placed(), Placed()]), 3, seed=2),
    "mixture": lambda: DataLoader(agnoload.Mixture([range(9), Placed()], [0.5, 0.5], stop="first"), 3, seed=2),
    "exact mixture": lambda: DataLoader(
        agnoload.Mixture([range(9), range(9)], [0.5, 0.5], per="batch", stop="first"), 3, seed=2
    ),
    "files": lambda: DataLoader(agnoload.FileStream([__file__], agnoload.read_lines), 90, seed=2),
}


def states_of(make, count=3):
    """The states before the first batches and after each of them, as they come out of files."""
    loader = make()
    found = [loader.state_dict()]
    for _ in islice(loader, count):
        found.append(loader.state_dict())
    if found[1]["position"] == 3 and loader.dataset == range(13) and is_transparent(loader.sampler):
        found.append(out_of_order(loader, found[1]))
    return json.loads(json.dumps(found))


def places(value, path=()):
    """The way to everything in a state."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


def changed(state, path, value):
    """A state with another value at a place; `GONE` leaves it out."""
    if not path:
        return value
    state = copy.deepcopy(state)
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    if value is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return state


GONE = object()
ODD = [
    None, True, False, -1, 0, 1, 2, 5, 12, 13, 14, 10**6, 2**31, 2**63 - 1, 2**63, 2**64, 2**200, 0.0, 2.5, 3.0,
    float("nan"), float("inf"), "", "3", "garbage", [], [1], [[1, 2]], [[2, 1]], [[0, 3], [6, 9]], {}, {"state": 1},
    {"sum": "x"}, {"0": {"a": [{}]}}, [[[[]]]], b"bytes", {1, 2}, object(),
]  # fmt: skip
values = st.sampled_from([*ODD, GONE]) | st.integers(-(2**70), 2**70) | st.lists(st.integers(-3, 20), max_size=3)


def goes_on(make, state, where):
    """Whether a loader takes a state; if it does, all that follows must work, and a state taken at once is the same."""
    loader = make()
    before = loader.state_dict()
    try:
        loader.load_state_dict(state)
    except StateError:
        assert loader.state_dict() == before, where  # it stands where it stood
        return False
    taken = loader.state_dict()
    for name in {*taken, *state} - {"facts"}:
        assert repr(taken.get(name, {"drawn": 0, "begun": True, "ahead": []}.get(name))) == repr(
            state.get(name, {"drawn": 0, "begun": True, "ahead": []}.get(name))
        ), where
    try:
        for _ in range(2):
            for batch in loader:
                assert len(np.atleast_1d(batch)), where
    except StateError:  # what only the stream, or a stranger's sampler, can tell
        assert loader._options.stream or type(loader.sampler).__module__ == __name__, where
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore::agnoload.AgnoloadWarning")
def test_a_state_with_one_odd_value_is_refused_or_gone_on_from(name):
    make = LOADERS[name]
    for state in states_of(make):
        assert goes_on(make, state, state)
        for path in places(state):
            for odd in [*ODD, *([GONE] if path else [])]:
                if path or odd is not GONE:
                    goes_on(make, changed(state, path, odd), (state, path, odd))


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore::agnoload.AgnoloadWarning")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_state_with_some_odd_values_is_refused_or_gone_on_from(name, data):
    make = LOADERS[name]
    state = data.draw(st.sampled_from(states_of(make)))
    for _ in range(data.draw(st.integers(1, 4))):
        if not isinstance(state, (dict, list)):
            break
        path = data.draw(st.sampled_from(list(places(state))[1:] or [()]))
        state = changed(state, path, data.draw(values))
    goes_on(make, state, state)
