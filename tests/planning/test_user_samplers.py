"""Samplers of strangers: iterated here, told the epoch, drawing what every run draws, saved and continued."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader, StateError
from agnoload.testing import check_resume

N = 20


class Shuffled:
    """As many people write it: the process's own generators, all in one go."""

    def __len__(self):
        return N

    def __iter__(self):
        order = list(range(N))
        random.shuffle(order)
        return iter(order)


class Drawn(Shuffled):
    """Draws on the way, from each of them."""

    def __iter__(self):
        for _ in range(N):
            yield (random.randrange(N) + int(np.random.randint(N)) + round(random.gauss(0, 9))) % N


class Batches(Shuffled):
    """A batch sampler: its batches differ in size."""

    def __len__(self):
        return 8

    def __iter__(self):
        order = np.random.permutation(N)
        for number in range(8):
            yield order[number * 2 : number * 2 + random.randint(1, 3)].tolist()


class Told(Shuffled):
    """Shuffled by the epoch that it is told."""

    def __init__(self, epoch=0):
        self.epoch = epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(N))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class Own(Shuffled):
    """A source of its own, which goes on from epoch to epoch."""

    def __init__(self):
        self.rng = random.Random(3)

    def __iter__(self):
        order = list(range(N))
        self.rng.shuffle(order)
        return iter(order)


class Saves(Own):
    """The same, with a state."""

    def __init__(self, resets=False):
        super().__init__()
        self.resets = resets
        self.order, self.place = None, 0

    def __iter__(self):
        if self.order is None or self.place == N:
            self.order, self.place = list(range(N)), 0
            self.rng.shuffle(self.order)
        while self.place < N:
            self.place += 1
            yield self.order[self.place - 1]
        if self.resets:
            self.order, self.place = None, 0

    def state_dict(self):
        version, words, gauss = self.rng.getstate()
        return {"order": self.order, "place": self.place, "rng": [version, list(words), gauss]}

    def load_state_dict(self, state):
        self.order, self.place = state["order"], state["place"]
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))


class Walk:
    """An iterator with a state."""

    def __init__(self, place=0):
        self.place = place

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == N:
            raise StopIteration
        self.place += 1
        return self.place - 1

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Walks(Shuffled):
    walks = 0

    def __iter__(self):
        return Walk()


def epochs(loader, count=2):
    return [[np.asarray(batch).tolist() for batch in loader] for _ in range(count)]


def over(make, **options):
    return lambda num_workers=0: DataLoader(range(N), 3, sampler=make(), num_workers=num_workers, **options)


@pytest.mark.parametrize("make", [Shuffled, Drawn])
def test_draws_from_the_process_follow_from_the_loaders_seed(make):
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    found = epochs(over(make, seed=3)())
    assert found[0] != found[1]
    random.random()
    np.random.random()
    assert epochs(over(make, seed=3)(2)) == found
    assert epochs(over(make, seed=4)()) != found
    random.setstate(before[0])
    assert epochs(over(make, seed=3)()) == found
    assert random.getstate() == before[0]


def test_the_users_generators_are_left_alone_between_batches_too():
    before = random.getstate(), repr(np.random.get_state(legacy=False))
    for _ in over(Drawn)():
        assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before


def test_it_agrees_between_fresh_interpreters():
    script = """
import random, agnoload, json
class Shuffled:
    def __iter__(self):
        order = list(range(20))
        random.shuffle(order)
        return iter(order)
print(json.dumps([b.tolist() for b in agnoload.DataLoader(range(20), 3, sampler=Shuffled(), seed=3)]))
"""
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=120).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] == json.dumps(epochs(over(Shuffled, seed=3)(), 1)[0]).encode() + b"\n"


def test_a_frameworks_sampler_follows_from_the_loaders_seed():
    torch = pytest.importorskip("torch")
    data = torch.utils.data

    def make():
        return data.RandomSampler(range(N))

    before = torch.get_rng_state()
    found = epochs(over(make, seed=3)())
    assert found[0] != found[1]
    assert epochs(over(make, seed=3)()) == found
    assert torch.equal(torch.get_rng_state(), before)
    check_resume(over(make, seed=3))
    check_resume(
        lambda num_workers=0: DataLoader(
            range(N), batch_sampler=data.BatchSampler(make(), 3, False), seed=3, num_workers=num_workers
        )
    )


