"""What every backend must do: one test for ours and for those of others."""

from __future__ import annotations

import gc
import mmap
import pickle
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agnoload.backend.base import Backend
from agnoload.backend.registry import get_backend
from agnoload.batching.tree import map_leaves
from agnoload.errors import AgnoloadError, AgnoloadWarning
from agnoload.testing._require import require


def check_backend(backend: str | Backend | type[Backend], device: Any = None) -> None:
    """Run the contract of `agnoload.Backend` against a backend; `AssertionError` says which part does not hold.

    It covers dtypes (a narrower one must be announced by one `AgnoloadWarning`), byte orders, strides, scalars, empty
    and read-only arrays, what must pass through, structures, the lifetime of shared memory, copies ahead of time,
    page-locking, the way to a worker, generators and refusals. Objects are made of the backend's class without
    arguments, as a loader does. A backend that cannot run on this machine raises `BackendUnavailable`. `device` is as
    in `DataLoader`.

    >>> check_backend("numpy")
    """
    kind = type(get_backend(backend))
    _facts(kind)
    for check in (_dtypes, _layouts, _other_leaves, _structure, _read_only, _lifetime, _ahead, _attaching, _travelling):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AgnoloadWarning)
            check(_Desk(kind, device))
    _foreign_objects(kind())
    _generator(kind())


class _Desk:
    """One backend as a loader uses it: configured once, then given batches."""

    def __init__(self, kind: type[Backend], device: Any, pin_memory: bool = False) -> None:
        self.kind = kind
        self.asked = device
        self.backend = kind()
        self.device = self.backend.check(device, pin_memory)
        places = kind.place is not Backend.place
        require(places or self.device is None, "a backend whose check returns a device must define place")

    def start(self, batch: Any) -> Callable[[], Any]:
        converted = map_leaves(self.backend.convert, batch)
        return (lambda: converted) if self.device is None else self.backend.place(converted, self.device)

    def deliver(self, batch: Any) -> Any:
        return self.start(batch)()

    def array(self, delivered: Any) -> npt.NDArray[Any]:
        """What was delivered for an array, as an array again."""
        if isinstance(delivered, (np.ndarray, np.generic)):
            return np.asarray(delivered)
        array = self.backend.to_numpy(delivered)
        text = f"to_numpy must take what convert gives: got {array!r} for {delivered!r}"
        require(isinstance(array, np.ndarray), text)
        return np.asarray(array)

    def round_trip(self, leaf: Any, what: str) -> npt.NDArray[Any]:
        """Deliver one array and compare; the dtype may be another if the values are those of a cast."""
        array = self.array(self.deliver(leaf))
        require(array.shape == leaf.shape, f"{what}: the shape must stay {leaf.shape}, became {array.shape}")
        same = bool(np.all(array == leaf.astype(array.dtype)))
        require(same, f"{what}: the values must stay\n{leaf}\nbecame\n{array}")
        return array


def _facts(kind: type[Backend]) -> None:
    backend = kind()
    require(isinstance(backend.name, str) and bool(backend.name), f"name must be a non-empty str, got {backend.name!r}")
    require(kind is Backend or backend.name != "numpy", "name must be the backend's own, got 'numpy'")
    framework = backend.framework
    require(framework is None or isinstance(framework, str), f"framework must be a module's name, got {framework!r}")
    world = backend.world()
    legal = world is None or 0 <= world[0] < world[1]
    require(legal, f"world() must be None or (rank, size) with rank < size, got {world}")
    settings = backend.settings() if framework is None or framework in sys.modules else None
    require(settings is None or callable(pickle.loads(pickle.dumps(settings))), "settings() must be None or a function")
    environment = backend.worker_environment()
    words = [word for pair in environment.items() for word in pair] if isinstance(environment, Mapping) else [None]
    require(
        all(isinstance(word, str) for word in words), f"worker_environment() must map str to str, got {environment!r}"
    )


def _numbers() -> Iterator[npt.NDArray[Any]]:
    for code in "?bBhHiIlLqQefdFD":
        yield np.arange(6).reshape(2, 3).astype(code)
    try:
        import ml_dtypes
    except ImportError:
        return
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        yield np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))


def _dtypes(desk: _Desk) -> None:
    changed = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for leaf in _numbers():
            array = desk.round_trip(leaf, f"dtype {leaf.dtype}")
            if array.dtype != leaf.dtype:
                changed.append(f"{leaf.dtype} became {array.dtype}")
    said = [str(warning.message) for warning in caught if issubclass(warning.category, AgnoloadWarning)]
    require(not changed or len(said) == 1, f"{', '.join(changed)}: one AgnoloadWarning must say so, got {said}")
    require(bool(changed) or not said, f"no dtype changed, so no warning is due: got {said}")


