"""Lists in one piece of memory."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.datasets import PackedList
from agnoload.datasets.packed import CHUNK
from agnoload.errors import OptionError

texts = st.lists(st.text(st.characters(), max_size=6), max_size=8)  # lone surrogates too
objects = st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=3), st.integers(), st.none()), max_size=8)
slices = st.builds(
    slice, *[st.one_of(st.none(), st.integers(-9, 9)) for _ in range(2)], st.sampled_from([None, 1, 2, 3, -1, -2])
)


@settings(max_examples=60)
@given(st.one_of(texts, st.lists(st.binary(max_size=6), max_size=8), objects), slices)
def test_it_reads_like_the_list_it_was_made_of(items, where):
    packed = PackedList(items)
    assert len(packed) == len(items)
    assert list(packed) == items
    assert [type(item) for item in packed] == [type(item) for item in items]
    assert [packed[index - len(items)] for index in range(2 * len(items))] == items * 2
    for one, expected in ((packed, items), (packed[where], items[where]), (packed[where][::-1], items[where][::-1])):
        again = pickle.loads(pickle.dumps(one))
        assert list(again) == list(one) == expected
        assert list(again[1:]) == expected[1:]
        assert copy.deepcopy(one) == one == expected
    assert (packed == items[1:]) == (not items)


def test_lone_surrogates_survive():
    assert PackedList(["\ud800", "a"])[0] == "\ud800"


@settings(max_examples=10)
@given(st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1]), st.sampled_from(["text", b"bytes"]))
def test_one_odd_item_makes_all_of_them_objects(at, usual):
    items = [usual] * (CHUNK + 2)
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


def test_what_cannot_be_is_refused_in_words():
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"{index} .*length 2"):
            PackedList("ab"[place] for place in range(2))[index]
    for iterable in ("text", b"bytes"):
        with pytest.raises(OptionError, match="iterable of items"):
            PackedList(iterable)
    with pytest.raises(OptionError, match=r"item 1 \(function\)"):
        PackedList([3, lambda: None])


class Broken:
    def __reduce__(self):
        return [].__getitem__, (5,)


def test_an_item_that_raises_an_index_error_does_not_end_the_list():
    with pytest.raises(IndexError, match="list index"):
        list(PackedList([1, Broken(), 3]))


def test_equality_is_by_items():
    assert PackedList(["a", "b"]) == PackedList(["x", "a", "b"])[1:]
    assert PackedList(["a"]) != PackedList(["b"])
    assert PackedList(["a"]) != "a"


def test_a_slice_is_a_view_and_pickles_without_what_lies_around_it():
    packed = PackedList("x" * 1000 for _ in range(1000))
    part = packed[10:12]
    assert part._buffer is packed._buffer
    assert len(pickle.dumps(part)) < 3000
    assert len(pickle.dumps(packed[10:14:2])) < 3000


def test_it_is_a_dataset_and_its_repr_shows_the_beginning_and_the_size():
    packed = PackedList(["a", "b"])
    assert list(packed.map(str.upper) + packed) == ["A", "B", "a", "b"]
    assert (packed.index("b"), "b" in packed, list(reversed(packed))) == (1, True, ["b", "a"])
    assert repr(PackedList(["a", "b", "c", "d"])) == "PackedList(['a', 'b', 'c', ...], 4 str, 44 bytes)"


def test_pickled_with_buffers_the_header_stays_under_a_kibibyte_and_reading_makes_no_object_that_stays():
    packed = PackedList(f"folder/image-{n:07d}.jpg" for n in range(200_000))
    buffers = []
    header = pickle.dumps(packed, 5, buffer_callback=buffers.append)
    assert len(header) < 1024
    assert sum(buffer.raw().nbytes for buffer in buffers) == packed.nbytes
    again = pickle.loads(header, buffers=[buffer.raw() for buffer in buffers])
    assert np.shares_memory(again._buffer, packed._buffer)
    fields = {name: id(value) for name, value in again.__dict__.items()}
    assert again[123_456] == "folder/image-0123456.jpg"
    assert sum(len(text) for text in again[:1000]) == 24_000
    assert {name: id(value) for name, value in again.__dict__.items()} == fields
    assert not any(isinstance(value, (list, dict, tuple)) for value in again.__dict__.values())
