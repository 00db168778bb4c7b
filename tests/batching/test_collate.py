"""Samples to batch: values, dtypes and structure as they were, memory taken once, and errors that lead to the field."""

from __future__ import annotations

import collections
import collections.abc
import enum
import numbers
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agnoload.backend import registry
from agnoload.batching.collate import (
    collate,
    default_collate,
    default_convert,
    install_registry,
    register_collate,
    registry_snapshot,
)
from agnoload.batching.stacking import JOINED_BYTES
from agnoload.batching.tree import path_text, walk
from agnoload.errors import CollateError, OptionError


class Memory:
    """An `Empty` that remembers what it gave."""

    def __init__(self) -> None:
        self.given: list[np.ndarray[Any, Any]] = []

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        self.given.append(np.empty(shape, dtype))
        return self.given[-1]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Box:
    corners: Any
    name: Any


@dataclass
class Scan:
    image: Any
    total: Any = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.image.sum()
        self.of_this_sample = True


few = settings(max_examples=30)


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    before = registry_snapshot()
    yield
    install_registry(before)


def same(got: Any, expected: Any) -> None:
    """Compare arrays with their dtypes, and all else with its types."""
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(got, expected, strict=True)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, Box):
        same((got.corners, got.name), (expected.corners, expected.name))
    else:
        assert got == expected


def as_single(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    return np.array(batch, np.float32)


# -- structure

KINDS: dict[str, tuple[Callable[[int], Any], Any]] = {
    "int": (int, np.int64),
    "float": (lambda i: i + 0.5, np.float64),
    "bool": (lambda i: i % 2 == 0, np.bool_),
    "complex": (lambda i: i + 1j, np.complex128),
    "float32": (np.float32, np.float32),
    "int16": (np.int16, np.int16),
    "array": (lambda i: np.full((2, 1), i, np.uint8), np.uint8),
    "none": (lambda i: None, None),
    "text": (str, list),
    "bytes": (bytes, list),
}
"""What a leaf is in sample i, and the dtype of its column: a list stays a list, and None stays None."""

trees = st.recursive(
    st.sampled_from(sorted(KINDS)),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), children, max_size=3)
        | st.builds(Point, children, children)
        | st.builds(Box, children, children)
    ),
    max_leaves=8,
)


def build(tree: Any, leaf: Callable[[str], Any]) -> Any:
    """A tree of kinds with other leaves."""
    if isinstance(tree, dict):
        return {key: build(child, leaf) for key, child in tree.items()}
    if isinstance(tree, (Point, Box)):
        children = tree if isinstance(tree, Point) else (tree.corners, tree.name)
        return type(tree)(*(build(child, leaf) for child in children))
    if isinstance(tree, (list, tuple)):
        return type(tree)(build(child, leaf) for child in tree)
    return leaf(tree)


@few
@given(trees, st.integers(1, 4))
def test_a_batch_has_the_structure_of_its_samples_and_its_arrays_lie_in_the_memory_given(tree: Any, count: int) -> None:
    def column(kind: str) -> Any:
        make, dtype = KINDS[kind]
        values = [make(i) for i in range(count)]
        return None if dtype is None else values if dtype is list else np.array(values, dtype)

    memory = Memory()
    samples = [build(tree, lambda kind, i=i: KINDS[kind][0](i)) for i in range(count)]
    batch = collate(samples, memory)
    same(batch, build(tree, column))
    arrays = [leaf for _, leaf in walk(batch) if isinstance(leaf, np.ndarray)]
    assert list(map(id, memory.given)) == list(map(id, arrays))  # each was written once


