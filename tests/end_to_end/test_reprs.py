"""What `repr` says of loaders, datasets, samplers and streams, and `python -m agnoload` of the machine."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agnoload
from agnoload.system import usable_cores
from agnoload.validate import brief


class Images(agnoload.Dataset[int]):
    def __init__(self, n: int = 5) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Count(agnoload.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


class Backwards(agnoload.Sampler[int]):
    def __iter__(self) -> Any:
        return iter([2, 1, 0])


class Unmade(agnoload.Dataset[int]):
    """Its length is not known while it is made, as a debugger may show it."""

    def __len__(self) -> int:
        return self.missing  # type: ignore[attr-defined,no-any-return]


def double(value: int) -> int:
    return 2 * value


LABELS = [0] * 6 + [1] * 3
ARRAYS = agnoload.ArrayDataset(x=np.zeros((9, 2, 3), np.uint8), y=np.zeros(9))


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (ARRAYS, "ArrayDataset(9 samples of x: uint8[2, 3], y: float64)"),
        (Images(), "Images(5 items)"),
        (Images(1), "Images(1 item)"),
        (agnoload.ArrayDataset(x=np.zeros((1, 2))), "ArrayDataset(1 sample of x: float64[2])"),
        (agnoload.SubsetRandomSampler([3]), "SubsetRandomSampler(1 index)"),
        (
            agnoload.ClassUniformBatchSampler([1], 1, 1),
            "ClassUniformBatchSampler(1 label of 1 class, 1 class x 1 sample, 1 batch)",
        ),
        (Unmade(), "Unmade()"),
        (Images().map(double), "Images(5 items).map(double)"),
        (Images() + Images(2), "ConcatDataset([Images(5 items), Images(2 items)])"),
        (agnoload.Subset(Images(), [0, 1]), "Subset(2 of Images(5 items))"),
        (agnoload.Subset([0] * 10**6, [0, 1]), "Subset(2 of list(1000000 items))"),
        (agnoload.StackDataset(a=Images(), b=[1] * 5), "StackDataset(a=Images(5 items), b=[1, 1, 1, 1, 1])"),
        (agnoload.CachedDataset(Images(), 100), "CachedDataset(Images(5 items), 0 of 100 bytes, 0 hits)"),
        (agnoload.PackedList(list("abcd")), "PackedList(['a', 'b', 'c', ...], 4 str, 44 bytes)"),
        (Count(), "Count()"),
        (Count().filter(double).map(double), "Count().filter(double).map(double)"),
        (Count().shuffle(10, seed=3), "Count().shuffle(10, seed=3)"),
        (Count() + Count(), "ChainDataset([Count(), Count()])"),
        (Count().split_by_rank(1, 4), "Count().split_by_rank(1, 4)"),
        (
            agnoload.Mixture([Count(), [1] * 100], [3, 1]),
            "Mixture([Count(), list(100 items)], [3.0, 1.0], stop='first', per='sample')",
        ),
        (agnoload.SequentialSampler(Images()), "SequentialSampler(5)"),
        (agnoload.RandomSampler(Images(), seed=3), "RandomSampler(5, seed=3)"),
        (Backwards(), "Backwards()"),
        (agnoload.BatchSampler(Backwards(), 2, False), "BatchSampler(Backwards(), 2, drop_last=False)"),
        (agnoload.BatchSampler(range(4), 2, True), "BatchSampler(range(0, 4), 2, drop_last=True)"),
        (agnoload.BatchSampler([1] * 1000, 2, True), "BatchSampler(list(1000 items), 2, drop_last=True)"),
        (agnoload.SubsetRandomSampler([4, 2]), "SubsetRandomSampler(2 indices)"),
        (agnoload.WeightedRandomSampler([1, 2, 3], 8), "WeightedRandomSampler(3 weights, num_samples=8)"),
        (
            agnoload.BalancedBatchSampler(LABELS, 4),
            "BalancedBatchSampler(9 labels of 2 classes, batch_size=4, alpha=1, kind='fixed', 3 batches)",
        ),
        (
            agnoload.DistributedSampler(Images(), 2, 1),
            "DistributedSampler(RandomSampler(5), rank 1 of 2, tail='pad')",
        ),
        (agnoload.Batch([1, 2]), "Batch([1, 2])"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_thing_says_what_it_is(thing: Any, text: str) -> None:
    assert repr(thing) == text


def words(n: int, **options: Any) -> str:
    return repr(agnoload.DataLoader(Images(n), 4, seed=7, **options))


def test_a_loader_says_what_it_does() -> None:
    assert words(10) == "DataLoader(Images(10 items), batch_size=4, num_workers=0, seed=7, 3 batches, epoch 0)"
    assert words(10, shuffle=True, drop_last=True, num_workers=3, on_error="skip", worker_type="thread") == (
        "DataLoader(Images(10 items), batch_size=4, shuffle=True, num_workers=3, worker_type='thread', drop_last=True, "
        "on_error='skip', seed=7, 2 batches, epoch 0)"
    )
    assert "sampler=RandomSampler(10), " in words(10, sampler=agnoload.RandomSampler(Images(10)))
    assert "collate_fn=len, " in words(10, collate_fn=len)


def test_a_loader_says_whose_arrays_its_batches_are() -> None:
    class Reversing(agnoload.Backend):
        name = "reversing"

    assert "backend='reversing', " in words(10, backend=Reversing())


def test_a_loader_says_little_of_much() -> None:
    loader = agnoload.DataLoader([0] * 10**6, batch_sampler=[[k] for k in range(1000)], seed=1)
    assert repr(loader) == (
        "DataLoader(list(1000000 items), batch_sampler=list(1000 items), num_workers=0, seed=1, 1000 batches, epoch 0)"
    )


def test_a_loader_without_a_length_has_words_too() -> None:
    loader = agnoload.DataLoader(Count(), 4, seed=1)
    iterator = iter(loader)
    next(iterator)
    assert repr(loader) == "DataLoader(Count(), batch_size=4, num_workers=0, seed=1, epoch 0)"
    list(loader)
    assert repr(loader).endswith("epoch 2)")


@pytest.mark.parametrize("name", [name for name in agnoload.__all__ if inspect.isclass(getattr(agnoload, name))])
def test_no_public_class_shows_an_address(name: str) -> None:
    kind = getattr(agnoload, name)
    if name in ("Backend",) or issubclass(kind, BaseException):
        return
    assert kind.__repr__ is not object.__repr__


class Talker:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return 3


@given(st.text() | st.integers(115, 125).map("x".__mul__))
def test_long_and_many_lined_words_are_cut(text: str) -> None:
    assert brief(Talker(text)) == (text if len(text) <= 120 and "\n" not in text else "Talker(3 items)")


def test_what_is_built_in_and_long_is_counted() -> None:
    assert brief(np.zeros(1000)) == "ndarray(1000 items)"
    assert brief({"a": 1}) == "{'a': 1}"


# ---------------------------------------------------------------------------------------------- progress bars


@pytest.mark.parametrize(
    ("make", "total"),
    [
        (lambda: agnoload.DataLoader(Images(10), 4), 3),
        (lambda: agnoload.DataLoader(Images(10), 4, drop_last=True), 2),
        (lambda: agnoload.DataLoader(Count(), 4), None),
    ],
)
def test_tqdm_shows_a_loader(make: Callable[[], Any], total: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread of its own
    stream = io.StringIO()
    bar = tqdm(make(), file=stream)
    batches = list(bar)
    assert bar.total == total
    assert bar.n == len(batches)


# ---------------------------------------------------------------------------------------------- the machine


def command(*arguments: str, code: str = "") -> tuple[int, str, str]:
    start = ["-c", code] if code else ["-m", "agnoload"]
    command = [sys.executable, "-W", "error", *start, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


COMMAND = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "jax", "cupy"]))  # not installed, as far as an import can tell
runpy.run_module("agnoload", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_the_command_says_what_this_machine_offers() -> None:
    code, out, err = command(code=COMMAND)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"agnoload {agnoload.__version__}, NumPy {np.__version__}, Python ")
    assert f"{usable_cores()} usable: " in lines[1]
    assert "GiB" in lines[2]
    assert "forkserver" in lines[3]
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[5:]}
    assert listed["numpy"] == "ready"
    for name in {"torch", "jax", "cupy"} & listed.keys():  # those that an installed wheel tells of
        assert f"pip install agnoload[{name}]" in listed[name]


@pytest.mark.slow
def test_the_command_says_what_it_is_for() -> None:
    code, out, err = command("--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: python -m agnoload [-h]\n\nPrint what this machine offers a loader: ")
    code, out, err = command("--halp")
    assert (code, out) == (2, "")
    assert "unrecognized arguments: --halp" in err
