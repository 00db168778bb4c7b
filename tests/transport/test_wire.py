"""The codec: what comes out of a slot is what went in, and arrays that lie there already are not copied."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agnoload.transport import pickling
from agnoload.transport.arena import Arena, Slot, Slots
from agnoload.transport.payload import pack
from agnoload.transport.wire import SHARE, SMALL, decode, encode

Pair = namedtuple("Pair", "left right")
STRUCT = np.dtype([("a", "<i4"), ("b", ">f8"), ("c", "U3"), ("d", "<u2", (2,))], align=True)
DTYPES = [
    "?", "i1", "<i8", ">i4", "u8", "<f2", "<f4", ">f8", "g", "c8", ">c16", "S3", "U5", ">U2", "V3", "M8[ns]", "m8[s]",
    ">M8[D]", STRUCT, "O", "T",
]  # fmt: skip


@dataclass
class Box:
    content: Any
    note: str = ""


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(reserved=0, capacity=4)) as arena:
        yield arena


def worker_slot(arena: Arena) -> Slot:
    """A slot as a worker sees it."""
    return Slots(arena.fd)[arena.acquire().number]


def through(value: Any, arena: Arena, slot: Slot | None = None) -> Any:
    """Encoded on one side, decoded on the other."""
    there = slot or worker_slot(arena)
    return decode(encode(value, there), arena[there.number], arena)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        return (
            type(found) is type(wanted)
            and found.dtype == wanted.dtype
            and found.shape == wanted.shape
            and (found.tolist() == wanted.tolist() if wanted.dtype.hasobject else _equal(found, wanted))
            and (found.flags.writeable == wanted.flags.writeable or wanted.dtype.hasobject or not wanted.size)
        )
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, Box):
        return same(found.content, wanted.content) and found.note == wanted.note
    return bool(found == wanted) or pickle.dumps(found) == pickle.dumps(wanted)


def _equal(found: np.ndarray, wanted: np.ndarray) -> bool:
    if wanted.dtype.names:  # what lies between the fields is nobody's
        return all(_equal(found[name], wanted[name]) for name in wanted.dtype.names)
    return found.tobytes() == wanted.tobytes()


# ------------------------------------------------------------------------------------------------ round trips

LAYOUTS = {
    "in order": lambda array: array,
    "Fortran": np.asfortranarray,
    "transposed": lambda array: array.T,
    "every second": lambda array: array[::2] if array.ndim else array,
    "backwards": lambda array: array[::-1] if array.ndim else array,
    "a column": lambda array: array[..., 0] if array.ndim and array.shape[-1] else array,
    "spread out": lambda array: np.broadcast_to(array, (2, *array.shape)),
}


@st.composite
def arrays(draw: Any) -> Any:
    """A function that makes an array, in the slot that it is given or beside it."""
    dtype = np.dtypes.StringDType() if (name := draw(st.sampled_from(DTYPES))) == "T" else np.dtype(name)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    layout = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))]
    inside, writable, seed = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 2**32))

    def make(slot: Slot) -> np.ndarray:
        array = slot.empty(shape, dtype) if inside and not dtype.hasobject else np.empty(shape, dtype)
        if dtype.hasobject:
            array[...] = np.array([str(seed)] * array.size).reshape(shape)
        else:
            raw = np.random.default_rng(seed).integers(0, 128, array.nbytes, np.uint8)  # below 128: legal text
            array[...] = _legal(raw, dtype).reshape(shape)
        laid = layout(array)
        if not writable:
            laid = laid.view()
            laid.flags.writeable = False
        return laid

    return make


def _legal(raw: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Random items of a dtype; text is spelled out, since not every 4 bytes are a character."""
    if dtype.names:
        items = np.zeros(raw.nbytes // dtype.itemsize, dtype)
        for name in dtype.names:
            items[name] = np.arange(items[name].size).reshape(items[name].shape)
        return items
    if dtype.kind == "U":
        return raw[: raw.nbytes // dtype.itemsize].astype(dtype)
    if dtype.kind == "b":
        return raw > 63
    return np.frombuffer(raw.tobytes(), dtype)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.sampled_from([np.float32(1.5), np.int16(-3), np.datetime64("2024-02-29"), np.str_("x"), Ellipsis, range(3)]),
)


def built(tree: Any, slot: Slot) -> Any:
    """A tree with its arrays made."""
    if callable(tree):
        return tree(slot)
    if isinstance(tree, dict):
        return type(tree)((key, built(value, slot)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(built(value, slot) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(built(value, slot) for value in tree)
    return Box(built(tree.content, slot), tree.note) if isinstance(tree, Box) else tree


TREES = st.recursive(
    arrays() | LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=2).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, st.text(max_size=3)),
    ),
    max_leaves=8,
)


@given(tree=TREES, copied=st.booleans())
@settings(max_examples=60)
def test_a_decoded_batch_equals_the_batch_that_was_encoded(tree: Any, copied: bool) -> None:
    with closing(Arena(reserved=0, capacity=1)) as arena:
        slot = worker_slot(arena)
        value = built(tree, slot)
        place = encode(value, slot)
        found = decode(place, arena[slot.number], None if copied else arena)
        assert same(found, value)
        if copied or not place.arrays:
            assert arena.lent == 0
        if copied:
            kept = copy.deepcopy(found)
            slot.bytes[:] = 255
            assert same(copy.deepcopy(found), kept)


def test_dtypes_of_extensions_and_with_metadata_travel(arena: Arena) -> None:
    assert through(np.zeros(3, np.dtype("i4", metadata={"unit": "m"})), arena).dtype == np.dtype("i4")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    array = np.arange(6).astype(bfloat16)
    found = through(array, arena)
    assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


# ------------------------------------------------------------------------------------------------ no copies


@given(
    shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=3, max_side=6),
    layout=st.sampled_from(sorted(set(LAYOUTS) - {"Fortran"})),
    dtype=st.sampled_from(["<i4", ">f8", "u1"]),
)
def test_a_view_of_an_array_in_the_slot_is_not_copied_and_keeps_its_strides(
    shape: tuple[int, ...], layout: str, dtype: str
) -> None:
    with closing(Arena(reserved=0, capacity=1)) as arena:
        slot = worker_slot(arena)
        array = slot.empty(shape, dtype)
        array[...] = np.arange(array.size).reshape(shape)
        used, view = slot.used, LAYOUTS[layout](array)
        place = encode({"view": view, "again": (view, array)}, slot)
        assert place.offset == used
        assert place.nbytes < 512
        found = decode(place, arena[slot.number], arena)["view"]
        assert found.strides == view.strides
        assert (found == view).all()
        del found


