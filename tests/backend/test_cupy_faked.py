"""The logic of the CuPy backend against a stand-in for CuPy: the order of calls and what is refused, not one copy.

What only a GPU can show is in `test_gpu.py`.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agnoload import AgnoloadWarning, BackendUnavailable, DataLoader, OptionError, get_backend
from agnoload.backend import registry
from agnoload.testing.backends import check_backend


class FakeArray:
    """A fake `cupy.ndarray`, filled when its stream runs."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.array = np.full(shape, 1, dtype)

    def set(self, source: Any, stream: Any = None) -> None:
        assert source.flags.c_contiguous
        assert source.dtype == self.array.dtype
        log.append("copy now" if stream is None else f"copy on {stream.name}")
        self.array[...] = source


class FakeStream:
    def __init__(self, name: str = "side", non_blocking: bool = False) -> None:
        self.name = name

    def record(self) -> FakeEvent:
        log.append(f"event on {self.name}")
        return FakeEvent()

    def wait_event(self, event: FakeEvent) -> None:
        log.append(f"{self.name} waits")

    def synchronize(self) -> None:
        log.append(f"{self.name} synchronized")


class FakeEvent:
    def __init__(self) -> None:
        events.append(self)

    @property
    def done(self) -> bool:
        return bool(settings.done)


class FakeDevice:
    def __init__(self, number: int = 0) -> None:
        self.id = number

    def __enter__(self) -> None:
        log.append(f"device {self.id}")

    def __exit__(self, *_: Any) -> None:
        pass


class FakeCUDARuntimeError(RuntimeError):
    pass


log: list[Any] = []
events: list[FakeEvent] = []
settings = SimpleNamespace(devices=2, done=False, refuse=False)


def device_count() -> int:
    if settings.devices < 0:
        raise FakeCUDARuntimeError("cudaErrorInsufficientDriver")
    return int(settings.devices)


def host_register(address: int, size: int, flags: int) -> None:
    if settings.refuse:
        raise FakeCUDARuntimeError("cudaErrorNotSupported")
    log.append(("register", address, size, flags))


@pytest.fixture(autouse=True)
def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "cupy" in sys.modules:
        pytest.skip("the real CuPy is here")
    module: Any = ModuleType("cupy")
    module.ndarray = FakeArray
    module.empty = FakeArray
    module.asnumpy = lambda array: array.array.copy()
    consumer = FakeStream("consumer")
    runtime = SimpleNamespace(
        getDeviceCount=device_count,
        getDevice=lambda: 1,
        hostRegister=host_register,
        hostUnregister=lambda address: log.append(("unregister", address)),
        deviceSynchronize=lambda: log.append("synchronize"),
        CUDARuntimeError=FakeCUDARuntimeError,
    )
    module.cuda = SimpleNamespace(
        runtime=runtime, Device=FakeDevice, Stream=FakeStream, get_current_stream=lambda: consumer
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(registry, "_loaded", None)  # and forgets the stand-in afterwards
    log.clear()
    events.clear()
    vars(settings).update(devices=2, done=False, refuse=False)
    yield
    sys.modules.pop("agnoload_cupy.arrays", None)  # it has imported the stand-in


@pytest.fixture
def backend() -> Any:
    return get_backend("cupy")


@pytest.mark.slow
def test_faked_the_contract_holds_where_copies_are_instant() -> None:
    settings.done = True
    check_backend("cupy")
    check_backend("cupy", "cuda:1")


@pytest.mark.parametrize(
    ("devices", "reason"),
    [(0, "CuPy finds no NVIDIA GPU"), (-1, "no working NVIDIA GPU or driver: cudaErrorInsufficientDriver")],
)
def test_faked_without_a_gpu_the_constructor_of_a_loader_gives_the_reason(devices: int, reason: str) -> None:
    settings.devices = devices
    with pytest.raises(BackendUnavailable, match=reason):
        DataLoader(range(4), 2, backend="cupy")


def test_faked_samples_of_cupy_arrays_become_batches_on_the_gpu() -> None:
    def sample(number: int) -> dict[str, Any]:
        array = FakeArray((3,), np.float32)
        array.array[:] = number
        return {"x": array, "pair": (array, number)}

    settings.done = True
    samples = [sample(number) for number in range(4)]
    for options in ({"backend": "cupy"}, {"backend": "cupy", "device": "cuda:1"}):
        for first, batch in enumerate(DataLoader(samples, 2, **options)):
            rows = [[float(2 * first)] * 3, [float(2 * first + 1)] * 3]
            assert isinstance(batch["x"], FakeArray)
            assert batch["x"].array.dtype == np.float32
            assert batch["x"].array.tolist() == batch["pair"][0].array.tolist() == rows
    plain = list(DataLoader(samples, 4))
    assert type(plain[0]["x"]) is np.ndarray
    assert plain[0]["x"][:, 0].tolist() == [0, 1, 2, 3]


def test_faked_a_device_is_a_number_a_name_or_cupys_own(backend: Any) -> None:
    assert backend.check() == 1  # the current one
    assert backend.check(0) == backend.check("cuda:0") == backend.check("cuda") == backend.check(FakeDevice(0)) == 0
    for device in ("cpu", "cuda:x", 1.5, True, object()):
        with pytest.raises(OptionError, match="device must be a GPU's number"):
            backend.check(device)
    with pytest.raises(OptionError, match="device must be one of cuda:0 to cuda:1, got 2"):
        backend.check(2)


def test_faked_a_copy_waits_for_its_memory_and_the_consumer_for_the_copy(backend: Any) -> None:
    device = backend.check("cuda:1")
    batch = {"x": backend.convert(np.arange(3)), "y": backend.convert(np.arange(4.0)[::-1]), "name": "text"}
    finish = backend.place(batch, device)
    order = ["event on consumer", "side waits", "copy on side", "copy on side", "event on side"]
    assert log == ["device 1", "device 1", *order]  # the first for the stream
    log.clear()
    placed = finish()
    assert log == ["device 1", "consumer waits"]
    assert backend.to_numpy(placed["x"]).tolist() == [0, 1, 2]
    assert backend.to_numpy(placed["y"]).tolist() == [3, 2, 1, 0]
    assert placed["name"] == "text"


def test_faked_a_batch_is_held_until_its_copy_has_ended(backend: Any) -> None:
    class Lease(np.ndarray[Any, Any]):
        pass

    device = backend.check()
    leaf = np.zeros(3).view(Lease)
    alive = weakref.ref(leaf)
    finish = backend.place([leaf[:]], device)
    del leaf
    finish()
    gc.collect()
    assert alive() is not None
    settings.done = True
    finish()
    gc.collect()
    assert alive() is None


def test_faked_a_slot_is_locked_on_its_device_and_a_refusal_is_one_warning(backend: Any) -> None:
    backend.check(1, pin_memory=True)
    slot = np.zeros(4096, np.uint8)
    backend.attach(slot)()
    address = slot.ctypes.data
    assert log == ["device 1", ("register", address, 4096, 1), "device 1", "synchronize", ("unregister", address)]
    settings.refuse = True
    with pytest.warns(AgnoloadWarning, match=r"cannot be page-locked \(cudaErrorNotSupported\)") as caught:
        undone = [backend.attach(slot) for _ in range(2)]
    assert len(caught) == 1
    log.clear()
    for undo in undone:
        undo()
    assert log == []