@few
@given(st.data())
def test_a_leaf_that_does_not_fit_is_named_with_its_path_and_its_item(data: st.DataObject) -> None:
    tree = data.draw(trees)
    leaves = [path for path, kind in walk(tree)]
    if not leaves:
        return
    bad, odd = data.draw(st.sampled_from(leaves)), data.draw(st.integers(1, 3))

    def sample(item: int) -> Any:
        paths = iter(leaves)
        return build(tree, lambda kind: object() if next(paths) == bad and item == odd else KINDS[kind][0](item))

    with pytest.raises(CollateError) as caught:
        default_collate([sample(item) for item in range(4)])
    assert caught.value.path == path_text(bad)
    assert caught.value.items in {(odd,), (0, odd)}
    assert str(caught.value).startswith(f"field {path_text(bad)}: " if bad else "the samples: ")


@few
@given(trees)
def test_convert_changes_scalars_of_numpy_only(tree: Any) -> None:
    def converted(kind: str) -> Any:
        value = KINDS[kind][0](3)
        return np.asarray(value) if isinstance(value, np.generic) else value

    same(default_convert(build(tree, lambda kind: KINDS[kind][0](3))), build(tree, converted))


def test_convert_gives_arrays_and_unknown_objects_back_as_they_are() -> None:
    data = (np.asfortranarray(np.ones((2, 2), ">f4")), object(), np.str_("s"), Picture(), {1})
    for one, other in zip(default_convert(data), data, strict=True):
        assert one is other
    same(default_convert({"f": Convertible(np.float32([1]))}), {"f": np.float32([1])})


def test_containers_keep_their_types() -> None:
    ordered, default = collections.OrderedDict, collections.defaultdict
    structured = np.array([(1, 2.5), (3, 4.5)], "i4,f8")

    def sample(i: int) -> Any:
        mappings = {"o": ordered(b=i, a=2), "d": default(list, k=i), "mixed": (ordered if i == 0 else dict)(k=i)}
        return {
            "u": collections.UserList([i, i]),
            "q": range(i, i + 2),
            "s": np.str_("x"),
            "v": structured[i],
            **mappings,
        }

    batch = default_collate([sample(0), sample(1)])
    same(batch["u"], [np.array([0, 1])] * 2)
    same(batch["q"], [np.array([0, 1]), np.array([1, 2])])
    same(batch["v"], structured)
    assert [type(batch[key]) for key in ("o", "d", "mixed")] == [ordered, default, ordered]
    same(dict(batch["o"]), {"b": np.array([0, 1]), "a": np.array([2, 2])})
    assert batch["d"].default_factory is list
    scans = default_collate([Scan(np.array([1, 2])), Scan(np.array([3, 4]))])
    same((scans.image, scans.total), (np.array([[1, 2], [3, 4]]), np.array([3, 7])))
    assert not hasattr(scans, "of_this_sample")


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, collections.UserDict])
def test_a_key_that_some_samples_lack_is_named_in_either_order(make: Any) -> None:
    for other in ({"a": 3}, {"a": 3, "c": 4}):
        with pytest.raises(CollateError, match="item 1 lacks 'b', which item 0 has") as caught:
            default_collate([make(a=1, b=2), make(other)])
        assert caught.value.items == (1, 0)
    with pytest.raises(CollateError, match="item 0 lacks 'b', which item 1 has"):
        default_collate([make(a=3), make(a=1, b=2)])
    for first in (make(a=1, b=2), collections.defaultdict(int, a=1, b=2)):
        counting = collections.defaultdict(int, a=3, c=1)
        with pytest.raises(CollateError, match="item 1 lacks 'b'"):
            default_collate([first, counting])
        assert counting == {"a": 3, "c": 1}


def test_lists_are_batched_element_by_element_and_must_have_one_length() -> None:
    same(default_collate([[1, 2], [3, 4]]), [np.array([1, 3]), np.array([2, 4])])
    with pytest.raises(CollateError, match=r"field \[1\].t: .*item 2 has length 1; .*fields=\['\[1\].t'\]") as caught:
        default_collate([(0, {"t": (1, 2)}), (0, {"t": (1, 2)}), (0, {"t": (1,)})])
    assert (caught.value.path, caught.value.items) == ("[1].t", (0, 2))
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.path, twin.items) == (str(caught.value), "[1].t", (0, 2))


