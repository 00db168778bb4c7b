"""Samples to batch: values, dtypes and structure as they were, memory taken once, and errors that lead to the field."""

from __future__ import annotations

import collections
import collections.abc
import enum
import numbers
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
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
    name: str


@dataclass
class Scan:
    image: Any
    total: Any = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.image.sum()
        self.of_this_sample = True


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    before = registry_snapshot()
    yield
    install_registry(before)


def same(got: Any, expected: Any) -> None:
    """Compare arrays with their dtypes, and all else with its types."""
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected, strict=True)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    else:
        assert got == expected


def as_single(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    return np.array(batch, np.float32)


# -- the cases


def test_c01_unequal_shapes_name_the_field_both_items_and_both_shapes() -> None:
    samples = [{"target": {"boxes": np.zeros(3)}, "y": 1}, {"target": {"boxes": np.zeros(4)}, "y": 2}]
    with pytest.raises(CollateError) as caught:
        default_collate(samples)
    assert (caught.value.path, caught.value.items) == ("target.boxes", (0, 1))
    for part in ("target.boxes", "(3,)", "(4,)", "item 0", "item 1", "ragged_collate(fields=['target.boxes'])"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "odd"),
    [
        ([(3,), (3,), (4,)], 2),
        ([(3,), (3, 1)], 1),
        ([(2, 3), (3, 2)], 1),
        ([(), (1,)], 1),
        ([(1,), ()], 1),
        ([(8, 2), (8, 0), (8, 4)], 1),
        ([(0,), (0, 2)], 1),
        ([(3,), (1,), (5,)], 1),
    ],
)
def test_c01_every_pair_of_unequal_shapes_is_seen_before_memory_is_taken(shapes: list[Any], odd: int) -> None:
    memory = Memory()
    with pytest.raises(CollateError) as caught:
        collate([np.zeros(shape) for shape in shapes], memory)
    assert caught.value.items == (0, odd)
    assert str(shapes[odd]) in str(caught.value)
    assert memory.given == []


@pytest.mark.parametrize("other", [np.zeros(3), 1.5, "text", [1], {"a": 1}], ids=lambda value: type(value).__name__)
def test_c01_none_in_some_samples_names_the_sample_that_has_it(other: Any) -> None:
    for samples, none in (([{"y": None}, {"y": other}], 0), ([{"y": other}, {"y": None}], 1)):
        with pytest.raises(CollateError, match=f"field y: .*item {none} has no value .NoneType.") as caught:
            default_collate(samples)
        assert (caught.value.path, caught.value.items) == ("y", (0, 1))


def test_c01_none_in_all_samples_stays_none() -> None:
    assert default_collate([{"y": None}, {"y": None}]) == {"y": None}


def test_c02_numbers_keep_their_types() -> None:
    sample = {"a": np.float32(1.5), "b": np.int16(7), "c": True, "d": 3, "e": 2.5, "f": 1j}
    same(
        default_collate([sample, sample]),
        {
            "a": np.array([1.5, 1.5], np.float32),
            "b": np.array([7, 7], np.int16),
            "c": np.array([True, True]),
            "d": np.array([3, 3], np.int64),
            "e": np.array([2.5, 2.5], np.float64),
            "f": np.array([1j, 1j], np.complex128),
        },
    )


def test_c02_a_function_for_float_changes_float_and_nothing_else() -> None:
    register_collate(float, as_single)
    sample = {"a": np.float64(1.5), "b": np.int16(7), "c": True, "d": 3, "e": 2.5}
    dtypes = {key: value.dtype for key, value in default_collate([sample, sample]).items()}
    assert dtypes == {"a": np.float64, "b": np.int16, "c": np.bool_, "d": np.int64, "e": np.float32}


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([2**63 - 1, -(2**63)], np.int64),
        ([2**63, 0], np.uint64),
        ([2**64 - 1, 1], np.uint64),
        ([2**63, -1], object),
        ([2**64, 1], object),
        ([-(2**63) - 1, 1], object),
    ],
)
def test_c02_no_int_overflows(values: list[int], dtype: Any) -> None:
    batch = default_collate(values)
    assert batch.dtype == dtype
    assert batch.tolist() == values


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
    ],
)
def test_c02_mixed_numbers_promote_as_numpy_does(values: list[Any], dtype: Any) -> None:
    for order in (values, values[::-1]):
        batch = default_collate(order)
        assert batch.dtype == dtype
        assert batch.tolist() == [value.item() if hasattr(value, "item") else value for value in order]


