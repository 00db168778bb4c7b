"""The batches, and all randomness inside of them, do not depend on who loads them, or when."""

from __future__ import annotations

import functools
import random
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import AgnoloadWarning, DataLoader

SOURCES = ("rng", "numpy", "python", "normal", "gauss")


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


class Whole(Draws):
    """One call a request: all its draws are from one generator."""

    def __getitems__(self, indices):
        rng = agnoload.sample_rng()
        return [{"index": index, "rng": int(rng.integers(1 << 62)), "numpy": np.random.random()} for index in indices]


class Stream(agnoload.IterableDataset):
    def __iter__(self):
        return map(Draws().__getitem__, range(22))


class Sharded(agnoload.IterableDataset):
    num_shards = 7
    lanes = 4

    def shard(self, number):
        return map(Draws().__getitem__, range(100 * number, 101 * number + 2))


LABELS = np.arange(22) % 3
KINDS = {
    "map": lambda: {"dataset": Draws(22), "shuffle": True},
    "whole requests": lambda: {"dataset": Whole(22), "shuffle": True},
    "batches of the user's": lambda: {"dataset": Draws(22), "batch_sampler": [[3, 1], [2], [21, 20, 19, 0], [7, 7]]},
    "balanced": lambda: {"dataset": Draws(22), "batch_sampler": agnoload.BalancedBatchSampler(LABELS, 6)},
    "classes": lambda: {"dataset": Draws(22), "batch_sampler": agnoload.ClassUniformBatchSampler(LABELS, 3, 2)},
    "cyclic": lambda: {"dataset": Draws(22), "batch_sampler": agnoload.CyclicClassBatchSampler(LABELS, 2, 6)},
    "buckets": lambda: {
        "dataset": Draws(22),
        "batch_sampler": agnoload.BucketBatchSampler(np.arange(22) % 9 + 1, max_tokens=40),
    },
    "cut": lambda: {
        "dataset": Draws(22),
        "batch_sampler": agnoload.BatchSampler(agnoload.RandomSampler(range(22)), 5, drop_last=True),
    },
    "stream": lambda: {"dataset": Stream()},
    "shards": lambda: {"dataset": Sharded()},
    "shuffled shards": lambda: {"dataset": Sharded().shuffle(3)},
}
UNBROKEN = functools.cache(lambda kind: epochs(**KINDS[kind](), collate_fn=DrawingCollate()))


# ---------------------------------------------------------------------------------------------- for any workers


@pytest.mark.slow
@settings(max_examples=20)
@given(
    kind=st.sampled_from([*KINDS]),
    workers=st.integers(1, 3),
    prefetch_factor=st.sampled_from([1, 2, 4]),
    persistent=st.booleans(),
)
def test_c07_all_draws_are_the_same_for_any_number_of_workers(kind, workers, prefetch_factor, persistent):
    options = {"num_workers": workers, "prefetch_factor": prefetch_factor, "persistent_workers": persistent}
    assert epochs(**KINDS[kind](), collate_fn=DrawingCollate(), **options) == UNBROKEN(kind)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"])
@pytest.mark.filterwarnings("ignore:.*fork:agnoload.AgnoloadWarning")
def test_c07_all_draws_are_the_same_for_every_start_method(method):
    for kind, ahead in (("map", 4), ("map", 1), ("shards", 4)):
        options = {"multiprocessing_context": method, "num_workers": 2, "prefetch_factor": ahead}
        assert epochs(**KINDS[kind](), collate_fn=DrawingCollate(), **options) == UNBROKEN(kind), kind


@settings(max_examples=20)
@given(
    stream=st.sampled_from([None, agnoload.IterableDataset.map, lambda s, f: s.shuffle(5).map(f)]),
    workers=st.integers(1, 4),
    prefetch_factor=st.sampled_from([1, 2, 4]),
)
def test_c07_draws_of_sample_rng_are_the_same_in_threads(stream, workers, prefetch_factor):
    data = OwnDraws() if stream is None else stream(Numbers(), OwnDraws().__getitem__)
    options = {"shuffle": True} if stream is None else {}
    options["collate_fn"] = DrawingCollate(own_only=True)
    ways = {"worker_type": "thread", "num_workers": workers, "prefetch_factor": prefetch_factor}
    assert epochs(data, **options, **ways) == epochs(data, **options)