@pytest.mark.parametrize(
    ("one", "other", "types"),
    [
        (1, "a", ("int", "str")),
        ([1], (1,), ("list", "tuple")),
        ({"a": 1}, [1], ("dict", "list")),
        (np.zeros(1), "a", ("numpy.ndarray", "str")),
        (Point(1, 2), (1, 2), ("Point", "tuple")),
        (None, np.zeros(3), ("no value (NoneType)", "a value")),
        (None, {"a": 1}, ("no value (NoneType)", "a value")),
    ],
)
def test_samples_of_different_types_are_refused_with_both_types(one: Any, other: Any, types: tuple[str, str]) -> None:
    for first, second, named in ((one, other, types), (other, one, types[::-1])):
        with pytest.raises(CollateError, match=r"field q\[0\]: ") as caught:
            default_collate([{"q": [first]}, {"q": [first]}, {"q": [second]}])
        assert (caught.value.path, caught.value.items) == ("q[0]", (0, 2))
        assert all(name in part for name, part in zip(named, str(caught.value).split("item 2"), strict=True))


def test_classes_that_are_made_for_each_sample_are_refused_unless_their_fields_say_all() -> None:
    tuples = [collections.namedtuple("Row", "x y")(i, 2 * i) for i in range(3)]
    assert default_collate(tuples).y.tolist() == [0, 2, 4]
    with pytest.raises(CollateError, match="make the class once, not for each sample"):
        default_collate([dataclass(type("Twin", (), {}))() for _ in range(2)])


class Picture:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise AssertionError("an image is not converted without being asked")


class Sequences(NamedTuple):
    """A batch of its own library, which is more than its fields, as torch's PackedSequence is."""

    data: Any

    def to(self, device: Any) -> Sequences:
        return self

    pin_memory = to


@pytest.mark.parametrize("value", [{1, 2}, object(), Picture(), Sequences(1)], ids=lambda value: type(value).__name__)
def test_unknown_types_are_refused_with_path_type_and_remedy(value: Any) -> None:
    name = type(value).__name__
    with pytest.raises(CollateError, match=rf"field a.b: item 0 is .*{name}.*register_collate\({name}, function\)"):
        default_collate([{"a": {"b": value}}] * 2)


def test_a_batch_needs_samples() -> None:
    for batch, message in (([], "at least one sample"), (3, "list of samples, got int")):
        with pytest.raises(CollateError, match=message):
            default_collate(batch)  # type: ignore[arg-type]


# -- numbers


@given(st.lists(st.integers(-(2**65), 2**65) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, -(2**63)]), min_size=1))
def test_ints_never_overflow(values: list[int]) -> None:
    batch = default_collate(values)
    assert batch.tolist() == values
    low, high = min(values), max(values)
    assert batch.dtype == (
        np.int64 if low >= -(2**63) and high < 2**63 else np.uint64 if 0 <= low < high + 1 <= 2**64 else object
    )


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2.5], np.float64),
        ([True, 2], np.int64),
        ([np.float32(1), 2.5], np.float64),
        ([np.float32(1), np.float64(2.5)], np.float64),
        ([np.int16(1), np.int32(2**20)], np.int32),
        ([np.uint8(200), np.int8(-1)], np.int16),
        ([np.array(1, np.int8), 300], np.int64),
        ([np.bool_(True), True], np.bool_),
        ([np.int8(1), 2**63], np.float64),
        ([enum.IntEnum("Colour", "RED").RED, 5], np.int64),
        ([enum.IntEnum("Colour", "RED").RED] * 2, np.int64),
    ],
)
def test_mixed_numbers_promote_as_numpy_does(values: list[Any], dtype: Any) -> None:
    for order in (values, values[::-1]):
        batch = default_collate(order)
        assert batch.dtype == dtype
        assert batch.tolist() == [value.item() if hasattr(value, "item") else value for value in order]


# -- arrays

