"""Options: torch's names, meanings and rules of exclusion; what cannot work is refused in the constructor."""

from __future__ import annotations

import inspect
import multiprocessing
import re
from typing import Any

import multiprocess
import numpy as np
import pytest

import agnoload
from agnoload import DataLoader, OptionError
from agnoload.errors import AgnoloadWarning


class Stream(agnoload.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(10))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


DATA = list(range(10))
SAMPLER = agnoload.SequentialSampler(DATA)
BATCHES = [[0, 1], [2]]
BATCH_SAMPLER = agnoload.BatchSampler(SAMPLER, 2, False)
FUNCTION = "not callable"

ILLEGAL: list[tuple[dict[str, Any], str, str]] = [
    # options, what the text must name, what it must show of what came
    ({"batch_size": 0}, "batch_size", "0"),
    ({"batch_size": -3}, "batch_size", "-3"),
    ({"batch_size": 2.0}, "batch_size", "2.0"),
    ({"batch_size": True}, "batch_size", "True"),
    ({"batch_size": "4"}, "batch_size", "'4'"),
    ({"num_workers": -1}, "num_workers", "-1"),
    ({"num_workers": 1.5}, "num_workers", "1.5"),
    ({"num_workers": "many"}, "num_workers", "'many'"),
    ({"num_workers": None}, "num_workers", "None"),
    ({"num_workers": False}, "num_workers", "False"),
    ({"prefetch_factor": 0}, "prefetch_factor", "0"),
    ({"prefetch_factor": -2, "num_workers": 2}, "prefetch_factor", "-2"),
    ({"prefetch_factor": 1.0}, "prefetch_factor", "1.0"),
    ({"timeout": -1}, "timeout", "-1"),
    ({"timeout": "3"}, "timeout", "'3'"),
    ({"timeout": float("nan")}, "timeout", "nan"),
    ({"timeout": float("inf")}, "timeout", "inf"),
    ({"timeout": None}, "timeout", "None"),
    ({"shuffle": "yes"}, "shuffle", "'yes'"),
    ({"shuffle": 1}, "shuffle", "1"),
    ({"drop_last": "no"}, "drop_last", "'no'"),
    ({"drop_last": None}, "drop_last", "None"),
    ({"pin_memory": 1}, "pin_memory", "1"),
    ({"persistent_workers": "x"}, "persistent_workers", "'x'"),
    ({"in_order": 0}, "in_order", "0"),
    ({"pin_memory_device": 0}, "pin_memory_device", "0"),
    ({"collate_fn": FUNCTION}, "collate_fn", "'not callable'"),
    ({"worker_init_fn": FUNCTION}, "worker_init_fn", "'not callable'"),
    ({"sampler": 5}, "sampler", "int: 5"),
    ({"batch_sampler": 5}, "batch_sampler", "int: 5"),
    ({"sampler": BATCH_SAMPLER}, "sampler", "batch_sampler"),
    ({"multiprocessing_context": "thread"}, "multiprocessing_context", "'thread'"),
    ({"multiprocessing_context": 3}, "multiprocessing_context", "3"),
    ({"seed": -1}, "seed", "-1"),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"seed": True}, "seed", "True"),
    ({"seed": 1, "generator": np.random.default_rng(0)}, "seed", "generator"),
    ({"worker_type": "fiber"}, "worker_type", "'fiber'"),
    ({"on_error": "ignore"}, "on_error", "'ignore'"),
    ({"on_error": None}, "on_error", "None"),
    ({"max_worker_restarts": -1}, "max_worker_restarts", "-1"),
    ({"max_worker_restarts": 0.5}, "max_worker_restarts", "0.5"),
    ({"device": 0}, "device", "0"),
    ({"backend": "abacus"}, "abacus", "numpy"),
    ({"backend": 7}, "backend", "7"),
    # torch's rules of exclusion
    ({"sampler": SAMPLER, "shuffle": True}, "sampler", "shuffle"),
    ({"batch_sampler": BATCHES, "batch_size": 2}, "batch_sampler", "batch_size=2"),
    ({"batch_sampler": BATCHES, "shuffle": True}, "batch_sampler", "shuffle=True"),
    ({"batch_sampler": BATCHES, "sampler": SAMPLER}, "batch_sampler", "sampler="),
    ({"batch_sampler": BATCHES, "drop_last": True}, "batch_sampler", "drop_last=True"),
    ({"batch_sampler": BATCHES, "batch_size": None}, "batch_sampler", "batch_size=None"),
    ({"batch_size": None, "drop_last": True}, "batch_size=None", "drop_last"),
]


