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
from agnoload import AgnoloadWarning, DataLoader, FileStream, IterableDataset, Mixture, OptionError, StateError, seeding
from agnoload.pools.threads import ThreadPool
from agnoload.seeding import Rewinder, SampleContext
from agnoload.streams import read_lines
from agnoload.streams.iterators import OpenOptions
from agnoload.streams.shards import open_stream
from agnoload.testing import check_resume


def plain(batch):
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return batch.tolist() if isinstance(batch, np.ndarray) else batch


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


# ------------------------------------------------------------------------------------------------ at every batch

STREAMS = {
    "plain": lambda kit: kit.Count(10).map(kit.with_own_draw),
    "wandering": lambda kit: kit.Drawn(11).map(kit.with_own_draw),
    "with a state": lambda kit: kit.Resumable(11).map(kit.with_own_draw),
    "of another library": lambda kit: kit.Hublike(12, 4),
    "shards": lambda kit: kit.Shards(17, 5, lanes=3).map(kit.with_own_draw),
    "shards with a state": lambda kit: kit.ResumableShards(11, 4, lanes=3),
    "shuffled shards": lambda kit: kit.Shards(12, 4).shuffle(5),
    "filter": lambda kit: kit.Resumable(20).map(kit.negative).filter(kit.is_even),
    "chain": lambda kit: (kit.Resumable(5) + kit.Resumable(6).map(kit.negative)).map(kit.with_own_draw),
    "chain, one part without a state": lambda kit: kit.Resumable(5) + kit.Count(4),
    "chain of shards": lambda kit: kit.ResumableShards(5, 2) + kit.ResumableShards(8, 2),
    "rank": lambda kit: kit.Resumable(13).split_by_rank(0, 2),
    "rank, padded": lambda kit: kit.Resumable(13).split_by_rank(1, 2, uneven="pad"),
    "rank's shards": lambda kit: kit.ResumableShards(13, 5).split_by_rank(1, 2),
    "rank's shards, stopped": lambda kit: kit.Shards(13, 4).split_by_rank(0, 2, uneven="stop"),
    "mixture": lambda kit: Mixture([kit.Resumable(9).map(kit.negative), kit.Rows(7)], [2, 1], "last"),
    "exact mixture": lambda kit: Mixture([kit.Resumable(9), kit.Rows(7)], [2, 1], per="batch", shuffle=True),
    "mixture of mixtures": lambda kit: Mixture([Mixture([kit.Rows(9)], [1]), kit.Resumable(9)], [1, 1]),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_resumes_at_every_batch_with_any_number_of_threads(kit, name):
    check_resume(
        lambda num_workers=0: DataLoader(STREAMS[name](kit), 3, seed=1, num_workers=num_workers, worker_type="thread")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_it_does_so_in_processes(kit, name):
    check_resume(lambda num_workers=0: DataLoader(STREAMS[name](kit), 3, seed=1, num_workers=num_workers))


@pytest.mark.slow
def test_what_random_and_numpy_draw_is_the_same_after_a_resume_in_processes(kit):
    for make in (lambda: kit.Drawing(10), lambda: kit.ResumableShards(11, 4).map(kit.with_draws)):
        check_resume(lambda num_workers=0, make=make: DataLoader(make(), 3, seed=1, num_workers=num_workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_that_split_themselves_resume_with_as_many_workers(kit, workers):
    options = {"seed": 1, "num_workers": workers, "worker_type": "thread"}
    init = kit.split_between if workers else None
    check_resume(lambda: DataLoader(kit.SelfSplitting(11), 2, **options))
    check_resume(lambda: DataLoader(kit.Between(0, 11), 2, worker_init_fn=init, **options))


def test_the_edges_of_a_stream(kit):
    """Drop last, without batches, empty, and a length that the batches divide."""
    for size, drop_last in itertools.product((4, 5), (False, True)):
        check_resume(lambda s=size, d=drop_last: DataLoader(kit.Resumable(10), s, drop_last=d, seed=1))
    check_resume(lambda: DataLoader(kit.Resumable(4), None, seed=1))
    check_resume(lambda: DataLoader(kit.ResumableShards(9, 3), None, seed=1))
    check_resume(lambda: DataLoader(kit.Resumable(2), 4, drop_last=True, seed=1))


def test_a_rank_whose_last_batch_is_full_while_the_last_round_is_not_resumes_behind_it(kit):
    """To read the rank's last sample is to see the end of the stream, which by then has gone back to its start."""
    check_resume(lambda: DataLoader(kit.Resumable(7).split_by_rank(0, 2).map(kit.with_own_draw), 2, seed=1))


def test_lines_of_files_are_shuffled_filtered_and_resumed(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{number}\n" for number in range(9)))
    paths = sorted(tmp_path.glob("*.txt"))

    def make(num_workers=0):
        stream = FileStream(paths, read_lines).filter(lambda line: not line.endswith("5")).shuffle(4)
        return DataLoader(stream, 4, seed=1, num_workers=num_workers, worker_type="thread")

    check_resume(make)
    assert sorted(flat(make())) == [f"{name}{number}" for name in "abc" for number in range(9) if number != 5]


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
    "chain": lambda kit, stream: stream + kit.Resumable(3),
    "mix, first": lambda kit, stream: Mixture([stream, range(100, 104), kit.Restarting(3)], [2, 1, 1], shuffle=True),
    "mix, last": lambda kit, stream: Mixture([stream, range(100, 104)], [2, 1], "last", "batch", batch_size=3),
    "rank 0": lambda kit, stream: stream.split_by_rank(0, 2),
    "rank 1, stop": lambda kit, stream: uneven(stream, 1, 2, "stop"),
    "rank 2, pad": lambda kit, stream: uneven(stream, 2, 3, "pad"),
}


def is_kept(sample):
    return sum(map(ord, str(sample))) % 3 > 0


def uneven(stream, rank, world, kind):
    """Split, if it can be: some do not know how long a shard is."""
    try:
        return stream.split_by_rank(rank, world, uneven=kind)
    except OptionError:
        return stream.split_by_rank(rank, world)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
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

    whole = deliver(make(), size)
    states = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AgnoloadWarning)  # fewer lanes than workers
        options = {"num_workers": workers, "worker_type": "thread", "collate_fn": list, "seed": 7}
        with DataLoader(make(), size, **options) as loader:
            for done, batch in enumerate(loader):
                assert batch == whole[done]
                states.append(loader.state_dict())
    assert len(states) == len(whole)
    for done, state in enumerate(states[:-1], 1):
        assert deliver(make(), size, (workers + done) % 3, state=state) == whole[done:]


@pytest.mark.parametrize("name", [*STREAMS, "restarting"])
def test_what_has_ended_stays_ended(kit, name):
    make = (STREAMS | {"restarting": lambda kit: kit.Restarting(3)})[name]
    iterator = open_stream(make(kit), OpenOptions(size=2))
    with seeding.use(SampleContext(Rewinder())):
        assert list(iterator)
        assert [next(iterator, None) for _ in range(20)] == [None] * 20


def test_a_mixture_in_a_mixture_that_gave_nothing_once_starts_again_after_a_resume_too(kit):
    def make(seed):
        inner = Mixture([[], range(100, 104), [0, 1, 2]], [1, 2, 1])
        mixed = Mixture([inner, range(1000, 1004)], [2, 1], "last", "batch", with_source=True)
        return DataLoader(mixed, 1, seed=seed, collate_fn=list)

    for seed in range(3):
        check_resume(lambda seed=seed: make(seed))


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
    assert len(json.dumps(after(STREAMS["mixture"](kit), 2, 3)[1])) < 1024
    assert len(json.dumps(after(kit.Sized([9] * 40), 2, 30)[1])) < 2048


@pytest.mark.parametrize("workers", range(3))
def test_a_stream_that_was_left_in_the_middle_starts_from_its_beginning(kit, deliver, workers):
    stream = kit.Resumable(6).map(kit.negative) + kit.Resumable(3)
    for batches in (1, 2):
        after(stream, 4, batches)
        assert deliver(stream, 4, workers) == [[-1, -2, -3, -4], [-5, -6, 0, 1], [2]]


# ------------------------------------------------------------------------------------------------ with other options


def test_another_batch_size_may_go_on(kit, deliver):
    for stream in (kit.Count(23), kit.Sized([9, 3, 7, 4])):
        delivered, state = after(stream, 4, 3, num_workers=2, worker_type="thread")
        rest = deliver(stream, 3, 3, state=state)
        assert sorted(flat(delivered + rest)) == list(range(23))
        assert all(len(batch) == 3 for batch in rest[:-1])


def test_what_was_merged_at_the_end_resumes_with_the_same_batch_size_only(kit, deliver):
    stream = kit.Sized([3, 3, 3])
    delivered, state = after(stream, 2, 4)
    assert delivered + deliver(stream, 2, state=state) == deliver(stream, 2)
    with pytest.raises(StateError, match=r"batch_size=2, .*; got 3 and 1"):
        deliver(stream, 3, state=state)


def test_a_state_of_nothing_fits_everything(kit, deliver):
    _, state = after(kit.Sized([3] * 5), 2, 0)
    assert deliver(kit.Sized([2]), 5, 2, state=state) == [[0, 1]]


def test_fewer_ranks_resume_at_the_same_place(kit, deliver):
    def split(rank, world):
        return kit.Resumable(24).map(kit.with_own_draw).split_by_rank(rank, world)

    first = [after(split(rank, 4), 2, 1) for rank in range(4)]
    assert sorted(sample["value"] for batches, _ in first for sample in flat(batches)) == list(range(8))
    state = first[0][1]
    rest = flat(flat(deliver(split(rank, 2), 4, state=state)) for rank in range(2))
    assert sorted(sample["value"] for sample in rest) == list(range(8, 24))
    whole = flat(deliver(split(0, 1), 4))
    assert all(sample in whole for sample in rest)
    with pytest.raises(StateError, match=r"2 samples on each of 4 ranks"):
        deliver(split(0, 3), 2, state=state)


def test_a_state_of_one_rank_is_rejected_on_another(kit, deliver):
    for stream in (kit.Sized([3, 4, 1, 6]), kit.Count(20)):
        split = [stream.split_by_rank(rank, 2).filter(lambda value: True) for rank in (0, 1)]
        _, state = after(split[0], 2, 1)
        with pytest.raises(StateError, match=r"saved with \(0, 2\), got \(1, 2\)"):
            deliver(split[1], 2, state=state)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [(None, "3 lanes"), ([3, 4], "3 lanes, .* 2 lanes"), ([3] * 17, "number of shards: saved with 16, got 17")],
)
def test_a_state_of_another_stream_is_rejected_with_both_sides(kit, deliver, sizes, words):
    _, state = after(kit.Sized([4] * (16 if sizes and len(sizes) == 17 else 3)).map(int), 2, 1)
    other = kit.Count(9) if sizes is None else kit.Sized(sizes)
    with pytest.raises(StateError, match=words):
        deliver(other.map(int), 2, state=state)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_out_of_order_a_resumed_stream_gives_the_others_exactly_once(kit, workers):
    def make():
        return DataLoader(kit.ResumableShards(30, 3), 2, seed=1, num_workers=workers, in_order=False)

    for place in range(0, 15, 2):
        loader = make()
        before = [plain(batch) for batch in itertools.islice(loader, place)]
        state = through_json(loader.state_dict())
        loader.close()
        resumed = make()
        resumed.load_state_dict(state)
        after = [plain(batch) for batch in resumed]
        assert sorted(value for batch in before + after for value in batch) == list(range(30)), place


def test_a_state_of_a_stream_that_splits_itself_is_refused_with_other_workers(kit):
    loader = DataLoader(kit.SelfSplitting(11), 2, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    other = DataLoader(kit.SelfSplitting(11), 2, num_workers=3)
    with pytest.raises(StateError, match=r"2 workers.*3 workers"):
        other.load_state_dict(state)


def test_more_ranks_go_on_where_fewer_stood(kit):
    def make(rank, world, size):
        stream = kit.Count(48).split_by_rank(rank, world).map(kit.with_own_draw)
        return DataLoader(stream, size, seed=0, num_workers=2)

    loader = make(0, 2, 4)
    next(iter(loader))
    state = through_json(loader.state_dict())
    loader.close()
    unbroken = [[plain(batch) for batch in make(rank, 2, 4)][1:] for rank in (0, 1)]
    resumed = []
    for rank in range(4):
        part = make(rank, 4, 2)
        part.load_state_dict(state)
        with pytest.warns(AgnoloadWarning, match="reads the stream again"):
            resumed.append([plain(batch) for batch in part])
    for step in range(5):
        expected = {pair for part in unbroken for pair in zip(*part[step].values(), strict=True)}
        found = {pair for part in resumed for pair in zip(*part[step].values(), strict=True)}
        assert found == expected


def test_c15_a_stream_with_a_state_is_not_replayed_and_one_without_says_so(kit, tmp_path):
    log = tmp_path / "log"
    loader = DataLoader(kit.Resumable(1000, log), 2)
    for _ in itertools.islice(loader, 465):
        pass
    state = through_json(loader.state_dict())
    assert log.stat().st_size == 930
    resumed = DataLoader(kit.Resumable(1000, log), 2)
    resumed.load_state_dict(state)
    assert sum(len(batch) for batch in resumed) == 70
    assert log.stat().st_size == 1000
    assert sum(len(batch) for batch in resumed) == 1000
    loader = DataLoader(kit.Count(20), 2)
    next(iter(loader))
    resumed = DataLoader(kit.Count(20), 2)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(AgnoloadWarning, match="no state_dict of its own"):
        assert next(iter(resumed)).tolist() == [2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_over_a_stream_cross_epochs_and_resume(kit, workers):
    def make():
        return DataLoader(kit.Resumable(10), 4, seed=1, num_workers=workers)

    loader = make()
    found, states = [], []
    for batch in loader.steps(8):
        found.append(batch.tolist())
        states.append((loader.epoch, through_json(loader.state_dict())))
    loader.close()
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert found == [*epoch, *epoch, *epoch[:2]]
    assert [epoch for epoch, _ in states] == [0, 0, 1, 1, 1, 2, 2, 2]
    for place, (_, state) in enumerate(states):
        resumed = make()
        resumed.load_state_dict(state)
        with resumed:
            assert [batch.tolist() for batch in resumed.steps(7 - place)] == found[place + 1 :], place


@pytest.mark.parametrize("shards", [0, 2])
def test_c57_the_next_epoch_of_a_stream_is_asked_for_while_the_last_batches_are_used(kit, monkeypatch, shards):
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_steps_over_a_stream_that_gives_nothing_are_an_error(kit, workers, kind):
    for stream in (kit.Count(0), kit.Shards(0, 3), kit.Count(3).map(kit.fails)):
        loader = DataLoader(stream, 2, num_workers=workers, worker_type=kind, on_error="skip")
        with loader, pytest.raises(OptionError, match=r"steps\(5\) .* epoch 0 has none after 0"):
            next(loader.steps(5))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_steps_end_at_an_epoch_without_a_batch_however_far_the_next_ones_were_asked_for(kit, workers):
    def make():
        return DataLoader(kit.Varying([3, 5, 0, 4]), 2, num_workers=workers, worker_type="thread")

    def all_of(loader, words):
        found = []
        with pytest.raises(OptionError, match=words):
            found += ((batch.tolist(), through_json(loader.state_dict())) for batch in loader.steps(11))
        return found

    found = all_of(make(), r"steps\(11\) .* epoch 2 has none after 5 steps")
    assert [batch for batch, _ in found] == [[0, 1], [2], [0, 1], [2, 3], [4]]
    for place, (_, state) in enumerate(found[:-1]):
        resumed = make()
        resumed.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AgnoloadWarning)  # it is read again
            rest = all_of(resumed, f"epoch 2 has none after {4 - place} steps")
        assert rest == found[place + 1 :]


def test_steps_over_a_sampler_that_gives_nothing_in_one_epoch_say_so():
    epochs = [[[0, 1], [2]], [], [[3]]]

    class Batches:
        def __iter__(self):
            return iter(epochs.pop(0))

    found = []
    with pytest.raises(OptionError, match=r"steps\(4\) .* epoch 1 has none after 2 steps"):
        found += (batch.tolist() for batch in DataLoader(range(4), batch_sampler=Batches()).steps(4))
    assert found == [[0, 1], [2]]


def test_a_stream_that_can_be_read_only_once_is_one_warning(kit):
    class Once(agnoload.IterableDataset):
        def __init__(self):
            self.left = iter(range(3))

        def __iter__(self):
            return self.left

    loader = DataLoader(Once(), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    with pytest.warns(AgnoloadWarning, match="gives nothing any more") as told:
        assert list(loader) == list(loader) == []
    assert len(told) == 1
    empty = DataLoader(kit.Count(0), 2)
    assert list(empty) == list(empty) == []