def _layouts(desk: _Desk) -> None:
    base = np.arange(48, dtype=np.float32).reshape(6, 8)
    read_only = base.copy()
    read_only.flags.writeable = False
    odd = np.zeros(4 * 5 + 1, np.uint8)[1:].view(np.float32)
    odd[:] = 7
    layouts = {
        "C order": base.copy(),
        "Fortran order": np.asfortranarray(base),
        "transposed": base.copy().T,
        "every other column": base.copy()[:, ::2],
        "negative strides": base.copy()[::-1, ::-2],
        "negative strides, one row": base[:1, :1].copy()[::-1, ::-1],
        "big-endian": base.astype(">f4"),
        "little-endian": base.astype("<i2"),
        "big-endian, negative strides": base.astype(">i2")[::-1],
        "read-only": read_only,
        "broadcast": np.broadcast_to(np.float32(3), (2, 3)),
        "a field of records": np.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
        "an odd address": odd,
        "zero-size": np.zeros((0, 3), np.float32),
        "zero-size inside": np.zeros((2, 0, 3), np.int16),
        "a scalar": np.array(2.5, np.float32),
        "a read-only scalar": np.broadcast_to(np.int16(7), ()),
    }
    for what, leaf in layouts.items():
        array = desk.round_trip(leaf, what)
        same = array.dtype.newbyteorder("=") == leaf.dtype.newbyteorder("=")
        require(same, f"{what}: the dtype must stay {leaf.dtype}, became {array.dtype}")
    scalar = desk.array(desk.deliver(np.float32(1.5)))
    require(scalar.shape == () and scalar == 1.5, f"a NumPy scalar must stay 1.5, became {scalar!r}")


def _other_leaves(desk: _Desk) -> None:
    leaves: list[Any] = ["text", b"bytes", None, object(), range(3), np.str_("text"), np.zeros(2, [("a", "i4")])]
    leaves += [np.array(["a", "bc"]), np.array([b"a"]), np.array([None, "x"], object)]
    leaves += [np.array(["2020-01-01"], "M8[D]"), np.array([1], "m8[s]"), np.array(["a"], np.dtypes.StringDType())]
    leaves += [np.ma.masked_array([1, 2], mask=[True, False])]
    for leaf in leaves:
        delivered = desk.deliver(leaf)
        if delivered is not leaf:  # a framework that has a type for it may use it
            array = desk.backend.to_numpy(delivered)
            same = type(array) is type(leaf) and bool(np.all(array == leaf))
            require(same, f"{leaf!r} must stay, became {delivered!r}")
    wide = np.array([1, 2], np.longdouble) / 3
    back = desk.array(desk.deliver(wide))
    same = back.dtype == wide.dtype and bool(np.all(back == wide))
    require(same, f"long doubles must keep their values, became {back!r}")


class _Pair(NamedTuple):
    first: Any
    second: Any


def _structure(desk: _Desk) -> None:
    def leaf(number: int) -> npt.NDArray[Any]:
        return np.full((2, 3), number, np.float32)

    batch = {"x": leaf(0), "nested": [leaf(1), (leaf(2), "text")], "pair": _Pair(leaf(3), None), "empty": []}
    back = map_leaves(lambda out: out if out is None or isinstance(out, str) else desk.array(out), desk.deliver(batch))
    require(repr(back) == repr(batch), f"a batch must keep its structure and order\n{batch}\nbecame\n{back}")
    empties: list[Any] = [{}, [], ()]
    for empty in empties:
        out = desk.deliver(empty)
        require(type(out) is type(empty) and not out, f"an empty batch {empty!r} must stay, became {out!r}")


def _read_only(desk: _Desk) -> None:
    own = np.arange(16, dtype=np.float32)
    leaf = own[:]
    leaf.flags.writeable = False
    delivered = desk.deliver({"x": leaf})["x"]
    array = desk.array(delivered)
    if array.flags.writeable and delivered is not leaf:
        array[...] = -1
        require(own[1] == 1, "a write into a batch reached a dataset's read-only array: convert must copy it")
    elif delivered is not leaf:
        own[...] = -1
        same = bool(desk.array(delivered)[1] == 1)
        require(same, "a batch changed with the dataset's read-only array: convert must copy it")


class _Slots:
    """Memory that is refilled the moment that nobody can read it, as a loader's slots may be."""

    def __init__(self) -> None:
        self.leases: dict[int, weakref.finalize[Any, Any]] = {}

    def lend(self, number: int) -> dict[str, npt.NDArray[Any]]:
        memory = np.empty(2048, np.uint8)
        start = -memory.ctypes.data % 64
        slot = memory[start : start + 1024]
        anchor = _Anchor(slot)
        lease = weakref.finalize(anchor, slot.fill, 0xA5)
        lease.atexit = False
        self.leases[number] = lease
        view = memoryview(np.asarray(anchor))  # type: ignore[arg-type]  # before 3.12 the types do not know it
        batch: dict[str, npt.NDArray[Any]] = {
            "x": np.frombuffer(view[:256], np.float32).reshape(8, 8),
            "y": np.frombuffer(view[256:320], np.int16),
            "z": np.frombuffer(view[328:336], np.uint8),
        }
        for array in batch.values():
            array[...] = number
        return batch

    def held(self) -> list[int]:
        return [number for number, lease in self.leases.items() if lease.alive]


