"""Shares of ranks and samplers that know labels, weights or lengths, through a loader: no sample is read for them."""

from __future__ import annotations

import threading
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import (
    AgnoloadWarning,
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    DataLoader,
    DistributedSampler,
    OptionError,
    RandomSampler,
    WeightedRandomSampler,
    imbalance_weights,
)

few = settings(max_examples=40, deadline=None)


def lists(loader):
    return [batch.tolist() for batch in loader]


def flat(loader):
    return [value for batch in loader for value in batch.tolist()]


def in_turns(shares):
    """r0[0], r1[0], ... r0[1], r1[1], ..."""
    nothing = object()
    return [item for turn in zip_longest(*shares, fillvalue=nothing) for item in turn if item is not nothing]


# ------------------------------------------------------------------------------------------------ labels


KINDS = {
    "balanced": lambda labels: {"batch_sampler": BalancedBatchSampler(labels, 64)},
    "balanced, random": lambda labels: {"batch_sampler": BalancedBatchSampler(labels, 64, kind="random")},
    "class uniform": lambda labels: {"batch_sampler": ClassUniformBatchSampler(labels, 2, 4)},
    "cyclic": lambda labels: {"batch_sampler": CyclicClassBatchSampler(labels, 2, 8)},
    "buckets": lambda labels: {"batch_sampler": BucketBatchSampler(labels, batch_size=4)},
    "weighted": lambda labels: {"sampler": WeightedRandomSampler(imbalance_weights(labels), 100)},
    "weighted, no replacement": lambda labels: {"sampler": WeightedRandomSampler(labels + 1, 3, replacement=False)},
    "share of batches": lambda labels: {"batch_sampler": DistributedSampler(BalancedBatchSampler(labels, 4), 2, 0)},
    "share": lambda labels: {"sampler": DistributedSampler(WeightedRandomSampler(labels + 1, 4), 2, 0)},
}
"""Every sampler that is made of labels, weights or lengths, as an option of a loader."""


@pytest.mark.slow
def test_of_five_million_labels_no_sample_is_read(kit):
    """C21."""
    labels = np.random.default_rng(0).integers(0, 10, 5_000_000)
    for make in KINDS.values():
        loader = DataLoader(kit.Unreadable(5_000_000), **make(labels))
        with pytest.raises(RuntimeError, match="was read"):  # here, and not before
            next(iter(loader))


def test_nine_labels_for_ten_samples_are_refused_by_the_loader():
    """C21."""
    for make in KINDS.values():
        with pytest.raises(OptionError, match=r"9 samples \(one label, weight or length each\), .* has 10"):
            DataLoader(range(10), **make(np.arange(9)))
        DataLoader(range(9), **make(np.arange(9)))


def test_the_order_of_a_huge_dataset_begins_at_once():
    """C22."""
    data = range(100_000_000)
    for sampler in (None, RandomSampler(data, replacement=True, num_samples=100_000_000)):
        loader = DataLoader(data, 8, shuffle=True if sampler is None else None, sampler=sampler, seed=0)
        batch = next(iter(loader))
        assert (batch.dtype, len(loader)) == (np.int64, 12_500_000)
        assert 0 <= batch.min() <= batch.max() < 100_000_000


@pytest.mark.slow
def test_two_to_the_24_weights_and_one_more():
    """C23."""
    half = 1 << 23
    weights = np.ones(2 * half, np.float64)
    weights[:half] = 2
    sampler = WeightedRandomSampler(weights, 100_000)
    drawn = np.concatenate(list(DataLoader(range(2 * half), 5000, sampler=sampler, seed=0)))
    assert (drawn >= half).mean() == pytest.approx(1 / 3, abs=0.01)
    n = (1 << 24) + 1
    loader = DataLoader(range(n), 4, sampler=WeightedRandomSampler(np.ones(n), n), seed=0)
    assert len(next(iter(loader))) == 4


def test_one_sampler_may_serve_loaders_in_several_threads():
    labels = np.repeat([0, 1, 2], (40, 30, 5))
    sampler = BalancedBatchSampler(labels, 5, seed=0)
    expected = lists(DataLoader(range(75), batch_sampler=BalancedBatchSampler(labels, 5, seed=0)))
    found = {}

    def load(number):
        loader = DataLoader(range(75), batch_sampler=sampler, num_workers=1, worker_type="thread")
        loader.set_epoch(0)
        found[number] = lists(loader)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [expected] * 3


# ------------------------------------------------------------------------------------------------ ranks


