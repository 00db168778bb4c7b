"""What is no state of a loader is refused when it is loaded; what is accepted is one that the loader resumes from."""

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
from agnoload import BatchSampler, DataLoader, DistributedSampler, StateError
from agnoload.messages import FailureCount, LaneStart
from agnoload.planning.state import (
    EpochPosition,
    EpochSeeds,
    SamplerPosition,
    StreamPosition,
    capture,
    fitted,
    restore,
)
from agnoload.samplers import has_random_access

DATA = range(13)


def balanced(size):
    return agnoload.BalancedBatchSampler(np.arange(13) % 2, size)


def share(sampler, tail="pad"):
    return DistributedSampler(sampler, 2, 1, tail=tail)


LOADERS = {
    "in order": lambda kit: DataLoader(DATA, 3, seed=2),
    "shuffled": lambda kit: DataLoader(DATA, 3, shuffle=True),
    "without batches": lambda kit: DataLoader(DATA, None, shuffle=True),
    "one rank": lambda kit: DataLoader(DATA, 2, sampler=share(DATA)),
    "rank of batches": lambda kit: DataLoader(DATA, batch_sampler=share(balanced(2), "drop")),
    "batches of a rank": lambda kit: DataLoader(DATA, batch_sampler=BatchSampler(share(DATA), 2, drop_last=True)),
    "balanced": lambda kit: DataLoader(DATA, batch_sampler=balanced(4)),
    "buckets": lambda kit: DataLoader(DATA, batch_sampler=agnoload.BucketBatchSampler(range(1, 14), max_tokens=20)),
    "generator": lambda kit: DataLoader(DATA, 3, shuffle=True, generator=random.Random(4)),
    "a user's": lambda kit: DataLoader(range(20), 3, sampler=kit.Shuffled()),
    "a user's with a state": lambda kit: DataLoader(range(20), 3, sampler=kit.Walks()),
    "stream": lambda kit: DataLoader(kit.Count(), 3, seed=2),
    "stream with a state": lambda kit: DataLoader(kit.Placed(), 3, seed=2),
    "shards": lambda kit: DataLoader(kit.PlainShards(), 3, seed=2),
    "shuffled stream": lambda kit: DataLoader(kit.Count().shuffle(4), 3, seed=2),
    "rank of a stream": lambda kit: DataLoader(kit.Placed().split_by_rank(1, 2, uneven="stop"), 3, seed=2),
    "chain": lambda kit: DataLoader(agnoload.ChainDataset([kit.Placed(), kit.Placed()]), 3, seed=2),
    "mixture": lambda kit: DataLoader(agnoload.Mixture([range(9), kit.Placed()], [1, 1], stop="first"), 3, seed=2),
    "exact mixture": lambda kit: DataLoader(agnoload.Mixture([range(9), range(9)], [1, 1], per="batch"), 3, seed=2),
    "files": lambda kit: DataLoader(agnoload.FileStream([__file__], agnoload.read_lines), 90, seed=2),
}
"""The last epochs of an exact mixture and of files may end early: what is drawn must end by itself."""


def out_of_order(loader, state):
    """As if the third and the fourth batch had come before the second."""
    return state | {"position": 3, "ahead": [[6, 12]], "facts": loader._planner._facts(True)}


def states_of(loader, count=3):
    """The states before the first batches and after each of them, as they come out of files."""
    found = [loader.state_dict()]
    for _ in islice(loader, count):
        found.append(loader.state_dict())
    if found[1]["position"] == 3 and loader.dataset == DATA and has_random_access(loader.sampler):
        found.append(out_of_order(loader, found[1]))
    return json.loads(json.dumps(found))


