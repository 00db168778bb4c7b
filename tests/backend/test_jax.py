"""The JAX backend on CPU devices: one here, eight and two processes in fresh interpreters."""

from __future__ import annotations

import gc
import math
import os
import socket
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadWarning, BackendUnavailable, OptionError, get_backend
from agnoload.backend import registry
from agnoload.testing.backends import _Slots

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

one_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.device_count() != 1, reason="needs a CPU as JAX's only device"
)


@pytest.fixture
def backend() -> Any:
    return get_backend("jax")


def aligned(values: Any, offset: int = 0) -> Any:
    """A copy of an array at an address `offset` bytes behind a multiple of 64."""
    values = np.asarray(values)
    memory = np.zeros(values.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@one_cpu
@pytest.mark.parametrize("dtype", ["?", "b", "B", "h", "H", "i", "I", "e", "f", "F", "bfloat16", "float8_e5m2"])
def test_an_aligned_array_is_shared(backend: Any, dtype: str) -> None:
    if len(dtype) > 1:
        dtype = getattr(pytest.importorskip("ml_dtypes"), dtype)
    leaf = aligned(np.arange(32).astype(dtype))
    array = backend.convert(leaf)
    assert isinstance(array, jax.Array)
    assert array.dtype == leaf.dtype
    assert array.unsafe_buffer_pointer() == leaf.ctypes.data
    assert np.array_equal(np.asarray(array), leaf)


@pytest.fixture
def quick() -> Iterator[Any]:
    """What takes arrays, built again, and once more afterwards."""
    from agnoload_jax.arrays import _taker

    _taker.cache_clear()
    yield _taker
    _taker.cache_clear()


@one_cpu
@pytest.mark.parametrize("dtype", list("?bBhHiIefF"))
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 3, 4)])
def test_the_fast_path_gives_the_same_array_as_from_dlpack(quick: Any, dtype: str, shape: tuple[int, ...]) -> None:
    take = quick()
    assert take is not jax.dlpack.from_dlpack, (
        "this JAX has no such step any more: the tests of its results test nothing"
    )
    for offset in (0, 8):
        leaf = aligned(np.arange(math.prod(shape)).reshape(shape).astype(dtype), offset)
        one, other = take(leaf), jax.dlpack.from_dlpack(leaf)
        assert type(one) is type(other)
        assert one.aval == other.aval
        assert (one.weak_type, one.committed, one.sharding) == (other.weak_type, other.committed, other.sharding)
        assert np.array_equal(np.asarray(one), leaf)
        places = [array.unsafe_buffer_pointer() == leaf.ctypes.data for array in (one, other)]
        assert places[0] == places[1]