class _Anchor:
    """What the arrays of one slot hang from."""

    def __init__(self, slot: npt.NDArray[np.uint8]) -> None:
        self.__array_interface__ = slot.__array_interface__


def _lifetime(desk: _Desk) -> None:
    slots = _Slots()
    kept = {number: desk.deliver(slots.lend(number)) for number in range(40)}
    order = list(kept)
    random.Random(0).shuffle(order)
    _unchanged(desk, kept)
    for number in order:
        kept[number] = {name: leaf for name, leaf in kept[number].items() if name == "xyz"[number % 3]}
    _unchanged(desk, kept)
    for number in order[:-1]:
        del kept[number]
        if number % 5 == 0:
            _unchanged(desk, kept)
    kept.clear()
    for _ in range(3):  # a copy on its way, and garbage of the framework, may hold memory until the next batch
        desk.array(desk.deliver({"x": np.zeros(4, np.float32)})["x"])
        gc.collect()
    require(not slots.held(), f"the memory of dropped batches must come free, it is held for {slots.held()}")


def _unchanged(desk: _Desk, kept: Mapping[int, Mapping[str, Any]]) -> None:
    for number, batch in kept.items():
        for name, leaf in batch.items():
            same = bool(np.all(desk.array(leaf) == number))
            require(same, f"field {name!r} of batch {number} changed while it was kept: it must hold the leaf")


def _ahead(desk: _Desk) -> None:
    slots = _Slots()
    due = [(number, desk.start(slots.lend(number))) for number in range(8)]
    gc.collect()
    for number, finish in due:
        _unchanged(desk, {number: finish()})


def _attaching(desk: _Desk) -> None:
    pinning = _Desk(desk.kind, desk.asked, pin_memory=True)
    memory = mmap.mmap(-1, 1 << 16)
    slot = np.frombuffer(memory, np.uint8)
    undo = pinning.backend.attach(slot)
    leaf = slot[64:320].view(np.float32)
    leaf[:] = 3
    delivered = pinning.deliver({"x": leaf})
    require(bool(np.all(pinning.array(delivered["x"]) == 3)), "a batch in a page-locked slot must keep its values")
    del delivered, leaf
    passed = pinning.backend.fence()
    require(any(passed() for _ in range(10_000_000)), "fence() must say True once the device is done")
    before = slot.tobytes()
    undo()
    require(slot.tobytes() == before, "undoing attach must leave the slot as it is")


def _travelling(desk: _Desk) -> None:
    for leaf in _numbers():
        delivered = desk.deliver(leaf)
        packed = desk.backend.pack(delivered)
        if packed is not None:
            make, array = packed
            again = pickle.loads(pickle.dumps(make))(array)
            same = type(again) is type(delivered) and repr(desk.array(again)) == repr(desk.array(delivered))
            require(same, f"what pack gives for {delivered!r} must make it again, made {again!r}")


def _foreign_objects(backend: Backend) -> None:
    for thing in (object(), "text", [1], 3, type):
        require(backend.to_numpy(thing) is None, f"to_numpy must give None for what is not its own, such as {thing!r}")
        require(backend.pack(thing) is None, f"pack must give None for what is not its own, such as {thing!r}")
    for thing in (object(), np.random.default_rng(0)):
        text = f"must give None for what is not its own, such as {thing!r}"
        require(backend.seed_from(thing) is None, f"seed_from {text}")
        require(backend.reseed(thing, 1) is None, f"reseed {text}")
    try:
        backend.check(device=object())
    except AgnoloadError:
        return
    raise AssertionError("check must refuse a device that it does not know with OptionError or BackendUnavailable")


def _generator(backend: Backend) -> None:
    before = backend.rng_state()
    try:
        states = []
        for number in (1, 2**64 - 1, 1):
            backend.seed(number)
            states.append(repr(_plain(backend, backend.rng_state())))
        require(states[0] == states[2], "one seed must give one state of the generator")
        require(before is None or states[0] != states[1], "another seed must give another state of the generator")
    finally:
        backend.set_rng_state(before)
    same = repr(_plain(backend, backend.rng_state())) == repr(_plain(backend, before))
    require(same, "set_rng_state must put back what rng_state gave")


def _plain(backend: Backend, state: Any) -> Any:
    array = backend.to_numpy(state)
    return state if array is None else array.tobytes()
