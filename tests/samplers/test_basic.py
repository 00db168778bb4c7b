"""The samplers that know only how many samples there are, batches of them, and user-defined ones inside ours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload.errors import OptionError, StateError
from agnoload.samplers import (
    BatchSampler,
    ClassUniformBatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    has_random_access,
    is_sampler,
)
from agnoload.samplers.basic import DRAWS


class Backwards(Sampler[int]):
    """A user's sampler."""

    def __init__(self, n):
        self.n = n
        self.epochs = []

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))

    def __len__(self):
        return self.n

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Doubled(RandomSampler):
    """A user's subclass of ours that overrides `__iter__`."""

    def __iter__(self):
        return (2 * index for index in super().__iter__())


def endless():
    number = 0
    while True:
        yield number
        number += 1


def test_samplers_follow_a_dataset_that_grows():
    data = [1, 2]
    samplers = SequentialSampler(data), RandomSampler(data, seed=0)
    data.append(3)
    for sampler in samplers:
        assert len(sampler) == 3
        assert sorted(sampler) == [0, 1, 2]


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 150), st.integers(0, 2**63))
def test_samples_of_any_number_are_whole_shuffles_one_after_the_other(n, wanted, seed):
    order = list(RandomSampler(range(n), num_samples=wanted, seed=seed))
    assert len(order) == wanted
    rounds = [order[start : start + n] for start in range(0, wanted, n)]
    assert all(sorted(each) == list(range(n)) for each in rounds[: wanted // n])
    assert len(set(rounds[-1])) == len(rounds[-1])
    assert n < 15 or wanted < 2 * n or rounds[0] != rounds[1]


@settings(max_examples=30)
@given(st.integers(1, 1000), st.integers(0, 2**63), st.data())
def test_replacement_draws_each_index_from_all_and_any_piece_at_once(n, seed, data):
    order = RandomSampler(range(n), replacement=True, num_samples=3 * DRAWS + 5).order(seed, 0)
    whole = order.indices(0, len(order))
    counts = np.bincount(whole, minlength=n)
    assert abs(((counts - counts.mean()) ** 2 / counts.mean()).sum() - (n - 1)) < 7 * (2 * n) ** 0.5 + 20  # chi-square
    start = data.draw(st.integers(0, len(order) - 1))
    stop, step = data.draw(st.integers(start, len(order))), data.draw(st.integers(1, 5000))
    assert (order.indices(start, stop, step) == whole[start:stop:step]).all()


@settings(max_examples=30)
@given(st.lists(st.integers(-100, 2**40), max_size=30), st.lists(st.booleans(), max_size=30), st.integers(0, 2**63))
def test_a_subset_is_its_indices_or_those_of_its_mask_and_neither_changes_nor_watches_them(indices, mask, seed):
    given = np.array(indices, np.int64)
    sampler = SubsetRandomSampler(given, seed=seed)
    before = sampler.identity()
    assert sorted(sampler) == sorted(indices) == sorted(SubsetRandomSampler(indices, seed=seed))
    given[:] = 9
    assert sorted(sampler) == sorted(indices)
    assert sampler.identity() == before
    assert sorted(SubsetRandomSampler(np.array(mask, bool))) == [place for place, there in enumerate(mask) if there]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomSampler(range(3), num_samples=0), "num_samples must be a positive int, got 0"),
        (lambda: RandomSampler(range(3), 3), "replacement must be a bool"),
        (lambda: RandomSampler([], num_samples=3), "num_samples must be 0 for an empty data_source, got 3"),
        (lambda: RandomSampler(range(3), seed=-1), "seed must be a non-negative int"),
        (lambda: RandomSampler(range(3), seed=1, generator=np.random.default_rng(0)), "must not both be given"),
        (lambda: RandomSampler(5), "data_source must have a length"),
        (lambda: SequentialSampler(5), "data_source must have a length"),
        (lambda: SubsetRandomSampler([0.5]), "indices must"),
        (lambda: SubsetRandomSampler([[1, 2]]), "indices must"),
        (lambda: BatchSampler(5, 2, False), "sampler must be iterable"),
        (lambda: BatchSampler(range(5), 2.0, False), "batch_size must be a positive int, got 2.0"),
        (lambda: BatchSampler(range(5), 2, 1), "drop_last must be a bool"),
        (lambda: BatchSampler(BatchSampler(range(5), 2, False), 2, False), "yields batches already"),
        (lambda: agnoload.BucketBatchSampler([1, 2], 2, shuffle=3), "shuffle must be a bool"),
        (lambda: agnoload.BucketBatchSampler([1, 2], 2, drop_last="x"), "drop_last must be a bool"),
    ],
)
def test_options_that_cannot_work_are_refused_when_the_sampler_is_made(make, words):
    with pytest.raises(OptionError, match=words):
        make()


