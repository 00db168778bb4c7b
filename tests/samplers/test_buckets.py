"""Batches by length: exact cover, within the budget, little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import OptionError, StateError
from agnoload.samplers import BucketBatchSampler, DistributedSampler

LENGTHS = np.random.default_rng(0).integers(1, 51, 1000)


def flat(batches):
    return [index for batch in batches for index in batch]


def cost(batch, lengths=LENGTHS):
    return len(batch) * max([1, *(lengths[i] for i in batch)])


def share_of_padding(batches, lengths=LENGTHS):
    return 1 - sum(lengths[i] for i in flat(batches)) / sum(len(b) * max(lengths[i] for i in b) for b in batches)


def test_c24_the_same_after_a_resume_at_any_batch():
    order = BucketBatchSampler(LENGTHS, max_tokens=100).batches(3, 1)
    batches = [order.batch(k).tolist() for k in range(len(order))]
    for k in range(0, len(order) + 1, 7):
        rest = BucketBatchSampler(LENGTHS, max_tokens=100).batches(3, 1).after(order.reached(k))
        assert [rest.batch(j).tolist() for j in range(len(rest))] == batches[k:]
        assert rest.reached(0) == len(flat(batches[:k]))
    with pytest.raises(StateError, match=f"got 1, which lies inside the batch of 0...{len(batches[0]) - 1}"):
        order.after(1)
    assert len(order.after(2000)) == 0


def test_c24_two_ranks_get_whole_batches_that_make_up_the_epoch():
    whole = list(BucketBatchSampler(LENGTHS, max_tokens=100, seed=2))
    ranks = [
        list(DistributedSampler(BucketBatchSampler(LENGTHS, max_tokens=100), 2, r, seed=2, tail="keep")) for r in (0, 1)
    ]
    assert ranks[0] == whole[0::2]
    assert ranks[1] == whole[1::2]


@pytest.mark.parametrize("kind", [list, np.array, tuple])
def test_c24_an_item_longer_than_the_budget_is_refused_with_its_index(kind):
    lengths = kind([*LENGTHS.tolist(), 101])
    with pytest.raises(OptionError, match="got length 101 at index 1000 and max_tokens 100"):
        BucketBatchSampler(lengths, max_tokens=100)


def test_c24_or_it_is_put_alone():
    lengths = np.append(LENGTHS, [101, 105, 300])
    batches = list(BucketBatchSampler(lengths, max_tokens=100, oversized="alone", buckets=3, seed=0))
    assert sorted(flat(batches)) == list(range(1003))
    for index in (1000, 1001, 1002):
        assert [index] in batches
    assert all(len(batch) == 1 or cost(batch, lengths) <= 100 for batch in batches)


def test_c24_the_share_of_padding_is_reported():
    sampler = BucketBatchSampler(LENGTHS, max_tokens=1000, seed=0)
    for epoch in range(2):
        assert sampler.padding_share(epoch) == pytest.approx(share_of_padding(list(sampler)))
    assert sampler.padding_share() < 0.1
    assert BucketBatchSampler(LENGTHS, max_tokens=1000, buckets=1, seed=0).padding_share() > 0.3
    assert "padding at most" in repr(sampler)
    dropping = BucketBatchSampler(LENGTHS, batch_size=7, drop_last=True, seed=0)
    assert dropping.padding_share() == pytest.approx(share_of_padding(list(dropping)))


def test_without_shuffling_items_come_sorted_by_length():
    lengths = [9, 2, 6, 3, 4, 6, 3]
    assert list(BucketBatchSampler(lengths, max_tokens=12, shuffle=False)) == [[1, 3, 6], [4, 2], [5], [0]]
    assert list(BucketBatchSampler(lengths, batch_size=3, shuffle=False)) == [[1, 3, 6], [4, 2, 5], [0]]


@settings(max_examples=80)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=80),
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(10, 90)),
    st.one_of(st.none(), st.integers(1, 8), st.just([5, 10, 20])),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_every_way_to_cut_covers_each_item_once(lengths, batch_size, max_tokens, buckets, shuffle, seed):
    if batch_size is None and max_tokens is None:
        batch_size = 4
    sampler = BucketBatchSampler(
        lengths, batch_size, max_tokens, buckets, shuffle, oversized="alone", largest_first=True, seed=seed
    )
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert batch_size is None or len(batch) <= batch_size
        assert max_tokens is None or len(batch) == 1 or cost(batch, lengths) <= max_tokens


def test_a_number_of_items_fills_every_batch_but_one():
    few = BucketBatchSampler([3, 4], batch_size=5, drop_last=True)
    assert (list(few), len(few), few.padding_share()) == ([], 0, 0)
    sizes = sorted(map(len, BucketBatchSampler(LENGTHS, batch_size=7, seed=0)))
    assert sizes == [6] + [7] * 142


def test_drop_last_leaves_out_others_in_each_epoch_and_spares_no_length():
    sampler = BucketBatchSampler(LENGTHS, batch_size=9, drop_last=True, seed=0)
    dropped = []
    for _ in range(30):
        batches = list(sampler)
        assert len(batches) == len(sampler) == 111
        assert {len(batch) for batch in batches} == {9}
        left = set(range(1000)) - set(flat(batches))
        assert len(left) == 1
        dropped += left
    assert len(set(dropped)) > 20
    assert max(LENGTHS[dropped]) - min(LENGTHS[dropped]) > 25


def test_the_batch_that_costs_most_comes_first_when_asked():
    for seed in range(5):
        batches = list(BucketBatchSampler(LENGTHS, batch_size=16, largest_first=True, seed=seed))
        assert cost(batches[0]) >= max(map(cost, batches))
        assert sorted(flat(batches)) == list(range(1000))


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
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        BucketBatchSampler(LENGTHS, **options)


@pytest.mark.parametrize("lengths", [[1, -2], [1.5, 2.0], ["a"]])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(OptionError, match="lengths must be integers of at least 0"):
        BucketBatchSampler(lengths, 2)