def places(value, path=()):
    """The way to everything in a state."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


GONE = object()


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


ODD = [
    None, True, False, -1, 0, 1, 2, 5, 12, 13, 14, 10**6, 2**31, 2**63 - 1, 2**63, 2**64, 2**200, 0.0, 2.5, 3.0,
    float("nan"), float("inf"), "", "3", "garbage", [], [1], [[1, 2]], [["a", 1]], [[2, 1]], [[0, 3], [6, 9]], {},
    {"a": 1}, {"state": 1}, {"sum": "x"}, {"0": {"a": [{}]}}, [[[[]]]], b"bytes", {1, 2}, object(),
]  # fmt: skip
values = st.sampled_from([*ODD, GONE]) | st.integers(-(2**70), 2**70) | st.lists(st.integers(-3, 20), max_size=3)
LEFT_OUT = {"drawn": 0, "begun": True, "ahead": []}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore::agnoload.AgnoloadWarning")
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_state_with_odd_values_is_refused_or_resumed_from(kit, name, data):
    loader = LOADERS[name](kit)
    state = data.draw(st.sampled_from(states_of(LOADERS[name](kit))))
    for _ in range(data.draw(st.sampled_from([1, 1, 1, 2, 4]))):
        if not isinstance(state, (dict, list)):
            break
        path = data.draw(st.sampled_from(list(places(state))[1:] or [()]))
        state = changed(state, path, data.draw(values))
    before = loader.state_dict()
    try:
        loader.load_state_dict(state)
    except StateError:
        assert loader.state_dict() == before  # the loader stays where it was
        return
    taken = loader.state_dict()
    for field in {*taken, *state} - {"facts"}:
        default = LEFT_OUT.get(field)
        assert repr(taken.get(field, default)) == repr(state.get(field, default))
    try:
        for _ in range(2):
            for batch in loader:
                assert len(np.atleast_1d(batch))
    except StateError:  # what only the stream, or a user's sampler, can tell
        assert loader._options.stream or not has_random_access(loader.sampler)


COUNTS = st.integers(0, 2**40)
LANES = st.tuples(COUNTS, COUNTS).map(lambda pair: LaneStart(max(pair), min(pair), {"at": pair[0]}))


@st.composite
def stream_positions(draw):
    lanes = draw(st.lists(LANES, min_size=1, max_size=4))
    size = draw(st.integers(1, 9))
    numbers = st.integers(0, len(lanes) - 1)
    ahead = {(n, lanes[n].delivered + size * k) for n, k in draw(st.sets(st.tuples(numbers, st.integers(0, 9))))}
    kind = draw(st.sampled_from(["stream", "lanes", "workers"]))
    return StreamPosition(kind, lanes, draw(numbers), draw(COUNTS), ahead, size, draw(st.integers(1, 9)), None, None)


@st.composite
def positions(draw, subject):
    """A place within an epoch, of any loader."""
    borders = sorted(draw(st.sets(st.integers(1, 2**50), max_size=7)))
    position, pairs = (borders[0], borders[1:]) if len(borders) % 2 else (0, borders)
    saved = COUNTS.map(SamplerPosition) | COUNTS.map(lambda place: SamplerPosition(None, {"place": place}))
    tried = draw(COUNTS)
    return EpochPosition(
        draw(st.integers(0, 2**63 - 1)),
        position,
        EpochSeeds(draw(st.integers(0, 2**70)), draw(COUNTS), draw(st.integers(0, 2**20))),
        ahead=tuple(zip(pairs[::2], pairs[1::2], strict=True)),
        sampler=draw(saved) if subject == "sampler" else None,
        stream=draw(stream_positions()) if subject == "stream" else None,
        failed=FailureCount(draw(st.integers(0, tried)), tried),
        rank=draw(st.none() | st.integers(0, 99)),
    )


@given(st.data(), st.sampled_from(["order", "sampler", "stream"]))
def test_a_state_goes_through_json_and_comes_back_as_it_was(data, subject):
    place = data.draw(positions(subject))
    facts = {"kind": subject, "length": 7}
    state = json.loads(json.dumps(capture(place, facts)))
    found = restore(state, facts, subject)
    assert found == place
    assert json.loads(json.dumps(capture(found, facts))) == state


@given(
    place=stream_positions(),
    world=st.integers(1, 6),
    factor=st.integers(1, 4),
)
def test_lanes_of_a_stream_move_to_another_number_of_ranks_at_the_same_place(place, world, factor):
    count = world * factor * place.world
    saved = place._replace(kind="stream", lanes=[LaneStart(count, count, "state")], ahead=set(), merged=0)
    here = saved._replace(lanes=[LaneStart()], world=world)
    (lane,) = fitted(saved, here, 1).lanes
    assert lane.delivered * world == count * saved.world
    assert (lane.at, lane.state) == (lane.delivered, "state")
    if (count + 1) * saved.world % world:
        with pytest.raises(StateError, match="cannot share evenly"):
            fitted(saved._replace(lanes=[LaneStart(count + 1)]), here, 1)


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
    "a huge position": (lambda state: state | {"position": 2**63}, r"position .*below 2\*\*63.*got 92233"),
    "a position beyond the end": (lambda state: state | {"position": 14}, r"position 14 .* beyond the 13 samples"),
    "text for a seed": (lambda state: state | {"seed": "2"}, r"seed .*got '2'"),
    "another seed": (lambda state: state | {"seed": 3}, r"saved with seed 3, .* given seed 2"),
    "facts that are none": (lambda state: state | {"facts": 5}, r"facts .* dict, got 5"),
    "another length": (lambda state: changed(state, ["facts", "length"], 14), r"length 14, .* has 13"),
    "a float for a length": (lambda state: changed(state, ["facts", "length"], 13.0), r"length 13\.0, .* has 13"),
    "an unknown fact": (lambda state: changed(state, ["facts", "more"], 1), r"more 1, .* has None"),
    "garbage in a fact": (lambda state: changed(state, ["facts", "sampler"], {"a": [[{}]]}), r"sampler \{'a'.* has 'S"),
    "seeds of a generator": (lambda state: state | {"drawn": 3}, r"drawn .* 0 without a generator, got 3"),
    "begun, or not": (lambda state: state | {"begun": 1}, r"begun .* bool, got 1"),
    "within an epoch that has not begun": (lambda state: state | {"begun": False}, r"must have position 0"),
    "a stream": (lambda state: state | {"stream": {}}, r"saved with a stream, but .* none; got stream=\{\}"),
    "a sampler": (lambda state: state | {"sampler": {"sum": 1}}, r"saved with a user-defined sampler, .* got sampler="),
    "text ahead": (lambda state: state | {"ahead": "ab"}, r"batch_size None, .* has 3"),
    "failed samples that were not tried": (lambda state: state | {"failed": [9, 4]}, r"at most .* tried, got 9 of 4"),
}


def test_a_refusal_says_what_must_hold_and_what_came():
    for name, (change, words) in REFUSED.items():
        loader = DataLoader(DATA, 3, seed=2)
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        with pytest.raises(StateError, match=words):
            loader.load_state_dict(change(state))
        assert loader.state_dict() == state, name
        assert [batch.tolist() for batch in batches] == [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12]]


AHEAD = [
    "ab", 5, [1], [[6]], [[6, "9"]], [[6, 9, 12]], [[9, 6]], [[6, 6]], [[0, 3]], [[6, 9], [9, 12]], [[9, 12], [6, 9]],
    [[6, True]], [[6, 10]], [[5, 9]], [[6, 15]], [[6, 2**63]],
]  # fmt: skip


def test_what_was_delivered_ahead_must_be_whole_batches_behind_the_position():
    for ahead in AHEAD:
        loader = DataLoader(DATA, 3, seed=2)
        next(iter(loader))
        state = out_of_order(loader, loader.state_dict())
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == [[3, 4, 5], [12]]
        with pytest.raises(StateError, match=r"ahead|out of order|lies beyond"):
            loader.load_state_dict(state | {"ahead": ahead})


def test_counts_of_failed_samples_that_are_none_are_refused():
    loader = DataLoader(DATA, 4, max_failed=2, on_error="skip")
    for counts in (None, 3, "ab", {}, [1], [1, 2, 3], [-1, 2], [1, 2.0], [True, 2], [1, 1 << 63]):
        with pytest.raises(StateError, match=r"failed in a state must be a (list of 2|non-negative int below)"):
            loader.load_state_dict({**loader.state_dict(), "failed": counts})


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stream", ["Count", "Placed", "PlainShards"])
@pytest.mark.filterwarnings("ignore::agnoload.AgnoloadWarning")
def test_a_stream_that_is_shorter_than_its_state_is_refused(kit, stream, workers):
    make = getattr(kit, stream)
    loader = DataLoader(make(), 3)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    state["stream"]["lanes"][0] = [30, 0, None]
    with DataLoader(make(), 3, num_workers=workers) as again:
        again.load_state_dict(state)
        with pytest.raises(StateError, match=r"30 samples were delivered then, now it ends after \d+"):
            list(again)


STREAMED = {
    "kind": "pile", "lanes": [[3, 4, None]], "turn": -1, "merged": True, "ahead": [[0, 4]], "size": 0, "world": "1",
    "share": [True, 1], "shards": 2, "more": 1,
}  # fmt: skip


def test_the_position_of_a_stream_is_checked_when_it_is_loaded(kit):
    loader = DataLoader(kit.Count(), 3)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    for field, value in STREAMED.items():
        with pytest.raises(StateError):
            loader.load_state_dict(changed(state, ["stream", field], value))
    with pytest.raises(StateError, match="stream"):
        loader.load_state_dict(changed(state, ["stream"], GONE))
    assert loader.state_dict() == state
    loader = DataLoader(kit.Shards(), 3)
    next(iter(loader))
    with pytest.raises(StateError, match=r"number of shards: saved with 5\.0, got 5"):
        loader.load_state_dict(changed(loader.state_dict(), ["stream", "shards"], 5.0))


def test_what_user_code_raises_when_it_gets_its_state_is_the_cause(kit):
    loader, again = DataLoader(kit.Placed(), 3), DataLoader(kit.Placed(), 3)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    state["stream"]["lanes"][0][2] = {"place": 99}
    again.load_state_dict(state)
    with pytest.raises(StateError, match=r"Placed must take .*\{'place': 99\}.* raised LookupError: 99") as caught:
        next(iter(again))
    assert isinstance(caught.value.__cause__, LookupError)


END = {"shuffled": 13, "one rank": 13, "rank of batches": 14, "batches of a rank": 13, "balanced": 16, "buckets": 13}


def test_a_position_beyond_the_end_is_refused_and_the_end_itself_is_the_next_epoch(kit):
    for name, end in END.items():
        loader, fresh = LOADERS[name](kit), LOADERS[name](kit)
        state = loader.state_dict()
        loader.load_state_dict(state | {"position": end})
        assert len(list(loader)) == len(fresh), name
        assert loader.epoch == 2
        for position in (end + 1, end + 2, 10**6):
            with pytest.raises(StateError, match=rf"position {position} .* beyond the {end} samples"):
                fresh.load_state_dict(fresh.state_dict() | {"position": position})