@pytest.mark.parametrize("size", [1, 3, JOINED_BYTES])
def test_c02_a_promotion_to_a_dtype_of_the_same_size_converts_the_values(size: int) -> None:
    rows = [np.full(size, 1.5), np.full(size, 2, np.int64)]
    same(default_collate(rows), np.stack([np.full(size, 1.5), np.full(size, 2.0)]))


def test_c03_a_key_that_some_samples_lack_is_named_in_either_order() -> None:
    samples: list[Any] = [{"a": 1, "b": 2}, {"a": 3}]
    for order, lacks in ((samples, 1), (samples[::-1], 0)):
        with pytest.raises(CollateError, match=rf"item {lacks} lacks 'b', which item {1 - lacks} has") as caught:
            default_collate(order)
        assert caught.value.items == (lacks, 1 - lacks)


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, collections.UserDict])
def test_c03_other_keys_of_the_same_number_are_seen_and_nothing_is_added_to_a_sample(make: Any) -> None:
    samples = [make(a=1, b=2), make(a=3, c=4)]
    with pytest.raises(CollateError, match="item 1 lacks 'b'"):
        default_collate({"deep": sample} for sample in samples)
    counting = [collections.defaultdict(int, a=1, b=2), collections.defaultdict(int, a=3)]
    with pytest.raises(CollateError, match="item 1 lacks 'b'"):
        default_collate(counting)
    assert counting[1] == {"a": 3}


def test_c03_lists_of_unequal_length_name_both_lengths() -> None:
    with pytest.raises(CollateError, match=r"item 0 has length 2 and item 1 has length 1.*ragged_collate") as caught:
        default_collate([[1, 2], [3]])
    assert caught.value.items == (0, 1)
    with pytest.raises(CollateError, match=r"field \[1\].t: .*fields=\['\[1\].t'\]") as caught:
        default_collate([(0, {"t": (1, 2)}), (0, {"t": (1, 2)}), (0, {"t": (1,)})])
    assert (caught.value.path, caught.value.items) == ("[1].t", (0, 2))


def test_c03_lists_are_batched_place_by_place() -> None:
    same(default_collate([[1, 2], [3, 4]]), [np.array([1, 3]), np.array([2, 4])])


# -- memory


def test_every_array_is_written_once_into_the_memory_that_is_given() -> None:
    memory = Memory()
    samples = [
        {
            "x": np.full((2, 2), i, np.float32),
            "n": i,
            "s": np.float16(i),
            "big": np.full(5000, i),
            "name": "a",
            "z": None,
        }
        for i in range(3)
    ]
    batch = collate(samples, memory)
    assert [array.dtype for array in memory.given] == [np.float32, np.int64, np.float16, np.int64]
    for key, array in zip(("x", "n", "s", "big"), memory.given, strict=True):
        assert batch[key] is array
        same(array, np.stack([sample[key] for sample in samples]))


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


# -- arrays

DTYPES = [
    "?",
    "i1",
    "u1",
    "i2",
    "f2",
    "i4",
    "f4",
    "i8",
    "u8",
    "f8",
    "c8",
    "c16",
    ">f4",
    ">i2",
    "S3",
    "U2",
    "M8[s]",
    "m8[ms]",
]
DTYPES += ["i4,f8", "V5", "g"]


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


@given(st.lists(st.sampled_from(["?", "i1", "u2", "i4", "f4", "i8", "f8", "c8", ">f8"]), min_size=2, max_size=5))
def test_mixed_dtypes_promote_as_numpy_stacks_them(dtypes: list[str]) -> None:
    arrays = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in dtypes]
    expected = np.stack(arrays)
    batch = collate(arrays)
    assert batch.dtype == (dtypes[0] if len(set(dtypes)) == 1 else expected.dtype)
    np.testing.assert_array_equal(batch, expected)


@pytest.mark.parametrize("nbytes", [JOINED_BYTES - 1, JOINED_BYTES, JOINED_BYTES + 1, 10 * JOINED_BYTES])
def test_items_of_every_size_are_written_whole(nbytes: int) -> None:
    rows = [np.arange(i, i + nbytes).astype(np.uint8) for i in range(5)]
    same(default_collate(rows), np.stack(rows))


@pytest.mark.parametrize("kind", ["U", "S"])
def test_strings_in_arrays_are_never_cut(kind: str) -> None:
    rows = [np.array(["a", "bc"]).astype(kind), np.array(["longer", ""]).astype(kind), np.array(["", ""]).astype(kind)]
    batch = default_collate(rows)
    assert batch.dtype == np.dtype(f"{kind}6")
    assert batch.tolist() == [row.tolist() for row in rows]


