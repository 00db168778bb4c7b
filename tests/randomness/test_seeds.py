"""Which seed counts, and what `generator=` gives."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader, OptionError, StateError

N = 20


def order(loader):
    """The indices of the next epoch."""
    return [index for batch in loader for index in batch.tolist()]


def shuffled(seed, epoch=0):
    return agnoload.RandomSampler(range(N)).order(seed, epoch).indices(0, N).tolist()


def test_a_seed_is_drawn_once_and_shown():
    loader, other = DataLoader(range(N), 4, shuffle=True), DataLoader(range(N), 4, shuffle=True)
    assert loader.seed != other.seed
    assert f"seed={loader.seed}" in repr(loader)
    assert loader.state_dict()["seed"] == loader.seed
    seed = loader.seed
    assert [order(loader), order(loader)] == [shuffled(seed), shuffled(seed, 1)]
    assert loader.seed == seed
    given = DataLoader(range(N), 4, sampler=random_sampler(None))
    assert order(given) == shuffled(given.seed)


SEEDS = st.integers(0, 1 << 200) | st.builds(np.int64, st.integers(0, (1 << 63) - 1))


@settings(max_examples=40)
@given(SEEDS, st.integers(0, 9), st.integers(1, 25))
def test_any_non_negative_int_is_a_seed_and_travels_in_a_state(seed, epoch, size):
    loader = DataLoader(range(N), size, shuffle=True, seed=seed)
    loader.set_epoch(epoch)
    assert (loader.seed, order(loader)) == (int(seed), shuffled(int(seed), epoch))
    again = DataLoader(range(N), size, shuffle=True)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert (again.seed, order(again)) == (int(seed), shuffled(int(seed), epoch + 1))


NOT_SEEDS = [-1, 1.5, True, "7"]
NOT_GENERATORS = ["x", True, 1.5, -1, object(), [1], np.zeros(3)]


def test_other_seeds_and_non_generators_are_rejected():
    for seed in NOT_SEEDS:
        with pytest.raises(OptionError, match="seed must be a non-negative int"):
            DataLoader(range(N), seed=seed)
    for thing in NOT_GENERATORS:
        with pytest.raises(OptionError, match=rf"generator must be .* got {re.escape(repr(thing)[:20])}"):
            DataLoader(range(N), generator=thing)
    with pytest.raises(OptionError, match="exclude each other"):
        DataLoader(range(N), generator=random.Random(3), seed=3)


def random_sampler(seed):
    return agnoload.RandomSampler(range(N), seed=seed)


def distributed(seed):
    return agnoload.DistributedSampler(range(N), 1, 0, seed=seed)


def inside(seed):
    return agnoload.DistributedSampler(random_sampler(seed), 1, 0)


def outside(seed):
    return agnoload.DistributedSampler(random_sampler(1), 1, 0, seed=seed)


def test_a_seed_given_to_a_sampler_wins_over_the_loaders_and_that_over_0_of_a_distributed_one():
    for make in (random_sampler, distributed, inside, outside):
        for options in ({}, {"seed": 8}):
            assert order(DataLoader(range(N), 4, sampler=make(3), **options)) == shuffled(3)
            batches = agnoload.BatchSampler(make(3), 4, drop_last=False)
            assert order(DataLoader(range(N), batch_sampler=batches, **options)) == shuffled(3)
    for make in (random_sampler, distributed, inside):
        assert order(DataLoader(range(N), 4, sampler=make(None), seed=8)) == shuffled(8)
    for make in (distributed, inside):
        loader = DataLoader(range(N), 4, sampler=make(None))
        assert loader.seed != 0
        assert order(loader) == shuffled(0)
        batches = agnoload.BatchSampler(make(None), 4, drop_last=False)
        assert order(DataLoader(range(N), batch_sampler=batches)) == shuffled(0)


def test_a_subclass_of_a_sampler_runs_on_the_same_seed():
    class Reversed(agnoload.RandomSampler):
        def __iter__(self):
            return reversed(list(super().__iter__()))

    loader = DataLoader(range(N), 4, sampler=Reversed(range(N)), seed=8)
    assert [order(loader), order(loader)] == [shuffled(8)[::-1], shuffled(8, 1)[::-1]]
    wrapped = agnoload.DistributedSampler(Reversed(range(N)), 1, 0)
    assert order(DataLoader(range(N), 4, sampler=wrapped)) == shuffled(0)[::-1]
    own = Reversed(range(N), seed=3)
    assert order(DataLoader(range(N), 4, sampler=own, seed=8)) == shuffled(3)[::-1]


# ---------------------------------------------------------------------------------------------- generator=


class Draws(agnoload.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return index, agnoload.sample_rng().random(), np.random.random()


GENERATORS = {
    "Generator": lambda: np.random.default_rng(3),
    "RandomState": lambda: np.random.RandomState(3),
    "Random": lambda: random.Random(3),
    "int": lambda: 3,
}


def batches(loader):
    return [[field.tolist() for field in batch] for batch in loader]


KIND = st.sampled_from(sorted(GENERATORS))


@settings(max_examples=20)
@given(KIND, st.integers(0, 15))
def test_a_generator_gives_a_seed_once_an_epoch_and_a_run_resumes_with_one_that_was_made_alike(kind, k):
    make = GENERATORS[kind]
    loader = DataLoader(Draws(), 4, shuffle=True, generator=make())
    whole, seeds = [], []
    for epoch in range(3):
        found = batches(loader)
        seeds.append(loader.seed)
        assert [index for batch in found for index in batch[0]] == shuffled(loader.seed, epoch)
        whole += found
    assert len(set(seeds)) == 3 or kind == "int"
    first, taken = DataLoader(Draws(), 4, shuffle=True, generator=make()), []
    while len(taken) < k:
        for batch in first:
            taken.append([field.tolist() for field in batch])
            if len(taken) == k:
                break
    state = json.loads(json.dumps(first.state_dict()))
    second = DataLoader(Draws(), 4, shuffle=True, generator=make())
    second.load_state_dict(state)
    assert second.state_dict() == state
    while len(taken) < len(whole):
        taken += batches(second)
    assert taken == whole


def test_workers_are_kept_when_a_generator_changes_the_seed_and_load_the_same():
    alone = DataLoader(Draws(), 4, shuffle=True, generator=random.Random(3))
    options = {"shuffle": True, "generator": random.Random(3), "num_workers": 2, "persistent_workers": True}
    with DataLoader(Draws(), 4, **options) as loader:
        pids = set()
        for _ in range(2):
            iterator = iter(loader)
            pids.add(tuple(iterator._pool.pids().values()))
            assert batches(iterator) == batches(alone)
        assert len(pids) == 1


def test_the_loader_draws_from_a_generator_once_an_epoch_and_not_before():
    generator, untouched = random.Random(3), random.Random(3)
    loader = DataLoader(range(N), 4, shuffle=True, generator=generator)
    assert generator.getstate() == untouched.getstate()
    assert "generator=" in repr(loader)
    for _ in range(3):
        list(loader)
        untouched.getrandbits(63)
        assert generator.getstate() == untouched.getstate()


@pytest.mark.slow
def test_a_frameworks_generator_counts_and_its_tensor_is_rejected_and_its_generator_stays_as_it_is():
    torch = pytest.importorskip("torch")
    with pytest.raises(OptionError, match=r"generator must be .* got tensor"):
        DataLoader(range(N), generator=torch.zeros(3))
    generator, untouched = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    loader = DataLoader(Draws(), 4, shuffle=True, generator=generator)
    assert torch.equal(generator.get_state(), untouched.get_state())
    found = [batches(loader), batches(loader)]
    assert found[0] != found[1]
    again = DataLoader(Draws(), 4, shuffle=True, generator=untouched)
    assert [batches(again), batches(again)] == found


def test_a_state_needs_a_generator_that_gives_the_same_seeds():
    loader = DataLoader(range(N), 4, shuffle=True, generator=random.Random(3))
    list(loader), list(loader)
    state = loader.state_dict()
    other = DataLoader(range(N), 4, shuffle=True, generator=random.Random(4))
    wanted = order(DataLoader(range(N), 4, shuffle=True, generator=random.Random(4)))
    with pytest.raises(StateError, match=r"gave seed \d+ as number 2, but this loader's gives \d+: seed it"):
        other.load_state_dict(state)
    assert order(other) == wanted  # it stays at its own first epoch


def test_a_state_rewinds_the_loader_that_saved_it():
    loader = DataLoader(range(N), 4, shuffle=True, generator=random.Random(3))
    wanted = [order(loader)]
    state = loader.state_dict()
    wanted += [order(loader), order(loader)]
    loader.load_state_dict(state)
    assert [order(loader), order(loader)] == wanted[1:]


def test_steps_save_the_seed_of_the_last_batch_delivered():
    loader = DataLoader(range(N), 4, shuffle=True, generator=random.Random(3), num_workers=1, prefetch_factor=8)
    with loader:
        batches = loader.steps(12)
        whole = [next(batches).tolist() for _ in range(4)]
        state = loader.state_dict()  # the next epoch has been asked for already
        whole += [batch.tolist() for batch in batches]
    again = DataLoader(range(N), 4, shuffle=True, generator=random.Random(3))
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again.steps(8)] == whole[4:]


# ---------------------------------------------------------------------------------------------- seeds in a state


def test_a_state_carries_a_given_seed_to_a_distributed_sampler():
    def loader(**options):
        return DataLoader(range(N), 4, sampler=agnoload.DistributedSampler(range(N), 2, 1), **options)

    first = loader(seed=8)
    next(iter(first))
    again = loader()
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    rest = order(again)
    assert rest == agnoload.DistributedSampler(range(N), 2, 1).order(8, 0).indices(4, 10).tolist()


def test_an_error_shows_both_seeds():
    state = DataLoader(range(N), 4, shuffle=True, seed=3).state_dict()
    with pytest.raises(StateError, match=r"seed 3.*seed 4"):
        DataLoader(range(N), 4, shuffle=True, seed=4).load_state_dict(state)
    with pytest.raises(StateError, match=r"seed 3.*on 5"):
        DataLoader(range(N), 4, sampler=random_sampler(5)).load_state_dict(state)
    same = DataLoader(range(N), 4, sampler=random_sampler(3))
    same.load_state_dict(state)
    assert order(same) == shuffled(3)


def test_a_state_with_a_generator_needs_one():
    plain, drawn = ({}, {"generator": random.Random(3)})
    for saved, restored in ((plain, drawn), (drawn, plain)):
        state = DataLoader(range(N), 4, shuffle=True, **saved).state_dict()
        with pytest.raises(StateError, match="seeds"):
            DataLoader(range(N), 4, shuffle=True, **restored).load_state_dict(state)
