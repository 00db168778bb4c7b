"""A run that was stopped anywhere resumes as if it had not been: one table of what can be resumed, and its edges."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader, DistributedSampler, Mixture, RandomSampler, Sampler, StateError, get_worker_info
from agnoload.testing import check_resume

few = settings(max_examples=40, deadline=None)


def lists(batches):
    return [np.asarray(batch).tolist() for batch in batches]


def flat(batches):
    return [value for batch in lists(batches) for value in batch]


def through_json(state):
    return json.loads(json.dumps(state))


# ------------------------------------------------------------------------------------------------ the table


def rows():
    return np.arange(46.0).reshape(23, 2)


def has_numbers(line):
    return "23" in line


def over(dataset, batch_size=4, **options):
    return {"dataset": dataset, "batch_size": batch_size, "seed": 5, **options}


def sampled(sampler, **options):
    return over(range(20), 3, sampler=sampler, **options)


ORDERS = {
    "sequential": lambda kit: over(kit.Drawing()),
    "shuffled": lambda kit: over(kit.Drawing(), shuffle=True),
    "shuffled, drop_last": lambda kit: over(kit.Drawing(), shuffle=True, drop_last=True),
    "shuffled, batches divide it": lambda kit: over(range(12), shuffle=True),
    "single samples": lambda kit: over(kit.Drawing(), None, shuffle=True),
    "out of order": lambda kit: over(kit.Drawing(), shuffle=True, in_order=False),
    "a generator": lambda kit: over(kit.Drawing(), shuffle=True, generator=np.random.default_rng(1), seed=None),
    "samples that are replaced": lambda kit: over(Holes(), shuffle=True, on_error="replace"),
    "samples that are replaced, a generator": lambda kit: over(
        Holes(), shuffle=True, on_error="replace", generator=random.Random(3), seed=None
    ),
    "samples that are skipped": lambda kit: over(Holes(), shuffle=True, on_error="skip"),
}
DATASETS = {
    "arrays": lambda kit: agnoload.ArrayDataset(x=rows(), y=np.arange(23)),
    "stacked": lambda kit: agnoload.StackDataset(kit.Drawing(), list(range(23))),
    "one after the other": lambda kit: agnoload.ConcatDataset([kit.Drawing(9), kit.Drawing(14)]),
    "some": lambda kit: agnoload.Subset(kit.Drawing(40), range(0, 40, 2)),
    "mapped": lambda kit: kit.Drawing().map(lambda sample: (sample["index"], agnoload.sample_rng().random())),
    "packed": lambda kit: agnoload.PackedList([str(n) for n in range(23)]).map(len),
    "cached": lambda kit: agnoload.CachedDataset(agnoload.ArrayDataset(rows()), 1 << 20),
    "split": lambda kit: agnoload.random_split(kit.Drawing(40), [23, 17], generator=1)[0],
    "whole requests": lambda kit: kit.AtOnce(),
    "an array": lambda kit: rows(),
    "a list": lambda kit: [f"text {n}" for n in range(23)],
}
USERS_SAMPLERS = {
    "a list": lambda kit: [5, 3, 3, 0, 19, 1],
    "the process's generators": lambda kit: kit.Shuffled(),
    "the process's generators, on the way": lambda kit: kit.DrawnOnTheWay(),
    "by the epoch": lambda kit: kit.ByEpoch(),
    "a state": lambda kit: kit.Saves(),
    "a state that begins again by itself": lambda kit: kit.Saves(resets=True),
    "an iterator with a state": lambda kit: kit.Walks(),
    "inside a distributed sampler": lambda kit: DistributedSampler(kit.Shuffled(), 2, 1),
    "a state inside a distributed sampler": lambda kit: DistributedSampler(kit.Saves(), 2, 1, tail="keep"),
}
USERS_BATCH_SAMPLERS = {
    "a list of batches": lambda kit: [[5, 3], [0], [19, 1, 4], [2]],
    "uneven batches": lambda kit: kit.UnevenBatches(),
    "batches of a sampler with a state": lambda kit: agnoload.BatchSampler(kit.Saves(), 3, drop_last=True),
}
STREAMS = {
    "plain": lambda kit: kit.Noisy(),
    "with a state": lambda kit: kit.Placed(22).map(lambda x: (x, np.random.random(), agnoload.sample_rng().random())),
    "shards": lambda kit: kit.Shards(),
    "shuffled": lambda kit: kit.Noisy().shuffle(5),
    "shuffled, with a state": lambda kit: kit.Placed(22).shuffle(5),
    "shuffled shards": lambda kit: kit.Shards().shuffle(4),
    "shuffled plain shards": lambda kit: kit.PlainShards().shuffle(4).map(lambda x: (x, random.random())),
    "mapped and filtered": lambda kit: kit.Noisy().filter(lambda x: x[0] % 3).map(lambda x: (x, random.random())),
    "one after the other": lambda kit: agnoload.ChainDataset([kit.Count(9), kit.Placed()]),
    "rank": lambda kit: kit.Noisy().split_by_rank(1, 2),
    "padded rank": lambda kit: kit.Noisy().split_by_rank(1, 3, uneven="pad"),
    "rank of shards": lambda kit: kit.Shards().split_by_rank(1, 2, uneven="keep"),
    "shards of a rank, shuffled": lambda kit: kit.Shards().shuffle(3).split_by_rank(0, 2, uneven="keep"),
    "mixture": lambda kit: Mixture([kit.Noisy(), kit.Noisy().map(lambda x: x)], [0.3, 0.7], stop="first"),
    "mixture, each once": lambda kit: Mixture([kit.Placed(), kit.Placed().map(lambda x: -x)], [0.3, 0.7], stop="last"),
    "exact mixture": lambda kit: Mixture([rows(), rows() + 100], [0.3, 0.7], per="batch", shuffle=True),
    "files": lambda kit: agnoload.FileStream([__file__], agnoload.read_lines).filter(has_numbers).shuffle(4),
}


class Holes(agnoload.Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        if index % 5 == 3:
            raise LookupError(index)
        return np.array([index, agnoload.sample_rng().integers(1 << 62), np.random.randint(1 << 62)])


TABLE = {
    **ORDERS,
    **{f"dataset: {name}": lambda kit, make=make: over(make(kit), shuffle=True) for name, make in DATASETS.items()},
    **{f"sampler: {name}": lambda kit, make=make: sampled(make(kit)) for name, make in USERS_SAMPLERS.items()},
    **{
        f"batch sampler: {name}": lambda kit, make=make: over(range(20), 1, batch_sampler=make(kit))
        for name, make in USERS_BATCH_SAMPLERS.items()
    },
    **{f"stream: {name}": lambda kit, make=make: over(make(kit)) for name, make in STREAMS.items()},
}
"""By name, the options of a loader, made afresh at each call."""

WITH_WORKERS = {
    "shuffled": "process thread kept",
    "out of order": "process",
    "single samples": "process",
    "samples that are replaced": "process thread",
    "dataset: cached": "process",
    "dataset: whole requests": "process",
    "sampler: the process's generators, on the way": "process",
    "sampler: a state": "process thread",
    "batch sampler: uneven batches": "thread",
    "stream: plain": "process",
    "stream: shards": "process",
    "stream: shuffled plain shards": "process",
    "stream: rank": "process",
    "stream: mixture, each once": "process thread",
}
"""What loaders with 0, 1 and 2 workers resume from each other's states: a few of each kind."""
KINDS = {
    "process": {},
    "thread": {"worker_type": "thread"},
    "kept": {"persistent_workers": True},
}


