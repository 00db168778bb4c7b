"""Whatever a legal loader is asked to do, it does what ten lines of Python do; an illegal one is never built."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import BackendUnavailable, DataLoader, OptionError

Pair = namedtuple("Pair", ["left", "right"])

# ---------------------------------------------------------------------------------------------- data

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from(
    ["?", "b", "B", "h", "i", "l", "e", "f", "d", "F", "D", "S3", "U2", "M8[s]", "m8[us]", ">i4", ">f8"]
)
LEAVES = st.one_of(
    st.tuples(st.just("array"), DTYPES, SHAPES),
    st.sampled_from(
        [("int",), ("float",), ("bool",), ("str",), ("bytes",), ("none",), ("scalar", "f"), ("scalar", "h")]
    ),
)
STRUCTURES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("dict"), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)),
        st.tuples(st.sampled_from(["list", "tuple"]), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("pair"), st.tuples(inner, inner)),
    ),
    max_leaves=6,
)


def sample(structure: Any, index: int) -> Any:
    """A sample of this structure whose every value tells the index."""
    kind, *rest = structure
    if kind == "array":
        dtype, shape = rest
        count = math.prod(shape)
        return (np.arange(count, dtype=np.int64) + index).astype(np.int8).astype(dtype).reshape(shape)
    if kind == "scalar":
        return np.dtype(rest[0]).type(index)
    if kind == "dict":
        return {key: sample(inner, index) for key, inner in rest[0].items()}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(sample(inner, index) for inner in rest[0])
    if kind == "pair":
        return Pair(*(sample(inner, index) for inner in rest[0]))
    return {"int": index, "float": index / 2, "bool": index % 2 == 0, "str": str(index), "bytes": bytes([index]),
            "none": None}[kind]  # fmt: skip


class Data:
    def __init__(self, structure: Any, n: int, bad: tuple[int, ...] = ()) -> None:
        self.structure, self.n, self.bad = structure, n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        if index in self.bad:
            raise KeyError(index)
        return index, sample(self.structure, index)


# ---------------------------------------------------------------------------------------------- the reference


def reference(data: Data, batches: list[list[int]], collate: Callable[[list[Any]], Any]) -> Iterator[Any]:
    """What a loader is: for each batch of indices, the samples, put together."""
    for batch in batches:
        samples = [data[index] for index in batch if index not in data.bad]
        if samples or not batch:
            yield collate(samples)


def together(samples: list[Any]) -> Any:
    """What collate is: samples of one structure become that structure of arrays."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: together([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(together(list(column)) for column in zip(*samples, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(together(list(column)) for column in zip(*samples, strict=True))
    if isinstance(first, (str, bytes)):
        return samples
    return None if first is None else np.array(samples, np.asarray(first).dtype)


def same(one: Any, other: Any) -> bool:
    """Equal in structure, types, dtypes, shapes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


def cut(order: list[int], size: int, drop_last: bool) -> list[list[int]]:
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


# ---------------------------------------------------------------------------------------------- legal ones


@st.composite
def plans(draw: st.DrawFn) -> tuple[Data, list[list[int]] | None, dict[str, Any]]:
    """A dataset, the batches of indices (None: shuffled, so they must be read off), and the loader's options."""
    n = draw(st.integers(0, 40))
    bad = tuple(draw(st.sets(st.integers(0, 39), max_size=3))) if draw(st.booleans()) else ()
    data = Data(draw(STRUCTURES), n, bad)
    indices = st.integers(0, max(n - 1, 0))
    options: dict[str, Any] = {
        "num_workers": draw(st.integers(0, 2)),
        "worker_type": draw(st.sampled_from(["process", "process", "thread"])),
        "prefetch_factor": draw(st.sampled_from([None, 1, 3])),
        "persistent_workers": draw(st.booleans()),
        "in_order": draw(st.booleans()),
        "seed": draw(st.sampled_from([None, 0, 1 << 62])),
        "on_error": "skip" if bad else draw(st.sampled_from(["raise", "skip"])),
    }
    if n and draw(st.booleans()):
        batches = draw(st.lists(st.lists(indices, min_size=1, max_size=5), max_size=8))
        return data, batches, options | {"batch_sampler": batches}
    size, drop_last = draw(st.integers(1, 9)), draw(st.booleans())
    options |= {"batch_size": size, "drop_last": drop_last}
    kind = draw(st.sampled_from(["in order", "sampler", "shuffle"] if n else ["in order", "shuffle"]))
    if kind == "shuffle":
        return data, None, options | {"shuffle": True}
    order = list(range(n)) if kind == "in order" else draw(st.lists(indices, max_size=40))
    return data, cut(order, size, drop_last), options | ({} if kind == "in order" else {"sampler": order})


