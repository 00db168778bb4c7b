"""Who yields what: the batches are those of one reader, whoever reads and whenever the answers come."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import seeding, worker_info
from agnoload.errors import AgnoloadError, OptionError, SampleStopped
from agnoload.fetching.stream_reader import StreamReader
from agnoload.seeding import Rewinder, SampleContext
from agnoload.streams import ChainDataset, IterableDataset, Mixture, is_stream


def sizes_of(batches):
    return [len(batch) for batch in batches]


def values_of(batches):
    return [value for batch in batches for value in batch]


def streams(kit):
    """One of each kind, made anew: some draw while they are read, some when a sample is made, some both."""
    sizes = [3, 4, 1, 6, 0, 2]
    return {
        "plain": kit.Count(10),
        "drawing": kit.Drawing(11).map(kit.with_draws),
        "wandering": kit.Wandering(13).map(kit.with_draws),
        "filtered": kit.Drawing(20).map(kit.with_draws).filter(lambda sample: sample[0][0] % 3),
        "shuffled": kit.Drawing(17).map(kit.with_draws).shuffle(5).map(kit.with_draws),
        "resumable": kit.Resumable(11).map(kit.with_draws),
        "chained": kit.Drawing(4).map(kit.with_draws) + kit.Count(3).map(kit.with_draws),
        "mixed": Mixture([kit.Drawing(9), [100, 101, 102]], [2, 1], stop="last").map(kit.with_draws),
        "exactly mixed": Mixture([kit.Count(19), list(range(100, 108))], [2, 1], per="batch", shuffle=True),
        "shards": kit.Shards(sizes).map(kit.with_draws),
        "shards, two lanes": kit.Shards(sizes, lanes=2).map(kit.with_draws),
        "shuffled shards": kit.Shards(sizes).shuffle(3).map(kit.with_draws),
        "filtered shards": kit.ResumableShards(sizes).filter(lambda sample: sample[1] % 2),
        "chained shards": kit.Shards([2, 5]) + kit.Shards([3]),
        "a rank": kit.Drawing(11).map(kit.with_draws).split_by_rank(1, 2),
        "a padded rank": kit.Drawing(11).map(kit.with_draws).split_by_rank(1, 2, uneven="pad"),
        "a rank's shards": kit.Shards(sizes).map(kit.with_draws).split_by_rank(1, 2),
    }


KINDS = [
    "plain",
    "drawing",
    "wandering",
    "filtered",
    "shuffled",
    "resumable",
    "chained",
    "mixed",
    "exactly mixed",
    "shards",
    "shards, two lanes",
    "shuffled shards",
    "filtered shards",
    "chained shards",
    "a rank",
    "a padded rank",
    "a rank's shards",
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    workers=st.integers(1, 5),
    size=st.integers(1, 5),
    ahead=st.integers(1, 12),
    drop_last=st.booleans(),
    order=st.integers(0, 1 << 30),
)
def test_any_workers_and_any_interleaving_give_the_batches_of_one_reader(
    kit, kind, workers, size, ahead, drop_last, order
):
    stream = streams(kit)[kind]
    alone = kit.deliver(stream, size, drop_last=drop_last)
    together = kit.deliver(
        stream, size, drop_last=drop_last, workers=workers, ahead=ahead, schedule=random.Random(order)
    )
    assert together == alone


def test_two_epochs_differ_in_their_draws_and_one_epoch_repeats(kit):
    for kind in KINDS:
        once, again, next_one = (kit.deliver(streams(kit)[kind], 4, epoch=epoch) for epoch in (0, 0, 1))
        assert once == again, kind
        if kind not in {"plain", "filtered shards", "chained shards"}:
            assert once != next_one, kind


@pytest.mark.parametrize("workers", range(5))
def test_c10_a_stream_is_delivered_once_in_the_order_of_one_reader(kit, workers):
    assert kit.deliver(kit.Count(8), 2, workers=workers, ahead=4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("workers", range(5))
def test_c10_shards_are_delivered_once(kit, workers):
    batches = kit.deliver(kit.Shards([4, 3, 1]), 2, workers=workers, ahead=4)
    assert sorted(values_of(batches)) == [
        (shard, place) for shard, size in enumerate([4, 3, 1]) for place in range(size)
    ]
    assert sizes_of(batches) == [2, 2, 2, 2]


@pytest.mark.parametrize("workers", range(5))
def test_c10_a_stream_that_splits_itself_is_left_alone(kit, workers):
    batches = kit.deliver(kit.SelfSplitting(10), 3, workers=workers, ahead=5)
    assert sorted(value for value, _ in values_of(batches)) == list(range(10))
    assert sizes_of(batches) == [3, 3, 3, 1]
    for number in range(3):
        assert len({drawn[number] for _, drawn in values_of(batches)}) == 10, "two samples drew the same"


@pytest.mark.parametrize("workers", range(1, 4))
def test_c10_a_stream_that_a_worker_init_fn_splits_is_left_alone(kit, workers):
    loader = kit.Loader(kit.Count(9), 2, workers=workers, ahead=3, self_sharded=True)
    batches = iter(loader)
    first = next(batches)
    for worker in loader.pool:
        assert worker.stream.n == 9
    assert sorted(values_of([first, *batches])) == sorted(list(range(9)) * workers), "each yields all that it has"


def test_c10_three_shards_over_four_workers_over_two_ranks(kit):
    shards = kit.Shards([4, 3, 1])
    batches = []
    for rank in range(2):
        batches += kit.deliver(shards.split_by_rank(rank, 2), 2, workers=4, ahead=6)
    assert sorted(values_of(batches)) == [
        (shard, place) for shard, size in enumerate([4, 3, 1]) for place in range(size)
    ]


@pytest.mark.parametrize("workers", range(4))
@pytest.mark.parametrize("make", ["Count", "Shards"])
def test_c11_sizes_are_those_of_one_reader(kit, workers, make):
    ten, twelve = (kit.Count(10), kit.Count(12)) if make == "Count" else (kit.Shards([5, 4, 1]), kit.Shards([6, 6]))
    assert sizes_of(kit.deliver(ten, 4, workers=workers, ahead=5)) == [4, 4, 2]
    assert sizes_of(kit.deliver(ten, 4, workers=workers, ahead=5, drop_last=True)) == [4, 4]
    assert sizes_of(kit.deliver(twelve, 8, workers=workers, ahead=5)) == [8, 4]


@given(
    sizes=st.lists(st.integers(0, 7), max_size=6),
    lanes=st.integers(1, 4),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_c11_however_it_is_cut_into_shards_the_number_of_batches_is_that_of_the_whole(
    kit, sizes, lanes, size, drop_last
):
    batches = kit.deliver(kit.Shards(sizes, lanes), size, drop_last=drop_last)
    total = sum(sizes)
    whole, rest = divmod(total, size)
    assert sizes_of(batches) == [size] * whole + [rest] * (rest > 0 and not drop_last)
    assert len(set(values_of(batches))) == sum(sizes_of(batches))


def test_lanes_are_read_in_turn_and_each_reads_its_shards_one_after_the_other(kit):
    batches = kit.deliver(kit.Shards([3, 5, 2], lanes=2), 2)
    assert batches == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
        [(0, 2), (2, 0)],
        [(1, 2), (1, 3)],
        [(2, 1), (1, 4)],
    ]


def test_functions_given_to_map_run_only_for_what_is_delivered(kit):
    class Counted:
        def __init__(self):
            self.calls = []

        def __call__(self, sample):
            self.calls.append(sample)
            return sample

    counted = Counted()
    for make in (
        lambda: kit.Count(12).map(counted),
        lambda: kit.Count(12).map(counted).shuffle(5),
        lambda: (kit.Count(24).map(counted).map(abs)).split_by_rank(0, 2),
        lambda: kit.Count(6).map(counted) + kit.Count(6).map(counted),
        lambda: Mixture([kit.Count(12).map(counted)], [1]),
    ):
        counted.calls.clear()
        with seeding.use(SampleContext(Rewinder())):
            readers = [StreamReader(make(), worker=n, workers=3, begin=lambda *key: None) for n in range(3)]
            delivered = [readers[batch % 3].read(batch, 0, 2).samples for batch in range(6)]
        assert sorted(counted.calls) == sorted(values_of(delivered))
        assert len(counted.calls) == 12


def test_the_context_moves_to_every_batch_read_or_read_past_and_to_every_sample(kit):
    class Watched(IterableDataset):
        def __iter__(self):
            while True:
                yield seeding.current().position

    loader = kit.Loader(Watched(), 3, workers=2)
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [begun for begun in loader.begun if begun[0] == 0] == [(0, 0, 1, 0)] * 2 + [(0, 3, 1, 0), (0, 6, 1, 0)]


def test_a_reader_can_be_asked_ahead_but_not_back(kit):
    reader = StreamReader(kit.Count(10), begin=lambda *key: None)
    assert reader.read(2, 0, 2).samples == [4, 5]
    assert reader.read(4, 0, 2).samples == [8, 9]
    with pytest.raises(AgnoloadError, match="stands at sample 10, asked for was 2"):
        reader.read(1, 0, 2)


def test_behind_the_end_a_chunk_is_empty(kit):
    reader = StreamReader(kit.Count(5), begin=lambda *key: None)
    for batch, samples, places in ((1, [3, 4], 2), (2, [], 0), (3, [], 0)):
        chunk = reader.read(batch, 0, 3)
        assert (
            chunk.samples,
            *chunk.report[:3],
        ) == (samples, True, None, places)
    assert not StreamReader(kit.Count(6), begin=lambda *key: None).read(1, 0, 3).report.end


@pytest.mark.parametrize("workers", range(4))
def test_an_empty_stream_gives_no_batch(kit, workers):
    for stream in (kit.Count(0), kit.Shards([]), kit.Shards([0, 0]), kit.SelfSplitting(0)):
        assert kit.deliver(stream, 3, workers=workers, ahead=4) == []


def test_a_stream_that_asks_too_late_is_an_error_and_not_a_loss(kit):
    late = kit.Count(4) + kit.SelfSplitting(8)
    with pytest.raises(AgnoloadError, match="after its first sample"):
        kit.deliver(late, 2, workers=2)
    assert len(values_of(kit.deliver(late, 2, workers=1))) == 12


def test_a_function_given_to_map_or_filter_may_ask_who_runs_it(kit):
    stream = kit.Count(6).map(lambda sample: (sample, worker_info.get_worker_info().id))
    batches = kit.deliver(stream, 2, workers=2, ahead=3)
    assert batches == [[(0, 0), (1, 0)], [(2, 1), (3, 1)], [(4, 0), (5, 0)]]
    assert kit.deliver(stream.filter(lambda sample: worker_info.get_worker_info()), 2, workers=2, ahead=3) == batches


def test_a_stream_that_splits_itself_in_some_workers_only_is_an_error(kit):
    class Capricious(IterableDataset):
        def __iter__(self):
            info = worker_info.peek_worker_info()
            if info.id:
                worker_info.get_worker_info()
            return iter(range(9))

    with pytest.raises(AgnoloadError, match="in some workers and not in others"):
        kit.deliver(Capricious(), 2, workers=2, ahead=4)


def stop_at_three(sample):
    return next(iter(())) if sample == 3 else sample


@pytest.mark.parametrize("workers", range(3))
def test_stop_iteration_out_of_user_code_is_not_the_end(kit, workers):
    class Stopping(IterableDataset):
        def __iter__(self):
            return (stop_at_three(sample) for sample in range(5))

    class Closing(IterableDataset):
        def __iter__(self):
            yield 1
            raise GeneratorExit

    class NotEven(IterableDataset):
        def __iter__(self):
            raise StopIteration

    for stream in (
        Stopping(),
        Closing(),
        NotEven(),
        kit.Count(5).map(stop_at_three),
        kit.Count(5).filter(stop_at_three),
        kit.Count(5).map(stop_at_three).filter(bool),
        Mixture([[0, 1, 2, 3]], [1]).map(stop_at_three),
    ):
        with pytest.raises(SampleStopped):
            kit.deliver(stream, 2, workers=workers, ahead=2)


def refuse_odd(sample):
    if sample % 2:
        raise KeyError(sample)
    return sample


def test_an_error_keeps_its_type_and_is_raised_where_its_batch_is_due(kit):
    def boom():
        yield from range(5)
        raise KeyError("five")

    class Boom(IterableDataset):
        def __iter__(self):
            return boom()

    for workers in range(4):
        with pytest.raises(KeyError, match="five"):
            kit.deliver(Boom(), 2, workers=workers)


@pytest.mark.parametrize("workers", range(4))
def test_samples_that_fail_can_be_left_out_without_a_change_to_the_others(kit, workers):
    failures = []

    def failed(error, position):
        failures.append((str(error), position))
        return True

    stream = kit.Count(10).map(refuse_odd).map(kit.with_draws)
    batches = kit.deliver(stream, 4, workers=workers, failed=failed)
    assert [[value for value, _ in batch] for batch in batches] == [[0, 2], [4, 6], [8]]
    assert sorted(failures) == [(str(number), number) for number in (1, 3, 5, 7, 9)]
    alone = kit.deliver(kit.Count(10).map(kit.with_draws), 4)
    own = {value: drawn[0] for value, drawn in values_of(alone)}
    assert all(drawn[0] == own[value] for value, drawn in values_of(batches)), "sample_rng gave other numbers"


def test_all_samples_of_a_batch_left_out_is_not_the_end(kit):
    stream = kit.Count(8).map(lambda sample: refuse_odd(sample < 4))
    assert kit.deliver(stream, 2, workers=2, failed=lambda *_: True) == [[False, False], [False, False]]


def test_set_epoch_reaches_a_stream(kit):
    class Told(IterableDataset):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch])

    assert kit.deliver(Told().map(lambda epoch: epoch).filter(bool), 1, epoch=5) == [[5]]


def test_the_shards_of_other_libraries_are_understood(kit):
    class Elsewhere:
        num_shards = 3

        def __iter__(self):
            return iter(range(6))

        def shard(self, num_shards, index):
            return Part(range(index, 6, num_shards))

    class Part:
        def __init__(self, values):
            self.values = values

        def __iter__(self):
            return iter(self.values)

    assert kit.deliver(Elsewhere(), 2) == [[0, 3], [1, 4], [2, 5]]


def test_a_shard_that_is_a_dataset_is_loaded_by_index(kit):
    loads = []

    class Loud:
        def __init__(self, number):
            self.number = number

        def __len__(self):
            return 4

        def __getitem__(self, index):
            loads.append(index)
            return self.number, index

    class Folders(IterableDataset):
        num_shards = 2

        def shard(self, number):
            return Loud(number)

    reader = StreamReader(Folders(), begin=lambda *key: None)
    assert reader.read(1, 1, 2).samples == [(1, 2), (1, 3)]
    assert loads == [2, 3]


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_a_number_of_shards_that_is_none_is_refused(kit, number):
    shards = kit.Shards([1])
    shards.num_shards = number
    with pytest.raises(OptionError, match="num_shards"):
        kit.Plan(shards, size=1)


def test_what_is_a_stream_and_what_is_not(kit):
    IterableBase = type(
        "IterableDataset", (), {"__getitem__": lambda self, index: None, "__iter__": lambda self: iter(())}
    )
    assert is_stream(kit.Count(1))
    assert is_stream(iter([]))
    assert is_stream(type("Theirs", (IterableBase,), {})())
    assert not is_stream([1])
    assert not is_stream(np.zeros(3))


def test_lengths_are_known_where_they_can_be(kit):
    assert len(kit.Count(7).map(abs).shuffle(3)) == 7
    assert len(kit.Count(7) + kit.Count(3).map(abs)) == 10
    assert [len(kit.Count(7).split_by_rank(rank, 3)) for rank in range(3)] == [3, 2, 2]
    for stream in (kit.Count(7).filter(bool), kit.Count(7, length=False).map(abs), kit.Shards([1]) + kit.Count(3)):
        with pytest.raises(TypeError, match="length"):
            len(stream)


def test_streams_can_be_read_without_a_loader(kit):
    assert list(kit.Shards([1, 0, 2])) == [(0, 0), (2, 0), (2, 1)]
    assert list(kit.Count(5).filter(lambda n: n % 2).map(kit.negative) + kit.Count(1)) == [-1, -3, 0]
    assert sorted(kit.Count(5).shuffle(3)) == [0, 1, 2, 3, 4]


def test_streams_refuse_what_is_none(kit):
    for wrong in (
        lambda: ChainDataset([kit.Count(3), [1]]),
        lambda: kit.Count(3).map(1),
        lambda: kit.Count(3).filter(None),
    ):
        with pytest.raises(OptionError):
            wrong()
    with pytest.raises(NotImplementedError, match="__iter__"):
        iter(IterableDataset())


def test_repr_reads_like_the_code():
    class Words(IterableDataset):
        def __repr__(self):
            return "Words()"

    stream = (Words().map(str.upper) + Words().filter(bool)).shuffle(10, seed=3).split_by_rank(0, 2)
    assert (
        repr(stream)
        == "ChainDataset([Words().map(str.upper), Words().filter(bool)]).shuffle(10, seed=3).split_by_rank(0, 2)"
    )
