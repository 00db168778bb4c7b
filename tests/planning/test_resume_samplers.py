"""Shares of samplers, resumed at every batch, and what a state of a sampler does not fit."""

from __future__ import annotations

import json

import pytest

from agnoload import DataLoader, DistributedSampler, Sampler, StateError


def check_every_batch(make):
    """Whatever was delivered, the rest of the epoch follows, at its end the next one; saved at once, it is the same."""
    loader = make()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    states.append(json.loads(json.dumps(loader.state_dict())))  # after the loop has seen the end
    batches = len(whole)
    assert len(loader) == batches
    following = [batch.tolist() for batch in loader]
    for place, state in enumerate(states):
        assert len(json.dumps(state)) < 1024
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        with resumed:
            found = [batch.tolist() for batch in resumed]
            assert found == (whole[place:] if place < batches else following), place
            if place == 1 < batches:
                assert [batch.tolist() for batch in resumed] == following


@pytest.mark.parametrize("tail", ["pad", "drop", "keep"])
def test_every_share_of_a_sampler_resumes_at_every_batch(make_sampler, tail):
    for rank in (0, 2):
        check_every_batch(
            lambda r=rank: DataLoader(range(26), 3, sampler=DistributedSampler(make_sampler(), 3, r, tail=tail), seed=3)
        )


@pytest.mark.parametrize("tail", ["pad", "drop", "keep"])
def test_every_share_of_a_batch_sampler_resumes_at_every_batch(make_batch_sampler, tail):
    for rank in (0, 1):
        check_every_batch(
            lambda r=rank: DataLoader(
                range(26), batch_sampler=DistributedSampler(make_batch_sampler(), 2, r, tail=tail), seed=3
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_c16_the_edges_with_drop_last_and_without_batches(workers, drop_last):
    options = {"seed": 1, "num_workers": workers, "shuffle": True}
    check_every_batch(lambda: DataLoader(range(10), 3, drop_last=drop_last, **options))
    check_every_batch(lambda: DataLoader(range(9), 3, drop_last=drop_last, **options))
    if not drop_last:
        loader = DataLoader(range(5), None, **options)
        whole, states = [], []
        for sample in loader:
            whole.append(sample)
            states.append(loader.state_dict())
        for place, state in enumerate(states[:-1]):
            resumed = DataLoader(range(5), None, **options)
            resumed.load_state_dict(state)
            assert list(resumed) == whole[place + 1 :]


def test_another_batch_size_gives_the_rest_exactly_once(make_sampler):
    whole = [batch.tolist() for batch in DataLoader(range(26), 4, sampler=make_sampler(), seed=3)]
    order = [index for batch in whole for index in batch]
    for size in (1, 3, 7, 50):
        loader = DataLoader(range(26), 4, sampler=make_sampler(), seed=3)
        next(iter(loader))
        other = DataLoader(range(26), size, sampler=make_sampler(), seed=3)
        other.load_state_dict(loader.state_dict())
        assert [index for batch in other for index in batch.tolist()] == order[4:]


def test_c24_c25_another_sampler_is_refused_and_so_is_other_data(make_sampler, make_batch_sampler):
    states = {
        "sampler": DataLoader(range(26), sampler=make_sampler(), seed=3).state_dict(),
        "batch sampler": DataLoader(range(26), batch_sampler=make_batch_sampler(), seed=3).state_dict(),
    }
    for state in states.values():
        with pytest.raises(StateError):
            DataLoader(range(26), sampler=Backwards(26), seed=3).load_state_dict(state)
    with pytest.raises(StateError, match=r"26.*27"):
        DataLoader(range(27), seed=3).load_state_dict(DataLoader(range(26), seed=3).state_dict())


class Backwards(Sampler):
    """A user-defined sampler."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))

    def __len__(self):
        return self.n
