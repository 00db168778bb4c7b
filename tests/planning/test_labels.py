"""Samplers that know labels, weights or lengths, through a loader: no sample is read for them."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from agnoload import (
    BalancedBatchSampler,
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

MANY = 5_000_000


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


@pytest.fixture(scope="module")
def many_labels():
    return np.random.default_rng(0).integers(0, 10, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_c21_five_million_labels_and_no_sample_is_read(kit, many_labels, make):
    loader = DataLoader(kit.Unreadable(MANY), **make(many_labels))
    with pytest.raises(RuntimeError, match="was read"):  # here, and not before
        next(iter(loader))


def test_c21_nine_labels_for_ten_samples_are_refused_by_the_loader():
    for make in KINDS.values():
        with pytest.raises(OptionError, match=r"9 samples \(one label, weight or length each\), .* has 10"):
            DataLoader(range(10), **make(np.arange(9)))
        DataLoader(range(9), **make(np.arange(9)))


def test_c21_weights_against_imbalance():
    weights = imbalance_weights([0, 0, 0, 1])
    assert weights[:3].sum() == pytest.approx(weights[3])
    drawn = np.concatenate(
        list(DataLoader(range(4), 1000, sampler=WeightedRandomSampler(weights, 20_000), seed=0, num_workers=2))
    )
    assert (drawn == 3).mean() == pytest.approx(0.5, abs=5 * 0.5 / 20_000**0.5)


# ------------------------------------------------------------------------------------------------ C22: huge


@pytest.mark.parametrize("n", [1, 2, 4, 5, 17, 64, 65, 257, 1025])
def test_c22_a_shuffle_of_any_length_gives_each_index_once_as_int64(n):
    loader = DataLoader(range(n), 16, shuffle=True, seed=0, collate_fn=lambda samples: samples)
    found = [index for batch in loader for index in batch]
    assert sorted(found) == list(range(n))
    assert {type(index) for index in found} == {int}


def test_c22_the_order_of_a_huge_dataset_takes_no_memory_and_begins_at_once():
    data = range(100_000_000)
    for sampler in (None, RandomSampler(data, replacement=True, num_samples=100_000_000)):
        loader = DataLoader(data, 8, shuffle=True if sampler is None else None, sampler=sampler, seed=0)
        batch = next(iter(loader))
        assert batch.dtype == np.int64
        assert len(loader) == 12_500_000
        assert batch.min() >= 0
        assert batch.max() < 100_000_000


# ------------------------------------------------------------------------------------------------ C23: weights


@pytest.mark.slow
def test_c23_two_to_the_24_weights_and_one_more():
    half = 1 << 23
    weights = np.ones(2 * half, np.float64)
    weights[:half] = 2
    sampler = WeightedRandomSampler(weights, 100_000)
    drawn = np.concatenate(list(DataLoader(range(2 * half), 5000, sampler=sampler, seed=0)))
    assert (drawn >= half).mean() == pytest.approx(1 / 3, abs=0.01)
    n = (1 << 24) + 1
    loader = DataLoader(range(n), 4, sampler=WeightedRandomSampler(np.ones(n), n), seed=0)
    assert len(next(iter(loader))) == 4


def test_c23_weights_that_cannot_be_are_refused_and_zero_is_never_drawn():
    with pytest.raises(OptionError, match=r"3.*1"):
        WeightedRandomSampler([1, 0, 0], 3, replacement=False)
    for weights in ([1, -1], [np.nan, 1], [0, 0]):
        with pytest.raises(OptionError):
            WeightedRandomSampler(weights, 2)
    loader = DataLoader(range(3), 100, sampler=WeightedRandomSampler([0, 1, 0], 1000), seed=0, num_workers=2)
    assert {index for batch in loader for index in batch.tolist()} == {1}


# ------------------------------------------------------------------------------------------------ C24: lengths


def test_c24_buckets_cover_within_their_budget_alone_and_over_ranks():
    lengths = np.random.default_rng(0).integers(1, 51, 1000)

    def batches(sampler, workers):
        loader = DataLoader(range(1000), batch_sampler=sampler, seed=4, num_workers=workers)
        found = [batch.tolist() for batch in loader]
        assert len(found) == len(loader)
        assert all(len(batch) * lengths[batch].max() <= 100 for batch in found)
        return found

    alone = batches(BucketBatchSampler(lengths, max_tokens=100), 2)
    assert sorted(index for batch in alone for index in batch) == list(range(1000))
    shares = [
        batches(DistributedSampler(BucketBatchSampler(lengths, max_tokens=100), 2, r, tail="keep"), 0) for r in (0, 1)
    ]
    assert sorted(map(tuple, shares[0] + shares[1])) == sorted(map(tuple, alone))
    with pytest.raises(OptionError, match=r"length 101 at index 1000 and max_tokens 100"):
        BucketBatchSampler([*lengths, 101], max_tokens=100)


# ------------------------------------------------------------------------------------------------ C25: classes


def test_c25_p_times_k_through_a_loader():
    labels = np.repeat(np.arange(10), [*[100] * 9, 2])
    with pytest.raises(OptionError, match=r"12.*10"):
        ClassUniformBatchSampler(labels, 12, 4)
    loader = DataLoader(range(902), batch_sampler=ClassUniformBatchSampler(labels, 8, 4), seed=0, num_workers=2)
    visits, taken, came = Counter(), Counter(), 0
    for batch in loader:
        came += 1
        classes, counts = np.unique(labels[batch], return_counts=True)
        assert (len(classes), set(counts.tolist())) == (8, {4})
        visits.update(classes.tolist())
        assert max(visits.values()) - min(visits[label] for label in range(10)) <= 1
        taken.update(batch.tolist())
        for index in batch.tolist():
            same = np.flatnonzero(labels == labels[index])
            assert labels[index] == 9 or taken[index] - min(taken[other] for other in same.tolist()) <= 1
    assert came == len(loader)


@pytest.mark.parametrize(
    ("sizes", "alpha", "counts"),
    [((90, 10), 1, [4, 4]), ((90, 10), 0.5, [6, 2]), ((90, 10), 0, [7, 1]), ((990, 10), 0, [7, 1])],
)
def test_c25_every_batch_has_its_composition(sizes, alpha, counts):
    labels = np.repeat([0, 1], sizes)
    sampler = BalancedBatchSampler(labels, 8, alpha=alpha)
    loader = DataLoader(range(len(labels)), batch_sampler=sampler, seed=0, num_workers=2)
    compositions = [np.bincount(labels[batch], minlength=2).tolist() for batch in loader]
    assert compositions == [counts] * len(loader)


def test_one_sampler_may_serve_loaders_in_several_threads():
    labels = np.repeat([0, 1, 2], (40, 30, 5))
    sampler = BalancedBatchSampler(labels, 5, seed=0)
    expected = [
        batch.tolist() for batch in DataLoader(range(75), batch_sampler=BalancedBatchSampler(labels, 5, seed=0))
    ]
    found = {}

    def load(number):
        loader = DataLoader(range(75), batch_sampler=sampler, num_workers=1, worker_type="thread")
        loader.set_epoch(0)
        found[number] = [batch.tolist() for batch in loader]

    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [expected] * 3
