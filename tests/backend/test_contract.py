"""The contract of a backend: ours keep it, and each way to break it is caught."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agnoload import AgnoloadWarning, Backend, BackendUnavailable, OptionError, get_backend
from agnoload.testing.backends import check_backend


@pytest.mark.parametrize(
    ("name", "device"),
    [("numpy", None), ("torch", None), ("jax", None), ("jax", "cpu:0"), ("cupy", None)],
)
def test_our_backends_keep_the_contract(name: str, device: Any) -> None:
    pytest.importorskip(name)
    try:
        get_backend(name).check(device)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    check_backend(name, device)


class Boxed(Backend):
    """A good backend in pure Python: a box around the array."""

    name = "boxed"

    class Box:
        def __init__(self, array: Any) -> None:
            self.array = array

    def convert(self, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc" or leaf.dtype.char in "gG":
            return leaf
        if isinstance(leaf, np.ma.MaskedArray):
            return leaf
        return self.Box(leaf if leaf.flags.writeable else leaf.copy())

    def to_numpy(self, leaf: Any) -> Any:
        return leaf.array if isinstance(leaf, self.Box) else None


class Placing(Boxed):
    """The same, with a device."""

    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        if device not in (None, "far"):
            raise OptionError(f"device must be 'far', got {device!r}")
        return device

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        return lambda: batch


@pytest.mark.slow
def test_a_good_backend_passes_with_and_without_a_device() -> None:
    check_backend(Boxed)
    check_backend(Placing(), "far")


class Unnamed(Boxed):
    name = "numpy"


class Forgetting(Boxed):
    """Shares the memory without a reference to it."""

    def convert(self, leaf: Any) -> Any:
        box = super().convert(leaf)
        if isinstance(box, self.Box) and box.array.size and box.array.flags.c_contiguous and box.array.base is not None:
            facts = {**box.array.__array_interface__}
            box.array = np.asarray(type("Loose", (), {"__array_interface__": facts})())
        return box


class Leaking(Boxed):
    kept: list[Any] = []  # noqa: RUF012

    def convert(self, leaf: Any) -> Any:
        self.kept.append(leaf)
        return super().convert(leaf)


class Sharing(Boxed):
    """Shares what the dataset has not given away."""

    def convert(self, leaf: Any) -> Any:
        box = super().convert(leaf)
        if isinstance(box, self.Box) and not leaf.flags.writeable and leaf.ndim == 1:
            box.array = leaf
        return box


class Narrowing(Boxed):
    said = 0

    def convert(self, leaf: Any) -> Any:
        box = super().convert(leaf)
        if isinstance(box, self.Box) and box.array.dtype.char in "lqLQ":
            box.array = box.array.astype(np.int32)
            for _ in range(self.said):
                warnings.warn("int64 becomes int32", AgnoloadWarning, stacklevel=2)
        return box


class Chatty(Narrowing):
    said = 2


class Text(Boxed):
    def convert(self, leaf: Any) -> Any:
        return leaf.upper() if isinstance(leaf, str) else super().convert(leaf)


class Masks(Boxed):
    def convert(self, leaf: Any) -> Any:
        return self.Box(np.asarray(leaf)) if isinstance(leaf, np.ma.MaskedArray) else super().convert(leaf)


class Flat(Boxed):
    def convert(self, leaf: Any) -> Any:
        box = super().convert(leaf)
        if isinstance(box, self.Box):
            box.array = np.atleast_1d(box.array)
        return box


class Swapped(Boxed):
    def convert(self, leaf: Any) -> Any:
        box = super().convert(leaf)
        if isinstance(box, self.Box) and not leaf.dtype.isnative:
            box.array = leaf.view(leaf.dtype.newbyteorder("="))
        return box


class OneWay(Boxed):
    def to_numpy(self, leaf: Any) -> Any:
        return None


class Greedy(Boxed):
    def to_numpy(self, leaf: Any) -> Any:
        return leaf.array if isinstance(leaf, self.Box) else np.asarray(leaf)


class Grabbing(Boxed):
    def pack(self, value: Any) -> Any:
        return np.asarray, np.zeros(1)


class Garbling(Boxed):
    def pack(self, value: Any) -> Any:
        return (np.zeros_like, value.array) if isinstance(value, self.Box) else None


class Reordering(Placing):
    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        return lambda: dict(sorted(batch.items(), reverse=True)) if isinstance(batch, dict) else batch


class Late(Placing):
    """Reads the memory when the batch is due, without having kept it."""

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        loose = Forgetting()
        if set(batch) != {"x", "y", "z"} if isinstance(batch, dict) else True:
            return lambda: batch
        views = {key: loose.convert(box.array) for key, box in batch.items()}
        return lambda: {key: self.Box(view.array.copy()) for key, view in views.items()}


class Careless(Boxed):
    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        return None


class Stuck(Boxed):
    state = 0

    def seed(self, number: int) -> None:
        type(self).state = number

    def rng_state(self) -> int:
        return self.state


class Generous(Boxed):
    def seed_from(self, generator: Any) -> int:
        return 1


class Alone(Boxed):
    def world(self) -> tuple[int, int]:
        return 1, 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "device", "complaint"),
    [
        (Unnamed, None, "name must be the backend's own"),
        (Forgetting, None, "changed while it was kept"),
        (Leaking, None, "must come free"),
        (Sharing, None, "changed with the dataset's read-only array"),
        (Narrowing, None, r"int64 became int32.*must say so, got \[\]"),
        (Chatty, None, "one AgnoloadWarning a loader must say so"),
        (Text, None, "'text' must stay"),
        (Masks, None, "masked_array.*must stay"),
        (Flat, None, r"a scalar: the shape must stay \(\), became \(1,\)"),
        (Swapped, None, "big-endian: the values must stay"),
        (OneWay, None, "to_numpy must take what convert gives"),
        (Greedy, None, "to_numpy must give None for what is not its own"),
        (Grabbing, None, "what pack gives for .* must make it again|pack must give None"),
        (Garbling, None, "what pack gives for .* must make it again, made"),
        (Reordering, "far", "keep its structure and order"),
        (Late, "far", "changed while it was kept"),
        (Careless, None, "check must refuse a device"),
        (Stuck, None, "set_rng_state must put back"),
        (Generous, None, "seed_from must give None"),
        (Alone, None, "rank < size"),
    ],
)
def test_each_way_to_break_the_contract_is_named(kind: type[Backend], device: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){complaint}"):
        check_backend(kind, device)
    Leaking.kept.clear()
