"""Ragged batches: one array of rows, one of offsets, and the same items in every form."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agnoload.batching.collate import default_collate
from agnoload.batching.packing import PackedRows, pack_sequences
from agnoload.batching.ragged import Packed, Padded, Ragged
from agnoload.batching.ragged_collate import RaggedCollate, ragged_collate
from agnoload.batching.tree import map_leaves, path_text, walk
from agnoload.errors import CollateError, OptionError

Array = np.ndarray[Any, Any]
few = settings(max_examples=30)


def same(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got, expected, strict=True)


def sequences(*lengths: int) -> list[Array]:
    """Items that count on from one to the next, so that each row is known by its number."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length + 1, end + 1) for length, end in zip(lengths, ends, strict=True)]


MESHES: list[dict[str, Any]] = [
    {"verts": np.arange(9, dtype=np.float32).reshape(3, 3), "faces": np.array([[0, 1, 2]]), "label": 4},
    {"verts": np.arange(9, 15, dtype=np.float32).reshape(2, 3), "faces": np.array([[0, 1, 0]]), "label": 5},
]
GRAPHS: list[dict[str, Any]] = [
    {"x": np.arange(6.0).reshape(3, 2), "edge_index": np.array([[0, 1, 2], [1, 2, 0]])},
    {"x": np.arange(6.0, 10.0).reshape(2, 2), "edge_index": np.array([[0, 1], [1, 0]])},
]


# -- forms


def test_two_items_in_padded_form_and_four_in_packed_form() -> None:
    ragged = Ragged.from_list([np.array([1, 2, 3]), np.array([4])])
    for padded, values in (
        (ragged.padded(), [[1, 2, 3], [4, 0, 0]]),
        (ragged.padded(value=-1, side="left"), [[1, 2, 3], [-1, -1, 4]]),
        (ragged.padded(multiple_of=4), [[1, 2, 3, 0], [4, 0, 0, 0]]),
        (ragged_collate()([np.array([1, 2, 3]), np.array([4])]), [[1, 2, 3], [4, 0, 0]]),
    ):
        assert isinstance(padded, Padded)
        same(padded.values, np.array(values))
        same(padded.lengths, np.array([3, 1]))
    ragged = Ragged.from_list(sequences(3, 1, 0, 5))
    same(ragged.packed().offsets, np.array([0, 3, 4, 4, 9]))
    same(ragged.item_of_value(), np.array([0, 0, 0, 1, 3, 3, 3, 3, 3]))
    same(ragged.lengths, np.array([3, 1, 0, 5]))


def test_no_items_at_all() -> None:
    ragged = Ragged.from_list([])
    assert (len(ragged), ragged.list(), ragged.padded().values.shape) == (0, [], (0, 0))
    assert Ragged.concatenate([]) == ragged


def test_the_list_form_and_single_items_are_views() -> None:
    ragged = Ragged.from_list(sequences(2, 0, 3))
    for view in (*ragged.list(), *ragged, ragged[0], ragged[-1], ragged[1:].values):
        assert view.base is ragged.values
    ragged.list()[2][0] = 99
    assert ragged.values[2] == 99


@few
@given(st.sampled_from(["u1", "i2", "u8"]), st.lists(st.integers(0, 200), min_size=1, max_size=4))
def test_lengths_and_offsets_of_any_integer_type_are_taken(dtype: str, lengths: list[int]) -> None:
    padded = np.arange(200 * len(lengths)).reshape(-1, 200)
    got = Ragged.from_padded(padded, np.array(lengths, np.uint8).astype(dtype) if dtype != "i2" else lengths, "left")
    assert [item.tolist() for item in got] == [row[200 - n :].tolist() for row, n in zip(padded, lengths, strict=True)]
    offsets = got.offsets.astype("u8" if dtype == "u1" else dtype)
    again = Ragged.from_packed(got.values, offsets)
    assert again.values is got.values
    same(again.offsets, got.offsets)
    same(Packed(got.values, offsets).item_of_value(), np.repeat(np.arange(len(lengths)), lengths))


