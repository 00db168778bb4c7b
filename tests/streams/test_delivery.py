"""Streams through a loader: each sample once, in one order, for any workers; sizes, lengths, ends."""

from __future__ import annotations

import os
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


# ------------------------------------------------------------------------------------------------ each sample once

LANES = [[0, 6], [1, 7], [2, 8], [12, 18], [13, 19], [14, 20], [3, 9], [4, 10], [5, 11], [15, 21], [16, 22], [17, 23]]

EXPECTED = {
    "without shards": (lambda kit: kit.Count(8), 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "with shards": (lambda kit: kit.Shards(8, 3), 2, [[0, 3], [1, 4], [2, 5], [6, 7]]),
    "more shards than lanes": (lambda kit: kit.Shards(24, 6, lanes=3), 2, LANES),
    "what is left of lanes": (
        lambda kit: kit.Shards(14, 3),
        3,
        [[0, 3, 6], [1, 4, 7], [2, 5, 8], [9, 12, 10], [13, 11]],
    ),
    "not batched": (lambda kit: kit.Count(5), None, [0, 1, 2, 3, 4]),
    "shards, not batched": (lambda kit: kit.Shards(5, 2), None, [0, 1, 2, 3, 4]),
    "empty": (lambda kit: kit.Count(0), 4, []),
    "empty shards": (lambda kit: kit.Shards(0, 3), 4, []),
    "filtered until it is empty": (lambda kit: kit.Count(10).filter(lambda value: value > 99), 4, []),
    "its own iterator": (lambda kit: kit.Returned(10), 3, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
    "counts in itself": (lambda kit: kit.Resumable(10), 3, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
    "made of streams": (
        lambda kit: kit.Count(5) + kit.Count(3).map(kit.negative),
        3,
        [[0, 1, 2], [3, 4, -1], [-2, -3]],
    ),
    "filtered and mapped": (
        lambda kit: kit.Count(9).filter(kit.is_even).map(kit.negative),
        3,
        [[-1, -3, -5], [-7, -9]],
    ),
    "of torch's kind": (lambda kit: kit.Torchlike(7), 3, [[0, 1, 2], [3, 4, 5], [6]]),
    "of Hugging Face's kind": (
        lambda kit: kit.Hublike(8, 4),
        2,
        [{"value": [0, 1]}, {"value": [2, 3]}, {"value": [4, 5]}, {"value": [6, 7]}],
    ),
}


FOR_PROCESSES = {"what is left of lanes", "counts in itself", "made of streams", "of Hugging Face's kind"}
"""Those of which a process might see something else than a thread."""


def test_each_sample_comes_once_and_in_one_order_in_each_epoch(kit, load, readers):
    names = FOR_PROCESSES if readers == {"num_workers": 2} else EXPECTED
    for name in names:
        make, size, expected = EXPECTED[name]
        assert load(make(kit), size, epochs=2, **readers) == expected * 2, name


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 7), max_size=6),
    lanes=st.integers(1, 4),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    workers=st.sampled_from([0, 0, 1, 2, 3]),
)
def test_batches_are_as_many_as_of_the_whole_however_it_is_cut_into_shards(
    kit, deliver, sizes, lanes, size, drop_last, workers
):
    for stream in (kit.Sized(sizes, lanes), kit.Count(sum(sizes), sum(sizes))):
        batches = deliver(stream, size, workers, drop_last=drop_last)
        full, rest = divmod(sum(sizes), size)
        assert list(map(len, batches)) == [size] * full + [rest] * (rest > 0 and not drop_last)
        assert len(set(flat(batches))) == len(flat(batches))
        assert len(DataLoader(stream, size, drop_last=drop_last)) == len(batches)


