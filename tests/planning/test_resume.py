"""A run that was stopped anywhere resumes as if it had not been."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader, StateError, get_worker_info
from agnoload.testing import check_resume


class Draws(agnoload.Dataset):
    """What is drawn for each index; counts its calls."""

    def __init__(self, length=23):
        self.length = length
        self.calls = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.calls += 1
        rng = int(agnoload.sample_rng().integers(1 << 62))
        return {"i": index, "rng": rng, "numpy": np.random.random(), "python": random.random()}


def plain(batch):
    return {name: values.tolist() for name, values in batch.items()}


def restored(state, **options):
    loader = DataLoader(Draws(103), 4, **options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


# ---------------------------------------------------------------------------------------------- C14

SCRIPT = """
import json, random, sys
import numpy as np
import agnoload

class Draws(agnoload.Dataset):
    def __len__(self):
        return 103
    def __getitem__(self, index):
        draws = [int(agnoload.sample_rng().integers(1 << 62)), int(np.random.randint(1 << 62)), random.getrandbits(62)]
        return np.array([index, *draws])

state = json.loads(sys.argv[1])
options = dict(shuffle=True, seed=7, num_workers=2, prefetch_factor=4)
with agnoload.DataLoader(Draws(), 4, **options) as loader:
    if state is not None:
        loader.load_state_dict(state)
    found, states = [], []
    for _ in range(2):
        for batch in loader:
            found.append(batch.tolist())
            states.append(loader.state_dict())
