"""The torch backend on a CPU, and the logic of its CUDA part against a recorder."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agnoload import AgnoloadWarning, BackendUnavailable, CollateError, OptionError, get_backend
from agnoload.backend import registry
from agnoload.testing.backends import _Slots

torch = pytest.importorskip("torch")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


few = settings(max_examples=50)


@pytest.fixture
def backend() -> Any:
    return get_backend("torch")


def test_the_slot_comes_free_exactly_when_the_last_tensor_dies(backend: Any) -> None:
    slots = _Slots()
    tensors = {name: backend.convert(leaf) for name, leaf in slots.lend(5).items()}
    view = tensors["x"][2:4].t()
    del tensors
    assert slots.held() == [5]
    assert view.eq(5).all()
    del view
    assert slots.held() == []


EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@few
@given(
    st.sampled_from([*"?bBhHiIlLqQefdFD", *EXTENDED]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.sampled_from(["shared", "read-only", "reversed", "swapped"]),
)
def test_an_array_becomes_a_tensor_of_its_memory_or_a_copy_and_comes_back(code: str, shape: Any, layout: str) -> None:
    backend = get_backend("torch")
    dtype = getattr(pytest.importorskip("ml_dtypes"), code) if code in EXTENDED else code
    leaf = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if layout == "swapped" and code not in EXTENDED:
        leaf = leaf.astype(leaf.dtype.newbyteorder(">"))
    elif layout == "reversed" and leaf.ndim:
        leaf = leaf[::-1]
    leaf.flags.writeable = layout != "read-only"
    tensor = backend.convert(leaf)
    native = leaf.dtype.newbyteorder("=")
    assert tensor.dtype is getattr(torch, native.name)
    back = backend.to_numpy(tensor)
    assert (back.dtype, back.shape, back.tolist()) == (native, shape, leaf.tolist())
    if leaf.size:
        assert (tensor.data_ptr() == leaf.ctypes.data) or layout != "shared"
        assert (tensor.data_ptr() != leaf.ctypes.data) or layout != "read-only"
        assert backend.convert(leaf.reshape(-1)[0]).shape == ()


def test_samples_with_tensors_become_arrays(backend: Any) -> None:
    plain = torch.arange(3)
    assert np.shares_memory(backend.to_numpy(plain), plain.numpy())
    assert backend.to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert backend.to_numpy(torch.ones(2, requires_grad=True) * 2).tolist() == [2, 2]
    assert backend.to_numpy(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]
    assert backend.to_numpy(torch.nn.Parameter(torch.zeros(1))).tolist() == [0]
    bfloat16 = backend.to_numpy(torch.tensor([1.5], dtype=torch.bfloat16).requires_grad_())
    assert (bfloat16.dtype.name, bfloat16.tolist()) == ("bfloat16", [1.5])


class TensorOfSomebody(torch.Tensor):  # type: ignore[name-defined,misc]
    """What torchvision and MONAI return: a subclass from another module."""


def test_tensors_of_other_kinds_are_recognised_refused_with_their_kind_or_left_alone(backend: Any) -> None:
    array = registry.to_numpy(torch.arange(3).as_subclass(TensorOfSomebody))
    assert array is not None
    assert array.tolist() == [0, 1, 2]
    for thing in (torch.float32, torch.Generator(), torch.nn.Linear(1, 1), torch.device("cpu"), np.zeros(1)):
        assert backend.to_numpy(thing) is None
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        sparse = torch.eye(2).to_sparse()
    with pytest.raises(CollateError, match=r"layout torch.sparse_coo, .* return tensor.to_dense\(\)"):
        backend.to_numpy(sparse)
    with pytest.raises(CollateError, match=r"device meta cannot become a NumPy array"):
        backend.to_numpy(torch.zeros(1, device="meta"))


def test_bfloat16_without_ml_dtypes_says_what_to_install(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(BackendUnavailable, match="pip install ml_dtypes"):
        backend.to_numpy(torch.zeros(1, dtype=torch.bfloat16))


@few
@given(
    hnp.array_shapes(min_dims=0, max_dims=3), st.sampled_from(["float32", "bool", "bfloat16", "complex64"]), st.data()
)
def test_a_plain_tensor_travels_as_an_array_that_shares_its_memory(shape: Any, dtype: str, data: st.DataObject) -> None:
    base = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))
    cuts = [st.builds(slice, st.integers(0, side), st.integers(0, side), st.integers(1, 2)) for side in shape]
    tensor = base[data.draw(st.tuples(*cuts))].permute(data.draw(st.permutations(range(len(shape)))))
    make, array = get_backend("torch").pack(tensor)
    again = make(array)
    assert type(again) is torch.Tensor
    assert again.dtype is tensor.dtype
    assert torch.equal(again, tensor)
    if tensor.numel() and (dtype != "bfloat16" or tensor.is_contiguous()):
        assert again.data_ptr() == tensor.data_ptr()


def test_a_tensor_that_is_more_than_its_numbers_travels_as_torch_pickles_it(backend: Any) -> None:
    named = torch.zeros(2)
    named.spacing = 0.5
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        sparse = torch.eye(2).to_sparse()
    more = [
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(1, requires_grad=True),
        torch.ones(1).as_subclass(TensorOfSomebody),
    ]
    conjugated = backend.pack(torch.tensor([1 + 2j]).conj())
    assert torch.equal(conjugated[0](conjugated[1]), torch.tensor([1 - 2j]))
    for value in [*more, named, sparse, torch.zeros(1).expand(10**9), torch.zeros(1, device="meta"), torch.float32, 3]:
        assert backend.pack(value) is None


def test_a_device_that_is_missing_or_wrong_is_refused_with_the_reason(backend: Any) -> None:
    if not torch.cuda.is_available():
        for device in ("cuda", "cuda:0", 0, torch.device("cuda", 1)):
            with pytest.raises(BackendUnavailable, match=r"device 'cuda.*cannot be used: (this build|torch finds)"):
                backend.check(device)
    for name in ("xpu", "mps"):
        if not getattr(torch, name).is_available():
            with pytest.raises(BackendUnavailable, match=f"torch cannot use device '{name}' here"):
                backend.check(name)
    for device in ("moon", object(), True, 1.5):
        with pytest.raises(OptionError, match=r"device must be what torch\.device takes"):
            backend.check(device)


def test_the_cpu_is_a_device_and_another_is_reached_by_to(backend: Any) -> None:
    class Own:
        def to(self, device: Any) -> str:
            return f"on {device}"

    tensor = backend.convert(np.arange(3))
    placed = backend.place({"x": tensor, "name": "text"}, backend.check("cpu"))()
    assert placed["x"] is tensor
    assert placed["name"] == "text"
    placed = backend.place({"x": tensor, "own": Own()}, backend.check("meta"))()
    assert placed["x"].device.type == "meta"
    assert placed["own"] == "on meta"


@no_gpu
def test_pinning_without_a_gpu_is_one_warning_and_right_data(backend: Any) -> None:
    with pytest.warns(AgnoloadWarning, match="pin_memory=True needs an NVIDIA GPU") as caught:
        assert backend.check(pin_memory=True) is None
    assert len(caught) == 1
    undo = backend.attach(np.zeros(4096, np.uint8))
    assert backend.convert(np.arange(3)).tolist() == [0, 1, 2]
    assert backend.fence()()
    undo()


PROGRAM = """
    import os, psutil, torch, agnoload, agnoload.backend.registry as registry
    (backend,) = registry.loaded_backends(); torch.cuda.manual_seed_all = torch.cuda.manual_seed = None
    before = backend.rng_state(); backend.seed(2**64 - 1); x = torch.rand(4)
    backend.set_rng_state(before); y = torch.rand(4)
    backend.seed(2**64 - 1); assert torch.equal(x, torch.rand(4)); assert not torch.equal(x, y)
    backend.set_rng_state(before); assert torch.equal(y, torch.rand(4))

    # A GPU that is asked for and not there is refused, and nothing is made.
    for name in ("torch", "cupy"):
        for pin in (False, True):
            try:
                agnoload.DataLoader(range(8), 4, num_workers=2, backend=name, device="cuda", pin_memory=pin)
            except agnoload.BackendUnavailable as error:
                print(error)
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    assert not any("memfd" in name for name in opened), opened
    assert psutil.Process().children() == []
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_the_generator_is_put_back_and_a_missing_gpu_refused_without_touching_cuda() -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    reasons = ["device 'cuda' cannot be used: "] * 2 + ["CuPy finds no |backend 'cupy' needs cupy"] * 2
    for line, reason in zip(done.stdout.splitlines(), reasons, strict=True):
        assert re.match(reason, line)


