"""Streams through a loader: each sample once, in one order, for any workers; sizes, lengths, ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import (
    AgnoloadError,
    AgnoloadWarning,
    ChainDataset,
    DataLoader,
    DatasetNotPicklable,
    IterableDataset,
    OptionError,
)
from agnoload.streams import is_stream
from agnoload.worker_info import peek_worker_info


def flat(batches):
    return [value for batch in batches for value in batch]


# ------------------------------------------------------------------------------------------------ C10: once


def test_c10_a_stream_is_not_read_once_per_worker(kit, same_for_all):
    assert same_for_all(lambda: kit.Count(8), 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_c10_a_stream_with_shards_comes_once_and_the_same_for_any_workers(kit, same_for_all):
    batches = same_for_all(lambda: kit.Shards(8, 3), 2)
    assert batches == [[0, 3], [1, 4], [2, 5], [6, 7]]


def test_c10_more_workers_than_lanes_are_one_warning(kit, load):
    with pytest.warns(AgnoloadWarning, match="3 lanes for 4 workers") as caught:
        batches = load(kit.Shards(12, 3), 2, epochs=2, num_workers=4)
    assert len(caught) == 1
    assert sorted(flat(batches)) == sorted([*range(12), *range(12)])


def test_c10_more_shards_than_lanes_run_through_the_lanes_one_after_the_other(kit, same_for_all):
    batches = same_for_all(lambda: kit.Shards(24, 6, lanes=3), 2)
    assert batches[:4] == [[0, 6], [1, 7], [2, 8], [12, 18]]  # lane 0 reads shards 0 and 3
    assert batches[6:] == [[3, 9], [4, 10], [5, 11], [15, 21], [16, 22], [17, 23]]
    assert sorted(flat(batches)) == list(range(24))


def test_c10_a_stream_that_splits_itself_is_left_alone(kit, load, everyone):
    for workers in everyone:
        batches = load(kit.SelfSplitting(8), 2, **workers)
        assert sorted(flat(batches)) == list(range(8)), workers
    assert load(kit.SelfSplitting(8), 2, num_workers=2) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_c10_a_stream_split_by_worker_init_fn_is_left_alone(kit, load, everyone):
    for workers in everyone:
        init = kit.split_between if workers["num_workers"] else None
        batches = load(kit.Between(0, 8), 2, worker_init_fn=init, **workers)
        assert sorted(flat(batches)) == list(range(8)), workers


def test_a_worker_init_fn_that_seems_not_to_split_is_told_what_it_is_taken_for(kit, load):
    for kind in ("process", "thread"):
        with pytest.warns(
            AgnoloadWarning, match="worker_init_fn is taken to split the stream over the 2 workers"
        ) as caught:
            batches = load(kit.Count(4), 2, epochs=2, num_workers=2, worker_type=kind, worker_init_fn=kit.nothing)
        assert len(caught) == 1
        assert sorted(flat(batches)) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
        for stream in (kit.SelfSplitting(4), kit.Shards(4, 2)):
            batches = load(stream, 2, num_workers=2, worker_type=kind, worker_init_fn=kit.nothing)
            assert sorted(flat(batches)) == [0, 1, 2, 3]
        assert load(kit.Count(4), 2, num_workers=1, worker_type=kind, worker_init_fn=kit.nothing) == [[0, 1], [2, 3]]


def test_self_sharded_streams_with_uneven_shares_come_once_with_and_without_drop_last(kit, load, everyone):
    for workers in everyone:
        for drop_last in (False, True):
            batches = load(kit.SelfSplitting(11), 2, drop_last=drop_last, epochs=2, **workers)
            assert len(batches) == 2 * (5 if drop_last else 6), workers
            for epoch in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
                values = flat(epoch)
                assert len(set(values)) == len(values) == (10 if drop_last else 11)
                assert {len(batch) for batch in epoch[:5]} == {2}


def test_streams_that_count_in_themselves_are_not_shared_by_threads(kit, same_for_all):
    assert same_for_all(lambda: kit.Returned(10), 3, epochs=2) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]] * 2
    assert same_for_all(lambda: kit.Resumable(10), 3, epochs=2) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]] * 2


def test_threads_leave_the_users_own_stream_where_it_is(kit, load):
    stream = kit.Resumable(10)
    assert load(stream, 3, num_workers=2, worker_type="thread") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert stream.at == 0


def test_threads_share_arrays_and_indexed_datasets_of_a_stream_but_not_the_rest(kit):
    class Holder(IterableDataset):
        def __init__(self):
            self.array = np.arange(4)
            self.rows = kit.Rows(4)
            self.counts = []

        def __iter__(self):
            self.counts.append(1)
            yield id(self.array), id(self.rows), id(self.counts), len(self.counts)

    stream = Holder()
    [(array, rows, counts, once)] = [
        tuple(np.asarray(field).tolist()[0] for field in batch)
        for batch in DataLoader(stream, 1, num_workers=1, worker_type="thread")
    ]
    assert (array, rows) == (id(stream.array), id(stream.rows))
    assert counts != id(stream.counts)
    assert once == 1
    assert stream.counts == []


def test_a_stream_that_threads_cannot_copy_is_refused_by_name(kit):
    class Locked(kit.Count):
        def __init__(self, n):
            super().__init__(n)
            self.parts = {"lock": threading.Lock()}

    with pytest.raises(DatasetNotPicklable, match=r"dataset\.parts\['lock'\].*thread"):
        iter(DataLoader(Locked(8), 2, num_workers=2, worker_type="thread"))
    assert [batch.tolist() for batch in DataLoader(Locked(3), 2)] == [[0, 1], [2]]


# ------------------------------------------------------------------------------------------------ C11: sizes


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_c11_batches_are_cut_from_the_stream_and_not_per_worker(kit, same_for_all, drop_last, sizes):
    batches = same_for_all(lambda: kit.Count(10, length=10), 4, drop_last=drop_last)
    assert list(map(len, batches)) == sizes
    assert flat(batches) == list(range(sum(sizes)))
    assert len(DataLoader(kit.Count(10, length=10), 4, drop_last=drop_last)) == len(sizes)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_c11_with_shards_too(kit, same_for_all, drop_last, sizes):
    batches = same_for_all(lambda: kit.Shards(10, 3), 4, drop_last=drop_last)
    assert list(map(len, batches)) == sizes
    assert len(set(flat(batches))) == sum(sizes)
    assert len(DataLoader(kit.Shards(10, 3), 4, drop_last=drop_last)) == len(sizes)


def test_the_rests_of_the_lanes_are_merged_in_the_order_of_the_lanes(kit, same_for_all):
    batches = same_for_all(lambda: kit.Shards(14, 3), 3)
    assert batches == [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9, 12, 10], [13, 11]]
    assert same_for_all(lambda: kit.Shards(14, 3), 3, drop_last=True) == batches[:4]


def test_without_batching_samples_come_one_by_one(kit, same_for_all):
    assert same_for_all(lambda: kit.Count(5, length=5), None) == [0, 1, 2, 3, 4]
    assert sorted(same_for_all(lambda: kit.Shards(7, 3), None)) == list(range(7))
    assert len(DataLoader(kit.Count(5, length=5), None)) == 5
    assert type(next(iter(DataLoader(kit.Count(5), None)))) is int


def test_an_empty_stream_gives_no_batch(kit, same_for_all):
    assert same_for_all(lambda: kit.Count(0, length=0), 4) == []
    assert same_for_all(lambda: kit.Shards(0, 3), 4) == []
    assert same_for_all(lambda: kit.Count(10).filter(lambda value: value > 99), 4) == []


def test_len_of_a_stream_without_a_length_is_a_type_error(kit):
    for stream in (kit.Count(4), kit.Count(4, length=4).filter(kit.is_even)):
        with pytest.raises(TypeError, match="length"):
            len(DataLoader(stream, 2))


# ------------------------------------------------------------------------------------------------ C45: lengths that lie


@pytest.mark.parametrize("found", [6, 10])
def test_c45_a_wrong_length_is_one_warning_with_both_numbers(kit, load, everyone, found):
    for workers in everyone:
        with pytest.warns(AgnoloadWarning, match=rf"8 samples.*gave {found}") as caught:
            batches = load(kit.Count(found, length=8), 2, epochs=2, **workers)
        assert flat(batches) == [*range(found), *range(found)], workers
        assert len(caught) == 1


def test_c45_no_warning_where_the_length_is_right_or_samples_were_left_out_on_purpose(kit, load):
    load(kit.Count(8, length=8), 3)
    load(kit.Count(8, length=8), 3, drop_last=True)
    load(kit.Shards(8, 3), 3, drop_last=True, num_workers=2)
    load(kit.Count(8, length=8).map(kit.fails_at_3_and_7), 3, on_error="skip")
    for _ in DataLoader(kit.Count(8, length=8), 2):
        break  # not read to its end


# ------------------------------------------------------------------------------------------------ randomness


def test_c07_draws_in_a_stream_are_the_same_for_any_processes(kit, load):
    expected = load(kit.Drawing(13), 4, epochs=2, seed=5)
    for options in ({"num_workers": n, "prefetch_factor": factor} for n in (1, 2, 3) for factor in (1, 4)):
        assert load(kit.Drawing(13), 4, epochs=2, seed=5, **options) == expected, options
    assert expected[0]["own"] != expected[4]["own"]
    drawn = [draw for batch in expected for source in ("own", "numpy", "python") for draw in batch[source]]
    assert len(set(drawn)) == len(drawn)


def test_c07_draws_of_map_filter_shuffle_and_collate_are_the_same_for_any_processes(kit, load):
    def make():
        return kit.Count(40).filter(kit.is_even).shuffle(7).map(kit.with_draws)

    expected = load(make(), 4, epochs=2, seed=5)
    for workers in (1, 2, 3):
        assert load(make(), 4, epochs=2, seed=5, num_workers=workers) == expected
    sums = load(kit.Shards(20, 3), 4, seed=5, collate_fn=kit.summed)
    for workers in (1, 2, 3):
        assert load(kit.Shards(20, 3), 4, seed=5, collate_fn=kit.summed, num_workers=workers) == sums


@pytest.mark.slow
def test_c07_sample_rng_in_a_stream_is_exact_under_threads_too(kit, same_for_all):
    batches = same_for_all(lambda: kit.Count(13).map(kit.with_own_draw), 4, epochs=2, seed=5)
    sharded = same_for_all(lambda: kit.Shards(13, 3).map(kit.with_own_draw), 4, epochs=2, seed=5)
    for found in (batches, sharded):
        drawn = [draw for batch in found for draw in batch["own"]]
        assert len(set(drawn)) == 26


def test_the_numbers_of_collate_fn_are_none_that_a_sample_drew(kit, load):
    def collate(samples):
        return samples, kit.draws()

    for stream in (kit.Drawing(8), kit.Count(8).map(kit.with_draws), kit.Shards(8, 3).map(kit.with_draws)):
        for samples, drawn in load(stream, 3, seed=1, collate_fn=collate):
            for source, number in drawn.items():
                assert number not in [sample[source] for sample in samples]


def test_a_stream_leaves_the_users_generators_alone(kit, load):
    np.random.seed(3)
    before = np.random.get_state()
    load(kit.Drawing(8), 2)
    after = np.random.get_state()
    assert (before[1] == after[1]).all()
    assert before[2:] == after[2:]


# ------------------------------------------------------------------------------------------------ map, filter, chain


def test_functions_of_map_run_only_for_what_is_delivered_whatever_is_made_of_the_stream(kit, load, tmp_path):
    log = tmp_path / "log"
    for make in (
        lambda stream: stream.shuffle(5),
        lambda stream: stream.take(7),
        lambda stream: stream.batch(2),
        lambda stream: stream + stream,
        lambda stream: agnoload.Mixture([stream], [1]).map(kit.negative),
    ):
        log.write_bytes(b"")
        found = load(make(kit.Count(12).map(kit.Marked(log))), None, num_workers=3, worker_type="thread", seed=1)
        assert log.stat().st_size == (2 if type(found[0]) is list else 1) * len(found) > 0


def test_map_runs_only_for_the_samples_that_are_kept(kit, load, everyone, tmp_path):
    for number, workers in enumerate(everyone):
        log = tmp_path / str(number)
        stream = kit.Count(24).map(kit.Marked(log)).split_by_rank(1, 2)
        batches = load(stream, 2, **workers)
        assert flat(batches) == list(range(10, 240, 20)), workers
        assert log.stat().st_size == 12, workers


def test_streams_made_of_streams_are_the_same_for_any_workers(kit, same_for_all):
    assert flat(same_for_all(lambda: kit.Count(5) + kit.Count(3), 3)) == [0, 1, 2, 3, 4, 0, 1, 2]
    chained = same_for_all(lambda: ChainDataset([kit.Shards(7, 2), kit.Shards(5, 2)]), 2)
    assert sorted(flat(chained)) == sorted([*range(7), *range(5)])
    found = same_for_all(lambda: kit.Count(30).filter(kit.is_third).map(kit.Marked(None)), 4)
    assert found == [[0, 30, 60, 90], [120, 150, 180, 210], [240, 270]]


# ------------------------------------------------------------------------------------------------ other libraries


def test_torchs_kind_of_stream(kit, same_for_all):
    assert same_for_all(lambda: kit.Torchlike(7), 3) == [[0, 1, 2], [3, 4, 5], [6]]


def test_hugging_faces_kind_of_stream(kit, same_for_all):
    batches = same_for_all(lambda: kit.Hublike(16, 4), 3, epochs=2)
    values = [value for batch in batches for value in batch["value"]]
    assert sorted(values[:16]) == list(range(16))
    assert values[:16] == values[16:]


def test_anything_that_can_only_be_iterated_is_a_stream(kit, load):
    assert load((value for value in range(5)), 2) == [[0, 1], [2, 3], [4]]
    assert load({3, 1, 2}, 2, num_workers=2) == [[1, 2], [3]]


# ------------------------------------------------------------------------------------------------ who reads, and when


def test_get_worker_info_inside_functions_of_a_stream(kit, load, everyone):
    for workers in everyone:
        found = load(kit.Count(12).map(kit.facts), 2, epochs=2, **workers)
        number = workers["num_workers"]
        rows = [row for batch in found for row in zip(*batch, strict=True)]
        assert [row[0] for row in rows] == [*range(12), *range(12)]
        if not number:
            assert {row[1:] for row in rows} == {(-1, 0, -1)}
            continue
        assert [row[3] for row in rows] == [0] * 12 + [1] * 12
        assert {row[2] for row in rows} == {number}
        assert [row[1] for row in rows[:12:2]] == [batch % number for batch in range(6)]


def test_persistent_workers_begin_every_epoch_anew_and_tell_it_to_the_stream(kit, everyone, load):
    for workers in everyone:
        loader = DataLoader(kit.WithEpoch(), 2, persistent_workers=True, **workers)
        with loader:
            found = [[batch.tolist() for batch in loader] for _ in range(3)]
            assert found == [[[0, 0], [0]], [[1, 1], [1]], [[2, 2], [2]]], workers
            assert [batch.tolist() for batch in loader] == [[3, 3], [3]]


@pytest.mark.slow
def test_streams_with_shards_are_told_the_epoch_too(kit, everyone):
    for workers in everyone:
        if workers["num_workers"] == 3:
            continue
        for make in (
            lambda: kit.ShardsOfEpoch(6, 2),
            lambda: kit.ShardsOfEpoch(6, 2).map(int).shuffle(1),
            lambda: kit.ShardsOfEpoch(6, 2).split_by_rank(0, 1) + kit.ShardsOfEpoch(0, 2),
        ):
            for kept in (False, True):
                with DataLoader(make(), 3, persistent_workers=kept, **workers) as loader:
                    found = [[batch.tolist() for batch in loader] for _ in range(2)]
                assert found == [[[0, 2, 4], [1, 3, 5]], [[100, 102, 104], [101, 103, 105]]], (workers, kept)


def test_a_stream_that_was_read_before_begins_at_its_beginning_everywhere(kit, load, everyone):
    for workers in everyone:
        stream = kit.Resumable(10)
        for _ in zip(DataLoader(stream, 2), range(2), strict=False):
            pass
        assert stream.at == 6
        assert load(stream, 4, **workers) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], workers


def test_kept_workers_after_an_epoch_of_a_stream_with_a_state_that_was_left_early(kit):
    with DataLoader(kit.Resumable(10), 2, num_workers=2, persistent_workers=True) as loader:
        next(iter(loader))
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_large_samples_that_are_left_over_at_the_ends_of_lanes_are_merged(kit, load, everyone):
    def large(value):
        return np.full((50, 1000), value, np.float32)

    for workers in everyone:
        found = list(DataLoader(kit.Shards(13, 5).map(large), 4, **workers))
        assert [batch.shape for batch in found] == [(4, 50, 1000)] * 3 + [(1, 50, 1000)]
        values = [int(rows[0, 0]) for batch in found for rows in batch]
        assert sorted(values) == list(range(13))
        assert all((rows == rows[0, 0]).all() for batch in found for rows in batch)


def test_persistent_workers_stay_the_same_processes(kit):
    loader = DataLoader(
        kit.Count(8).map(lambda value: __import__("os").getpid()), 2, num_workers=2, persistent_workers=True
    )
    with loader:
        first, second = ({batch.tolist()[0] for batch in loader} for _ in range(2))
    assert first == second
    assert len(first) == 2


def test_persistent_workers_after_an_epoch_that_was_left_early(kit, load):
    expected = load(kit.Drawing(20), 2, epochs=3, seed=1)
    loader = DataLoader(kit.Drawing(20), 2, seed=1, num_workers=2, persistent_workers=True)
    with loader:
        for _ in zip(loader, range(3), strict=False):
            pass
        found = [{name: array.tolist() for name, array in batch.items()} for batch in loader]
        assert found == expected[10:20]
        for epoch in (1, 0):  # back, with readers that have gone past it
            loader.set_epoch(epoch)
            for place, batch in enumerate(loader):
                assert batch["own"].tolist() == expected[10 * epoch + place]["own"]
                if place == 4:
                    break
        loader.set_epoch(0)
        found = [{name: array.tolist() for name, array in batch.items()} for batch in loader]
        assert found == expected[:10]


def test_out_of_order_each_batch_of_a_stream_comes_once(kit, load, everyone):
    for workers in everyone:
        for make in (lambda: kit.Count(23), lambda: kit.Shards(23, 3)):
            expected = load(make(), 3)
            found = load(make(), 3, in_order=False, **workers)
            assert sorted(map(sorted, found)) == sorted(map(sorted, expected)), workers


@pytest.mark.slow
def test_out_of_order_a_slow_batch_of_a_stream_holds_up_nobody_else(kit):
    """Batch 0 waits until the other worker's batches have been delivered."""
    others, delivered = threading.Event(), []

    def slow(value):
        if value == 0:
            assert others.wait(60)
        return value

    loader = DataLoader(kit.Count(8).map(slow), 1, num_workers=2, worker_type="thread", in_order=False)
    for batch in loader:
        delivered += batch.tolist()
        if delivered == [1, 3]:
            others.set()
    assert delivered[:2] == [1, 3]
    assert sorted(delivered) == list(range(8))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 7), max_size=6),
    lanes=st.integers(1, 4),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    workers=st.sampled_from([0, 0, 1, 2, 3]),
)
def test_however_a_stream_is_cut_into_shards_its_batches_are_as_many_as_of_the_whole(
    kit, deliver, sizes, lanes, size, drop_last, workers
):
    stream = kit.Sized(sizes, lanes)
    batches = deliver(stream, size, workers, drop_last=drop_last)
    full, rest = divmod(sum(sizes), size)
    assert list(map(len, batches)) == [size] * full + [rest] * (rest > 0 and not drop_last)
    assert len(set(flat(batches))) == len(flat(batches))
    assert len(DataLoader(stream, size, drop_last=drop_last)) == len(batches)