def test_lists_and_bytes_are_items_too() -> None:
    assert Ragged.from_list([[1, 2], [], [3]]) == Ragged.from_list([np.array([1, 2]), np.zeros(0, int), np.array([3])])
    assert Ragged.from_list([[], [[1.5, 2.5]]]).values.shape == (1, 2)
    text = Ragged.from_list([b"ab", b"", bytearray(b"c")])
    assert text.values.dtype == np.uint8
    assert [item.tobytes() for item in text] == [b"ab", b"", b"c"]


def test_strings_are_widened_and_padded_with_empty_ones() -> None:
    ragged = Ragged.from_list([np.array([b"a", b"bcd"]), np.array([b"longer"])])
    same(ragged.padded().values, np.array([[b"a", b"bcd"], [b"longer", b""]], "S6"))
    same(ragged.padded(value=b"pad").values[1], np.array([b"longer", b"pad"], "S6"))
    same(Ragged.from_list([np.array(["a"]), np.array(["bc", "d"])]).padded().values[0], np.array(["a", ""], "U2"))


@few
@given(st.sampled_from("?bBhHiIlL"), st.integers(-(2**65), 2**65) | st.integers(-300, 300))
def test_an_int_is_a_padding_for_the_dtypes_that_hold_it(dtype: str, value: int) -> None:
    limits = np.iinfo(dtype) if dtype != "?" else None
    ragged = Ragged.from_list([np.ones(1, dtype), np.ones(2, dtype)])
    if value in (0, 1) or (limits is not None and limits.min <= value <= limits.max):
        assert ragged.padded(value).values.tolist() == [[1, value], [1, 1]]
    else:
        with pytest.raises(OptionError, match="cannot hold"):
            ragged.padded(value)


REFUSED = [("i8", 0.5), ("i8", np.nan), ("S1", b"ab"), ("f2", 1e9), ("c8", None)]
KEPT = [("f2", np.inf), ("f4", 0.1), ("?", True), ("c8", 1j), ("O", "x"), ("f4", np.nan)]


@pytest.mark.parametrize(("dtype", "value"), REFUSED + KEPT)
def test_a_padding_must_fit_into_the_dtype(dtype: str, value: Any) -> None:
    ragged = Ragged.from_list([np.zeros(1, dtype), np.zeros(2, dtype)])
    if (dtype, value) in REFUSED:
        with pytest.raises(OptionError, match="cannot hold"):
            ragged.padded(value=value)
    else:
        np.testing.assert_equal(ragged.padded(value=value).values[0, 1], np.array(value, dtype)[()])


# -- as a sequence


def test_an_item_by_its_number_and_the_bounds() -> None:
    items = sequences(2, 0, 3, 1)
    ragged = Ragged.from_list(items)
    same(ragged[-2], items[2])
    same(ragged[np.int64(0)], items[0])
    for place in (4, -5):
        with pytest.raises(IndexError, match=f"item {place} of a Ragged of 4 items"):
            ragged[place]
    with pytest.raises(IndexError):
        ragged[[True, False]]


def test_equality_looks_at_rows_borders_and_dtype() -> None:
    ragged = Ragged.from_list([[1, 2], [3]])
    assert ragged == Ragged.from_list([[1, 2], [3]])
    assert ragged != Ragged.from_list([[1], [2, 3]])
    assert ragged != Ragged.from_list([[1, 2], [4]])
    assert ragged != Ragged.from_list([np.int32([1, 2]), np.int32([3])])
    assert ragged != [[1, 2], [3]]
    with pytest.raises(TypeError, match="unhashable"):
        hash(ragged)


def test_the_repr_tells_lengths_and_dtype() -> None:
    rows = [np.zeros((2, 4), "f4"), np.zeros((1, 4), "f4")]
    assert repr(Ragged.from_list(rows)) == "Ragged(2 items of lengths 2, 1; float32 (4,))"
    assert repr(Ragged.from_list([[1]] * 9)) == "Ragged(9 items of lengths 1, 1, 1, 1, 1, 1, 1, 1, ...; int64)"


