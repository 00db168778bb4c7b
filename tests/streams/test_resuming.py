"""A saved state goes on where the user was, with any number of workers."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agnoload import seeding
from agnoload.errors import OptionError, StateError
from agnoload.seeding import Rewinder, SampleContext
from agnoload.streams import IterableDataset, Mixture
from agnoload.streams.iterators import OpenOptions
from agnoload.streams.shards import open_stream

SIZES = [3, 4, 1, 6, 0, 2]


def streams(kit):
    return {
        "plain": kit.Drawing(11).map(kit.with_draws),
        "wandering": kit.Wandering(13).map(kit.with_draws),
        "resumable": kit.Resumable(11).filter(lambda value: value % 4).map(kit.with_draws),
        "shuffled": kit.Resumable(17).map(kit.with_draws).shuffle(5),
        "chained": (kit.Resumable(5) + kit.Resumable(4).map(kit.negative)).map(kit.with_draws),
        "half resumable": kit.Resumable(5) + kit.Count(4),
        "mixed": Mixture([kit.Resumable(9).map(kit.negative), list(range(100, 107))], [2, 1], "last").map(
            kit.with_draws
        ),
        "exactly mixed": Mixture([kit.Resumable(9), list(range(100, 107))], [2, 1], per="batch", shuffle=True),
        "mixed, not resumable": Mixture([kit.Count(9), kit.Count(5).shuffle(3)], [2, 1], "last"),
        "shards": kit.Shards(SIZES).map(kit.with_draws),
        "shards, two lanes": kit.Shards(SIZES, lanes=2).map(kit.with_draws),
        "shuffled shards": kit.Shards(SIZES).shuffle(3).map(kit.with_draws),
        "resumable shards": kit.ResumableShards(SIZES).filter(lambda sample: sample[1] != 1).map(kit.with_draws),
        "a rank": kit.Resumable(11).map(kit.with_draws).split_by_rank(1, 2),
        "a padded rank": kit.Drawing(11).map(kit.with_draws).split_by_rank(1, 2, uneven="pad"),
        "a rank's shards": kit.Shards(SIZES).map(kit.with_draws).split_by_rank(1, 2, uneven="keep"),
    }


KINDS = [
    "plain",
    "wandering",
    "resumable",
    "shuffled",
    "chained",
    "half resumable",
    "mixed",
    "exactly mixed",
    "mixed, not resumable",
    "shards",
    "shards, two lanes",
    "shuffled shards",
    "resumable shards",
    "a rank",
    "a padded rank",
    "a rank's shards",
]


def states_of(loader):
    """Each batch, and the state behind it."""
    return [(batch, json.dumps(loader.plan.state())) for batch in loader]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(workers=st.integers(0, 4), later=st.integers(0, 4), size=st.integers(1, 4), order=st.integers(0, 1 << 30))
def test_after_every_batch_the_rest_is_that_of_an_unbroken_run(kit, kind, workers, later, size, order):
    stream = streams(kit)[kind]
    whole = kit.deliver(stream, size)
    schedule = random.Random(order)
    run = states_of(kit.Loader(stream, size, workers=workers, ahead=1 + order % 7, schedule=schedule))
    assert [batch for batch, _ in run] == whole
    for done, (_, state) in enumerate(run, 1):
        loader = kit.Loader(
            stream, size, workers=later, ahead=1 + order % 5, schedule=schedule, state=json.loads(state)
        )
        again = states_of(loader)
        assert [batch for batch, _ in again] == whole[done:]
        assert loader.first_state == json.loads(state), "a state saved at once is the same"
        if again:
            assert json.loads(again[-1][1])["merged"] == json.loads(run[-1][1])["merged"]


class Restarting(IterableDataset):
    """Its iterator goes back to its start at the end, and says where it stands."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return RestartingIterator(self.n)


class RestartingIterator:
    def __init__(self, n):
        self.n = n
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.n:
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return self.at

    def load_state_dict(self, state):
        self.at = state


def is_kept(sample):
    return sum(map(ord, str(sample))) % 3 > 0