@pytest.mark.parametrize("name", TABLE)
def test_it_resumes_at_every_batch(kit, name):
    check_resume(lambda: DataLoader(**TABLE[name](kit)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in WITH_WORKERS for kind in WITH_WORKERS[name].split()]
)
def test_it_resumes_with_any_number_of_workers(kit, name, kind):
    def make(num_workers):
        options = TABLE[name](kit)
        if kind == "thread" and type(options["dataset"]) is kit.Drawing:
            options["dataset"] = kit.Own()  # threads share the process's generators
        if name == "samples that are replaced" and kind == "thread":
            options["dataset"] = options["dataset"].map(lambda sample: sample[:2])
        return DataLoader(**options, num_workers=num_workers, **KINDS[kind])

    check_resume(make)


@few
@given(data=st.data(), batches=st.booleans(), size=st.integers(1, 7), tail=st.sampled_from(["pad", "drop", "keep"]))
def test_any_share_of_any_sampler_resumes_at_any_batch(samplers, batch_samplers, data, batches, size, tail):
    make_sampler = data.draw(st.sampled_from([*(batch_samplers if batches else samplers).values()]))
    world = data.draw(st.integers(1, 3))
    rank = data.draw(st.integers(0, world - 1))

    def make():
        sampler = make_sampler() if world == 1 else DistributedSampler(make_sampler(), world, rank, tail=tail)
        options = {"batch_sampler": sampler} if batches else {"sampler": sampler, "batch_size": size}
        return DataLoader(range(26), seed=3, **options)

    whole = make()
    epochs = [lists(whole), lists(whole)]
    assert len(whole) == len(epochs[0])
    stop = data.draw(st.integers(0, len(epochs[0])))
    loader = make()
    assert lists(islice(loader, stop)) == epochs[0][:stop]
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1024
    resumed = make()
    resumed.load_state_dict(through_json(state))
    assert resumed.state_dict() == state
    if stop < len(epochs[0]) or not epochs[0]:
        assert lists(resumed) == epochs[0][stop:]
    assert lists(resumed) == epochs[1]


