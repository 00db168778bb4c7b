"""Streams that resume where a state was saved, at every batch, with any workers."""

from __future__ import annotations

import itertools
import json
import threading
import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import AgnoloadWarning, DataLoader, IterableDataset, Mixture, OptionError, StateError, seeding
from agnoload.pools.threads import ThreadPool
from agnoload.seeding import Rewinder, SampleContext
from agnoload.streams.iterators import OpenOptions
from agnoload.streams.shards import open_stream
from agnoload.testing import check_resume


def through_json(state):
    back = json.loads(json.dumps(state))
    assert back == state
    return back


def after(stream, size, batches, **options):
    """What a loader delivers first, and its state then."""
    with DataLoader(stream, size, collate_fn=list, seed=7, **options) as loader:
        return list(itertools.islice(loader, batches)), through_json(loader.state_dict())


def flat(batches):
    return [value for batch in batches for value in batch]


# ------------------------------------------------------------------------------------------------ any chain of steps

SOURCES = {
    "count": lambda kit, n: kit.Count(n),
    "resumable": lambda kit, n: kit.Resumable(n),
    "restarting": lambda kit, n: kit.Restarting(n),
    "drawn": lambda kit, n: kit.Drawn(n),
    "shards": lambda kit, n: kit.Sized([n, 0, 3, 1], lanes=2),
    "shards with a state": lambda kit, n: kit.ResumableShards(n + 3, 3),
}

STEPS = {
    "map": lambda kit, stream: stream.map(kit.with_own_draw),
    "filter": lambda kit, stream: stream.filter(is_kept),
    "shuffle": lambda kit, stream: stream.shuffle(3),
    "take": lambda kit, stream: stream.take(5),
    "batch": lambda kit, stream: stream.batch(2),
    "pack": lambda kit, stream: stream.map(tokens).pack(3),
    "chain": lambda kit, stream: stream + kit.Resumable(3),
    "mix, first": lambda kit, stream: Mixture([stream, range(100, 104), kit.Restarting(3)], [2, 1, 1], shuffle=True),
    "mix, last": lambda kit, stream: Mixture([stream, range(100, 104)], [3, 2], "last", "batch", batch_size=3),
    "rank 0": lambda kit, stream: stream.split_by_rank(0, 2),
    "rank 1, stop": lambda kit, stream: uneven(stream, 1, 2, "stop"),
    "rank 2, pad": lambda kit, stream: uneven(stream, 2, 3, "pad"),
}


def is_kept(sample):
    return sum(map(ord, str(sample))) % 3 > 0


def tokens(sample):
    return [ord(character) for character in str(sample)][: len(str(sample)) % 5]


def listed(batches):
    """Packed rows hold arrays, which `==` compares one by one."""
    return json.loads(json.dumps(batches, default=np.ndarray.tolist))


def uneven(stream, rank, world, kind):
    """Split, if it can be: some do not know how long a shard is."""
    try:
        return stream.split_by_rank(rank, world, uneven=kind)
    except OptionError:
        return stream.split_by_rank(rank, world)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    n=st.integers(0, 7),
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    size=st.integers(1, 4),
    workers=st.integers(0, 3),
)
@example(source="count", n=2, steps=["map", "filter"], size=2, workers=0)  # what is kept depends on what was drawn
def test_whatever_is_made_of_streams_is_the_same_for_any_workers_and_after_a_resume(
    kit, deliver, source, n, steps, size, workers
):
    def make():
        stream = SOURCES[source](kit, n)
        for step in steps:
            stream = STEPS[step](kit, stream)
        return stream

    whole = listed(deliver(make(), size))
    states = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AgnoloadWarning)  # fewer lanes than workers
        options = {"num_workers": workers, "worker_type": "thread", "collate_fn": list, "seed": 7}
        with DataLoader(make(), size, **options) as loader:
            for done, batch in enumerate(loader):
                assert listed(batch) == whole[done]
                states.append(loader.state_dict())
    assert len(states) == len(whole)
    for done, state in enumerate(states[:-1], 1):
        assert listed(deliver(make(), size, (workers + done) % 3, state=state)) == whole[done:]