SOURCES = {
    "count": lambda kit, n: kit.Count(n),
    "resumable": lambda kit, n: kit.Resumable(n),
    "restarting": lambda kit, n: Restarting(n),
    "wandering": lambda kit, n: kit.Wandering(n),
    "shards": lambda kit, n: kit.Shards([n, 0, 3, 1], lanes=2),
    "resumable shards": lambda kit, n: kit.ResumableShards([2, n, 1]),
}

STEPS = {
    "map": lambda kit, stream: stream.map(kit.with_draws),
    "filter": lambda kit, stream: stream.filter(is_kept),
    "shuffle": lambda kit, stream: stream.shuffle(3),
    "chain": lambda kit, stream: stream + kit.Resumable(3),
    "mix, first": lambda kit, stream: Mixture([stream, range(100, 104), Restarting(3)], [2, 1, 1], shuffle=True),
    "mix, last": lambda kit, stream: Mixture([stream, range(100, 104)], [2, 1], "last", "batch", batch_size=3),
    "rank 0": lambda kit, stream: stream.split_by_rank(0, 2),
    "rank 1, stop": lambda kit, stream: uneven(stream, 1, 2, "stop"),
    "rank 2, pad": lambda kit, stream: uneven(stream, 2, 3, "pad"),
}


def uneven(stream, rank, world, kind):
    """Split, if it can be: a generator does not know how long a shard is."""
    try:
        return stream.split_by_rank(rank, world, uneven=kind)
    except OptionError:
        return stream.split_by_rank(rank, world)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    n=st.integers(0, 7),
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    size=st.integers(1, 4),
    order=st.integers(0, 1 << 30),
)
@example(source="count", n=2, steps=["map", "filter"], size=2, order=0)  # what is kept depends on what was drawn
def test_whatever_is_made_of_streams_is_the_same_for_any_workers_and_after_a_resume(kit, source, n, steps, size, order):
    def make():
        stream = SOURCES[source](kit, n)
        for step in steps:
            stream = STEPS[step](kit, stream)
        return stream

    whole = kit.deliver(make(), size)
    schedule = random.Random(order)
    run = states_of(kit.Loader(make(), size, workers=1 + order % 3, ahead=1 + order % 7, schedule=schedule))
    assert [batch for batch, _ in run] == whole
    for done, (_, state) in enumerate(run, 1):
        again = kit.Loader(
            make(), size, workers=(order + done) % 4, ahead=3, schedule=schedule, state=json.loads(state)
        )
        assert list(again) == whole[done:]


@pytest.mark.parametrize("kind", [*KINDS, "restarting"])
def test_what_has_ended_stays_ended(kit, kind):
    iterator = open_stream((streams(kit) | {"restarting": Restarting(3)})[kind], OpenOptions(size=2))
    with seeding.use(SampleContext(Rewinder())):
        assert list(iterator)
        assert list(iterator) == []


def test_a_mixture_within_a_mixture_that_gave_nothing_once_is_begun_anew_after_a_resume_too(kit):
    def make():
        inner = Mixture([[], range(100, 104), [0, 1, 2]], [1, 2, 1])
        return Mixture([inner, range(1000, 1004)], [2, 1], "last", "batch", with_source=True)

    for seed in range(10):
        loader = kit.Loader(make(), 1, seed=seed)
        run = states_of(loader)
        for done, (_, state) in enumerate(run, 1):
            assert kit.deliver(make(), 1, seed=seed, state=json.loads(state)) == [batch for batch, _ in run[done:]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "rank" not in kind])
@settings(max_examples=8, deadline=None)
@given(workers=st.integers(1, 4), later=st.integers(0, 4), order=st.integers(0, 1 << 30))
def test_out_of_order_the_state_counts_what_was_delivered_ahead(kit, kind, workers, later, order):
    stream = streams(kit)[kind]
    whole = sorted(map(str, kit.deliver(stream, 2)))
    schedule = random.Random(order)
    loader = kit.Loader(stream, 2, workers=workers, ahead=6, schedule=schedule, in_order=False)
    delivered = []
    for batch, state in states_of(loader):
        delivered.append(batch)
        rest = kit.Loader(stream, 2, workers=later, ahead=3, schedule=schedule, in_order=False, state=json.loads(state))
        first = next(iter(rest), None)
        after = rest.plan.state()
        assert sorted(map(str, delivered + kit.deliver(stream, 2, state=json.loads(state)))) == whole
        chained = delivered + ([] if first is None else [first]) + kit.deliver(stream, 2, state=after)
        assert sorted(map(str, chained)) == whole