def named(value):
    """Without addresses: a test has the same name in each run."""
    return re.sub(" at 0x[0-9a-fA-F]+", "", str(value))[:60]


@pytest.mark.parametrize(("options", "name", "came"), ILLEGAL, ids=named)
def test_an_illegal_option_is_refused_by_name_with_what_came(options: dict[str, Any], name: str, came: str) -> None:
    with pytest.raises(OptionError) as caught:
        DataLoader(DATA, **options)
    assert re.search(rf"\b{re.escape(name)}", str(caught.value))
    assert came in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"shuffle": True}, "shuffle(buffer_size)"),
        ({"sampler": SAMPLER}, "sampler"),
        ({"batch_sampler": BATCHES}, "batch_sampler"),
    ],
)
def test_a_stream_has_no_order_to_choose(options: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError, match=re.escape(name)):
        DataLoader(Stream(), **options)


@pytest.mark.parametrize("dataset", [5, None, object()])
def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    with pytest.raises(OptionError, match=f"dataset must have .*{type(dataset).__name__}"):
        DataLoader(dataset)


def test_a_dataset_with_indices_needs_a_length() -> None:
    with pytest.raises(OptionError, match=r"__len__.*NoLength"):
        DataLoader(NoLength())


LEGAL: list[dict[str, Any]] = [
    {},
    {"batch_size": np.int64(3)},
    {"batch_size": None},
    {"batch_size": 10**9},
    {"shuffle": None},
    {"shuffle": np.bool_(True)},
    {"shuffle": False, "sampler": SAMPLER},
    {"sampler": [3, 1, 2]},
    {"sampler": range(5)},
    {"sampler": np.array([1, 2])},
    {"batch_sampler": BATCHES},
    {"batch_sampler": BATCHES, "batch_size": 1, "shuffle": False, "drop_last": False, "sampler": None},
    {"timeout": 0},
    {"timeout": 5},
    {"timeout": np.float32(2.5)},
    {"prefetch_factor": None},
    {"seed": np.uint8(3)},
    {"seed": 2**70},
    {"generator": np.random.default_rng(1)},
    {"on_error": lambda error, index: "skip"},
    {"multiprocessing_context": "spawn"},
    {"multiprocessing_context": multiprocessing.get_context("fork")},
    {"multiprocessing_context": multiprocess.get_context("spawn")},
    {"multiprocessing_context": multiprocessing},
    {"worker_type": "thread"},
]


@pytest.mark.parametrize("options", LEGAL, ids=named)
def test_a_legal_option_is_taken_without_a_word(options: dict[str, Any]) -> None:
    loader = DataLoader(DATA, **options)
    assert sum(np.size(batch) for batch in loader) == sum(np.size(batch) for batch in loader) > 0