RESUMABLE = {
    "the process's generators": Shuffled,
    "the process's generators, on the way": Drawn,
    "by the epoch": Told,
    "a state": Saves,
    "a state that begins anew by itself": lambda: Saves(resets=True),
    "an iterator with a state": Walks,
    "inside a distributed sampler": lambda: agnoload.DistributedSampler(Shuffled(), 2, 1),
    "a state inside a distributed sampler": lambda: agnoload.DistributedSampler(Saves(), 2, 1, tail="keep"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMABLE)
def test_it_resumes_at_every_batch(name):
    check_resume(over(RESUMABLE[name], seed=3))


def test_a_batch_sampler_resumes_at_every_batch():
    check_resume(lambda num_workers=0: DataLoader(range(N), batch_sampler=Batches(), num_workers=num_workers))
    check_resume(
        lambda num_workers=0: DataLoader(
            range(N), batch_sampler=agnoload.BatchSampler(Saves(), 3, drop_last=True), num_workers=num_workers
        )
    )


def test_the_saved_state_is_that_of_the_last_batch_that_was_yielded():
    with over(Saves, seed=3, prefetch_factor=8)(1) as loader:
        next(batches := iter(loader))
        next(batches)
        assert loader.state_dict()["sampler"]["state"]["place"] == 6


def test_keys_of_any_kind_are_passed_over():
    keys = [("a", 1), "b", 3, None, "c", 2**70, "d"]
    data = {key: str(key) for key in keys}

    def make(num_workers=0):
        return DataLoader(data, 2, sampler=keys, collate_fn=list, num_workers=num_workers)

    check_resume(make)
    loader = make()
    next(iter(loader))
    other = DataLoader(data, 2, sampler=["b", "b", *keys[2:]], collate_fn=list)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="gives other indices"):
        iter(other)


def test_a_sampler_that_gives_other_indices_than_before_is_rejected():
    loader = over(Own)()
    list(loader)
    next(iter(loader))
    state = loader.state_dict()
    again = over(Own)()
    again.load_state_dict(state)
    with pytest.raises(StateError, match=r"Own, gives other indices .*check sums \d+ and \d+.* state_dict"):
        iter(again)


def test_another_batch_size_gives_the_rest():
    loader = over(Shuffled, seed=3)()
    next(iter(loader))
    again = DataLoader(range(N), 5, sampler=Shuffled())
    again.load_state_dict(loader.state_dict())
    rest = [index for batch in again for index in batch.tolist()]
    assert rest == [index for batch in epochs(over(Shuffled, seed=3)(), 1)[0] for index in batch][3:]


def test_user_defined_batches_resume_at_their_borders_only():
    first = DataLoader(range(9), batch_sampler=[[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    next(iter(first))
    again = DataLoader(range(9), batch_sampler=[[0, 1], [2, 3, 4], [5, 6, 7, 8]])
    again.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match=r"position 3 .* lies inside a batch of positions 2 to 4"):
        iter(again)


def test_a_position_beyond_its_end_is_rejected():
    first = DataLoader(range(9), 3, sampler=WithoutLength(9))
    next(batches := iter(first))
    next(batches)
    again = DataLoader(range(9), 3, sampler=WithoutLength(4))
    again.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="WithoutLength, gives other indices"):
        iter(again)


class WithoutLength:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_one_with_a_state_and_one_without_do_not_fit():
    class Own2(Saves):
        state_dict = load_state_dict = None

    Own2.__name__ = "Saves"
    first = over(Saves, seed=3)()
    next(iter(first))
    again = over(Own2, seed=3)()
    again.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match=r"with state_dict and load_state_dict.* without"):
        iter(again)


@pytest.mark.parametrize("saved", [None, 5, {}, {"sum": 1, "state": 2}, {"other": 1}])
def test_a_malformed_sampler_state_is_rejected(saved):
    first = over(Shuffled, seed=3)()
    next(iter(first))
    again = over(Shuffled, seed=3)()
    with pytest.raises(StateError, match=r"sampler in a state.*'state' or of 'sum'"):
        again.load_state_dict(first.state_dict() | {"sampler": saved})
    assert epochs(again, 1) == epochs(over(Shuffled, seed=3)(), 1)


