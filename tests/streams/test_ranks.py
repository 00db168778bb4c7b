"""Streams split over processes that train together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.streams import IterableDataset, Mixture, resolve_ranks


def values(batches):
    return [value for batch in batches for value in batch]


class Lists(IterableDataset):
    """Shards whose lengths are known."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.num_shards = len(sizes)

    def shard(self, number):
        return [(number, place) for place in range(self.sizes[number])]

    def __len__(self):
        return sum(self.sizes)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_by_default_each_sample_comes_on_exactly_one_rank(kit, world, workers):
    for stream in (kit.Count(10), kit.Shards([4, 3, 1])):
        shares = [values(kit.deliver(stream.split_by_rank(rank, world), 2, workers=workers)) for rank in range(world)]
        assert sorted(values(shares)) == sorted(stream)


def test_samples_and_shards_are_dealt_out_in_turn(kit):
    assert [list(kit.Count(7).split_by_rank(rank, 3)) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert {shard for shard, _ in kit.Shards([1] * 5).split_by_rank(1, 2)} == {1, 3}


def test_c08_no_two_ranks_draw_the_same_and_a_sample_draws_what_it_draws_on_one_rank(kit):
    alone = dict(values(kit.deliver(kit.Drawing(12), 3, seed=0)))
    alone_mapped = dict(values(kit.deliver(kit.Count(12).map(kit.with_draws), 3, seed=0)))
    for make, own in (
        (lambda: kit.Drawing(12), alone),
        (lambda: kit.Count(12).map(kit.with_draws), alone_mapped),
    ):
        ranks = [dict(values(kit.deliver(make().split_by_rank(rank, 2), 3, seed=0, rank=rank))) for rank in range(2)]
        drawn = [{number for three in rank.values() for number in three} for rank in ranks]
        assert drawn[0].isdisjoint(drawn[1])
        assert len(drawn[0] | drawn[1]) == 36
        for rank in ranks:
            assert all(three[0] == own[value][0] for value, three in rank.items())


def test_c08_ranks_that_read_the_same_stream_draw_differently(kit):
    for stream in (kit.Drawing(8), kit.Count(8).map(kit.with_draws), kit.Shards([4, 4]).map(kit.with_draws)):
        drawn = [
            {number for _, three in values(kit.deliver(stream, 3, rank=rank)) for number in three} for rank in range(2)
        ]
        assert drawn[0].isdisjoint(drawn[1])
        assert len(drawn[0] | drawn[1]) == 48


def test_ranks_agree_on_where_a_stream_wanders(kit):
    shares = [values(kit.deliver(kit.Wandering(20).split_by_rank(rank, 3), 2, rank=rank)) for rank in range(3)]
    assert sorted(values(shares)) == list(range(20))


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), max_size=6), world=st.integers(1, 4))
def test_uneven_ranks_stop_together_or_are_filled(kit, sizes, world):
    for stream in (Lists(sizes), kit.Count(sum(sizes))):
        everything = list(stream)
        keep, stop, repeat, pad = (
            [values(kit.deliver(stream.split_by_rank(rank, world, uneven), 2)) for rank in range(world)]
            for uneven in ("keep", "stop", "repeat", "pad")
        )
        assert sorted(values(keep)) == everything
        shortest, longest = min(map(len, keep)), max(map(len, keep))
        assert [len(share) for share in stop] == [shortest] * world
        assert all(set(share) <= set(own) for share, own in zip(stop, keep, strict=True))
        assert len(set(values(stop))) == shortest * world
        assert [len(share) for share in repeat] == [longest] * world
        assert set(values(repeat)) == set(everything)
        assert [[value for value, _ in share] for share in pad] == repeat
        assert sorted(value for value, real in values(pad) if real) == everything
        for uneven, shares in (("keep", keep), ("stop", stop), ("repeat", repeat), ("pad", pad)):
            assert [len(stream.split_by_rank(rank, world, uneven)) for rank in range(world)] == [
                len(share) for share in shares
            ]


def test_repeats_come_from_the_start_as_samplers_do_it(kit):
    shares = [list(kit.Count(2).split_by_rank(rank, 5, uneven="repeat")) for rank in range(5)]
    assert shares == [[0], [1], [0], [1], [0]]


def test_the_lengths_of_shards_can_be_told(kit):
    class Told(kit.Shards):
        def shard_length(self, number):
            return self.sizes[number]

    shares = [list(Told([4, 1, 2]).split_by_rank(rank, 2, uneven="stop")) for rank in range(2)]
    assert shares == [[(0, 0)], [(1, 0)]]
    for stream in (Told([4, 1, 2]).map(str), Told([4, 1, 2]).shuffle(3), Told([4]) + Told([1, 2])):
        shares = [list(stream.split_by_rank(rank, 2, uneven="stop")) for rank in range(2)]
        assert len(shares[0]) == len(shares[1]) == len(stream.split_by_rank(0, 2, uneven="stop")) > 0
    with pytest.raises(OptionError, match=r"shard_length\(i\), or use uneven='keep'"):
        kit.Shards([4, 1]).split_by_rank(0, 2, uneven="stop")


def test_rank_and_world_come_from_the_environment(kit, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = kit.Count(7).split_by_rank()
    assert (stream.rank, stream.world_size) == (1, 3)
    resolve_ranks(stream.map(abs), (0, 2))
    assert list(stream) == [1, 4]


def test_without_an_environment_the_backend_is_asked(kit, monkeypatch):
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    inner = kit.Count(7).split_by_rank()
    stream = Mixture([inner.shuffle(3), [1]], [1, 1])
    assert list(inner) == list(range(7))
    resolve_ranks(stream, (1, 2))
    assert list(inner) == [1, 3, 5]
    given_one = kit.Count(7).split_by_rank(0, 2)
    resolve_ranks(given_one, (1, 2))
    assert given_one.rank == 0


def test_the_rank_of_this_process_is_part_of_the_key_where_nothing_is_split(kit, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = kit.Plan(kit.Shards([1, 1]), size=1)
    assert plan._layout.rank == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 2), "rank 2 and world size 2"),
        ((-1, 2), "rank -1"),
        ((1,), "or neither"),
        ((0, 2, "drop"), "'keep', 'stop'"),
    ],
)
def test_what_is_no_rank_is_refused(kit, arguments, words):
    with pytest.raises(OptionError, match=words):
        kit.Count(3).split_by_rank(*arguments)


def test_ranks_and_workers_split_shards_that_split_themselves(kit):
    shares = [
        values(kit.deliver(kit.SelfSplitting(12).split_by_rank(rank, 2), 2, workers=2, rank=rank)) for rank in (0, 1)
    ]
    assert sorted(value for value, _ in values(shares)) == list(range(12))
    drawn = [{three[0] for _, three in share} for share in shares]
    assert len(drawn[0] | drawn[1]) == 12
