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
from agnoload.samplers import has_random_access


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
    return state | {"position": 3, "ahead": [[6, 12]], "facts": loader._planner._facts(True)}


LOADERS = {
    "in order": lambda: DataLoader(range(13), 3, seed=2),
    "shuffled": lambda: DataLoader(range(13), 3, shuffle=True),
    "without batches": lambda: DataLoader(range(13), None, shuffle=True),
    "one rank": lambda: DataLoader(range(13), 2, sampler=agnoload.DistributedSampler(range(13), 2, 1)),
    "rank of batches": lambda: DataLoader(
        range(13),
        batch_sampler=agnoload.DistributedSampler(
            agnoload.BalancedBatchSampler(np.arange(13) % 2, 2), 2, 1, tail="drop"
        ),
    ),
    "batches of a rank": lambda: DataLoader(
        range(13), batch_sampler=agnoload.BatchSampler(agnoload.DistributedSampler(range(13), 2, 1), 2, drop_last=True)
    ),
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
    if found[1]["position"] == 3 and loader.dataset == range(13) and has_random_access(loader.sampler):
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
    float("nan"), float("inf"), "", "3", "garbage", [], [1], [[1, 2]], [["a", 1]], [[2, 1]], [[0, 3], [6, 9]], {},
    {"a": 1}, {"state": 1}, {"sum": "x"}, {"0": {"a": [{}]}}, [[[[]]]], b"bytes", {1, 2}, object(),
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
def test_a_state_with_one_odd_value_is_rejected_or_resumed_from(name):
    make = LOADERS[name]
    for state in states_of(make):
        assert goes_on(make, state, state)
        for path in places(state):
            for odd in [*ODD, *([GONE] if path else [])]:
                if path or odd is not GONE:
                    goes_on(make, changed(state, path, odd), (state, path, odd))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore::agnoload.AgnoloadWarning")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_state_with_some_odd_values_is_rejected_or_resumed_from(name, data):
    make = LOADERS[name]
    state = data.draw(st.sampled_from(states_of(make)))
    for _ in range(data.draw(st.integers(1, 4))):
        if not isinstance(state, (dict, list)):
            break
        path = data.draw(st.sampled_from(list(places(state))[1:] or [()]))
        state = changed(state, path, data.draw(values))
    goes_on(make, state, state)


REFUSED = {
    "a list": (lambda state: [state], r"the dict that state_dict\(\) gave, got list"),
    "text": (json.dumps, r"the dict that state_dict\(\) gave, got str"),
    "nothing": (lambda state: None, r"got NoneType"),
    "no version": (lambda state: changed(state, ["version"], GONE), r"that state_dict\(\) gave, got dict"),
    "another version": (lambda state: state | {"version": 2}, r"version 1, got version 2"),
    "a bool for a version": (lambda state: state | {"version": True}, r"version 1, got version True"),
    "an unknown field": (lambda state: state | {"more": 1}, r"have the fields .*position.* only, got more"),
    "no position": (lambda state: changed(state, ["position"], GONE), r"position .* non-negative int.*got None"),
    "a bool for a position": (lambda state: state | {"position": True}, r"position .*non-negative int.*got True"),
    "a float for a position": (lambda state: state | {"position": 3.0}, r"position .*non-negative int.*got 3\.0"),
    "no number": (lambda state: state | {"epoch": float("nan")}, r"epoch .*non-negative int.*got nan"),
    "a negative position": (lambda state: state | {"position": -3}, r"position .*non-negative int.*got -3"),
    "a huge position": (
        lambda state: state | {"position": 2**63},
        r"position .*below 2\*\*63.*got 92233",
    ),
    "a position beyond the end": (lambda state: state | {"position": 14}, r"position 14 .* beyond the 13 samples"),
    "a bool for an epoch": (lambda state: state | {"epoch": False}, r"epoch .*got False"),
    "text for a seed": (lambda state: state | {"seed": "2"}, r"seed .*got '2'"),
    "another seed": (lambda state: state | {"seed": 3}, r"saved with seed 3, .* given seed 2"),
    "facts that are none": (lambda state: state | {"facts": 5}, r"facts .* dict, got 5"),
    "another length": (lambda state: changed(state, ["facts", "length"], 14), r"length 14, .* has 13"),
    "a float for a length": (lambda state: changed(state, ["facts", "length"], 13.0), r"length 13\.0, .* has 13"),
    "an unknown fact": (lambda state: changed(state, ["facts", "more"], 1), r"more 1, .* has None"),
    "garbage in a fact": (
        lambda state: changed(state, ["facts", "sampler"], {"a": [[{}]]}),
        r"sampler \{'a'.* has 'S",
    ),
    "seeds of a generator": (lambda state: state | {"drawn": 3}, r"drawn .* 0 without a generator, got 3"),
    "begun, or not": (lambda state: state | {"begun": 1}, r"begun .* bool, got 1"),
    "within an epoch that has not begun": (
        lambda state: state | {"begun": False},
        r"must have position 0",
    ),
    "a stream": (
        lambda state: state | {"stream": {}},
        r"saved with a stream, but this loader has none; got stream=\{\}",
    ),
    "a sampler": (
        lambda state: state | {"sampler": {"sum": 1}},
        r"saved with a user-defined sampler, but this loader has none; got sampler=",
    ),
    "text ahead": (lambda state: state | {"ahead": "ab"}, r"batch_size None, .* has 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_what_must_hold_and_what_came(name):
    change, words = REFUSED[name]
    loader = DataLoader(range(13), 3, seed=2)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    with pytest.raises(StateError, match=words):
        loader.load_state_dict(change(state))
    assert loader.state_dict() == state
    assert [batch.tolist() for batch in batches] == [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12]]


AHEAD = [
    "ab", 5, [1], [[6]], [[6, "9"]], [[6, 9, 12]], [[9, 6]], [[6, 6]], [[0, 3]], [[6, 9], [9, 12]], [[9, 12], [6, 9]],
    [[6, True]], [[6, 10]], [[5, 9]], [[6, 15]], [[6, 2**63]],
]  # fmt: skip


@pytest.mark.parametrize("ahead", AHEAD, ids=repr)
def test_what_was_delivered_ahead_must_be_whole_batches_behind_the_position(ahead):
    loader = DataLoader(range(13), 3, seed=2)
    next(iter(loader))
    state = out_of_order(loader, loader.state_dict())
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[3, 4, 5], [12]]
    with pytest.raises(StateError, match=r"ahead|out of order|lies beyond"):
        loader.load_state_dict(state | {"ahead": ahead})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [Count, Placed, Shards])