def check(data: Data, batches: list[list[int]] | None, options: dict[str, Any]) -> None:
    collate = options.get("collate_fn") or together
    with DataLoader(data, **options) as loader:
        for _ in range(2):
            got = list(loader)
            wanted = batches
            if wanted is None:
                wanted = cut(sorted(set(range(data.n))), options["batch_size"], options["drop_last"])
                read = [index for batch in got for index in batch[0].tolist()]
                assert len(set(read)) == len(read)
                assert not set(read) & set(data.bad)
                assert options["drop_last"] or set(read) == set(range(data.n)) - set(data.bad)
                if data.bad:
                    return  # which batches are short depends on the order
                wanted, left = [], read
                for batch in got:
                    wanted, left = [*wanted, left[: len(batch[0])]], left[len(batch[0]) :]
                sizes = [len(batch) for batch in cut(list(range(data.n)), options["batch_size"], options["drop_last"])]
                assert sorted(map(len, wanted)) == sorted(sizes)
            expected = list(reference(data, wanted, collate))
            if not options["in_order"]:
                key = lambda batch: batch[0].tolist()  # noqa: E731
                got, expected = sorted(got, key=key), sorted(expected, key=key)
            assert len(got) == len(expected)
            assert all(map(same, got, expected))


@pytest.mark.slow
@settings(max_examples=40)
@given(plans())
def test_a_loader_gives_what_ten_lines_of_python_give(
    plan: tuple[Data, list[list[int]] | None, dict[str, Any]],
) -> None:
    check(*plan)


# ---------------------------------------------------------------------------------------------- illegal ones

NUMBERS = [None, -1, 0, 1, 2, 3, 2.5, 1e300, math.nan, math.inf, True, False, 1 << 70, "x", "", [], [1], [[0], [1]], {}]
ODD = [
    *NUMBERS, b"x", set(), object(), np.array([1, 2]), np.array(3), np.int64(3), np.float64(2), np.bool_(True), 1j, (),
    range(3), int, len, "spawn", "thread", "skip", "auto", "numpy", "cuda:0", np.random.default_rng(0),
    np.array([["a"]]), Ellipsis, OSError, (OSError,), 0.5,
]  # fmt: skip
VALUES = st.sampled_from(ODD)
NAMES = st.sampled_from(
    [
        "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last",
        "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
        "pin_memory_device", "in_order", "backend", "device", "seed", "worker_type", "on_error", "max_worker_restarts",
        "retry", "max_failed",
    ]
)  # fmt: skip
DATASETS = st.sampled_from([range(10), [], {"a": 1}, iter(()), None, 3, "abc", np.arange(4), object(), int])


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(DATASETS, st.dictionaries(NAMES, VALUES, max_size=3))
def test_what_cannot_work_is_refused_by_the_constructor(dataset: Any, options: dict[str, Any]) -> None:
    try:
        loader = DataLoader(dataset, **options)
    except (OptionError, TypeError, BackendUnavailable):
        return
    loader.close()


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(
            ["batch_size", "shuffle", "drop_last", "timeout", "prefetch_factor", "persistent_workers", "in_order",
             "seed", "max_worker_restarts", "max_failed", "generator", "pin_memory_device", "num_workers"]
        ),
        st.sampled_from([*NUMBERS, np.int64(2)]),
        max_size=3,
    )
)  # fmt: skip
def test_what_the_constructor_takes_works(options: dict[str, Any]) -> None:
    """Nothing about numbers and flags is found out later."""
    if isinstance(options.get("num_workers"), (int, np.integer)):
        options["num_workers"] = min(int(options["num_workers"]), 1)
    try:
        loader = DataLoader(range(7), **options)
    except (OptionError, TypeError):
        return
    with loader:
        got = list(loader)
        assert len(got) == len(loader)
