"""Generators that the user's objects keep: each request seeds them, or one warning says why not."""

from __future__ import annotations

import functools
import random
import warnings
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import AgnoloadWarning, DataLoader
from agnoload.inspect import walk_objects


def draw(generator):
    """62 bits from a generator of any kind."""
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(1 << 62))
    return generator.getrandbits(62) if isinstance(generator, random.Random) else int(generator.randint(1 << 62))


class Keeps(agnoload.Dataset):
    """A dataset with a generator of its own, made in the constructor."""

    def __init__(self, rng):
        self.rng = rng

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return draw(self.rng)


def draws(dataset, epochs=3, **options):
    """What comes, epoch after epoch."""
    with DataLoader(dataset, 4, **{"seed": 5, "shuffle": True, **options}) as loader:
        return [np.concatenate([np.stack(batch, -1).ravel() for batch in loader]).tolist() for _ in range(epochs)]


def check(make, **options):
    """No draw comes twice, workers change nothing, and there is no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = draws(make(), **options)
        assert len(set(chain(*wanted))) == sum(map(len, wanted))
        assert draws(make(), num_workers=2, **options) == wanted


KINDS = {
    "PCG64": lambda: np.random.default_rng(3),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "RandomState": lambda: np.random.RandomState(3),
    "Random": lambda: random.Random(3),
}


class Jitter:
    """A transform that keeps a generator."""

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, sample):
        return draw(self.rng)


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, sample):
        return draw(self.rng)


def on_the_class(rng):
    class Local(Jitter):
        def __init__(self):
            pass

    Local.rng = rng
    return Local()


def default(rng):
    def function(sample, rng=rng):
        return draw(rng)

    return function


RNG = np.random.default_rng(3)


def with_a_global(sample):
    return helper()


def helper():
    return next(draw(RNG) for _ in range(1))


PLACES = {
    "an attribute": Jitter,
    "a slot": Slotted,
    "a class": on_the_class,
    "a closure": lambda rng: lambda sample: draw(rng),
    "a default value": default,
    "a partial function": lambda rng: functools.partial(lambda rng, sample: draw(rng), rng),
    "a bound method": lambda rng: Jitter(rng).__call__,
    "a method of its own": lambda rng: functools.partial(lambda method, sample: int(method(1 << 62)), rng.integers),
    "a global variable": lambda rng: with_a_global,
}


def of_all_kinds_in_all_places():
    kinds = [Jitter(make()) for make in KINDS.values()]  # all began alike, as those below
    places = [place(np.random.default_rng(3)) for place in PLACES.values()]
    functions = [*kinds, *places, {"b": [np.random.default_rng(3)]}]

    def all_of_them(sample, functions=functions):
        *callables, others = functions
        return [*(function(sample) for function in callables), draw(others["b"][0])]

    return agnoload.Subset(agnoload.ConcatDataset([range(20), range(4)]), range(24)).map(all_of_them)


def test_no_draw_comes_twice_and_the_loaders_seed_makes_others():
    before = RNG.bit_generator.state
    drawn, others = draws(of_all_kinds_in_all_places()), draws(of_all_kinds_in_all_places(), 1, seed=6)
    assert len(set(chain(*drawn, *others))) == 4 * 24 * (len(KINDS) + len(PLACES) + 1)
    assert RNG.bit_generator.state == before


@pytest.mark.slow
def test_c06_whatever_kind_it_is_and_wherever_it_lies_it_never_repeats_and_workers_change_nothing():
    check(of_all_kinds_in_all_places)


def test_a_large_package_behind_the_dataset_is_not_searched_through():
    """A framework's functions lead to thousands of others; what the dataset itself keeps is found all the same."""
    scope = {"rng": np.random.default_rng(0)}
    for number in range(2000):
        exec(f"def f{number}(): return f{number + 1}(), rng", scope)
    data = Keeps(None)
    data.function, data.parts = scope["f0"], [[[np.random.default_rng(1)]]]
    paths = [path for path, *_ in walk_objects({"dataset": data})]
    assert len(paths) < 1500
    assert "dataset.parts[0][0][0]" in paths
    assert "dataset.function.rng" in paths


@pytest.mark.slow
def test_a_stream_may_keep_one():
    class Stream(agnoload.IterableDataset):
        def __init__(self):
            self.rng = np.random.default_rng(3)

        def __iter__(self):
            for _ in range(22):
                yield draw(self.rng)

    check(Stream, shuffle=False)


