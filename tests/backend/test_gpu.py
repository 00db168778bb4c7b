"""What only a GPU can show: page-locked slots, copies that queue, memory that is not refilled too early."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadError, AgnoloadWarning, DataLoader, get_backend
from agnoload.testing.backends import check_backend

pytestmark = pytest.mark.gpu

NAMES = {"torch": "cuda:0", "jax": "gpu:0", "cupy": "cuda:0"}


@pytest.fixture(scope="module", autouse=True)
def contexts() -> None:
    """The threads and descriptors of each framework's driver are there before a test counts them, and stay."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # there are others on the GPU
    for name, option in NAMES.items():
        if importlib.util.find_spec(name) is not None:
            backend = get_backend(name)
            try:
                device = backend.check(option)
            except AgnoloadError:
                continue
            backend.to_numpy(backend.place({"x": backend.convert(np.zeros(4, np.float32))}, device)()["x"])


@pytest.fixture(params=sorted(NAMES))
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    try:
        get_backend(request.param).check(NAMES[request.param])
    except AgnoloadError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return module


class Numbered(agnoload.Dataset):
    """A batch of four samples k, k + 1, ... holds their numbers, each `width` times."""

    def __init__(self, length: int, width: int = 1024) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full(self.width, index, np.int32), "name": f"sample {index}"}


def openers(iterator: Any) -> list[int]:
    """The workers that have opened a GPU."""
    found = []
    for pid in iterator._pool.pids().values():
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
        found += [pid] * any(link.startswith("/dev/nvidia") for link in links)
    return found


def test_c50_workers_of_a_parent_that_uses_the_gpu_do_not_open_it(name: str) -> None:
    method = multiprocessing.get_start_method(allow_none=True)
    to_numpy = get_backend(name).to_numpy
    options: dict[str, Any] = {"num_workers": 2, "backend": name, "device": NAMES[name], "pin_memory": True}
    with DataLoader(Numbered(64), 4, **options) as loader:
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            assert openers(iterator) == []
            host = to_numpy(batch["x"])
            assert host is not None
            assert (host == np.arange(4 * number, 4 * number + 4)[:, None]).all()
            assert batch["name"][3] == f"sample {4 * number + 3}"
        assert number == 15
    assert multiprocessing.get_start_method(allow_none=True) == method


def test_c50_a_fork_is_warned_of(torch: Any) -> None:
    loader = DataLoader(Numbered(8), 4, num_workers=2, multiprocessing_context="fork", backend="torch", device="cuda")
    with loader, pytest.warns(AgnoloadWarning, match="has opened /dev/nvidia"):
        assert [batch["x"][:, 0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class OnTheGpu(Numbered):
    def __getitem__(self, index: int) -> Any:
        import torch

        return {"x": torch.full((3,), index, device="cuda")}


@pytest.mark.parametrize("device", [None, "cuda"])
def test_c50_samples_on_the_gpu_come_as_they_do_without_workers(torch: Any, device: Any) -> None:
    found = []
    for workers in (0, 2):
        with DataLoader(OnTheGpu(16), 4, num_workers=workers, backend="torch", device=device) as loader:
            batches = [batch["x"] for batch in loader]
        assert {batch.device.type for batch in batches} == {device or "cpu"}
        found.append([batch.tolist() for batch in batches])
    assert found[0] == found[1] == [[[k] * 3 for k in range(at, at + 4)] for at in range(0, 16, 4)]


def sharding() -> Any:
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.local_devices(backend=NAMES["jax"].partition(":")[0])[:1]), ("data",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True])
def test_c51_a_hundred_batches_of_64_mib_arrive_whole(name: str, spread: bool) -> None:
    if spread and name != "jax":
        pytest.skip("shardings are JAX's")
    device = sharding() if spread else NAMES[name]
    options: dict[str, Any] = {"num_workers": 2, "backend": name, "device": device, "pin_memory": True}
    with DataLoader(Numbered(400, 1 << 22), 4, **options) as loader:
        for number, batch in enumerate(loader):
            assert batch["x"].nbytes == 64 << 20
            for row in range(4):
                assert not bool((batch["x"][row] != 4 * number + row).any())
        assert number == 99


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


