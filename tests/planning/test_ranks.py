"""Ranks: what they get together, in which epoch, and after a change of their number."""

from __future__ import annotations

import json
import warnings
from itertools import chain, islice

import numpy as np
import pytest

from agnoload import (
    AgnoloadWarning,
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)


def lists(loader):
    return [batch.tolist() for batch in loader]


def flat(loader):
    return [value for batch in loader for value in batch.tolist()]


def two_epochs_of_rank(rank):
    loader = DataLoader(range(2), sampler=DistributedSampler(range(2), 5, rank, shuffle=False))
    return [flat(loader), flat(loader)]


def in_turns(shares):
    """r0[0], r1[0], ... r0[1], r1[1], ..."""
    turns = []
    for place in range(max(map(len, shares))):
        turns += [share[place] for share in shares if place < len(share)]
    return turns


# ------------------------------------------------------------------------------------------------ C17: other ranks


def rank_loader(data, rank, world, batch, workers=0, **options):
    sampler = DistributedSampler(data, world, rank)
    return DataLoader(data, batch, sampler=sampler, seed=0, num_workers=workers, **options)


def test_c17_four_ranks_of_four_go_on_as_two_of_eight():
    data = range(64)
    whole = [lists(rank_loader(data, rank, 4, 4, workers=2)) for rank in range(4)]
    assert all(len(batches) == 4 for batches in whole)
    loader = rank_loader(data, 0, 4, 4, workers=2)
    first = next(iter(loader)).tolist()
    assert first == whole[0][0]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    resumed = []
    for rank in range(2):
        other = rank_loader(data, rank, 2, 8, workers=3)
        other.load_state_dict(state)
        resumed.append(lists(other))
    seen = list(chain.from_iterable(batches[0] for batches in whole))
    for step in range(3):
        expected = {index for batches in whole for index in batches[step + 1]}
        found = [index for batches in resumed for index in batches[step]]
        assert set(found) == expected
        assert len(found) == 16
        seen += found
    assert [len(batches) for batches in resumed] == [3, 3]
    assert sorted(seen) == list(range(64))


def test_c17_the_draws_of_a_sample_do_not_depend_on_the_ranks(kit):
    data = kit.Drawing(64)

    def drawn(batches):
        return {pair for batch in batches for pair in zip(batch["index"].tolist(), batch["own"].tolist(), strict=True)}

    loader = rank_loader(data, 0, 4, 4)
    next(iter(loader))
    state = loader.state_dict()
    whole = set().union(*(drawn(list(rank_loader(data, rank, 4, 4))[1:]) for rank in range(4)))
    found = set()
    for rank in range(2):
        other = rank_loader(data, rank, 2, 8, workers=2)
        other.load_state_dict(state)
        found |= drawn(other)
    assert found == whole
    alone = drawn(DataLoader(data, 5, shuffle=True, seed=0))
    assert whole < alone


def test_c17_any_number_of_workers_continues(kit):
    data = kit.Drawing(40)
    loader = DataLoader(data, 4, shuffle=True, seed=7, num_workers=2)
    whole = [{name: field.tolist() for name, field in batch.items()} for batch in loader]
    for workers, kind in ((0, "process"), (1, "process"), (3, "process"), (2, "thread")):
        loader = DataLoader(data, 4, shuffle=True, seed=7, num_workers=2)
        list(islice(loader, 3))
        other = DataLoader(data, 4, shuffle=True, seed=7, num_workers=workers, worker_type=kind)
        other.load_state_dict(loader.state_dict())
        loader.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=AgnoloadWarning)  # process-wide generators under threads
            found = [{name: field.tolist() for name, field in batch.items()} for batch in other]
        names = ("index", "own") if kind == "thread" else whole[0]
        assert [[batch[name] for name in names] for batch in found] == [
            [batch[name] for name in names] for batch in whole[3:]
        ]


# ------------------------------------------------------------------------------------------------ C18: epochs