def test_times_of_different_units_keep_their_values() -> None:
    fine, coarse = np.datetime64("2020-01-01T00:00:00.001"), np.datetime64("2021-05-06")
    batch = default_collate([coarse, fine])
    assert batch.dtype == np.dtype("M8[ms]")
    assert batch.tolist() == [coarse.astype("M8[ms]").item(), fine.item()]


def test_structured_scalars_are_stacked() -> None:
    rows = np.array([(1, 2.5), (3, 4.5)], "i4,f8")
    same(default_collate(list(rows)), rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [("f8", "U3"), ("i8", "M8[s]"), ("m8[s]", "M8[s]"), ("S2", "U2"), ("i4", "i4,f8"), ("V3", "V4"), ("i8", "m8[s]")],
)
def test_dtypes_that_would_change_the_meaning_are_refused_before_memory_is_taken(one: str, other: str) -> None:
    memory = Memory()
    for pair in ((one, other), (other, one)):
        with pytest.raises(CollateError, match="field x: arrays must have dtypes") as caught:
            collate([{"x": np.zeros(2, pair[0])}, {"x": np.zeros(2, pair[0])}, {"x": np.zeros(2, pair[1])}], memory)
        assert caught.value.items == (0, 2)
        assert str(np.dtype(one)) in str(caught.value)
        assert str(np.dtype(other)) in str(caught.value)
    assert memory.given == []


def test_extension_dtypes_are_kept_and_promoted() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rows = [np.array([1.5, i], ml_dtypes.bfloat16) for i in range(3)]
    same(default_collate(rows), np.stack(rows))
    assert default_collate([rows[0], np.float32([1, 2])]).dtype == np.float32
    assert default_collate([row[0] for row in rows]).dtype == ml_dtypes.bfloat16


def test_subclasses_of_ndarray_give_plain_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(3, 2))
    mapped[:] = np.arange(6).reshape(3, 2)
    same(default_collate(list(mapped)), np.array(mapped))
    same(default_collate([mapped[0], np.zeros(2, np.float32)]), np.float32([[0, 1], [0, 0]]))


def test_masked_arrays_are_refused_for_they_would_lose_their_mask() -> None:
    with pytest.raises(CollateError, match=r"field x: item 0 is a masked array.*filled"):
        default_collate([{"x": np.ma.masked_array([1, 2], [True, False])}])
    register_collate(np.ma.MaskedArray, lambda batch, **_: np.ma.stack(batch))
    assert default_collate([np.ma.masked_array([1, 2], [True, False])] * 2).mask.tolist() == [[True, False]] * 2


# -- structure


def test_containers_keep_their_types() -> None:
    def sample(i: int) -> Any:
        return {
            "t": (i, [i]),
            "p": Point(np.float32(i), {"k": i}),
            "b": Box(np.arange(i, i + 2), "box"),
            "e": ((), [], {}),
        }

    same(
        default_collate([sample(0), sample(1)])["t"],
        (np.array([0, 1]), [np.array([0, 1])]),
    )
    batch = default_collate([sample(0), sample(1)])
    same(batch["p"], Point(np.float32([0, 1]), {"k": np.array([0, 1])}))
    same(batch["e"], ((), [], {}))
    assert type(batch["b"]) is Box
    same(batch["b"].corners, np.array([[0, 1], [1, 2]]))
    assert batch["b"].name == ["box", "box"]


def test_a_dataclass_is_batched_by_its_fields_alone() -> None:
    batch = default_collate([Scan(np.array([1, 2])), Scan(np.array([3, 4]))])
    same(batch.image, np.array([[1, 2], [3, 4]]))
    same(batch.total, np.array([3, 7]))
    assert not hasattr(batch, "of_this_sample")


def test_mappings_keep_their_types_and_the_order_of_the_first() -> None:
    ordered = collections.OrderedDict
    batch = default_collate([ordered(b=1, a=2), ordered(a=3, b=4)])
    assert type(batch) is ordered
    same(dict(batch), {"b": np.array([1, 4]), "a": np.array([2, 3])})
    same(default_collate([{"b": 1, "a": 2}, {"a": 3, "b": 4}]), {"b": np.array([1, 4]), "a": np.array([2, 3])})
    counted = default_collate([collections.defaultdict(list, a=1)] * 2)
    assert (type(counted), counted.default_factory) == (collections.defaultdict, list)
    mixed = default_collate([ordered(a=1), {"a": 2}])
    assert type(mixed) is ordered
    same(mixed["a"], np.array([1, 2]))


