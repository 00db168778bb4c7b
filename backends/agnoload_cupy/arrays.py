"""Page-locked slots, and copies of NumPy arrays to a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from agnoload import map_leaves

_HELD = frozenset(np.dtype(code) for code in "?bhilqBHILQefdFD")
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one only


def held(leaf: Any) -> bool:
    """Whether it is a NumPy array or scalar whose values CuPy has a type for."""
    if not isinstance(leaf, (np.ndarray, np.generic)) or isinstance(leaf, np.ma.MaskedArray):
        return False
    return leaf.dtype in _HELD or (leaf.dtype.kind in "biufc" and leaf.dtype.newbyteorder("=") in _HELD)


def _plain(leaf: Any) -> npt.NDArray[Any]:
    """The leaf as a native array in C order, which is what a copy to the device reads; itself where it is one."""
    return np.asarray(leaf, leaf.dtype.newbyteorder("="), order="C")


def copied_now(leaf: Any) -> Any:
    """A leaf on the current device; its memory is no longer read when this returns."""
    source = _plain(leaf)
    target = cupy.empty(source.shape, source.dtype)
    target.set(source)
    cupy.cuda.get_current_stream().synchronize()
    return target


def to_array(leaf: Any) -> npt.NDArray[Any] | None:
    """A CuPy array copied to the host; None for anything else."""
    return cupy.asnumpy(leaf) if isinstance(leaf, cupy.ndarray) else None


def page_lock(slot: npt.NDArray[np.uint8], device: int) -> Callable[[], None]:
    """Page-lock a slot and return what unlocks it; CuPy's error if CUDA refuses."""
    runtime = cupy.cuda.runtime
    address = slot.ctypes.data
    with cupy.cuda.Device(device):
        runtime.hostRegister(address, slot.nbytes, _PORTABLE)

    def unlock() -> None:
        with suppress(runtime.CUDARuntimeError), cupy.cuda.Device(device):  # at exit CUDA may be gone
            runtime.deviceSynchronize()  # a copy may still read the slot
            runtime.hostUnregister(address)

    return unlock


class SideStream:
    """Copies batches to one GPU beside the consumer's work, and keeps each until its copy has ended."""

    def __init__(self, device: int) -> None:
        self._device = device
        with cupy.cuda.Device(device):
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._copying: deque[tuple[Any, Any]] = deque()

    def start(self, batch: Any) -> Callable[[], Any]:
        """Queue the copy of a batch; the result makes the consumer's stream wait for it and gives the batch.

        The arrays are taken from the memory of the stream that is current now, where CuPy gives freed memory out again
        at once, in the order of that stream: so the copy waits for what is queued there, and what the consumer frees is
        never written to before the consumer's work has ended.
        """
        copies: list[tuple[Any, Any]] = []

        def prepare(leaf: Any) -> Any:
            if not held(leaf):
                return leaf
            source = _plain(leaf)
            copies.append((cupy.empty(source.shape, source.dtype), source))
            return copies[-1][0]

        self._release()
        with cupy.cuda.Device(self._device):
            copied = map_leaves(prepare, batch)
            self._stream.wait_event(cupy.cuda.get_current_stream().record())
            for target, source in copies:
                target.set(source, stream=self._stream)
            event = self._stream.record()
        self._copying.append((event, [source for _, source in copies]))

        def finish() -> Any:
            with cupy.cuda.Device(self._device):
                cupy.cuda.get_current_stream().wait_event(event)
            self._release()
            return copied

        return finish

    def _release(self) -> None:
        while self._copying and self._copying[0][0].done:
            self._copying.popleft()
