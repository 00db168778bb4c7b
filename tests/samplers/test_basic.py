"""The samplers that know only how many samples there are, batches of them, and what holds for every sampler."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload.errors import OptionError, StateError
from agnoload.samplers import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    batched,
    effective_seed,
    has_random_access,
    is_sampler,
)
from agnoload.samplers.base import pop_epoch
from agnoload.samplers.basic import DRAWS
from agnoload.samplers.order import from_array, in_sequence
from agnoload.testing import check_sampler


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


@pytest.mark.slow
def test_every_sampler_passes_its_check(make_sampler):
    check_sampler(make_sampler)


def test_random_samplers_order_another_epoch_and_another_seed_differently(make_sampler):
    sampler, other = make_sampler(), make_sampler()
    sampler._seed, other._seed = 1, 2  # one of few items gives the same order for two epochs of some seeds
    states = random.getstate(), np.random.get_state()[1].tolist()
    one, two = list(sampler), list(sampler)
    fixed = len(one) < 2 or isinstance(sampler, SequentialSampler) or getattr(sampler, "shuffle", True) is False
    assert (one == two) == (one == list(other)) == fixed
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # global generators stay as they are


def test_every_sampler_gives_int64_arrays_and_yields_ints(make_sampler):
    sampler = make_sampler()
    if sampler.yields_batches:
        assert sampler.batches(0, 0).batch(0).dtype == np.int64
        assert type(next(iter(sampler))[0]) is int
    else:
        order = sampler.order(0, 0)
        assert order.indices(0, len(order)).dtype == np.int64
        assert all(type(index) is int for index in sampler)


def test_every_sampler_stays_as_it_is_when_it_is_pickled_in_mid_epoch(make_sampler):
    sampler = make_sampler()
    list(sampler)
    next(iter(sampler), None)
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.epoch == 2
    assert list(copy) == list(sampler)
    assert repr(copy) == repr(sampler)
    assert repr(sampler).startswith(f"{type(sampler).__name__}(")
    assert " at 0x" not in repr(sampler)
    assert copy.identity() == sampler.identity()


def test_samplers_follow_a_dataset_that_grows():
    data = [1, 2]
    samplers = SequentialSampler(data), RandomSampler(data, seed=0)
    data.append(3)
    for sampler in samplers:
        assert len(sampler) == 3
        assert sorted(sampler) == [0, 1, 2]


def test_more_samples_than_items_are_whole_shuffles_one_after_the_other():
    order = list(RandomSampler(range(10), num_samples=25, seed=0))
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[:10] != order[10:20]
    assert len(set(order[20:])) == 5


def test_replacement_draws_evenly_and_any_chunk_at_once():
    order = RandomSampler(range(10), replacement=True, num_samples=5 * DRAWS, seed=0).order(0, 0)
    whole = order.indices(0, len(order))
    counts = np.bincount(whole, minlength=10)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 30
    assert (order.indices(DRAWS - 2, 4 * DRAWS, 7) == whole[DRAWS - 2 : 4 * DRAWS : 7]).all()


@pytest.mark.parametrize("indices", [[2, 5, 7], np.array([2, 5, 7], np.int8), [i in (2, 5, 7) for i in range(9)]])
def test_a_subset_by_indices_or_mask(indices):
    assert sorted(SubsetRandomSampler(indices)) == [2, 5, 7]
    assert list(SubsetRandomSampler([])) == []
    torch = pytest.importorskip("torch")
    assert sorted(SubsetRandomSampler(torch.tensor(indices))) == [2, 5, 7]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomSampler(range(3), num_samples=0), "num_samples must be a positive int, got 0"),
        (lambda: RandomSampler(range(3), num_samples=True), "num_samples must be a positive int, got True"),
        (lambda: RandomSampler(range(3), 3), "replacement must be a bool"),
        (lambda: RandomSampler([], num_samples=3), "num_samples must be 0 for an empty data_source, got 3"),
        (lambda: RandomSampler(range(3), seed=-1), "seed must be a non-negative int"),
        (lambda: RandomSampler(range(3), seed=True), "seed must be a non-negative int"),
        (lambda: RandomSampler(range(3), seed=1, generator=np.random.default_rng(0)), "must not both be given"),
        (lambda: SubsetRandomSampler([0.5]), "indices must"),
        (lambda: SubsetRandomSampler([[1, 2]]), "indices must"),
        (lambda: BatchSampler(range(5), 2.0, False), "batch_size must be a positive int, got 2.0"),
        (lambda: BatchSampler(range(5), None, False), "batch_size must be a positive int, got None"),
        (lambda: BatchSampler(range(5), 2, 1), "drop_last must be a bool"),
        (lambda: BatchSampler(BatchSampler(range(5), 2, False), 2, False), "yields batches already"),
    ],
)
def test_illegal_options_are_refused(make, words):
    with pytest.raises(OptionError, match=words):
        make()


def test_the_callers_indices_are_neither_changed_nor_watched():
    indices = np.arange(5)
    sampler = SubsetRandomSampler(indices, seed=0)
    indices[:] = 9
    assert sorted(sampler) == [0, 1, 2, 3, 4]


# --- seeds and epochs


def test_a_seed_given_to_the_sampler_wins_then_the_loaders_then_one_is_drawn():
    assert effective_seed(RandomSampler(range(3), seed=5), 7, 9) == 5
    assert effective_seed(RandomSampler(range(3)), 7, 9) == 7
    assert effective_seed(RandomSampler(range(3)), None, 9) == 9
    assert effective_seed(RandomSampler(range(3), seed=0), 7, 9) == 0
    assert effective_seed(BatchSampler(RandomSampler(range(3), seed=5), 2, False), 7, 9) == 5
    user_defined = Backwards(3)
    user_defined.seed = 1  # an attribute of that name is not taken for ours
    assert effective_seed(user_defined, None, 9) == 9


def test_without_a_seed_two_samplers_differ_and_one_keeps_to_itself():
    one, two = RandomSampler(range(1000)), RandomSampler(range(1000))
    first = list(one)
    assert first != list(two)
    one.set_epoch(0)
    assert list(one) == first


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
        lambda: random.Random(3),
        lambda: 3,
        lambda: np.int64(3),
    ],
)
def test_a_generator_gives_the_seed_once(make):
    generator = make()
    one = RandomSampler(range(100), generator=generator)
    two = SubsetRandomSampler(range(100), make())
    assert one.seed == two.seed
    assert list(one) == list(two)
    if not isinstance(generator, (int, np.integer)):
        assert RandomSampler(range(100), generator=generator).seed != one.seed


WITH_GENERATOR = {
    "random": lambda generator: RandomSampler(range(9), generator=generator),
    "subset": lambda generator: SubsetRandomSampler([1, 2], generator),
    "weighted": lambda generator: agnoload.WeightedRandomSampler([1, 2], 2, generator=generator),
    "balanced": lambda generator: agnoload.BalancedBatchSampler([0, 1], 2, generator=generator),
    "classes": lambda generator: agnoload.ClassUniformBatchSampler([0, 1], 2, 1, generator=generator),
    "cyclic": lambda generator: agnoload.CyclicClassBatchSampler([0, 1], 2, 2, generator=generator),
    "buckets": lambda generator: agnoload.BucketBatchSampler([1, 2], 2, generator=generator),
}


@pytest.mark.parametrize("make", WITH_GENERATOR.values(), ids=WITH_GENERATOR)
def test_non_generators_are_rejected(make):
    for generator in ("x", True, 1.5, -1, [1], object()):
        with pytest.raises(OptionError, match=r"generator must be .*got"):
            make(generator)


@pytest.mark.parametrize("make", WITH_GENERATOR.values(), ids=WITH_GENERATOR)
def test_a_frameworks_generator_gives_the_seed_at_once(make):
    torch = pytest.importorskip("torch")
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    sampler, alike, following = make(generator), make(other), make(other)
    assert sampler.seed == alike.seed != following.seed
    assert list(sampler) == list(alike)
    assert pickle.loads(pickle.dumps(sampler)).seed == sampler.seed


def test_c18_each_iteration_is_the_next_epoch_and_set_epoch_brings_one_back():
    sampler = RandomSampler(range(50), seed=1)
    epochs = [list(sampler) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    sampler.set_epoch(1)
    assert sampler.epoch == 1
    assert [list(sampler), list(sampler)] == epochs[1:]


def test_leaving_a_loop_early_ends_the_epoch():
    sampler, other = RandomSampler(range(50), seed=1), RandomSampler(range(50), seed=1)
    next(iter(sampler))
    list(other)
    assert list(sampler) == list(other)


def test_two_iterators_over_one_sampler_do_not_disturb_each_other():
    sampler, fresh = RandomSampler(range(50), seed=1), RandomSampler(range(50), seed=1)
    mixed = zip(iter(sampler), iter(sampler), strict=True)
    assert list(zip(*mixed, strict=True)) == [tuple(fresh), tuple(fresh)]


def test_set_epoch_counts_once_and_reaches_through_what_is_around():
    inner = RandomSampler(range(5), seed=0)
    sampler = BatchSampler(inner, 2, False)
    assert pop_epoch(sampler) is None
    inner.set_epoch(4)
    assert pop_epoch(sampler) == 4
    assert pop_epoch(sampler) is None
    sampler.set_epoch(3)
    assert pop_epoch(sampler) == 3
    assert pop_epoch(inner) is None
    user_defined = Backwards(5)
    BatchSampler(user_defined, 2, False).set_epoch(3)
    assert user_defined.epochs == [3]
    inner.set_epoch(7)
    assert [index for batch in sampler for index in batch] == list(
        RandomSampler(range(5), seed=0).order(0, 7).indices(0, 5)
    )


def test_the_order_is_the_same_in_a_fresh_interpreter():
    script = "from agnoload.samplers import RandomSampler; print(list(RandomSampler(range(40), seed=5)))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert found.strip() == str(list(RandomSampler(range(40), seed=5)))


def test_attributes_that_make_the_order_cannot_be_changed_later():
    sampler = RandomSampler(range(5))
    with pytest.raises(AttributeError, match="replacement of a RandomSampler cannot be changed: make a new sampler"):
        sampler.replacement = True
    sampler.replacement = sampler.replacement
    sampler.of_the_user = 1


# --- random access


def test_ours_have_random_access_and_user_defined_ones_and_overriding_subclasses_do_not():
    assert has_random_access(RandomSampler(range(3)))
    assert has_random_access(BatchSampler(RandomSampler(range(3)), 2, False))
    assert not has_random_access(Backwards(3))
    assert not has_random_access(Doubled(range(3)))
    assert not has_random_access(BatchSampler(Doubled(range(3)), 2, False))
    assert not has_random_access(BatchSampler(range(3), 2, False))
    assert not has_random_access([1, 2])


def test_what_can_be_indexed_is_a_dataset_and_what_can_only_be_iterated_a_sampler():
    assert is_sampler(Backwards(3))
    assert is_sampler({1, 2})
    assert not is_sampler([[1, 2], [3]])
    assert not is_sampler(range(3))
    torch = pytest.importorskip("torch")
    assert is_sampler(torch.utils.data.SequentialSampler(range(3)))
    assert not is_sampler(torch.utils.data.TensorDataset(torch.zeros(3)))


# --- batches


@pytest.mark.parametrize(("drop_last", "last"), [(False, [[8, 9]]), (True, [])])
def test_batches_are_cut_in_order(drop_last, last):
    sampler = BatchSampler(SequentialSampler(range(10)), 4, drop_last)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], *last]
    assert len(sampler) == 2 + len(last)


def test_batches_of_a_sampler_without_random_access_are_cut_while_it_runs():
    def endless():
        number = 0
        while True:
            yield f"key{number}"
            number += 1

    assert next(iter(BatchSampler(endless(), 2, False))) == ["key0", "key1"]
    assert list(BatchSampler(Backwards(5), 2, False)) == [[4, 3], [2, 1], [0]]
    assert list(BatchSampler(Backwards(5), 2, True)) == [[4, 3], [2, 1]]
    assert [x for b in BatchSampler(Doubled(range(5), seed=0), 2, False) for x in b] == list(Doubled(range(5), seed=0))
    with pytest.raises(OptionError, match="iterate it"):
        BatchSampler(Backwards(5), 2, True).batches(0, 0)


def test_another_batch_size_goes_on_at_any_position():
    order = RandomSampler(range(50)).order(3, 0)
    whole = order.indices(0, 50).tolist()
    for position in range(51):
        batches = batched(order, 7).after(position)
        assert [i for number in range(len(batches)) for i in batches.batch(number).tolist()] == whole[position:]
        assert batches.position(0) == position


def test_three_resumes_in_one_epoch_are_as_one():
    order = RandomSampler(range(50)).order(3, 0)
    batches = batched(order, 4).after(8).after(20).after(36)
    assert batches.position(1) == 40
    assert batches.batch(1).tolist() == order.indices(40, 44).tolist()
    assert batches.reached(2) == 44
    assert len(batches.after(50)) == 0


def test_a_position_beyond_the_end_leaves_nothing():
    assert len(in_sequence(5).after(9)) == 0
    assert len(batched(from_array(np.arange(5)), 2).after(9)) == 0


def test_a_batch_sampler_of_whole_batches_cannot_go_on_inside_one():
    from agnoload.samplers import ClassUniformBatchSampler

    order = ClassUniformBatchSampler([0, 1, 0, 1], 2, 3).batches(0, 0)
    assert order.after(6) is not None
    with pytest.raises(StateError, match=r"got 4, which lies inside the batch of 0\.\.\.5"):
        order.after(4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: agnoload.DistributedSampler(range(4), 2, 0, shuffle=3),  # type: ignore[arg-type]
        lambda: agnoload.DistributedSampler(range(4), 2, 0, drop_last="x"),  # type: ignore[arg-type]
        lambda: agnoload.BucketBatchSampler([1, 2], 2, shuffle=3),  # type: ignore[arg-type]
        lambda: agnoload.BucketBatchSampler([1, 2], 2, drop_last="x"),  # type: ignore[arg-type]
        lambda: agnoload.BatchSampler(5, 2, False),  # type: ignore[arg-type]
        lambda: agnoload.SequentialSampler(5),  # type: ignore[arg-type]
        lambda: agnoload.RandomSampler(5),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_refused_when_the_sampler_is_made(make: Any) -> None:
    with pytest.raises(agnoload.OptionError, match="must"):
        make()


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
    named.sampler = named.inside = agnoload.DistributedSampler(range(9), 1, 0)  # ranks agree on 0, as by itself
    assert load(named) == wanted(0, 4)