class Numbers(agnoload.IterableDataset):
    def __iter__(self):
        return iter(range(30))


def test_c07_in_threads_one_warning_says_what_is_shared():
    with pytest.warns(AgnoloadWarning, match=r"random and np\.random.*sample_rng") as caught:
        found = columns(Draws(), shuffle=True, seed=5, worker_type="thread", num_workers=2)
    assert len(caught) == 1
    assert found["rng"] == columns(Draws(), shuffle=True, seed=5)["rng"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.filterwarnings("ignore:.*fork:agnoload.AgnoloadWarning")
def test_a_framework_draws_the_same_in_samples_maps_and_collate_functions(method):
    torch = pytest.importorskip("torch")

    class Rand(agnoload.IterableDataset):
        def __iter__(self):
            return ({"index": index, "rand": torch.rand(3).numpy()} for index in range(12))

    def collate(samples):
        return agnoload.default_collate(samples) | {"collated": torch.randn(2).numpy()}

    before = torch.get_rng_state()
    stream = Rand().map(lambda sample: sample | {"mapped": torch.randn(1).numpy()})
    wanted = epochs(stream, collate_fn=collate)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({batch[name] for batch in chain(*wanted) for name in ("rand", "collated", "mapped")}) == 3 * 6
    assert epochs(stream, collate_fn=collate, multiprocessing_context=method, num_workers=2) == wanted
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------------------------- no draw twice


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Draws(), Stream(), Sharded()], ids=lambda data: type(data).__name__)
def test_c06_no_draw_comes_twice_over_samples_workers_and_epochs(data, workers):
    drawn = columns(data, num_workers=workers)
    assert {source: len(set(drawn[source])) for source in SOURCES} == dict.fromkeys(SOURCES, len(drawn["index"]))


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_c07_the_epochs_differ(kind):
    first, second = UNBROKEN(kind)
    for name in ("rng", "numpy", "collated", "numpy_collated", "python_collated"):
        assert len({batch[name] for batch in chain(first, second)}) == len(first) + len(second)
    assert ([batch["index"] for batch in first] == [batch["index"] for batch in second]) == (kind == "stream")


def test_an_index_that_is_drawn_twice_is_augmented_twice():
    assert len(set(columns(Draws(), sampler=[7] * 64, num_workers=2)["rng"])) == 3 * 64


def test_single_samples_draw_what_they_draw_with_workers():
    def load(workers):
        with DataLoader(Draws(9), None, shuffle=True, seed=1, num_workers=workers) as loader:
            return [[repr(sample) for sample in loader] for _ in range(2)]

    assert load(0) == load(2)


def test_whole_requests_draw_from_the_first_samples_own_generator():
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


@given(sizes=st.tuples(st.integers(1, 22), st.integers(1, 22)), seed=st.integers(0, 2**64))
@settings(max_examples=30)
def test_another_batch_size_changes_no_draw_of_sample_rng(sizes, seed):
    def draws(size):
        loader = DataLoader(OwnDraws(22), size, shuffle=True, seed=seed)
        return [(int(i), int(r)) for batch in loader for i, r in zip(batch["index"], batch["rng"], strict=True)]

    assert draws(sizes[0]) == draws(sizes[1])


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_c08_ranks_share_no_draw(kind, workers, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone, drawn = columns(Draws(), count=1, seed=0)["rng"], []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        options = {"sampler": agnoload.DistributedSampler(range(64), shuffle=False)} if kind == "map" else {}
        drawn.append(columns(Draws() if kind == "map" else Stream(), count=1, seed=0, num_workers=workers, **options))
        if kind == "map":
            assert drawn[-1]["rng"] == [alone[index] for index in drawn[-1]["index"]]
    for name in SOURCES:
        assert len(set(drawn[0][name])) == (32 if kind == "map" else 22)
        assert not set(drawn[0][name]) & set(drawn[1][name]), name
