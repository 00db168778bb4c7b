"""Page-locked slots, and copies to a GPU on a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agnoload import map_leaves
from agnoload_torch.tensors import moved

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one only


def page_lock(slot: npt.NDArray[np.uint8], device: Any) -> Callable[[], None]:
    """Page-lock a slot and return what unlocks it; RuntimeError with CUDA's reason if it is refused."""
    runtime = torch.cuda.cudart()
    address = slot.ctypes.data
    with torch.cuda.device(device):
        code = runtime.cudaHostRegister(address, slot.nbytes, _PORTABLE)
    try:
        torch.cuda.check_error(code)
    except RuntimeError:
        # CUDA keeps a refusal as its last error, and torch would take it for that of the next kernel it launches: so
        # one is launched here.
        with suppress(RuntimeError), torch.cuda.device(device):
            torch.ones(1, device="cuda")
        raise

    def unlock() -> None:
        with suppress(RuntimeError), torch.cuda.device(device):  # at exit CUDA may be gone, and its locks with it
            torch.cuda.synchronize()  # a copy may still read the slot
            runtime.cudaHostUnregister(address)

    return unlock


def fence() -> Callable[[], bool]:
    """Whether all that is queued now, on any stream of torch's, has run."""
    events = []
    for index in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(index):  # to ask a device without one would make it
            streams = (torch.cuda.current_stream(index), torch.cuda.default_stream(index), *_pool(index))
            once = {stream.cuda_stream: stream for stream in streams}.values()
            events += [stream.record_event() for stream in once if not stream.query()]

    def passed() -> bool:
        return all(event.query() for event in events)

    return passed


@cache
def _pool(index: int) -> tuple[Any, ...]:
    """The streams that torch gives out on a device: a fixed number, in turn, so that asking on finds them all."""
    found: dict[int, Any] = {}
    for priority in (0, -1):  # as documented: normal and high
        while (stream := torch.cuda.Stream(index, priority=priority)).cuda_stream not in found:
            found[stream.cuda_stream] = stream
    return tuple(found.values())


class SideStream:
    """Copies batches to one device beside the consumer's work, and keeps each until its copy has ended."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copying: deque[tuple[Any, Any]] = deque()

    def start(self, batch: Any) -> Callable[[], Any]:
        """Queue the copy of a batch; the result makes the consumer's stream wait for it and gives the batch."""
        tensors: list[Any] = []

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf.to(self._device, non_blocking=True))
            return tensors[-1]

        self._release()
        with torch.cuda.stream(self._stream):
            copied = map_leaves(copy, batch)
            event = self._stream.record_event()
        self._copying.append((event, batch))

        def finish() -> Any:
            consumer = torch.cuda.current_stream(self._device)
            consumer.wait_event(event)
            for tensor in tensors:
                tensor.record_stream(consumer)  # its memory is the side stream's: not to be reused before the consumer
            self._release()
            # A type of the user's own moves now, on the consumer's stream: what it allocates cannot be recorded.
            return map_leaves(lambda leaf: moved(leaf, self._device), copied)

        return finish

    def _release(self) -> None:
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
