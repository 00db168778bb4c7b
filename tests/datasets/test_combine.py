"""Datasets made of datasets."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.datasets import (
    Batch,
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    getitems_of,
    random_split,
)
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
        if not 0 <= index < self.n:
            raise IndexError(index)
        return index

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return Batch(np.array(indices)) if self.batch else list(indices)


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
    assert len(both) == 5
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


def test_subset_takes_indices_in_their_order_and_masks():
    assert list(Subset("abcd", [3, -4, 3])) == ["d", "a", "d"]
    assert list(Subset("abcd", np.array([False, True, True, False]))) == ["b", "c"]
    assert list(Subset("abcd", (place for place in (1, 0)))) == ["b", "a"]
    assert list(Subset("abcd", [])) == []
    assert Subset("abcd", range(4)).indices.dtype == np.int64


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


def test_a_batch_put_together_by_the_dataset_comes_out_of_a_subset_as_it_is():
    batch = getitems_of(Subset(Many(5, batch=True), [4, 2]))([1, 0])
    assert isinstance(batch, Batch)
    assert batch.data.tolist() == [2, 4]
    assert getitems_of(ConcatDataset([Many(5, batch=True), [7]]))([4, 5]) == [4, 7]


def test_wrappers_of_what_has_no_getitems_offer_none():
    for dataset in ([1], Subset([1], [0]), ConcatDataset([[1]]), StackDataset([1]), Subset([1], [0]).map(str)):
        assert getitems_of(dataset) is None


def test_a_getitem_of_a_subclass_wins_over_an_inherited_getitems():
    class Shifted(Many):
        def __getitem__(self, index):
            return index + 100

    assert getitems_of(Shifted(3)) is None
    assert getitems_of(Subset(Shifted(3), [0])) is None


def test_getitems_that_returns_too_few_samples_is_an_error():
    class Short(Many):
        def __getitems__(self, indices):
            return [0]

    with pytest.raises(OptionError, match="3 indices, got 1"):
        getitems_of(Short(5).map(abs))([0, 1, 2])


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

    assert split(5) == split(5) == split(np.int64(5))
    assert split(5) != split(6)
    assert split(np.random.default_rng(1)) == split(np.random.default_rng(1))
    assert split(random.Random(1)) == split(random.Random(1))
    before = np.random.get_state()[1].tolist(), random.getstate()
    assert split(None) != split(None)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    for generator in ("seven", True, 1.5, -1, [1]):
        with pytest.raises(OptionError, match="generator must be"):
            split(generator)


def test_random_split_takes_a_frameworks_generator():
    torch = pytest.importorskip("torch")

    def parts():
        generator = torch.Generator().manual_seed(3)
        return [[list(part) for part in random_split(range(9), [4, 5], generator)] for _ in range(2)]

    first, second = parts()
    assert sorted(first[0] + first[1]) == list(range(9))
    assert first != second  # it has moved on
    assert parts() == [first, second]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_concat_of_concats_is_one_sequence(sizes, data):
    parts = [list(range(100 * number, 100 * number + size)) for number, size in enumerate(sizes)]
    flat = [value for part in parts for value in part]
    cut = data.draw(st.integers(0, len(parts)))
    groups = [ConcatDataset(group) for group in (parts[:cut], parts[cut:]) if group]
    whole = ConcatDataset(groups)
    assert list(whole) == flat
    assert whole.cumulative_sizes[-1] == len(flat)


def test_all_of_them_pickle_and_say_what_they_are():
    subset = Subset(ConcatDataset([StackDataset(Many(3), [1, 2, 3]).map(str), ["x"]]), [0, 3])
    again = pickle.loads(pickle.dumps(subset))
    assert list(again) == ["(0, 1)", "x"]
    assert (
        repr(ConcatDataset([Subset([5, 6], [0]).map(str), [7]])) == "ConcatDataset([Subset(1 of [5, 6]).map(str), [7]])"
    )
    assert repr(StackDataset(a=[1], b="x")) == "StackDataset(a=[1], b='x')"
    assert repr(Batch([1])) == "Batch([1])"


def test_map_refuses_what_is_no_function_and_what_has_no_items():
    with pytest.raises(OptionError, match="function"):
        Many(2).map(3)
    with pytest.raises(NotImplementedError, match="Dataset must define __getitem__"):
        Dataset()[0]
