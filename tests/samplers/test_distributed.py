"""Ranks: what they get together is the order of one, for datasets and for any sampler."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import AgnoloadWarning, OptionError
from agnoload.samplers import (
    BatchSampler,
    BucketBatchSampler,
    ClassUniformBatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    batched,
    effective_seed,
    has_random_access,
)
from agnoload.samplers.base import is_split
from agnoload.system import VARIABLES, rank_and_world


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch):
    for names in VARIABLES:
        for name in names:
            monkeypatch.delenv(name, raising=False)


class Backwards(Sampler[int]):
    """A user's sampler."""

    epoch = None

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))

    def __len__(self):
        return self.n

    def set_epoch(self, epoch):
        self.epoch = epoch


def shares(world, make, **options):
    return [list(DistributedSampler(make(), world, rank, **options)) for rank in range(world)]


def in_turns(ranks):
    return [item for turn in range(max(map(len, ranks))) for items in ranks for item in items[turn : turn + 1]]


# --- epochs and seeds


def test_c18_epochs_differ_and_ranks_share_nothing_without_a_seed_or_set_epoch():
    ranks = [DistributedSampler(range(10), 2, rank) for rank in (0, 1)]
    epochs = [[list(rank) for rank in ranks] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(epoch[0] + epoch[1]) == list(range(10))
    for rank in ranks:
        rank.set_epoch(0)
    assert [list(rank) for rank in ranks] == epochs[0]


def test_c18_ranks_use_0_unless_somebody_gives_a_seed():
    assert effective_seed(DistributedSampler(range(5), 2, 0), None, 99) == 0
    assert effective_seed(DistributedSampler(range(5), 2, 0), 7, 99) == 7
    assert effective_seed(DistributedSampler(range(5), 2, 0, seed=3), 7, 99) == 3
    assert effective_seed(DistributedSampler(RandomSampler(range(5), seed=4), 2, 0), 7, 99) == 4
    assert effective_seed(DistributedSampler(RandomSampler(range(5), seed=4), 2, 0, seed=3), 7, 99) == 3
    assert effective_seed(BatchSampler(DistributedSampler(range(5), 2, 0), 2, False), None, 99) == 0
    assert effective_seed(BatchSampler(DistributedSampler(range(5), 2, 0, seed=3), 2, False), 7, 99) == 3


def test_the_sampler_inside_takes_the_outer_seed_and_epoch():
    inner = RandomSampler(range(20), seed=4)
    outer = DistributedSampler(inner, 1, 0, seed=3)
    outer.set_epoch(2)
    assert list(outer) == RandomSampler(range(20)).order(3, 2).indices(0, 20).tolist()
    assert inner.epoch == 2


def test_one_rank_of_a_dataset_is_what_a_random_sampler_gives():
    assert in_turns(shares(3, lambda: range(20), seed=5, tail="keep")) == list(RandomSampler(range(20), seed=5))


# --- tails


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tail": "keep"}, [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        ({"tail": "pad"}, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]),
        ({}, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]),
        ({"tail": "drop"}, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ({"drop_last": True}, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ({"drop_last": True, "tail": "drop"}, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    ],
)
def test_c19_what_does_not_come_out_even(options, expected):
    assert shares(3, lambda: range(10), shuffle=False, **options) == expected
    for rank in range(3):
        assert len(DistributedSampler(range(10), 3, rank, shuffle=False, **options)) == len(expected[rank])


def test_c19_fewer_items_than_ranks():
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


def test_c19_repeats_can_be_told_from_data():
    masks = [DistributedSampler(range(10), 3, rank, shuffle=False).is_padding for rank in range(3)]
    assert [mask.tolist() for mask in masks] == [[False] * 4, [False, False, False, True], [False, False, False, True]]
    assert not DistributedSampler(range(10), 3, 2, tail="keep").is_padding.any()
    batches = BatchSampler(RandomSampler(range(10)), 2, False)
    assert DistributedSampler(batches, 2, 1).is_padding.tolist() == [False, False, True]


@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from(["pad", "drop", "keep"]))
@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_shares_agree_with_torch_where_it_has_the_same(n, world, tail):
    ranks = shares(world, lambda: range(n), shuffle=False, tail=tail)
    if tail == "keep":
        assert in_turns(ranks) == list(range(n))
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
        return
    data = pytest.importorskip("torch.utils.data")
    for rank in range(world):
        theirs = data.DistributedSampler(range(n), world, rank, shuffle=False, drop_last=tail == "drop")
        assert ranks[rank] == list(theirs)