def test_it_travels_as_its_two_arrays() -> None:
    ragged = Ragged.from_list([np.zeros((1000, 2)), np.ones((10, 2))])
    buffers: list[pickle.PickleBuffer] = []
    header = pickle.dumps(ragged, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    assert len(header) < 300
    assert pickle.loads(header, buffers=buffers) == ragged


def test_a_walk_sees_its_two_arrays() -> None:
    batch = {"r": Ragged.from_list([[1, 2], [3]])}
    assert [path_text(path) for path, _ in walk(batch)] == ["r.values", "r.offsets"]
    doubled = map_leaves(lambda leaf: leaf * 2, batch)["r"]
    assert type(doubled) is Ragged
    assert doubled.offsets.tolist() == [0, 4, 6]
    packed = map_leaves(list, Ragged.from_list([[1, 2]]).packed())
    assert packed == Packed([1, 2], [0, 2])


OFFSETS, LENGTHS = "end at the number of values, 3; got", "from 0 to the width, 3, one for each of the 2 items; got"


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        *[(Ragged, (np.arange(3), odd), OFFSETS) for odd in ([0, 2], [1, 3], [0, 2, 1, 3], [0.0, 3.0], [], [[0, 3]])],
        (Ragged, (np.arange(3), np.array([0, 2, 1, 3], np.uint8)), OFFSETS),
        (Ragged, (np.array(3), [0]), "first axis"),
        *[(Ragged.from_padded, (np.zeros((2, 3)), odd), LENGTHS) for odd in ([1, 4], [-1, 2], [1], [1.0, 2.0])],
        (Ragged.from_padded, (np.zeros(3), [1, 2, 3]), "got shape"),
        (Ragged.from_padded, (np.zeros((2, 3)), [1, 2], "up"), "side must be 'left' or 'right', got 'up'"),
        (Ragged.from_list([[1]]).padded, (0, "up"), "side must be 'left' or 'right', got 'up'"),
        (Ragged.from_list([[1]]).padded, (0, "left", 0), "positive int, got 0"),
    ],
)
def test_parts_that_do_not_fit_are_refused(make: Callable[..., Any], arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(*arguments)


# -- round trips

dtypes = st.sampled_from(["?", "i1", "u2", "f2", "f4", "i8", ">f8", "c8", "S3", "U2", "M8[s]", "i4,f8"])


@st.composite
def ragged_items(draw: st.DrawFn) -> list[Array]:
    dtype = np.dtype(draw(dtypes))
    trailing = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    return [draw(hnp.arrays(dtype, (length, *trailing))) for length in lengths]


def bits(item: Array) -> tuple[Any, ...]:
    return item.dtype, item.shape, item.tobytes()


@few
@given(ragged_items(), st.sampled_from(["left", "right"]), st.integers(1, 5))
def test_every_form_gives_the_items_back_bit_for_bit(items: list[Array], side: Any, multiple_of: int) -> None:
    for repeats in (1, 700):  # small items and large ones are written in different ways
        items = [np.repeat(item, repeats, axis=0) for item in items]
        ragged = Ragged.from_list(items)
        padded = ragged.padded(0, side, multiple_of)
        expected = [bits(item) for item in items]
        assert [bits(item) for item in ragged.list()] == expected
        assert [bits(item) for item in Ragged.from_packed(*ragged.packed())] == expected
        assert [bits(item) for item in Ragged.from_padded(*padded, side)] == expected
        assert padded.values.shape[1] % multiple_of == 0
        assert padded.values.shape[1] - max(map(len, items)) < multiple_of
        rest = padded.values[~padded.mask(side)]
        assert rest.tobytes() == np.zeros(rest.shape, rest.dtype).tobytes()


@few
@given(ragged_items(), st.data())
def test_a_selection_is_that_of_the_list(items: list[Array], data: st.DataObject) -> None:
    count = len(items)
    numbers = st.lists(st.integers(-count, count - 1), max_size=8)
    masks = st.lists(st.booleans(), min_size=count, max_size=count).map(np.array)
    key: Any = data.draw(numbers | masks | st.slices(count))
    chosen = (
        [items[place] for place in np.arange(count)[key if len(np.shape(key)) and len(key) else slice(0)]]
        if (not isinstance(key, slice))
        else items[key]
    )
    assert [bits(item) for item in Ragged.from_list(items)[key]] == [bits(item) for item in chosen]


@few
@given(ragged_items(), st.integers(0, 6))
def test_a_concatenation_of_two_parts_is_the_whole(items: list[Array], cut: int) -> None:
    whole = Ragged.from_list(items)
    joined = Ragged.concatenate([whole[:cut], whole[cut:]])
    assert [bits(item) for item in joined] == [bits(item) for item in items]
    with pytest.raises(CollateError, match="float32"):
        Ragged.concatenate([Ragged.from_list([np.zeros(1, np.float32)]), Ragged.from_list([[1]])])


@few
@given(ragged_items(), st.sampled_from(["packed", "list", "padded"]), st.sampled_from([1, 1000]), st.integers(1, 6))
def test_a_collated_field_holds_the_items_bit_for_bit_in_the_memory_given(
    items: list[Array], form: Any, repeats: int, multiple_of: int
) -> None:
    items = [np.repeat(item, repeats, axis=0) for item in items]
    given: list[Array] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Array:
        given.append(np.empty(shape, dtype))
        return given[-1]

    samples = [{"x": item, "n": i} for i, item in enumerate(items)]
    batch = ragged_collate(form, multiple_of=multiple_of)(samples, empty)
    same(batch["n"], np.arange(len(items)))
    for _, leaf in walk(batch):
        assert any(leaf is array or leaf.base is array for array in given)
    field = batch["x"]
    if form == "packed":
        total = int(field.offsets[-1])
        assert len(field.values) == -(-total // multiple_of) * multiple_of
        assert field.values[total:].tobytes() == np.zeros_like(field.values[total:]).tobytes()
        field = Ragged.from_packed(field.values[:total], field.offsets)
    elif form == "padded":
        field = Ragged.from_padded(*field)
    assert [bits(item) for item in field] == [bits(item) for item in items]


# -- the collate function


def test_two_meshes_in_packed_form_share_one_numbering() -> None:
    batch = ragged_collate("packed", fields=["verts", "faces"], shift={"faces": "verts"})(MESHES)
    assert isinstance(batch["verts"], Packed)
    same(batch["verts"].values, np.arange(15, dtype=np.float32).reshape(5, 3))
    same(batch["verts"].offsets, np.array([0, 3, 5]))
    same(batch["verts"].item_of_value(), np.array([0, 0, 0, 1, 1]))
    same(batch["faces"].values, np.array([[0, 1, 2], [3, 4, 3]]))
    same(batch["faces"].offsets, np.array([0, 1, 2]))
    same(batch["label"], np.array([4, 5]))
    assert MESHES[1]["faces"].tolist() == [[0, 1, 0]]


def test_two_meshes_in_padded_form_keep_their_own_numbering() -> None:
    more = [MESHES[0], {**MESHES[1], "faces": np.array([[0, 1, 0], [1, 0, 1]])}]
    batch = ragged_collate("padded", shift={"faces": "verts"})(more)
    assert batch["verts"].values.shape == (2, 3, 3)
    same(batch["verts"].values[1, 2], np.zeros(3, np.float32))
    same(batch["faces"].values, np.array([[[0, 1, 2], [-1, -1, -1]], [[0, 1, 0], [1, 0, 1]]]))
    same(batch["faces"].lengths, np.array([1, 2]))


def test_two_graphs_become_one_graph() -> None:
    collate = ragged_collate("packed", shift={"edge_index": "x"}, axis={"edge_index": 1})
    batch = collate(GRAPHS)
    same(batch["x"].values, np.arange(10.0).reshape(5, 2))
    same(batch["x"].item_of_value(), np.array([0, 0, 0, 1, 1]))
    same(batch["edge_index"].values, np.array([[0, 1, 2, 3, 4], [1, 2, 0, 4, 3]]))
    same(batch["edge_index"].offsets, np.array([0, 3, 5]))
    padded = ragged_collate("padded", shift={"edge_index": "x"}, axis={"edge_index": 1})(GRAPHS)["edge_index"]
    same(padded.values, np.array([[[0, 1, 2], [1, 2, 0]], [[0, 1, -1], [1, 0, -1]]]))
    same(padded.mask(axis=1), np.array([[True, True, True], [True, True, False]]))
    listed = ragged_collate("list", axis={"edge_index": 1})(GRAPHS)["edge_index"]
    assert [bits(item) for item in listed] == [bits(graph["edge_index"]) for graph in GRAPHS]


def test_graphs_in_packed_form_are_padded_at_the_end_up_to_a_multiple() -> None:
    collate = ragged_collate("packed", shift={"edge_index": "x"}, axis={"edge_index": 1}, value=7, multiple_of=4)
    x, edges = collate(GRAPHS).values()
    same(x.values, np.concatenate([np.arange(10.0).reshape(5, 2), np.full((3, 2), 7.0)]))
    same(edges.values, np.array([[0, 1, 2, 3, 4, -1, -1, -1], [1, 2, 0, 4, 3, -1, -1, -1]]))
    for offsets in (x.offsets, edges.offsets):
        same(offsets, np.array([0, 3, 5]))
    same(x.item_of_value(), np.array([0, 0, 0, 1, 1, 2, 2, 2]))
    same(edges.item_of_value(axis=1), np.array([0, 0, 0, 1, 1, 2, 2, 2]))


def test_a_padding_must_fit_where_there_is_some_and_the_error_names_the_field() -> None:
    collate = ragged_collate("packed", value=-1, multiple_of=2)
    same(collate([np.uint8([1]), np.uint8([2])]).values, np.uint8([1, 2]))
    with pytest.raises(CollateError, match=r"field t: .*uint8 cannot hold -1; give ragged_collate"):
        collate([{"t": np.uint8([1, 2])}, {"t": np.uint8([3])}])


@few
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 4), max_size=4)), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_shifted_index_finds_the_row_that_it_found_in_its_item(items: list[Any], by_number: bool) -> None:
    samples = [
        {"edges": np.array([i for i in edges if i < rows], np.int32), "rows": np.arange(rows) + 100 * item, "n": rows}
        for item, (rows, edges) in enumerate(items)
    ]
    batch = ragged_collate("packed", ["edges", "rows"], {"edges": "n" if by_number else "rows"})(samples)
    found = [sample["rows"][sample["edges"]].tolist() for sample in samples]
    assert batch["rows"].values[batch["edges"].values].tolist() == [row for rows in found for row in rows]
    assert batch["edges"].values.dtype == np.int32
    assert samples[0]["edges"].tolist() == [i for i in items[0][1] if i < items[0][0]]  # not written to