def test_a_generator_of_torch_gives_63_bits_and_advances() -> None:
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    numbers = [registry.seed_from(first) for _ in range(3)]
    assert len(set(numbers)) == 3
    assert all(number is not None and 0 <= number < 2**63 for number in numbers)
    assert [registry.seed_from(second) for _ in range(3)] == numbers


def test_rank_and_world_come_from_torch_distributed(backend: Any, tmp_path: Any) -> None:
    assert backend.world() is None
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed part")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert backend.world() == (0, 1)
        assert registry.rank_and_world(get_backend("numpy")) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
    assert backend.world() is None


class RecordedTensor(torch.Tensor):  # type: ignore[name-defined,misc]
    """A CPU tensor that says what is asked of it."""

    log: list[Any]
    locked: bool

    def is_pinned(self) -> bool:
        return self.locked

    def pin_memory(self) -> RecordedTensor:
        self.log.append("pinned by a copy")
        return recorded(self.log, locked=True)

    def to(self, device: Any, non_blocking: bool = False) -> RecordedTensor:
        self.log.append(f"copied, non_blocking={non_blocking}" if str(device) != str(self.device) else "stayed")
        return recorded(self.log)

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"recorded on {stream.name}")


def recorded(log: list[Any], locked: bool = False) -> RecordedTensor:
    tensor: RecordedTensor = torch.zeros(2).as_subclass(RecordedTensor)
    tensor.log, tensor.locked = log, locked
    return tensor