@settings(max_examples=40)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.booleans(), max_size=5))
def test_the_users_own_state_is_put_back(kind, normals):
    def following(generator):
        own = isinstance(generator, random.Random)
        normal = functools.partial(generator.gauss, 0, 1) if own else generator.standard_normal
        return [normal() if is_normal else draw(generator) for is_normal in (*normals, True, False, True)]

    dataset, untouched = Keeps(KINDS[kind]()), KINDS[kind]()
    assert following(dataset.rng) == following(untouched)  # a Random and a RandomState may hold one of a pair back now
    draws(dataset, epochs=1)
    assert following(dataset.rng) == following(untouched)


@pytest.mark.slow
def test_a_frameworks_generator_is_seeded_and_put_back():
    torch = pytest.importorskip("torch")

    class Torch(Keeps):
        def __init__(self):
            self.rng = torch.Generator().manual_seed(3)

        def __getitem__(self, index):
            return int(torch.randint(1 << 62, (), generator=self.rng))

    check(Torch)
    kept = Torch()
    draws(kept, epochs=1)
    assert torch.equal(kept.rng.get_state(), Torch().rng.get_state())


def test_the_global_generators_are_not_taken_for_the_datasets():
    class Uses(Keeps):
        def __init__(self):
            self.rng = random
            self.methods = [np.random.standard_normal, random.random, random.getrandbits.__self__]

        def __getitem__(self, index):
            return random.getrandbits(62)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = draws(Uses())
    assert len(set(chain(*drawn))) == 3 * 24


# ---------------------------------------------------------------------------------------------- what gets a warning


def warnings_of(dataset, **options):
    """The warnings of some epochs, each of which leads to `sample_rng`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws(dataset, **options)
    assert {(warning.category, warning.filename) for warning in caught} == {(AgnoloadWarning, __file__)}
    texts = [str(warning.message) for warning in caught]
    assert all("agnoload.sample_rng()" in text for text in texts)
    return texts


class Dice(random.Random):
    def random(self):
        return 0.5

    def getrandbits(self, k):
        return 6


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_one_warning_names_each_generator_that_cannot_be_seeded(workers):
    class Unseedable(Keeps):
        def __init__(self):
            self.dice = Dice()
            self.many = [random.Random(n) for n in range(300)]

        def __getitem__(self, index):
            return self.dice.getrandbits(9) + draw(self.many[index])

    dataset = Unseedable()
    wanted = {"dataset.dice (Dice)", "dataset.many[0] (Random)"}
    if not workers:  # these do not pickle
        dataset.system, dataset.unmade = random.SystemRandom(), random.Random.__new__(random.Random)
        wanted |= {"dataset.system (SystemRandom)", "dataset.unmade (Random)"}
    texts = warnings_of(dataset, num_workers=workers)
    assert {text.partition(" is a random generator that the loader cannot seed")[0] for text in texts} == wanted
    assert len(texts) == len(wanted)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_warning_names_a_generator_that_is_made_late_and_it_is_seeded_from_then_on(workers):
    class Lazy(Keeps):
        def __init__(self):
            self.rng = None

        def __getitem__(self, index):
            if self.rng is None:
                self.rng = np.random.default_rng(3)
            return draw(self.rng)

    (text,) = warnings_of(Lazy(), num_workers=workers)
    assert text.startswith("dataset.rng (Generator) is a random generator that was made")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = draws(Lazy(), num_workers=workers)
    assert len(set(chain(*drawn))) >= 3 * 24 - 2 * 4  # the workers of each epoch make one, for their first batch


@pytest.mark.slow
def test_a_generator_that_worker_init_fn_makes_is_seeded():
    def init(worker):
        agnoload.get_worker_info().dataset.rng = np.random.default_rng(worker)

    drawn = draws(Keeps(None), num_workers=2, worker_init_fn=init)
    assert drawn == draws(Keeps(None), num_workers=1, worker_init_fn=init)
    assert len(set(chain(*drawn))) == 3 * 24


def test_one_warning_names_a_generator_that_worker_threads_share():
    dataset = agnoload.Subset(range(24), range(24)).map(Jitter(random.Random(3)))
    (text,) = warnings_of(dataset, num_workers=2, worker_type="thread")
    assert text.startswith("dataset.function.rng (Random) is a random generator that all worker threads share")
