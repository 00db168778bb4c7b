"""What comes out of a loader, with any number and kind of workers."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import CollateError, DataLoader, OptionError, get_worker_info
from agnoload.testing.resume import comparable

WORKERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "one": {"num_workers": 1},
    "two": {"num_workers": 2},
    "three": {"num_workers": 3},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}
Pair = namedtuple("Pair", "image label")
few = settings(max_examples=50, deadline=None)


class Mapped:
    """Samples made by a function of the index."""

    def __init__(self, function: Any, length: int = 10) -> None:
        self.function, self.length = function, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.function(index)


class Gathering(Mapped):
    """Gives whole requests, and nothing one by one."""

    def __init__(self, function: Any) -> None:
        super().__init__(None, 20)
        self.gather = function

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> Any:
        return self.gather(indices)


@dataclass
class Scan:
    voxels: Any
    name: str


class Tenfold(float):
    """A number that is batched its own way."""


def tenfold(batch: list[float], *, collate_fn_map: Any = None) -> Any:
    return np.array(batch, np.float32) * 10


def lists(loader: Any) -> list[Any]:
    return [np.asarray(batch).tolist() for batch in loader]


# ------------------------------------------------------------------------------------------------ sizes and order


@few
@given(st.integers(0, 20), st.integers(1, 11), st.booleans(), st.booleans(), st.integers(0, 9))
def test_batches_cover_the_dataset_in_order_or_shuffled_by_seed_and_epoch(
    n: int, size: int, drop_last: bool, shuffle: bool, seed: int
) -> None:
    loader = DataLoader(range(n), size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    epochs = [lists(loader), lists(loader)]
    for epoch, found in enumerate(epochs):
        order = (
            agnoload.RandomSampler(range(n)).order(seed, epoch).indices(0, n).tolist() if shuffle and n else range(n)
        )
        whole = [list(order)[at : at + size] for at in range(0, n, size)]
        assert found == [batch for batch in whole if len(batch) == size or not drop_last]
        assert sorted(order) == list(range(n))
        assert len(loader) == len(found)


KEYS = (
    st.integers(-(2**70), 2**70) | st.text() | st.none() | st.booleans() | st.binary() | st.floats(allow_nan=False)
    | st.frozensets(st.integers()) | st.tuples(st.text(), st.integers())
)  # fmt: skip
INDICES = st.sampled_from([np.int8, np.uint16, np.int64, np.uint64, np.array]) | st.just(int)


@few
@given(st.lists(KEYS, max_size=9), st.lists(st.tuples(st.integers(0, 99), INDICES), max_size=5), st.integers(1, 4))
def test_indices_reach_the_dataset_as_python_ints_and_keys_of_other_types_untouched(
    keys: list[Any], indices: list[Any], size: int
) -> None:
    def named(key: Any) -> str:
        return f"{type(key).__name__} {key!r}"

    given = [*keys, *(kind(index) for index, kind in indices)]
    wanted = [*map(named, keys), *(f"int {index}" for index, _ in indices)]
    batches = [batch for batch in (given[:size], given[size:]) if batch]
    for options in ({"batch_size": size, "sampler": given}, {"batch_sampler": batches}):
        assert [said for batch in DataLoader(Mapped(named), **options) for said in batch] == wanted
    assert list(DataLoader(Mapped(named), None, sampler=given)) == wanted


def test_a_sampler_without_a_length_gives_a_loader_without_one() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

    loader = DataLoader(range(10), 2, sampler=Endless())
    assert lists(loader) == [[1, 2], [3]]
    with pytest.raises(TypeError):
        len(loader)


# ------------------------------------------------------------------------------------------------ any workers


def unlike(index: int) -> Any:
    return {"x": np.full((2, 3), index, np.float16), "name": f"n{index}", "n": index, "z": (np.int8(1), None)}


def numbers(index: int) -> Any:
    return {"f": np.float32(1.5), "i": np.int16(7), "b": True, "n": 3, "d": 2.5, "own": Tenfold(index), "l": [index, 5]}


def structure(index: int) -> Any:
    return Pair(np.zeros((2, 2), ">f4"), {"scan": Scan(index, f"n{index}"), "t": (index, [2.5])})


def anything(samples: list[Any]) -> Any:
    return [Scan(np.stack(samples), "two"), Pair(samples[0], len(samples)), {1, 2}, None]


def of_numbers(*indices: int) -> dict[str, Any]:
    n = len(indices)
    own = np.array([10 * index for index in indices], np.float32)
    columns = [np.array(indices), np.full(n, 5)]
    return {
        "f": np.full(n, 1.5, np.float32), "i": np.full(n, 7, np.int16), "b": np.full(n, True), "n": np.full(n, 3),
        "d": np.full(n, 2.5), "own": own, "l": columns,
    }  # fmt: skip


def of_structure(*indices: int) -> Any:
    scans = Scan(np.array(indices), [f"n{index}" for index in indices])
    times = (np.array(indices), [np.full(len(indices), 2.5)])
    return Pair(np.zeros((len(indices), 2, 2), ">f4"), {"scan": scans, "t": times})


X, Y = np.arange(600, dtype=np.float32).reshape(100, 6), np.arange(100, dtype=np.int16)
ages = {"ada": 36, "bob": 40, "cyd": 2}
together = Gathering(lambda indices: agnoload.Batch({"indices": indices, "call": np.array([len(indices)])}))
CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "nothing": ({"dataset": [], "batch_size": 4, "shuffle": True}, []),
    "a sampler": (
        {"dataset": range(10), "batch_size": 2, "sampler": [7, 1, 7, 3, 0]},
        [np.array([7, 1]), np.array([7, 3]), np.array([0])],
    ),
    "batches": (
        {"dataset": range(10), "batch_sampler": [[3, 1], [2], (4, 5, 6)]},
        [np.array([3, 1]), np.array([2]), np.array([4, 5, 6])],
    ),
    "names": ({"dataset": ages, "batch_sampler": [["bob", "ada"], ["cyd"]]}, [np.array([40, 36]), np.array([2])]),
    "samples as they are": (
        {"dataset": Mapped(unlike, 5), "batch_size": None},
        [agnoload.default_convert(unlike(n)) for n in range(5)],
    ),
    "samples through a function": (
        {"dataset": range(3), "batch_size": None, "collate_fn": lambda sample: ["got", sample]},
        [["got", n] for n in range(3)],
    ),
    "whole requests": (
        {"dataset": Gathering(lambda indices: [index * 10 for index in indices]), "batch_size": 8},
        [np.arange(0, 80, 10), np.arange(80, 160, 10), np.arange(160, 200, 10)],
    ),
    "batches that are made": (
        {"dataset": together, "batch_size": 8, "collate_fn": lambda batch: 1 / 0},
        [{"indices": list(range(n, m)), "call": np.array([m - n])} for n, m in ((0, 8), (8, 16), (16, 20))],
    ),
    "rows": (
        {"dataset": agnoload.ArrayDataset(x=X, y=Y), "batch_size": 32},
        [{"x": X[n : n + 32], "y": Y[n : n + 32]} for n in range(0, 100, 32)],
    ),
    "what a collate_fn returns": (
        {"dataset": Mapped(lambda i: np.full(3, i), 2), "batch_size": 2, "collate_fn": anything},
        [anything([np.full(3, 0), np.full(3, 1)])],
    ),
    "dtypes": ({"dataset": Mapped(numbers, 3), "batch_size": 2}, [of_numbers(0, 1), of_numbers(2)]),
    "structures": ({"dataset": Mapped(structure, 5), "batch_size": 3}, [of_structure(0, 1, 2), of_structure(3, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("workers", ["inline", pytest.param("two", marks=pytest.mark.slow), "threads"])
def test_batches_are_what_was_asked_for_whoever_loads_them(workers: str) -> None:
    """C2, C3, C4, C46: values, dtypes, shapes, order and types of containers."""
    agnoload.register_collate(Tenfold, tenfold)
    try:
        for name, (options, wanted) in CASES.items():
            with DataLoader(**options, **WORKERS[workers]) as loader:
                found = list(loader)
                assert len(loader) == len(wanted), name
            assert list(map(comparable, found)) == list(map(comparable, wanted)), name
    finally:
        agnoload.register_collate(Tenfold, None)


def boxed(index: int) -> Any:
    return {"target": {"boxes": np.zeros({17: 3, 42: 4}.get(index, 2))}, "y": None if index == 5 else np.zeros(2)}


LACKING = [{"a": 1, "b": 2}, {"a": 3}]
MISFITS: list[tuple[Any, list[int], type[Exception], tuple[str, ...]]] = [
    (Mapped(boxed, 50), [17, 42], CollateError, ("target.boxes", "17", "42", "(3,)", "(4,)", "ragged_collate")),
    (Mapped(boxed, 50), [5, 6], CollateError, ("field y", "5", "NoneType")),
    (LACKING, [0, 1], CollateError, ("'b'", "indices")),
    (LACKING, [1, 0], CollateError, ("'b'", "indices")),
    ([[1, 2], [3]], [0, 1], CollateError, ("2", "1", "indices 0 and 1")),
    (Gathering(lambda indices: indices[1:]), list(range(8)), OptionError, ("8 indices", "got 7")),
]


@pytest.mark.parametrize("workers", ["inline", pytest.param("two", marks=pytest.mark.slow), "threads"])
def test_samples_that_do_not_fit_are_named_by_field_and_index(workers: str) -> None:
    """C1, C3."""
    for dataset, batch, error, words in MISFITS:
        loader = DataLoader(dataset, batch_sampler=[batch], **WORKERS[workers])
        with loader, pytest.raises(error) as caught:
            list(loader)
        text = "\n".join([str(caught.value), *caught.value.__notes__])
        assert [word for word in words if word not in text] == []


# ------------------------------------------------------------------------------------------------ who loads


def who(index: int) -> Any:
    info: Any = get_worker_info()
    return [info.id, info.num_workers, info.seed, info.epoch, len(info.dataset), os.getpid(), index]


def prepare(folder: Any, count: int, worker: int) -> None:
    """Wait until all workers are there, so that each gets some of the samples."""
    info = get_worker_info()
    assert info is not None
    (folder / f"{worker}-{info.id}").touch()
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < count and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("workers", ["one", pytest.param("three", marks=pytest.mark.slow), "threads"])
def test_workers_know_who_they_are_and_worker_init_fn_runs_once_in_each(workers: str, tmp_path: Any) -> None:
    options = WORKERS[workers]
    count = options["num_workers"]
    options = {**options, "worker_init_fn": partial(prepare, tmp_path, count), "persistent_workers": True}
    with DataLoader(Mapped(who), None, seed=11, **options) as loader:
        for epoch in range(2):
            rows = list(loader)
            assert [row[-1] for row in rows] == list(range(10))
            assert {row[0] for row in rows} <= set(range(count))
            assert {tuple(row[1:5]) for row in rows} == {(count, 11, epoch, 10)}
            assert (os.getpid() in {row[5] for row in rows}) == (workers == "threads")
    assert {path.name for path in tmp_path.iterdir()} == {f"{worker}-{worker}" for worker in range(count)}
    assert get_worker_info() is None


def test_worker_init_fn_is_not_called_without_workers() -> None:
    assert len(list(DataLoader(range(3), worker_init_fn=lambda worker: 1 / 0))) == 3


def test_iterators_and_loaders_in_one_program_are_independent() -> None:
    """C30."""
    with DataLoader(range(6), 2, num_workers=1) as loader, DataLoader(range(100, 120), 2, num_workers=1) as other:
        first, second = iter(loader), iter(loader)
        assert next(first).tolist() == [0, 1]
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(second, other, strict=False)]
        assert pairs == [([at, at + 1], [100 + at, 101 + at]) for at in range(0, 6, 2)]
        assert lists(first) == [[2, 3], [4, 5]]
        loader.close()
        assert lists(other)[-1] == [118, 119]