def test_a_stream_that_splits_itself_in_some_workers_only_is_an_error(deliver):
    class Capricious(IterableDataset):
        def __iter__(self):
            if peek_worker_info().id:
                agnoload.get_worker_info()
            return iter(range(9))

    with pytest.raises(AgnoloadError, match="in some workers and not in others"):
        deliver(Capricious(), 2, 2)


def test_a_function_given_to_filter_may_ask_who_runs_it(kit, deliver):
    stream = kit.Count(6).filter(lambda sample: agnoload.get_worker_info())
    assert deliver(stream, 2, 2) == [[0, 1], [2, 3], [4, 5]]


def test_a_shard_that_is_a_dataset_is_loaded_by_index(kit, deliver, tmp_path):
    log = tmp_path / "log"

    class Folders(IterableDataset):
        num_shards = 2

        def shard(self, number):
            return kit.Rows(4, 1 - 2 * number, log)

    loader = DataLoader(Folders(), 2, collate_fn=list, seed=7)
    assert [batch for _, batch in zip(range(2), loader, strict=False)] == [[1, 2], [-1, -2]]
    log.write_bytes(b"")
    assert deliver(Folders(), 2, state=loader.state_dict()) == [[3, 4], [-3, -4]]
    assert log.stat().st_size == 4