@few
@given(data=st.data(), size=st.integers(1, 7), other=st.integers(1, 30))
def test_another_batch_size_gives_the_rest_exactly_once(samplers, data, size, other):
    make_sampler = data.draw(st.sampled_from([*samplers.values()]))
    order = flat(DataLoader(range(26), 26, sampler=make_sampler(), seed=3))
    stop = data.draw(st.integers(0, (len(order) - 1) // size))
    loader = DataLoader(range(26), size, sampler=make_sampler(), seed=3)
    assert flat(islice(loader, stop)) == order[: stop * size]
    resumed = DataLoader(range(26), other, sampler=make_sampler(), seed=3)
    resumed.load_state_dict(loader.state_dict())
    assert flat(resumed) == order[stop * size :]


@few
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    lanes=st.integers(1, 4),
    size=st.integers(1, 4),
    buffer_size=st.integers(1, 6),
    stop=st.integers(0, 12),
)
def test_shards_that_draw_while_they_are_read_ahead_resume_exactly(kit, sizes, lanes, size, buffer_size, stop):
    def make():
        return DataLoader(kit.Shards(sizes, lanes).shuffle(buffer_size), size, collate_fn=list, seed=1)

    whole = list(make())
    stop = min(stop, max(0, len(whole) - 1))
    loader, resumed = make(), make()
    assert list(islice(loader, stop)) == whole[:stop]
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert list(resumed) == whole[stop:]


# ------------------------------------------------------------------------------------------------ C14, C15

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
def test_a_new_process_resumes_in_the_middle_of_an_epoch():
    """C14."""

    def run(state):
        command = [sys.executable, "-c", SCRIPT, json.dumps(state)]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)

    whole, state = run(None)
    rest, _ = run(state)
    assert len(whole) == 52
    assert rest == whole[10:]
    assert len(json.dumps(state)) < 1024


def plain_json(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(plain_json, value))
    return value is None or type(value) in (int, str, bool)


@pytest.mark.parametrize("sampler", [agnoload.WeightedRandomSampler(np.ones(1_000_000), 1_000_000), None])
def test_a_state_is_small_and_what_was_delivered_is_not_loaded_again(kit, sampler):
    """C14, C15: 3,000 of 1,000,000 samples are left."""
    dataset = kit.Drawing(1_000_000)
    loader = DataLoader(dataset, 2, sampler=sampler, shuffle=sampler is None, seed=1)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 1024
    assert plain_json(loader.state_dict())
    calls = dataset.calls
    loader.load_state_dict(loader.state_dict() | {"position": 997_000})
    assert dataset.calls == calls
    order = loader.sampler.order(1, 0).indices(997_000, 1_000_000).tolist()
    assert [index for batch in loader for index in batch["index"].tolist()] == order
    assert dataset.calls == calls + 3_000
    assert len(loader) == 500_000


def test_a_users_sampler_is_passed_over_by_index(kit):
    """C15."""
    dataset = kit.Drawing(2_000)
    sampler = np.random.default_rng(0).permutation(2_000).tolist()
    loader, again = DataLoader(dataset, 2, sampler=sampler), DataLoader(dataset, 2, sampler=sampler)
    list(islice(loader, 90))
    state, calls = loader.state_dict(), dataset.calls
    again.load_state_dict(state)
    assert next(iter(again))["index"].tolist() == sampler[180:182]
    assert dataset.calls == calls + 2


def test_a_stream_with_a_state_is_not_read_again_and_one_without_is_with_a_warning(kit):
    """C15."""
    loader = DataLoader(kit.Placed(100), 10)
    list(islice(loader, 7))
    again = DataLoader(stream := kit.Placed(100), 10)
    again.load_state_dict(through_json(loader.state_dict()))
    assert lists(again) == [list(range(n, n + 10)) for n in (70, 80, 90)]
    assert stream.given == 30

    read = []
    loader = DataLoader(Reread(read), 10)
    list(islice(loader, 7))
    again = DataLoader(Reread(read), 10)
    again.load_state_dict(loader.state_dict())
    read.clear()
    with pytest.warns(agnoload.AgnoloadWarning, match="reads the stream again") as caught:
        assert lists(again) == [list(range(n, n + 10)) for n in (70, 80, 90)]
    assert len(caught) == 1
    assert len(read) == 100