class FakeStream:
    def __init__(self, log: list[Any], name: str, handle: int = 0) -> None:
        self.log = log
        self.name = name
        self.cuda_stream = handle
        self.idle = True

    def query(self) -> bool:
        return self.idle

    def record_event(self) -> FakeEvent:
        self.log.append(f"event on {self.name}")
        return FakeEvent()

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits")


class FakeEvent:
    done = False

    def __init__(self) -> None:
        made.append(self)

    def query(self) -> bool:
        return self.done


made: list[FakeEvent] = []


class FakeCuda:
    """A fake `torch.cuda`: it records the order of calls, and runs nothing."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.refuse = 0
        self.consumer = FakeStream(self.log, "consumer")
        self.pool = [FakeStream(self.log, f"pool {number}", number + 1) for number in range(3)]
        self.given = 0

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        stream = self.pool[self.given % len(self.pool)]
        self.given += 1
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.log.append(f"device {device}")
        yield

    def current_stream(self, device: Any) -> FakeStream:
        return self.consumer

    default_stream = current_stream

    def device_count(self) -> int:
        return 2

    def cudart(self) -> Any:
        def register(address: int, size: int, flags: int) -> int:
            self.log.append(("register", address, size, flags))
            return self.refuse

        def unregister(address: int) -> int:
            self.log.append(("unregister", address))
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def check_error(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Puts the recorder in the place of CUDA, for the backend's CUDA part only."""
    import agnoload_torch.cuda as part

    cuda = FakeCuda()
    contexts = SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index == 1)
    ones = cuda.log.append
    stand_in = SimpleNamespace(
        Tensor=torch.Tensor, cuda=cuda, _C=contexts, ones=lambda *_, device: ones("a kernel takes the error")
    )
    monkeypatch.setattr(part, "torch", stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    part._pool.cache_clear()
    made.clear()
    return cuda


def test_fake_cuda_a_device_gets_its_number_and_a_slot_is_locked_until_its_copies_have_ended(
    backend: Any, fake: FakeCuda
) -> None:
    assert str(get_backend("torch").check("cuda")) == "cuda:1"
    assert str(get_backend("torch").check(0)) == "cuda:0"
    with pytest.raises(OptionError, match="device must be one of cuda:0 to cuda:1, got 'cuda:2'"):
        get_backend("torch").check("cuda:2")
    backend.check("cuda:1", pin_memory=True)
    slot = np.zeros(4096, np.uint8)
    undo = backend.attach(slot)
    address = slot.ctypes.data
    locked = ["device cuda:1", ("register", address, 4096, 1)]
    assert fake.log == locked
    undo()
    assert fake.log == [*locked, "device cuda:1", "synchronize", ("unregister", address)]


def test_fake_cuda_a_refusal_is_one_warning_and_batches_are_copied_to_be_pinned(backend: Any, fake: FakeCuda) -> None:
    own = SimpleNamespace(pin_memory=lambda: "pinned")  # a batch type of the user's own
    assert backend.convert(own) is own
    backend.check("cuda:1", pin_memory=True)
    fake.refuse = 801
    slots = [np.zeros(4096, np.uint8) for _ in range(2)]
    with pytest.warns(AgnoloadWarning, match=r"cannot be page-locked \(CUDA error 801\)") as caught:
        undone = [backend.attach(slot) for slot in slots]
    assert len(caught) == 1
    assert fake.log[-1] == "a kernel takes the error"
    for undo in undone:
        undo()
    assert ("unregister",) not in [entry[:1] for entry in fake.log]
    loose, locked = recorded(fake.log), recorded(fake.log, locked=True)
    fake.log.clear()
    assert backend.convert(loose) is not loose
    assert backend.convert(locked) is locked  # born pinned: no copy
    assert fake.log == ["pinned by a copy"]
    assert (backend.convert(own), backend.convert("text")) == ("pinned", "text")


def test_fake_cuda_a_copy_runs_beside_the_consumer_who_waits_for_an_event(backend: Any, fake: FakeCuda) -> None:
    device = backend.check("cuda:1")
    moves: list[Any] = []
    own = SimpleNamespace(to=moves.append)
    finish = backend.place({"x": recorded(fake.log), "own": own}, device)
    assert fake.log == ["on pool 0", "copied, non_blocking=True", "event on pool 0", "off pool 0"]
    assert moves == []
    fake.log.clear()
    finish()
    assert fake.log[:2] == ["consumer waits", "recorded on consumer"]
    assert moves == [device]


def test_fake_cuda_a_batch_is_held_until_its_copy_has_ended(backend: Any, fake: FakeCuda) -> None:
    device = backend.check("cuda:1")
    sources = [recorded(fake.log) for _ in range(3)]
    alive = [weakref.ref(source) for source in sources]
    finishes: list[Callable[[], Any]] = [backend.place([source], device) for source in sources]
    del sources
    for finish in finishes:
        finish()
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, True, True]  # the consumer has them, the device still copies
    made[0].done = True
    backend.place([], device)()
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, True, True]
    for event in made:
        event.done = True
    backend.place([], device)
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, False]


def test_fake_cuda_a_pinned_slot_is_refilled_only_after_what_its_user_queued(backend: Any, fake: FakeCuda) -> None:
    backend.check(pin_memory=True)
    assert backend.fence()()  # nothing is queued
    assert fake.log == []
    fake.pool[2].idle = False
    fake.consumer.idle = False
    passed = backend.fence()
    assert fake.log == ["event on consumer", "event on pool 2"]  # of the one device with a context
    assert not passed()
    for event in made[:-1]:
        event.done = True
    assert not passed()
    made[-1].done = True
    assert passed()
    other = get_backend("torch")
    other.check("cuda:1", pin_memory=True)  # the user never has the slot
    fake.log.clear()
    assert other.fence()()
    assert fake.log == []
