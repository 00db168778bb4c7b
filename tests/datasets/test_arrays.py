"""Rows of arrays, one at a time and as whole batches."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from agnoload.datasets import ArrayDataset, ConcatDataset, StackDataset, Subset, TensorDataset, gather_of
from agnoload.errors import OptionError


def stacked(samples):
    """What collating tuples and dicts of numbers and arrays gives."""
    first = samples[0]
    if isinstance(first, tuple):
        return tuple(stacked(list(column)) for column in zip(*samples, strict=True))
    if isinstance(first, dict):
        return {name: stacked([sample[name] for sample in samples]) for name in first}
    return np.array(samples)


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert len(one) == len(other)
        pairs = [(one[key], other[key]) for key in one] if isinstance(one, dict) else zip(one, other, strict=True)
        assert not isinstance(one, dict) or list(one) == list(other)
        for pair in pairs:
            assert_same(*pair)


def numbers(n, start=0):
    return np.arange(start, start + 6 * n, dtype=np.float32).reshape(n, 2, 3)


@st.composite
def arrays(draw):
    """An array of five numbers or rows of numbers, in any order of its memory."""
    dtypes = st.sampled_from(["f4", "f8", "i1", "i8", "u2", "?", "c8"])
    shape = (5, *draw(st.lists(st.integers(0, 3), max_size=2)))
    array = draw(arrays_of.arrays(draw(dtypes), shape))
    return draw(st.sampled_from([array, np.asfortranarray(array), array[::-1], np.repeat(array, 2, 0)[::2]]))


def test_a_row_is_a_tuple_or_a_dict_of_arrays_and_numpy_scalars():
    images = numbers(3)
    dataset = TensorDataset(images, [4, 5, 6])
    assert dataset.arrays[0] is images
    assert_same(dataset[1][0], images[1])
    assert type(dataset[1][1]) is np.int64
    assert [int(label) for _, label in dataset] == [4, 5, 6]
    sample = ArrayDataset(b=[1, 2], a=[True, False])[-2]
    assert list(sample) == ["b", "a"]
    assert type(sample["a"]) is np.bool_
    assert repr(ArrayDataset(x=images, y=[1, 2, 3])) == "ArrayDataset(3 samples of x: float32[2, 3], y: int64)"
    dataset[0][0][...] = -1  # the caller's own
    np.testing.assert_array_equal(dataset[0][0], numbers(3)[0])


@settings(max_examples=40)
@given(st.lists(arrays(), min_size=1, max_size=3), st.lists(st.integers(-5, 4), min_size=1, max_size=12))
def test_rows_of_any_arrays_are_theirs_and_whole_batches_are_those_rows_collated(columns, indices):
    dataset = ArrayDataset(*columns)
    for index in indices:
        for found, column in zip(dataset[index], columns, strict=True):
            np.testing.assert_array_equal(found, column[index])
    assert_same(gather_of(dataset)(np.array(indices), np.empty), stacked([dataset[index] for index in indices]))
    assert_same(dataset[indices], tuple(column[indices] for column in columns))


@settings(max_examples=40)
@given(st.lists(st.integers(-5, 4), min_size=1, max_size=12))
def test_a_batch_gathered_through_other_datasets_is_what_collating_its_samples_gives(indices):
    both = StackDataset(
        a=ArrayDataset(numbers(5), np.arange(5, dtype=np.uint8)),
        b=Subset(ArrayDataset(z=[0.5, 1.5, 2.5, 3.5]), [3, 1, 0, 2, -1]),
    )
    part = ConcatDataset([Subset(both, [4, 4, 0]), both])
    for dataset, shift in ((both, 0), (part, 1)):
        batch = gather_of(dataset)(np.array(indices) - shift, np.empty)
        assert_same(batch, stacked([dataset[index - shift] for index in indices]))


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_out_of_range_names_index_and_length(index):
    dataset = ArrayDataset([1, 2, 3])
    with pytest.raises(IndexError, match=rf"{index} .*length 3"):
        dataset[index]
    with pytest.raises(IndexError, match=rf"{index} .*length 3"):
        gather_of(dataset)(np.array([0, index, 1]), np.empty)


@pytest.mark.parametrize(
    ("arrays", "named", "words"),
    [
        ((), {}, "at least one"),
        ((), {"x": [1, 2, 3], "y": [1, 2]}, "x: 3, y: 2"),
        (([1],), {"x": [1]}, "by position or by name"),
        ((3,), {}, "first axis"),
        (({"x": [1]},), {}, r"ArrayDataset\(\*\*arrays\)"),
        (([[1, 2], [3]],), {}, "np.asarray takes"),
    ],
)
def test_what_cannot_be_an_array_dataset_is_refused(arrays, named, words):
    with pytest.raises(OptionError, match=words):
        ArrayDataset(*arrays, **named)


def test_objects_that_know_how_to_become_arrays_are_converted_once():
    class Foreign:
        calls = 0

        def __array__(self, dtype=None, copy=None):
            Foreign.calls += 1
            return np.arange(3)

    dataset = ArrayDataset(Foreign())
    assert [int(x) for (x,) in dataset] == [0, 1, 2]
    assert Foreign.calls == 1


def test_a_batch_is_written_into_the_memory_that_is_offered():
    given_out = []

    def empty(shape, dtype):
        given_out.append(np.empty(shape, dtype))
        return given_out[-1]

    dataset = ConcatDataset([ArrayDataset(numbers(3), [1, 2, 3]), ArrayDataset(numbers(2), [4, 5])])
    for indices in ([0, 1], [0, 4], [], [3]):
        given_out.clear()
        batch = gather_of(dataset)(np.array(indices, np.int64), empty)
        assert all(any(leaf is array for array in given_out) for leaf in batch)
        assert len(given_out) == 2
        assert (batch[0].shape, batch[0].dtype) == ((len(indices), 2, 3), np.float32)


class Doubled(ArrayDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] * 2


def test_what_collating_would_treat_otherwise_is_not_gathered():
    for dataset in (
        ArrayDataset(["a", "b"]),
        ArrayDataset(np.array([1, None], object)),
        ArrayDataset(np.array([1, 2], ">i4")),
        ArrayDataset(np.array(["2020-01-01", "2021-01-01"], "M8[D]")),
        ConcatDataset([ArrayDataset([1.5]), ArrayDataset([1])]),
        ConcatDataset([ArrayDataset([1.5]), ArrayDataset(x=[1.5])]),
        StackDataset(ArrayDataset([1.5]), [1]),
        ArrayDataset([1]).map(abs),
        [1, 2],
        Doubled([1, 2]),  # a __getitem__ of a subclass is never passed by
        Subset(Doubled([1, 2]), [0]),
    ):
        assert gather_of(dataset) is None


def test_pickled_with_buffers_the_arrays_stay_out_of_the_header():
    dataset = ArrayDataset(x=np.zeros((1000, 100)))
    buffers = []
    header = pickle.dumps(dataset, 5, buffer_callback=buffers.append)
    assert len(header) < 1024
    assert len(pickle.loads(header, buffers=buffers)) == 1000
