"""What holds for every sampler: its check, its seeds and epochs, any piece of its order, and its shares over ranks."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload.errors import OptionError
from agnoload.samplers import (
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    batched,
    effective_seed,
)
from agnoload.samplers.base import is_split, pop_epoch
from agnoload.testing import check_sampler

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), (20, 2, 9, 15, 7)))
LENGTHS = np.random.default_rng(1).integers(0, 50, 53)

WHOLE = {
    "sequential": lambda: SequentialSampler(range(53)),
    "random": lambda: RandomSampler(range(53)),
    "random, one item": lambda: RandomSampler(range(1)),
    "random, none": lambda: RandomSampler(range(0)),
    "random, more than all": lambda: RandomSampler(range(10), num_samples=25),
    "random, some": lambda: RandomSampler(range(10), num_samples=4),
    "random, replacement": lambda: RandomSampler(range(10), replacement=True, num_samples=53),
    "subset": lambda: SubsetRandomSampler([7, 3, 5, 11]),
    "weighted": lambda: WeightedRandomSampler(LENGTHS, 20),
    "weighted, no replacement": lambda: WeightedRandomSampler(LENGTHS, 20, replacement=False),
    "batch": lambda: BatchSampler(RandomSampler(range(53)), 4, drop_last=False),
    "batch, drop_last": lambda: BatchSampler(RandomSampler(range(53)), 4, drop_last=True),
    "balanced": lambda: BalancedBatchSampler(LABELS, 8),
    "balanced, rotating": lambda: BalancedBatchSampler(LABELS, 3, alpha=0.5),
    "balanced, random": lambda: BalancedBatchSampler(LABELS, 8, kind="random"),
    "class uniform": lambda: ClassUniformBatchSampler(LABELS, 2, 3),
    "cyclic": lambda: CyclicClassBatchSampler(LABELS, 2, 6),
    "buckets": lambda: BucketBatchSampler(LENGTHS, max_tokens=120),
    "buckets by count": lambda: BucketBatchSampler(LENGTHS, batch_size=4, drop_last=True, largest_first=True),
    "buckets in order": lambda: BucketBatchSampler(LENGTHS, batch_size=5, max_tokens=120, shuffle=False),
}
"""One of every kind, small, that gives the order of one process."""
EVERY = WHOLE | {
    "one rank": lambda: DistributedSampler(range(53), 3, 1),
    "one rank, keep": lambda: DistributedSampler(range(53), 3, 2, tail="keep"),
    "one rank of a sampler": lambda: DistributedSampler(WeightedRandomSampler(LENGTHS, 20), 3, 0, tail="drop"),
    "one rank of a batch sampler": lambda: DistributedSampler(BucketBatchSampler(LENGTHS, max_tokens=120), 3, 1),
    "batches of one rank": lambda: BatchSampler(DistributedSampler(range(53), 3, 1), 4, drop_last=False),
}
every = st.sampled_from(list(EVERY))
whole = st.sampled_from(list(WHOLE))
seeds = st.integers(0, 2**63)
worlds = st.integers(1, 9)
tails = st.sampled_from(["pad", "drop", "keep"])


def batches_of(sampler, seed=3, epoch=1, size=2):
    return sampler.batches(seed, epoch) if sampler.yields_batches else batched(sampler.order(seed, epoch), size)


def items_of(sampler, seed=3, epoch=1):
    order = sampler.batches(seed, epoch) if sampler.yields_batches else sampler.order(seed, epoch)
    return list(order)


def shares(world, make, **options):
    return [DistributedSampler(make(), world, rank, **options) for rank in range(world)]


def in_turns(ranks):
    return [item for turn in range(max(map(len, ranks))) for items in ranks for item in items[turn : turn + 1]]


@pytest.mark.slow
def test_one_of_each_class_passes_its_check():
    for make in {type(make()): make for make in EVERY.values()}.values():  # the last of each; below are all of them
        check_sampler(make)


def test_another_epoch_and_another_seed_give_another_order_and_global_generators_stay_as_they_are():
    states = random.getstate(), np.random.get_state()[1].tolist()
    for name, make in EVERY.items():
        one, two, other = items_of(make(), 1, 0), items_of(make(), 1, 1), items_of(make(), 2, 0)
        fixed = len(one) < 2 or name in ("sequential", "buckets in order")
        assert (one == two) == (one == other) == fixed, name
        assert not one or batches_of(make()).batch(0).dtype == np.int64
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


@settings(max_examples=25)
@given(every, seeds, st.integers(0, 2**40), st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_iterating_gives_int_by_int_the_order_of_the_epoch_that_was_set_and_then_the_next(name, seed, high, epochs):
    sampler = EVERY[name]()
    sampler._seed = seed
    for epoch in (high, *epochs):
        sampler.set_epoch(epoch)
        for following in (epoch, epoch + 1):
            assert sampler.epoch == following
            found = list(sampler)
            assert found == items_of(EVERY[name](), seed, following)
            assert len(found) == len(sampler)
            assert {type(key) for item in found for key in (item if sampler.yields_batches else [item])} <= {int}


@settings(max_examples=25)
@given(every, st.integers(0, 3))
def test_a_pickled_copy_is_in_the_same_epoch_and_of_the_same_identity(name, epochs):
    sampler = EVERY[name]()
    for _ in range(epochs):
        next(iter(sampler), None)
    copy = pickle.loads(pickle.dumps(sampler))
    assert (copy.epoch, repr(copy), copy.identity()) == (epochs, repr(sampler), sampler.identity())
    assert list(copy) == list(sampler)
    assert repr(sampler).startswith(f"{type(sampler).__name__}(")
    assert " at 0x" not in repr(sampler)


@settings(max_examples=50)
@given(every, seeds, st.data())
def test_what_is_left_at_any_border_is_the_rest_and_several_resumes_are_as_one(name, seed, data):
    first = batches_of(EVERY[name](), seed)
    places = sorted(data.draw(st.lists(st.integers(0, len(first)), min_size=1, max_size=3)))
    rest = batches_of(EVERY[name](), seed)
    for place in places:
        rest = rest.after(first.reached(place))
    assert list(rest) == list(first)[places[-1] :]
    assert [rest.position(k) for k in range(len(rest))] == [first.position(k) for k in range(places[-1], len(first))]


@settings(max_examples=50)
@given(st.sampled_from([name for name in EVERY if not EVERY[name]().yields_batches]), st.data())
def test_another_batch_size_resumes_at_any_position(name, data):
    order = EVERY[name]().order(3, 0)
    place = data.draw(st.integers(0, len(order)))
    rest = batched(order, data.draw(st.integers(1, 9))).after(order.reached(place))
    assert [index for batch in rest for index in batch] == list(order)[place:]
    assert len(rest.after(order.end + 9)) == 0


# --- over ranks


@settings(max_examples=60)
@given(whole, worlds, tails, seeds)
@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_the_shares_in_turns_are_the_order_of_one_process(name, world, tail, seed):
    items = items_of(WHOLE[name](), seed)
    samplers = shares(world, WHOLE[name], tail=tail)
    ranks = [items_of(sampler, seed) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == list(map(len, ranks))
    wanted = len(items) - len(items) % world if tail == "drop" else len(items)
    assert in_turns(ranks)[:wanted] == items[:wanted]
    assert len(set(map(len, ranks))) == 1 or (tail == "keep" and max(map(len, ranks)) - min(map(len, ranks)) == 1)
    padding = in_turns([sampler.is_padding.tolist() for sampler in samplers])
    assert padding == [False] * wanted + [True] * (samplers[0].total_size - wanted)
    if tail == "pad" and items:  # as torch does: from the beginning, again and again
        assert in_turns(ranks)[wanted:] == (items * world)[: len(padding) - wanted]


@settings(max_examples=50)
@given(whole, worlds, tails)
@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_samples_on_different_ranks_have_different_positions_and_so_have_repeats(name, world, tail):
    taken = []
    for sampler in shares(world, WHOLE[name], tail=tail):
        order = batches_of(sampler)
        for k in range(len(order)):
            taken += [order.position(k) + i * order.stride for i in range(len(order.batch(k)))]
    assert len(set(taken)) == len(taken)


@settings(max_examples=50)
@given(whole, worlds, worlds, st.data())
def test_the_rest_comes_exactly_once_on_any_other_number_of_ranks(name, before, behind, data):
    first = [batches_of(sampler) for sampler in shares(before, WHOLE[name], tail="keep")]
    done = data.draw(st.integers(0, min(map(len, first))))
    taken = [index for order in first for k in range(done) for index in order.batch(k).tolist()]
    position = first[0].reached(done)
    rest = [batches_of(sampler).after(position) for sampler in shares(behind, WHOLE[name], tail="keep")]
    taken += [index for order in rest for batch in order for index in batch]
    assert sorted(taken) == sorted(index for batch in batches_of(WHOLE[name]()) for index in batch)


@settings(max_examples=50)
@given(whole, worlds, tails, st.data())
@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_a_resume_on_as_many_ranks_gives_what_an_unbroken_run_would_repeats_too(name, world, tail, data):
    rank = data.draw(st.integers(0, world - 1))
    orders = [batches_of(sampler) for sampler in shares(world, WHOLE[name], tail=tail)]
    done = data.draw(st.integers(0, min(map(len, orders))))
    unbroken = orders[rank]
    rest = batches_of(DistributedSampler(WHOLE[name](), world, rank, tail=tail)).after(unbroken.reached(done))
    assert list(rest) == list(unbroken)[done:]
    assert [rest.position(k) for k in range(len(rest))] == [unbroken.position(k) for k in range(done, len(unbroken))]


# --- seeds


@settings(max_examples=50)
@given(every, st.none() | seeds, st.none() | seeds, seeds)
def test_a_seed_given_to_the_sampler_wins_then_the_loaders_then_0_on_ranks_then_one_is_drawn(name, own, given, drawn):
    sampler = EVERY[name]()
    sampler._seed = own
    default = 0 if is_split(sampler) else drawn
    assert effective_seed(sampler, given, drawn) == next(seed for seed in (own, given, default) if seed is not None)
    assert effective_seed(Backwards(sampler), given, drawn) == effective_seed(sampler, given, drawn)
    assert sampler.seed == own


class Backwards:
    """A user's sampler around ours."""

    seed = 1  # an attribute of that name is not taken for ours

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter([*self.sampler][::-1])


