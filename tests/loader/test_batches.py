"""What comes out of a loader, with any number and kind of workers."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import CollateError, DataLoader, get_worker_info
from agnoload.errors import OptionError

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 3},
    {"num_workers": 2, "worker_type": "thread"},
]


def named(workers: dict[str, Any]) -> str:
    return f"{workers['num_workers']}{workers.get('worker_type', '')}"


any_workers = pytest.mark.parametrize("workers", WORKERS, ids=named)
each_pool = pytest.mark.parametrize("workers", [WORKERS[k] for k in (0, 2, 4)], ids=named)
Pair = namedtuple("Pair", "image label")


class Mapped:
    """Samples made by a function of the index."""

    def __init__(self, function: Any, length: int = 10) -> None:
        self.function, self.length = function, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.function(index)


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def same(index: int) -> int:
    return index


# ------------------------------------------------------------------------------------------------ sizes and order


@any_workers
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 4, 5, 11])
def test_batches_cover_the_dataset_in_order(workers: dict[str, Any], size: int, drop_last: bool) -> None:
    with DataLoader(range(10), size, drop_last=drop_last, **workers) as loader:
        found = lists(loader)
        whole = [list(range(10))[at : at + size] for at in range(0, 10, size)]
        wanted = [batch for batch in whole if len(batch) == size or not drop_last]
        assert found == wanted
        assert len(loader) == len(wanted)


@each_pool
def test_a_sampler_says_which_samples_come(workers: dict[str, Any]) -> None:
    with DataLoader(range(10), 2, sampler=[7, 1, 7, 3, 0], **workers) as loader:
        assert lists(loader) == lists(loader) == [[7, 1], [7, 3], [0]]
        assert len(loader) == 3


@each_pool
def test_a_batch_sampler_says_which_batches_come(workers: dict[str, Any]) -> None:
    with DataLoader(range(10), batch_sampler=[[3, 1], [2], (4, 5, 6)], **workers) as loader:
        assert lists(loader) == [[3, 1], [2], [4, 5, 6]]
        assert len(loader) == 3


@each_pool
def test_an_empty_dataset_has_no_batches(workers: dict[str, Any]) -> None:
    with DataLoader([], 4, shuffle=True, **workers) as loader:
        assert lists(loader) == []
        assert len(loader) == 0


def test_a_sampler_without_a_length_gives_a_loader_without_one() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

    loader = DataLoader(range(10), 2, sampler=Endless())
    assert lists(loader) == [[1, 2], [3]]
    with pytest.raises(TypeError):
        len(loader)


@any_workers
def test_a_shuffle_is_the_same_with_any_workers_and_another_in_each_epoch(workers: dict[str, Any]) -> None:
    wanted = DataLoader(range(50), 4, shuffle=True, seed=1)
    epochs = [lists(wanted), lists(wanted)]
    with DataLoader(range(50), 4, shuffle=True, seed=1, **workers) as loader:
        assert [lists(loader), lists(loader)] == epochs
    assert epochs[0] != epochs[1]


# ------------------------------------------------------------------------------------------------ keys


class Typed(Mapped):
    """Tells what its keys are."""

    def __init__(self) -> None:
        super().__init__(lambda key: f"{type(key).__name__} {key!r}")


@pytest.mark.slow
@each_pool
@pytest.mark.parametrize(
    "sampler",
    [range(2), np.array([4, 2], np.int16), [np.int64(5), np.int32(6)], agnoload.RandomSampler(range(10))],
    ids=["range", "ndarray", "numpy scalars", "ours"],
)
@pytest.mark.parametrize("size", [None, 2])
def test_indices_reach_the_dataset_as_python_ints(workers: dict[str, Any], sampler: Any, size: int | None) -> None:
    with DataLoader(Typed(), size, sampler=sampler, **workers) as loader:
        for batch in loader:
            for said in [batch] if size is None else batch:
                assert said.startswith("int ")


@each_pool
def test_keys_of_other_types_are_untouched(workers: dict[str, Any]) -> None:
    keys = ["a", ("b", 1), 2.5, None, frozenset({1}), b"x", True, 2**70, np.timedelta64(3, "s"), np.uint64(2**63)]
    with DataLoader(Typed(), 1, sampler=keys, **workers) as loader:
        assert [said for batch in loader for said in batch] == [
            *[f"{type(key).__name__} {key!r}" for key in keys[:-1]], f"int {2**63}",
        ]  # fmt: skip


@each_pool
def test_a_dataset_with_names_is_loaded_by_name(workers: dict[str, Any]) -> None:
    ages = {"ada": 36, "bob": 40, "cyd": 2}
    with DataLoader(ages, batch_sampler=[["bob", "ada"], ["cyd"]], **workers) as loader:
        assert lists(loader) == [[40, 36], [2]]


# ------------------------------------------------------------------------------------------------ no batching


@each_pool
def test_c04_without_batching_samples_come_as_they_are(workers: dict[str, Any]) -> None:
    def sample(index: int) -> Any:
        return {"x": np.full((2, 3), index, np.float16), "name": f"n{index}", "n": index, "z": (np.int8(1), None)}

    with DataLoader(Mapped(sample, 5), batch_size=None, **workers) as loader:
        found = list(loader)
        assert len(loader) == len(found) == 5
    for index, batch in enumerate(found):
        assert (batch["x"].dtype, batch["x"].tolist()) == (np.float16, [[index] * 3] * 2)
        assert type(batch["x"]) is np.ndarray
        assert (batch["name"], batch["n"], batch["z"][1]) == (f"n{index}", index, None)
        assert (batch["z"][0].dtype, batch["z"][0].shape) == (np.int8, ())


@each_pool
def test_without_batching_a_collate_fn_gets_one_sample(workers: dict[str, Any]) -> None:
    with DataLoader(range(3), batch_size=None, collate_fn=lambda sample: ["got", sample], **workers) as loader:
        assert list(loader) == [["got", 0], ["got", 1], ["got", 2]]


# ------------------------------------------------------------------------------------------------ whole batches


class Gathering(Mapped):
    def __init__(self, batched: bool) -> None:
        super().__init__(same, 20)
        self.batched = batched

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> Any:
        if self.batched:
            return agnoload.Batch({"indices": indices, "call": np.array([len(indices)])})
        return [index * 10 for index in indices]


@each_pool
def test_c46_getitems_is_called_once_a_batch(workers: dict[str, Any]) -> None:
    with DataLoader(Gathering(batched=False), 8, **workers) as loader:
        assert lists(loader) == [[10 * i for i in range(low, min(low + 8, 20))] for low in (0, 8, 16)]


@each_pool
def test_c46_a_batch_that_is_one_already_comes_out_as_it_went_in(workers: dict[str, Any]) -> None:
    with DataLoader(Gathering(batched=True), 8, collate_fn=lambda batch: 1 / 0, **workers) as loader:
        found = list(loader)
    assert [batch["indices"] for batch in found] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert [batch["call"].tolist() for batch in found] == [[8], [8], [4]]


@each_pool
def test_getitems_must_give_one_sample_for_each_index(workers: dict[str, Any]) -> None:
    class Short(Gathering):
        def __getitems__(self, indices: list[int]) -> Any:
            return indices[1:]

    with DataLoader(Short(False), 8, **workers) as loader, pytest.raises(OptionError, match=r"8 indices.*got 7"):
        list(loader)


@each_pool
def test_c46_rows_of_arrays_are_gathered(workers: dict[str, Any]) -> None:
    x, y = np.arange(600, dtype=np.float32).reshape(100, 6), np.arange(100, dtype=np.int16)
    with DataLoader(agnoload.ArrayDataset(x=x, y=y), 32, shuffle=True, seed=2, **workers) as loader:
        batches = list(loader)
    assert [batch["x"].shape for batch in batches] == [(32, 6)] * 3 + [(4, 6)]
    assert all((batch["x"] == x[batch["y"]]).all() for batch in batches)
    assert sorted(np.concatenate([batch["y"] for batch in batches]).tolist()) == list(range(100))
    assert batches[0]["y"].dtype == np.int16


# ------------------------------------------------------------------------------------------------ collate


@dataclass
class Scan:
    voxels: Any
    name: str


@each_pool
def test_a_collate_fn_may_return_anything(workers: dict[str, Any]) -> None:
    class Local(list[Any]):
        pass

    def collate(samples: list[Any]) -> Any:
        return Local([Scan(np.stack(samples), "two"), Pair(samples[0], len(samples)), {1, 2}, None])

    with DataLoader(Mapped(lambda i: np.full(3, i)), 2, collate_fn=collate, **workers) as loader:
        first = next(iter(loader))
    assert type(first) is Local
    assert (type(first[0]), first[0].voxels.tolist(), first[0].name) == (Scan, [[0, 0, 0], [1, 1, 1]], "two")
    assert (type(first[1]), first[1].image.tolist(), first[1].label) == (Pair, [0, 0, 0], 2)
    assert first[2:] == [{1, 2}, None]


@each_pool
def test_structures_keep_their_types(workers: dict[str, Any]) -> None:
    def sample(index: int) -> Any:
        return Pair(np.zeros((2, 2), ">f4"), {"scan": Scan(index, f"n{index}"), "t": (index, [2.5])})

    with DataLoader(Mapped(sample), 3, **workers) as loader:
        batch = next(iter(loader))
    assert type(batch) is Pair
    assert batch.image.shape == (3, 2, 2)
    assert (type(batch.label["scan"]), batch.label["scan"].voxels.tolist()) == (Scan, [0, 1, 2])
    assert batch.label["scan"].name == ["n0", "n1", "n2"]
    assert (type(batch.label["t"]), batch.label["t"][1][0].tolist()) == (tuple, [2.5] * 3)


def boxed(index: int) -> Any:
    return {"target": {"boxes": np.zeros({17: 3, 42: 4}.get(index, 2))}, "y": None if index == 5 else np.zeros(2)}


LACKING = [{"a": 1, "b": 2}, {"a": 3}]
MISFITS: list[tuple[Any, list[int], tuple[str, ...]]] = [
    (Mapped(boxed, 50), [17, 42], ("target.boxes", "17", "42", "(3,)", "(4,)", "ragged_collate")),
    (Mapped(boxed, 50), [5, 6], ("field y", "5", "NoneType")),
    (LACKING, [0, 1], ("'b'", "indices")),
    (LACKING, [1, 0], ("'b'", "indices")),
]


@any_workers
@pytest.mark.parametrize(("dataset", "batch", "words"), MISFITS, ids=["c01 shapes", "c01 None", "c03", "c03 reversed"])
def test_samples_that_do_not_fit_are_named_by_field_and_index(
    workers: dict[str, Any], dataset: Any, batch: list[int], words: tuple[str, ...]
) -> None:
    loader = DataLoader(dataset, batch_sampler=[batch], **workers)
    with loader, pytest.raises(CollateError) as caught:
        list(loader)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert [word for word in words if word not in text] == []


def numbers(index: int) -> Any:
    return {"f": np.float32(1.5), "i": np.int16(7), "b": True, "n": 3, "d": 2.5, "c03": [index, 5]}


@any_workers
def test_c02_dtypes_are_those_of_numpy_and_lists_are_batched_by_position(workers: dict[str, Any]) -> None:
    with DataLoader(Mapped(numbers), 2, **workers) as loader:
        batch = next(iter(loader))
    columns = batch.pop("c03")
    assert [column.tolist() for column in columns] == [[0, 1], [5, 5]]
    assert {key: (str(value.dtype), value.tolist()) for key, value in batch.items()} == {
        "f": ("float32", [1.5] * 2), "i": ("int16", [7] * 2), "b": ("bool", [True] * 2), "n": ("int64", [3] * 2),
        "d": ("float64", [2.5] * 2),
    }  # fmt: skip


@each_pool
def test_c02_a_registered_type_is_batched_its_own_way_in_workers_too(workers: dict[str, Any]) -> None:
    def to_float32(batch: list[float], *, collate_fn_map: Any = None) -> Any:
        return np.array(batch, np.float32)

    agnoload.register_collate(float, to_float32)
    try:
        with DataLoader(Mapped(numbers), 2, **workers) as loader:
            batch = next(iter(loader))
    finally:
        agnoload.register_collate(float, None)
    assert (batch["d"].dtype, batch["d"].tolist()) == (np.float32, [2.5, 2.5])
    assert batch["n"].dtype == np.int64


# ------------------------------------------------------------------------------------------------ who loads


def info_of(index: int) -> Any:
    info = get_worker_info()
    if info is None:
        return [-1, 0, 0, 0, 0]
    return [info.id, info.num_workers, info.seed, info.epoch, len(info.dataset)]


@pytest.mark.slow
@any_workers
def test_workers_know_who_they_are(workers: dict[str, Any]) -> None:
    with DataLoader(Mapped(info_of), 2, seed=11, **workers) as loader:
        for epoch in range(2):
            for batch in loader:
                ids, counts, seeds, epochs, lengths = (column.tolist() for column in batch)
                if workers["num_workers"] == 0:
                    assert ids == [-1, -1]
                else:
                    assert set(ids) <= set(range(workers["num_workers"]))
                    assert (counts, seeds) == ([workers["num_workers"]] * 2, [11] * 2)
                    assert (epochs, lengths) == ([epoch] * 2, [10] * 2)
    assert get_worker_info() is None


@pytest.mark.parametrize("workers", WORKERS[1:4], ids=str)
def test_worker_init_fn_runs_once_in_each_worker_before_its_samples(workers: dict[str, Any], tmp_path: Any) -> None:
    def prepare(worker: int) -> None:
        info = get_worker_info()
        info.dataset.function = lambda index: (worker, os.getpid(), index)
        (tmp_path / f"{worker}-{os.getpid()}").touch()
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < workers["num_workers"] and time.monotonic() < deadline:
            time.sleep(0.001)

    with DataLoader(Mapped(None), 1, worker_init_fn=prepare, **workers) as loader:
        rows = [tuple(int(field[0]) for field in batch) for batch in loader]
    assert [index for _, _, index in rows] == list(range(10))
    files = {path.name for path in tmp_path.iterdir()}
    assert {f"{worker}-{pid}" for worker, pid, _ in rows} <= files
    assert len(files) == workers["num_workers"]


def test_worker_init_fn_is_not_called_without_workers() -> None:
    assert len(list(DataLoader(range(3), worker_init_fn=lambda worker: 1 / 0))) == 3


def test_two_iterators_over_one_loader_are_independent() -> None:
    with DataLoader(range(6), 2, num_workers=2) as loader:
        first, second = iter(loader), iter(loader)
        assert next(first).tolist() == [0, 1]
        assert [batch.tolist() for batch in second] == [[0, 1], [2, 3], [4, 5]]
        assert [batch.tolist() for batch in first] == [[2, 3], [4, 5]]


def test_c30_two_loaders_in_one_program_do_not_disturb_each_other() -> None:
    with DataLoader(range(20), 2, num_workers=2) as first, DataLoader(range(100, 120), 2, num_workers=2) as second:
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(first, second, strict=True)]
        first.close()
        assert pairs == [([at, at + 1], [100 + at, 101 + at]) for at in range(0, 20, 2)]
        assert [batch.tolist() for batch in second][-1] == [118, 119]
