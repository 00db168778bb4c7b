"""NumPy arrays as tensors and back, sharing memory where both sides allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agnoload import BackendUnavailable, CollateError

_HELD = frozenset(np.dtype(code) for code in "?bhilqBHILQefdFD")
_TWINS = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
"""What NumPy has through `ml_dtypes` only, under the same names."""
_NAMES = {twin: name for name, twin in _TWINS.items()}


def to_tensor(leaf: Any) -> Any:
    """An array or NumPy scalar as a CPU tensor, or itself if torch cannot hold its kind of values."""
    if type(leaf) is np.ndarray and leaf.dtype in _HELD and leaf.flags.writeable:
        try:
            return torch.from_numpy(leaf)
        except (TypeError, ValueError):
            pass  # strides that torch cannot share, or C's unsigned long long, which it does not take for a uint64
    return _unusual(leaf)


def _unusual(leaf: Any) -> Any:
    dtype = leaf.dtype
    native = dtype.newbyteorder("=") if dtype.kind in "biufc" else dtype
    twin = _TWINS.get(native.name)
    if isinstance(leaf, np.ma.MaskedArray) or (twin is None and native not in _HELD):
        return leaf
    array = np.asarray(leaf)
    # NumPy calls an array of one row contiguous whatever its strides are, torch refuses a negative one.
    plain = array.flags.writeable and array.flags.c_contiguous and min(array.strides, default=0) >= 0
    if not (plain and dtype.isnative):
        array = array.astype(native, order="C", copy=True)
    if twin is None:
        return torch.from_numpy(array.view(f"{dtype.kind}{dtype.itemsize}"))
    return torch.from_numpy(array.view(f"i{dtype.itemsize}")).view(twin)


def to_array(leaf: Any) -> npt.NDArray[Any] | None:
    """A tensor as an array, sharing the memory of a CPU tensor; None for anything else."""
    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        array: npt.NDArray[Any] = leaf.numpy()
    except (TypeError, RuntimeError):
        return _unusual_array(leaf)  # on a device, part of a graph, conjugated, or of another layout or dtype
    return array


def _unusual_array(tensor: Any) -> npt.NDArray[Any]:
    what = f"a tensor of layout {tensor.layout}, dtype {tensor.dtype} and device {tensor.device}"
    if tensor.layout is not torch.strided:
        raise CollateError(f"{what} cannot become a NumPy array: return tensor.to_dense(), or use a collate_fn")
    name = _NAMES.get(tensor.dtype)
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if name is None:
            array: npt.NDArray[Any] = plain.numpy()
            return array
        integers = plain.view(torch.int16 if tensor.itemsize == 2 else torch.int8).numpy()
    except (TypeError, RuntimeError) as error:
        raise CollateError(f"{what} cannot become a NumPy array: {error}") from error
    view: npt.NDArray[Any] = integers.view(_ml_dtype(name))
    return view


def _ml_dtype(name: str) -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise BackendUnavailable(f"NumPy holds torch.{name} through ml_dtypes only: pip install ml_dtypes") from None
    return getattr(ml_dtypes, name)


def packed(value: Any) -> tuple[Callable[[npt.NDArray[Any]], Any], npt.NDArray[Any]] | None:
    """A plain CPU tensor as what makes it again and an array; None for what torch itself pickles better, or alone."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
        return None
    if value.requires_grad or value.__dict__ or value.nbytes > value.untyped_storage().nbytes():
        return None  # it would lose its part in a graph, or what it was given, or repeat what it expands
    try:
        array = to_array(value)
    except (CollateError, BackendUnavailable):
        return None
    return None if array is None else (to_tensor, array)


def pinned(leaf: Any) -> Any:
    """A tensor, or a batch of the user's own type with `pin_memory()`, in page-locked memory."""
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.device.type != "cpu" or leaf.is_pinned() else leaf.pin_memory()
    pin = getattr(leaf, "pin_memory", None)
    return pin() if callable(pin) else leaf


def moved(leaf: Any, device: Any) -> Any:
    """A tensor, or a batch of the user's own type with `to(device)`, on the device."""
    to = getattr(leaf, "to", None)
    return to(device) if callable(to) else leaf
