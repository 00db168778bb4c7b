"""A seed gives the batches that it gave when `sums.json` was written, for any workers and after any resume."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

RECORD: dict[str, list[str]] = json.loads(Path(__file__).with_name("sums.json").read_text())

WORKERS: dict[str, dict[str, Any]] = {
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}
CROWD = {
    "order: shuffled": "processes threads",
    "within: all draws": "processes",
    "stream: sharded, shuffled": "processes threads",
}
SLOW_CROWD = {
    "order: shuffled, NumPy's generator": "processes",
    "order: shuffled, very many": "processes threads",
    "sampler: distributed, batches": "processes",
    "sampler: user's, drawing on the way": "processes",
    "classes: cyclic, uneven": "threads",
    "buckets: both, given": "processes",
    "dataset: cached": "processes",
    "dataset: concatenation": "threads",
    "dataset: named arrays": "processes",
    "within: a collate function draws": "processes",
    "within: kept generators": "processes",
    "within: nested": "processes threads",
    "within: replaced": "processes threads",
    "within: skipped": "processes",
    "within: ragged, packed": "processes",
    "stream: unsharded": "processes threads",
    "stream: with a state, shuffled": "processes",
    "stream: shuffled, filtered, mapped": "processes",
    "stream: sharded chain": "processes",
    "stream: files, shuffled": "threads",
    "stream: ranks, sharded, repeated": "processes",
    "stream: mixture of mixtures": "processes threads",
}


def with_workers() -> list[Any]:
    cases = []
    for names, marks in ((CROWD, ()), (SLOW_CROWD, pytest.mark.slow)):
        cases += [pytest.param(name, kind, marks=marks) for name, kinds in names.items() for kind in kinds.split()]
    return cases


def differing(name: str, found: list[str], start: int = 0) -> str:
    """What an error says."""
    wanted = RECORD[name][start:]
    places = [start + i for i, (one, other) in enumerate(zip(wanted, found, strict=False)) if one != other]
    return f"{name!r}: {len(found)} batches where {len(wanted)} are recorded, and others at {places}"


def test_every_configuration_is_recorded(kit: ModuleType) -> None:
    assert list(kit.CONFIGURATIONS) == list(RECORD), "python -m tests.golden.kit writes the file"
    assert len(RECORD) > 120


@pytest.mark.parametrize("name", RECORD)
def test_a_seed_gives_the_batches_that_it_gave(name: str, kit: ModuleType) -> None:
    found = kit.sums(name)
    assert found == RECORD[name], differing(name, found)


@pytest.mark.parametrize(("name", "kind"), with_workers())
def test_so_it_does_with_workers(name: str, kind: str, kit: ModuleType) -> None:
    found = kit.sums(name, **WORKERS[kind])
    assert found == RECORD[name], differing(name, found)


@pytest.mark.filterwarnings("ignore:.*resuming replays it:agnoload.AgnoloadWarning")
@pytest.mark.parametrize("name", RECORD)
def test_so_it_does_when_it_is_resumed(name: str, kit: ModuleType) -> None:
    wanted = RECORD[name]
    places = sorted({1, len(wanted) // 2, len(wanted) * 3 // 4})  # at the start, at the end of an epoch, within another
    states: dict[int, str] = {}
    with kit.loader(name) as loader:
        for place, _ in enumerate(islice(kit.batches(name, loader), places[-1]), 1):
            if place in places:
                states[place] = json.dumps(loader.state_dict())
    for place, state in states.items():
        with kit.loader(name) as loader:
            loader.load_state_dict(json.loads(state))
            found = [kit.sum_of(batch) for batch in loader.steps(len(wanted) - place)]
        assert found == wanted[place:], differing(name, found, place)


def test_every_leaf_counts(kit: ModuleType) -> None:
    """Dtype, shape, bytes, names and kinds of containers: none may change in silence."""
    values = [
        np.arange(4),
        np.arange(4, dtype=np.int32),
        np.arange(4).reshape(2, 2),
        np.arange(4)[::-1],
        [np.arange(4)],
        (np.arange(4),),
        {"a": np.arange(4)},
        {"b": np.arange(4)},
        {"a": np.arange(4), "b": None},
        "01",
        b"01",
        1,
        True,
        1.0,
        np.int64(1),
    ]
    assert len(set(map(kit.sum_of, values))) == len(values)
    assert kit.sum_of(np.arange(4, dtype=">i4")) == kit.sum_of(np.arange(4, dtype="<i4"))
