"""The public names: all there, sorted, said in words, with examples that run; and nothing heavy comes with them."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agnoload
from agnoload.options import Option

CONTRACT = re.findall(
    r"\w+",
    """
DataLoader get_worker_info sample_rng default_collate default_convert register_collate Batch
Dataset IterableDataset ArrayDataset TensorDataset StackDataset ConcatDataset ChainDataset Subset random_split
PackedList Mixture CachedDataset FileStream
Sampler SequentialSampler RandomSampler SubsetRandomSampler WeightedRandomSampler BatchSampler DistributedSampler
BalancedBatchSampler ClassUniformBatchSampler CyclicClassBatchSampler imbalance_weights BucketBatchSampler
Ragged ragged_collate Padded Packed
list_backends get_backend Backend
AgnoloadError OptionError CollateError WorkerDied WorkerTimeout StateError BackendUnavailable DatasetNotPicklable
SampleStopped
""",
)

PUBLIC = {name: getattr(agnoload, name) for name in agnoload.__all__}

NOTHING_TO_SHOW = {
    "Backend",  # a base class, shown step by step in docs/backends.md
    "Dataset",
    "IterableDataset",
    "Packed",  # what a function returns, which shows it
    "Padded",
    "Sampler",
    "WorkerInfo",
}
"""Public names without an example; errors and warnings have none either."""

FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "cupy", "tensorflow", "mlx", "pandas", "scipy", "sklearn"}


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def needs_words() -> Iterator[tuple[str, Any]]:
    """Public classes and functions, and the public methods and properties that the classes define."""
    for name, value in PUBLIC.items():
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        yield name, value
        if inspect.isclass(value):
            for key, member in vars(value).items():
                is_data = isinstance(member, (property, Option))
                ours = is_data or inspect.isroutine(member) or isinstance(member, (classmethod, staticmethod))
                if ours and not key.startswith("_"):
                    yield f"{name}.{key}", member if is_data else getattr(value, key)


@pytest.mark.parametrize("name", CONTRACT)
def test_the_name_is_public(name: str) -> None:
    assert name in agnoload.__all__


@pytest.mark.parametrize("name", ["check_backend", "check_sampler", "check_resume", "FakePool", "no_leaks"])
def test_the_testing_module_offers(name: str) -> None:
    assert hasattr(importlib.import_module("agnoload.testing"), name)


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert list(agnoload.__all__) == sorted(set(agnoload.__all__))


def test_all_holds_every_public_name_that_is_there() -> None:
    there = {n for n, v in vars(agnoload).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert there - {"annotations"} == {n for n in agnoload.__all__ if not n.startswith("_")}


@pytest.mark.parametrize(("name", "value"), [pytest.param(n, v, id=n) for n, v in needs_words()])
def test_a_public_name_has_a_docstring_of_its_own(name: str, value: Any) -> None:
    text = inspect.getdoc(value)
    assert text, f"{name} says nothing"
    if isinstance(value, type) and not getattr(value, "_is_protocol", False):
        assert value.__doc__, f"{name} has only an inherited docstring"


@pytest.mark.parametrize("name", sorted(n for n in PUBLIC if n not in NOTHING_TO_SHOW))
def test_a_public_name_shows_an_example(name: str) -> None:
    value = PUBLIC[name]
    if is_error(value) or not callable(value) or getattr(value, "__module__", "").split(".")[0] != "agnoload":
        pytest.skip("errors and constants need none")
    assert ">>>" in (value.__doc__ or ""), f"{name} has no example"


def documented_modules() -> list[str]:
    names = ["agnoload", *[m.name for m in pkgutil.walk_packages(agnoload.__path__, "agnoload.")]]
    names = [name for name in names if not name.endswith("__main__")]
    return [*names, "agnoload_torch", "agnoload_jax", "agnoload_cupy"]


@pytest.mark.parametrize("name", documented_modules())
def test_the_examples_in_docstrings_run(name: str) -> None:
    framework = name.partition("_")[2]
    if framework in FRAMEWORKS and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def fresh(program: str, environment: dict[str, str] | None = None) -> Any:
    """What a program prints as its last line, read as JSON; it runs in an interpreter of its own."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


LOOP = """
import json, sys
import numpy as np
import agnoload

class Squares(agnoload.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return np.array([index * index, len(FRAMEWORKS & set(sys.modules))])

FRAMEWORKS = set({frameworks!r})
batches = np.concatenate(list(agnoload.DataLoader(Squares(), 4, num_workers={workers})))
print(json.dumps([sorted(FRAMEWORKS & set(sys.modules)), batches.tolist()]))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_no_framework_comes_in_with_a_numpy_loop(workers: int) -> None:
    loaded, batches = fresh(LOOP.format(frameworks=sorted(FRAMEWORKS), workers=workers))
    assert loaded == []
    assert batches == [[k * k, 0] for k in range(8)]


IMPORT = """
import json, time
times = [time.process_time()]
import numpy
times.append(time.process_time())
import agnoload
times.append(time.process_time())
print(json.dumps([times[1] - times[0], times[2] - times[1]]))
"""


def test_importing_costs_little_beside_numpy(tmp_path: Path) -> None:
    compiled = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path)}  # as after an installation: not compiled each time
    compiled.pop("PYTHONDONTWRITEBYTECODE", None)
    fresh(IMPORT, compiled)
    numpy, ours = map(min, zip(*[fresh(IMPORT, compiled) for _ in range(3)], strict=True))
    assert ours < max(0.15, 2 * numpy)  # on a busy machine, all takes longer


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """For a while, a public name without words."""
    value = getattr(agnoload, name)
    text, value.__doc__ = value.__doc__, None
    try:
        yield
    finally:
        value.__doc__ = text


def test_the_test_of_docstrings_can_fail() -> None:
    with broken("imbalance_weights"), pytest.raises(AssertionError):
        test_a_public_name_has_a_docstring_of_its_own("imbalance_weights", agnoload.imbalance_weights)
