"""Options: torch's names, meanings and rules of exclusion; the constructor rejects what cannot work."""

from __future__ import annotations

import inspect
import multiprocessing
import re
from dataclasses import fields, replace
from typing import Any

import multiprocess
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader, OptionError
from agnoload.errors import AgnoloadWarning
from agnoload.options import Options


class Stream(agnoload.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(10))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


DATA = list(range(10))
SAMPLER = agnoload.SequentialSampler(DATA)
BATCHES = [[0, 1], [2]]
NOT_BOOL = [None, 1, "yes"]
ILLEGAL: dict[str, list[Any]] = {
    "batch_size": [0, -3, 2.0, True, "4"],
    "num_workers": [-1, 1.5, "many", None, False],
    "prefetch_factor": [0, 1.0],
    "timeout": [-1, "3", float("nan"), float("inf"), None],
    "shuffle": NOT_BOOL[1:],
    "drop_last": NOT_BOOL,
    "pin_memory": NOT_BOOL,
    "persistent_workers": NOT_BOOL,
    "in_order": NOT_BOOL,
    "pin_memory_device": [0],
    "collate_fn": ["not callable"],
    "worker_init_fn": ["not callable"],
    "sampler": [5, agnoload.BatchSampler(SAMPLER, 2, False), np.ones(10, bool), agnoload.SequentialSampler],
    "batch_sampler": [5],
    "multiprocessing_context": ["thread", 3],
    "seed": [-1, 1.5, True],
    "worker_type": ["fiber"],
    "on_error": ["ignore", None],
    "max_worker_restarts": [-1, 0.5],
    "max_failed": [-1, 1.5, True],
    "device": [0],
    "backend": ["abacus", 7],
}
"""Values that each option rejects, whatever the others are."""


def test_an_illegal_value_is_rejected_with_its_name_and_the_value() -> None:
    for name, values in ILLEGAL.items():
        for value in values:
            with pytest.raises(OptionError) as caught:
                DataLoader(DATA, **{name: value})
            assert re.search(rf"\b{name}\b", str(caught.value))
            assert isinstance(value, (np.ndarray, type)) or str(value) in str(caught.value)
            assert isinstance(caught.value, ValueError)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"sampler": SAMPLER, "shuffle": True}, "sampler and shuffle=True exclude each other"),
    ({"batch_sampler": BATCHES, "batch_size": 2}, "batch_sampler excludes .*, got batch_size=2"),
    ({"batch_sampler": BATCHES, "batch_size": None}, "got batch_size=None"),
    ({"batch_sampler": BATCHES, "shuffle": True, "drop_last": True}, "got shuffle=True, drop_last=True"),
    ({"batch_sampler": BATCHES, "sampler": [0]}, r"got sampler=\[0\]"),
    ({"batch_size": None, "drop_last": True}, "batch_size=None and drop_last=True exclude each other"),
    ({"seed": 1, "generator": np.random.default_rng(0)}, "seed and generator exclude each other"),
    ({"dataset": Stream(), "shuffle": True}, r"shuffle a stream through a buffer with dataset.shuffle\(buffer_size\)"),
    ({"dataset": Stream(), "sampler": SAMPLER}, "sampler needs a dataset with indices"),
    ({"dataset": Stream(), "batch_sampler": BATCHES}, "batch_sampler needs a dataset with indices"),
    # what a beginner may do, and the way out
    ({"dataset": 5}, "dataset must have __getitem__ and __len__, or __iter__, got int: 5"),
    ({"dataset": None}, "dataset must have .*, got NoneType"),
    ({"dataset": NoLength()}, "__len__ too, or a sampler: NoLength has neither"),
    ({"dataset": NoLength}, r"an object, got a class: create one, NoLength\(...\)"),
    ({"dataset": "data.txt"}, "for the lines of a file use agnoload.FileStream"),
    ({"dataset": np.array(5)}, "ndarray raises: len"),
    ({"dataset": {"x": np.zeros((5, 2)), "y": np.zeros(5)}}, r"keys 0 to 1.*ArrayDataset\(\*\*arrays\)"),
    ({"dataset": DATA, "sampler": np.ones(10, bool)}, r"got a mask: use agnoload.Subset\(dataset, mask\)"),
    ({"dataset": DATA, "collate_fn": agnoload.ragged_collate}, "got ragged_collate itself: call it"),
    ({"dataset": DATA, "backend": "pytorch"}, "got 'pytorch': did you mean 'torch'"),
]


def test_options_that_exclude_each_other_and_common_mistakes_are_rejected_with_the_way_out() -> None:
    for options, message in MISTAKES:
        with pytest.raises(OptionError, match=message):
            DataLoader(**{"dataset": DATA, **options})