@pytest.mark.filterwarnings("ignore::agnoload.AgnoloadWarning")
def test_a_stream_that_is_shorter_than_its_state_is_rejected(stream, workers):
    loader = DataLoader(stream(), 3)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    state["stream"]["lanes"][0] = [30, 0, None]
    with DataLoader(stream(), 3, num_workers=workers) as again:
        again.load_state_dict(state)
        with pytest.raises(StateError, match=r"30 samples were delivered then, now it ends after \d+"):
            list(again)


STREAMED = {
    "kind": "pile", "lanes": [[3, 4, None]], "turn": -1, "merged": True, "ahead": [[0, 4]], "size": 0, "world": "1",
    "share": [True, 1], "shards": 2, "more": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("field", STREAMED)
def test_the_position_of_a_stream_is_checked_when_it_is_loaded(field):
    loader = DataLoader(Count(), 3, num_workers=2)
    with loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    with pytest.raises(StateError):
        loader.load_state_dict(changed(state, ["stream", field], STREAMED[field]))
    with pytest.raises(StateError, match="stream"):
        loader.load_state_dict(changed(state, ["stream"], GONE))
    assert loader.state_dict() == state


def test_a_number_of_shards_of_another_kind_is_refused():
    loader = DataLoader(Shards(), 3)
    next(iter(loader))
    with pytest.raises(StateError, match=r"number of shards: saved with 5\.0, got 5"):
        loader.load_state_dict(changed(loader.state_dict(), ["stream", "shards"], 5.0))


def test_what_user_code_raises_when_it_gets_its_state_is_the_cause():
    loader = DataLoader(Placed(), 3)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    state["stream"]["lanes"][0][2] = {"place": 99}
    again = DataLoader(Placed(), 3)
    again.load_state_dict(state)
    with pytest.raises(StateError, match=r"Placed must take .*\{'place': 99\}.* raised LookupError: 99") as caught:
        next(iter(again))
    assert isinstance(caught.value.__cause__, LookupError)


END = {"shuffled": 13, "one rank": 13, "rank of batches": 14, "batches of a rank": 13, "balanced": 16, "buckets": 13}


@pytest.mark.parametrize("name", END)
def test_a_position_beyond_the_end_is_refused_and_the_end_itself_is_the_next_epoch(name):
    make = LOADERS[name]
    state = make().state_dict()
    end = END[name]
    loader = make()
    loader.load_state_dict(state | {"position": end})
    assert len(list(loader)) == len(make())
    assert loader.epoch == 2
    for position in (end + 1, end + 2, 10**6):
        with pytest.raises(StateError, match=rf"position {position} .* beyond the {end} samples"):
            make().load_state_dict(state | {"position": position})