def test_states_are_short(kit):
    for kind in ("plain", "mixed", "exactly mixed", "resumable"):
        loader = kit.Loader(streams(kit)[kind], 2)
        assert all(len(state) < 512 for _, state in states_of(loader))
    loader = kit.Loader(kit.Shards([9] * 40), 2)
    assert all(len(state) < 1500 for _, state in states_of(loader))


def test_c15_a_stream_that_says_where_it_stands_is_not_replayed(kit):
    stream = kit.Resumable(100)
    loader = kit.Loader(stream, 5)
    batches = iter(loader)
    for _ in range(18):
        next(batches)
    assert stream.pulled == 90
    resumed = kit.Loader(kit.Resumable(100), 5, state=loader.plan.state())
    assert list(resumed) == [list(range(90, 95)), list(range(95, 100))]
    assert resumed.stream.pulled == 10
    assert not resumed.plan.replays


def test_c15_one_that_does_not_is_read_again_and_the_plan_says_so(kit):
    loader = kit.Loader(kit.Count(100), 5)
    next(iter(loader))
    state = loader.plan.state()
    assert kit.Plan(kit.Count(100), size=5, state=state).replays
    assert not kit.Plan(kit.Count(100), size=5).replays


def test_of_shards_only_the_open_ones_are_read_again(kit):
    opened = []

    class Noted(IterableDataset):
        num_shards = 4
        lanes = 2

        def shard(self, number):
            opened.append(number)
            return iter([(number, place) for place in range(4)])

    loader = kit.Loader(Noted(), 3)
    batches = iter(loader)
    delivered = [next(batches) for _ in range(4)]
    state = loader.plan.state()
    opened.clear()
    resumed = kit.Loader(Noted(), 3, state=state)
    rest = list(resumed)
    assert opened == [2, 3]
    assert not resumed.plan.replays
    assert delivered + rest == kit.deliver(Noted(), 3)


def test_another_batch_size_may_go_on(kit):
    for stream in (kit.Count(23), kit.Shards([9, 3, 7, 4])):
        loader = kit.Loader(stream, 4, workers=2)
        batches = iter(loader)
        delivered = [value for _ in range(3) for value in next(batches)]
        rest = kit.deliver(stream, 3, workers=3, state=loader.plan.state())
        assert sorted(delivered + [value for batch in rest for value in batch]) == sorted(stream)
        assert all(len(batch) == 3 for batch in rest[:-1])


@pytest.mark.parametrize("workers", range(3))
def test_a_stream_left_in_the_middle_begins_anew(kit, workers):
    stream = kit.Resumable(6).map(kit.negative) + kit.Resumable(3)
    for batches in (1, 2):
        loader = iter(kit.Loader(stream, 4))
        for _ in range(batches):
            next(loader)
        assert kit.deliver(stream, 4, workers=workers) == [[0, -1, -2, -3], [-4, -5, 0, 1], [2]]


def test_an_iterator_that_says_where_it_stands_is_asked_too(kit):
    class Steps:
        def __init__(self):
            self.at = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.at == 5:
                raise StopIteration
            self.at += 1
            return self.at - 1

        def state_dict(self):
            return self.at

        def load_state_dict(self, at):
            self.at = at

    class Stream(IterableDataset):
        def __iter__(self):
            return Steps()

    loader = kit.Loader(Stream(), 2)
    next(iter(loader))
    resumed = kit.Loader(Stream(), 2, state=loader.plan.state())
    assert list(resumed) == [[2, 3], [4]]
    assert not resumed.plan.replays