LEGAL: list[dict[str, Any]] = [
    {"batch_size": np.int64(3)},
    {"batch_size": None},
    {"batch_size": 10**9},
    {"shuffle": None},
    {"shuffle": np.bool_(True)},
    {"shuffle": False, "sampler": SAMPLER},
    {"sampler": range(5)},
    {"sampler": np.array([1, 2])},
    {"batch_sampler": BATCHES, "batch_size": 1, "shuffle": False, "drop_last": False, "sampler": None},
    {"timeout": np.float32(2.5)},
    {"prefetch_factor": 4},
    {"persistent_workers": True},
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


def test_a_legal_option_is_accepted_without_a_warning() -> None:
    for options in LEGAL:
        loader = DataLoader(DATA, **options)
        assert sum(np.size(batch) for batch in loader) == sum(np.size(batch) for batch in loader) > 0


@pytest.mark.slow
def test_torchs_parameters_have_the_same_places_and_defaults() -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    theirs = inspect.signature(torch_data.DataLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_options_have_the_names_and_the_defaults_of_the_loader() -> None:
    parameters = inspect.signature(DataLoader).parameters
    ours = {each.name: each.default for each in fields(Options) if each.init}
    assert list(ours) == list(parameters)
    assert all(ours[name] == parameters[name].default for name in list(ours)[1:])


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "batch_size": st.none() | st.integers(1, 99),
            "num_workers": st.just("auto") | st.integers(0, 9),
            "timeout": st.floats(0, 1e9),
            "prefetch_factor": st.none() | st.integers(1, 9),
            "in_order": st.booleans(),
            "shuffle": st.none() | st.booleans(),
            "max_failed": st.none() | st.integers(0, 9) | st.floats(0, 0.99),
        },
    )
)
def test_options_survive_a_second_check_unchanged(given: dict[str, Any]) -> None:
    options = Options(DATA, **given)
    assert Options(**options.arguments()) == options == replace(options)
    assert options.arguments().items() >= given.items()


def test_options_can_be_read_but_not_set() -> None:
    loader = DataLoader(DATA, 4, num_workers=2, prefetch_factor=3, timeout=7, drop_last=True, in_order=False)
    assert (loader.dataset, loader.batch_size, loader.num_workers, loader.prefetch_factor) == (DATA, 4, 2, 3)
    assert (loader.timeout, loader.drop_last, loader.persistent_workers, loader.in_order) == (7, True, False, False)
    assert (loader.pin_memory, loader.collate_fn, loader.worker_init_fn, loader.generator) == (False, None, None, None)
    assert isinstance(loader.sampler, agnoload.SequentialSampler)
    assert loader.batch_sampler is None
    with pytest.raises(AttributeError, match="drop_last cannot be changed"):
        loader.drop_last = False
    batches = DataLoader(DATA, batch_sampler=BATCHES)
    assert (batches.batch_size, batches.sampler, batches.batch_sampler) == (None, None, BATCHES)


def test_a_repr_shows_what_was_asked_for_and_the_seed_that_was_drawn() -> None:
    loader = DataLoader(DATA, 4, shuffle=True, drop_last=True, collate_fn=sum)
    assert repr(loader) == (
        f"DataLoader(list(10 items), batch_size=4, shuffle=True, num_workers=0, collate_fn=sum, drop_last=True, "
        f"seed={loader.seed}, 2 batches, epoch 0)"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pin_memory_device": "cuda"}, "pin_memory_device does nothing"),
        ({"dataset": (np.zeros((5, 2)), np.zeros(5))}, r"tuple of 2 arrays.*ArrayDataset\(\*arrays\)"),
    ],
)
def test_a_doubtful_option_gives_one_warning(options: dict[str, Any], message: str) -> None:
    with pytest.warns(AgnoloadWarning, match=message) as caught:
        loader = DataLoader(**{"dataset": DATA, **options})
    loader.worker_init_fn = print  # checks the options again, and does not warn again
    assert len(caught) == 1


def test_nothing_starts_before_the_loader_is_iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agnoload.pools.crew.start_process", lambda *_: pytest.fail("a process was started"))
    loader = DataLoader(DATA, 2, num_workers=2, persistent_workers=True)
    assert len(loader) == 5
    loader.close()


def test_a_batch_sampler_of_single_indices_is_rejected() -> None:
    with pytest.raises(OptionError, match="must yield batches of indices, got 0: "):
        list(DataLoader(DATA, batch_sampler=[0, 1, 2]))


def test_a_sampler_that_can_be_read_only_once_gives_a_warning() -> None:
    loader = DataLoader(DATA, 2, sampler=(index for index in range(4)))
    assert len(list(loader)) == 2
    with pytest.warns(AgnoloadWarning, match="the sampler gives nothing any more"):
        assert list(loader) == []


def test_the_first_error_of_a_table_names_array_dataset() -> None:
    class Table(dict[str, Any]):
        """Columns by name, and as many rows as it says."""

    with pytest.raises(KeyError) as caught:
        list(DataLoader(Table(x=np.zeros(3)), 2))
    assert any("ArrayDataset(**dataset)" in note for note in caught.value.__notes__)


def test_dicts_and_tuples_of_samples_are_datasets() -> None:
    assert [batch.tolist() for batch in DataLoader({0: 5, 1: 6}, 2)] == [[5, 6]]
    assert [batch.tolist() for batch in DataLoader({"a": 5, "b": 6}, 2, sampler=["b", "a"])] == [[6, 5]]
    assert next(iter(DataLoader((np.zeros(3), np.ones(3)), 2))).tolist() == [[0, 0, 0], [1, 1, 1]]