print(json.dumps([found, states[9]]))
"""


@pytest.mark.slow
def test_c14_a_new_process_resumes_in_the_middle_of_an_epoch():
    def run(state):
        command = [sys.executable, "-c", SCRIPT, json.dumps(state)]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)

    whole, state = run(None)
    rest, _ = run(state)
    assert len(whole) == 52
    assert rest == whole[10:]
    assert len(json.dumps(state)) < 1024


def test_c14_a_state_is_small_quick_and_reads_nothing():
    dataset = Draws(103)
    loader = DataLoader(dataset, 4, shuffle=True, seed=7)
    for _ in zip(range(10), loader, strict=False):
        pass
    calls = dataset.calls
    best = min(timed(loader.state_dict) for _ in range(20))
    state = loader.state_dict()
    assert best < 0.02  # a wide bound: it takes some 10 microseconds
    assert len(json.dumps(state)) < 1024
    again = DataLoader(dataset, 4, shuffle=True, seed=7)
    again.load_state_dict(state)
    assert dataset.calls == calls
    assert integers_and_text(state)


def timed(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def integers_and_text(value):
    if isinstance(value, dict):
        return all(type(key) is str and integers_and_text(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(integers_and_text, value))
    return value is None or type(value) in (int, str, bool)


@pytest.mark.parametrize("sampler", [agnoload.WeightedRandomSampler(np.ones(1_000_000), 100), None])
def test_a_state_of_a_large_dataset_is_quick_and_small(sampler):
    loader = DataLoader(range(1_000_000), 4, sampler=sampler, shuffle=sampler is None)
    next(iter(loader))
    loader.state_dict()
    assert min(timed(loader.state_dict) for _ in range(10)) < 0.01  # a wide bound: it takes far less than 1 ms
    assert len(json.dumps(loader.state_dict())) < 1024


# ---------------------------------------------------------------------------------------------- C15


@pytest.mark.slow
def test_c15_what_was_delivered_is_not_loaded_again():
    dataset = Draws(200_000)
    loader = DataLoader(dataset, 2, shuffle=True, seed=1)
    state = loader.state_dict() | {"position": 186_000}
    loader.load_state_dict(state)
    wanted = agnoload.RandomSampler(range(200_000)).order(1, 0).indices(186_000, 200_000).tolist()
    assert [index for batch in loader for index in batch["i"].tolist()] == wanted
    assert dataset.calls == 14_000
    assert len(loader) == 100_000
    assert sum(1 for _ in DataLoader(range(200_000), 2, sampler=loader.sampler)) == 100_000


def test_c15_the_first_request_comes_at_once():
    def first():
        loader = DataLoader(Draws(200_000), 2, shuffle=True, seed=1)
        state = loader.state_dict() | {"position": 186_000}
        began = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - began

    assert min(first() for _ in range(5)) < 0.25  # a wide bound: it takes some 5 ms


def test_c15_a_user_defined_sampler_is_passed_over_by_index():
    dataset = Draws(20_000)
    sampler = np.random.default_rng(0).permutation(20_000).tolist()
    loader = DataLoader(dataset, 2, sampler=sampler)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    calls = dataset.calls
    again = DataLoader(dataset, 2, sampler=sampler)
    again.load_state_dict(state)
    assert next(iter(again))["i"].tolist() == sampler[6:8]
    assert dataset.calls == calls + 2


class Counted(agnoload.IterableDataset):
    """Yields 0, 1, ... 99 and counts how many it has given."""

    def __init__(self):
        self.given = 0
        self.place = 0

    def __iter__(self):
        while self.place < 100:
            self.given += 1
            self.place += 1
            yield self.place - 1
        self.place = 0


class Stateful(Counted):
    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_c15_a_stream_with_a_state_is_not_read_again():
    loader = DataLoader(Stateful(), 10)
    for _ in zip(range(7), loader, strict=False):
        pass
    again = DataLoader(stream := Stateful(), 10)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch.tolist() for batch in again] == [list(range(n, n + 10)) for n in (70, 80, 90)]
    assert stream.given == 30


def test_c15_a_stream_without_one_is_read_again_and_the_loader_says_so():
    loader = DataLoader(Counted(), 10)
    for _ in zip(range(7), loader, strict=False):
        pass
    again = DataLoader(stream := Counted(), 10)
    again.load_state_dict(loader.state_dict())
    with pytest.warns(agnoload.AgnoloadWarning, match="reads the stream again") as caught:
        assert [batch.tolist() for batch in again] == [list(range(n, n + 10)) for n in (70, 80, 90)]
    assert len(caught) == 1
    assert stream.given == 100


# ---------------------------------------------------------------------------------------------- C16


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_c16_the_edges(k, seen):
    unbroken = DataLoader(range(10), 3, shuffle=True, seed=2)
    epochs = [[batch.tolist() for batch in unbroken] for _ in range(2)]
    loader = DataLoader(range(10), 3, shuffle=True, seed=2)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(k)] == epochs[0][:k]
    if seen and k == 4:
        assert list(batches) == []
    state = loader.state_dict()
    again = DataLoader(range(10), 3, shuffle=True, seed=2)
    again.load_state_dict(state)
    assert again.state_dict() == state
    follow = epochs[0][k:] or epochs[1]
    assert [batch.tolist() for batch in again] == follow
    if k < 4:
        assert [batch.tolist() for batch in again] == epochs[1]
    assert again.epoch == 2


def test_c16_three_resumes_in_one_epoch():
    unbroken = DataLoader(range(10), 3, shuffle=True, seed=2)
    epochs = [[batch.tolist() for batch in unbroken] for _ in range(2)]
    found, state = [], DataLoader(range(10), 3, shuffle=True, seed=2).state_dict()
    for _ in range(3):
        loader = DataLoader(range(10), 3, shuffle=True, seed=2)
        loader.load_state_dict(state)
        found.append(next(iter(loader)).tolist())
        state = loader.state_dict()
    loader = DataLoader(range(10), 3, shuffle=True, seed=2)
    loader.load_state_dict(state)
    found += [batch.tolist() for batch in loader]
    assert found == epochs[0]
    assert [batch.tolist() for batch in loader] == epochs[1]


def test_c16_a_trailing_batch_that_is_left_out_does_not_make_an_epoch_of_its_own():
    class Bad(agnoload.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            if index >= 8:
                raise LookupError(index)
            return index

    loader = DataLoader(Bad(), 4, on_error="skip")
    batches = iter(loader)
    next(batches), next(batches)
    again = DataLoader(Bad(), 4, on_error="skip")
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert again.epoch == 2


# ---------------------------------------------------------------------------------------------- C17


def rank_loader(rank, world, batch_size, workers, make=None):
    sampler = agnoload.DistributedSampler(range(64) if make is None else make(), world, rank)
    return DataLoader(Draws(64), batch_size, sampler=sampler, seed=0, num_workers=workers)


@pytest.mark.slow
def test_c17_other_ranks_and_workers_resume_at_the_same_global_batch():
    ranks = [rank_loader(rank, 4, 4, 2) for rank in range(4)]
    unbroken, state = [], None
    for rank, loader in enumerate(ranks):
        with loader:
            batches = iter(loader)
            first = next(batches)
            if rank == 0:
                state = loader.state_dict()
            unbroken.append([plain(batch) for batch in (first, *batches)])
    found = []
    for rank in range(2):
        with rank_loader(rank, 2, 8, 3) as loader:
            loader.load_state_dict(state)
            found.append([plain(batch) for batch in loader])
            assert loader.epoch == 1

    def samples(runs, number):
        """Index and own draw: a change of ranks changes no augmentation."""
        return {pair for run in runs for pair in zip(run[number]["i"], run[number]["rng"], strict=True)}

    for number in range(3):
        assert samples(found, number) == samples(unbroken, number + 1)
    everything = samples(unbroken, 0) | {pair for number in range(3) for pair in samples(found, number)}
    assert {index for index, _ in everything} == set(range(64))
    assert len(everything) == 64


@pytest.mark.parametrize(("world", "batch_size"), [(1, 16), (3, 5), (8, 1), (5, 7)])
def test_c17_with_another_global_batch_the_rest_comes_exactly_once(world, batch_size):
    first = rank_loader(0, 4, 4, 0)
    next(iter(first))
    done = {i for rank in range(4) for i in next(iter(rank_loader(rank, 4, 4, 0)))["i"].tolist()}
    rest = []
    for rank in range(world):
        sampler = agnoload.DistributedSampler(range(64), world, rank, tail="keep")
        loader = DataLoader(Draws(64), batch_size, sampler=sampler, seed=0)
        loader.load_state_dict(first.state_dict())
        rest += [i for batch in loader for i in batch["i"].tolist()]
    assert len(done) == 16
    assert sorted(rest) == sorted(set(range(64)) - done)


def test_c17_the_states_of_all_ranks_are_equal():
    states = []
    for rank in range(4):
        loader = rank_loader(rank, 4, 4, 0)
        next(iter(loader))
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)


def test_a_batch_sampler_that_makes_its_batches_as_wholes_needs_its_own_size():
    def loader(size):
        return DataLoader(range(30), batch_sampler=agnoload.BalancedBatchSampler(np.arange(30) % 3, size), seed=0)

    first = loader(6)
    next(iter(first))
    with pytest.raises(StateError):
        loader(5).load_state_dict(first.state_dict())


# ---------------------------------------------------------------------------------------------- out of order


def held_up(gate):
    """Sample 0 waits for a file that the test makes."""

    class HeldUp(agnoload.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if index == 0:
                deadline = time.monotonic() + 60
                while not os.path.exists(gate) and time.monotonic() < deadline:
                    time.sleep(0.005)
            return index

    return HeldUp()


def test_out_of_order_what_is_left_is_compared_with_the_run_that_the_state_is_from(tmp_path):
    """With two workers the second batch comes before the first one, without them it does not."""

    class Overtaken(agnoload.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if (info := agnoload.get_worker_info()) is not None and info.num_workers == 2:
                if index == 4:
                    (tmp_path / "gate").touch()
                while index == 0 and not (tmp_path / "gate").exists():
                    time.sleep(0.005)
            return index

    check_resume(lambda num_workers: DataLoader(Overtaken(), 4, in_order=False, num_workers=num_workers))


def test_c47_out_of_order_the_rest_comes_exactly_once(tmp_path):
    gate = tmp_path / "gate"
    options = {"num_workers": 2, "in_order": False, "prefetch_factor": 4}
    with DataLoader(held_up(str(gate)), 1, **options) as loader:
        batches = iter(loader)
        found = [next(batches).item() for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        gate.touch()
    assert 0 not in found
    assert state["position"] == 0
    assert len(json.dumps(state)) < 1024
    for workers in (0, 2):
        with DataLoader(held_up(str(gate)), 1, in_order=False, num_workers=workers) as again:
            again.load_state_dict(state)
            assert again.state_dict() == state
            rest = [batch.item() for batch in again]
            assert sorted(found + rest) == list(range(12))
            assert sorted(batch.item() for batch in again) == list(range(12))
    with DataLoader(range(12), 1) as again:  # and in order
        again.load_state_dict(state)
        batches = iter(again)
        assert next(batches).item() == 0
        once_more = again.state_dict()
        assert sorted([0, *found, *(batch.item() for batch in batches)]) == list(range(12))
    with DataLoader(range(12), 1) as again:
        again.load_state_dict(once_more)
        assert sorted([0, *found, *(batch.item() for batch in again)]) == list(range(12))


def test_a_state_out_of_order_needs_the_same_batches_and_the_same_rank(tmp_path):
    gate = tmp_path / "gate"
    with DataLoader(held_up(str(gate)), 1, num_workers=2, in_order=False) as loader:
        next(iter(loader))
        state = loader.state_dict()
        gate.touch()
    with pytest.raises(StateError, match=r"batch_size 1.*has 2"):
        DataLoader(range(12), 2).load_state_dict(state)
    sampler = agnoload.DistributedSampler(range(12), 2, 1, shuffle=False)
    with pytest.raises(StateError, match=r"rank 0.*has 1"):
        DataLoader(range(12), 1, sampler=sampler).load_state_dict(
            state | {"facts": state["facts"] | {"sampler": sampler.identity()}}
        )


def test_out_of_order_no_batch_overtakes_the_end_of_an_epoch(tmp_path):
    gate = tmp_path / "gate"
    with DataLoader(held_up(str(gate)), 1, num_workers=2, in_order=False, prefetch_factor=20) as loader:
        batches = loader.steps(30)
        found = [next(batches).item() for _ in range(11)]
        assert sorted(found) == list(range(1, 12))
        gate.touch()
        assert next(batches).item() == 0
        assert loader.state_dict()["epoch"] == 1
        assert sorted(next(batches).item() for _ in range(12)) == list(range(12))


# ---------------------------------------------------------------------------------------------- C43, C57


@pytest.mark.slow
def test_c43_replacements_are_the_same_after_a_resume():
    class Bad(agnoload.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index % 5 == 3:
                raise LookupError(index)
            return np.array([index, agnoload.sample_rng().integers(1 << 62), np.random.randint(1 << 62)])

    def make(num_workers=0, **options):
        return DataLoader(Bad(), 4, shuffle=True, seed=3, on_error="replace", num_workers=num_workers, **options)

    check_resume(make)
    check_resume(
        lambda num_workers=0: DataLoader(
            Bad(), 4, shuffle=True, generator=random.Random(3), on_error="replace", num_workers=num_workers
        )
    )
    check_resume(lambda: DataLoader(Bad(), 4, shuffle=True, seed=3, on_error="skip"))


@pytest.mark.slow
def test_a_stream_may_be_known_to_be_at_its_end_early_or_late():
    """Whether the state after the last batch is one of the next epoch depends on which reply came first."""
    ended = threading.Event()

    class Ends(agnoload.IterableDataset):
        def __iter__(self):
            yield from range(2)
            if threading.current_thread().name == "agnoload-1":
                ended.set()

    def last(value):
        if value == 1 and threading.current_thread().name == "agnoload-0" and get_worker_info().num_workers == 2:
            assert ended.wait(60)
            ended.clear()
        return value

    check_resume(
        lambda num_workers=0: DataLoader(Ends().map(last), 2, num_workers=num_workers, worker_type="thread", seed=1)
    )


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_an_epoch_without_a_batch_is_one(sizes):
    class Varying(agnoload.IterableDataset):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(sizes[self.epoch]))

    check_resume(lambda num_workers=0: DataLoader(Varying(), 2, num_workers=num_workers, worker_type="thread"))


@pytest.mark.parametrize("workers", [0, 2])
def test_c57_steps_continue_after_a_resume(workers):
    def make():
        return DataLoader(range(10), 4, shuffle=True, num_workers=workers, seed=6)

    with make() as loader:
        batches = loader.steps(5)
        found = [next(batches).tolist() for _ in range(4)]
        state = loader.state_dict()
        fifth = next(batches).tolist()
        assert next(batches, None) is None
    assert [len(batch) for batch in (*found, fifth)] == [4, 4, 2, 4, 4]
    assert found[3] + fifth == agnoload.RandomSampler(range(10)).order(6, 1).indices(0, 8).tolist()
    with make() as again:
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again.steps(1)] == [fifth]


# ---------------------------------------------------------------------------------------------- everything

LABELS = np.array([0] * 4 + [1] * 7 + [2] * 12)


def over(dataset=None, batch_size=4, **options):
    def make(num_workers=0):
        data = Draws() if dataset is None else dataset()
        made = {name: value() if callable(value) else value for name, value in options.items()}
        return DataLoader(data, batch_size, num_workers=num_workers, **made)

    return make


SAMPLERS = {
    "sequential": {},
    "shuffled": {"shuffle": True},
    "without the last": {"shuffle": True, "drop_last": True},
    "single samples": {"shuffle": True, "batch_size": None},
    "several rounds": {"sampler": lambda: agnoload.RandomSampler(range(23), num_samples=50)},
    "replacement": {"sampler": lambda: agnoload.RandomSampler(range(23), replacement=True, num_samples=30)},
    "subset": {"sampler": lambda: agnoload.SubsetRandomSampler([3, 1, 20, 7, 9])},
    "weighted": {"sampler": lambda: agnoload.WeightedRandomSampler(np.arange(23) + 1, 30)},
    "weighted, distinct": {"sampler": lambda: agnoload.WeightedRandomSampler(np.arange(23) + 1, 15, replacement=False)},
    "rank": {"sampler": lambda: agnoload.DistributedSampler(range(23), 3, 2), "batch_size": 2},
    "rank, weighted": {
        "sampler": lambda: agnoload.DistributedSampler(agnoload.WeightedRandomSampler(np.ones(23), 20), 2, 0)
    },
    "cut": {"batch_sampler": lambda: agnoload.BatchSampler(agnoload.RandomSampler(range(23)), 5, drop_last=False)},
    "balanced": {"batch_sampler": lambda: agnoload.BalancedBatchSampler(LABELS, 5)},
    "balanced at random": {"batch_sampler": lambda: agnoload.BalancedBatchSampler(LABELS, 5, 0.5, kind="random")},
    "classes": {"batch_sampler": lambda: agnoload.ClassUniformBatchSampler(LABELS, 2, 2)},
    "cyclic": {"batch_sampler": lambda: agnoload.CyclicClassBatchSampler(LABELS, 2, 4)},
    "buckets": {"batch_sampler": lambda: agnoload.BucketBatchSampler(np.arange(23) + 1, max_tokens=60)},
    "rank of batches": {
        "batch_sampler": lambda: agnoload.DistributedSampler(agnoload.BalancedBatchSampler(LABELS, 5), 2, 1)
    },
    "rank, all kept": {"sampler": lambda: agnoload.DistributedSampler(range(23), 3, 0, tail="keep"), "batch_size": 3},
    "rank, the rest dropped": {"sampler": lambda: agnoload.DistributedSampler(range(23), 3, 1, tail="drop")},
    "rank, several rounds": {
        "sampler": lambda: agnoload.DistributedSampler(agnoload.RandomSampler(range(23), num_samples=50), 2, 1)
    },
    "cut of a rank": {
        "batch_sampler": lambda: agnoload.BatchSampler(agnoload.DistributedSampler(range(23), 2, 1), 5, drop_last=True)
    },
    "rank of buckets": {
        "batch_sampler": lambda: agnoload.DistributedSampler(
            agnoload.BucketBatchSampler(np.arange(23) + 1, batch_size=4), 2, 0
        )
    },
    "a list": {"sampler": lambda: [5, 3, 3, 0, 22, 1]},
    "a list of batches": {"batch_sampler": lambda: [[5, 3], [0], [22, 1, 4], [2]]},
    "out of order": {"shuffle": True, "in_order": False},
    "a generator": {"shuffle": True, "generator": lambda: np.random.default_rng(1)},
}


QUICK = {"shuffled", "balanced"}
"""One of each kind: the others take minutes."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLERS]
)
def test_every_sampler_resumes_at_every_batch(name):
    options = {"batch_size": 4, **SAMPLERS[name]}
    if "batch_sampler" in options:
        options["batch_size"] = 1
    check_resume(over(**options))


