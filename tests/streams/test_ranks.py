"""Streams split over the processes that train together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import AgnoloadWarning, DataLoader, Mixture, OptionError
from agnoload.streams import resolve_ranks


def flat(batches):
    return [value for batch in batches for value in batch]


def test_three_shards_over_four_workers_over_two_ranks_come_once(kit, load):
    values = []
    for rank in (0, 1):
        with pytest.warns(AgnoloadWarning, match="lanes? for 4 workers"):
            values += flat(load(kit.Shards(13, 3).split_by_rank(rank, 2), 2, num_workers=4))
    assert sorted(values) == list(range(13))


def test_ranks_are_found_in_the_environment(kit, same_for_all, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert same_for_all(lambda: kit.Count(8).split_by_rank(), 2) == [[1, 3], [5, 7]]
    assert same_for_all(lambda: kit.Count(4), 2) == [[0, 1], [2, 3]]  # never split in silence


def test_padded_ranks_come_with_a_mask(kit, same_for_all):
    found = [same_for_all(lambda rank=rank: kit.Count(5).split_by_rank(rank, 2, "pad"), 4) for rank in (0, 1)]
    assert found == [[([0, 2, 4], [True] * 3)], [([1, 3, 0], [True, True, False])]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("uneven", ["keep", "stop", "repeat", "pad"])
def test_ranks_that_split_shuffled_shards_agree_on_their_order_and_know_their_lengths(kit, uneven, workers):
    """Each rank makes a stream of its own, as each process does."""
    sizes, orders = [4, 1, 3, 0, 5], []
    for epoch in range(3):
        shares, found = [], []
        for rank in range(2):
            stream = kit.Sized(sizes).shuffle(3).split_by_rank(rank, 2, uneven=uneven)
            loader = DataLoader(stream, 2, seed=5, num_workers=workers, worker_type="thread")
            loader.set_epoch(epoch)
            batches = len(loader)
            columns = [batch if uneven == "pad" else (batch,) for batch in loader]
            assert len(columns) == batches
            found.append([list(zip(*(column.tolist() for column in batch), strict=True)) for batch in columns])
            shares.append(list(itertools.chain(*found[-1])))
        if uneven == "pad":
            assert len(shares[0]) == len(shares[1])
            shares = [[sample for sample in share if sample[1]] for share in shares]
        everything = [sample[0] for share in shares for sample in share]
        if uneven in ("keep", "pad"):
            assert sorted(everything) == list(range(13))
        if uneven == "stop":
            assert len(set(everything)) == len(everything) == 2 * len(shares[0])
        if uneven == "repeat":
            assert len(shares[0]) == len(shares[1])
            assert set(everything) == set(range(13))
        orders.append(found)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("outer", [lambda stream: stream, lambda stream: stream.map(lambda value: value)])
def test_ranks_without_a_seed_agree_on_what_they_split(kit, load, outer):
    def make(name, rank, world=3):
        streams = {
            "samples": kit.Count(23).shuffle(5),
            "shards": kit.Shards(23, 7).shuffle(5),
            "mixture": agnoload.Mixture([range(12), range(12, 23)], [2, 1], stop="last", shuffle=True),
        }
        return outer(streams[name].split_by_rank(rank, world))

    for name in ("samples", "shards"):
        shares = [flat(load(make(name, rank), 4, num_workers=2, worker_type="thread")) for rank in range(3)]
        assert sorted(flat(shares)) == list(range(23))
        assert DataLoader(make(name, 0)).seed == 0
        assert DataLoader(make(name, 0), seed=7).seed == 7
    shares = [flat(load(make("mixture", rank), 4)) for rank in range(3)]
    whole = flat(load(make("mixture", 0, world=1), 4))
    assert set(whole) == set(range(23))
    assert [shares[place % 3][place // 3] for place in range(len(whole))] == whole
    assert len({DataLoader(kit.Count(5)).seed for _ in range(3)}) == 3


def test_a_shuffled_stream_whose_length_was_asked_for_before_runs_on_the_loaders_seed(kit, load):
    def make(ask):
        stream = kit.Sized([3, 2, 4]).shuffle(2).split_by_rank(0, 1, uneven="stop")
        if ask:
            len(stream), list(stream)
        return load(stream, 2, seed=1)

    assert make(ask=True) == make(ask=False)


def test_c08_ranks_draw_nothing_in_common_from_a_stream(kit, load, monkeypatch):
    seen = {"own": [], "numpy": [], "python": []}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        for batch in load(kit.Drawing(12), 4, seed=0, num_workers=2):
            for source in seen:
                seen[source] += batch[source]
    for found in seen.values():
        assert len(set(found)) == len(found) == 24


def test_c08_ranks_that_split_a_stream_draw_what_one_rank_draws(kit, load):
    whole = {}
    for batch in load(kit.Count(12).map(kit.with_own_draw), 4, seed=0):
        whole |= dict(zip(batch["value"], batch["own"], strict=True))
    for rank in (0, 1, 2):
        stream = kit.Count(12).split_by_rank(rank, 3).map(kit.with_own_draw)
        for batch in load(stream, 2, seed=0, num_workers=2):
            assert [whole[value] for value in batch["value"]] == batch["own"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_sample_comes_on_exactly_one_rank(kit, deliver, world, workers):
    for stream in (kit.Count(10), kit.Sized([4, 3, 1]), kit.Drawn(10), kit.SelfSplitting(12)):
        shares = [flat(deliver(stream.split_by_rank(rank, world), 2, workers)) for rank in range(world)]
        assert sorted(flat(shares)) == list(range(len(flat(shares))))
        assert len(flat(shares)) == (12 if isinstance(stream, kit.SelfSplitting) else len(list(stream)))


def test_samples_and_shards_are_dealt_out_in_turn(kit):
    assert [list(kit.Count(7).split_by_rank(rank, 3)) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert list(kit.Sized([1] * 5).split_by_rank(1, 2)) == [1, 3]


def test_repeats_come_from_the_start_as_samplers_do_it(kit):
    shares = [list(kit.Count(2).split_by_rank(rank, 5, uneven="repeat")) for rank in range(5)]
    assert shares == [[0], [1], [0], [1], [0]]


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 5), max_size=6), world=st.integers(1, 4))
def test_uneven_ranks_stop_together_or_are_filled(kit, deliver, sizes, world):
    total = sum(sizes)
    for stream in (kit.Sized(sizes), kit.Count(total, total)):
        splits = {
            uneven: [stream.split_by_rank(rank, world, uneven) for rank in range(world)]
            for uneven in ("keep", "stop", "repeat", "pad")
        }
        found = {uneven: [flat(deliver(split, 2)) for split in ranks] for uneven, ranks in splits.items()}
        keep, stop, repeat, pad = found.values()
        assert sorted(flat(keep)) == list(range(total))
        shortest, longest = min(map(len, keep)), max(map(len, keep))
        assert [len(share) for share in stop] == [shortest] * world
        assert all(set(share) <= set(own) for share, own in zip(stop, keep, strict=True))
        assert len(set(flat(stop))) == shortest * world
        assert [len(share) for share in repeat] == [longest] * world
        assert set(flat(repeat)) == set(range(total))
        assert [[value for value, _ in share] for share in pad] == repeat
        assert sorted(value for value, real in flat(pad) if real) == list(range(total))
        for uneven, ranks in splits.items():
            assert list(map(len, ranks)) == list(map(len, found[uneven]))


def test_the_stream_may_say_how_long_its_shards_are(kit):
    class Generators(kit.Sized):
        def shard(self, number):
            return iter(super().shard(number))

    class Saying(Generators):
        def shard_length(self, number):
            return self.sizes[number]

    assert [list(Saying([4, 1, 2]).split_by_rank(rank, 2, uneven="stop")) for rank in range(2)] == [[0], [4]]
    for stream in (Saying([4, 1, 2]).map(str), Saying([4, 1, 2]).shuffle(3), Saying([4]) + Saying([1, 2])):
        shares = [list(stream.split_by_rank(rank, 2, uneven="stop")) for rank in range(2)]
        assert len(shares[0]) == len(shares[1]) == len(stream.split_by_rank(0, 2, uneven="stop")) > 0
    with pytest.raises(OptionError, match=r"shard_length\(i\), or use uneven='keep'"):
        Generators([4, 1]).split_by_rank(0, 2, uneven="stop")


def test_rank_and_world_are_those_given_or_of_the_environment_or_of_the_backend(kit, monkeypatch):
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    inner, given_one = kit.Count(7).split_by_rank(), kit.Count(7).split_by_rank(0, 2)
    assert list(inner) == list(range(7))
    resolve_ranks(Mixture([inner.shuffle(3), given_one], [1, 1]), (1, 2))
    assert list(inner) == [1, 3, 5]
    assert given_one.rank == 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = kit.Count(7).split_by_rank()
    assert (stream.rank, stream.world_size) == (1, 3)
    resolve_ranks(stream.map(abs), (0, 2))
    assert list(stream) == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2), "rank 2 and world size 2"),
        ((-1, 2), "rank -1"),
        ((1,), "or neither"),
        ((0, 2, "drop"), "'keep', 'stop'"),
    ],
)
def test_ranks_that_cannot_be_are_rejected(kit, arguments, words):
    with pytest.raises(OptionError, match=words):
        kit.Count(3).split_by_rank(*arguments)
