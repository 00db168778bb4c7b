"""The batches, and all randomness inside of them, do not depend on who loads them, or when."""

from __future__ import annotations

import random
import warnings
from itertools import chain

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadWarning, DataLoader

SOURCES = ("rng", "numpy", "python", "normal", "gauss")
GRID = [("forkserver", workers, ahead) for workers in (1, 2, 3) for ahead in (1, 4)]
GRID += [pytest.param(("spawn", 2, 4), marks=pytest.mark.slow), ("fork", 1, 4), ("fork", 3, 1)]
SHORT = [("forkserver", 1, 4), ("forkserver", 3, 1), ("spawn", 2, 1), ("fork", 2, 4)]


class Draws(agnoload.Dataset):
    """62 bits from each source, and the worker's epoch."""

    def __init__(self, length=64):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {
            "index": index,
            "rng": int(agnoload.sample_rng().integers(1 << 62)),
            "numpy": int(np.random.randint(1 << 62)),
            "python": random.getrandbits(62),
            "normal": np.random.standard_normal(),  # one of a pair: the other is held back
            "gauss": random.gauss(0.0, 1.0),
        }


class OwnDraws(Draws):
    """`sample_rng()` only: what threads promise."""

    def __getitem__(self, index):
        return {"index": index, "rng": int(agnoload.sample_rng().integers(1 << 62))}


class DrawingCollate:
    """A collate function that draws too."""

    def __init__(self, own_only=False):
        self.own_only = own_only

    def __call__(self, samples):
        batch = agnoload.default_collate(samples)
        batch["collated"] = agnoload.sample_rng().random(2)
        if not self.own_only:
            batch["numpy_collated"] = np.random.random(2)
            batch["python_collated"] = np.array([random.random()])
        return batch


def epochs(dataset, batch_size=4, count=2, **options):
    """Each epoch's batches as plain values, bit by bit."""
    if "batch_sampler" in options:
        batch_size = 1
    with DataLoader(dataset, batch_size, **{"seed": 5, **options}) as loader:
        return [
            [{name: (str(a.dtype), a.shape, a.tobytes()) for name, a in batch.items()} for batch in loader]
            for _ in range(count)
        ]


def columns(dataset, count=3, **options):
    """All values of each field, over some epochs."""
    found = {}
    with DataLoader(dataset, 4, **options) as loader:
        for _ in range(count):
            for batch in loader:
                for name, values in batch.items():
                    found.setdefault(name, []).extend(values.tolist())
    return found


def options_of(method, workers, ahead):
    return {"multiprocessing_context": method, "num_workers": workers, "prefetch_factor": ahead}


@pytest.mark.parametrize("workers", [0, 2])
def test_c06_no_draw_comes_twice_over_samples_workers_and_epochs(workers):
    drawn = columns(Draws(), num_workers=workers)
    assert {source: len(set(drawn[source])) for source in SOURCES} == dict.fromkeys(SOURCES, 3 * 64)