def rows():
    return np.arange(46.0).reshape(23, 2)


class Whole(Draws):
    """A request is loaded in one call."""

    def __getitems__(self, indices):
        rng = agnoload.sample_rng()
        return [(index, rng.random(), np.random.random(), random.random()) for index in indices]


DATASETS = {
    "arrays": lambda: agnoload.ArrayDataset(x=rows(), y=np.arange(23)),
    "stacked": lambda: agnoload.StackDataset(Draws(), list(range(23))),
    "one after the other": lambda: agnoload.ConcatDataset([Draws(9), Draws(14)]),
    "some": lambda: agnoload.Subset(Draws(40), range(0, 40, 2)),
    "mapped": lambda: Draws().map(lambda sample: (sample["i"], agnoload.sample_rng().random())),
    "packed": lambda: agnoload.PackedList([str(n) for n in range(23)]).map(len),
    "cached": lambda: agnoload.CachedDataset(agnoload.ArrayDataset(rows()), 1 << 20),
    "split": lambda: agnoload.random_split(Draws(40), [23, 17], generator=1)[0],
    "whole requests": Whole,
    "an array": rows,
    "a list": lambda: [f"text {n}" for n in range(23)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_resumes_at_every_batch(name):
    check_resume(over(DATASETS[name], shuffle=True))


class Numbers(agnoload.IterableDataset):
    def __iter__(self):
        for number in range(22):
            yield number, np.random.random(), random.random(), agnoload.sample_rng().random()


class Placed(Numbers):
    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 22:
            self.place += 1
            yield self.place, np.random.random(), agnoload.sample_rng().random()
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Shards(agnoload.IterableDataset):
    num_shards = 5
    lanes = 3

    def shard(self, number):
        for place in range(2 * number + 1):
            yield 100 * number + place, random.random(), np.random.random()


class PlainShards(agnoload.IterableDataset):
    num_shards = 5
    lanes = 3

    def shard(self, number):
        return range(100 * number, 100 * number + 2 * number + 1)


def has_numbers(line):
    return "23" in line


STREAMS = {
    "stream": Numbers,
    "with a state": Placed,
    "shards": Shards,
    "shuffled": lambda: Numbers().shuffle(5),
    "shuffled, with a state": lambda: Placed().shuffle(5),
    "shuffled shards": lambda: Shards().shuffle(4),
    "shuffled plain shards": lambda: PlainShards().shuffle(4).map(lambda x: (x, random.random(), np.random.random())),
    "mapped and filtered": lambda: Numbers().filter(lambda x: x[0] % 3).map(lambda x: (x, random.random())),
    "one after the other": lambda: agnoload.ChainDataset([Numbers(), Placed().map(lambda x: (*x, 0.0))]),
    "rank": lambda: Numbers().split_by_rank(1, 2),
    "rank of shards": lambda: Shards().split_by_rank(1, 2, uneven="keep"),
    "mixture": lambda: agnoload.Mixture([Numbers(), Numbers().map(lambda x: x)], [0.3, 0.7], stop="first"),
    "mixture, each once": lambda: agnoload.Mixture([Placed(), Placed().map(lambda x: x)], [0.3, 0.7], stop="last"),
    "exact mixture": lambda: agnoload.Mixture([rows(), rows() + 100], [0.3, 0.7], per="batch", shuffle=True),
    "files": lambda: agnoload.FileStream([__file__], agnoload.read_lines).filter(has_numbers).shuffle(4),
    "shards of a rank, shuffled": lambda: Shards().shuffle(3).split_by_rank(0, 2, uneven="keep"),
    "padded rank": lambda: Numbers().split_by_rank(1, 3, uneven="pad"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_resumes_at_every_batch(name):
    check_resume(over(STREAMS[name]))


class Even(agnoload.IterableDataset):
    """Shards that draw while they are read; they end and begin within batches."""

    num_shards = 5
    lanes = 2

    def __init__(self, length):
        self.length = length

    def shard(self, number):
        for place in range(self.length):
            yield 100 * number + place, random.random(), np.random.random(), agnoload.sample_rng().random()


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 7])
@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("buffer_size", [3, 6])
def test_what_shards_draw_while_they_are_read_ahead_is_the_same_after_a_resume(length, batch_size, buffer_size):
    check_resume(lambda: DataLoader(Even(length).shuffle(buffer_size), batch_size, seed=1))


@pytest.mark.slow
def test_another_backend_resumes_at_every_batch():
    pytest.importorskip("torch")
    check_resume(over(shuffle=True, backend="torch"))


def test_threads_resume_at_every_batch():
    class Own(Draws):
        def __getitem__(self, index):
            return index, agnoload.sample_rng().random()

    check_resume(over(Own, shuffle=True, worker_type="thread"))


@pytest.mark.slow
def test_kept_workers_resume_at_every_batch():
    check_resume(
        lambda num_workers=0: DataLoader(
            Draws(), 4, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0
        )
    )
