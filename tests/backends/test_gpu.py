"""What only a GPU can show: page-locked slots, copies that queue, memory that is not refilled too early."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from agnoload import AgnoloadError, get_backend
from agnoload.testing.backends import check_backend

pytestmark = pytest.mark.gpu

NAMES = {"torch": "cuda:0", "jax": "gpu:0", "cupy": "cuda:0"}


@pytest.fixture(params=sorted(NAMES))
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    try:
        get_backend(request.param).check(NAMES[request.param])
    except AgnoloadError as error:
        pytest.skip(str(error))
    return str(request.param)


def test_c51_the_contract_holds_on_the_device(name: str) -> None:
    check_backend(name, NAMES[name])


def test_c52_a_page_locked_slot_is_not_refilled_before_its_copy_has_ended(name: str) -> None:
    backend = get_backend(name)
    device = backend.check(NAMES[name], pin_memory=True)
    slots = [np.zeros(1 << 24, np.uint8) for _ in range(3)]
    undo = [backend.attach(slot) for slot in slots]
    free = list(range(3))
    placed: list[tuple[int, Any]] = []
    for number in range(60):
        batch = _Lease(slots[free[0]], free, number).arrays()
        converted = {key: backend.convert(leaf) for key, leaf in batch.items()}
        finish = backend.place(converted, device)
        del batch, converted
        placed.append((number, finish()["x"]))
        while not free:
            backend.place({}, device)()  # lets go of what has been copied
            gc.collect()  # and so does JAX
    for number, x in placed:
        array = backend.to_numpy(x)
        assert array is not None
        assert (array == number).all(), f"batch {number} was overwritten"
    for each in undo:
        each()


class _Lease:
    """Takes a slot from the free list, and gives it back when the last of its arrays has died."""

    def __init__(self, slot: Any, free: list[int], number: int) -> None:
        place = free.pop(0)
        slot[:] = number
        self.__array_interface__ = slot.__array_interface__
        weakref.finalize(self, free.append, place)

    def arrays(self) -> dict[str, Any]:
        return {"x": np.frombuffer(np.asarray(self), np.uint8)}


def test_c53_a_tensor_in_a_locked_slot_is_pinned_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    backend = get_backend("torch")
    backend.check(pin_memory=True)
    slot = np.zeros(1 << 20, np.uint8)
    undo = backend.attach(slot)
    leaf = slot[4096:8192].view(np.float32)
    tensor = backend.convert(leaf)
    assert tensor.is_pinned()
    assert tensor.data_ptr() == leaf.ctypes.data
    undo()
    loose = backend.convert(np.zeros(4, np.float32))
    assert loose.is_pinned()


def test_c52_a_slot_whose_copy_the_user_queued_is_fenced() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    backend = get_backend("torch")
    backend.check(pin_memory=True)
    slot = np.zeros(1 << 26, np.uint8)
    undo = backend.attach(slot)
    side = torch.cuda.Stream()
    for number in range(1, 20):
        slot[:] = number
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            copy = backend.convert(slot).to("cuda", non_blocking=True)
        passed = backend.fence()
        assert not passed()
        while not passed():
            pass
        slot[:] = 0
        torch.cuda.synchronize()
        assert int(copy.min()) == int(copy.max()) == number
    undo()
