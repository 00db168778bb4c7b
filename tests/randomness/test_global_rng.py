"""Each request seeds the global generators from its key, and the user's own are neither read nor advanced."""

from __future__ import annotations

import random
from contextlib import contextmanager
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader


class Draws(agnoload.Dataset):
    """Sample i is i and a number from each global generator."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, np.random.standard_normal(), random.gauss(0.0, 1.0), np.random.random(), random.random()


class Fails(Draws):
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        if index == 7:
            raise self.error
        return super().__getitem__(index)


class Reseeds(Draws):
    """Seeds the global generators itself, and gives `np.random` another bit generator."""

    def __getitem__(self, index):
        np.random.seed(index)
        random.seed(index)
        np.random.set_bit_generator(np.random.PCG64(0))
        return super().__getitem__(index)


class DrawingSampler:
    """A user's sampler that draws from the global generators while it is iterated."""

    def __len__(self):
        return 12

    def __iter__(self):
        for _ in range(12):
            yield (random.randrange(12) + int(np.random.randint(12))) % 12


def state():
    """Everything that can be seen of the global generators."""
    return random.getstate(), repr(np.random.get_state(legacy=False)), id(np.random.get_bit_generator())


@contextmanager
def prepared(actions=()):
    """The global generators after what a user may do with them; they are put back at the end."""
    source, numpy, python = np.random.get_bit_generator(), np.random.get_state(legacy=False), random.getstate()
    np.random.seed(11)
    random.seed(11)
    for act in actions:
        act()
    try:
        yield state()
    finally:
        np.random.set_bit_generator(source)
        np.random.set_state(numpy)
        random.setstate(python)


ACTIONS = st.lists(
    st.sampled_from(
        [
            lambda: random.gauss(0.0, 1.0),  # the other one of the pair is held back
            lambda: np.random.set_bit_generator(np.random.PCG64(4)),
            lambda: np.random.bytes(7),
        ]
    ),
    max_size=4,
)
SEEDS = st.integers(0, 1 << 70)


def batches(loader):
    return [[field.tolist() for field in batch] for batch in loader]


@settings(max_examples=12)
@given(ACTIONS, st.sampled_from([Draws(), Reseeds()]), SEEDS)
def test_loading_neither_reads_nor_moves_the_users_generators(actions, dataset, seed):
    found = []
    for done in ([], actions):
        with prepared(done) as before:
            loader = DataLoader(dataset, 4, sampler=DrawingSampler(), seed=seed)
            found.append(batches(loader))
            assert state() == before
            for _ in loader:
                assert state() == before
    assert found[0] == found[1]


@pytest.mark.parametrize("error", [LookupError(7), KeyboardInterrupt(), StopIteration()], ids=repr)
def test_an_error_of_a_sample_leaves_them_as_they_were(error):
    with prepared([lambda: random.gauss(0.0, 1.0)]) as before:
        with pytest.raises((LookupError, KeyboardInterrupt, agnoload.SampleStopped)):
            list(DataLoader(Fails(error), 4))
        assert state() == before


def test_workers_leave_the_users_generators_as_they_were():
    for dataset in (Draws(), Reseeds()):
        with prepared([lambda: random.gauss(0.0, 1.0)]) as before, DataLoader(dataset, 4, num_workers=1) as loader:
            for _ in loader:
                assert state() == before


def test_orders_states_and_reprs_touch_no_global_generator():
    with prepared() as before:
        loader = DataLoader(Draws(), 4, shuffle=True)
        loader.load_state_dict(loader.state_dict())
        repr(loader)
        weighted = agnoload.WeightedRandomSampler(np.ones(12), 12)
        list(DataLoader(range(12), 4, sampler=agnoload.DistributedSampler(weighted, 2, 0)))
        list(agnoload.RandomSampler(range(9)))
        assert state() == before


def test_a_users_seed_within_a_sample_holds():
    class Seeds(Draws):
        def __getitem__(self, index):
            np.random.seed(index)
            return index, np.random.standard_normal()

    for index, normal in batches(DataLoader(Seeds(), 4, shuffle=True, seed=3)):
        assert normal == [np.random.RandomState(each).standard_normal() for each in index]


def recipe(seed, epoch, rank, position):
    """What docs/reproducibility.md says a request does before its first sample."""
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    a, b, _ = np.random.Philox(key=key, counter=[0, position, rank | 3 << 32, epoch]).random_raw(3).tolist()
    return random.Random(a), np.random.RandomState(b & 0xFFFFFFFF)


@settings(max_examples=30)
@given(SEEDS, st.integers(0, (1 << 63) - 2), st.integers(1, 13))
def test_a_request_seeds_as_the_documentation_says(seed, epoch, size):
    loader = DataLoader(Draws(), size, seed=seed)
    loader.set_epoch(epoch)
    for number, batch in enumerate(loader):
        python, numpy = recipe(seed, epoch, 0, size * number)
        for sample in zip(*(field.tolist() for field in batch[1:]), strict=True):
            assert sample == (numpy.standard_normal(), python.gauss(0.0, 1.0), numpy.random(), python.random())


@pytest.mark.parametrize("seed", [0, 2**63])
def test_c06_no_two_requests_draw_the_same(seed):
    found = [batches(DataLoader(Draws(), 1, seed=seed + each)) for each in range(3)]
    drawn = [number for fields in chain(*found) for field in fields[1:] for number in field]
    assert len(set(drawn)) == 3 * 12 * 4


def test_a_loader_inside_of_a_dataset_leaves_the_outer_draws_alone():
    class Outer(agnoload.Dataset):
        def __init__(self, inner):
            self.inner = inner

        def __len__(self):
            return 8

        def __getitem__(self, index):
            first = np.random.random(), random.gauss(0.0, 1.0), agnoload.sample_rng().random()
            if self.inner:
                list(DataLoader(Draws(), 4, seed=9))
            return *first, np.random.random(), random.gauss(0.0, 1.0)

    assert batches(DataLoader(Outer(True), 4, seed=3)) == batches(DataLoader(Outer(False), 4, seed=3))


def test_a_users_sampler_draws_other_numbers_in_each_epoch_and_the_same_in_each_run():
    one, other = (DataLoader(Draws(), 4, sampler=DrawingSampler(), seed=3) for _ in range(2))
    first, second = batches(one), batches(one)
    assert first != second
    assert [batches(other), batches(other)] == [first, second]
