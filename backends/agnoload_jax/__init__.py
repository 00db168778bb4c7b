"""The JAX backend: arrays that share the batch's memory on a CPU, or lie where a device or sharding says.

Nothing here imports jax; `arrays` does, and is imported at the first use.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy.typing as npt

from agnoload import AgnoloadWarning, Backend, OptionError, map_leaves

__all__ = ["JaxBackend"]


class JaxBackend(Backend):
    """Gives JAX arrays; `device` is a `jax.Device`, its number, a string such as `"cpu:1"`, or a `Sharding`.

    Without `device` the arrays lie, uncommitted, on JAX's default device; where a CPU is the only device they share the
    batch's memory. With a sharding over several processes each one's batch is its part of one global array. Dtypes are
    those that JAX makes of them, and a warning says once a loader that values lose width. What JAX cannot hold (text,
    dates, objects, long doubles, records, masked arrays) stays as it is.
    """

    name = "jax"
    framework = "jax"
    requirement = "agnoload[jax]"

    def __init__(self) -> None:
        self._checked = False
        self._target: Any = None
        self._announced = False

    @cached_property
    def _arrays(self) -> Any:
        self.require()
        return import_module("agnoload_jax.arrays")

    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        self.require()
        target = None if device is None else self._arrays.resolve(device)
        if self._checked and target != self._target:
            raise OptionError(
                f"this JaxBackend serves a loader with device={self._target}, and cannot serve one with {target}: "
                "give each loader its own, or the name 'jax'"
            )
        if pin_memory and self._arrays.only_cpu():
            text = "pin_memory=True needs an accelerator, and JAX sees none: batches stay in ordinary memory"
            warnings.warn(text, AgnoloadWarning, stacklevel=3)
        self._checked = True
        self._target = target
        return target

    def convert(self, leaf: Any) -> Any:
        if self._target is not None:
            return leaf  # `place` takes all arrays in one call
        array = self._arrays.prepared(leaf, self._announce)
        return leaf if array is None else self._arrays.shared(array)

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        leaves: list[Any] = []
        map_leaves(leaves.append, batch)
        ready = [self._arrays.prepared(leaf, self._announce) for leaf in leaves]
        arrays = iter(self._arrays.put([array for array in ready if array is not None], device))
        results = iter([leaf if array is None else next(arrays) for leaf, array in zip(leaves, ready, strict=True)])
        placed = map_leaves(lambda _: next(results), batch)
        return lambda: placed

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any] | None:
        array: npt.NDArray[Any] | None = self._arrays.to_array(leaf)
        return array

    def seed_from(self, generator: Any) -> int | None:
        number: int | None = self._arrays.seed_from(generator)
        return number

    def world(self) -> tuple[int, int] | None:
        jax = sys.modules.get("jax")
        if jax is None or not jax.distributed.is_initialized():
            return None  # asking for the process index would take the devices, too early for distributed.initialize
        return jax.process_index(), jax.process_count()

    def worker_environment(self) -> Mapping[str, str]:
        return {"JAX_PLATFORMS": "cpu"}

    def _announce(self, dtype: Any, narrow: Any) -> None:
        if not self._announced:
            self._announced = True
            text = (
                "JAX's 64-bit types are off: int64, uint64, float64 and complex128 become int32, uint32, float32 and "
                f"complex64, and values that do not fit change (first met: {dtype} to {narrow}); "
                "set JAX_ENABLE_X64=1, or choose the dtype in the dataset"
            )
            warnings.warn(text, AgnoloadWarning, stacklevel=2)
