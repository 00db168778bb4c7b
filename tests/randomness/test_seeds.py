"""Which seed counts, and what `generator=` gives."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

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
    assert order(loader) == shuffled(seed)
    assert order(loader) == shuffled(seed, 1)
    assert loader.seed == seed


@pytest.mark.parametrize("seed", [0, 2**63, 2**200, np.int64(5)])
def test_any_non_negative_int_is_a_seed_and_travels_in_a_state(seed):
    with DataLoader(range(N), 4, shuffle=True, seed=seed, num_workers=1) as loader:
        assert (loader.seed, order(loader)) == (int(seed), shuffled(int(seed)))
    state = json.loads(json.dumps(loader.state_dict()))
    again = DataLoader(range(N), 4, shuffle=True)
    again.load_state_dict(state)
    assert (again.seed, order(again)) == (int(seed), shuffled(int(seed), 1))


@pytest.mark.parametrize("seed", [-1, 1.5, True, "7"])
def test_other_seeds_are_rejected(seed):
    with pytest.raises(OptionError, match="seed must be a non-negative int"):
        DataLoader(range(N), seed=seed)


def random_sampler(seed):
    return agnoload.RandomSampler(range(N), seed=seed)


def distributed(seed):
    return agnoload.DistributedSampler(range(N), 1, 0, seed=seed)


def inside(seed):
    return agnoload.DistributedSampler(random_sampler(seed), 1, 0)


def outside(seed):
    return agnoload.DistributedSampler(random_sampler(1), 1, 0, seed=seed)


@pytest.mark.parametrize("make", [random_sampler, distributed, inside, outside])
def test_a_seed_given_to_a_sampler_wins(make):
    assert order(DataLoader(range(N), 4, sampler=make(3), seed=8)) == shuffled(3)
    assert order(DataLoader(range(N), 4, sampler=make(3))) == shuffled(3)
    batches = agnoload.BatchSampler(make(3), 4, drop_last=False)
    assert order(DataLoader(range(N), batch_sampler=batches, seed=8)) == shuffled(3)


@pytest.mark.parametrize("make", [random_sampler, distributed, inside])
def test_without_one_the_sampler_runs_on_the_seed_given_to_the_loader(make):
    assert order(DataLoader(range(N), 4, sampler=make(None), seed=8)) == shuffled(8)


@pytest.mark.parametrize("make", [distributed, inside])
def test_without_any_a_distributed_sampler_runs_on_0(make):
    loader = DataLoader(range(N), 4, sampler=make(None))
    assert loader.seed != 0
    assert order(loader) == shuffled(0)
    batches = agnoload.BatchSampler(make(None), 4, drop_last=False)
    assert order(DataLoader(range(N), batch_sampler=batches)) == shuffled(0)


def test_without_any_other_samplers_run_on_the_drawn_seed():
    loader = DataLoader(range(N), 4, sampler=random_sampler(None))
    assert order(loader) == shuffled(loader.seed)


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


def torch_generator():
    torch = pytest.importorskip("torch")
    return torch.Generator().manual_seed(3)


GENERATORS = {
    "Generator": lambda: np.random.default_rng(3),
    "RandomState": lambda: np.random.RandomState(3),
    "Random": lambda: random.Random(3),
    "int": lambda: 3,
    "torch": torch_generator,
}


def batches(loader):
    return [[field.tolist() for field in batch] for batch in loader]


@pytest.mark.slow
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_gives_a_seed_once_an_epoch(kind):
    make = GENERATORS[kind]
    loader = DataLoader(Draws(), 4, shuffle=True, generator=make())
    found, seeds = [], []
    for _ in range(3):
        found.append(batches(loader))
        seeds.append(loader.seed)
    assert [[batch[0] for batch in epoch] for epoch in found] == [
        [shuffled(seed, epoch)[place : place + 4] for place in range(0, N, 4)] for epoch, seed in enumerate(seeds)
    ]
    if kind != "int":
        assert len(set(seeds)) == 3
    with DataLoader(Draws(), 4, shuffle=True, generator=make(), num_workers=2, persistent_workers=True) as other:
        assert [batches(other) for _ in range(3)] == found


def test_workers_are_kept_when_a_generator_changes_the_seed():
    with DataLoader(Draws(), 4, generator=random.Random(3), num_workers=1, persistent_workers=True) as loader:
        iterator = iter(loader)
        pids = iterator._pool.pids()
        list(iterator)
        iterator = iter(loader)
        assert iterator._pool.pids() == pids
        list(iterator)


def test_the_loader_draws_from_a_generator_once_an_epoch_and_not_before():
    generator, untouched = random.Random(3), random.Random(3)
    loader = DataLoader(range(N), 4, shuffle=True, generator=generator)
    assert generator.getstate() == untouched.getstate()
    assert "generator=" in repr(loader)
    for _ in range(3):
        list(loader)
        untouched.getrandbits(63)
        assert generator.getstate() == untouched.getstate()


@pytest.mark.parametrize(
    "thing", ["x", True, 1.5, -1, object(), [1], np.zeros(3)], ids=lambda thing: type(thing).__name__
)
def test_non_generators_are_rejected(thing):
    with pytest.raises(OptionError, match=rf"generator must be .* got {re.escape(repr(thing)[:20])}"):
        DataLoader(range(N), generator=thing)


def test_a_frameworks_tensor_is_rejected_and_its_generator_stays_as_it_is():
    torch = pytest.importorskip("torch")
    with pytest.raises(OptionError, match=r"generator must be .* got tensor"):
        DataLoader(range(N), generator=torch.zeros(3))
    generator, untouched = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    DataLoader(range(N), generator=generator)
    assert torch.equal(generator.get_state(), untouched.get_state())


def test_a_seed_and_a_generator_exclude_each_other():
    with pytest.raises(OptionError, match="exclude each other"):
        DataLoader(range(N), generator=random.Random(3), seed=3)


@pytest.mark.parametrize(("kind", "k"), [*(("Random", k) for k in (0, 2, 5)), *((kind, 7) for kind in GENERATORS)])
def test_a_run_resumes_with_a_generator_that_was_made_the_same_way(kind, k):
    make = GENERATORS[kind]
    loader = DataLoader(Draws(), 4, shuffle=True, generator=make())
    whole = [batch for _ in range(3) for batch in batches(loader)]
    first = DataLoader(Draws(), 4, shuffle=True, generator=make())
    taken = []
    while len(taken) < k:
        for batch in first:
            taken.append([field.tolist() for field in batch])
            if len(taken) == k:
                break
    state = json.loads(json.dumps(first.state_dict()))
    second = DataLoader(Draws(), 4, shuffle=True, generator=make())
    second.load_state_dict(state)
    assert second.state_dict() == state
    rest = []
    while len(taken) + len(rest) < len(whole):
        rest += batches(second)
    assert taken + rest == whole


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


def test_a_state_carries_its_seed():
    first = DataLoader(range(N), 4, shuffle=True)
    list(first)
    again = DataLoader(range(N), 4, shuffle=True)
    again.load_state_dict(first.state_dict())
    assert again.seed == first.seed
    assert order(again) == order(first)


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
    state = DataLoader(range(N), 4, shuffle=True, generator=random.Random(3)).state_dict()
    with pytest.raises(StateError, match="seeds"):
        DataLoader(range(N), 4, shuffle=True).load_state_dict(state)
    with pytest.raises(StateError, match="seeds"):
        DataLoader(range(N), 4, shuffle=True, generator=random.Random(3)).load_state_dict(
            DataLoader(range(N), 4, shuffle=True).state_dict()
        )