def test_c53_a_tensor_in_a_locked_slot_is_pinned_without_a_copy(torch: Any) -> None:
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


def test_c52_a_slot_whose_copy_the_user_queued_is_fenced(torch: Any) -> None:
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


@pytest.mark.slow
def test_c52_batches_that_the_user_copies_and_drops_arrive_whole(torch: Any) -> None:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    first = torch.arange(4, device="cuda")[:, None]
    with DataLoader(Numbered(8000, 1 << 14), 4, num_workers=2, backend="torch", pin_memory=True) as loader:
        for number, batch in enumerate(loader):
            if number % 50 == 0:
                torch.cuda._sleep(20_000_000)  # some 10 ms in which copies queue
            copy = batch["x"].to("cuda", non_blocking=True)
            del batch
            wrong += (copy != first + 4 * number).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("placed", [True, False])
def test_c53_pinned_memory_stays_as_large_as_the_slots_and_goes_with_the_loader(name: str, placed: bool) -> None:
    if name == "jax" or (name == "cupy" and not placed):
        pytest.skip("it does not page-lock slots" if name == "jax" else "its batches are always on a GPU")
    kind: Any = type(get_backend(name))
    locked: dict[int, int] = {}

    class Spy(kind):  # type: ignore[misc]
        def attach(self, slot: Any) -> Callable[[], None]:
            undo = super().attach(slot)
            address = slot.ctypes.data
            locked[address] = slot.nbytes

            def counted() -> None:
                del locked[address]
                undo()

            return counted

    device, sizes = NAMES[name] if placed else None, []
    with DataLoader(Numbered(4000), 4, num_workers=2, backend=Spy(), device=device, pin_memory=True) as loader:
        for number, batch in enumerate(loader):
            if not placed:
                assert batch["x"].is_pinned()
                address = batch["x"].data_ptr()
                assert any(start <= address < start + nbytes for start, nbytes in locked.items())  # born there
            del batch
            if number in (100, 990):
                sizes.append(sum(locked.values()))
        assert number == 999
    assert 0 < sizes[1] <= sizes[0]
    assert locked == {}


def test_c53_no_other_device_gets_a_context(torch: Any) -> None:
    others = range(1, torch.cuda.device_count())
    if not others:
        pytest.skip("there is one GPU")
    with DataLoader(Numbered(40), 4, num_workers=1, backend="torch", device="cuda:0", pin_memory=True) as loader:
        list(loader)
    assert [number for number in others if torch._C._cuda_hasPrimaryContext(number)] == []


class FromJax(Numbered):
    def __getitem__(self, index: int) -> Any:
        import jax.numpy as jnp

        return {"x": jnp.full(3, index, jnp.int32), "half": jnp.full(2, index, jnp.bfloat16)}


def test_c54_workers_that_use_jax_do_not_open_the_gpu_that_the_parent_holds() -> None:
    jax = pytest.importorskip("jax")
    try:
        get_backend("jax").check(NAMES["jax"])
    except AgnoloadError as error:
        pytest.skip(str(error))
    found = []
    for workers in (0, 4):
        with DataLoader(FromJax(32), 4, num_workers=workers, backend="jax", device=NAMES["jax"]) as loader:
            iterator = iter(loader)
            batches = []
            for batch in iterator:
                batches.append(batch)
                assert workers == 0 or openers(iterator) == []
        assert {str(batch["half"].dtype) for batch in batches} == {"bfloat16"}
        assert {device for batch in batches for device in batch["x"].devices()} == {jax.devices()[0]}
        found.append([(batch["x"].tolist(), batch["half"].tolist()) for batch in batches])
    assert found[0] == found[1]