def test_a_state_that_the_stream_goes_on_changing_is_copied(kit):
    class Loose(kit.Resumable):
        def __init__(self, n):
            super().__init__(n)
            self.shown = {"at": 0}

        def state_dict(self):
            self.shown["at"] = self.at
            return self.shown

    loader = kit.Loader(Loose(6), 2)
    batches = iter(loader)
    next(batches)
    state = loader.plan.state()
    next(batches)
    assert state["lanes"] == [[2, 2, {"at": 2}]]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_stream_that_splits_itself_goes_on_with_the_same_workers_only(kit, workers):
    stream = kit.SelfSplitting(17)
    run = states_of(kit.Loader(stream, 2, workers=workers, ahead=4))
    for done, (_, state) in enumerate(run, 1):
        rest = kit.deliver(stream, 2, workers=workers, state=json.loads(state))
        assert [value for batch, _ in run[:done] for value in batch] + [value for batch in rest for value in batch] == [
            value for batch, _ in run for value in batch
        ]
    with pytest.raises(StateError, match=r"splits itself"):
        kit.deliver(stream, 2, workers=workers + 1, state=json.loads(run[0][1]))


def test_a_split_stream_goes_on_with_another_number_of_ranks_at_the_same_place(kit):
    def one(rank, world, state=None, batches=None, size=2):
        loader = kit.Loader(kit.Resumable(24).map(kit.with_draws).split_by_rank(rank, world), size, state=state)
        iterator = iter(loader)
        got = [value for _, batch in zip(range(99 if batches is None else batches), iterator) for value in batch]  # noqa: B905
        return got, loader.plan.state()

    first = [one(rank, 4, batches=1) for rank in range(4)]
    assert sorted(value for got, _ in first for value, _ in got) == list(range(8))
    state = first[0][1]
    rest = [one(rank, 2, state, size=4)[0] for rank in range(2)]
    assert sorted(value for got in rest for value, _ in got) == list(range(8, 24))
    own = dict(one(0, 1, size=4)[0])
    assert all(drawn[0] == own[value][0] for got in rest for value, drawn in got)
    with pytest.raises(StateError, match=r"2 samples on each of 4 ranks"):
        one(0, 3, state)


def test_a_state_of_one_rank_is_refused_on_another(kit):
    for stream in (kit.Shards(SIZES), kit.Count(20)):
        split = [stream.split_by_rank(rank, 2).filter(lambda value: True) for rank in (0, 1)]
        loader = kit.Loader(split[0], 2)
        next(iter(loader))
        state = loader.plan.state()
        assert kit.Plan(split[0], size=2, state=state).state() == state
        with pytest.raises(StateError, match=r"saved with \(0, 2\), got \(1, 2\)"):
            kit.Plan(split[1], size=2, state=state)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ("Count", "3 lanes"),
        ([3, 4], "3 lanes, .* 2 lanes"),
        ([3] * 17, "number of shards: saved with 16, got 17"),
    ],
)
def test_a_state_of_another_stream_is_refused_with_both_sides(kit, stream, words):
    loader = kit.Loader(kit.Shards([4] * (16 if len(stream) == 17 else 3)), 2)
    next(iter(loader))
    other = kit.Count(9) if stream == "Count" else kit.Shards(stream)
    with pytest.raises(StateError, match=words):
        kit.Plan(other, size=2, state=loader.plan.state())


@pytest.mark.parametrize("broken", [{}, {"kind": "stream"}, None, [], {"kind": "stream", "size": 2, "lanes": 3}])
def test_what_is_no_state_is_refused(kit, broken):
    if broken is not None:
        with pytest.raises(StateError):
            kit.Plan(kit.Count(3), size=2, state=broken)


def test_what_was_merged_at_the_end_cannot_be_cut_anew(kit):
    stream = kit.Shards([3, 3, 3])
    run = states_of(kit.Loader(stream, 2))
    assert [batch for batch, _ in run][-1] == [(2, 2)]
    state = json.loads(run[-2][1])
    assert state["merged"] == 2
    assert kit.deliver(stream, 2, state=state) == [[(2, 2)]]
    with pytest.raises(StateError, match=r"batch_size=2, .*; got 3 and 1"):
        kit.Plan(stream, size=3, state=state)


def test_a_state_of_nothing_fits_everything(kit):
    state = kit.Plan(kit.Count(3), size=2).state()
    assert kit.deliver(kit.Shards([2]), 5, workers=2, state=state) == [[(0, 0), (0, 1)]]
