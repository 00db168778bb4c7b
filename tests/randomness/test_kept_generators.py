"""Generators that the user's objects keep: each request seeds them, or one warning says why not."""

from __future__ import annotations

import functools
import random
import warnings
from itertools import chain

import numpy as np
import pytest

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
        return [list(chain(*(np.asarray(batch).tolist() for batch in loader))) for _ in range(epochs)]


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_c06_a_generator_of_the_dataset_never_repeats_and_workers_change_nothing(kind):
    check(lambda: Keeps(KINDS[kind]()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_users_own_state_is_put_back(kind):
    def following(generator):
        own = isinstance(generator, random.Random)
        normal = functools.partial(generator.gauss, 0, 1) if own else generator.standard_normal
        return [normal(), draw(generator), normal(), normal()]

    dataset, untouched = Keeps(KINDS[kind]()), KINDS[kind]()
    assert following(dataset.rng) == following(untouched)  # a Random and a RandomState hold one of a pair back now
    draws(dataset, epochs=1)
    assert following(dataset.rng) == following(untouched)


def test_the_loaders_seed_changes_what_it_draws():
    assert not set(chain(*draws(Keeps(random.Random(3))))) & set(chain(*draws(Keeps(random.Random(3)), seed=6)))


def test_generators_that_began_alike_draw_different_numbers():
    class Two(Keeps):
        def __init__(self):
            self.rng, self.others = np.random.default_rng(0), {"b": [np.random.default_rng(0)]}

        def __getitem__(self, index):
            return [draw(self.rng), draw(self.others["b"][0])]

    assert len(set(chain(*draws(Two(), collate_fn=lambda samples: np.array(list(chain(*samples))))))) == 3 * 48


class Jitter:
    """A transform, and a collate function, that keeps a generator."""

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


PLACES = {
    "an attribute": Jitter,
    "a slot": Slotted,
    "a class": on_the_class,
    "a closure": lambda rng: lambda sample: draw(rng),
    "a default value": default,
    "a partial function": lambda rng: functools.partial(lambda rng, sample: draw(rng), rng),
    "a bound method": lambda rng: Jitter(rng).__call__,
    "a method of its own": lambda rng: functools.partial(lambda method, sample: int(method(1 << 62)), rng.integers),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_wherever_a_transform_keeps_it(place):
    def dataset():
        parts = agnoload.ConcatDataset([range(20), range(4)])
        return agnoload.Subset(parts, range(24)).map(PLACES[place](np.random.default_rng(3)))

    check(dataset)


RNG = np.random.default_rng(3)


def with_a_global(sample):
    return helper()


def helper():
    return next(draw(RNG) for _ in range(1))


@pytest.mark.slow
def test_a_global_variable_too():
    before = RNG.bit_generator.state
    check(lambda: agnoload.Subset(range(24), range(24)).map(with_a_global))
    assert RNG.bit_generator.state == before


@pytest.mark.slow
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


def test_a_stream_may_keep_one():
    class Stream(agnoload.IterableDataset):
        def __init__(self):
            self.rng = np.random.default_rng(3)

        def __iter__(self):
            for _ in range(22):
                yield draw(self.rng)

    check(Stream, shuffle=False)


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


@pytest.mark.slow
def test_the_global_generators_are_not_taken_for_the_datasets():
    class Uses(Keeps):
        def __init__(self):
            self.rng = random
            self.methods = [np.random.standard_normal, random.random, random.getrandbits.__self__]

        def __getitem__(self, index):
            return random.getrandbits(62)

    check(Uses)


# ---------------------------------------------------------------------------------------------- what gets a warning


def warning_of(dataset, **options):
    """The one warning of some epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws(dataset, **options)
    (warning,) = caught
    assert (warning.category, warning.filename) == (AgnoloadWarning, __file__)
    assert "agnoload.sample_rng()" in str(warning.message)
    return str(warning.message)


class Dice(random.Random):
    def random(self):
        return 0.5

    def getrandbits(self, k):
        return 6


class Unused(Keeps):
    def __getitem__(self, index):
        return index


class Many(Keeps):
    def __getitem__(self, index):
        return draw(self.rng[index])


UNSEEDABLE = {
    "of the system": (lambda: Keeps(random.SystemRandom()), "dataset.rng (SystemRandom)"),
    "a user's class": (lambda: Keeps(Dice()), "dataset.rng (Dice)"),
    "never initialised": (lambda: Unused(random.Random.__new__(random.Random)), "dataset.rng (Random)"),
    "in a long list": (lambda: Many([random.Random(n) for n in range(300)]), "dataset.rng[0] (Random)"),
}


IN_WORKERS = [pytest.param(kind, 2, marks=pytest.mark.slow) for kind in ("a user's class", "in a long list")]


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in UNSEEDABLE), *IN_WORKERS])
def test_one_warning_names_a_generator_that_cannot_be_seeded(kind, workers):
    make, path = UNSEEDABLE[kind]
    text = warning_of(make(), num_workers=workers)
    assert text.startswith(f"{path} is a random generator that the loader cannot seed")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_warning_names_a_generator_that_is_made_late_and_it_is_seeded_from_then_on(workers):
    class Lazy(Keeps):
        def __init__(self):
            self.rng = None

        def __getitem__(self, index):
            if self.rng is None:
                self.rng = np.random.default_rng(3)
            return draw(self.rng)

    assert "dataset.rng (Generator) is a random generator that was made" in warning_of(Lazy(), num_workers=workers)
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
    text = warning_of(dataset, num_workers=2, worker_type="thread")
    assert text.startswith("dataset.function.rng (Random) is a random generator that all worker threads share")