@pytest.mark.parametrize("tail", ["pad", "keep"])
def test_drop_last_and_another_tail_are_refused(tail):
    with pytest.raises(OptionError, match=f"drop_last=True means tail='drop', got tail='{tail}'"):
        DistributedSampler(range(10), 2, 0, drop_last=True, tail=tail)
    with pytest.raises(OptionError, match="tail must be 'pad', 'drop', 'keep' or None, got 'wrap'"):
        DistributedSampler(range(10), 2, 0, tail="wrap")


# --- over samplers


def test_c20_weights_count_on_every_rank():
    weighted = WeightedRandomSampler([1, 2, 3, 4], 8)
    ranks = [DistributedSampler(weighted, 2, r, shuffle=False) for r in (0, 1)]
    orders = [rank.order(3, 0).indices(0, 4).tolist() for rank in ranks]
    assert in_turns(orders) == weighted.order(3, 0).indices(0, 8).tolist()
    only = [list(DistributedSampler(WeightedRandomSampler([1, 0, 0, 0], 8), 2, r)) for r in (0, 1)]
    assert only == [[0] * 4] * 2


def test_c20_every_sampler_is_what_its_ranks_get_in_turns(make_sampler):
    if is_split(make_sampler()):
        with pytest.raises(OptionError, match="must not be split over ranks already"):
            DistributedSampler(make_sampler(), 2, 0)
        return
    whole = list(DistributedSampler(make_sampler(), 1, 0, seed=3))
    for world in (2, 3, 5):
        ranks = shares(world, make_sampler, seed=3, tail="keep")
        assert in_turns(ranks) == whole
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


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


def test_positions_are_those_of_the_global_sequence():
    order = DistributedSampler(range(10), 3, 1, tail="keep").order(0, 0)
    assert (order.first, order.stride) == (1, 3)
    assert order.reached(2) == 6
    batches = batched(order, 2)
    assert [batches.position(k) for k in range(len(batches))] == [1, 7]
    assert batches.stride == 3
    assert batches.reached(1) == 6


@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_repeats_have_positions_of_their_own():
    labels = np.arange(20) % 4
    makers = [
        lambda: ClassUniformBatchSampler(labels, 2, 3, seed=0),
        lambda: BucketBatchSampler(np.arange(30), max_tokens=60, seed=0),
        lambda: BatchSampler(RandomSampler(range(23)), 4, False),
    ]
    for make in makers:
        for world in (2, 3, 5):
            taken = []
            for rank in range(world):
                order = DistributedSampler(make(), world, rank).batches(0, 0)
                for k in range(len(order)):
                    start = order.position(k)
                    taken += [start + i * order.stride for i in range(len(order.batch(k)))]
            assert len(set(taken)) == len(taken)


# --- other ranks go on


def test_c17_two_ranks_go_on_where_four_stopped():
    four = [batched(DistributedSampler(range(64), 4, r).order(0, 0), 4) for r in range(4)]
    unbroken = [{i for rank in four for i in rank.batch(k).tolist()} for k in range(4)]
    position = four[0].reached(1)
    assert position == 16
    two = [batched(DistributedSampler(range(64), 2, r).order(0, 0), 8).after(position) for r in range(2)]
    later = [{i for rank in two for i in rank.batch(k).tolist()} for k in range(3)]
    assert later == unbroken[1:]
    assert set().union(unbroken[0], *later) == set(range(64))


@settings(max_examples=100)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.data())
def test_c17_the_rest_comes_exactly_once_on_any_other_number_of_ranks(n, before, behind, data):
    make = data.draw(st.sampled_from([lambda: range(n), lambda: BatchSampler(RandomSampler(range(n)), 3, False)]))

    def orders(world):
        samplers = [DistributedSampler(make(), world, r, tail="keep") for r in range(world)]
        return [s.batches(5, 0) if s.yields_batches else batched(s.order(5, 0), 2) for s in samplers]

    first = orders(before)
    done = data.draw(st.integers(0, min(map(len, first))))
    taken = [i for order in first for k in range(done) for i in order.batch(k).tolist()]
    position = first[0].reached(done)
    rest = [order.after(position) for order in orders(behind)]
    taken += [i for order in rest for k in range(len(order)) for i in order.batch(k).tolist()]
    assert sorted(taken) == list(range(n))