def test_strings_and_bytes_become_lists() -> None:
    same(default_collate([("a", b"b"), ("longer", b"")]), (["a", "longer"], [b"b", b""]))
    assert default_collate([np.str_("a"), "bc"]) == ["a", "bc"]


def test_the_batch_is_another_list_than_the_samples() -> None:
    samples = ["a", "b"]
    batch = default_collate(samples)
    batch.append("c")
    assert samples == ["a", "b"]


def test_an_enum_of_ints_is_a_field_of_ints() -> None:
    class Colour(enum.IntEnum):
        RED = 4

    same(default_collate([Colour.RED, Colour.RED]), np.array([4, 4]))
    same(default_collate([Colour.RED, 5]), np.array([4, 5]))


@pytest.mark.parametrize(
    ("samples", "types"),
    [
        ([1, "a"], ("int", "str")),
        ([[1], (1,)], ("list", "tuple")),
        ([{"a": 1}, [1]], ("dict", "list")),
        ([np.zeros(1), "a"], ("numpy.ndarray", "str")),
        ([Point(1, 2), (1, 2)], ("Point", "tuple")),
    ],
)
def test_samples_of_different_types_are_refused_with_both_types(samples: list[Any], types: tuple[str, str]) -> None:
    with pytest.raises(CollateError, match=r"field q\[0\]: all samples must have the same type") as caught:
        default_collate([{"q": [samples[0]]}, {"q": [samples[0]]}, {"q": [samples[1]]}])
    assert (caught.value.path, caught.value.items) == ("q[0]", (0, 2))
    for name in types:
        assert name in str(caught.value)


@pytest.mark.parametrize("value", [{1, 2}, object()], ids=lambda value: type(value).__name__)
def test_what_nobody_knows_is_refused_with_path_type_and_remedy(value: Any) -> None:
    name = type(value).__name__
    with pytest.raises(CollateError, match=rf"field a.b: item 0 is {name}.*register_collate\({name}, function\)"):
        default_collate([{"a": {"b": value}}] * 2)


def test_a_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(CollateError, match="at least one sample"):
        default_collate([])


def test_a_collate_error_keeps_path_and_items_through_pickle() -> None:
    with pytest.raises(CollateError) as caught:
        default_collate([{"x": np.zeros(1)}, {"x": np.zeros(2)}])
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.path, twin.items) == (str(caught.value), "x", (0, 1))


# -- other libraries' arrays


