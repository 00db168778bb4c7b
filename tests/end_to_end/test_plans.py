"""Which samples an epoch gives, to which rank, and in which order: after a resume, a break, a copy or a change."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    OptionError,
    RandomSampler,
    StateError,
    SubsetRandomSampler,
    WeightedRandomSampler,
    system,
)


def lists(loader):
    return [np.asarray(batch).tolist() for batch in loader]


def flat(loader):
    return [value for batch in lists(loader) for value in batch]


# ------------------------------------------------------------------------------------------------ ranks


def share_of(kind, n, rank, world, tail, size):
    data = range(n)
    if kind == "batches":
        batches = BatchSampler(RandomSampler(data), size, False)
        return DataLoader(data, batch_sampler=DistributedSampler(batches, world, rank, tail=tail), seed=3)
    return DataLoader(data, size, sampler=DistributedSampler(data, world, rank, tail=tail), seed=3)


@settings(max_examples=25)
@example(kind="samples", n=10, worlds=(3, 3), tail="keep", size=1, steps=3)
@example(kind="samples", n=10, worlds=(3, 2), tail="keep", size=1, steps=3)
@example(kind="batches", n=14, worlds=(3, 3), tail="keep", size=2, steps=2)
@given(
    kind=st.sampled_from(["samples", "batches"]),
    n=st.integers(7, 20),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    tail=st.sampled_from(["keep", "pad", "drop"]),
    size=st.integers(1, 2),
    steps=st.integers(1, 5),
)
def test_ranks_that_go_on_are_in_the_same_epoch_and_share_what_is_left(kind, n, worlds, tail, size, steps):
    before, after = worlds
    loader = share_of(kind, n, 0, before, tail, size)
    for _ in zip(range(steps), loader, strict=False):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    position, epoch = state["position"], state["epoch"]
    ranks = [share_of(kind, n, rank, after, tail, size) for rank in range(after)]
    for rank in ranks:
        rank.load_state_dict(state)
    rests = [lists(rank) for rank in ranks]
    whole = share_of(kind, n, 0, 1, "keep", size)
    whole.set_epoch(epoch)
    order = flat(whole)
    if tail == "keep":
        assert sorted(value for rest in rests for batch in rest for value in batch) == sorted(order[position:])
    if before == after and epoch == 0:
        assert rests == [lists(share_of(kind, n, rank, after, tail, size))[steps:] for rank in range(after)]
    assert len({rank.epoch for rank in ranks}) == 1
    for number, rank in enumerate(ranks):
        fresh = share_of(kind, n, number, after, tail, size)
        fresh.set_epoch(rank.epoch)
        assert lists(rank) == lists(fresh)


class Count(agnoload.IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


@pytest.mark.filterwarnings("ignore:the stream has no state_dict")
@settings(max_examples=25)
@given(n=st.integers(4, 20), size=st.integers(1, 3), before=st.integers(1, 4), after=st.integers(1, 4))
def test_ranks_of_a_stream_that_go_on_are_in_the_same_epoch(n, size, before, after):
    def make(rank, world):
        return DataLoader(Count(n).split_by_rank(rank, world).map(int), size, seed=1)

    with make(0, before) as loader:
        batches = iter(loader)
        for _ in range(-(-len(range(0, n, before)) // size) - 1):
            next(batches)
        state = loader.state_dict()
    place = state["position"] * before
    rests = []
    for rank in range(after):
        with make(rank, after) as loader:
            if place % after:
                with pytest.raises(StateError, match=f"{after} ranks cannot share evenly"):
                    loader.load_state_dict(state)
                continue
            loader.load_state_dict(state)
            rests += flat(loader)
            assert loader.epoch == 1
            assert flat(loader) == list(range(rank, n, after))
    assert place % after or sorted(rests) == list(range(min(place, n), n))


STEP = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
INTERACTIVE = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


def test_slurm_counts_where_srun_has_started_the_process(monkeypatch, caplog):
    for more, expected in (
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),  # srun
        ({"SLURM_STEP_ID": "0"}, (2, 4)),  # srun without a count
        ({}, (0, 1)),  # a batch script
        ({"SLURM_JOB_NAME": "interactive"}, (0, 1)),  # salloc
        ({"SLURM_JOB_ID": "", "SLURM_JOB_NAME": "bash"}, (0, 1)),  # a shell
        (INTERACTIVE, (0, 1)),
        ({"SLURM_JOB_ID": ""}, (2, 4)),
    ):
        with monkeypatch.context() as patch, caplog.at_level("INFO", "agnoload"):
            for name, value in {"RANK": "", **STEP, **more}.items():
                patch.setenv(name, value)
            system._say.cache_clear()
            caplog.clear()
            for _ in range(2):
                sampler = DistributedSampler(range(8), shuffle=False)
                assert (sampler.rank, sampler.num_replicas) == expected, more
            records = ["this process is rank 2 of 4, from SLURM_PROCID and SLURM_NTASKS"] if expected == (2, 4) else []
            assert caplog.messages == records


def test_steps_of_a_rank_with_nothing_left_go_on_with_the_next_epoch():
    state = share_of("samples", 10, 0, 3, "keep", 1)
    batches = iter(state)
    for _ in range(3):
        next(batches)
    loader = share_of("samples", 10, 1, 3, "keep", 1)
    loader.load_state_dict(state.state_dict())
    next_epoch = share_of("samples", 10, 1, 3, "keep", 1)
    next_epoch.set_epoch(1)
    assert lists(loader.steps(2)) == lists(next_epoch)[:2]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}])
def test_one_warning_says_that_every_rank_loads_everything(monkeypatch, options):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(range(4), 2, **options)
    with pytest.warns(agnoload.AgnoloadWarning, match="rank 1 of 2.*DistributedSampler") as caught:
        assert sorted(flat(loader)) == sorted(flat(loader)) == [0, 1, 2, 3]
    assert len(caught) == 1
    flat(DataLoader(range(4), 2, sampler=DistributedSampler(range(4))))
    flat(DataLoader(range(4), batch_sampler=BatchSampler(DistributedSampler(range(4)), 2, False)))
    flat(DataLoader(range(4), 2, sampler=[0, 1]))


def test_lengths_of_shards_are_asked_for_once_a_pass():
    asked = []

    class Shards(agnoload.IterableDataset):
        num_shards = 20

        def shard(self, number):
            return [number] * (number + 1)

        def shard_length(self, number):
            asked.append(number)
            return number + 1

    split = Shards().split_by_rank(1, 2, uneven="stop")
    asked.clear()
    expected = [value for number in range(1, 20, 2) for value in [number] * (number + 1)][:100]
    for run in (split, DataLoader(split, 7)):
        assert sorted(np.concatenate([np.atleast_1d(part) for part in run]).tolist()) == expected
        assert len(asked) <= 40
        asked.clear()


# ------------------------------------------------------------------------------------------------ samplers


class Standing:
    """Goes on where it stands, with a state; `rng` shuffles anew in each epoch."""

    def __init__(self, rng=None):
        self.at, self.rng, self.order = 0, rng, list(range(12))

    def __len__(self):
        return 12

    def __iter__(self):
        if self.at == 0 and self.rng is not None:
            self.order = self.rng.permutation(12).tolist()
        while self.at < 12:
            self.at += 1
            yield self.order[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "order": self.order, "rng": self.rng and self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]
        if self.rng is not None:
            self.rng.bit_generator.state = state["rng"]


def first_is_bad(samples):
    if 2 in samples and Failing.active:
        raise ValueError("bad")
    return samples


class Failing:
    active = True


@pytest.mark.parametrize("end", ["break", "error", "steps"])
def test_an_epoch_that_was_left_early_does_not_show_in_the_next_one(end):
    found = []
    for workers in (0, 1, 3):
        sampler = Standing(np.random.default_rng(0))
        options = {"num_workers": workers, "worker_type": "thread", "collate_fn": first_is_bad}
        loader = DataLoader(range(12), 2, sampler=sampler, **options)
        Failing.active = False
        epochs = [lists(loader)]
        Failing.active = end == "error"
        with pytest.raises(ValueError, match="bad") if end == "error" else pytest.raises(StopIteration):
            batches = loader.steps(2) if end == "steps" else iter(loader)
            while True:
                next(batches)
                if end == "break":
                    raise StopIteration
        batches.close()
        Failing.active = False
        epochs += [lists(loader), lists(loader)]
        assert all(sorted(map(int, np.ravel(epoch))) == list(range(12)) for epoch in epochs)
        assert epochs[1] != epochs[2]
        found.append(epochs)
    assert found[0] == found[1] == found[2]


def test_a_copy_of_a_loader_takes_its_sampler_to_the_start_of_the_epoch():
    loader = DataLoader(range(12), 3, sampler=Standing())
    next(iter(loader))
    assert flat(copy.deepcopy(loader)) == list(range(12))


def test_a_batch_sampler_that_yields_none_is_refused():
    batches = iter(DataLoader(range(6), batch_sampler=[[0, 1], None, [2, 3]]))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(OptionError, match="must yield batches of indices, got None"):
        next(batches)


class TypeOf:
    def __len__(self):
        return 20

    def __getitem__(self, key):
        return type(key).__name__


class Index:
    """As a tensor without axes is: an index, but no int."""

    ndim = 0

    def __init__(self, value, dtype="int64"):
        self.value, self.dtype = value, dtype

    def __index__(self):
        return self.value


def test_an_index_without_axes_reaches_the_dataset_as_an_int():
    keys = [np.array(3), np.int8(3), Index(3), 3, True, np.array(True), Index(1, "torch.bool"), np.array(1.0), "text"]
    kinds = ["int", "int", "int", "int", "bool", "ndarray", "Index", "ndarray", "str"]
    assert lists(DataLoader(TypeOf(), 3, sampler=keys)) == [kinds[:3], kinds[3:6], kinds[6:]]
    assert lists(DataLoader(TypeOf(), batch_sampler=[keys])) == [kinds]
    assert list(DataLoader(TypeOf(), None, sampler=keys)) == kinds


def test_weights_and_indices_can_be_set_and_count_from_the_next_epoch_on():
    weighted = WeightedRandomSampler([1.0, 0.0], 4)
    loader = DataLoader([0, 1], 4, sampler=weighted)
    state = loader.state_dict()
    assert flat(loader) == [0] * 4
    weighted.weights = [0.0, 1.0]
    assert flat(loader) == [1] * 4
    assert weighted.weights.tolist() == [0.0, 1.0]
    with pytest.raises(StateError, match="WeightedRandomSampler"):
        loader.load_state_dict(state)
    with pytest.raises(OptionError, match="as before, got 3"):
        weighted.weights = [1.0, 2.0, 3.0]
    with pytest.raises(OptionError, match="finite and not negative"):
        weighted.weights = [1.0, -1.0]
    with pytest.raises(ValueError, match="read-only"):
        weighted.weights[0] = 1.0
    chosen = SubsetRandomSampler([0, 1])
    chosen.indices = [2, 3]
    assert sorted(flat(DataLoader(range(4), 2, sampler=chosen))) == [2, 3]
    with pytest.raises(OptionError, match="integers"):
        chosen.indices = [0.5]


def test_what_would_not_count_cannot_be_set():
    for sampler, names in (
        (WeightedRandomSampler([1.0], 1), ["num_samples", "replacement"]),
        (RandomSampler(range(3)), ["num_samples", "replacement"]),
        (DistributedSampler(range(3), 1, 0), ["shuffle", "dataset", "num_samples", "total_size"]),
        (agnoload.BalancedBatchSampler([0, 1], 2), ["labels", "alpha", "batch_size", "num_batches"]),
        (agnoload.ClassUniformBatchSampler([0, 1], 1, 1), ["labels", "samples_per_class"]),
        (agnoload.BucketBatchSampler([1, 2], 1), ["lengths", "batch_size", "shuffle", "drop_last"]),
    ):
        for name in names:
            with pytest.raises(AttributeError, match=name):
                setattr(sampler, name, [5, 6, 7])
        assert len(list(pickle.loads(pickle.dumps(sampler)))) == len(sampler)


@given(n=st.integers(6, 50), world=st.integers(1, 6), tail=st.sampled_from(["pad", "drop", "keep"]))
def test_a_distributed_sampler_says_how_many_samples_it_gives(n, world, tail):
    data = range(n)
    ranks = [DistributedSampler(data, world, rank, tail=tail) for rank in range(world)]
    assert [rank.num_samples for rank in ranks] == [len(list(rank)) for rank in ranks]
    total = {"pad": -(-n // world) * world, "drop": n // world * world, "keep": n}[tail]
    assert {rank.total_size for rank in ranks} == {total} == {sum(rank.num_samples for rank in ranks)}
    assert all(rank.dataset is data for rank in ranks)


# ------------------------------------------------------------------------------------------------ loaders


class Named(DataLoader):
    def __init__(self, *args, name="train", **options):
        super().__init__(*args, **options)
        self.name, self.itself = name, self


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_begins_an_epoch_and_keeps_what_a_subclass_has_put_on_it(travel):
    loader = Named(range(8), 2, shuffle=True, name="eval")
    iterator = iter(loader)
    next(iterator)
    running = travel(loader)
    assert (running.epoch, running.seed, len(lists(running))) == (0, loader.seed, 4)
    iterator.close()
    later = travel(loader)
    assert later.epoch == 1
    assert lists(later) == lists(loader)
    assert later.name == "eval"
    if travel is not copy.copy:
        assert later.itself is later


def test_worker_init_fn_can_be_set_until_it_is_called():
    called = []
    loader = DataLoader(range(6), 2, num_workers=2, worker_type="thread")
    flat(loader)
    loader.worker_init_fn = called.append
    assert flat(loader) == flat(copy.copy(loader)) == list(range(6))
    assert set(called) == {0, 1}
    with pytest.raises(OptionError, match="worker_init_fn must be callable"):
        loader.worker_init_fn = 3


class Late(agnoload.IterableDataset):
    """Gives nothing in epoch 0."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch] if self.epoch else [])


