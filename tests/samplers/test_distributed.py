"""Ranks: their seeds and tails, where rank and world come from, and what is refused. See also test_every_sampler.py."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from agnoload.errors import AgnoloadWarning, OptionError
from agnoload.samplers import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    batched,
)
from agnoload.system import VARIABLES, rank_and_world


def shares(world, make, **options):
    return [list(DistributedSampler(make(), world, rank, **options)) for rank in range(world)]


def test_epochs_differ_and_ranks_share_nothing_without_a_seed_or_set_epoch():
    ranks = [DistributedSampler(range(10), 2, rank) for rank in (0, 1)]
    epochs = [[list(rank) for rank in ranks] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(epoch[0] + epoch[1]) == list(range(10))
    for rank in ranks:
        rank.set_epoch(0)
    assert [list(rank) for rank in ranks] == epochs[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tail": "keep"}, [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        ({}, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]),
        ({"drop_last": True}, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ({"drop_last": True, "tail": "drop"}, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    ],
)
def test_what_does_not_come_out_even(options, expected):
    assert shares(3, lambda: range(10), shuffle=False, **options) == expected


def test_fewer_items_than_ranks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(map(len, shares(5, lambda: range(2), shuffle=False, tail="keep"))) == [1, 1, 0, 0, 0]
        assert list(map(len, shares(5, lambda: range(2), shuffle=False, tail="drop"))) == [0, 0, 0, 0, 0]
    found = []
    for rank in range(5):
        with pytest.warns(AgnoloadWarning, match="has 2 items for 5 ranks") as caught:
            sampler = DistributedSampler(range(2), 5, rank, shuffle=False)
        found.append(list(sampler) + list(sampler))
        assert len(caught) == 1
        assert caught[0].filename == __file__
    assert found == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]


def test_weights_count_on_every_rank():
    only = [list(DistributedSampler(WeightedRandomSampler([1, 0, 0, 0], 8), 2, r)) for r in (0, 1)]
    assert only == [[0] * 4] * 2


def test_the_drawing_that_explains_positions_is_right():
    one = SequentialSampler(range(10)).order(0, 0)
    three = [replace(one, rank=rank, stride=3) for rank in range(3)]
    assert (three[1].first, three[1].stride, three[1].end, three[1].reached(2)) == (1, 3, 10, 6)
    assert list(three[1]) == [1, 4, 7]
    two = [replace(one, rank=rank, stride=2).after(6) for rank in range(2)]
    assert [(order.first, order.stride, order.end, list(order)) for order in two] == [
        (6, 2, 10, [6, 8]),
        (7, 2, 10, [7, 9]),
    ]
    batches = batched(three[1], 2)
    assert ([batches.position(k) for k in range(2)], batches.stride, batches.reached(1)) == ([1, 7], 3, 6)


def test_two_ranks_resume_where_four_stopped():
    four = [batched(DistributedSampler(range(64), 4, r).order(0, 0), 4) for r in range(4)]
    unbroken = [{i for rank in four for i in rank.batch(k).tolist()} for k in range(4)]
    position = four[0].reached(1)
    assert position == 16
    two = [batched(DistributedSampler(range(64), 2, r).order(0, 0), 8).after(position) for r in range(2)]
    assert [{i for rank in two for i in rank.batch(k).tolist()} for k in range(3)] == unbroken[1:]


# --- rank and world


def test_rank_and_world_come_from_the_environment(monkeypatch):
    for rank_name, world_name in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(rank_name, "2")
            patch.setenv(world_name, "3")
            sampler = DistributedSampler(range(10), shuffle=False, tail="keep")
            assert (sampler.rank, sampler.num_replicas) == (2, 3)
            assert list(sampler) == [2, 5, 8]
            assert DistributedSampler(range(10), 5, 4).rank == 4
            half = DistributedSampler(range(10), rank=1)
            assert (half.rank, half.num_replicas) == (1, 3)


def test_rank_and_world_come_from_the_backend_when_nothing_else_says():
    sampler = DistributedSampler(range(10), shuffle=False, tail="keep")
    batches = BatchSampler(sampler, 2, False)
    assert list(sampler) == list(range(10))
    sampler.resolve_ranks((1, 2))
    assert list(batches) == [[1, 3], [5, 7], [9]]
    given_rank = DistributedSampler(range(10), 3, 0)
    given_rank.resolve_ranks((1, 2))
    assert (given_rank.rank, given_rank.num_replicas) == (0, 3)
    assert rank_and_world((0, 8), {"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2)
    assert rank_and_world((0, 8), {"RANK": "1"}) == (0, 8)
    assert rank_and_world((0, 8), {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "RANK": ""}) == (3, 4)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2 must satisfy 0 <= rank < world size"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x and WORLD_SIZE=2 must be integers"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "0"}, "SLURM_NTASKS=0 must satisfy"),
    ],
)
def test_variables_that_make_no_sense_are_named(environ, words):
    with pytest.raises(OptionError, match=words):
        rank_and_world(environ=environ)


class Stream:
    def __iter__(self):
        return iter(())

    def split_by_rank(self):
        return self


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (lambda world=world, rank=rank: DistributedSampler(range(10), world, rank), "rank|num_replicas")
            for world, rank in [(2, 2), (2, -1), (0, 0), (2.0, 0), (2, "0"), (True, 0)]
        ),
        (lambda: DistributedSampler(Stream(), 2, 0), r"split by its own split_by_rank\(\)"),
        (lambda: DistributedSampler(5, 2, 0), "must be a sampler, or it must have a length, got int: 5"),
        (lambda: DistributedSampler(range(4), 2, 0, shuffle=3), "shuffle must be a bool"),
        (lambda: DistributedSampler(range(4), 2, 0, drop_last="x"), "drop_last must be a bool"),
        (lambda: DistributedSampler(range(4), 2, 0, drop_last=True, tail="pad"), "drop_last=True means tail='drop'"),
        (lambda: DistributedSampler(range(4), 2, 0, tail="wrap"), "tail must be 'pad', 'drop', 'keep' or None"),
        (
            lambda: DistributedSampler(BatchSampler(DistributedSampler(RandomSampler(range(4)), 2, 0), 2, False), 2, 0),
            "must not be split over ranks already",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()