@pytest.mark.parametrize("seed", [None, 0, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_c18_each_epoch_has_an_order_of_its_own_that_the_ranks_share(seed, workers):
    def loaders():
        return [
            DataLoader(range(10), sampler=DistributedSampler(range(10), 2, rank), seed=seed, num_workers=workers)
            for rank in (0, 1)
        ]

    both = loaders()
    epochs = [[flat(loader) for loader in both] for _ in range(2)]
    for shares in epochs:
        assert sorted(shares[0] + shares[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert in_turns(epochs[0]) != in_turns(epochs[1])
    for loader in both:
        loader.set_epoch(0)
    assert [flat(loader) for loader in both] == epochs[0]
    assert [flat(loader) for loader in both] == epochs[1]


def test_c18_the_loaders_seed_makes_another_order_and_the_samplers_own_wins():
    def order(loader_seed=None, sampler_seed=None):
        sampler = DistributedSampler(range(40), 2, 0, seed=sampler_seed)
        return flat(DataLoader(range(40), sampler=sampler, seed=loader_seed))

    assert order() == order(loader_seed=0) == order(sampler_seed=0) == order(loader_seed=9, sampler_seed=0)
    assert order(loader_seed=9) == order(sampler_seed=9) != order()


def test_c18_set_epoch_of_the_sampler_brings_an_epoch_back_too():
    sampler = DistributedSampler(range(10), 2, 1)
    loader = DataLoader(range(10), sampler=sampler)
    first, second = flat(loader), flat(loader)
    sampler.set_epoch(0)
    assert [flat(loader), flat(loader)] == [first, second]
    sampler.set_epoch(1)
    assert flat(loader) == second
    assert loader.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_c18_a_resumed_loader_keeps_its_epoch(workers):
    def make():
        return DataLoader(range(10), 2, sampler=DistributedSampler(range(10), 2, 1), num_workers=workers)

    loader = make()
    epochs = [lists(loader) for _ in range(3)]
    loader = make()
    lists(loader)
    iterator = iter(loader)
    assert next(iterator).tolist() == epochs[1][0]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert lists(resumed) == epochs[1][1:]
    assert lists(resumed) == epochs[2]


# ------------------------------------------------------------------------------------------------ C19: evaluation


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("keep", [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        ("pad", [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]),
        (None, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]),
        ("drop", [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    ],
)
def test_c19_what_does_not_come_out_even_is_as_chosen(tail, expected, workers):
    for rank, share in enumerate(expected):
        sampler = DistributedSampler(range(10), 3, rank, shuffle=False, tail=tail)
        loader = DataLoader(range(10), 2, sampler=sampler, num_workers=workers)
        assert flat(loader) == share
        assert len(loader) == len(lists(loader)) == -(-len(share) // 2)


def test_c19_fewer_samples_than_ranks():
    shares = [DistributedSampler(range(2), 5, rank, shuffle=False, tail="keep") for rank in range(5)]
    assert [flat(DataLoader(range(2), sampler=sampler)) for sampler in shares] == [[0], [1], [], [], []]
    for rank, share in enumerate([[0], [1], [0], [1], [0]]):
        with pytest.warns(AgnoloadWarning, match=r"2 items for 5 ranks") as caught:
            found = two_epochs_of_rank(rank)
        assert found == [share, share]
        assert len(caught) == 1


# ------------------------------------------------------------------------------------------------ C20: around samplers


@pytest.mark.parametrize("workers", [0, 2])
def test_c20_weights_hold_on_several_ranks(workers):
    def shares(weights):
        return [
            flat(DataLoader(range(4), sampler=sampler, seed=3, num_workers=workers))
            for rank in (0, 1)
            for sampler in [DistributedSampler(WeightedRandomSampler(weights, 8), 2, rank, shuffle=False)]
        ]

    alone = flat(DataLoader(range(4), sampler=WeightedRandomSampler([1, 2, 3, 4], 8), seed=3))
    assert in_turns(shares([1, 2, 3, 4])) == alone
    assert shares([1, 0, 0, 0]) == [[0] * 4, [0] * 4]


@pytest.mark.parametrize("world", [2, 3])
def test_c20_every_sampler_split_over_ranks_is_the_sampler_alone(make_sampler, world):
    for epochs in (1, 2):
        alone = DataLoader(range(26), sampler=make_sampler(), seed=3)
        split = [
            DataLoader(range(26), 4, sampler=DistributedSampler(make_sampler(), world, rank, tail="keep"), seed=3)
            for rank in range(world)
        ]
        for _ in range(epochs):
            expected, shares = flat(alone), [flat(loader) for loader in split]
        assert in_turns(shares) == expected


@pytest.mark.parametrize("world", [2, 3])
def test_c20_every_batch_sampler_split_over_ranks_is_the_batch_sampler_alone(make_batch_sampler, world):
    alone = lists(DataLoader(range(26), batch_sampler=make_batch_sampler(), seed=3))
    shares = [
        lists(
            DataLoader(
                range(26),
                batch_sampler=DistributedSampler(make_batch_sampler(), world, rank, tail="keep"),
                seed=3,
                num_workers=2 if world == 2 else 0,
            )
        )
        for rank in range(world)
    ]
    assert in_turns(shares) == alone


def test_batches_of_a_share_and_shares_of_batches_draw_what_one_rank_draws(kit):
    data, whole = kit.Drawing(26), {}
    for batch in DataLoader(data, 4, shuffle=True, seed=3):
        whole |= dict(zip(batch["index"].tolist(), batch["own"].tolist(), strict=True))
    for rank in (0, 1):
        for batch_sampler in (
            DistributedSampler(BatchSampler(RandomSampler(data), 4, False), 2, rank, tail="keep"),
            BatchSampler(DistributedSampler(data, 2, rank, tail="keep"), 4, False),
        ):
            for batch in DataLoader(data, batch_sampler=batch_sampler, seed=3):
                for index, own in zip(batch["index"].tolist(), batch["own"].tolist(), strict=True):
                    assert whole[index] == own


def test_c08_ranks_draw_nothing_in_common(kit):
    data, seen = kit.Drawing(64), {"own": [], "numpy": [], "python": []}
    alone = {}
    for batch in DataLoader(data, 4, seed=0):
        alone |= dict(zip(batch["index"].tolist(), batch["own"].tolist(), strict=True))
    for rank in (0, 1):
        sampler = DistributedSampler(data, 2, rank, shuffle=False)
        for batch in DataLoader(data, 4, sampler=sampler, seed=0, num_workers=2):
            for source in seen:
                seen[source] += batch[source].tolist()
            assert [alone[index] for index in batch["index"].tolist()] == batch["own"].tolist()
    for found in seen.values():
        assert len(set(found)) == len(found) == 64


def test_ranks_and_seeds_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        shares.append(flat(DataLoader(range(9), 2, sampler=DistributedSampler(range(9), tail="keep"), num_workers=2)))
    assert sorted(shares[0] + shares[1]) == list(range(9))
    assert np.abs(len(shares[0]) - len(shares[1])) == 1
