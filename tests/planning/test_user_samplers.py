"""Users' samplers: iterated here, given the epoch, drawing what every run draws, saved and continued."""

from __future__ import annotations

import copy
import random
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader, OptionError, StateError

N = 20
few = settings(max_examples=30, deadline=None)


def over(sampler, batch_size=3, **options):
    return DataLoader(range(N), batch_size, sampler=sampler, **options)


def lists(batches):
    return [np.asarray(batch).tolist() for batch in batches]


def epochs(loader, count=2):
    return [lists(loader) for _ in range(count)]


# ------------------------------------------------------------------------------------------------ what it draws


@pytest.mark.parametrize("kind", ["Shuffled", "DrawnOnTheWay"])
def test_draws_from_the_process_follow_from_the_loaders_seed_and_leave_the_users_alone(kit, kind):
    make = getattr(kit, kind)

    def states():
        return random.getstate(), repr(np.random.get_state(legacy=False))

    before = states()
    found = []
    for _ in range(2):
        loader = over(make(), seed=3)
        found.append([])
        for _ in range(2):
            for batch in loader:
                assert states() == before
                found[-1].append(batch.tolist())
    assert found[0] == found[1]
    assert found[0][:7] != found[0][7:]
    random.random()
    np.random.random()
    with over(make(), seed=3, num_workers=2) as loader:
        assert lists(loader) + lists(loader) == found[0]
    assert lists(over(make(), seed=4)) != found[0][:7]


# ------------------------------------------------------------------------------------------------ resuming

KEYS = st.integers(-3, 9) | st.integers(2**62, 2**66) | st.text(max_size=3) | st.tuples(st.text(max_size=2), st.none())


@few
@given(keys=st.lists(KEYS, min_size=1, max_size=12), size=st.integers(1, 5), other=st.integers(1, 5), data=st.data())
def test_keys_of_any_kind_are_passed_over_and_others_in_their_place_are_noticed(keys, size, other, data):
    samples = {key: f"sample of {key!r}" for key in [*keys, "another"]}

    def make(sampler, size):
        return DataLoader(samples, size, sampler=sampler, collate_fn=list)

    stop = data.draw(st.integers(1, -(-len(keys) // size)))
    loader = make(keys, size)
    assert list(chain.from_iterable(islice(loader, stop))) == [samples[key] for key in keys[: stop * size]]
    state = loader.state_dict()
    rest = [samples[key] for key in keys[stop * size :]]
    again = make(keys, other)
    again.load_state_dict(state)
    if rest:  # else the next epoch begins
        assert list(chain.from_iterable(again)) == rest
        place = data.draw(st.integers(0, stop * size - 1))
        if isinstance(keys[place], tuple):
            return  # only integers and text are counted
        swapped = make([*keys[:place], "another", *keys[place + 1 :]], other)
        swapped.load_state_dict(state)
        with pytest.raises(StateError, match="gives other indices"):
            iter(swapped)


class Batches:
    """The numbers from 0 on in batches of these sizes."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        ends = np.cumsum(self.sizes).tolist()
        return iter([list(range(end - size, end)) for size, end in zip(self.sizes, ends, strict=True)])


@few
@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=6), data=st.data())
def test_batches_of_a_user_resume_at_their_borders_only(sizes, data):
    def make(*sizes):
        return DataLoader(range(24), batch_sampler=Batches(*sizes))

    stop = data.draw(st.integers(1, len(sizes) - 1))
    first, again = make(*sizes), make(*sizes)
    assert lists(islice(first, stop)) == list(Batches(*sizes))[:stop]
    state = first.state_dict()
    again.load_state_dict(state)
    assert lists(again) == list(Batches(*sizes))[stop:]
    position = state["position"]
    if position > 1:
        cut = data.draw(st.integers(1, position - 1))
        others = make(cut, position - cut + 1)
        others.load_state_dict(state)
        with pytest.raises(StateError, match=rf"position {position} .* lies inside a batch of positions {cut} to"):
            iter(others)


def test_the_saved_state_is_that_of_the_last_batch_that_was_yielded(kit):
    with over(kit.Saves(), seed=3, prefetch_factor=8, num_workers=1, worker_type="thread") as loader:
        list(islice(loader, 2))
        assert loader.state_dict()["sampler"]["state"]["place"] == 6


def test_a_sampler_that_gives_other_indices_than_before_is_refused(kit):
    loader, again = over(kit.Continues()), over(kit.Continues())
    list(loader)
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=r"Continues, gives other indices .*check sums \d+ and \d+.* state_dict"):
        iter(again)


class Widening:
    """Longer from epoch to epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.epoch += 1
        return iter(range(4 * self.epoch))

    def __len__(self):
        return 4 * (self.epoch + 1)


def test_a_sampler_whose_length_changes_with_the_epoch_is_resumed_in_any_epoch():
    loader, again = over(Widening()), over(Widening())
    epochs(loader, 2)
    batches = iter(loader)
    next(batches)
    again.load_state_dict(loader.state_dict())
    assert lists(again) == lists(batches) == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]


class WithoutLength:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_a_sampler_that_ends_before_the_position_is_refused():
    first, again = (DataLoader(range(9), 3, sampler=WithoutLength(count)) for count in (9, 4))
    list(islice(first, 2))
    again.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="WithoutLength, gives other indices"):
        iter(again)


def test_one_with_a_state_and_one_without_do_not_fit(kit):
    class Without(kit.Saves):
        state_dict = load_state_dict = None

    Without.__name__ = "Saves"
    first, again = over(kit.Saves(), seed=3), over(Without(), seed=3)
    next(iter(first))
    again.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match=r"with state_dict and load_state_dict.* without"):
        iter(again)