def test_the_shift_never_overflows() -> None:
    samples = [{"v": np.zeros(n), "f": np.array([n - 1], np.uint8)} for n in (200, 57)]
    collate = ragged_collate("packed", shift={"f": "v"})
    with pytest.raises(CollateError, match=r"field f: .*holds 256.*uint8.*int64") as caught:
        collate(samples)
    assert caught.value.path == "f"
    samples[1] = {"v": np.zeros(56), "f": np.array([55], np.uint8)}
    same(collate(samples)["f"].values, np.array([199, 255], np.uint8))


def test_indices_and_counts_that_are_no_integers_are_refused() -> None:
    for counted, indices, message in (
        (np.zeros(2), 0.0, "field f: .*integer dtype"),
        (2.5, 0, "field v: .*item 0 is 2.5"),
    ):
        with pytest.raises(CollateError, match=message):
            ragged_collate("packed", ["f"], {"f": "v"})([{"v": counted, "f": np.array([indices])}])


class Pair(NamedTuple):
    tokens: Any
    label: Any


@dataclass
class Example:
    tokens: Any
    label: Any


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Pair, ["tokens", ("tokens",)]),
        (Example, ["tokens"]),
        (lambda tokens, label: (tokens, label), [0, "[0]", (0,)]),
        (lambda tokens, label: [tokens, label], [0]),
        (lambda tokens, label: {"tokens": tokens, "label": label}, ["tokens", ("tokens",)]),
        (lambda tokens, label: {"a.b": tokens, "label": label}, ["a.b", "['a.b']"]),
        (lambda tokens, label: {"in": [label, {"tokens": tokens}]}, ["in[1].tokens", ("in", 1, "tokens")]),
    ],
)
def test_fields_are_named_as_errors_name_them(make: Callable[..., Any], names: list[Any]) -> None:
    samples = [make(np.array([1, 2, 3]), np.array([1, 1])), make(np.array([4]), np.array([2, 2]))]
    for name in names:
        batch = ragged_collate("packed", fields=[name])(samples)
        assert type(batch) is type(samples[0])
        leaves = {path_text(path): leaf for path, leaf in walk(batch)}
        got = sorted((leaf.tolist() for leaf in leaves.values()), key=str)
        assert got == [[0, 3, 4], [1, 2, 3, 4], [[1, 1], [2, 2]]]