def test_another_number_of_ranks_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    first = over(Shuffled, seed=3)()
    next(iter(first))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(StateError, match=r"world_size 2.* 3"):
        over(Shuffled, seed=3)().load_state_dict(first.state_dict())


# ---------------------------------------------------------------------------------------------- epochs


def test_set_epoch_is_called_before_each_epoch():
    sampler = Told()
    loader = DataLoader(range(N), 3, sampler=sampler)
    found = epochs(loader, 3)
    assert [epochs(DataLoader(range(N), 3, sampler=Told(epoch)), 1)[0] for epoch in range(3)] == found
    loader.set_epoch(1)
    assert epochs(loader, 1)[0] == found[1]


def test_an_epoch_that_the_user_sets_on_it_counts():
    sampler = Told()
    loader = DataLoader(range(N), 3, sampler=sampler)
    wanted = epochs(DataLoader(range(N), 3, sampler=Told()), 7)
    found = []
    for epoch in (0, 1, 5, 6):  # a run that goes on with epoch 5, say
        sampler.set_epoch(epoch)
        found += epochs(loader, 1)
    assert found == [wanted[epoch] for epoch in (0, 1, 5, 6)]
    assert loader.epoch == 7


def test_an_epoch_set_before_a_state_was_loaded_does_not_count():
    first = DataLoader(range(N), 3, sampler=Told())
    list(first)
    next(iter(first))
    state = first.state_dict()
    sampler = Told(epoch=4)
    again = DataLoader(range(N), 3, sampler=sampler)
    again.load_state_dict(state)
    sampler_told_the_same = iter(again)
    assert (again.epoch, next(sampler_told_the_same).tolist()) == (
        1,
        epochs(DataLoader(range(N), 3, sampler=Told(1)), 1)[0][1],
    )


def test_the_usual_loop_resumes_within_its_epoch():
    """`for epoch in range(start, n): sampler.set_epoch(epoch); for batch in loader`, after a resume."""
    first = DataLoader(range(N), 3, sampler=Told())
    list(first)
    next(iter(first))
    sampler = Told()
    again = DataLoader(range(N), 3, sampler=sampler)
    again.load_state_dict(first.state_dict())
    sampler.set_epoch(1)
    assert len(list(again)) == 6


def test_set_epoch_reaches_a_sampler_inside_a_batch_sampler():
    class Pairs:
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            order = list(self.sampler)
            return iter([order[n : n + 2] for n in range(0, N, 2)])

    loader = DataLoader(range(N), batch_sampler=Pairs(Told()))
    found = epochs(loader)
    assert [index for batch in found[1] for index in batch] == list(Told(1))


# ---------------------------------------------------------------------------------------------- ranks


class Share(Shuffled):
    """Every second one: what other libraries call a distributed sampler."""

    def __init__(self, rank):
        self.rank, self.num_replicas = rank, 2

    def __len__(self):
        return N // 2

    def __iter__(self):
        return iter(range(self.rank, N, 2))


@pytest.mark.parametrize("make", [Share, lambda r: agnoload.DistributedSampler(Shuffled(), 2, r)])
def test_c08_ranks_of_a_user_defined_sampler_share_no_draw(make):
    class Draws(agnoload.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            info = agnoload.get_worker_info()
            facts = (info.rank, info.world_size) if info else (-1, -1)
            return int(agnoload.sample_rng().integers(1 << 62)), np.random.random(), *facts

    drawn = []
    for rank in range(2):
        with DataLoader(Draws(), 2, sampler=make(rank), seed=3, num_workers=1) as loader:
            batches = list(loader)
        assert {(int(r), int(w)) for b in batches for r, w in zip(b[2], b[3], strict=True)} == {(rank, 2)}
        drawn.append({value for batch in batches for field in batch[:2] for value in field.tolist()})
    assert len(drawn[0]) == len(drawn[1]) == N
    assert not drawn[0] & drawn[1]