@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=20), fortran=st.booleans(), code=st.booleans())
def test_an_array_from_elsewhere_is_copied_once_and_keeps_its_order(
    shape: tuple[int, ...], fortran: bool, code: bool
) -> None:
    with closing(Arena(reserved=0, capacity=1)) as arena:
        slot = worker_slot(arena)
        array = np.asarray(np.arange(np.prod(shape)).reshape(shape), order="F" if fortran else "C")
        place = encode([array, array, (lambda: 1) if code else 1], slot)  # code that has no name takes a second try
        assert place.offset == -(-array.nbytes // 64) * 64
        first, second, _ = decode(place, arena[slot.number], arena)
        assert first is second
        assert (first.flags.f_contiguous, first.flags.c_contiguous) == (
            array.flags.f_contiguous, array.flags.c_contiguous,
        )  # fmt: skip
        assert (first == array).all()
        del first, second


@given(
    sizes=st.lists(st.integers(1, 4000) | st.sampled_from([SMALL - 1, SMALL, 20 * SMALL]), min_size=2, max_size=6),
    inside=st.booleans(),
    copied=st.booleans(),
)
def test_a_small_array_of_a_large_batch_has_memory_of_its_own(sizes: list[int], inside: bool, copied: bool) -> None:
    with closing(Arena(reserved=0, capacity=1)) as arena:
        slot = worker_slot(arena)
        batch = [slot.empty((size,), np.uint8) if inside else np.empty(size, np.uint8) for size in sizes]
        for number, array in enumerate(batch):
            array[:] = number
        for number, array in enumerate(decode(encode(batch, slot), arena[slot.number], None if copied else arena)):
            base = array
            while isinstance(base.base, np.ndarray):
                base = base.base
            assert array.nbytes >= SMALL or base.nbytes <= max(SMALL, SHARE * array.nbytes)
            assert (array == number).all()


def test_decoded_arrays_are_aligned_views_of_the_slot(arena: Arena) -> None:
    slot = worker_slot(arena)
    a, b = through([np.zeros(3, np.uint8), np.zeros(5)], arena, slot)
    assert a.ctypes.data % 64 == b.ctypes.data % 64 == 0
    slot.bytes[:3] = 9
    assert a.tolist() == [9, 9, 9]
    b[:] = 4
    assert slot.bytes[64:104].view(np.float64).tolist() == [4.0] * 5


def test_views_of_one_memory_still_share_it(arena: Arena) -> None:
    slot = worker_slot(arena)
    array = slot.empty((8,), np.int64)
    array[:] = 0
    left, right, whole = through([array[:5], array[3:], array], arena, slot)
    left[4] = 7
    assert right.tolist() == [0, 7, 0, 0, 0]
    assert whole[4] == 7


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=5), keep=st.integers(0, 4), writable=st.booleans())
def test_each_array_alone_holds_the_slot(sizes: list[int], keep: int, writable: bool) -> None:
    with closing(Arena(reserved=0, capacity=1)) as arena:
        arrays = [np.arange(size) for size in sizes]
        for array in arrays:
            array.flags.writeable = writable
        found = through(arrays, arena)[keep % len(sizes)]
        assert arena.lent == 1
        assert (found.flags.writeable, found.tolist()) == (writable, [*range(sizes[keep % len(sizes)])])
        del found
        assert arena.lent == 0