def test_c07_the_epochs_differ():
    first, second = epochs(Draws(), shuffle=True)
    assert [batch["index"] for batch in first] != [batch["index"] for batch in second]
    first, second = epochs(Draws(), shuffle=False)
    assert all(one["rng"] != other["rng"] for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("way", GRID, ids=str)
def test_c07_the_same_for_any_workers_start_method_and_prefetch(way):
    assert epochs(Draws(), shuffle=True, **options_of(*way)) == epochs(Draws(), shuffle=True)


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_c07_the_same_in_threads(workers, ahead):
    wanted = epochs(OwnDraws(), shuffle=True, collate_fn=DrawingCollate(own_only=True))
    options = {"worker_type": "thread", "num_workers": workers, "prefetch_factor": ahead}
    assert epochs(OwnDraws(), shuffle=True, collate_fn=DrawingCollate(own_only=True), **options) == wanted


def test_c07_in_threads_one_warning_says_what_is_shared():
    with pytest.warns(AgnoloadWarning, match=r"random and np\.random.*sample_rng") as caught:
        found = columns(Draws(), shuffle=True, seed=5, worker_type="thread", num_workers=2)
    assert len(caught) == 1
    assert found["rng"] == columns(Draws(), shuffle=True, seed=5)["rng"]


def test_in_threads_nothing_is_said_to_whom_draws_from_the_sample_only():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns(OwnDraws(), worker_type="thread", num_workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("way", SHORT, ids=str)
def test_a_collate_function_draws_the_same(way):
    wanted = epochs(Draws(), shuffle=True, collate_fn=DrawingCollate())
    assert len({batch["collated"] for batch in chain(*wanted)}) == 32
    assert len({batch["numpy_collated"] for batch in chain(*wanted)}) == 32
    assert epochs(Draws(), shuffle=True, collate_fn=DrawingCollate(), **options_of(*way)) == wanted


SAMPLERS = {
    "balanced": lambda: agnoload.BalancedBatchSampler(np.arange(64) % 3, 6),
    "classes": lambda: agnoload.ClassUniformBatchSampler(np.arange(64) % 5, 3, 2),
    "cyclic": lambda: agnoload.CyclicClassBatchSampler(np.arange(64) % 4, 2, 6),
    "buckets": lambda: agnoload.BucketBatchSampler(np.arange(64) % 9 + 1, max_tokens=40),
    "cut": lambda: agnoload.BatchSampler(agnoload.RandomSampler(range(64)), 5, drop_last=True),
    "strangers": lambda: [[3, 1], [2], [63, 62, 61, 0]],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_through_batch_samplers(name):
    wanted = epochs(Draws(), batch_sampler=SAMPLERS[name]())
    assert epochs(Draws(), batch_sampler=SAMPLERS[name](), num_workers=2, prefetch_factor=4) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_kept_workers_load_what_fresh_ones_load(persistent):
    wanted = epochs(Draws(), shuffle=True, count=3)
    assert epochs(Draws(), shuffle=True, count=3, num_workers=2, persistent_workers=persistent) == wanted


def test_an_index_that_is_drawn_twice_is_augmented_twice():
    assert len(set(columns(Draws(), sampler=[7] * 64, num_workers=2)["rng"])) == 3 * 64


def test_single_samples_are_the_same_too():
    def load(workers):
        with DataLoader(Draws(9), None, shuffle=True, seed=1, num_workers=workers) as loader:
            return [[repr(sample) for sample in loader] for _ in range(2)]

    assert load(0) == load(2)


class Whole(Draws):
    """One call a request: all its draws are from one generator."""

    def __getitems__(self, indices):
        rng = agnoload.sample_rng()
        return [{"index": index, "rng": int(rng.integers(1 << 62)), "numpy": np.random.random()} for index in indices]


@pytest.mark.slow
def test_whole_requests_draw_the_same_from_the_first_samples_own_generator():
    wanted = epochs(Whole(), shuffle=True, collate_fn=DrawingCollate())
    for way in SHORT:
        assert epochs(Whole(), shuffle=True, collate_fn=DrawingCollate(), **options_of(*way)) == wanted
    whole, single = (columns(dataset, count=1, shuffle=True, seed=5) for dataset in (Whole(), Draws()))
    assert whole["rng"][::4] == single["rng"][::4]
    assert len(set(whole["rng"]) | set(single["rng"])) == 64 + 48


def test_a_generator_is_made_once_and_set_for_each_sample():
    class Made(Draws):
        def __getitem__(self, index):
            made.add(id(agnoload.sample_rng()))
            assert agnoload.sample_rng().bit_generator is agnoload.sample_rng().bit_generator
            return index

    made = set()
    list(DataLoader(Made(), 4))
    assert len(made) == 1


def test_another_batch_size_changes_no_draw_of_sample_rng():
    def draws(size):
        loader = DataLoader(Draws(), size, shuffle=True, seed=3)
        return [(int(i), int(r)) for batch in loader for i, r in zip(batch["index"], batch["rng"], strict=True)]

    assert draws(4) == draws(7) == draws(64)


@pytest.mark.slow
def test_a_framework_draws_the_same():
    torch = pytest.importorskip("torch")

    class Rand(Draws):
        def __getitem__(self, index):
            return {"index": index, "rand": torch.rand(3).numpy(), "rng": int(agnoload.sample_rng().integers(1 << 62))}

    def collate(samples):
        return agnoload.default_collate(samples) | {"collated": torch.randn(2).numpy()}

    before = torch.get_rng_state()
    wanted = epochs(Rand(16), collate_fn=collate, shuffle=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({batch["collated"] for batch in chain(*wanted)}) == 8
    for workers in (1, 3):
        assert epochs(Rand(16), collate_fn=collate, shuffle=True, num_workers=workers) == wanted
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------------------------- the whole grid


class WholeStream(agnoload.IterableDataset):
    def __iter__(self):
        return map(Draws().__getitem__, range(22))


class WholeShards(agnoload.IterableDataset):
    num_shards = 7
    lanes = 4

    def shard(self, number):
        return map(Draws().__getitem__, range(100 * number, 101 * number + 2))


WHOLE = {
    "map": ({"shuffle": True}, lambda: Draws(22)),
    "batch sampler": ({"batch_sampler": [[3, 1], [2], [21, 20, 19, 0], [7, 7]]}, lambda: Draws(22)),
    "balanced": ({"batch_sampler": agnoload.BalancedBatchSampler(np.arange(22) % 3, 6, seed=1)}, lambda: Draws(22)),
    "stream": ({}, WholeStream),
    "shards": ({}, WholeShards),
    "shuffled shards": ({}, lambda: WholeShards().shuffle(3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*fork:agnoload.AgnoloadWarning")
def test_every_source_in_samples_and_collate_function_for_every_kind_of_data(method, workers):
    for name, (options, make) in WHOLE.items():
        wanted = epochs(make(), collate_fn=DrawingCollate(), **options)
        way = options_of(method, workers, 2) | {"persistent_workers": True}
        assert epochs(make(), collate_fn=DrawingCollate(), **options, **way) == wanted, name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*fork:agnoload.AgnoloadWarning")
def test_a_framework_draws_the_same_for_every_start_method_and_in_streams(method):
    torch = pytest.importorskip("torch")

    class Rand(agnoload.IterableDataset):
        def __iter__(self):
            return ({"index": index, "rand": torch.rand(3).numpy()} for index in range(12))

    def collate(samples):
        return agnoload.default_collate(samples) | {"collated": torch.randn(2).numpy()}

    stream = Rand().map(lambda sample: sample | {"mapped": torch.randn(1).numpy()})
    wanted = epochs(stream, collate_fn=collate)
    assert len({batch[name] for batch in chain(*wanted) for name in ("rand", "collated", "mapped")}) == 3 * 6
    assert epochs(stream, collate_fn=collate, multiprocessing_context=method, num_workers=2) == wanted


# ---------------------------------------------------------------------------------------------- streams


class Stream(agnoload.IterableDataset):
    def __iter__(self):
        for number in range(30):
            yield Draws.__getitem__(self, number)


class Sharded(agnoload.IterableDataset):
    num_shards = 7
    lanes = 4

    def shard(self, number):
        for place in range(number + 2):
            yield Draws.__getitem__(self, 100 * number + place)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [Stream, Sharded])
@pytest.mark.parametrize("way", SHORT, ids=str)
def test_streams_are_the_same(stream, way):
    wanted = epochs(stream(), collate_fn=DrawingCollate())
    assert wanted[0] != wanted[1]
    assert epochs(stream(), collate_fn=DrawingCollate(), **options_of(*way)) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("stream", [Stream, Sharded])
def test_no_draw_comes_twice_in_a_stream(stream):
    drawn = columns(stream(), num_workers=2)
    assert {source: len(set(drawn[source])) for source in SOURCES} == dict.fromkeys(SOURCES, len(drawn["index"]))


@pytest.mark.parametrize("workers", [0, 2])
def test_c08_ranks_share_no_draw_in_a_stream(workers, monkeypatch):
    drawn = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with DataLoader(Stream(), 4, seed=0, num_workers=workers) as loader:
            batches = list(loader)
        drawn.append({name: {v for b in batches for v in b[name].tolist()} for name in ("rng", "numpy", "python")})
    for name in ("rng", "numpy", "python"):
        assert len(drawn[0][name]) == 30
        assert not drawn[0][name] & drawn[1][name], name


@pytest.mark.parametrize("workers", [0, 2])
def test_c08_ranks_share_no_draw(workers):
    alone = columns(Draws(), count=1, seed=0)["rng"]
    drawn = []
    for rank in range(2):
        sampler = agnoload.DistributedSampler(range(64), 2, rank, shuffle=False)
        with DataLoader(Draws(), 4, sampler=sampler, seed=0, num_workers=workers) as loader:
            batches = list(loader)
        drawn.append({name: {v for b in batches for v in b[name].tolist()} for name in ("rng", "numpy", "python")})
        for batch in batches:
            for index, value in zip(batch["index"].tolist(), batch["rng"].tolist(), strict=True):
                assert alone[index] == value
    for name in ("rng", "numpy", "python"):
        assert len(drawn[0][name]) == 32
        assert not drawn[0][name] & drawn[1][name], name