def test_without_names_all_arrays_with_a_first_axis_are_ragged() -> None:
    samples = [{"a": np.arange(i), "b": (np.array(i), float(i), "t"), "c": [np.zeros((i, 2))]} for i in (1, 2)]
    batch = ragged_collate("packed")(samples)
    same(batch["a"].offsets, np.array([0, 1, 3]))
    same(batch["c"][0].values, np.zeros((3, 2)))
    same(batch["b"][0], np.array([1, 2]))
    same(batch["b"][1], np.array([1.0, 2.0]))
    assert batch["b"][2] == ["t", "t"]


def test_named_fields_may_hold_lists_have_paddings_of_their_own_and_the_rest_is_as_by_default() -> None:
    samples = [{"ids": [5, 6], "mask": [1], "x": np.zeros(2)}, {"ids": [], "mask": [0], "x": np.ones(2)}]
    batch = ragged_collate(fields="ids", value={"ids": -100}, side="left", multiple_of=3)(samples)
    same(batch["ids"].values, np.array([[-100, 5, 6], [-100, -100, -100]]))
    same(batch["mask"][0], np.array([1, 0]))
    same(batch["x"], np.array([[0.0, 0.0], [1.0, 1.0]]))


def test_a_named_field_that_is_none_in_all_samples_stays_none() -> None:
    collate = ragged_collate(fields=["x"])
    assert collate([{"x": None}, {"x": None}]) == {"x": None}
    with pytest.raises(CollateError, match=r"field x: .*item 1 has no value"):
        collate([{"x": np.zeros(2)}, {"x": None}])