@settings(max_examples=20)
@given(
    n=st.integers(0, 14), size=st.integers(1, 4), workers=st.integers(0, 3), drop_last=st.booleans(), init=st.booleans()
)
def test_a_stream_that_is_split_by_the_user_comes_once(kit, deliver, n, size, workers, drop_last, init):
    stream = kit.Count(n) if init else kit.SelfSplitting(n)
    split = kit.split_between if init and workers else None
    batches = deliver(stream, size, workers, drop_last=drop_last, worker_init_fn=split)
    full, rest = divmod(n, size)
    assert list(map(len, batches)) == [size] * full + [rest] * (rest > 0 and not drop_last)
    assert len(set(flat(batches))) == len(flat(batches))
    assert set(flat(batches)) <= set(range(n))


@pytest.mark.slow
def test_processes_that_split_a_stream_take_turns(kit, load):
    assert load(kit.SelfSplitting(8), 2, num_workers=2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    batches = load(kit.Count(8), 2, num_workers=2, worker_init_fn=kit.split_between)
    assert batches == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_a_worker_init_fn_that_seems_not_to_split_is_one_warning(kit, load):
    options = {"num_workers": 2, "worker_type": "thread", "worker_init_fn": kit.nothing}
    with pytest.warns(AgnoloadWarning, match="taken to split the stream over the 2 workers") as caught:
        batches = load(kit.Count(4), 2, epochs=2, **options)
    assert len(caught) == 1
    assert sorted(flat(batches)) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    for stream in (kit.SelfSplitting(4), kit.Shards(4, 2)):
        assert sorted(flat(load(stream, 2, **options))) == [0, 1, 2, 3]
    assert load(kit.Count(4), 2, **options | {"num_workers": 1}) == [[0, 1], [2, 3]]


def test_more_workers_than_lanes_are_one_warning(kit, load):
    with pytest.warns(AgnoloadWarning, match="3 lanes for 4 workers") as caught:
        batches = load(kit.Shards(12, 3), 2, epochs=2, num_workers=4, worker_type="thread")
    assert len(caught) == 1
    assert sorted(flat(batches)) == sorted([*range(12), *range(12)])


@settings(max_examples=15)
@given(length=st.integers(0, 9), found=st.integers(0, 9), size=st.integers(1, 4), workers=st.integers(0, 2))
def test_a_wrong_length_is_one_warning_with_both_numbers(kit, load, length, found, size, workers):
    options = {"num_workers": workers, "worker_type": "thread", "epochs": 2}
    if length == found:
        batches = load(kit.Count(found, length), size, **options)
    else:
        with pytest.warns(AgnoloadWarning, match=rf"{length} samples?.*gave {found}") as caught:
            batches = load(kit.Count(found, length), size, **options)
        assert len(caught) == 1
    assert flat(batches) == [*range(found), *range(found)]


def test_no_length_is_compared_where_samples_were_left_out_on_purpose(kit, load):
    load(kit.Count(8, length=8), 3, drop_last=True)
    load(kit.Shards(8, 3), 3, drop_last=True)
    load(kit.Count(8, length=8).map(kit.FailsAt(3, 7)), 3, on_error="skip")
    next(iter(DataLoader(kit.Count(8, length=8), 2)))  # not read to its end


@settings(max_examples=12)
@given(n=st.integers(0, 23), shards=st.integers(0, 3), size=st.integers(1, 4), workers=st.integers(1, 3))
def test_out_of_order_each_batch_comes_once(kit, deliver, n, shards, size, workers):
    stream = kit.Shards(n, shards) if shards else kit.Count(n)
    found = deliver(stream, size, workers, in_order=False)
    assert sorted(map(sorted, found)) == sorted(map(sorted, deliver(stream, size)))


def test_large_samples_that_are_left_over_at_the_ends_of_lanes_are_merged(kit, readers):
    def large(value):
        return np.full((50, 1000), value, np.float32)

    found = list(DataLoader(kit.Shards(13, 5).map(large), 4, **readers))
    assert [batch.shape for batch in found] == [(4, 50, 1000)] * 3 + [(1, 50, 1000)]
    assert sorted(int(rows[0, 0]) for batch in found for rows in batch) == list(range(13))
    assert all((rows == rows[0, 0]).all() for batch in found for rows in batch)


# ------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.slow
def test_draws_from_all_generators_are_the_same_for_any_processes(kit, load):
    def collate(samples):
        return samples, kit.draws()

    for make, epochs in (
        (lambda: kit.Drawing(13), 2),
        (lambda: kit.Count(26).filter(kit.is_even).shuffle(7).map(kit.with_draws), 1),
        (lambda: kit.Shards(13, 3).map(kit.with_draws), 1),
    ):
        expected = load(make(), 4, epochs, collate_fn=collate)
        for workers, factor in ((1, 4), (2, 1), (3, 4)):
            found = load(make(), 4, epochs, collate_fn=collate, num_workers=workers, prefetch_factor=factor)
            assert found == expected, (workers, factor)
        rows = [row for samples, drawn in expected for row in (*samples, drawn)]
        numbers = [row[source] for row in rows for source in ("own", "numpy", "python")]
        assert len(set(numbers)) == len(numbers), "no two samples and no batch draw the same"


def test_a_stream_leaves_the_users_generators_alone(kit, load):
    np.random.seed(3)
    before = np.random.get_state()
    load(kit.Drawing(8), 2)
    after = np.random.get_state()
    assert (before[1] == after[1]).all()
    assert before[2:] == after[2:]


# ------------------------------------------------------------------------------------------------ who runs what


def test_functions_of_map_run_only_for_what_is_delivered_whatever_is_made_of_the_stream(kit, load, tmp_path):
    log = tmp_path / "log"
    for make in (
        lambda stream: stream.shuffle(5),
        lambda stream: stream.take(7),
        lambda stream: stream.batch(2),
        lambda stream: stream + stream,
        lambda stream: stream.split_by_rank(1, 2),
        lambda stream: agnoload.Mixture([stream], [1]).map(kit.negative),
    ):
        log.write_bytes(b"")
        found = load(make(kit.Count(12).map(kit.Marked(log))), None, num_workers=3, worker_type="thread")
        assert log.stat().st_size == (2 if type(found[0]) is list else 1) * len(found) > 0


@settings(max_examples=12)
@given(
    n=st.integers(0, 20), size=st.integers(1, 4), workers=st.integers(0, 2), outer=st.sampled_from([None, "shuffle"])
)
def test_a_sample_that_passes_a_filter_is_the_one_that_is_delivered(kit, deliver, n, size, workers, outer):
    """Made again it would have drawn something else."""
    stream = kit.Count(n).map(kit.with_own_draw).filter(lambda sample: sample["own"] % 2)
    batches = deliver(stream.shuffle(3) if outer else stream, size, workers)
    assert all(sample["own"] % 2 for batch in batches for sample in batch)


def test_worker_info_inside_functions_of_a_stream_is_that_of_whoever_delivers(kit, load, readers):
    found = load(kit.Count(12).map(kit.facts), 2, epochs=2, **readers)
    rows = [row for batch in found for row in zip(*batch, strict=True)]
    if not readers:
        assert rows == [(value, -1, 0, -1) for _ in range(2) for value in range(12)]
    else:
        assert rows == [(value, value // 2 % 2, 2, epoch) for epoch in range(2) for value in range(12)]


def test_kept_workers_begin_each_epoch_at_its_start_and_say_it_to_the_stream(kit, readers):
    with DataLoader(kit.OfEpoch(lambda epoch: [epoch] * 3), 2, persistent_workers=True, **readers) as loader:
        found = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert found == [[[epoch, epoch], [epoch]] for epoch in range(3)]
    for make in (
        lambda: kit.ShardsOfEpoch(6, 2),
        lambda: kit.ShardsOfEpoch(6, 2).map(int).shuffle(1),
        lambda: kit.ShardsOfEpoch(6, 2).split_by_rank(0, 1) + kit.ShardsOfEpoch(0, 2),
    ):
        with DataLoader(make(), 3, persistent_workers=True, **readers) as loader:
            found = [[batch.tolist() for batch in loader] for _ in range(2)]
        assert found == [[[0, 2, 4], [1, 3, 5]], [[100, 102, 104], [101, 103, 105]]]


def test_a_stream_that_was_read_before_begins_at_its_beginning(kit, load, readers):
    stream = kit.Resumable(10)
    for _ in zip(DataLoader(stream, 2), range(2), strict=False):
        pass
    assert stream.at == 6
    assert load(stream, 4, **readers) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with DataLoader(kit.Resumable(10), 2, persistent_workers=True, **readers) as loader:
        next(iter(loader))  # workers that have read further are kept
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.slow
def test_kept_workers_stay_the_same_processes_and_read_any_epoch_again(kit, load):
    expected = load(kit.Drawing(20), 2, epochs=3)
    with DataLoader(kit.Drawing(20), 2, seed=7, num_workers=2, persistent_workers=True) as loader:
        for _ in zip(loader, range(3), strict=False):
            pass
        for epoch, stop in ((1, 10), (1, 5), (0, 5), (0, 10)):  # back, too, with readers that have gone past it
            loader.set_epoch(epoch)
            for place, batch in zip(range(stop), loader, strict=False):
                found = {name: array.tolist() for name, array in batch.items()}
                assert found == expected[10 * epoch + place]
    stream = kit.Count(8).map(lambda value: os.getpid())
    with DataLoader(stream, 2, num_workers=2, persistent_workers=True) as loader:
        first, second = ({batch.tolist()[0] for batch in loader} for _ in range(2))
    assert first == second
    assert len(first) == 2


def test_threads_read_copies_that_share_arrays_and_indexed_datasets(kit, load):
    class Holder(IterableDataset):
        def __init__(self):
            self.array = np.arange(4)
            self.rows = kit.Rows(4)
            self.counts = []

        def __iter__(self):
            self.counts.append(1)
            yield id(self.array), id(self.rows), id(self.counts), len(self.counts)

    stream = Holder()
    [(array, rows, counts, once)] = load(stream, None, num_workers=1, worker_type="thread")
    assert (array, rows) == (id(stream.array), id(stream.rows))
    assert counts != id(stream.counts)
    assert once == 1
    assert stream.counts == []


def test_a_stream_that_threads_cannot_copy_is_rejected_by_name(kit, load):
    class Locked(kit.Count):
        def __init__(self, n):
            super().__init__(n)
            self.parts = {"lock": threading.Lock()}

    with pytest.raises(DatasetNotPicklable, match=r"dataset\.parts\['lock'\].*thread"):
        iter(DataLoader(Locked(8), 2, num_workers=2, worker_type="thread"))
    assert load(Locked(3), 2) == [[0, 1], [2]]


def test_a_stream_that_splits_itself_in_some_workers_or_too_late_is_an_error(kit, deliver):
    class Capricious(IterableDataset):
        def __iter__(self):
            if peek_worker_info().id:
                agnoload.get_worker_info()
            return iter(range(9))

    class Late(IterableDataset):
        def __iter__(self):
            yield 0
            kit.facts(1)
            yield 1

    with pytest.raises(AgnoloadError, match="in some workers and not in others"):
        deliver(Capricious(), 2, 2)
    with pytest.raises(AgnoloadError, match=r"get_worker_info\(\) after its first sample"):
        deliver(Late(), 1, 2)


def test_a_function_given_to_filter_may_ask_who_runs_it(kit, deliver):
    stream = kit.Count(6).filter(lambda sample: agnoload.get_worker_info())
    assert deliver(stream, 2, 2) == [[0, 1], [2, 3], [4, 5]]


def test_a_shard_may_be_anything_that_is_indexed_or_iterated(kit, deliver, tmp_path):
    log = tmp_path / "log"

    class Folders(IterableDataset):
        num_shards = 5

        def shard(self, number):
            return [kit.Rows(4, 1, log), kit.Rows(4, -1, log), {"a": 1, "b": 2}, (n for n in "cd"), {5: 0}][number]

    loader = DataLoader(Folders(), 2, collate_fn=list, seed=7)
    first = [batch for _, batch in zip(range(4), loader, strict=False)]
    assert first == [[1, 2], [-1, -2], ["a", "b"], ["c", "d"]]
    log.write_bytes(b"")
    assert deliver(Folders(), 2, state=loader.state_dict()) == [[3, 4], [-3, -4], [5]]
    assert log.stat().st_size == 4
    derived = Folders().map(str).shuffle(1).split_by_rank(0, 1)
    assert sorted(derived) == sorted(map(str, Folders()))


# ------------------------------------------------------------------------------------------------ what a stream is


def test_what_is_a_stream_and_what_is_not(kit, load):
    assert is_stream(kit.Count(1))
    assert is_stream(iter([]))
    assert is_stream(kit.Torchlike(3))
    assert not is_stream([1])
    assert not is_stream(np.zeros(3))
    assert load((value for value in range(5)), 2) == [[0, 1], [2, 3], [4]]
    assert load({3, 1, 2}, 2) == [[1, 2], [3]]


def test_lengths_are_known_where_they_can_be(kit):
    assert len(kit.Count(7, 7).map(abs).shuffle(3)) == 7
    assert len(kit.Count(7, 7) + kit.Count(3, 3).map(abs)) == 10
    assert len(kit.Count(7, 7).take(9)) == len(kit.Count(9, 9).take(7)) == 7
    assert [len(kit.Count(7, 7).split_by_rank(rank, 3)) for rank in range(3)] == [3, 2, 2]
    assert type(next(iter(DataLoader(kit.Count(5), None)))) is int
    for stream in (kit.Count(7, 7).filter(bool), kit.Count(7).map(abs), kit.Sized([1]) + kit.Count(3)):
        for whole in (stream, DataLoader(stream, 2)):
            with pytest.raises(TypeError, match="length"):
                len(whole)


REJECTED = [
    (lambda kit: ChainDataset([kit.Count(3), [1]]), "ChainDataset needs streams .*, got list"),
    (lambda kit: ChainDataset([]), "at least one stream"),
    (lambda kit: ChainDataset(3), "an iterable of streams"),
    (lambda kit: kit.Count(3).map(1), "map needs a function of one sample, got 1"),
    (lambda kit: kit.Count(3).filter(None), "filter needs a function"),
    (lambda kit: kit.Count(3).take(-1), "n of take must be .*, got -1"),
    (lambda kit: kit.Count(3).batch(0), "size of batch must be a positive int, got 0"),
    (lambda kit: kit.Count(3).pack(0), "length of pack must be a positive int, got 0"),
    (lambda kit: kit.Count(3).pack(4, value=0.5), "value of pack must be .*, got 0.5"),
    *((lambda kit, n=n: kit.Count(3).shuffle(n), "buffer_size") for n in (0, -3, 2.5, True, None)),
    (lambda kit: DataLoader(kit.Count(10), shuffle=True), r"shuffle\(buffer_size\)"),
    (lambda kit: DataLoader(kit.Count(10), sampler=[0]), "sampler"),
    (lambda kit: DataLoader(kit.Count(10), batch_sampler=[[0]]), "batch_sampler"),
    *((lambda kit, n=n: list(DataLoader(kit.Sized([1], num_shards=n))), "num_shards") for n in (-1, 1.5, True)),
]


def test_what_cannot_be_made_is_rejected(kit):
    for make, words in REJECTED:
        with pytest.raises(OptionError, match=words):
            make(kit)
    with pytest.raises(NotImplementedError, match="must define __iter__, or num_shards and shard"):
        iter(IterableDataset())