def test_the_outer_seed_and_epoch_count_inside():
    inner = RandomSampler(range(20), seed=4)
    outer = DistributedSampler(inner, 1, 0)
    assert outer.seed == 4
    outer = DistributedSampler(inner, 1, 0, seed=3)
    outer.set_epoch(2)
    assert list(outer) == RandomSampler(range(20)).order(3, 2).indices(0, 20).tolist()
    assert inner.epoch == 2


def test_set_epoch_counts_once_and_reaches_through_what_is_around():
    inner = RandomSampler(range(5), seed=0)
    sampler = BatchSampler(inner, 2, False)
    assert pop_epoch(sampler) is None
    inner.set_epoch(4)
    assert pop_epoch(Backwards(sampler)) == 4
    assert pop_epoch(sampler) is None
    sampler.set_epoch(3)
    assert (pop_epoch(sampler), pop_epoch(inner)) == (3, None)
    inner.set_epoch(7)
    assert [index for batch in sampler for index in batch] == list(RandomSampler(range(5)).order(0, 7))


def test_without_a_seed_two_samplers_differ_and_one_keeps_to_itself():
    one, two = RandomSampler(range(1000)), RandomSampler(range(1000))
    first = list(one)
    assert first != list(two)
    one.set_epoch(0)
    assert list(one) == first