# ------------------------------------------------------------------------------------------------ at every batch

STREAMS = {
    "of another library": lambda kit: kit.Hublike(12, 4),
    "shards": lambda kit: kit.Shards(17, 5, lanes=3).map(kit.with_own_draw),
    "shards with a state": lambda kit: kit.ResumableShards(11, 4, lanes=3).shuffle(1),
    "chain, one part without a state": lambda kit: kit.Resumable(5) + kit.Count(4),
    # Its last batch is full, its last round not: to read its last sample is to see the end of the stream, which by then
    # has gone back to its start.
    "rank, its last round not full": lambda kit: kit.Resumable(11).split_by_rank(0, 2).map(kit.with_own_draw),
    "rank's shards, stopped": lambda kit: kit.Shards(13, 4).split_by_rank(0, 2, uneven="stop"),
    "exact mixture": lambda kit: Mixture([kit.Resumable(9), kit.Rows(7)], [5, 2], per="batch", shuffle=True),
    "mixture of a mixture that may give nothing": lambda kit: Mixture(
        [Mixture([[], range(100, 104), [0, 1, 2]], [1, 2, 1]), range(1000, 1004)], [2, 1], "last", "batch"
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_resumes_at_every_batch_with_any_number_of_threads(kit, name):
    check_resume(
        lambda num_workers=0: DataLoader(STREAMS[name](kit), 3, seed=1, num_workers=num_workers, worker_type="thread")
    )


def test_what_has_ended_stays_ended(kit):
    with seeding.use(SampleContext(Rewinder())):
        for stream in (*(make(kit) for make in STREAMS.values()), *(make(kit, 3) for make in SOURCES.values())):
            iterator = open_stream(stream, OpenOptions(size=2))
            assert list(iterator)
            assert [next(iterator, None) for _ in range(20)] == [None] * 20, stream


@pytest.mark.slow
def test_what_random_and_numpy_draw_is_the_same_after_a_resume_in_processes(kit):
    for make in (
        lambda: kit.Drawing(7),
        lambda: kit.ResumableShards(7, 3).map(kit.with_draws),
        lambda: STREAMS["exact mixture"](kit),
    ):
        check_resume(lambda num_workers=0, make=make: DataLoader(make(), 3, seed=1, num_workers=num_workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_that_split_themselves_resume_with_as_many_workers(kit, workers):
    options = {"seed": 1, "num_workers": workers, "worker_type": "thread"}
    init = kit.split_between if workers else None
    check_resume(lambda: DataLoader(kit.SelfSplitting(11), 2, **options))
    check_resume(lambda: DataLoader(kit.Count(11), 2, worker_init_fn=init, **options))
    if workers:
        _, state = after(kit.SelfSplitting(11), 2, 1, num_workers=2, worker_type="thread")
        with pytest.raises(StateError, match=r"2 workers.*3 workers"):
            DataLoader(kit.SelfSplitting(11), 2, num_workers=3, worker_type="thread").load_state_dict(state)


def test_the_edges_of_a_stream(kit):
    """Drop last, without batches, empty, and a length that the batches divide."""
    for size, drop_last in itertools.product((4, 5), (False, True)):
        check_resume(lambda s=size, d=drop_last: DataLoader(kit.Resumable(10), s, drop_last=d, seed=1))
    check_resume(lambda: DataLoader(kit.Resumable(4), None, seed=1))
    check_resume(lambda: DataLoader(kit.ResumableShards(9, 3), None, seed=1))
    check_resume(lambda: DataLoader(kit.Resumable(2), 4, drop_last=True, seed=1))


# ------------------------------------------------------------------------------------------------ what is read again


def test_of_shards_only_the_open_ones_are_read_again(deliver):
    opened = []

    class Noted(IterableDataset):
        num_shards = 4
        lanes = 2

        def shard(self, number):
            opened.append(number)
            return iter([(number, place) for place in range(4)])

    delivered, state = after(Noted(), 3, 4)
    opened.clear()
    rest = deliver(Noted(), 3, state=state)
    assert opened == [2, 3]
    assert delivered + rest == deliver(Noted(), 3)


def test_a_stream_with_a_state_is_not_replayed_and_one_without_says_so(kit, load, tmp_path):
    log = tmp_path / "log"
    _, state = after(kit.Resumable(1000, log), 2, 465)
    assert log.stat().st_size == 930
    resumed = DataLoader(kit.Resumable(1000, log), 2)
    resumed.load_state_dict(state)
    assert sum(len(batch) for batch in resumed) == 70
    assert log.stat().st_size == 1000
    assert sum(len(batch) for batch in resumed) == 1000
    _, state = after(kit.Count(20), 2, 1)
    resumed = DataLoader(kit.Count(20), 2)
    resumed.load_state_dict(state)
    with pytest.warns(AgnoloadWarning, match="no state_dict of its own"):
        assert next(iter(resumed)).tolist() == [2, 3]


def test_an_iterator_that_says_where_it_is_is_asked_too(kit, deliver):
    delivered, state = after(kit.Restarting(5), 2, 1)
    assert state["stream"]["lanes"] == [[2, 2, 2]]
    assert delivered + deliver(kit.Restarting(5), 2, state=state) == [[0, 1], [2, 3], [4]]


def test_a_state_that_the_stream_goes_on_changing_is_copied(kit):
    shown = {}

    class Loose(kit.Resumable):
        def state_dict(self):
            shown["at"] = self.at
            return shown

    loader = DataLoader(Loose(6), 2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    assert state["stream"]["lanes"] == [[2, 2, {"at": 2}]]


def test_states_are_short(kit):
    assert len(json.dumps(after(STREAMS["exact mixture"](kit), 2, 3)[1])) < 1024
    assert len(json.dumps(after(kit.Sized([9] * 40), 2, 30)[1])) < 2048


@settings(max_examples=12)
@given(n=st.integers(0, 8), more=st.integers(0, 4), batches=st.integers(0, 5), workers=st.integers(0, 2))
def test_a_stream_that_was_left_in_the_middle_starts_from_its_beginning(kit, deliver, n, more, batches, workers):
    stream = kit.Resumable(n).map(kit.negative) + kit.Resumable(more)
    after(stream, 2, batches)
    assert flat(deliver(stream, 4, workers)) == [*(-1 - value for value in range(n)), *range(more)]


# ------------------------------------------------------------------------------------------------ with other options


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    sharded=st.booleans(),
    size=st.integers(1, 4),
    batches=st.integers(0, 4),
    other=st.integers(1, 5),
    workers=st.integers(0, 2),
)
def test_another_batch_size_may_go_on_but_within_what_was_merged_at_the_end(
    kit, deliver, sizes, sharded, size, batches, other, workers
):
    stream = kit.Sized(sizes) if sharded else kit.Count(sum(sizes))
    delivered, state = after(stream, size, batches)
    left = sum(sizes) - len(flat(delivered))
    merging = sharded and batches > sum(each // size for each in sizes) and left
    if other == size or not merging:
        rest = deliver(stream, other, workers, state=state)
        if left:  # else the next epoch begins
            assert sorted(flat(delivered + rest)) == list(range(sum(sizes)))
            assert all(len(batch) == other for batch in rest[:-1])
    else:
        with pytest.raises(StateError, match=rf"batch_size={size}, .*; got {other} and 1"):
            deliver(stream, other, workers, state=state)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [(None, "3 lanes"), ([3, 4], "3 lanes, .* 2 lanes"), ([3] * 17, "number of shards: saved with 16, got 17")],
)
def test_a_state_of_another_stream_is_rejected_with_both_sides(kit, deliver, sizes, words):
    _, state = after(kit.Sized([4] * (16 if sizes and len(sizes) == 17 else 3)).map(int), 2, 1)
    other = kit.Count(9) if sizes is None else kit.Sized(sizes)
    with pytest.raises(StateError, match=words):
        deliver(other.map(int), 2, state=state)
    _, state = after(kit.Sized([3] * 5), 2, 0)
    assert deliver(kit.Sized([2]), 5, 2, state=state) == [[0, 1]], "a state of nothing fits everything"


@settings(max_examples=10)
@given(place=st.integers(0, 14), before=st.integers(1, 3), later=st.integers(0, 3), sharded=st.booleans())
def test_out_of_order_a_resumed_stream_gives_the_others_exactly_once(kit, deliver, place, before, later, sharded):
    def make():
        return kit.ResumableShards(30, 3) if sharded else kit.Resumable(30)

    delivered, state = after(make(), 2, place, num_workers=before, worker_type="thread", in_order=False)
    rest = deliver(make(), 2, later, state=state, in_order=False)
    assert sorted(flat(delivered + rest)) == list(range(30))


# ------------------------------------------------------------------------------------------------ over epochs


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    size=st.integers(1, 3),
    place=st.integers(0, 12),
    workers=st.integers(0, 3),
)
def test_steps_cross_epochs_resume_and_end_at_an_epoch_without_a_batch(kit, sizes, size, place, workers):
    sizes = [*sizes, 0]
    batches = [list(range(n))[start : start + size] for n in sizes for start in range(0, n, size)]
    batches = batches[: sum(-(-n // size) for n in sizes[: sizes.index(0)])]

    def all_of(loader, steps):
        found = []
        with pytest.raises(OptionError, match=rf"steps\({steps}\) .* epoch {sizes.index(0)} has none after"):
            found += ((batch.tolist(), loader.state_dict()) for batch in loader.steps(steps))
        return found

    def make():
        return DataLoader(
            kit.OfEpoch(lambda epoch: range(sizes[epoch])), size, num_workers=workers, worker_type="thread"
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AgnoloadWarning)  # it is read again
        found = all_of(make(), 100)
        assert [batch for batch, _ in found] == batches
        if place < len(found):
            resumed = make()
            resumed.load_state_dict(found[place][1])
            assert [batch for batch, _ in all_of(resumed, 99)] == batches[place + 1 :]


@pytest.mark.parametrize("shards", [0, 2])
def test_the_next_epoch_is_asked_for_while_the_last_batches_are_used(kit, monkeypatch, shards):
    """A loader that is always ahead of its user: whatever was asked for is there when the user asks again."""
    begun = [threading.Event() for _ in range(3)]

    def sample(value):
        begun[agnoload.get_worker_info().epoch].set()
        return value

    monkeypatch.setattr(ThreadPool, "ready", lambda pool: bool(pool._open))
    stream = (kit.Shards(8, shards) if shards else kit.Count(8)).map(sample)
    steps = DataLoader(stream, 2, num_workers=2, worker_type="thread").steps(8)
    assert [len(next(steps)) for _ in range(4)] == [2, 2, 2, 2]
    assert begun[1].wait(60)  # nobody has asked for its first batch yet
    assert sum(len(batch) for batch in steps) == 8


def test_steps_over_a_stream_of_bad_samples_or_of_none_are_an_error(kit, readers):
    for stream in (kit.Count(0), kit.Shards(0, 3), kit.Count(3).map(kit.FailsAt(0, 1, 2))):
        loader = DataLoader(stream, 2, on_error="skip", **readers)
        with loader, pytest.raises(OptionError, match=r"steps\(5\) .* epoch 0 has none after 0"):
            next(loader.steps(5))


def test_a_stream_that_can_be_read_only_once_is_one_warning(kit):
    class Once(IterableDataset):
        def __init__(self):
            self.left = iter(range(3))

        def __iter__(self):
            return self.left

    loader = DataLoader(Once(), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    with pytest.warns(AgnoloadWarning, match="gives nothing any more") as caught:
        assert list(loader) == list(loader) == []
    assert len(caught) == 1
    empty = DataLoader(kit.Count(0), 2)
    assert list(empty) == list(empty) == []
