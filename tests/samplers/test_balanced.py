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
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    imbalance_weights,
)
from agnoload.samplers.apportion import class_counts, class_shares, exact_shares
from agnoload.samplers.classes import ClassIndex, ShuffledCycles
from agnoload.samplers.shuffle import shuffled
from agnoload.seeding import Purpose

sizes_of_classes = st.lists(st.integers(1, 40), min_size=1, max_size=10)
alphas = st.sampled_from([0.0, 0.3, 0.5, 1.0]) | st.floats(0, 1)
seeds = st.integers(0, 2**32)
WRONG_ALPHA = "alpha must be a number from 0 to 1, got"


def of_sizes(*sizes):
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


def compositions(batches, labels):
    return np.array([np.bincount(labels[batch], minlength=labels.max() + 1) for batch in batches])


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
def test_every_batch_has_the_counts_of_the_largest_remainder(sizes, batch_size, alpha, expected):
    labels = of_sizes(*sizes)
    sampler = BalancedBatchSampler(labels, batch_size, alpha=alpha)
    assert compositions(sampler, labels).tolist() == [expected] * -(-len(labels) // batch_size)
    without_minimum = BalancedBatchSampler(of_sizes(990, 10), 8, alpha=0.0, min_per_class=0)
    assert compositions(without_minimum, of_sizes(990, 10))[0].tolist() == [8, 0]
    assert class_counts(np.array([0.475, 0.475, 0.05]), 10, 1).tolist() == [5, 4, 1]  # of two equal ones the last gives


@settings(max_examples=60)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 100), alphas, st.integers(0, 4))
def test_counts_fill_the_batch_and_keep_the_minimum(sizes, batch_size, alpha, least):
    shares = class_shares(np.array(sizes), alpha)
    counts = class_counts(shares, batch_size, least)
    assert counts.sum() == batch_size
    assert counts.min() >= min(least, batch_size // len(sizes))
    plain = class_counts(shares, batch_size)
    assert (np.abs(plain - shares * batch_size) < 1 + 1e-6).all()
    if plain.min() >= least:
        assert (counts == plain).all()
    else:  # only classes that had more gave something
        assert ((counts <= plain) | (counts <= least)).all()


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_exact_shares_of_every_batch_add_up_and_nothing_is_rounded_away(weights, batches):
    assert sum(exact_shares([1, 50, 50, 1, 1], 1, [-38, 57, 57, -38, -38])[0]) == 1  # three had too much before
    owed, taken, total = [0] * len(weights), np.zeros(len(weights)), 0
    for size in batches:
        counts, owed = exact_shares(weights, size, owed)
        assert (sum(counts), min(counts) >= 0, sum(owed)) == (size, True, 0)
        taken, total = taken + counts, total + size
        exact = np.array(weights) * total
        assert (exact - taken * sum(weights)).tolist() == owed


# --- more classes than places


def test_ten_equal_classes_take_turns_in_batches_of_six():
    labels = of_sizes(*[30] * 10)
    for seed in range(5):
        found = compositions(BalancedBatchSampler(labels, 6, seed=seed), labels)
        assert (found.sum(1) == 6).all()
        assert found.max() == 1
        totals = found[:10].sum(0)
        assert totals.max() - totals.min() <= 1
        running = found.cumsum(0)
        assert (running.max(1) - running.min(1) <= 1).all()
    assert len({str(compositions(BalancedBatchSampler(labels, 6, seed=seed), labels)[0]) for seed in range(5)}) > 1


@settings(max_examples=20)
@given(st.lists(st.integers(1, 200), min_size=17, max_size=40), alphas, seeds)
def test_more_classes_than_places_follow_their_shares_over_time(sizes, alpha, seed):
    labels = of_sizes(*sizes)
    sampler = BalancedBatchSampler(labels, 16, alpha=alpha, num_batches=100)
    found = compositions(sampler.batches(seed, 0), labels)
    assert (found.sum(1) == 16).all()
    wanted = np.outer(np.arange(1, 101), sampler.shares * 16)
    assert np.abs(found.cumsum(0) - wanted).max() < 2


# --- within a class


@settings(max_examples=30)
@given(sizes_of_classes, st.integers(1, 12), alphas, seeds)
def test_within_a_class_no_sample_comes_twice_before_all_came(sizes, batch_size, alpha, seed):
    labels = of_sizes(*sizes)
    counts = np.zeros(len(labels), int)
    for batch in BalancedBatchSampler(labels, batch_size, alpha=alpha, num_batches=30).batches(seed, 0):
        np.add.at(counts, batch, 1)
        for k, size in enumerate(sizes):
            mine = counts[labels == k]
            assert mine.max() - mine.min() <= 1
            part = [index for index in batch if labels[index] == k]
            assert len(part) > size or len(set(part)) == len(part)


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


@settings(max_examples=10)
@given(alphas, seeds)
def test_random_batches_draw_classes_by_their_shares(alpha, seed):
    labels = of_sizes(60, 30, 10)
    sampler = BalancedBatchSampler(labels, 10, alpha=alpha, kind="random", num_batches=300)
    batches = list(sampler.batches(seed, 0))
    found = compositions(batches, labels)
    expected = sampler.shares * 3000
    assert ((found.sum(0) - expected) ** 2 / expected).sum() < 32  # 2 degrees of freedom: 1 in 10 million
    assert found.std(0).min() > 0.5  # each drawn by itself
    counts = np.bincount(np.concatenate(batches), minlength=100)
    each = (sampler.shares / [60, 30, 10])[labels] * 3000
    assert ((counts - each) ** 2 / each).sum() < 195  # 99 degrees of freedom: 1 in 10 million


# --- P x K


@settings(max_examples=25)
@given(sizes_of_classes, seeds, st.integers(1, 6), st.data())
def test_p_by_k_visits_classes_alike_and_takes_their_samples_in_cycles(sizes, seed, k, data):
    labels = of_sizes(*sizes)
    p = data.draw(st.integers(1, len(sizes)))
    assert len(ClassUniformBatchSampler(labels, p, k)) == -(-len(labels) // (p * k))
    seen = {label: [] for label in range(len(sizes))}
    visits = np.zeros(len(sizes), int)
    for batch in ClassUniformBatchSampler(labels, p, k, num_batches=40).batches(seed, 0):
        for visit in np.reshape(batch, (p, k)):  # class after class
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
        found = compositions(CyclicClassBatchSampler(labels, 3, 15, num_batches=40).batches(0, epoch), labels)
        assert found[:2].tolist() == [[5, 5, 5, 0, 0, 0], [0, 0, 0, 5, 5, 5]]
        assert (np.sort(found, 1) == [0, 0, 0, 5, 5, 5]).all()
        assert (found[::2] + found[1::2] == 5).all()
        assert len({tuple(turn) for turn in found[2::2].tolist()}) > 5


@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), seeds)
def test_turns_that_do_not_come_out_even_are_completed_from_the_next(classes, per_batch, each, seed):
    per_batch = min(per_batch, classes)
    labels = of_sizes(*[20] * classes)
    sampler = CyclicClassBatchSampler(labels, per_batch, per_batch * each, num_batches=30)
    found = compositions(sampler.batches(seed, 0), labels)
    assert (np.sort(found, 1) == [0] * (classes - per_batch) + [each] * per_batch).all()
    visits = (found > 0).cumsum(0)
    assert (visits.max(1) - visits.min(1) <= 1).all()
    assert len(CyclicClassBatchSampler(labels, per_batch, per_batch * each)) == -(-20 * classes // (per_batch * each))


# --- cycles


def cycles(n, per, seed):
    return ShuffledCycles(
        n, per, lambda number, below: shuffled(n, seed, 0, Purpose.CLASSES, number, array_below=below)
    )


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 20), seeds, st.data())
def test_cycles_are_permutations_that_meet_without_repeats_and_any_place_is_there_at_once(n, per, seed, data):
    whole = cycles(n, per, seed).indices(0, 4 * n * per)
    assert_taken_in_cycles(whole[: 40 * n].tolist(), n)
    groups = whole.reshape(-1, per)
    counts = np.zeros((len(groups), n), int)
    np.add.at(counts, (np.repeat(np.arange(len(groups)), per), whole), 1)
    assert (counts.max(1) - counts.min(1) <= 1).all()
    fresh = cycles(n, per, seed)
    for _ in range(3):
        start = data.draw(st.integers(0, len(whole) - 1))
        stop = min(len(whole), start + data.draw(st.integers(1, 2 * n)))
        assert (fresh.indices(start, stop) == whole[start:stop]).all()


