"""The CuPy backend: page-locked slots, and copies to a GPU on a stream of their own.

Nothing here imports cupy; `arrays` does, and is imported at the first use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload import AgnoloadWarning, Backend, BackendUnavailable, OptionError

__all__ = ["CupyBackend"]


class CupyBackend(Backend):
    """Gives CuPy arrays on one GPU; `device` is its number, a string such as `"cuda:1"`, or a `cupy.cuda.Device`.

    Without `device` it is the GPU that is current when the loader is made. What CuPy cannot hold (text, dates, objects,
    long doubles, bfloat16, records, masked arrays) stays as it is. CuPy's random generators live on the GPU: they are
    not seeded.
    """

    name = "cupy"
    framework = "cupy"
    requirement = "agnoload[cupy]"

    def __init__(self) -> None:
        self._device: int | None = None
        self._refused = False
        self._streams: dict[int, Any] = {}

    @cached_property
    def _arrays(self) -> Any:
        self.require()
        return import_module("agnoload_cupy.arrays")

    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        cupy = self.require()
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            raise BackendUnavailable(f"CuPy finds no working NVIDIA GPU or driver: {error}") from error
        if count == 0:
            raise BackendUnavailable("CuPy finds no NVIDIA GPU")
        self._device = _resolve(cupy, device, count)
        return self._device

    def convert(self, leaf: Any) -> Any:
        if self._device is not None or not self._arrays.held(leaf):
            return leaf  # `place` copies it
        return self._arrays.copied_now(leaf)

    def attach(self, slot: npt.NDArray[np.uint8]) -> Callable[[], None]:
        if self._refused or slot.nbytes == 0:
            return lambda: None
        try:
            undo: Callable[[], None] = self._arrays.page_lock(slot, self._device)
        except Exception as error:
            self._refused = True
            text = f"the loader's memory cannot be page-locked ({error}): CuPy copies from ordinary memory instead"
            warnings.warn(text, AgnoloadWarning, stacklevel=2)
            return lambda: None
        return undo

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = self._arrays.SideStream(device)
        finish: Callable[[], Any] = stream.start(batch)
        return finish

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any] | None:
        array: npt.NDArray[Any] | None = self._arrays.to_array(leaf)
        return array


def _resolve(cupy: Any, device: Any, count: int) -> int:
    """The number of the GPU that an option names."""
    if device is None:
        return int(cupy.cuda.runtime.getDevice())
    number: Any = device
    if isinstance(device, cupy.cuda.Device):
        number = device.id
    elif isinstance(device, str):
        platform, _, digits = device.partition(":")
        number = int(digits or 0) if platform == "cuda" and (digits.isdecimal() or not digits) else None
    if isinstance(number, bool) or not isinstance(number, int):
        raise OptionError(f"device must be a GPU's number, 'cuda:1' or a cupy.cuda.Device, got {device!r}")
    if not 0 <= number < count:
        raise OptionError(f"device must be one of cuda:0 to cuda:{count - 1}, got {device!r}")
    return number