@one_cpu
@pytest.mark.parametrize("step", [None, lambda *_: jnp.zeros((4, 4)), lambda *_: jnp.zeros((4, 4), jnp.int8)])
def test_the_public_path_is_taken_where_jax_has_changed(
    quick: Any, step: Any, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    monkeypatch.setattr("jax._src.lib._jax.dlpack_managed_tensor_to_buffer", step)
    assert quick() is jax.dlpack.from_dlpack
    monkeypatch.undo()
    leaf = aligned(np.arange(32, dtype=np.float32))
    assert backend.convert(leaf).unsafe_buffer_pointer() == leaf.ctypes.data


@one_cpu
def test_an_array_that_is_not_aligned_is_copied(backend: Any) -> None:
    leaf = aligned(np.arange(32, dtype=np.float32), offset=16)
    array = backend.convert(leaf)
    leaf[:] = -1
    assert array.tolist() == list(range(32))


@one_cpu
def test_the_slot_is_free_as_soon_as_the_last_array_dies(backend: Any) -> None:
    slots = _Slots()
    gc.disable()  # nothing but the last reference frees it
    try:
        arrays = {name: backend.convert(leaf) for name, leaf in slots.lend(5).items()}
        doubled = jax.block_until_ready(arrays["x"] * 2)
        kept = arrays.pop("y")
        arrays.clear()
        assert slots.held() == [5]
        assert kept.tolist() == [5] * 32
        assert doubled.tolist() == [[10.0] * 8] * 8
        del kept
        assert slots.held() == []
    finally:
        gc.enable()


def test_a_host_view_of_a_jax_array_keeps_the_slot(backend: Any) -> None:
    slots = _Slots()
    view = np.asarray(backend.convert(slots.lend(5)["x"]))[2:]
    gc.collect()
    assert slots.held() == [5]
    assert (view == 5).all()


@pytest.mark.parametrize("placed", [False, True])
def test_donating_a_batch_writes_into_nobody_elses_memory(backend: Any, placed: bool) -> None:
    slots = _Slots()
    device = backend.check("cpu:0") if placed else None
    step = jax.jit(lambda state, x: (state + x, x * 2), donate_argnums=(0, 1))
    state = jnp.zeros((8, 8), jnp.float32)
    kept = []
    for number in range(1, 21):
        batch = slots.lend(number)
        other = batch["y"]  # another field of the same slot
        x = backend.place(batch, device)()["x"] if placed else backend.convert(batch["x"])
        state, doubled = step(state, x)
        kept.append((number, other, doubled))
        del batch, x
    assert np.asarray(state).tolist() == [[210.0] * 8] * 8
    for number, other, doubled in kept:
        assert (other == number).all()
        assert np.asarray(doubled).tolist() == [[2.0 * number] * 8] * 8


def test_batches_are_arguments_of_jit_and_grad(backend: Any) -> None:
    batch = agnoload.map_leaves(backend.convert, {"x": np.ones((4, 2), np.float32), "y": (np.zeros(4, np.int32),)})
    loss = jax.jit(jax.grad(lambda w, batch: ((batch["x"] @ w - batch["y"][0]) ** 2).sum()))
    assert loss(jnp.ones(2), batch).tolist() == [16.0, 16.0]


@pytest.mark.parametrize("placed", [False, True])
def test_c02_narrowing_gives_one_warning_for_each_loader(placed: bool) -> None:
    for _ in range(2):  # two loaders: said in each
        backend = get_backend("jax")
        device = backend.check("cpu:0") if placed else None
        leaves = [np.array([2**40 + 7]), np.array([1.5, 1e300]), np.array([2**40 + 7]), np.array([3], np.uint64)]
        with pytest.warns(AgnoloadWarning, match="int64.*int32") as caught:
            arrays = backend.place(leaves, device)() if placed else [backend.convert(leaf) for leaf in leaves]
        assert len(caught) == 1
        assert [str(array.dtype) for array in arrays] == ["int32", "float32", "int32", "uint32"]
        assert arrays[0].tolist() == [7]
        assert arrays[1].tolist() == [1.5, float("inf")]


@pytest.mark.slow
def test_with_64_bits_nothing_narrows_and_the_memory_is_shared() -> None:
    code = """
        import numpy as np, agnoload
        from agnoload.testing.backends import check_backend
        backend = agnoload.get_backend("jax")
        leaf = np.zeros(64, np.int64)
        leaf = leaf[-leaf.ctypes.data % 64 // 8:][:8]
        leaf[:] = 2**40 + 7
        array = backend.convert(leaf)
        assert array.dtype == np.int64 and array[0] == 2**40 + 7
        assert array.unsafe_buffer_pointer() == leaf.ctypes.data
        check_backend("jax")
        print("ok")
    """
    assert run(code, JAX_ENABLE_X64="1") == "ok\n"


def test_a_devices_name_number_and_object_are_one(backend: Any) -> None:
    (first, *_) = jax.local_devices(backend="cpu")
    assert backend.check("cpu") == backend.check("cpu:0") == first
    assert backend.check(first) is first
    assert get_backend("jax").check(0) == jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(first)
    assert get_backend("jax").check(sharding) is sharding
    assert get_backend("jax").check() is None


@pytest.mark.parametrize("device", ["moon", "moon:1"])
def test_a_platform_that_is_missing_is_unavailable(backend: Any, device: str) -> None:
    with pytest.raises(BackendUnavailable, match="JAX has no 'moon' devices here"):
        backend.check(device)


@pytest.mark.parametrize("device", ["cpu:99", -1, 99])
def test_a_number_that_is_missing_lists_the_devices(backend: Any, device: Any) -> None:
    with pytest.raises(OptionError, match=r"device must be one of .*, got"):
        backend.check(device)


@pytest.mark.parametrize("device", [object(), 1.5, True, "cpu:first"])
def test_a_wrong_device_raises_an_option_error(backend: Any, device: Any) -> None:
    with pytest.raises(OptionError, match=r"device must be a jax\.Device, a Sharding, a number or a name"):
        backend.check(device)


def test_one_backend_object_does_not_serve_two_devices(backend: Any) -> None:
    backend.check("cpu:0")
    backend.check("cpu:0")
    with pytest.raises(OptionError, match="give each loader its own"):
        backend.check()


@one_cpu
def test_pinning_on_a_cpu_is_one_warning_and_right_data(backend: Any) -> None:
    with pytest.warns(AgnoloadWarning, match="pin_memory=True needs an accelerator") as caught:
        backend.check(pin_memory=True)
    assert len(caught) == 1
    assert backend.convert(np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]


def test_placing_keeps_the_structure_and_what_jax_cannot_hold(backend: Any) -> None:
    device = backend.check("cpu:0")
    text = np.array(["a", "b"])
    batch = {"x": np.arange(2, dtype=np.int8), "text": text, "y": [jnp.ones(2), "word", np.float32(2)]}
    assert backend.convert(batch["x"]) is batch["x"]
    placed = backend.place(batch, device)()
    assert placed["text"] is text
    assert placed["x"].tolist() == [0, 1]
    assert placed["x"].devices() == {device}
    assert placed["y"][0].tolist() == [1.0, 1.0]
    assert placed["y"][1] == "word"
    assert placed["y"][2].shape == ()


def test_samples_with_jax_arrays_become_arrays(backend: Any) -> None:
    assert backend.to_numpy(jnp.arange(3)).tolist() == [0, 1, 2]
    assert backend.to_numpy(jnp.ones(2, jnp.bfloat16)).dtype.name == "bfloat16"
    array = registry.to_numpy(jnp.arange(3))
    assert array is not None
    assert array.tolist() == [0, 1, 2]
    assert backend.to_numpy(jax.devices()[0]) is None


def test_a_random_key_of_jax_gives_63_bits(backend: Any) -> None:
    for make in (jax.random.key, jax.random.PRNGKey):
        numbers = [registry.seed_from(make(seed)) for seed in range(4)]
        assert len(set(numbers)) == 4
        assert all(number is not None and 0 <= number < 2**63 for number in numbers)
        assert registry.seed_from(make(0)) == numbers[0]


@pytest.mark.slow
def test_a_loader_on_a_cpu_initialises_no_device_early() -> None:
    code = """
        import jax, agnoload
        from agnoload.backend import registry
        backend = agnoload.get_backend("jax")
        backend.check()
        print(backend.world(), registry.rank_and_world(backend))
        jax.config.update("jax_num_cpu_devices", 3)  # refused once JAX has taken its devices
        print(jax.device_count())
    """
    assert run(code) == "None None\n3\n"


def test_c54_a_worker_that_imports_jax_sees_a_cpu_only() -> None:
    environment = registry.worker_environment()
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert run("import jax; print({d.platform for d in jax.devices()})", **environment) == "{'cpu'}\n"


EIGHT = """
    import gc
    import jax, jax.numpy as jnp, numpy as np, agnoload
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from agnoload.testing.backends import _Slots, check_backend
    assert jax.device_count() == 8

    # Without a device the batch is uncommitted, so that it goes with weights that lie on all eight.
    mesh = Mesh(np.array(jax.devices()), ("data",))
    weights = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P()))
    backend = agnoload.get_backend("jax")
    backend.check()
    x = backend.convert(_Slots().lend(3)["x"])
    assert jax.jit(jnp.matmul)(x, weights).tolist() == [[24.0] * 8] * 8

    check_backend("jax")
    check_backend("jax", "cpu:5")
    check_backend("jax", NamedSharding(mesh, P()))

    # Sharded over the first axis: each device has its row, and the slot is kept while any of them lives.
    sharding = NamedSharding(mesh, P("data"))
    backend = agnoload.get_backend("jax")
    device = backend.check(sharding)
    slots = _Slots()
    kept = {n: backend.place(slots.lend(n) | {"label": np.arange(8, dtype=np.int32), "name": "text"}, device)()
            for n in range(40)}
    for n, batch in kept.items():
        assert batch["x"].sharding == sharding and batch["label"].sharding == sharding
        assert [shard.data.shape for shard in batch["x"].addressable_shards] == [(1, 8)] * 8
        assert (np.asarray(batch["x"]) == n).all() and batch["name"] == "text"
        assert [int(shard.data[0]) for shard in batch["label"].addressable_shards] == list(range(8))
    total = jax.jit(lambda batch: batch.sum())(kept[5]["x"])
    assert float(total) == 320
    del batch
    kept.clear(); gc.collect(); jax.block_until_ready(jnp.zeros(1) + 1); gc.collect()
    assert slots.held() == [], slots.held()

    # Ahead of time, finished later.
    due = [(n, backend.place({"x": slots.lend(n)["x"]}, device)) for n in range(4)]
    gc.collect()
    for n, finish in due:
        assert (np.asarray(finish()["x"]) == n).all()

    # A last, shorter batch that does not divide.
    try:
        backend.place({"x": np.zeros((6, 2), np.float32)}, device)
    except ValueError as error:
        assert "(6, 2)" in error.__notes__[0] and "drop_last=True" in error.__notes__[0], error.__notes__
    else:
        raise SystemExit("six rows went to eight devices")

    # Two axes, and a step that donates its batch.
    square = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), P("data", "model"))
    backend = agnoload.get_backend("jax")
    device = backend.check(square)
    step = jax.jit(lambda state, x: (state + x, x - 1), donate_argnums=(0, 1))
    state = jax.device_put(jnp.zeros((8, 8)), square)
    for n in range(1, 11):
        batch = slots.lend(n)
        state, less = step(state, backend.place({"x": batch["x"]}, device)()["x"])
        assert (batch["y"] == n).all() and (np.asarray(less) == n - 1).all()
    assert (np.asarray(state) == 55).all()
    print("ok")
"""


@pytest.mark.slow
def test_eight_devices_sharded_committed_and_not() -> None:
    assert run(EIGHT, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu") == "ok\n"


HOST = """
    import sys
    import jax, numpy as np, agnoload
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from agnoload.backend import registry
    rank, address = int(sys.argv[1]), sys.argv[2]
    backend = agnoload.get_backend("jax")
    assert backend.world() is None
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    assert backend.world() == registry.rank_and_world(agnoload.get_backend("numpy")) == (rank, 2)
    assert jax.device_count() == 8 and len(jax.local_devices()) == 4
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    device = backend.check(sharding)
    mine = {"x": np.full((8, 3), rank, np.float32), "i": np.arange(8, dtype=np.int32) + 8 * rank, "name": f"{rank}"}
    batch = backend.place(mine, device)()
    assert batch["x"].shape == (16, 3) and batch["i"].shape == (16,) and batch["name"] == f"{rank}"
    assert not batch["x"].is_fully_addressable
    seen = [int(i) for shard in batch["i"].addressable_shards for i in shard.data]
    assert sorted(seen) == list(range(8 * rank, 8 * rank + 8)), seen
    assert all((np.asarray(shard.data) == rank).all() for shard in batch["x"].addressable_shards)
    elsewhere = next(d for d in jax.devices() if d.process_index != rank)
    try:
        agnoload.get_backend("jax").check(elsewhere)
    except agnoload.OptionError as error:
        assert "must belong to this process" in str(error)
    else:
        raise SystemExit("another process's device was taken")
    print("ok", flush=True)
    jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_make_one_global_array() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOST), str(rank), address],
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [host.communicate(timeout=60) for host in hosts]
    finally:
        for host in hosts:
            with host:
                host.kill()
    assert [out for out, _ in outputs] == ["ok\n"] * 2, outputs


def test_a_batch_that_fits_gives_no_warning(backend: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.convert(np.zeros(3, np.float32))
        backend.convert(np.zeros(3, ">i4"))
        backend.convert("text")