@pytest.mark.parametrize("tail", ["pad", "drop", "keep"])
@pytest.mark.parametrize("inside", ["items", "batches"])
def test_a_resume_on_as_many_ranks_gives_what_an_unbroken_run_would_repeats_too(tail, inside):
    def order(rank):
        if inside == "items":
            return batched(DistributedSampler(range(23), 4, rank, tail=tail).order(1, 2), 1)
        batches = BatchSampler(RandomSampler(range(45)), 2, False)
        return DistributedSampler(batches, 4, rank, tail=tail).batches(1, 2)

    for rank in range(4):
        whole = order(rank)
        for done in range(min(len(order(r)) for r in range(4)) + 1):
            rest = order(rank).after(whole.reached(done))
            for k in range(len(rest)):
                assert rest.batch(k).tolist() == whole.batch(done + k).tolist()
                assert rest.position(k) == whole.position(done + k)
            assert len(rest) == len(whole) - done


# --- user-defined samplers


@pytest.mark.parametrize("tail", ["pad", "drop", "keep"])
@pytest.mark.parametrize("n", [1, 6, 7, 8, 9])
@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_user_defined_samplers_are_dealt_out_as_ours_are(tail, n):
    wanted = shares(3, lambda: range(n), shuffle=False, tail=tail)
    found = shares(3, lambda: Backwards(n), tail=tail)
    assert found == [[n - 1 - i for i in share] for share in wanted]
    assert [len(DistributedSampler(Backwards(n), 3, r, tail=tail)) for r in range(3)] == list(map(len, found))


def test_user_defined_samplers_may_have_no_end_and_no_length():
    def endless():
        number = 0
        while True:
            yield number
            number += 1

    sampler = DistributedSampler(endless(), 3, 1)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(3)] == [1, 4, 7]
    assert list(DistributedSampler(iter([]), 3, 0)) == []


def test_set_epoch_reaches_a_user_defined_sampler_inside():
    inner = Backwards(4)
    sampler = BatchSampler(DistributedSampler(inner, 2, 0), 2, False)
    sampler.set_epoch(5)
    assert inner.epoch == 5
    assert not has_random_access(sampler)
    with pytest.raises(OptionError, match="iterate it"):
        DistributedSampler(inner, 2, 0).order(0, 0)


# --- rank and world


@pytest.mark.parametrize(("rank_name", "world_name"), VARIABLES)
def test_rank_and_world_come_from_the_environment(rank_name, world_name, monkeypatch):
    monkeypatch.setenv(rank_name, "2")
    monkeypatch.setenv(world_name, "3")
    sampler = DistributedSampler(range(10), shuffle=False, tail="keep")
    assert (sampler.rank, sampler.num_replicas) == (2, 3)
    assert list(sampler) == [2, 5, 8]
    assert DistributedSampler(range(10), 5, 4).rank == 4
    assert DistributedSampler(range(10), rank=1).num_replicas == 3


def test_rank_and_world_come_from_the_backend_when_nothing_else_says():
    sampler = DistributedSampler(range(10), shuffle=False, tail="keep")
    assert list(sampler) == list(range(10))
    batches = BatchSampler(sampler, 2, False)
    sampler.resolve_ranks((1, 2))
    assert list(batches) == [[1, 3], [5, 7], [9]]
    given_rank = DistributedSampler(range(10), 3, 0)
    given_rank.resolve_ranks((1, 2))
    assert (given_rank.rank, given_rank.num_replicas) == (0, 3)


def test_the_environment_comes_before_the_backend():
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


@pytest.mark.parametrize(("world", "rank"), [(2, 2), (2, -1), (0, 0), (2.0, 0), (2, "0"), (True, 0)])
def test_ranks_that_make_no_sense_are_refused(world, rank):
    with pytest.raises(OptionError, match=r"rank|num_replicas"):
        DistributedSampler(range(10), world, rank)


def test_what_has_no_length_and_streams_are_refused():
    class Stream:
        def __iter__(self):
            return iter(())

        def split_by_rank(self):
            return self

    with pytest.raises(OptionError, match=r"split by its own split_by_rank\(\)"):
        DistributedSampler(Stream(), 2, 0)
    with pytest.raises(OptionError, match="must be a sampler, or it must have a length, got int: 5"):
        DistributedSampler(5, 2, 0)
