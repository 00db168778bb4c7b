"""The public names: all there, sorted, said in words, with examples that run; and nothing heavy comes with them."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
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


def test_the_names_of_the_contract_are_public() -> None:
    assert set(CONTRACT) <= set(agnoload.__all__)
    testing = importlib.import_module("agnoload.testing")
    assert set(testing.__all__) >= {"check_backend", "check_sampler", "check_resume", "FakePool", "no_leaks"}


def test_all_is_sorted_and_holds_every_public_name_that_is_there() -> None:
    assert list(agnoload.__all__) == sorted(set(agnoload.__all__))
    there = {n for n, v in vars(agnoload).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert there - {"annotations"} == set(agnoload.__all__)


def without_words() -> list[str]:
    """Names that say nothing, or only what they have inherited."""
    inherits = (name for name, value in needs_words() if isinstance(value, type) and not value.__doc__)
    return [name for name, value in needs_words() if not inspect.getdoc(value)] + list(inherits)


def test_a_public_name_has_a_docstring_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_words() == []
    monkeypatch.setattr(agnoload.imbalance_weights, "__doc__", None)
    assert without_words() == ["imbalance_weights"]  # the test can fail


def test_a_public_name_shows_an_example() -> None:
    shown = {n: v for n, v in PUBLIC.items() if callable(v) and not is_error(v) and n not in NOTHING_TO_SHOW}
    ours = {n: v for n, v in shown.items() if v.__module__.split(".")[0] == "agnoload"}
    assert [name for name, value in ours.items() if ">>>" not in (value.__doc__ or "")] == []


def modules_with_examples() -> Iterator[str]:
    root = Path(agnoload.__path__[0])
    for path in sorted(root.rglob("*.py")):
        if ">>>" in path.read_text():
            yield ".".join(["agnoload", *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")


@pytest.mark.parametrize("name", [*modules_with_examples()])
def test_the_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert (failed, tried > 0) == (0, True)


LOOP = """
import json, sys
import numpy as np
before = set(sys.modules)
import agnoload
imported = sorted(set(sys.modules) - before)

class Squares(agnoload.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return np.array([index * index, len(FRAMEWORKS & set(sys.modules))])

FRAMEWORKS = set({frameworks!r})
batches = [list(agnoload.DataLoader(Squares(), 8, num_workers=workers))[0].tolist() for workers in (0, 2)]
print(json.dumps([imported, sorted(FRAMEWORKS & set(sys.modules)), batches]))
"""
SLOW_TO_IMPORT = {
    "multiprocess",
    "multiprocessing",
    "asyncio",
    "email",
    "importlib.metadata",
    "inspect",
    "typing_extensions",
}


def test_an_import_brings_nothing_slow_and_a_numpy_loop_no_framework() -> None:
    command = [sys.executable, "-W", "error", "-c", LOOP.format(frameworks=sorted(FRAMEWORKS))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    imported, frameworks, batches = json.loads(done.stdout)
    roots = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert {root for root in roots if "cython" not in root} == {"agnoload", "cloudpickle", "numpy"}
    assert SLOW_TO_IMPORT & set(imported) == set()
    assert frameworks == []
    assert batches == 2 * [[[k * k, 0] for k in range(8)]]
