"""The torch backend: CPU tensors that share the batch's memory, page-locked slots, copies on a side stream.

Nothing here imports torch; `tensors` and `cuda` do, and are imported at the first use.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload import AgnoloadWarning, Backend, BackendUnavailable, OptionError, map_leaves

__all__ = ["TorchBackend"]


class TorchBackend(Backend):
    """Gives torch tensors; `device` is what `torch.device` takes.

    Arrays become CPU tensors that share the batch's memory, bfloat16 and float8 of `ml_dtypes` too. An array that torch
    cannot share (read-only, big-endian, negative strides) is copied; one that it cannot hold (text, dates, objects,
    long doubles, records, masked arrays) stays as it is. With `pin_memory` every tensor lies in page-locked memory.
    """

    name = "torch"
    framework = "torch"
    requirement = "agnoload[torch]"

    def __init__(self) -> None:
        self._pin = False
        self._pinning_device: Any = None
        self._refused = False
        self._streams: dict[Any, Any] = {}

    @cached_property
    def _tensors(self) -> Any:
        self.require()
        return import_module("agnoload_torch.tensors")

    @cached_property
    def _cuda(self) -> Any:
        self.require()
        return import_module("agnoload_torch.cuda")

    def check(self, device: Any = None, pin_memory: bool = False) -> Any:
        torch = self.require()
        chosen = None if device is None else _resolve(torch, device)
        if pin_memory and not torch.cuda.is_available():
            text = "pin_memory=True needs an NVIDIA GPU, and torch sees none: batches stay in ordinary memory"
            warnings.warn(text, AgnoloadWarning, stacklevel=3)
        elif pin_memory:
            self._pin = True
            self._pinning_device = chosen if chosen is not None and chosen.type == "cuda" else None
        return chosen

    def convert(self, leaf: Any) -> Any:
        tensor = self._tensors.to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf
        return self._tensors.pinned(tensor) if self._pin else tensor

    def attach(self, slot: npt.NDArray[np.uint8]) -> Callable[[], None]:
        if self._refused or not self._pin or slot.nbytes == 0:
            return lambda: None
        try:
            undo: Callable[[], None] = self._cuda.page_lock(slot, self._pinning_device)
        except RuntimeError as error:
            self._refused = True
            text = f"the loader's memory cannot be page-locked ({error}): each batch is copied to be pinned instead"
            warnings.warn(text, AgnoloadWarning, stacklevel=2)
            return lambda: None
        return undo

    def fence(self) -> Callable[[], bool]:
        if not self._pin or self._pinning_device is not None:
            return lambda: True  # nothing is pinned, or only `place` copies from it and keeps the batch until then
        passed: Callable[[], bool] = self._cuda.fence()
        return passed

    def place(self, batch: Any, device: Any) -> Callable[[], Any]:
        if device.type == "cuda":
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = self._cuda.SideStream(device)
            finish: Callable[[], Any] = stream.start(batch)
            return finish
        moved = map_leaves(lambda leaf: self._tensors.moved(leaf, device), batch)
        return lambda: moved

    def to_numpy(self, leaf: Any) -> npt.NDArray[Any] | None:
        array: npt.NDArray[Any] | None = self._tensors.to_array(leaf)
        return array

    def pack(self, value: Any) -> tuple[Callable[[npt.NDArray[Any]], Any], npt.NDArray[Any]] | None:
        packed: tuple[Callable[[npt.NDArray[Any]], Any], npt.NDArray[Any]] | None = self._tensors.packed(value)
        return packed

    def seed(self, number: int) -> None:
        # Not torch.manual_seed, which seeds the GPUs too: rng_state does not save theirs, and a worker has none.
        self.require().default_generator.manual_seed(number)

    def rng_state(self) -> Any:
        return self.require().default_generator.get_state()

    def set_rng_state(self, state: Any) -> None:
        self.require().default_generator.set_state(state)

    def seed_from(self, generator: Any) -> int | None:
        torch = self.require()
        if not isinstance(generator, torch.Generator):
            return None
        return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device).item())

    def reseed(self, generator: Any, number: int) -> Callable[[], None] | None:
        if not isinstance(generator, self.require().Generator):
            return None
        before = generator.get_state()
        generator.manual_seed(number)
        return lambda: generator.set_state(before)

    def settings(self) -> Callable[[], None] | None:
        torch = self.require()
        try:
            precision = torch.get_float32_matmul_precision()
        except RuntimeError:  # it was set in the newer way, for each kind of operation
            precision = None
        found = (
            str(torch.get_default_dtype()).removeprefix("torch."),
            torch.get_deterministic_debug_mode(),
            precision,
            torch.multiprocessing.get_sharing_strategy(),
        )
        return None if found == _AS_IMPORTED else partial(_apply, *found)

    def world(self) -> tuple[int, int] | None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        return torch.distributed.get_rank(), torch.distributed.get_world_size()

    def enter_worker(self, look: Callable[[], Any]) -> None:
        import_module("agnoload_torch.workers").install(look)


_AS_IMPORTED = ("float32", 0, "highest", "file_descriptor" if sys.platform != "darwin" else "file_system")


def _apply(dtype: str, deterministic: int, precision: str | None, sharing: str) -> None:
    """In a worker: torch's settings, those that change what samples are before anything is made with them."""
    if "torch" not in sys.modules and (dtype, deterministic) == _AS_IMPORTED[:2]:
        return
    torch = import_module("torch")
    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_deterministic_debug_mode(deterministic)
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    torch.multiprocessing.set_sharing_strategy(sharing)


def _resolve(torch: Any, device: Any) -> Any:
    """The `torch.device` that an option names, if this machine has it."""
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise OptionError(f"device must be what torch.device takes, such as 'cuda:1', 'cpu' or 0; got {device!r}")
    if isinstance(device, int):
        device = f"cuda:{device}"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device must be what torch.device takes, got {device!r}: {error}") from None
    if chosen.type == "cuda":
        return _cuda_device(torch, chosen)
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise BackendUnavailable(f"torch cannot use device {str(chosen)!r} here: {error}") from error
    return chosen


def _cuda_device(torch: Any, device: Any) -> Any:
    """A CUDA device with its number; looking does not create a context on any of them."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        cause = "torch finds no working GPU or driver" if built else "this build of torch has no CUDA"
        raise BackendUnavailable(f"device {str(device)!r} cannot be used: {cause}")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise OptionError(f"device must be one of cuda:0 to cuda:{count - 1}, got {str(device)!r}")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
