"""Generators on the user's objects: each request sees them in a state of its own, or one warning says why not."""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import warnings
from functools import partial
from itertools import chain

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadWarning, DataLoader, global_rng, memory, seeding
from agnoload.fetching.fetch import Fetcher
from agnoload.global_rng import LOOKS, PythonGenerator, find_generators, settable
from agnoload.inspect import LIMIT, LONG, within_reach
from agnoload.memory import Twister
from agnoload.planning.user_sampler import UserSamplerPlan
from agnoload.seeding import Purpose, Rewinder


def draw(generator):
    """62 bits from a generator of any kind."""
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(1 << 62))
    return generator.getrandbits(62) if isinstance(generator, random.Random) else int(generator.randint(1 << 62))


class Keeps(agnoload.Dataset):
    """A dataset with a generator of its own, made in the constructor."""

    def __init__(self, rng, length=24):
        self.rng = rng
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return draw(self.rng)


KINDS = {
    "PCG64": lambda: np.random.default_rng(3),
    "PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(3)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
    "Philox": lambda: np.random.Generator(np.random.Philox(3)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "RandomState": lambda: np.random.RandomState(3),
    "RandomState over PCG64": lambda: np.random.RandomState(np.random.PCG64(3)),
    "Random": lambda: random.Random(3),
}


def draws(dataset, epochs=3, **options):
    """What comes, epoch after epoch."""
    with DataLoader(dataset, 4, **{"seed": 5, "shuffle": True, **options}) as loader:
        return [list(chain(*(np.asarray(batch).tolist() for batch in loader))) for _ in range(epochs)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_c06_a_generator_of_the_dataset_never_repeats_and_is_the_same_for_any_workers(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = draws(Keeps(KINDS[kind]()))
        assert len(set(chain(*wanted))) == 3 * 24
        assert draws(Keeps(KINDS[kind]())) == wanted
        assert draws(Keeps(KINDS[kind]()), num_workers=2) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_the_users_own_state_is_put_back(kind):
    dataset, untouched = Keeps(KINDS[kind]()), KINDS[kind]()
    draws(dataset, epochs=1)
    assert [draw(dataset.rng) for _ in range(5)] == [draw(untouched) for _ in range(5)]


@pytest.mark.parametrize("kind", ["RandomState", "RandomState over PCG64", "Random"])
def test_a_normal_number_that_a_generator_holds_back_is_put_back(kind):
    def normals(generator, count):
        if isinstance(generator, random.Random):
            return [generator.gauss(0.0, 1.0) for _ in range(count)]
        return [generator.standard_normal() for _ in range(count)]

    class Normal(Keeps):
        def __getitem__(self, index):
            return normals(self.rng, 1)[0]

    dataset, untouched = Normal(KINDS[kind]()), KINDS[kind]()
    normals(dataset.rng, 1)
    normals(untouched, 1)
    first = draws(dataset, epochs=1)
    assert normals(dataset.rng, 4) == normals(untouched, 4)
    assert draws(Normal(KINDS[kind]()), epochs=1, num_workers=1) == first


def test_a_change_of_the_seed_changes_what_it_draws():
    assert not set(chain(*draws(Keeps(random.Random(3))))) & set(chain(*draws(Keeps(random.Random(3)), seed=6)))


def test_two_generators_that_began_alike_draw_different_numbers():
    class Two(Keeps):
        def __init__(self):
            super().__init__(np.random.default_rng(0))
            self.other = np.random.default_rng(0)

        def __getitem__(self, index):
            return [draw(self.rng), draw(self.other)]

    assert len(set(chain(*draws(Two(), collate_fn=lambda samples: np.array(list(chain(*samples))))))) == 3 * 48


def test_two_generators_over_one_bit_generator_are_one():
    bits = np.random.PCG64(0)
    found = find_generators({"dataset": [np.random.Generator(bits), np.random.Generator(bits), bits]})
    assert [each.path for each in found] == ["dataset[0]"]


@pytest.mark.parametrize("first", [np.random.RandomState, np.random.Generator])
@pytest.mark.parametrize("plain", [False, True])
def test_a_second_randomstate_over_one_bit_generator_holds_back_a_normal_of_its_own(first, plain, monkeypatch):
    class Two(Keeps):
        def __init__(self):
            super().__init__(first(np.random.MT19937(1)))
            self.other = np.random.RandomState(self.rng._bit_generator)

        def __getitem__(self, index):
            return self.other.standard_normal()

    if plain:
        monkeypatch.setattr("agnoload.global_rng.normal_of", lambda _: None)
    used = Two()
    used.other.standard_normal()
    before = repr(used.other.get_state(legacy=False))
    drawn = [batch.item() for batch in DataLoader(used, 1, seed=5)]
    assert repr(used.other.get_state(legacy=False)) == before
    assert drawn == [batch.item() for batch in DataLoader(Two(), 1, seed=5)]
    assert len(set(drawn)) == 24


class Jitter:
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


def closure(rng):
    return lambda sample: draw(rng)


def default(rng):
    def function(sample, rng=rng):
        return draw(rng)

    return function


def on_the_class(rng):
    class Local:
        def __call__(self, sample):
            return draw(self.rng)

    Local.rng = rng
    return Local()


PLACES = {
    "an attribute of a transform": Jitter,
    "a slot": Slotted,
    "a class": on_the_class,
    "a closure": closure,
    "a default value": default,
    "a partial function": lambda rng: functools.partial(lambda rng, sample: draw(rng), rng),
    "a bound method": lambda rng: Jitter(rng).__call__,
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_is_kept(place):
    def dataset():
        return agnoload.Subset(agnoload.ConcatDataset([range(20), range(4)]), range(24)).map(
            PLACES[place](np.random.default_rng(3))
        )

    wanted = draws(dataset())
    assert len(set(chain(*wanted))) == 3 * 24
    assert draws(dataset(), num_workers=2) == wanted


RNG = np.random.default_rng(3)


def with_a_global(sample):
    return helper()


def helper():
    return next(draw(RNG) for _ in range(1))


@pytest.mark.slow
def test_a_global_variable_too():
    before = RNG.bit_generator.state
    wanted = draws(agnoload.Subset(range(24), range(24)).map(with_a_global))
    assert len(set(chain(*wanted))) == 3 * 24
    assert RNG.bit_generator.state == before
    assert draws(agnoload.Subset(range(24), range(24)).map(with_a_global), num_workers=2) == wanted


@pytest.mark.slow
def test_a_collate_function_may_keep_one():
    class Collate(Jitter):
        def __call__(self, samples):
            return np.array([draw(self.rng)])

    wanted = draws(range(24), collate_fn=Collate(np.random.default_rng(3)))
    assert len(set(chain(*wanted))) == 3 * 6
    assert draws(range(24), collate_fn=Collate(np.random.default_rng(3)), num_workers=2) == wanted


@pytest.mark.slow
def test_a_stream_may_keep_one():
    class Stream(agnoload.IterableDataset):
        def __init__(self):
            self.rng = np.random.default_rng(3)

        def __iter__(self):
            for _ in range(22):
                yield draw(self.rng)

    wanted = draws(Stream(), shuffle=False)
    assert len(set(chain(*wanted))) == 3 * 22
    for workers in (1, 2, 3):
        assert draws(Stream(), shuffle=False, num_workers=workers) == wanted


@pytest.mark.slow
def test_a_frameworks_generator_is_set_as_well():
    torch = pytest.importorskip("torch")

    class Torch(Keeps):
        def __getitem__(self, index):
            return int(torch.randint(1 << 62, (), generator=self.rng))

    def dataset():
        return Torch(torch.Generator().manual_seed(3))

    wanted = draws(dataset())
    assert len(set(chain(*wanted))) == 3 * 24
    assert draws(dataset(), num_workers=2) == wanted
    kept = dataset()
    draws(kept, epochs=1)
    assert torch.equal(kept.rng.get_state(), dataset().rng.get_state())


# ---------------------------------------------------------------------------------------------- what gets a warning


def told(dataset, **options):
    """The warnings of some epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws(dataset, **options)
    assert all(each.category is AgnoloadWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


class FromTheSystem(random.SystemRandom):
    pass


class Dice(random.Random):
    def random(self):
        return 0.5

    def getrandbits(self, k):
        return 6


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [(random.SystemRandom, 0), (FromTheSystem, 0), (Dice, 0), (Dice, 2)])
def test_what_cannot_be_set_is_told_once(kind, workers):
    (text,) = told(agnoload.Subset(Keeps(kind()), range(24)), num_workers=workers)
    assert "dataset.dataset.rng" in text
    assert "sample_rng" in text
    assert "cannot be put" in text


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_one_of_very_many_is_told_once(workers):
    class Many(Keeps):
        def __init__(self):
            super().__init__(None)
            self.rngs = [random.Random(n) for n in range(LONG + 1)]

        def __getitem__(self, index):
            return draw(self.rngs[index])

    (text,) = told(Many(), num_workers=workers)
    assert "dataset.rngs[0]" in text


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_is_made_on_the_way_is_told_once_and_set_from_then_on(workers):
    class Lazy(Keeps):
        def __init__(self):
            super().__init__(None)

        def __getitem__(self, index):
            if self.rng is None:
                self.rng = np.random.default_rng(3)
            return draw(self.rng)

    (text,) = told(Lazy(), num_workers=workers)
    assert "dataset.rng" in text
    assert "was made while a batch was loaded" in text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = draws(Lazy(), num_workers=workers)
    assert len(set(chain(*drawn))) >= 3 * 24 - 2 * 4  # a fresh worker an epoch has made one afresh


@pytest.mark.slow
def test_one_that_worker_init_fn_makes_is_set():
    def init(worker):
        agnoload.get_worker_info().dataset.rng = np.random.default_rng(worker)

    drawn = draws(Keeps(None), num_workers=2, worker_init_fn=init)
    assert drawn == draws(Keeps(None), num_workers=1, worker_init_fn=init)
    assert len(set(chain(*drawn))) == 3 * 24


def test_one_that_threads_share_is_told_once():
    dataset = agnoload.Subset(range(24), range(24)).map(Jitter(random.Random(3)))
    (text,) = told(dataset, num_workers=2, worker_type="thread")
    assert "dataset.function.rng" in text
    assert "threads share" in text


@pytest.mark.slow
def test_one_that_takes_anothers_place_is_told_once_and_set_from_then_on():
    class Changes(Keeps):
        def __init__(self, inner):
            super().__init__(Jitter(np.random.default_rng(0)) if inner else np.random.default_rng(0))

        def __getitem__(self, index):
            if index == 4:
                fresh = np.random.default_rng(9)
                self.rng = Jitter(fresh) if isinstance(self.rng, Jitter) else fresh
            return self.rng(index) if isinstance(self.rng, Jitter) else draw(self.rng)

    for inner in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wanted = [batch.item() for batch in DataLoader(Changes(inner), 1, seed=3)]
        (text,) = [str(each.message) for each in caught]
        assert "dataset.rng" in text
        assert "was made while a batch was loaded" in text
        for workers in (2, 3):
            with pytest.warns(AgnoloadWarning, match="was made while"):
                assert [batch.item() for batch in DataLoader(Changes(inner), 1, seed=3, num_workers=workers)] == wanted


def test_one_that_is_made_anew_for_each_sample_is_not_looked_for_each_time(monkeypatch):
    class Anew(Keeps):
        def __getitem__(self, index):
            self.rng = np.random.default_rng(index)
            return draw(self.rng)

    looks = []
    monkeypatch.setattr("agnoload.global_rng.find_generators", lambda roots: looks.append(1) or find_generators(roots))
    (text,) = told(Anew(None, length=400))
    assert "was made while" in text
    assert len(looks) == 3 * (1 + LOOKS)  # anew for each epoch


PLACED = {
    "an attribute": Jitter,
    "a slot": Slotted,
    "a closure": closure,
    "a default value": default,
    "a list": lambda rng: [rng],
    "a dict": lambda rng: {"rng": rng},
    "a class": on_the_class,
}


def put(holder, rng):
    if isinstance(holder, (list, dict)):
        holder[0 if isinstance(holder, list) else "rng"] = rng
    elif isinstance(holder, (Jitter, Slotted)):
        holder.rng = rng
    elif not isinstance(holder, types.FunctionType):
        type(holder).rng = rng
    elif holder.__closure__:
        holder.__closure__[0].cell_contents = rng
    else:
        holder.__defaults__ = (rng,)


@pytest.mark.parametrize("place", PLACED)
def test_one_knows_that_another_took_its_place(place):
    holder = PLACED[place](np.random.default_rng(3))
    (found,) = find_generators({"it": holder})
    assert not found.replaced()
    put(holder, np.random.default_rng(3))
    assert found.replaced()


UNFINISHED = {
    "Random": lambda: random.Random.__new__(random.Random),
    "RandomState": lambda: np.random.RandomState.__new__(np.random.RandomState),
    "Generator": lambda: np.random.Generator.__new__(np.random.Generator),
}


@pytest.mark.parametrize("kind", UNFINISHED)
def test_one_that_was_never_initialized_cannot_be_set(kind):
    class Unused(Keeps):
        def __getitem__(self, index):
            return index

    (text,) = told(Unused(UNFINISHED[kind]()))
    assert "cannot be put" in text


METHODS = {
    "np.random": lambda: functools.partial(np.random.uniform, 0, 1),
    "random": lambda: random.random,
    "gauss of random": lambda: functools.partial(random.gauss, 0, 1),
    "Random": lambda: random.Random(1).random,
    "Generator": lambda: np.random.default_rng(0).normal,
    "RandomState": lambda: np.random.RandomState(0).normal,
}


class Calls(agnoload.Dataset):
    def __init__(self):
        self.methods = [make() for make in METHODS.values()]

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return np.array([method() for method in self.methods])


def look():
    """Where the process's generators stand."""
    return random.getstate(), repr(np.random.get_state(legacy=False)), id(np.random.get_bit_generator())


def test_a_bound_method_of_one_draws_from_it():
    random.seed(1)
    np.random.seed(1)
    before, dataset = look(), Calls()
    wanted = [batch.tolist() for batch in DataLoader(dataset, 1, seed=5)]
    assert look() == before
    assert dataset.methods[3]() == random.Random(1).random()
    random.seed(2)
    np.random.seed(2)
    assert [batch.tolist() for batch in DataLoader(Calls(), 1, seed=5)] == wanted
    assert len(set(chain(*(batch[0] for batch in wanted)))) == 6 * len(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_bound_method_of_one_draws_the_same_in_any_worker(method):
    wanted = [batch.tolist() for batch in DataLoader(Calls(), 1, seed=5)]
    before = look()
    for workers in (2, 3):
        loader = DataLoader(Calls(), 1, seed=5, num_workers=workers, multiprocessing_context=method)
        assert [batch.tolist() for batch in loader] == wanted
    assert look() == before


class Sampler:
    """A stranger's, which draws from the process's generators."""

    def __len__(self):
        return 2

    def __iter__(self):
        for _ in range(2):
            yield int(random.random() * 12 + np.random.random() * 12)


def interrupted(step, run):
    """Run with an interrupt at a step of what puts generators into a state and back; whether it came to that step."""
    files = {global_rng.__file__, memory.__file__}
    around = {Fetcher.__call__.__code__, UserSamplerPlan._pull.__code__}

    def trace(frame, event, argument):
        nonlocal step
        if frame.f_code.co_filename not in files and frame.f_code not in around:
            return None
        nothing = frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]  # there no signal is dealt with
        step -= event in ("call", "line") and not nothing
        if step < 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [None, Sampler()], ids=["no sampler", "a stranger's sampler"])
def test_an_interrupt_at_any_step_leaves_the_users_generators_as_they_were(sampler):
    kept = [half_used(random.Random(1)), half_used(np.random.RandomState(1)), np.random.PCG64(1)]
    dataset = Keeps(kept, length=24)
    dataset.__class__ = type("Draws", (Keeps,), {"__getitem__": lambda self, index: random.random() + kept[0].random()})

    def states():
        return seeding.current(), look(), kept[0].getstate(), repr(kept[1].get_state(legacy=False)), kept[2].state

    def run():
        next(iter(DataLoader(dataset, 1, seed=5, sampler=sampler)))

    before, step = states(), 0
    while interrupted(step, run):
        assert states() == before, step
        step += 1
    assert states() == before
    assert step > 100


def test_the_processs_own_generators_are_not_taken_for_the_datasets():
    class Uses(Keeps):
        def __init__(self):
            super().__init__(random)
            self.numpy = np.random.standard_normal
            self.python = random.random
            self.inner = random.getrandbits.__self__

    assert find_generators({"dataset": Uses()}) == []


# ---------------------------------------------------------------------------------------------- the look


def test_a_look_runs_no_code_of_the_users():
    class Guarded:
        def __init__(self):
            object.__setattr__(self, "rng", random.Random(0))

        def __getattribute__(self, name):
            raise AssertionError(name)

        def __eq__(self, other):
            raise AssertionError

        __hash__ = None

    found = [reached.path for reached in within_reach({"it": [Guarded(), Guarded()]})]
    assert "it[0].rng" in found
    assert "it[1].rng" in found


def test_a_look_goes_round_a_circle_once():
    circle = {}
    circle["self"] = circle
    assert [reached.path for reached in within_reach({"it": circle})] == ["it"]


def test_a_look_ends_where_objects_do_not():
    class Endless:
        pass

    first = last = Endless()
    for _ in range(2 * LIMIT):
        last.next = last = Endless()
    assert sum(1 for _ in within_reach({"it": first})) == LIMIT


def test_a_twister_finds_the_memory_of_pythons_generators():
    generator, other = random.Random(1), random.Random(2)
    setter = PythonGenerator(generator)
    assert isinstance(setter._twister, Twister)
    state = other.getstate()
    other_setter = PythonGenerator(other)
    setter.restore(other_setter.save())
    assert generator.getstate() == state
    setter.seed(np.random.Philox(7))
    other_setter.seed(np.random.Philox(7))
    assert generator.getstate() == other.getstate() != state


def half_used(generator):
    """One normal number is drawn; where they come in pairs, another one is held back."""
    normal_of(generator)()
    return generator


def normal_of(generator):
    return partial(generator.gauss, 0.0, 1.0) if isinstance(generator, random.Random) else generator.standard_normal


FOUND = {
    "Random": lambda: random.Random(1),
    "Random, half used": lambda: half_used(random.Random(1)),
    "RandomState": lambda: np.random.RandomState(1),
    "RandomState, half used": lambda: half_used(np.random.RandomState(1)),
    "RandomState over PCG64": lambda: half_used(np.random.RandomState(np.random.PCG64(1))),
}


def story(generator):
    """What a generator draws after it has been set, and after it has been put back."""
    setter, normal = settable(generator).made, normal_of(generator)
    before = setter.save()
    setter.seed(np.random.Philox(7))
    drawn = [normal() for _ in range(3)]
    between = setter.save()  # one is held back here
    drawn += [normal() for _ in range(700)]
    setter.restore(between)
    assert [normal() for _ in range(700)] == drawn[3:]
    setter.restore(before)
    return drawn, [normal() for _ in range(700)]


@pytest.mark.parametrize("kind", FOUND)
def test_without_a_view_of_memory_all_is_the_same(kind, monkeypatch):
    drawn, after = story(FOUND[kind]())
    normal = normal_of(FOUND[kind]())
    assert after == [normal() for _ in range(700)]
    monkeypatch.setattr("agnoload.global_rng.normal_of", lambda _: None)
    monkeypatch.setattr("agnoload.global_rng.twister_of_python", lambda _: None)
    assert story(FOUND[kind]()) == (drawn, after)


def test_without_a_view_of_memory_a_key_gives_the_same(monkeypatch):
    keys = [(seed, epoch, Purpose.SAMPLE, 2**40 + epoch, 3) for seed in (0, 1, 2**100) for epoch in (0, 2**63 - 1)]

    def numbers(rewinder):
        found = []
        for key in keys:
            rng = rewinder.rewind(*key)
            found += [rng.random(dtype=np.float32), *rng.integers(1 << 62, size=5).tolist(), rng.random()]
            rng = rewinder.rewind(*key, start=7)
            found += [rng.integers(1 << 20, dtype=np.uint32), rng.standard_normal()]  # half a number is left over
        return found

    quick = Rewinder()
    assert quick._memory is not None
    monkeypatch.setattr("agnoload.memory.sys.implementation", type("Other", (), {"name": "other"}))
    plain = Rewinder()
    assert plain._memory is None
    assert numbers(plain) == numbers(quick) == numbers(plain)
    seed, epoch, purpose, position, rank = keys[3]
    assert seeding.generator(seed, epoch, purpose, position, rank).random(dtype=np.float32) == numbers(quick)[3 * 9]
