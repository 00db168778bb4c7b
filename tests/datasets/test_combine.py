"""Datasets made of datasets."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.datasets import Batch, ConcatDataset, Dataset, StackDataset, Subset, getitems_of, random_split
from agnoload.errors import OptionError


class Many(Dataset[int]):
    """Sample i is the int i; whole lists are counted."""

    def __init__(self, n, batch=False):
        self.n = n
        self.batch = batch
        self.calls = []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return range(self.n)[index]

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return Batch(np.array(indices)) if self.batch else list(indices)


@st.composite
def nested(draw):
    """A dataset of datasets, three deep, and the list of its samples."""
    n = draw(st.integers(1, 5))
    dataset, wanted = draw(st.sampled_from([(Many(n), list(range(n))), (list(range(n)), list(range(n)))]))
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["subset", "mask", "map", "concat", "stack"]))
        size = len(wanted)
        if kind == "subset":
            places = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
            dataset, wanted = Subset(dataset, places), [wanted[place] for place in places]
        elif kind == "mask":
            mask = [True, *draw(st.lists(st.booleans(), min_size=size - 1, max_size=size - 1))]
            dataset, wanted = Subset(dataset, mask), [each for each, kept in zip(wanted, mask, strict=True) if kept]
        elif kind == "map":
            dataset, wanted = Subset(dataset, range(size)).map(repr), list(map(repr, wanted))
        elif kind == "concat":
            dataset, wanted = ConcatDataset([dataset, ["x"], [], dataset]), [*wanted, "x", *wanted]
        else:
            named = {"a": range(size), "b": dataset}
            dataset, wanted = StackDataset(**named), [{"a": i, "b": each} for i, each in enumerate(wanted)]
    return dataset, wanted


@settings(max_examples=40)
@given(nested(), st.data())
def test_datasets_of_datasets_are_one_sequence_one_by_one_and_many_at_a_time(made, data):
    dataset, wanted = made
    assert len(dataset) == len(wanted)
    assert [dataset[index] for index in range(len(wanted))] == wanted
    indices = data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=6))
    if getitems_of(dataset) is not None:
        assert getitems_of(dataset)(indices) == [wanted[index] for index in indices]
    assert list(map(pickle.loads(pickle.dumps(dataset)).__getitem__, indices)) == [wanted[index] for index in indices]


def test_concat_counts_over_all_and_from_the_end():
    both = ConcatDataset([[10, 11], [], [12, 13, 14]])
    assert [both[index] for index in range(-5, 5)] == [10, 11, 12, 13, 14] * 2
    assert both.cumulative_sizes == [2, 2, 5]
    plus = Many(2) + Many(3).map(lambda index: -index)
    assert isinstance(plus, ConcatDataset)
    assert list(plus) == [0, 1, 0, -1, -2]
    for parts in ([], [iter([])], [3]):
        with pytest.raises(OptionError):
            ConcatDataset(parts)
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"{index} .*length 5"):
            both[index]


def test_stack_needs_equal_lengths_and_one_way_of_naming():
    with pytest.raises(OptionError, match="0: 2, 1: 3"):
        StackDataset("ab", "abc")
    with pytest.raises(OptionError, match="not both"):
        StackDataset("ab", x="ab")
    with pytest.raises(OptionError, match="at least one"):
        StackDataset()
    assert StackDataset(x="ab", y=[1, 2])[-1] == {"x": "b", "y": 2}
    assert StackDataset("ab", [1, 2])[0] == ("a", 1)


@settings(max_examples=50)
@given(st.lists(st.integers(-6, 5)), st.lists(st.booleans(), min_size=6, max_size=6))
def test_subset_takes_indices_in_their_order_and_masks(indices, mask):
    assert list(Subset("abcdef", indices)) == ["abcdef"[index] for index in indices]
    assert list(Subset("abcdef", (index for index in indices))) == ["abcdef"[index] for index in indices]
    assert list(Subset("abcdef", np.array(mask))) == [
        letter for letter, kept in zip("abcdef", mask, strict=True) if kept
    ]
    assert Subset("abcdef", indices).indices.dtype == np.int64


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([0, 4], "4 .*length 4"),
        ([-5], "-5"),
        ([0.5], "float64"),
        ([True], r"4 samples.*\(1,\)"),
        ([[0]], "shape"),
        (5, "5"),
    ],
)
def test_subset_refuses_what_the_dataset_cannot_have(indices, words):
    with pytest.raises(OptionError, match=words):
        Subset("abcd", indices)


def test_one_call_for_many_samples_goes_through_all_wrappers():
    inside = Many(10)
    subset = Subset(ConcatDataset([inside, StackDataset(Many(2), Many(2))]), [3, 11, 5])
    assert getitems_of(subset)([2, 1, 0, -1]) == [5, (1, 1), 3, 5]
    assert inside.calls == [[5, 3, 5]]
    assert getitems_of(inside.map(str))([1, 2]) == ["1", "2"]
    for dataset in ([1], Subset([1], [0]), ConcatDataset([[1]]), StackDataset([1]), Subset([1], [0]).map(str)):
        assert getitems_of(dataset) is None  # as nothing inside offers it


def test_a_batch_put_together_by_the_dataset_comes_out_of_a_subset_as_it_is():
    batch = getitems_of(Subset(Many(5, batch=True), [4, 2]))([1, 0])
    assert isinstance(batch, Batch)
    assert batch.data.tolist() == [2, 4]
    assert getitems_of(ConcatDataset([Many(5, batch=True), [7]]))([4, 5]) == [4, 7]


class Shifted(Many):
    def __getitem__(self, index):
        return index + 100


class Short(Many):
    def __getitems__(self, indices):
        return [0]


def test_a_getitem_of_a_subclass_wins_over_an_inherited_getitems_and_one_that_gives_too_few_is_an_error():
    assert getitems_of(Shifted(3)) is None
    assert getitems_of(Subset(Shifted(3), [0])) is None
    with pytest.raises(OptionError, match="3 indices, got 1"):
        getitems_of(Short(5).map(abs))([0, 1, 2])


@settings(max_examples=50)
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.integers(0, 60))
def test_random_split_rounds_down_and_gives_the_rest_to_the_first(parts, total):
    fractions = [part / sum(parts) for part in parts]
    for lengths in (fractions, [len(part) for part in random_split(range(total), fractions, generator=3)]):
        split = random_split(range(total), lengths, generator=3)
        floors = [int(total * fraction) for fraction in fractions]
        left = total - sum(floors)
        assert [len(part) for part in split] == [size + (place < left) for place, size in enumerate(floors)]
        assert sorted(value for part in split for value in part) == list(range(total))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [([3, 3], "10.*6"), ([0.5, 0.4], "0.9"), ([-1, 11], "-1"), ([], "got"), (["a"], "'a'"), ([float("nan")], "nan")],
)
def test_random_split_refuses_lengths_that_do_not_add_up(lengths, words):
    with pytest.raises(OptionError, match=words):
        random_split(range(10), lengths)


def test_random_split_is_a_function_of_its_generator():
    def split(generator):
        return [list(part) for part in random_split(range(50), [0.5, 0.5], generator)]

    assert split(5) == split(5) == split(np.int64(5)) != split(6)
    for kind in (np.random.default_rng, random.Random):
        generator = kind(1)
        assert split(generator) == split(kind(1)) != split(generator)  # it has moved on
    before = np.random.get_state()[1].tolist(), random.getstate()
    assert split(None) != split(None)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    for generator in ("seven", True, 1.5, -1, [1]):
        with pytest.raises(OptionError, match="generator must be"):
            split(generator)


def test_they_say_what_they_are():
    concat = ConcatDataset([Subset([5, 6], [0]).map(str), [7]])
    assert repr(concat) == "ConcatDataset([Subset(1 of [5, 6]).map(str), [7]])"
    assert repr(StackDataset(a=[1], b="x")) == "StackDataset(a=[1], b='x')"
    assert repr(Batch([1])) == "Batch([1])"
    with pytest.raises(OptionError, match="function"):
        Many(2).map(3)
    with pytest.raises(NotImplementedError, match="Dataset must define __getitem__"):
        Dataset()[0]