DTYPES = "? i1 u2 f2 i4 i8 u8 f8 c8 c16 >f4 S3 U2 M8[s] m8[ms] i4,f8 V5 g".split()  # noqa: SIM905


def bits(dtype: np.dtype[Any], shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Arrays of any bytes: all NaNs and infinities, not only the usual ones."""
    size = dtype.itemsize * int(np.prod(shape))
    return st.binary(min_size=size, max_size=size).map(lambda raw: np.frombuffer(bytearray(raw), dtype).reshape(shape))


def laid_out(array: np.ndarray[Any, Any], layout: str) -> np.ndarray[Any, Any]:
    """An equal array that lies in memory in another way."""
    if layout == "fortran":
        return array.copy(order="F")
    if layout == "reversed" and array.ndim:
        return array[::-1].copy()[::-1]
    if layout == "spread" and array.ndim:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if layout == "read-only":
        array.flags.writeable = False
    return array


@few
@given(data=st.data())
def test_arrays_are_stacked_bit_for_bit(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    layouts = st.sampled_from(["plain", "fortran", "reversed", "spread", "read-only"])
    values = hnp.arrays(dtype, shape) if dtype.kind in "bSU" else bits(dtype, shape)
    arrays = [laid_out(data.draw(values), data.draw(layouts)) for _ in range(data.draw(st.integers(1, 5)))]
    batch = collate(arrays)
    assert batch.dtype == dtype
    assert batch.flags.c_contiguous
    assert batch.flags.writeable
    assert batch.shape == (len(arrays), *shape)
    assert batch.tobytes() == b"".join(array.tobytes() for array in arrays)


@few
@given(st.lists(st.sampled_from(["?", "i1", "u2", "i4", "f4", "i8", "f8", "c8", ">f8"]), min_size=2, max_size=5))
def test_mixed_dtypes_promote_as_numpy_stacks_them(dtypes: list[str]) -> None:
    arrays = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in dtypes]
    expected = np.stack(arrays)
    batch = collate(arrays)
    assert batch.dtype == (dtypes[0] if len(set(dtypes)) == 1 else expected.dtype)
    np.testing.assert_array_equal(batch, expected)


@few
@given(st.lists(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), min_size=2, max_size=5))
def test_unequal_shapes_are_refused_with_both_before_memory_is_taken(shapes: list[Any]) -> None:
    memory = Memory()
    samples = [{"target": {"boxes": np.zeros(shape)}, "y": i} for i, shape in enumerate(shapes)]
    odd = next((item for item, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is None:
        assert collate(samples, memory)["target"]["boxes"].shape == (len(shapes), *shapes[0])
        return
    with pytest.raises(CollateError) as caught:
        collate(samples, memory)
    assert (caught.value.path, caught.value.items) == ("target.boxes", (0, odd))
    for part in (f"item 0 has shape {shapes[0]}", f"item {odd} has shape {shapes[odd]}", "fields=['target.boxes']"):
        assert part in str(caught.value)
    assert memory.given == []


@given(st.sampled_from([-1, 0, 1, 9 * JOINED_BYTES]))
def test_items_of_every_size_are_written_whole(more: int) -> None:
    rows = [np.arange(i, i + JOINED_BYTES + more).astype(np.uint8) for i in range(5)]
    same(default_collate(rows), np.stack(rows))


def test_objects_never_go_into_memory_that_may_be_shared() -> None:
    memory = Memory()
    rows = [np.array([{}, None], object), np.array([1, "a"], object)]
    structured = [np.array([(1, None)], [("n", int), ("o", object)])] * 2
    strings = [np.array(["a", "long" * 20], np.dtypes.StringDType())] * 2
    batch = collate([{"o": rows[i], "s": structured[i], "t": strings[i]} for i in range(2)], memory)
    assert memory.given == []
    assert batch["o"].tolist() == [[{}, None], [1, "a"]]
    assert batch["s"].tolist() == [[(1, None)], [(1, None)]]
    assert batch["t"].tolist() == [["a", "long" * 20]] * 2


def test_strings_are_never_cut_and_times_keep_their_values() -> None:
    for kind in "US":
        batch = default_collate([np.array(texts).astype(kind) for texts in (["a", "bc"], ["longer", ""], ["", ""])])
        assert batch.dtype == np.dtype(f"{kind}6")
        assert batch.astype("U6").tolist() == [["a", "bc"], ["longer", ""], ["", ""]]
    fine, coarse = np.datetime64("2020-01-01T00:00:00.001"), np.datetime64("2021-05-06")
    same(default_collate([coarse, fine]), np.array([coarse, fine], "M8[ms]"))


@given(
    st.sampled_from([("f8", "U3"), ("i8", "M8[s]"), ("m8[s]", "M8[s]"), ("S2", "U2"), ("i4", "i4,f8"), ("V3", "V4")]),
    st.booleans(),
    st.integers(1, 3),
)
def test_dtypes_that_would_change_the_meaning_are_refused_before_memory_is_taken(
    pair: tuple[str, str], swapped: bool, odd: int
) -> None:
    memory = Memory()
    one, other = reversed(pair) if swapped else pair
    samples = [{"x": np.zeros(2, other if item == odd else one)} for item in range(4)]
    with pytest.raises(CollateError, match="field x: arrays must have dtypes") as caught:
        collate(samples, memory)
    assert caught.value.items == (0, odd)
    assert f"item 0 has dtype {np.dtype(one)} and item {odd} has dtype {np.dtype(other)}" in str(caught.value)
    assert memory.given == []


def test_extension_dtypes_are_kept_and_promoted() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows = [np.array([1.5, i], ml_dtypes.bfloat16) for i in range(3)]
    same(default_collate(rows), np.stack(rows))
    assert default_collate([rows[0], np.float32([1, 2])]).dtype == np.float32
    assert default_collate([row[0] for row in rows]).dtype == ml_dtypes.bfloat16


def test_subclasses_of_ndarray_give_plain_arrays_but_no_mask_is_lost(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(3, 2))
    mapped[:] = np.arange(6).reshape(3, 2)
    same(default_collate(list(mapped)), np.array(mapped))
    same(default_collate([mapped[0], np.zeros(2, np.float32)]), np.float32([[0, 1], [0, 0]]))
    masked = np.ma.masked_array([1, 2], [True, False])
    with pytest.raises(CollateError, match=r"field x: item 0 is a masked array.*filled"):
        default_collate([{"x": masked}])
    register_collate(np.ma.MaskedArray, lambda batch, **_: np.ma.stack(batch))
    assert default_collate([masked] * 2).mask.tolist() == [[True, False]] * 2


# -- other libraries' arrays


class Tensor:
    """An array of some other library."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __dlpack__(self) -> Any:
        raise NotImplementedError


class Convertible(Tensor):
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if isinstance(self.data, Exception):
            raise self.data
        return np.asarray(self.data)


def test_backends_convert_the_arrays_of_other_libraries_and_see_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def to_numpy(leaf: Any) -> Any:
        seen.append(type(leaf))
        return np.asarray(leaf.data, np.int16) if type(leaf) is Tensor else None

    monkeypatch.setattr(registry, "to_numpy", to_numpy)
    sample = {"x": np.zeros(2), "n": 1, "f": 2.5, "s": "text", "b": True, "z": None, "l": [np.float32(1)]}
    default_collate([sample, sample])
    default_convert(sample)
    assert seen == []
    same(default_collate([Tensor([1, 2]), Tensor([3, 4])]), np.int16([[1, 2], [3, 4]]))
    same(default_convert({"t": Tensor([1, 2])})["t"], np.int16([1, 2]))


def test_whatever_offers_an_array_is_batched_and_an_error_of_it_names_the_field() -> None:
    same(
        default_collate([{"t": Convertible([1, 2])}, {"t": np.float64([3, 4])}])["t"],
        np.array([[1.0, 2.0], [3.0, 4.0]]),
    )
    with pytest.raises(CollateError, match=r"field t: item 0 .*copy it to the host first") as caught:
        default_collate([{"t": Convertible(RuntimeError("copy it to the host first"))}])
    assert isinstance(caught.value.__cause__, RuntimeError)


# -- the registry


def test_a_function_for_float_gets_columns_with_floats_and_nothing_else() -> None:
    register_collate(float, as_single)
    sample = {"a": np.float64(1.5), "b": np.int16(7), "c": True, "d": 3, "e": 2.5}
    dtypes = {key: value.dtype for key, value in default_collate([sample, sample]).items()}
    assert dtypes == {"a": np.float64, "b": np.int16, "c": np.bool_, "d": np.int64, "e": np.float32}
    same(default_collate([2, 1.5]), np.float32([2, 1.5]))
    with pytest.raises(CollateError, match="NoneType"):
        default_collate([1.5, None])


def test_a_registered_function_gets_the_values_and_the_map_in_workers_too() -> None:
    calls: list[Any] = []

    def keep(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
        calls.append((batch, collate_fn_map))
        return "kept"

    register_collate(set, keep)
    snapshot = registry_snapshot()
    assert default_collate([{"s": {1}}, {"s": {2}}]) == {"s": "kept"}
    assert calls == [([{1}, {2}], {set: keep})]
    register_collate(set, None)
    with pytest.raises(CollateError):
        default_collate([{1}])
    install_registry(snapshot)
    assert default_collate([{1}]) == "kept"


def test_a_function_for_a_class_serves_its_subclasses_and_a_nearer_one_wins() -> None:
    class Base: ...

    class Derived(Base): ...

    register_collate(Base, lambda batch, **_: "base")
    assert default_collate([Derived(), Base()]) == "base"
    register_collate(Derived, lambda batch, **_: "derived")
    assert default_collate([Derived()]) == "derived"
    with pytest.raises(CollateError, match="same type"):
        default_collate([Base(), Derived()])
    register_collate((Base, Derived), lambda batch, **_: "both")
    assert default_collate([Base(), Derived()]) == "both"


def test_a_function_for_an_abstract_class_takes_containers_but_not_numbers_and_strings() -> None:
    for kind in (collections.abc.Mapping, numbers.Number, collections.abc.Sized):
        register_collate(kind, lambda batch, kind=kind, **_: kind.__name__)
    assert default_collate([{"a": 1}]) == "Mapping"
    same(default_collate([1]), np.array([1]))
    assert default_collate(["a"]) == ["a"]


def test_a_function_for_a_container_for_arrays_or_for_none_replaces_our_rule() -> None:
    register_collate((list, np.ndarray), lambda batch, **_: batch)
    assert default_collate([{"boxes": [1, 2]}, {"boxes": [3]}]) == {"boxes": [[1, 2], [3]]}
    assert len(default_collate([np.zeros(2), np.zeros(3)])) == 2
    register_collate(type(None), lambda batch, **_: [value is None for value in batch])
    assert default_collate([{"y": None}, {"y": 1}]) == {"y": [True, False]}
    assert default_collate([{"y": 1}, {"y": None}]) == {"y": [False, True]}


def test_an_error_in_a_registered_function_names_the_field() -> None:
    register_collate(set, lambda batch, **_: {}["mine"])
    with pytest.raises(KeyError, match="mine") as caught:
        default_collate([{"a": {1}}])
    assert caught.value.__notes__ == ["in the collate function registered for set, for field a"]


@pytest.mark.parametrize(("kind", "function"), [("float", as_single), (float, 3), ((float, 1), as_single)])
def test_a_registration_that_cannot_work_is_refused(kind: Any, function: Any) -> None:
    before = registry_snapshot()
    with pytest.raises(OptionError, match="register_collate needs"):
        register_collate(kind, function)
    assert registry_snapshot() == before