class Reread(agnoload.IterableDataset):
    def __init__(self, read):
        self.read = read

    def __iter__(self):
        for number in range(100):
            self.read.append(number)
            yield number


# ------------------------------------------------------------------------------------------------ C16: edges


def test_the_state_after_the_last_batch_is_that_of_the_next_epoch_whether_or_not_the_loop_saw_the_end():
    """C16: k = 4 before and after the end; three resumes in one epoch are in `check_resume`."""
    unbroken = DataLoader(range(10), 3, shuffle=True, seed=2)
    epochs = [lists(unbroken), lists(unbroken)]
    for seen in (False, True):
        loader, again = (DataLoader(range(10), 3, shuffle=True, seed=2) for _ in range(2))
        batches = iter(loader)
        assert lists(islice(batches, 4)) == epochs[0]
        if seen:
            assert list(batches) == []
        again.load_state_dict(loader.state_dict())
        assert (again.state_dict(), again.epoch) == (loader.state_dict(), 1)
        assert lists(again) == epochs[1]


def test_a_trailing_batch_that_is_left_out_does_not_make_an_epoch_of_its_own():
    bad = [LookupError(8), LookupError(9)]
    data = agnoload.Subset(range(10), range(10)).map(lambda index: index if index < 8 else raises(bad[index - 8]))
    loader, again = (DataLoader(data, 4, on_error="skip") for _ in range(2))
    list(islice(loader, 2))
    again.load_state_dict(loader.state_dict())
    assert lists(again) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert again.epoch == 2


def raises(error):
    raise error


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_an_epoch_without_a_batch_is_one(sizes):
    class Varying(agnoload.IterableDataset):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(sizes[self.epoch]))

    check_resume(lambda num_workers=0: DataLoader(Varying(), 2, num_workers=num_workers, worker_type="thread"))


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


# ------------------------------------------------------------------------------------------------ C17: other ranks


def rank_loader(data, rank, world, batch_size, workers=0, tail="pad"):
    sampler = DistributedSampler(range(64), world, rank, tail=tail)
    return DataLoader(data, batch_size, sampler=sampler, seed=0, num_workers=workers)


@pytest.mark.slow
def test_four_ranks_of_four_resume_as_two_of_eight_at_the_same_global_batch(kit):
    """C17: with other workers, too; a change of ranks changes no augmentation."""
    unbroken, states = [], []
    for rank in range(4):
        with rank_loader(kit.Drawing(64), rank, 4, 4, 2 if rank == 0 else 0) as loader:
            batches = iter(loader)
            first = next(batches)
            states.append(loader.state_dict())
            unbroken.append([first, *batches])
    assert all(state == states[0] for state in states)
    found = []
    for rank in range(2):
        with rank_loader(kit.Drawing(64), rank, 2, 8, 3 * rank) as loader:
            loader.load_state_dict(through_json(states[0]))
            found.append(list(loader))
            assert loader.epoch == 1

    def samples(runs, number):
        """Index and own draw."""
        return {
            pair
            for run in runs
            for pair in zip(*(run[number][name].tolist() for name in ("index", "own")), strict=True)
        }

    for number in range(3):
        assert samples(found, number) == samples(unbroken, number + 1)
    everything = samples(unbroken, 0).union(*(samples(found, number) for number in range(3)))
    assert sorted(index for index, _ in everything) == list(range(64))


@few
@given(world=st.integers(1, 8), batch_size=st.integers(1, 16), taken=st.integers(0, 4))
def test_with_another_global_batch_the_rest_comes_exactly_once(world, batch_size, taken):
    """C17."""
    ranks = [rank_loader(range(64), rank, 4, 4) for rank in range(4)]
    done = flat(chain.from_iterable(islice(rank, taken) for rank in ranks))
    rest = []
    for rank in range(world):
        loader = rank_loader(range(64), rank, world, batch_size, tail="keep")
        loader.load_state_dict(ranks[0].state_dict())
        rest += flat(loader)
    left = set(range(64)) - set(done) or set(range(64))
    assert sorted(rest) == sorted(left)


def test_a_batch_sampler_that_makes_its_batches_as_wholes_needs_its_own_size():
    def loader(size):
        return DataLoader(range(30), batch_sampler=agnoload.BalancedBatchSampler(np.arange(30) % 3, size), seed=0)

    first = loader(6)
    next(iter(first))
    with pytest.raises(StateError):
        loader(5).load_state_dict(first.state_dict())