def test_what_is_a_stream_and_what_is_not(kit):
    assert is_stream(kit.Count(1))
    assert is_stream(iter([]))
    assert is_stream(kit.Torchlike(3))
    assert not is_stream([1])
    assert not is_stream(np.zeros(3))


def test_lengths_are_known_where_they_can_be(kit):
    assert len(kit.Count(7, 7).map(abs).shuffle(3)) == 7
    assert len(kit.Count(7, 7) + kit.Count(3, 3).map(abs)) == 10
    assert [len(kit.Count(7, 7).split_by_rank(rank, 3)) for rank in range(3)] == [3, 2, 2]
    for stream in (kit.Count(7, 7).filter(bool), kit.Count(7).map(abs), kit.Sized([1]) + kit.Count(3)):
        with pytest.raises(TypeError, match="length"):
            len(stream)


def test_streams_can_be_read_without_a_loader(kit):
    assert list(kit.Sized([1, 0, 2])) == [0, 1, 2]
    assert list(kit.Count(5).filter(lambda n: n % 2).map(kit.negative) + kit.Count(1)) == [-2, -4, 0]


def test_what_cannot_be_a_stream_or_a_function_of_one_is_rejected(kit):
    for wrong in (
        lambda: ChainDataset([kit.Count(3), [1]]),
        lambda: kit.Count(3).map(1),
        lambda: kit.Count(3).filter(None),
    ):
        with pytest.raises(OptionError):
            wrong()
    with pytest.raises(NotImplementedError, match="__iter__"):
        iter(IterableDataset())
    for number in (-1, 1.5, True):
        shards = kit.Sized([1])
        shards.num_shards = number
        with pytest.raises(OptionError, match="num_shards"):
            list(DataLoader(shards))


def test_shuffle_and_samplers_are_refused_for_a_stream(kit):
    with pytest.raises(OptionError, match=r"shuffle\(buffer_size\)"):
        DataLoader(kit.Count(10), shuffle=True)
    for name in ("sampler", "batch_sampler"):
        with pytest.raises(OptionError, match=name):
            DataLoader(kit.Count(10), **{name: [[0]]})