class Tensor:
    """An array of some other library."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __dlpack__(self) -> Any:
        raise NotImplementedError


class Convertible(Tensor):
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.data)


def test_whatever_offers_an_array_is_batched() -> None:
    batch = default_collate([{"t": Convertible(np.float32([1, 2]))}, {"t": Convertible(np.float32([3, 4]))}])
    same(batch["t"], np.float32([[1, 2], [3, 4]]))
    same(default_collate([Convertible(np.float32([1])), np.float64([2])]), np.array([[1.0], [2.0]]))


def test_a_backend_turns_another_librarys_arrays_into_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_numpy(leaf: Any) -> Any:
        return np.asarray(leaf.data, np.int16) if type(leaf) is Tensor else None

    monkeypatch.setattr(registry, "to_numpy", to_numpy)
    same(default_collate([Tensor([1, 2]), Tensor([3, 4])]), np.int16([[1, 2], [3, 4]]))
    same(default_convert({"t": Tensor([1, 2])})["t"], np.int16([1, 2]))
    same(default_collate([Convertible(np.float32(1))]), np.float32([1]))
    with pytest.raises(CollateError, match="object"):
        default_collate([object()])


def test_backends_never_see_what_numpy_and_python_know(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(registry, "to_numpy", seen.append)
    sample = {"x": np.zeros(2), "n": 1, "f": 2.5, "s": "text", "b": True, "z": None, "l": [np.float32(1)]}
    default_collate([sample, sample])
    default_convert(sample)
    assert seen == []


def test_a_conversion_that_fails_names_the_field_and_keeps_the_cause() -> None:
    class Device(Tensor):
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("copy it to the host first")

    with pytest.raises(CollateError, match=r"field t: item 0 .*copy it to the host first") as caught:
        default_collate([{"t": Device(1)}])
    assert isinstance(caught.value.__cause__, RuntimeError)


# -- the registry


def test_a_registered_function_gets_the_values_and_the_map() -> None:
    calls: list[Any] = []

    def keep(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
        calls.append((batch, collate_fn_map))
        return "kept"

    register_collate(set, keep)
    assert default_collate([{"s": {1}}, {"s": {2}}]) == {"s": "kept"}
    assert calls == [([{1}, {2}], {set: keep})]
    register_collate(set, None)
    with pytest.raises(CollateError):
        default_collate([{1}])


def test_a_function_for_a_class_serves_its_subclasses_and_a_nearer_one_wins() -> None:
    class Base: ...

    class Derived(Base): ...

    register_collate(Base, lambda batch, **_: "base")
    assert default_collate([Derived(), Base()]) == "base"
    register_collate(Derived, lambda batch, **_: "derived")
    assert default_collate([Derived()]) == "derived"
    with pytest.raises(CollateError, match="same type"):
        default_collate([Base(), Derived()])


def test_a_function_for_an_abstract_class_takes_containers_but_not_numbers_and_strings() -> None:
    register_collate(collections.abc.Mapping, lambda batch, **_: "mapping")
    register_collate(numbers.Number, lambda batch, **_: "number")
    register_collate(collections.abc.Sized, lambda batch, **_: "sized")
    assert default_collate([{"a": 1}]) == "mapping"
    same(default_collate([1]), np.array([1]))
    assert default_collate(["a"]) == ["a"]


def test_a_function_for_a_container_or_for_arrays_replaces_ours() -> None:
    register_collate((list, np.ndarray), lambda batch, **_: batch)
    assert default_collate([{"boxes": [1, 2]}, {"boxes": [3]}]) == {"boxes": [[1, 2], [3]]}
    assert len(default_collate([np.zeros(2), np.zeros(3)])) == 2


def test_a_function_for_none_gets_fields_that_are_none_in_some_samples() -> None:
    register_collate(type(None), lambda batch, **_: [value is None for value in batch])
    assert default_collate([{"y": None}, {"y": 1}]) == {"y": [True, False]}
    assert default_collate([{"y": 1}, {"y": None}]) == {"y": [False, True]}


def test_a_function_for_one_of_two_number_types_gets_both() -> None:
    register_collate(float, as_single)
    same(default_collate([2, 1.5]), np.float32([2, 1.5]))
    with pytest.raises(CollateError, match="NoneType"):
        default_collate([1.5, None])


def test_an_error_in_a_registered_function_names_the_field() -> None:
    def fail(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
        raise KeyError("mine")

    register_collate(set, fail)
    with pytest.raises(KeyError, match="mine") as caught:
        default_collate([{"a": {1}}])
    assert caught.value.__notes__ == ["in the collate function registered for set, for field a"]


def test_a_snapshot_makes_another_registry_the_same() -> None:
    register_collate(float, as_single)
    snapshot = pickle.loads(pickle.dumps({kind: name.__name__ for kind, name in registry_snapshot().items()}))
    assert snapshot == {float: "as_single"}
    there = registry_snapshot()
    register_collate(float, None)
    register_collate(int, as_single)
    install_registry(there)
    assert default_collate([1.5]).dtype == np.float32
    assert default_collate([1]).dtype == np.int64


@pytest.mark.parametrize(("kind", "function"), [("float", as_single), (float, 3), ((float, 1), as_single)])
def test_a_registration_that_cannot_work_is_refused(kind: Any, function: Any) -> None:
    before = registry_snapshot()
    with pytest.raises(OptionError, match="register_collate needs"):
        register_collate(kind, function)
    assert registry_snapshot() == before


# -- without batching


def test_convert_changes_scalars_and_other_libraries_arrays_only() -> None:
    array = np.asfortranarray(np.ones((2, 2), ">f4"))
    unknown = object()
    data = {
        "x": array,
        "n": 3,
        "t": ("text", np.int16(7), np.str_("s")),
        "o": unknown,
        "f": Convertible(np.float32([1])),
    }
    converted = default_convert(data)
    assert converted["x"] is array
    assert converted["o"] is unknown
    same(converted["n"], 3)
    same(converted["t"], ("text", np.array(7, np.int16), np.str_("s")))
    same(converted["f"], np.float32([1]))
    assert type(data["t"][1]) is np.int16  # type: ignore[index]


def test_convert_leaves_what_is_only_convertible_alone() -> None:
    class Picture:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise AssertionError("not asked for")

    picture = Picture()
    assert default_convert([picture])[0] is picture


def test_tensors_of_a_real_framework_are_batched() -> None:
    torch = pytest.importorskip("torch")
    same(default_collate([torch.tensor([1, i]) for i in range(2)]), np.array([[1, 0], [1, 1]]))
    same(default_convert((torch.tensor(1.5), {"n": 2})), (np.array(1.5, np.float32), {"n": 2}))