class Backwards(Sampler):
    """A user's sampler."""

    def __iter__(self):
        return iter(range(25, -1, -1))

    def __len__(self):
        return 26


def test_another_sampler_and_other_data_are_refused(samplers, batch_samplers):
    """C24, C25."""
    made = [{"sampler": make()} for make in samplers.values()]
    made += [{"batch_sampler": make()} for make in batch_samplers.values()]
    for options in made:
        with pytest.raises(StateError):
            DataLoader(range(26), sampler=Backwards(), seed=3).load_state_dict(
                DataLoader(range(26), seed=3, **options).state_dict()
            )
    with pytest.raises(StateError, match=r"26.*27"):
        DataLoader(range(27), seed=3).load_state_dict(DataLoader(range(26), seed=3).state_dict())


# ------------------------------------------------------------------------------------------------ out of order


class Gate:
    """A named pipe; each byte lets one sample go that waits for it."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = path
        self.pipe = os.open(path, os.O_RDWR)  # both ends, so that nobody waits for anybody to open it

    def let_go(self, count=1):
        os.write(self.pipe, b"." * count)


@pytest.fixture
def gate(tmp_path):
    made = Gate(tmp_path / "gate")
    yield made
    made.let_go(100)
    os.close(made.pipe)


def test_out_of_order_the_rest_comes_exactly_once(kit, gate):
    """C47: one slow sample holds up no other, and a state knows which were delivered."""
    options = {"num_workers": 2, "in_order": False, "prefetch_factor": 4}
    with DataLoader(kit.Waiting(12, gate.path), 1, **options) as loader:
        batches = iter(loader)
        early = [next(batches)[0].item() for _ in range(3)]
        state = through_json(loader.state_dict())
        early += [next(batches)[0].item() for _ in range(8)]
        assert sorted(early) == list(range(1, 12))  # sample 0 is still waiting
        gate.let_go()
        assert [batch[0].item() for batch in batches] == [0]
    assert state["position"] == 0
    assert len(json.dumps(state)) < 1024
    left = sorted({0, *range(12)} - set(early[:3]))
    with DataLoader(kit.Waiting(12, gate.path), 1, **options) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        gate.let_go()
        assert sorted(batch[0].item() for batch in again) == left
    again = DataLoader(range(12), 1)  # and in order, with another stop
    again.load_state_dict(state)
    batches = iter(again)
    assert next(batches).item() == 0
    once_more = DataLoader(range(12), 1)
    once_more.load_state_dict(through_json(again.state_dict()))
    assert flat(batches) == flat(once_more) == left[1:]
    with pytest.raises(StateError, match=r"batch_size 1.*has 2"):
        DataLoader(range(12), 2).load_state_dict(state)
    sampler = DistributedSampler(range(12), 2, 1, shuffle=False)
    facts = state["facts"] | {"sampler": sampler.identity()}
    with pytest.raises(StateError, match=r"rank 0.*has 1"):
        DataLoader(range(12), 1, sampler=sampler).load_state_dict(state | {"facts": facts})


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------------------ C57: steps


@few
@given(n=st.integers(1, 12), size=st.integers(1, 5), steps=st.integers(0, 9), data=st.data())
def test_steps_cross_epochs_no_batch_spans_two_and_a_state_within_gives_the_rest(n, size, steps, data):
    """C57."""

    def make():
        return DataLoader(range(n), size, shuffle=True, seed=6)

    epochs = make()
    wanted = list(islice(chain.from_iterable(lists(epochs) for _ in range(steps)), steps))
    loader, resumed = make(), make()
    stop = data.draw(st.integers(0, steps))
    batches = loader.steps(steps)
    assert lists(islice(batches, stop)) == wanted[:stop]
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert lists(batches) == lists(resumed.steps(steps - stop)) == wanted[stop:]


@pytest.mark.parametrize("kind", [{}, {"worker_type": "thread"}])
def test_steps_resume_with_workers_as_without(kind):
    """C57: the sizes of five steps over ten samples, and the fifth once more."""

    def make(workers):
        return DataLoader(range(10), 4, shuffle=True, num_workers=workers, seed=6, **kind)

    with make(2) as loader, make(2) as again:
        batches = loader.steps(5)
        found = lists(islice(batches, 4))
        again.load_state_dict(loader.state_dict())
        fifth = lists(batches)
        assert [len(batch) for batch in found + fifth] == [4, 4, 2, 4, 4]
        assert lists(again.steps(1)) == fifth
    assert flat([*found[3:], *fifth]) == RandomSampler(range(10)).order(6, 1).indices(0, 8).tolist()
