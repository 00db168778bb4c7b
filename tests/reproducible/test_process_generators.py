"""The generators of the user's process are neither read nor advanced, whatever happens while batches are loaded."""

from __future__ import annotations

import random

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader


class Draws(agnoload.Dataset):
    """Draws odd numbers of normals, so that each generator ends up with one held back."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == self.bad:
            raise LookupError(index)
        return index, np.random.standard_normal(), random.gauss(0.0, 1.0), np.random.random(), random.random()


class Reseeds(Draws):
    """Seeds the process's generators itself, and lends NumPy another one."""

    def __getitem__(self, index):
        np.random.seed(0)
        random.seed(0)
        np.random.set_bit_generator(np.random.PCG64(0))
        return super().__getitem__(index)


def look():
    """All that can be seen of the process's generators, without a change to them."""
    state = np.random.get_state(legacy=False)
    words = {name: np.asarray(value).tolist() for name, value in state["state"].items()}
    rest = {name: value for name, value in state.items() if name != "state"}
    return random.getstate(), words, rest, id(np.random.get_bit_generator())


def as_they_are():
    np.random.seed(11)
    random.seed(11)


def holding_back():
    as_they_are()
    np.random.standard_normal()
    random.gauss(0.0, 1.0)


def over_pcg():
    as_they_are()
    np.random.set_bit_generator(np.random.PCG64(4))


def over_pcg_holding_back():
    over_pcg()
    np.random.standard_normal()


def over_another_twister():
    as_they_are()
    np.random.set_bit_generator(np.random.MT19937(4))
    np.random.standard_normal()


def over_sfc():
    as_they_are()
    np.random.set_bit_generator(np.random.SFC64(4))


@pytest.fixture(
    autouse=True, params=[as_they_are, holding_back, over_pcg, over_pcg_holding_back, over_another_twister, over_sfc]
)
def prepared(request):
    """The process's generators in one of the states that users leave them in."""
    source, state, python = np.random.get_bit_generator(), np.random.get_state(legacy=False), random.getstate()
    request.param()
    yield
    np.random.set_bit_generator(source)
    np.random.set_state(state)
    random.setstate(python)


def following():
    """What the user would draw next."""
    return [np.random.standard_normal(), np.random.random(), random.gauss(0.0, 1.0), random.random()]


@pytest.mark.parametrize("dataset", [Draws(), Reseeds()], ids=["draws", "reseeds"])
def test_they_are_as_before_after_an_epoch(dataset):
    before = look()
    loader = DataLoader(dataset, 4, shuffle=True)
    for _ in range(2):
        for _ in loader:
            assert look() == before  # after every batch, too
    assert look() == before


def test_they_are_as_before_after_an_epoch_with_workers():
    before = look()
    with DataLoader(Draws(), 4, shuffle=True, num_workers=1) as loader:
        list(loader)
    assert look() == before


@pytest.mark.parametrize("workers", [0, 1])
def test_they_are_as_before_when_an_exception_leaves_the_loop(workers):
    before = look()
    with DataLoader(Draws(bad=7), 4, num_workers=workers) as loader, pytest.raises(LookupError):
        list(loader)
    assert look() == before


def test_they_are_as_before_when_a_sample_stops_the_program():
    class Stops(Draws):
        def __getitem__(self, index):
            random.random()
            np.random.random()
            raise KeyboardInterrupt

    before = look()
    with pytest.raises(KeyboardInterrupt):
        list(DataLoader(Stops(), 4))
    assert look() == before


def test_what_the_user_draws_next_is_what_it_would_have_been(request, prepared):
    wanted = following()
    request.node.callspec.params["prepared"]()
    list(DataLoader(Draws(), 4))
    assert following() == wanted


def test_batches_do_not_depend_on_them():
    loader = DataLoader(Draws(), 4, seed=3)
    first = [[field.tolist() for field in batch] for batch in loader]
    np.random.random(5)
    random.random()
    loader.set_epoch(0)
    assert [[field.tolist() for field in batch] for batch in loader] == first


def test_a_loader_inside_of_a_dataset_leaves_the_outer_draws_alone():
    class Outer(Draws):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getitem__(self, index):
            first = super().__getitem__(index)
            if self.inner:
                list(DataLoader(Draws(), 4, seed=9))
            return first + super().__getitem__(index)

    def load(inner):
        return [[field.tolist() for field in batch] for batch in DataLoader(Outer(inner), 4, seed=3)]

    assert load(True) == load(False)


def test_nothing_that_makes_orders_touches_them():
    before = look()
    loader = DataLoader(Draws(), 4, shuffle=True)
    loader.load_state_dict(loader.state_dict())
    repr(loader)
    weighted = agnoload.WeightedRandomSampler(np.ones(12), 12)
    list(DataLoader(range(12), 4, sampler=agnoload.DistributedSampler(weighted, 2, 0)))
    list(agnoload.RandomSampler(range(9)))
    assert look() == before