@few
@given(data=st.data(), world=st.integers(1, 4), batches=st.booleans(), size=st.integers(1, 5), epoch=st.integers(0, 2))
def test_the_shares_of_any_sampler_in_turns_are_the_sampler_alone(
    samplers, batch_samplers, data, world, batches, size, epoch
):
    """C20."""
    make_sampler = data.draw(st.sampled_from([*(batch_samplers if batches else samplers).values()]))

    def loaded(sampler):
        options = {"batch_sampler": sampler} if batches else {"sampler": sampler, "batch_size": size}
        loader = DataLoader(range(26), seed=3, **options)
        loader.set_epoch(epoch)
        found = lists(loader)
        assert len(loader) == len(found)
        return found if batches else [value for batch in found for value in batch]

    shares = [loaded(DistributedSampler(make_sampler(), world, rank, tail="keep")) for rank in range(world)]
    assert in_turns(shares) == loaded(make_sampler())


def test_each_epoch_has_an_order_of_its_own_that_the_ranks_share_without_set_epoch():
    """C18: the loader's seed makes another order, and the sampler's own wins."""

    def loaders(seed=None, own=None):
        shares = [DistributedSampler(range(10), 2, rank, seed=own) for rank in (0, 1)]
        return [DataLoader(range(10), sampler=share, seed=seed) for share in shares]

    orders = {}
    for seed, own in ((None, None), (0, None), (9, None), (None, 9), (9, 0)):
        both = loaders(seed, own)
        epochs = [[flat(loader) for loader in both] for _ in range(2)]
        for shares in epochs:
            assert sorted(shares[0] + shares[1]) == list(range(10))
        assert in_turns(epochs[0]) != in_turns(epochs[1])
        orders[seed, own] = epochs
        for rank, loader in enumerate(both):  # either of them brings an epoch back
            (loader if seed else loader.sampler).set_epoch(0)
            assert [flat(loader), flat(loader)] == [epochs[0][rank], epochs[1][rank]]
    assert orders[None, None] == orders[0, None] == orders[9, 0]
    assert orders[9, None] == orders[None, 9] != orders[0, None]


def test_what_does_not_come_out_even_is_as_chosen():
    """C19."""
    three = {
        "keep": [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]],
        "pad": [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]],
        None: [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]],
        "drop": [[0, 3, 6], [1, 4, 7], [2, 5, 8]],
    }
    for tail, shares in three.items():
        for rank, share in enumerate(shares):
            loader = DataLoader(range(10), 2, sampler=DistributedSampler(range(10), 3, rank, shuffle=False, tail=tail))
            assert flat(loader) == share
            assert len(loader) == len(lists(loader)) == -(-len(share) // 2)
    for rank, share in enumerate([[0], [1], [0], [1], [0]]):
        with pytest.warns(AgnoloadWarning, match=r"2 items for 5 ranks"):
            padded = DistributedSampler(range(2), 5, rank, shuffle=False)
        loader = DataLoader(range(2), sampler=padded)
        assert [flat(loader), flat(loader)] == [share, share]  # and no further warning
        kept = DataLoader(range(2), sampler=DistributedSampler(range(2), 5, rank, shuffle=False, tail="keep"))
        assert flat(kept) == share[: rank < 2]


@few
@given(world=st.integers(1, 3), size=st.integers(1, 6), batches=st.booleans(), shuffle=st.booleans())
def test_a_sample_draws_on_every_rank_what_it_draws_on_one_and_ranks_draw_nothing_in_common(
    kit, world, size, batches, shuffle
):
    """C8, C17."""
    data, alone = kit.Drawing(26), {}
    for batch in DataLoader(data, 4, shuffle=shuffle, seed=3):
        alone |= dict(zip(batch["index"].tolist(), batch["own"].tolist(), strict=True))
    found, others = {}, []
    for rank in range(world):
        share = DistributedSampler(data, world, rank, shuffle=shuffle, tail="keep")
        options = (
            {"batch_sampler": BatchSampler(share, size, False)} if batches else {"sampler": share, "batch_size": size}
        )
        for batch in DataLoader(data, seed=3, **options):
            found |= dict(zip(batch["index"].tolist(), batch["own"].tolist(), strict=True))
            others += [*batch["numpy"].tolist(), *batch["python"].tolist()]
    assert found == alone
    assert len(set(others)) == len(others) == 52


def test_ranks_and_seeds_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        shares.append(flat(DataLoader(range(9), 2, sampler=DistributedSampler(range(9), tail="keep"))))
    assert sorted(shares[0] + shares[1]) == list(range(9))
    assert abs(len(shares[0]) - len(shares[1])) == 1