def test_memory_of_other_objects_and_subclasses_of_arrays_travel_too(arena: Arena) -> None:
    masked, records = np.ma.masked_equal([1, 2, 3], 2), np.rec.array([(1, 2.0)], names="a,b")
    buffer, held, found, rows = through([pickle.PickleBuffer(b"abc"), bytearray(b"xyz"), masked, records], arena)
    assert (bytes(buffer), held) == (b"abc", b"xyz")
    assert isinstance(found, np.ma.MaskedArray)
    assert found.mask.tolist() == [False, True, False]
    assert rows.a.tolist() == [1]


# ------------------------------------------------------------------------------------------------ by value


def test_classes_and_functions_without_an_importable_name_travel(arena: Arena) -> None:
    @dataclass
    class Local:
        x: np.ndarray

    found = through([Local(np.arange(4)), lambda n: n + 1, Counter("aab")], arena)
    assert type(found[0]).__name__ == "Local"
    assert found[0].x.tolist() == [0, 1, 2, 3]
    assert found[1](2) == 3
    assert found[2] == {"a": 2, "b": 1}
    assert arena.lent == 1


def test_a_class_that_came_by_value_goes_back_by_name(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(list[Any]):
        pass

    fd, classes, _ = pack(Local, {}, {}, "spawn")
    os.close(fd)
    monkeypatch.setattr(pickling, "_learned", set())
    value = [Local([np.arange(3)]), Local()]
    by_value = encode(value, worker_slot(arena))
    pickling.learn_classes(classes)
    slot = worker_slot(arena)
    by_name = encode(value, slot)
    assert by_name.nbytes < 300 < by_value.nbytes
    assert type(decode(by_name, arena[slot.number], arena)[0]) is Local


def test_a_lock_in_a_batch_is_an_error(arena: Arena) -> None:
    with pytest.raises(TypeError, match="pickle"):
        through([np.zeros(3), threading.Lock()], arena)
