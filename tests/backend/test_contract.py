"""The contract of a backend: ours keep it, and each way to break it is caught."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from agnoload import AgnoloadWarning, Backend, BackendUnavailable, OptionError, get_backend
from agnoload.testing.backends import check_backend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device"),
    [("numpy", None), ("torch", "cpu"), ("jax", None), ("jax", "cpu:0"), ("cupy", None)],
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


def boxed(change: Callable[[Any, Boxed.Box], Any], base: type[Boxed] = Boxed) -> type[Boxed]:
    """A backend that changes the boxes it has made; what `change` returns, if anything, takes the box's place."""

    def convert(self: Boxed, leaf: Any) -> Any:
        box = Boxed.convert(self, leaf)
        return (change(leaf, box) or box) if isinstance(box, Boxed.Box) else box

    return type("Changed", (base,), {"convert": convert})


def loose(leaf: Any, box: Boxed.Box) -> None:
    """Let the box share the memory without a reference to it."""
    if box.array.size and box.array.flags.c_contiguous and box.array.base is not None:
        facts = {**box.array.__array_interface__}
        box.array = np.asarray(type("Loose", (), {"__array_interface__": facts})())


def shared(leaf: Any, box: Boxed.Box) -> None:
    """Share what the dataset has not given away."""
    box.array = leaf if not leaf.flags.writeable and leaf.ndim == 1 else box.array


def narrow(leaf: Any, box: Boxed.Box, said: int = 0) -> None:
    if box.array.dtype.char in "lqLQ":
        box.array = box.array.astype(np.int32)
        for _ in range(said):
            warnings.warn("int64 becomes int32", AgnoloadWarning, stacklevel=2)


def flat(leaf: Any, box: Boxed.Box) -> None:
    box.array = np.atleast_1d(box.array)


def swap(leaf: Any, box: Boxed.Box) -> None:
    if not leaf.dtype.isnative:
        box.array = leaf.view(leaf.dtype.newbyteorder("="))


def having(base: type[Boxed] = Boxed, **members: Any) -> type[Boxed]:
    return type("Changed", (base,), members)


kept: list[Any] = []


def upper(self: Boxed, leaf: Any) -> Any:
    return leaf.upper() if isinstance(leaf, str) else Boxed.convert(self, leaf)


def unmasked(self: Boxed, leaf: Any) -> Any:
    return self.Box(np.asarray(leaf)) if isinstance(leaf, np.ma.MaskedArray) else Boxed.convert(self, leaf)


def greedy(self: Boxed, leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, self.Box) else np.asarray(leaf)


def garbled(self: Boxed, value: Any) -> Any:
    return (np.zeros_like, value.array) if isinstance(value, self.Box) else None


def reorder(self: Boxed, batch: Any, device: Any) -> Callable[[], Any]:
    return lambda: dict(sorted(batch.items(), reverse=True)) if isinstance(batch, dict) else batch


def late(self: Boxed, batch: Any, device: Any) -> Callable[[], Any]:
    """Read the memory when the batch is due, without having kept it."""
    if not isinstance(batch, dict) or set(batch) != {"x", "y", "z"}:
        return lambda: batch
    for box in batch.values():
        loose(None, box)
    return lambda: {key: self.Box(box.array.copy()) for key, box in batch.items()}


class Stuck(Boxed):
    state = 0

    def seed(self, number: int) -> None:
        type(self).state = number

    def rng_state(self) -> int:
        return self.state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "device", "complaint"),
    [
        (having(name="numpy"), None, "name must be the backend's own"),
        (boxed(loose), None, "changed while it was kept"),
        (boxed(lambda leaf, box: kept.append(leaf)), None, "must come free"),
        (boxed(shared), None, "changed with the dataset's read-only array"),
        (boxed(narrow), None, r"int64 became int32.*must say so, got \[\]"),
        (boxed(partial(narrow, said=2)), None, "one AgnoloadWarning must say so, got"),
        (having(convert=upper), None, "'text' must stay"),
        (having(convert=unmasked), None, "masked_array.*must stay"),
        (boxed(flat), None, r"a scalar: the shape must stay \(\), became \(1,\)"),
        (boxed(swap), None, "big-endian: the values must stay"),
        (having(to_numpy=lambda self, leaf: None), None, "to_numpy must take what convert gives"),
        (having(to_numpy=greedy), None, "to_numpy must give None for what is not its own"),
        (
            having(pack=lambda self, value: (np.asarray, np.zeros(1))),
            None,
            "what pack gives for .* must make it again|pack must give None",
        ),
        (having(pack=garbled), None, "what pack gives for .* must make it again, made"),
        (having(Placing, place=reorder), "far", "keep its structure and order"),
        (having(Placing, place=late), "far", "changed while it was kept"),
        (having(check=lambda self, device=None, pin_memory=False: None), None, "check must refuse a device"),
        (having(Placing, place=Backend.place), "far", "whose check returns a device must define place"),
        (Stuck, None, "set_rng_state must put back"),
        (having(seed_from=lambda self, generator: 1), None, "seed_from must give None"),
        (having(world=lambda self: (1, 1)), None, "rank < size"),
    ],
)
def test_each_way_to_break_the_contract_is_named(kind: type[Backend], device: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){complaint}"):
        check_backend(kind, device)
    kept.clear()