# --- batches


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(1, 20), st.booleans())
def test_batches_are_cut_in_order_from_ours_and_from_any_iterable(n, size, drop_last):
    wanted = [list(range(start, min(start + size, n))) for start in range(0, n, size)]
    if drop_last and n % size:
        wanted.pop()
    for keys in (SequentialSampler(range(n)), range(n)):
        sampler = BatchSampler(keys, size, drop_last)
        assert list(sampler) == wanted
        assert len(sampler) == len(wanted)


def test_a_batch_sampler_of_whole_batches_cannot_resume_inside_one():
    order = ClassUniformBatchSampler([0, 1, 0, 1], 2, 3).batches(0, 0)
    assert order.after(6) is not None
    with pytest.raises(StateError, match=r"got 4, which lies inside the batch of 0\.\.\.5"):
        order.after(4)


# --- user-defined samplers inside ours


def test_ours_have_random_access_and_user_defined_ones_and_overriding_subclasses_do_not():
    assert has_random_access(RandomSampler(range(3)))
    assert has_random_access(BatchSampler(RandomSampler(range(3)), 2, False))
    for inside in (Backwards(3), Doubled(range(3)), range(3), [1, 2]):
        assert not has_random_access(inside)
        assert not has_random_access(BatchSampler(inside, 2, False))
    with pytest.raises(OptionError, match="iterate it"):
        BatchSampler(Backwards(5), 2, True).batches(0, 0)
    with pytest.raises(OptionError, match="iterate it"):
        DistributedSampler(Backwards(5), 2, 0).order(0, 0)


def test_what_can_be_indexed_is_a_dataset_and_what_can_only_be_iterated_a_sampler():
    assert is_sampler(Backwards(3))
    assert is_sampler({1, 2})
    assert not is_sampler([[1, 2], [3]])
    assert not is_sampler(range(3))


def test_keys_of_user_defined_samplers_are_cut_and_dealt_out_while_they_run():
    assert next(iter(BatchSampler((f"key{number}" for number in endless()), 2, False))) == ["key0", "key1"]
    dealt = iter(DistributedSampler(endless(), 3, 1))
    assert [next(dealt) for _ in range(3)] == [1, 4, 7]
    cut = BatchSampler(Doubled(range(5), seed=0), 2, False)
    assert [index for batch in cut for index in batch] == list(Doubled(range(5), seed=0))


@settings(max_examples=50)
@given(st.integers(0, 20), st.integers(1, 6), st.sampled_from(["pad", "drop", "keep"]))
@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_user_defined_samplers_are_dealt_out_as_ours_are(n, world, tail):
    for rank in range(world):
        ours = DistributedSampler(range(n), world, rank, shuffle=False, tail=tail)
        theirs = DistributedSampler(Backwards(n), world, rank, tail=tail)
        assert list(theirs) == [n - 1 - index for index in ours]
        assert len(theirs) == len(ours)


def test_set_epoch_reaches_a_user_defined_sampler_inside():
    inner = Backwards(4)
    BatchSampler(DistributedSampler(inner, 2, 0), 2, False).set_epoch(5)
    assert inner.epochs == [5]
