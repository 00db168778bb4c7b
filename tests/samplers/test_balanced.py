"""Class balance: the composition of every batch, covers within classes, and no sample read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.samplers import (
    BalancedBatchSampler,
    BucketBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    WeightedRandomSampler,
    imbalance_weights,
)
from agnoload.samplers.apportion import class_counts, class_shares
from agnoload.samplers.classes import ClassIndex, ShuffledCycles
from agnoload.samplers.shuffle import shuffled
from agnoload.seeding import Purpose


def of_sizes(*sizes):
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


def compositions(sampler, labels):
    return [np.bincount(labels[batch], minlength=labels.max() + 1).tolist() for batch in sampler]


def assert_taken_in_cycles(stream, n):
    """Nothing twice before everything came once, nothing twice in a row."""
    for start in range(0, len(stream), n):
        assert len(set(stream[start : start + n])) == min(n, len(stream) - start)
    assert n == 1 or all(a != b for a, b in pairwise(stream))


# --- counts


@pytest.mark.parametrize(
    ("sizes", "batch_size", "alpha", "expected"),
    [
        ((60, 30, 10), 10, 0.5, [5, 3, 2]),
        ((60, 30, 10), 10, 0.0, [6, 3, 1]),
        ((60, 30, 10), 10, 1.0, [4, 3, 3]),
        ((60, 30, 10), 8, 1.0, [3, 3, 2]),
        ((90, 10), 8, 1.0, [4, 4]),
        ((90, 10), 8, 0.5, [6, 2]),
        ((90, 10), 8, 0.0, [7, 1]),
        ((990, 10), 8, 0.0, [7, 1]),
    ],
)
def test_c25_every_batch_has_the_counts_of_the_largest_remainder(sizes, batch_size, alpha, expected):
    labels = of_sizes(*sizes)
    sampler = BalancedBatchSampler(labels, batch_size, alpha=alpha)
    found = compositions(sampler, labels)
    assert found == [expected] * -(-len(labels) // batch_size)
    assert len(sampler) == len(found)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.integers(1, 100),
    st.floats(0, 1),
    st.integers(0, 4),
)
def test_counts_fill_the_batch_and_keep_the_minimum(sizes, batch_size, alpha, least):
    shares = class_shares(np.array(sizes), alpha)
    counts = class_counts(shares, batch_size, least)
    assert counts.sum() == batch_size
    assert counts.min() >= min(least, batch_size // len(sizes))
    plain = class_counts(shares, batch_size)
    assert (np.abs(plain - shares * batch_size) < 1 + 1e-6).all()
    if plain.min() >= least:
        assert (counts == plain).all()


def test_min_per_class_0_leaves_rare_classes_out():
    labels = of_sizes(990, 10)
    assert compositions(BalancedBatchSampler(labels, 8, alpha=0.0, min_per_class=0), labels)[0] == [8, 0]


# --- more classes than places


def test_c25_ten_equal_classes_take_turns_in_batches_of_six():
    labels = of_sizes(*[30] * 10)
    for epoch_seed in range(5):
        found = np.array(compositions(BalancedBatchSampler(labels, 6, seed=epoch_seed), labels))
        assert (found.sum(1) == 6).all()
        assert found.max() == 1
        totals = found[:10].sum(0)
        assert totals.max() - totals.min() <= 1
        running = found.cumsum(0)
        assert (running.max(1) - running.min(1) <= 1).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_more_classes_than_places_follow_their_shares_over_time(alpha):
    sizes = np.random.default_rng(0).integers(1, 200, 40)
    labels = of_sizes(*sizes)
    sampler = BalancedBatchSampler(labels, 16, alpha=alpha, num_batches=500, seed=1)
    found = np.array(compositions(sampler, labels))
    assert (found.sum(1) == 16).all()
    wanted = np.outer(np.arange(1, 501), sampler.shares * 16)
    assert np.abs(found.cumsum(0) - wanted).max() < 2


def test_the_groups_of_rotating_classes_change_with_the_epoch():
    labels = of_sizes(*[6] * 10)
    sampler = BalancedBatchSampler(labels, 5, num_batches=1, seed=0)
    assert len({tuple(compositions(sampler, labels)[0]) for _ in range(5)}) > 1


# --- within a class


@pytest.mark.parametrize("batch_size", [8, 3])
def test_within_a_class_no_sample_comes_twice_before_all_came(batch_size):
    labels = of_sizes(20, 2, 9, 15, 1)
    sampler = BalancedBatchSampler(labels, batch_size, alpha=1.0, num_batches=60, seed=3)
    order = sampler.batches(3, 0)
    drawn = {k: [] for k in range(5)}
    for number in range(len(order)):
        batch = order.batch(number)
        for k in range(5):
            drawn[k].append(batch[labels[batch] == k].tolist())
    for k, n in enumerate((20, 2, 9, 15, 1)):
        counts = np.zeros(len(labels), int)
        for part in drawn[k]:
            np.add.at(counts, part, 1)
            mine = counts[labels == k]
            assert mine.max() - mine.min() <= 1
            assert len(part) > n or len(set(part)) == len(part)


def test_a_batch_is_shuffled_so_that_its_halves_are_balanced_too():
    labels = of_sizes(50, 50)
    halves = [np.mean(labels[batch[:16]]) for batch in BalancedBatchSampler(labels, 32, num_batches=50, seed=0)]
    assert 0.4 < np.mean(halves) < 0.6


def test_the_callers_labels_are_neither_changed_nor_watched():
    labels = of_sizes(5, 5)
    before = labels.copy()
    sampler = BalancedBatchSampler(labels, 4, seed=0)
    batches = list(sampler)
    assert (labels == before).all()
    labels[:] = 7
    sampler.set_epoch(0)
    assert list(sampler) == batches


# --- kind="random"


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_random_batches_draw_classes_by_their_shares(alpha):
    labels = of_sizes(60, 30, 10)
    sampler = BalancedBatchSampler(labels, 10, alpha=alpha, kind="random", num_batches=1000, seed=0)
    found = np.array(compositions(sampler, labels))
    expected = sampler.shares * 10_000
    assert ((found.sum(0) - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom: 1 in 1,000
    assert found.std(0).min() > 0.5  # each drawn by itself
    counts = np.bincount(np.concatenate(list(sampler)), minlength=100)
    each = (sampler.shares / [60, 30, 10])[labels] * 10_000
    assert ((counts - each) ** 2 / each).sum() < 149  # 99 degrees of freedom: 1 in 1,000


# --- P x K


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=10), st.data())
def test_p_by_k_visits_classes_alike_and_takes_their_samples_in_cycles(sizes, data):
    labels = of_sizes(*sizes)
    p, k = data.draw(st.integers(1, len(sizes))), data.draw(st.integers(1, 6))
    sampler = ClassUniformBatchSampler(labels, p, k, seed=data.draw(st.integers(0, 99)))
    assert len(sampler) == -(-len(labels) // (p * k))
    order = ClassUniformBatchSampler(labels, p, k, num_batches=60).batches(3, 0)
    seen = {label: [] for label in range(len(sizes))}
    visits = np.zeros(len(sizes), int)
    for number in range(60):
        batch = order.batch(number)
        for visit in batch.reshape(p, k):  # class after class
            (label,) = set(labels[visit].tolist())
            assert len(set(visit.tolist())) == min(k, sizes[label])
            seen[label] += visit.tolist()
            visits[label] += 1
        assert visits.max() - visits.min() <= 1
    for label, size in enumerate(sizes):
        assert_taken_in_cycles(seen[label], size)


# --- cyclic


def test_groups_of_classes_take_turns_and_then_are_grouped_afresh():
    labels = of_sizes(*[20] * 6)
    for epoch in range(2):
        sampler = CyclicClassBatchSampler(labels, 3, 15, num_batches=40, seed=0)
        sampler.set_epoch(epoch)
        found = compositions(sampler, labels)
        assert found[:2] == [[5, 5, 5, 0, 0, 0], [0, 0, 0, 5, 5, 5]]
        assert all(sorted(counts) == [0, 0, 0, 5, 5, 5] for counts in found)
        for turn in range(0, 40, 2):
            assert np.add(found[turn], found[turn + 1]).tolist() == [5] * 6
        assert len({tuple(found[turn]) for turn in range(2, 40, 2)}) > 5


def test_a_turn_that_does_not_come_out_even_is_completed_from_the_next():
    labels = of_sizes(*[20] * 7)
    found = np.array(compositions(CyclicClassBatchSampler(labels, 3, 6, num_batches=70, seed=0), labels))
    assert (np.sort(found, 1) == [0, 0, 0, 0, 2, 2, 2]).all()
    visits = (found > 0).cumsum(0)
    assert (visits.max(1) - visits.min(1) <= 1).all()
    assert len(CyclicClassBatchSampler(labels, 3, 6)) == 24


# --- cycles


def cycles(n, per, seed):
    return ShuffledCycles(
        n, per, lambda number, below: shuffled(n, seed, 0, Purpose.CLASSES, number, array_below=below)
    )


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**32), st.data())
def test_cycles_are_permutations_that_meet_without_repeats_and_any_place_is_there_at_once(n, per, seed, data):
    whole = cycles(n, per, seed).indices(0, 4 * n * per)
    assert_taken_in_cycles(whole[: 40 * n].tolist(), n)
    for group in whole.reshape(-1, per):
        counts = np.bincount(group, minlength=n)
        assert counts.max() - counts.min() <= 1
    fresh = cycles(n, per, seed)
    for _ in range(5):
        start = data.draw(st.integers(0, len(whole) - 1))
        stop = min(len(whole), start + data.draw(st.integers(1, 2 * n)))
        assert (fresh.indices(start, stop) == whole[start:stop]).all()


@pytest.mark.parametrize("per", [1, 7, 64])
def test_long_cycles_hold_no_array_and_keep_the_same_promises(per, monkeypatch):
    monkeypatch.setattr("agnoload.samplers.classes.ARRAY_BELOW", 1)
    n = 20_011
    long = cycles(n, per, 5)
    whole = long.indices(0, 4 * n)
    assert_taken_in_cycles(whole.tolist(), n)
    groups = whole[: len(whole) // per * per].reshape(-1, per)
    assert (np.diff(np.sort(groups, 1), axis=1) > 0).all()
    pieces = [long.indices(start, min(start + per, len(whole))) for start in range(0, len(whole), per)]
    assert (np.concatenate(pieces) == whole).all()


# --- labels


@pytest.mark.parametrize(
    "labels",
    [
        ["b", "a", "b", "c"],
        np.array([5, -2, 5, 9]),
        np.array([5, -2, 5, 9], np.int8),
        np.array([0.5, 0.25, 0.5, 0.75]),
        np.array(["b", "a", "b", "c"], object),
        np.array([2**62, 0, 2**62, 2**63 - 1]),
        np.array([2**63, 0, 2**63, 2**64 - 1], np.uint64),
    ],
)
def test_labels_of_any_kind_group_alike(labels):
    classes = ClassIndex("labels", labels)
    assert classes.counts.tolist() == [1, 2, 1]
    assert classes.members.tolist() == [1, 0, 2, 3]
    assert sorted(set(np.asarray(labels).tolist())) == classes.names.tolist()


def test_labels_as_tensors_columns_and_booleans():
    torch = pytest.importorskip("torch")
    assert ClassIndex("labels", torch.tensor([1, 0, 1])).members.tolist() == [1, 0, 2]
    assert ClassIndex("labels", [True, False, True]).members.tolist() == [1, 0, 2]

    class Column:
        def __array__(self, dtype=None, copy=None):
            return np.array(["x", "y", "x"], object)

    assert ClassIndex("labels", Column()).members.tolist() == [0, 2, 1]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_groups_cover_all_items_once(labels):
    classes = ClassIndex("labels", labels)
    assert sorted(classes.members.tolist()) == list(range(len(labels)))
    for k, name in enumerate(classes.names):
        members = classes.members[classes.offsets[k] : classes.offsets[k + 1]].tolist()
        assert members == [i for i, label in enumerate(labels) if label == name]


def test_more_classes_than_sixteen_bits_hold_group_alike():
    labels = np.random.default_rng(0).integers(0, 70_000, 200_000)
    labels[:70_000] = np.arange(70_000)
    classes = ClassIndex("labels", labels)
    assert (classes.members == np.argsort(labels, kind="stable")).all()


@pytest.mark.slow
def test_c21_five_million_labels_are_enough_and_no_sample_is_read():
    labels = np.random.default_rng(0).integers(0, 1000, 5_000_000)
    samplers = [
        BalancedBatchSampler(labels, 256),
        BalancedBatchSampler(labels, 2048),
        BalancedBatchSampler(labels, 256, kind="random"),
        ClassUniformBatchSampler(labels, 8, 4),
        CyclicClassBatchSampler(labels, 4, 64),
        BucketBatchSampler(labels, max_tokens=4096),
        WeightedRandomSampler(imbalance_weights(labels), 1000),
    ]
    for sampler in samplers:
        assert sampler.data_length == 5_000_000
        batch = next(iter(sampler))
        assert np.max(batch) < 5_000_000


# --- weights


def test_c21_the_weights_of_each_class_have_equal_sums():
    weights = imbalance_weights([0, 0, 0, 1])
    assert weights.dtype == np.float64
    assert weights[:3].sum() == weights[3]
    assert weights.mean() == pytest.approx(1)


def test_weights_follow_alpha():
    labels = of_sizes(60, 30, 10)
    assert imbalance_weights(labels, 0.0).tolist() == pytest.approx([1.0] * 100)
    for alpha in (0.3, 1.0):
        sums = np.bincount(labels, imbalance_weights(labels, alpha)) / 100
        assert sums == pytest.approx(class_shares(np.array([60, 30, 10]), alpha))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan"), "1", True])
def test_alpha_must_lie_between_0_and_1(alpha):
    with pytest.raises(OptionError, match="alpha must be a number from 0 to 1, got"):
        imbalance_weights([0, 1], alpha)
    with pytest.raises(OptionError, match="alpha must be a number from 0 to 1, got"):
        BalancedBatchSampler([0, 1], 2, alpha)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BalancedBatchSampler([0, 1], 2, kind="other"), "kind must be 'fixed' or 'random', got 'other'"),
        (lambda: BalancedBatchSampler([0, 1], 2, min_per_class=-1), "min_per_class must be a non-negative int, got -1"),
        (lambda: BalancedBatchSampler([0, 1], 2, num_batches=0), "num_batches must be a positive int, got 0"),
        (lambda: BalancedBatchSampler([0, 1], 0), "batch_size must be a positive int, got 0"),
        (lambda: BalancedBatchSampler([], 2), "must not be empty"),
        (lambda: BalancedBatchSampler([0.0, float("nan")], 2), "NaN, got one at index 1"),
        (lambda: BalancedBatchSampler([[1]], 2), "shape"),
        (lambda: ClassUniformBatchSampler([0, 1], 3, 4), "got 3 and 2 classes"),
        (lambda: ClassUniformBatchSampler([0, 1], 0, 1), "must be a positive int, got 0"),
        (lambda: ClassUniformBatchSampler([0, 1], 2, 1.5), "must be a positive int, got 1.5"),
        (lambda: CyclicClassBatchSampler(range(6), 3, 16), "multiple of classes_per_batch, got 16 and 3: take 15 or"),
    ],
)
def test_options_that_cannot_work_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()