def test_a_malformed_sampler_state_is_refused(kit):
    first, again = over(kit.Shuffled(), seed=3), over(kit.Shuffled(), seed=3)
    next(iter(first))
    for saved in (None, 5, {}, {"sum": 1, "state": 2}, {"other": 1}):
        with pytest.raises(StateError, match=r"sampler in a state .*must be a dict"):
            again.load_state_dict(first.state_dict() | {"sampler": saved})
    assert lists(again) == lists(over(kit.Shuffled(), seed=3))


def test_another_number_of_ranks_is_refused(kit, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    first = over(kit.Shuffled(), seed=3)
    next(iter(first))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(StateError, match=r"world_size 2.* 3"):
        over(kit.Shuffled(), seed=3).load_state_dict(first.state_dict())


# ------------------------------------------------------------------------------------------------ epochs


CALLS = st.tuples(st.sampled_from(["load", "break", "loader", "sampler", "resume"]), st.integers(0, 9))


@few
@given(calls=st.lists(CALLS, max_size=8))
def test_each_epoch_is_the_one_that_was_set_last_on_the_sampler_or_the_loader_or_else_the_next(kit, calls):
    """What is set on the sampler counts once, and before what is set on the loader; not if a state is loaded after."""
    orders = [list(kit.ByEpoch(epoch)) for epoch in range(20)]
    wanted = [[order[n : n + 3] for n in range(0, N, 3)] for order in orders]
    loader, epoch, seen = over(sampler := kit.ByEpoch()), 0, 0
    for call, number in [*calls, ("load", 0)]:
        if call == "loader":
            loader.set_epoch(epoch := number)
        elif call == "sampler":
            sampler.set_epoch(number)
        else:
            epoch = seen = epoch if sampler.epoch == seen else sampler.epoch
            batches = iter(loader)
            assert next(batches).tolist() == wanted[epoch][0]
            if call == "load":
                assert lists(batches) == wanted[epoch][1:]
            if call == "resume":
                state = loader.state_dict()
                loader = over(sampler := kit.ByEpoch(number))
                loader.load_state_dict(state)
                assert (loader.epoch, lists(loader)) == (epoch, wanted[epoch][1:])
            epoch += 1
    assert loader.epoch == epoch


def test_the_usual_loop_resumes_within_its_epoch(kit):
    first = over(kit.ByEpoch())
    list(first)
    next(iter(first))
    again = over(sampler := kit.ByEpoch())
    again.load_state_dict(first.state_dict())
    sampler.set_epoch(1)
    assert len(list(again)) == 6


def test_set_epoch_reaches_a_sampler_inside_a_batch_sampler(kit):
    class Pairs:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            order = list(self.sampler)
            return iter([order[n : n + 2] for n in range(0, N, 2)])

    found = epochs(DataLoader(range(N), batch_sampler=Pairs(kit.ByEpoch())))
    assert list(chain.from_iterable(found[1])) == list(kit.ByEpoch(1))


# ------------------------------------------------------------------------------------------------ ranks


class Share:
    """Every second one: what other libraries call a distributed sampler."""

    def __init__(self, rank):
        self.rank, self.num_replicas = rank, 2

    def __len__(self):
        return N // 2

    def __iter__(self):
        return iter(range(self.rank, N, 2))


@pytest.mark.parametrize("ours", [False, True])
def test_ranks_of_a_users_sampler_share_no_draw(kit, ours):
    """C8."""

    class Draws(kit.Drawing):
        def __getitem__(self, index):
            info = agnoload.get_worker_info()
            return {**super().__getitem__(index), "rank": info.rank, "world": info.world_size}

    drawn = []
    for rank in range(2):
        sampler = agnoload.DistributedSampler(kit.Shuffled(), 2, rank) if ours else Share(rank)
        with DataLoader(Draws(N), 2, sampler=sampler, seed=3, num_workers=1) as loader:
            batches = list(loader)
        assert {int(n) for batch in batches for n in batch["rank"]} == {rank}
        assert {int(n) for batch in batches for n in batch["world"]} == {2}
        drawn.append({n for batch in batches for name in ("own", "numpy", "python") for n in batch[name].tolist()})
    assert len(drawn[0]) == len(drawn[1]) == 3 * N // 2
    assert not drawn[0] & drawn[1]


def test_a_copy_of_the_loader_has_a_sampler_of_its_own(kit):
    loader = over(kit.Saves())
    twin = copy.deepcopy(loader)
    assert lists(loader) == lists(twin)


def test_a_sampler_in_place_of_a_batch_sampler_is_refused(kit):
    with pytest.raises(OptionError, match=r"must yield batches of indices, got \d+"):
        next(iter(DataLoader(range(N), batch_sampler=kit.Shuffled())))