@pytest.mark.parametrize("form", ["packed", "padded", "list"])
@pytest.mark.parametrize(
    ("odd", "parts"),
    [
        (np.zeros((2, 4), np.float32), ["(1, 3)", "(2, 4)", "axis 0"]),
        (np.zeros((2, 3, 1), np.float32), ["(1, 3)", "(2, 3, 1)"]),
        (np.zeros((2, 3)), ["float32", "float64"]),
        (np.float32(1), ["shape ()"]),
        ([[1, 2], [3]], ["item 2, a list"]),
        ("text", ["str", "register_collate"]),
    ],
)
def test_a_mismatch_names_the_field_and_the_items(form: Any, odd: Any, parts: list[str]) -> None:
    samples = [{"t": {"boxes": np.zeros((i + 1, 3), np.float32)}} for i in range(2)] + [{"t": {"boxes": odd}}]
    given: list[Any] = []
    with pytest.raises(CollateError, match=r"field t.boxes: ") as caught:
        ragged_collate(form, ["t.boxes"])(samples, lambda shape, dtype: given.append(shape) or np.empty(shape, dtype))
    assert given == []
    assert caught.value.path == "t.boxes"
    assert caught.value.items in {(0, 2), (2,)}
    for part in parts:
        assert part in str(caught.value)


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    for collate in (ragged_collate(fields=["tokens"]), ragged_collate("packed", None, {"label": "tokens"})):
        with pytest.raises(
            CollateError, match=r"'tokens', which the samples do not have; their fields are token, label"
        ):
            collate([{"token": np.zeros(1), "label": np.zeros(1, int)}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "dense"}, "form must be .* got 'dense'"),
        ({"side": "top"}, "side must be"),
        ({"multiple_of": 0}, "positive int, got 0"),
        ({"multiple_of": True}, "positive int, got True"),
        ({"fields": ["a"], "shift": {"b": "a"}}, "shift names the field 'b'"),
        ({"fields": ["a"], "axis": {"b": 1}}, "axis names the field 'b'"),
        ({"fields": ["a"], "value": {"b": 1}}, "value names the field 'b'"),
        ({"axis": -1}, "axis must be a non-negative int"),
        ({"axis": {"a": 1.0}}, "axis must be a non-negative int"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ragged_collate(**options)


def test_the_collate_function_pickles_and_takes_memory() -> None:
    collate = ragged_collate("packed", ["verts", "faces"], {"faces": "verts"})
    assert isinstance(collate, RaggedCollate)
    assert collate.accepts_empty
    twin = pickle.loads(pickle.dumps(collate))
    assert twin == collate
    same(twin(MESHES)["faces"].values, np.array([[0, 1, 2], [3, 4, 3]]))


def test_a_ragged_in_a_sample_is_not_batched_by_guessing() -> None:
    with pytest.raises(CollateError, match=r"register_collate\(Ragged, function\)"):
        default_collate([Ragged.from_list([[1]])] * 2)


# -- rows of a fixed length


def first_fit_decreasing(lengths: list[int], capacity: int) -> tuple[list[int], list[int], int]:
    """One sequence after the other, as the books have it."""
    room: list[int] = []
    row = [0] * len(lengths)
    start = [0] * len(lengths)
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [number for number, left in enumerate(room) if left >= lengths[item]]
        if not fitting:
            room.append(capacity)
            fitting = [len(room) - 1]
        row[item] = fitting[0]
        start[item] = capacity - room[fitting[0]]
        room[fitting[0]] -= lengths[item]
    return row, start, len(room)


@few
@given(st.integers(1, 20).flatmap(lambda cap: st.tuples(st.just(cap), st.lists(st.integers(0, cap), max_size=40))))
def test_packing_is_first_fit_decreasing(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    packing = pack_sequences(np.array(lengths, int), capacity)
    assert (packing.row.tolist(), packing.start.tolist(), packing.rows) == first_fit_decreasing(lengths, capacity)
    items = sequences(*lengths)
    features = (
        packing.place([np.stack([item, -item], 1) for item in items], -1) if items else np.zeros((0, capacity, 2))
    )
    tokens = features[..., 0]
    assert (tokens[packing.segment_ids == 0] == -1).all()
    assert (features.sum(-1)[packing.segment_ids > 0] == 0).all()
    segments, positions = packing.segment_ids, packing.positions
    assert tokens.shape == segments.shape == positions.shape == (packing.rows, capacity)
    assert np.count_nonzero(segments) == sum(lengths)
    assert packing.fill == (sum(lengths) / (packing.rows * capacity) if packing.rows else 1.0)
    for row, start, item in zip(packing.row, packing.start, items, strict=True):
        place = slice(start, start + len(item))
        assert tokens[row, place].tolist() == item.tolist()
        assert positions[row, place].tolist() == list(range(len(item)))
        assert len(set(segments[row, place].tolist())) == min(len(item), 1)
    for row in segments:
        kept = [number for number in row.tolist() if number]
        assert sorted(set(kept)) == list(range(1, len(set(kept)) + 1))
        assert kept == sorted(kept)


def test_a_sequence_without_tokens_has_no_number() -> None:
    rows = PackedRows(np.zeros(3, int), np.array([0, 2, 2]), np.array([2, 0, 1]), rows=1, capacity=4, fill=0.75)
    same(rows.segment_ids, np.int32([[1, 1, 2, 0]]))
    same(rows.positions, np.int32([[0, 1, 0, 0]]))


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 9, 2], 8, "sequence 1 has length 9"),
        ([3, -1], 8, "sequence 1 has length -1"),
        ([1.5], 8, "integers"),
        ([[1]], 8, "flat list"),
        ([1], 0, "capacity must be a positive int, got 0"),
    ],
)
def test_sequences_that_cannot_be_packed_are_refused(lengths: Any, capacity: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pack_sequences(lengths, capacity)
    with pytest.raises(OptionError, match="the lengths that were packed"):
        pack_sequences([1, 2], 4).place([[1, 2], [3]])


def test_the_drawing_is_the_one_that_its_script_makes() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("ragged_picture", docs / "pictures" / "ragged.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (docs / "images" / "ragged.svg").read_text() == script.picture()
