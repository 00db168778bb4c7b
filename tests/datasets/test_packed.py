"""Lists in one piece of memory."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.datasets import PackedList
from agnoload.datasets.packed import CHUNK
from agnoload.errors import OptionError

texts = st.lists(st.text(st.characters(), max_size=6), max_size=8)
objects = st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=3), st.integers(), st.none()), max_size=8)
slices = st.builds(
    slice, *[st.one_of(st.none(), st.integers(-9, 9)) for _ in range(2)], st.sampled_from([None, 1, 2, 3, -1, -2])
)


@given(st.one_of(texts, st.lists(st.binary(max_size=6), max_size=8), objects), slices)
def test_it_reads_like_the_list_it_was_made_of(items, where):
    packed = PackedList(items)
    assert len(packed) == len(items)
    assert list(packed) == items
    assert [type(item) for item in packed] == [type(item) for item in items]
    assert packed == items
    assert [packed[index - len(items)] for index in range(2 * len(items))] == items * 2
    part = packed[where]
    assert list(part) == items[where]
    assert part == items[where]
    for one, expected in ((packed, items), (part, items[where]), (part[::-1], items[where][::-1])):
        again = pickle.loads(pickle.dumps(one))
        assert list(again) == expected
        assert list(again[1:]) == expected[1:]
        assert copy.deepcopy(one) == one


def test_lone_surrogates_survive():
    assert PackedList(["\ud800", "a"])[0] == "\ud800"


@pytest.mark.parametrize("at", [0, 1, CHUNK, CHUNK + 1])
def test_one_odd_item_makes_all_of_them_objects(at):
    items = ["text"] * (CHUNK + 2)
    items[at] = 7
    packed = PackedList(iter(items))
    assert list(packed) == items
    assert "objects" in repr(packed)


def test_numpy_strings_become_strings_and_bytearrays_stay():
    assert PackedList(np.array(["a", "b"]))[1] == "b"
    assert type(PackedList([bytearray(b"a")])[0]) is bytearray


def test_it_is_read_as_a_stream():
    def endless():
        yield from (str(n) for n in range(3 * CHUNK))
        raise KeyError("read to the end")

    with pytest.raises(KeyError, match="read to the end"):
        PackedList(endless())


def test_an_item_belongs_to_the_caller():
    packed = PackedList([[1, 2]])
    packed[0].append(3)
    assert packed[0] == [1, 2]


def test_out_of_range_names_index_and_length():
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"{index} .*length 2"):
            PackedList("ab"[place] for place in range(2))[index]


@pytest.mark.parametrize("iterable", ["text", b"bytes"])
def test_a_single_string_is_taken_for_a_mistake(iterable):
    with pytest.raises(OptionError, match="iterable of items"):
        PackedList(iterable)


def test_what_does_not_pickle_is_named():
    with pytest.raises(OptionError, match=r"item 1 \(function\)"):
        PackedList([3, lambda: None])


def test_equality_is_by_items():
    assert PackedList(["a", "b"]) == PackedList(["x", "a", "b"])[1:]
    assert PackedList(["a"]) != PackedList(["b"])
    assert PackedList(["a"]) != ["a", "b"]
    assert PackedList(["a"]) != "a"


def test_a_slice_is_a_view_and_pickles_without_what_lies_around_it():
    packed = PackedList("x" * 1000 for _ in range(1000))
    part = packed[10:12]
    assert part._buffer is packed._buffer
    assert len(pickle.dumps(part)) < 3000
    assert len(pickle.dumps(packed[10:14:2])) < 3000


def test_it_is_a_dataset():
    packed = PackedList(["a", "b"])
    assert list(packed.map(str.upper) + packed) == ["A", "B", "a", "b"]
    assert packed.index("b") == 1
    assert "b" in packed
    assert list(reversed(packed)) == ["b", "a"]


def test_repr_shows_the_beginning_and_the_size():
    assert repr(PackedList(["a", "b", "c", "d"])) == "PackedList(['a', 'b', 'c', ...], 4 str, 44 bytes)"


def test_c26_pickled_with_buffers_the_header_stays_under_a_kibibyte():
    packed = PackedList(f"folder/image-{n:07d}.jpg" for n in range(1_000_000))
    buffers = []
    header = pickle.dumps(packed, 5, buffer_callback=buffers.append)
    assert len(header) < 1024
    assert sum(buffer.raw().nbytes for buffer in buffers) == packed.nbytes
    again = pickle.loads(header, buffers=[buffer.raw() for buffer in buffers])
    assert again[123_456] == "folder/image-0123456.jpg"
    assert np.shares_memory(again._buffer, packed._buffer)


def test_c26_reading_makes_no_object_that_stays():
    packed = PackedList(str(n) * 10 for n in range(10_000))
    fields = {name: id(value) for name, value in packed.__dict__.items()}
    assert sum(len(text) for text in packed) == sum(10 * len(str(n)) for n in range(10_000))
    assert {name: id(value) for name, value in packed.__dict__.items()} == fields
    assert not any(isinstance(value, (list, dict, tuple)) for value in packed.__dict__.values())