def test_a_state_before_the_first_batch_of_an_epoch_without_any_does_not_skip_it():
    first, resumed = DataLoader(Late(), 1, seed=1), DataLoader(Late(), 1, seed=1)
    batches = iter(first)
    resumed.load_state_dict(first.state_dict())
    assert [lists(one) for one in (batches, first, first)] == [lists(resumed) for _ in range(3)] == [[], [[1]], [[2]]]


def test_out_of_order_a_slow_worker_holds_up_no_other():
    released = threading.Event()

    class Slow(agnoload.IterableDataset):
        num_shards = 4

        def shard(self, number):
            for place in range(10):
                if number % 2:
                    released.wait()
                yield 10 * number + place

    loader = DataLoader(Slow(), 1, num_workers=2, worker_type="thread", in_order=False, timeout=20)
    with loader:
        batches = iter(loader)
        try:
            quick = [int(next(batches)[0]) for _ in range(20)]
            state = json.loads(json.dumps(loader.state_dict()))
        finally:
            released.set()
        assert sorted(quick) == [*range(10), *range(20, 30)]
        assert sorted(flat(batches)) == [*range(10, 20), *range(30, 40)]
    resumed = DataLoader(Slow(), 1)
    resumed.load_state_dict(state)
    assert sorted(flat(resumed)) == [*range(10, 20), *range(30, 40)]


def test_a_state_in_which_more_failed_than_were_tried_is_refused():
    loader = DataLoader(range(4), on_error="skip", max_failed=2)
    with pytest.raises(StateError, match="at most the number of samples tried, got 9 of 4"):
        loader.load_state_dict({**loader.state_dict(), "failed": [9, 4]})


def test_the_error_of_a_state_is_short_whatever_it_was_given():
    huge, loader = "x" * 1_000_000, DataLoader(range(4), seed=0)
    for change in (
        {"version": huge},
        {huge: 1},
        {"facts": huge},
        {"facts": {"kind": huge}},
        {"facts": {huge: 1}},
        {"position": huge},
        {"position": 10**5000},
        {"seed": 10**5000},
        {"sampler": huge},
        {"stream": [huge]},
        {"ahead": [[1, 2]] * 1000},
    ):
        with pytest.raises(StateError) as caught:
            loader.load_state_dict({**loader.state_dict(), **change})
        assert len(str(caught.value)) < 1000