def test_two_iterators_over_one_sampler_are_of_two_epochs_even_if_one_is_left_early():
    sampler, fresh = RandomSampler(range(50), seed=1), RandomSampler(range(50), seed=1)
    mixed = zip(iter(sampler), iter(sampler), strict=True)
    assert list(zip(*mixed, strict=True)) == [tuple(fresh), tuple(fresh)]
    next(iter(sampler)), next(iter(fresh))
    assert list(sampler) == list(fresh)


WITH_GENERATOR = [
    lambda generator: RandomSampler(range(9), generator=generator),
    lambda generator: SubsetRandomSampler([1, 2], generator),
    lambda generator: WeightedRandomSampler([1, 2], 2, generator=generator),
    lambda generator: BalancedBatchSampler([0, 1], 2, generator=generator),
    lambda generator: ClassUniformBatchSampler([0, 1], 2, 1, generator=generator),
    lambda generator: CyclicClassBatchSampler([0, 1], 2, 2, generator=generator),
    lambda generator: BucketBatchSampler([1, 2], 2, generator=generator),
]


def test_a_generator_gives_the_seed_once_and_non_generators_are_rejected():
    kinds = [np.random.default_rng, np.random.RandomState, random.Random, int, np.int64]
    for make in WITH_GENERATOR:
        for kind in kinds:
            generator = kind(3)
            assert make(generator).seed == make(kind(3)).seed
            assert (make(generator).seed == make(kind(3)).seed) == (kind in (int, np.int64))
        for wrong in ("x", True, 1.5, -1, [1], object()):
            with pytest.raises(OptionError, match=r"generator must be .*got"):
                make(wrong)


# --- inside user-defined samplers, through a loader


class Mirrored:
    """A user's sampler around ours, under a name that only it knows; it goes through it as often as it is asked to."""

    def __init__(self, inside, rounds=1):
        self.inside = inside
        self.rounds = rounds

    def __iter__(self):
        for _ in range(self.rounds):
            yield from (-index - 1 for index in self.inside)


def test_ours_inside_a_user_defined_sampler_follow_the_seed_and_the_epoch_of_the_loader():
    def load(sampler, **options):
        loader = agnoload.DataLoader(range(9), 3, sampler=sampler, **options)
        loader.set_epoch(4)
        return [index for batch in loader for index in batch.tolist()]

    def wanted(seed, epoch):
        return [8 - index for index in RandomSampler(range(9)).order(seed, epoch)]

    used = RandomSampler(range(9))
    list(used), list(used)  # epochs of its own do not count
    assert load(Mirrored(used), seed=3) == wanted(3, 4)
    assert load(Mirrored(RandomSampler(range(9)), rounds=2), seed=3) == wanted(3, 4) + wanted(3, 5)
    assert load(Mirrored(RandomSampler(range(9), seed=6)), seed=3) == wanted(6, 4)
    named = Mirrored(range(9))
    named.sampler = named.inside = DistributedSampler(range(9), 1, 0)  # ranks agree on 0, as by itself
    assert load(named) == wanted(0, 4)