def test_long_cycles_hold_no_array_and_keep_the_same_promises(monkeypatch):
    monkeypatch.setattr("agnoload.samplers.classes.ARRAY_BELOW", 1)
    for per, n in ((1, 2003), (7, 10_007), (64, 20_011)):
        long = cycles(n, per, 5)
        whole = long.indices(0, 4 * n)
        assert_taken_in_cycles(whole.tolist(), n)
        groups = whole[: len(whole) // per * per].reshape(-1, per)
        assert (np.diff(np.sort(groups, 1), axis=1) > 0).all()
        pieces = [long.indices(start, min(start + per, len(whole))) for start in range(0, len(whole), per)]
        assert (np.concatenate(pieces) == whole).all()


# --- labels


class Column:
    def __array__(self, dtype=None, copy=None):
        return np.array(["b", "a", "b", "c"], object)


@pytest.mark.parametrize(
    "labels",
    [
        ["b", "a", "b", "c"],
        np.array([5, -2, 5, 9]),
        np.array([5, -2, 5, 9], np.int8),
        np.array([0.5, 0.25, 0.5, 0.75]),
        Column(),
        np.array([2**62, 0, 2**62, 2**63 - 1]),
        np.array([2**63, 0, 2**63, 2**64 - 1], np.uint64),
    ],
)
def test_labels_of_any_kind_group_alike(labels):
    classes = ClassIndex("labels", labels)
    assert classes.counts.tolist() == [1, 2, 1]
    assert classes.members.tolist() == [1, 0, 2, 3]
    assert sorted(set(np.asarray(labels).tolist())) == classes.names.tolist()
    assert ClassIndex("labels", [True, False, True]).members.tolist() == [1, 0, 2]


@settings(max_examples=50)
@given(st.lists(st.integers(-5, 5) | st.integers(-(2**40), 2**40), min_size=1, max_size=60))
def test_groups_cover_all_items_once(labels):
    classes = ClassIndex("labels", labels)
    assert sorted(classes.members.tolist()) == list(range(len(labels)))
    for k, name in enumerate(classes.names):
        members = classes.members[classes.offsets[k] : classes.offsets[k + 1]].tolist()
        assert members == [i for i, label in enumerate(labels) if label == name]


def test_more_classes_than_sixteen_bits_hold_group_alike():
    labels = np.random.default_rng(0).permutation(np.arange(140_000) // 2)
    assert (ClassIndex("labels", labels).members == np.argsort(labels, kind="stable")).all()


# --- weights


def test_the_weights_of_each_class_have_equal_sums():
    weights = imbalance_weights([0, 0, 0, 1])
    assert weights.dtype == np.float64
    assert weights[:3].sum() == weights[3]
    assert weights.mean() == pytest.approx(1)


@settings(max_examples=30)
@given(sizes_of_classes, alphas)
def test_weights_follow_alpha(sizes, alpha):
    labels = of_sizes(*sizes)
    weights = imbalance_weights(labels, alpha)
    assert np.bincount(labels, weights) / len(labels) == pytest.approx(class_shares(np.array(sizes), alpha))
    assert alpha or weights.tolist() == pytest.approx([1.0] * len(labels))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (lambda alpha=alpha: BalancedBatchSampler([0, 1], 2, alpha), WRONG_ALPHA)
            for alpha in (-0.1, 1.1, "1", True)
        ),
        (lambda: imbalance_weights([0, 1], float("nan")), WRONG_ALPHA),
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
