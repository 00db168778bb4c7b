"""Batches by length: exact cover, within the budget, little padding. Resume and ranks: test_every_sampler.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.samplers import BucketBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 51, 1000)
seeds = st.integers(0, 2**32)


@st.composite
def options(draw):
    """Everything that may be combined, and lengths; an item that is too long is put alone."""
    max_tokens = draw(st.none() | st.integers(10, 90))
    batch_size = draw(st.integers(1, 9) if max_tokens is None else st.none() | st.integers(1, 9))
    return {
        "lengths": draw(st.lists(st.integers(0, 40), min_size=1, max_size=80)),
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "buckets": draw(st.none() | st.integers(1, 8) | st.just([5, 10, 20])),
        "shuffle": draw(st.booleans()),
        "drop_last": max_tokens is None and draw(st.booleans()),
        "largest_first": draw(st.booleans()),
        "oversized": "alone",
    }


def flat(batches):
    return [index for batch in batches for index in batch]


def cost(batch, lengths=LENGTHS):
    return len(batch) * max([1, *(lengths[i] for i in batch)])


@settings(max_examples=100)
@given(options(), seeds)
def test_every_way_to_cut_covers_each_item_once_within_its_bounds(options, seed):
    lengths, size, budget = options["lengths"], options["batch_size"], options["max_tokens"]
    sampler = BucketBatchSampler(**options)
    batches = list(sampler.batches(seed, 0))
    assert len(batches) == len(sampler) == len(list(sampler.batches(seed, 1)))
    left_out = len(lengths) % size if options["drop_last"] else 0
    assert len(set(flat(batches))) == len(flat(batches)) == len(lengths) - left_out
    for batch in batches:
        assert size is None or len(batch) <= size
        assert budget is None or len(batch) == 1 or cost(batch, lengths) <= budget
    if options["drop_last"]:
        assert {len(batch) for batch in batches} <= {size}
    elif budget is None:
        smaller = [len(batch) for batch in batches if len(batch) < size]
        assert smaller == ([len(lengths) % size] if len(lengths) % size else [])  # every batch is full but one


@settings(max_examples=50)
@given(options(), seeds)
def test_the_share_of_padding_is_reported(options, seed):
    lengths = np.array(options["lengths"])
    sampler = BucketBatchSampler(**options, seed=seed)
    for epoch in range(2):
        batches = list(sampler)
        padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        wanted = 1 - lengths[flat(batches)].sum() / padded if padded else 0
        assert sampler.padding_share(epoch) == pytest.approx(wanted)
    assert ("padding at most" in repr(sampler)) == (not sampler.left_out)


def test_buckets_keep_padding_small():
    assert BucketBatchSampler(LENGTHS, max_tokens=1000, seed=0).padding_share() < 0.1
    assert BucketBatchSampler(LENGTHS, max_tokens=1000, buckets=1, seed=0).padding_share() > 0.3


def test_an_item_longer_than_the_budget_is_refused_with_its_index_or_put_alone():
    for kind in (list, np.array, tuple):
        with pytest.raises(OptionError, match="got length 101 at index 1000 and max_tokens 100"):
            BucketBatchSampler(kind([*LENGTHS.tolist(), 101]), max_tokens=100)
    lengths = np.append(LENGTHS, [101, 105, 300])
    batches = list(BucketBatchSampler(lengths, max_tokens=100, oversized="alone", buckets=1, seed=0))
    assert len(batches) == 500 + 3  # what is too long does not make its neighbours count as much
    for index in (1000, 1001, 1002):
        assert [index] in batches


def test_without_shuffling_items_come_sorted_by_length():
    lengths = [9, 2, 6, 3, 4, 6, 3]
    assert list(BucketBatchSampler(lengths, max_tokens=12, shuffle=False)) == [[1, 3, 6], [4, 2], [5], [0]]
    assert list(BucketBatchSampler(lengths, batch_size=3, shuffle=False)) == [[1, 3, 6], [4, 2, 5], [0]]


def test_drop_last_leaves_out_others_in_each_epoch_and_spares_no_length():
    sampler = BucketBatchSampler(LENGTHS, batch_size=9, drop_last=True, seed=0)
    dropped = []
    for _ in range(30):
        left = set(range(1000)) - set(flat(sampler))
        assert len(left) == 1
        dropped += left
    assert len(set(dropped)) > 20
    assert max(LENGTHS[dropped]) - min(LENGTHS[dropped]) > 25


@settings(max_examples=10)
@given(seeds)
def test_the_batch_that_costs_most_comes_first_when_asked(seed):
    exact = range(1, 51)  # a bucket for each length, so that what a batch may cost is what it costs
    batches = list(BucketBatchSampler(LENGTHS, batch_size=16, buckets=exact, largest_first=True, seed=seed))
    assert cost(batches[0]) == max(map(cost, batches))


def test_batches_and_what_they_hold_are_shuffled():
    sampler = BucketBatchSampler(LENGTHS, max_tokens=100, seed=0)
    one, two = list(sampler), list(sampler)
    longest = [max(LENGTHS[batch]) for batch in one]
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.2
    assert len({frozenset(batch) for batch in one} & {frozenset(batch) for batch in two}) < 0.2 * len(one)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "batch_size or max_tokens must be given"),
        ({"batch_size": 0}, "batch_size must be a positive int, got 0"),
        ({"max_tokens": -3}, "max_tokens must be a positive int, got -3"),
        ({"max_tokens": 60, "drop_last": True}, "drop_last must be False with max_tokens"),
        ({"batch_size": 2, "buckets": 0}, "buckets must be a positive int, got 0"),
        ({"batch_size": 2, "buckets": [5, 3]}, r"rising list of lengths, got \[5, 3\]"),
        ({"batch_size": 2, "oversized": "drop"}, "oversized must be 'raise' or 'alone', got 'drop'"),
        ({"batch_size": 2, "lengths": [1, -2]}, "lengths must be integers of at least 0"),
        ({"batch_size": 2, "lengths": [1.5, 2.0]}, "lengths must be integers of at least 0"),
        ({"batch_size": 2, "lengths": ["a"]}, "lengths must be integers of at least 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        BucketBatchSampler(**{"lengths": LENGTHS, **options})