@pytest.mark.parametrize("options", [{"prefetch_factor": 4}, {"persistent_workers": True}, {"timeout": 5}], ids=str)
def test_c32_options_of_workers_mean_nothing_without_workers_and_are_accepted(options: dict[str, Any]) -> None:
    assert [batch.tolist() for batch in DataLoader(DATA, 5, **options)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_the_parameters_of_torch_stand_in_the_same_places_with_the_same_defaults() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    theirs = inspect.signature(torch_data.DataLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    for name, parameter in theirs.items():
        assert name in ours
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_options_can_be_read_back() -> None:
    loader = DataLoader(
        DATA, 4, num_workers=2, prefetch_factor=3, timeout=7, drop_last=True, persistent_workers=True, in_order=False
    )
    assert (loader.dataset, loader.batch_size, loader.num_workers, loader.prefetch_factor) == (DATA, 4, 2, 3)
    assert (loader.timeout, loader.drop_last, loader.persistent_workers, loader.in_order) == (7, True, True, False)
    assert (loader.pin_memory, loader.collate_fn, loader.worker_init_fn, loader.generator) == (False, None, None, None)
    assert isinstance(loader.sampler, agnoload.SequentialSampler)
    assert loader.batch_sampler is None


def test_with_a_batch_sampler_there_is_no_batch_size_and_no_sampler() -> None:
    loader = DataLoader(DATA, batch_sampler=BATCHES)
    assert (loader.batch_size, loader.sampler, loader.batch_sampler) == (None, None, BATCHES)


def test_a_repr_shows_the_seed_that_was_drawn() -> None:
    loader = DataLoader(DATA, 4, shuffle=True)
    assert f"seed={loader.seed}" in repr(loader)
    assert "batch_size=4" in repr(loader)


def test_a_device_for_pinned_memory_is_one_warning() -> None:
    with pytest.warns(AgnoloadWarning, match="pin_memory_device"):
        DataLoader(DATA, pin_memory_device="cuda")


def test_nothing_starts_before_the_loader_is_iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agnoload.pools.processes.start_process", lambda *_: pytest.fail("a process was started"))
    loader = DataLoader(DATA, 2, num_workers=2, persistent_workers=True)
    assert len(loader) == 5
    loader.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": NoLength}, r"an object, got a class: create one, NoLength\(...\)"),
        ({"dataset": np.array(5)}, "but ndarray raises: len"),
        ({"dataset": DATA, "sampler": agnoload.SequentialSampler}, "sampler must be iterable, got type"),
        ({"dataset": DATA, "sampler": np.ones(10, bool)}, r"got a mask: use agnoload.Subset\(dataset, mask\)"),
        ({"dataset": DATA, "collate_fn": agnoload.ragged_collate}, "got ragged_collate itself: call it"),
        ({"dataset": DATA, "backend": "pytorch"}, "got 'pytorch': did you mean 'torch'"),
    ],
)
def test_what_somebody_else_was_meant_by_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DataLoader(**options)


def test_batches_that_are_none_are_told_from_samples() -> None:
    with pytest.raises(OptionError, match="must yield batches of indices, got 0: "):
        list(DataLoader(DATA, batch_sampler=[0, 1, 2]))


def test_a_sampler_that_can_be_read_only_once_is_told() -> None:
    loader = DataLoader(DATA, 2, sampler=(index for index in range(4)))
    assert len(list(loader)) == 2
    with pytest.warns(AgnoloadWarning, match="the sampler gives nothing any more"):
        assert list(loader) == []


def test_a_table_is_sent_to_array_dataset_by_its_first_error() -> None:
    class Table(dict[str, Any]):
        """Columns by name, and as many rows as it says."""

    with pytest.raises(KeyError) as caught:
        list(DataLoader(Table(x=np.zeros(3)), 2))
    assert any("ArrayDataset(**dataset)" in note for note in caught.value.__notes__)


def test_a_dict_of_arrays_is_sent_to_array_dataset() -> None:
    with pytest.raises(OptionError, match=r"keys 0 to 1.*ArrayDataset\(\*\*arrays\)"):
        DataLoader({"x": np.zeros((5, 2)), "y": np.zeros(5)}, 2)


def test_a_dict_with_a_key_for_each_index_or_a_sampler_of_its_keys_is_a_dataset() -> None:
    assert [batch.tolist() for batch in DataLoader({0: 5, 1: 6}, 2)] == [[5, 6]]
    assert [batch.tolist() for batch in DataLoader({"a": 5, "b": 6}, 2, sampler=["b", "a"])] == [[6, 5]]


def test_a_tuple_of_columns_is_told_of_array_dataset() -> None:
    with pytest.warns(AgnoloadWarning, match=r"tuple of 2 arrays.*ArrayDataset\(\*arrays\)"):
        DataLoader((np.zeros((5, 2)), np.zeros(5)), 2)


def test_a_tuple_of_samples_is_a_dataset() -> None:
    assert next(iter(DataLoader((np.zeros(3), np.ones(3)), 2))).tolist() == [[0, 0, 0], [1, 1, 1]]
