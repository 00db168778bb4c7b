"""The JAX backend on one CPU device, here and in a fresh interpreter that has 64-bit types."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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


@one_cpu
@settings(max_examples=50)
@given(
    st.sampled_from(["?", "b", "B", "h", "H", "i", "I", "e", "f", "F", "bfloat16", "float8_e5m2"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.sampled_from([0, 8, 16]),
)
def test_an_aligned_array_is_shared_and_any_other_is_copied(dtype: Any, shape: Any, offset: int) -> None:
    if len(dtype) > 1:
        dtype = getattr(pytest.importorskip("ml_dtypes"), dtype)
    leaf = aligned(np.arange(math.prod(shape)).reshape(shape).astype(dtype), offset)
    before = leaf.copy()
    array = get_backend("jax").convert(leaf)
    assert isinstance(array, jax.Array)
    assert (array.dtype, array.shape) == (leaf.dtype, shape)
    if leaf.size and offset == 0:
        assert array.unsafe_buffer_pointer() == leaf.ctypes.data
    elif leaf.size and array.unsafe_buffer_pointer() != leaf.ctypes.data:
        leaf[...] = 1
    if leaf.size == 0 or offset:
        assert np.array_equal(np.asarray(array), before)


@pytest.fixture
def quick() -> Iterator[Any]:
    """Makes what takes arrays, as if for the first time."""
    from agnoload_jax.arrays import _taker

    _taker.cache_clear()
    yield _taker
    _taker.cache_clear()


@one_cpu
def test_the_fast_path_gives_the_same_array_as_from_dlpack(quick: Any) -> None:
    take = quick()
    assert take is not jax.dlpack.from_dlpack, "this JAX has no such step any more: this tests nothing"
    for dtype in "?bBhHiIefF":
        for shape in ((), (0, 3), (4,), (2, 3, 4)):
            for offset in (0, 8):
                leaf = aligned(np.arange(math.prod(shape)).reshape(shape).astype(dtype), offset)
                one, other = take(leaf), jax.dlpack.from_dlpack(leaf)
                facts = [(type(x), x.aval, x.weak_type, x.committed, x.sharding) for x in (one, other)]
                assert facts[0] == facts[1]
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
        view = np.asarray(kept)[2:]
        del kept
        assert slots.held() == [5]  # by a view of the host's
        assert (view == 5).all()
        del view
        assert slots.held() == []
    finally:
        gc.enable()


def test_a_device_is_a_name_a_number_an_object_or_a_sharding(backend: Any) -> None:
    (first, *_) = jax.local_devices(backend="cpu")
    assert backend.check("cpu") == backend.check("cpu:0") == first
    assert backend.check(first) is first
    with pytest.raises(OptionError, match="give each loader its own"):
        backend.check()
    sharding = jax.sharding.SingleDeviceSharding(first)
    for device, expected in ((0, jax.local_devices()[0]), (sharding, sharding), (None, None)):
        assert get_backend("jax").check(device) == expected
    for device in ("moon", "moon:1"):
        with pytest.raises(BackendUnavailable, match="JAX has no 'moon' devices here"):
            backend.check(device)
    for device in ("cpu:99", -1, 99):
        with pytest.raises(OptionError, match=r"device must be one of .*, got"):
            backend.check(device)
    for device in (object(), 1.5, True, "cpu:first"):
        with pytest.raises(OptionError, match=r"device must be a jax\.Device, a Sharding, a number or a name"):
            backend.check(device)


@one_cpu
def test_pinning_on_a_cpu_is_one_warning_and_right_data(backend: Any) -> None:
    with pytest.warns(AgnoloadWarning, match="pin_memory=True needs an accelerator") as caught:
        backend.check(pin_memory=True)
    assert len(caught) == 1
    assert backend.convert(np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]


def test_a_random_key_of_jax_gives_63_bits(backend: Any) -> None:
    for make in (jax.random.key, jax.random.PRNGKey):
        numbers = [registry.seed_from(make(seed)) for seed in range(4)]
        assert len(set(numbers)) == 4
        assert all(number is not None and 0 <= number < 2**63 for number in numbers)
        assert registry.seed_from(make(0)) == numbers[0]


PROGRAM = """
    import os, jax, numpy as np, psutil, agnoload
    from agnoload.backend import registry
    from agnoload.testing.backends import check_backend
    backend = agnoload.get_backend("jax")
    backend.check()
    assert backend.world() is registry.rank_and_world(backend) is None
    jax.config.update("jax_num_cpu_devices", 1)  # refused once JAX has taken its devices

    # Nothing narrows, and the memory is shared.
    leaf = np.zeros(64, np.int64)
    leaf = leaf[-leaf.ctypes.data % 64 // 8:][:8]
    leaf[:] = 2**40 + 7
    array = backend.convert(leaf)
    assert array.dtype == np.int64 and array[0] == 2**40 + 7
    assert array.unsafe_buffer_pointer() == leaf.ctypes.data
    check_backend("jax")

    # With the environment of a worker there is a CPU only. A GPU that is asked for is refused, and nothing is made.
    assert {device.platform for device in jax.devices()} == {"cpu"}
    for pin in (False, True):
        try:
            agnoload.DataLoader(range(8), 4, num_workers=2, backend="jax", device="gpu:0", pin_memory=pin)
        except agnoload.BackendUnavailable as error:
            print(error)
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    assert not any("memfd" in name for name in opened), opened
    assert psutil.Process().children() == []
"""


@pytest.mark.slow
def test_with_the_environment_of_a_worker_and_64_bits_jax_takes_a_cpu_late_and_nothing_narrows() -> None:
    environment = {**os.environ, **registry.worker_environment(), "JAX_ENABLE_X64": "1"}
    assert environment["JAX_PLATFORMS"] == "cpu"
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("JAX has no 'gpu' devices here: ") for line in lines)
