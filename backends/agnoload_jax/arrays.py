"""NumPy arrays as JAX arrays: what can be held, how, and where."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from agnoload import BackendUnavailable, OptionError


def prepared(leaf: Any, announce: Callable[[Any, Any], None]) -> Any:
    """An array that JAX takes as it is, shared where possible; None for what JAX cannot hold.

    `announce(dtype, narrow)` is called before a value may lose width.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    if not isinstance(leaf, (np.ndarray, np.generic)) or not _held(leaf.dtype) or isinstance(leaf, np.ma.MaskedArray):
        return None
    dtype = leaf.dtype
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    narrow = jax.dtypes.canonicalize_dtype(native)
    if narrow != native:
        announce(native, narrow)
        return _narrowed(np.asarray(leaf), narrow)
    flags = leaf.flags
    if not (flags.writeable and flags.forc and dtype.isnative):
        return np.array(leaf, native, order="C")
    return leaf


def _narrowed(array: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """The cast that JAX would make; made here, it lets go of the batch's memory at once."""
    if array.dtype.kind in "fc":
        with np.errstate(over="ignore"):
            return array.astype(dtype, order="C")
    return array.astype(dtype, order="C")


def _held(dtype: np.dtype[Any]) -> bool:
    module = dtype.type.__module__
    if module == "numpy":
        return dtype.kind in "biufc" and dtype.char not in "gG"  # no long doubles
    return module == "ml_dtypes" and hasattr(jnp, dtype.name)


def shared(array: Any) -> Any:
    """A prepared array on JAX's default device, in the same memory where that is a CPU and alignment allows.

    dlpack lets go of the memory the moment that the JAX array dies, `device_put` only at JAX's next call, and is slower
    for one array. But dlpack commits the array to its device, which clashes with data on others: so only where there
    are none.
    """
    if isinstance(array, np.ndarray) and array.dtype.isbuiltin == 1 and _one_device():
        return _taker()(array)
    return jax.device_put(array)


@cache
def _taker() -> Callable[[npt.NDArray[Any]], Any]:
    """`jax.dlpack.from_dlpack`, or the one step in it that does the work, where this JAX still has it.

    For each array `from_dlpack` asks the CPU for a stream, which fails with an exception, and looks three times whether
    the dtype is canonical, which `prepared` has seen to: 22 microseconds instead of 4. The step is private to JAX, so
    it must show that it gives what the public function gives, or it is left alone.
    """
    public: Callable[[npt.NDArray[Any]], Any] = jax.dlpack.from_dlpack
    memory = np.arange(64, dtype=np.float32)
    trial = memory[-memory.ctypes.data % 64 // 4 :][:16].reshape(4, 4)
    try:
        step = importlib.import_module("jax._src.lib")._jax.dlpack_managed_tensor_to_buffer
        (device,) = jax.devices()
        kind, _ = trial.__dlpack_device__()

        def take(array: npt.NDArray[Any]) -> Any:
            return step(array.__dlpack__(), device, None, None, kind)

        one, other = take(trial), public(trial)
        same = one.aval == other.aval and one.sharding == other.sharding and one.committed == other.committed
        same = same and one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer() == trial.ctypes.data
    except Exception:
        return public
    return take if same else public


def _one_device() -> bool:
    return only_cpu() and jax.device_count() == 1 and jax.config.jax_default_device is None


def only_cpu() -> bool:
    return bool(jax.default_backend() == "cpu")


def put(arrays: Sequence[Any], target: Any) -> Sequence[Any]:
    """All arrays of a batch to a device or a sharding, in one call; JAX keeps the memory while it copies."""
    try:
        if isinstance(target, jax.sharding.Sharding) and not target.is_fully_addressable:
            return [jax.make_array_from_process_local_data(target, np.asarray(array)) for array in arrays]
        placed: Sequence[Any] = jax.device_put(list(arrays), target)
    except ValueError as error:
        shapes = ", ".join(str(array.shape) for array in arrays)
        error.add_note(
            f"the batch's arrays have the shapes {shapes}, and each must divide over {target}; "
            "if it is the last, shorter batch that does not, drop_last=True leaves it out"
        )
        raise
    return placed


def resolve(device: Any) -> Any:
    """The device or sharding that an option names, if this process has it."""
    if isinstance(device, jax.sharding.Sharding):
        return device
    if isinstance(device, jax.Device):
        if device.process_index != jax.process_index():
            raise OptionError(f"device must belong to this process (number {jax.process_index()}), got {device}")
        return device
    if isinstance(device, str):
        platform, _, number = device.partition(":")
        if number.isdecimal() or not number:
            return _numbered(_devices(platform), int(number or 0), device)
    elif isinstance(device, int) and not isinstance(device, bool):
        return _numbered(jax.local_devices(), device, device)
    raise OptionError(f"device must be a jax.Device, a Sharding, a number or a name such as 'cpu:1', got {device!r}")


def _devices(platform: str) -> list[Any]:
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError as error:
        raise BackendUnavailable(f"JAX has no {platform!r} devices here: {error}") from error


def _numbered(devices: list[Any], number: int, asked: Any) -> Any:
    if not 0 <= number < len(devices):
        raise OptionError(f"device must be one of {', '.join(map(str, devices))}, got {asked!r}")
    return devices[number]


def to_array(leaf: Any) -> npt.NDArray[Any] | None:
    """A JAX array as a read-only NumPy array, sharing memory on a CPU; None for anything else."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else None


def seed_from(key: Any) -> int | None:
    """63 bits drawn from a random key of JAX, which stays as it is; None for anything else."""
    if not isinstance(key, jax.Array):
        return None
    high, low = (int(word) for word in jax.random.bits(key, (2,), jnp.uint32))
    return (high << 32 | low) >> 1
