"""What each worker is doing: written by the worker, read by its parent, also after the worker's death.

It lies in shared memory, so a claim costs no system call and a worker that is killed leaves its last words there.
"""

from __future__ import annotations

import signal
from enum import IntEnum

from agnoload.transport.memory import Mapping as Memory

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a worker's fault handler write its Python stack to the board."""

LINE = 8
"""Words of 8 bytes a worker: a cache line of its own."""
CLAIM, STAGE = 0, 1
STACK = 1 << 16
"""Bytes for the text that a worker's fault handler writes."""


class Stage(IntEnum):
    """What a worker is doing."""

    LAUNCHED = 0
    STARTING = 1
    IDLE = 2
    LOADING = 3


class WorkerStatusBoard:
    """The arena's first slot: for each worker the request that it took last, its stage, and room for its stack.

    Claim and stage are aligned words: the parent never sees one half-written, and no lock is needed.
    """

    def __init__(self, fd: int, workers: int) -> None:
        self._stacks = -(-workers * LINE * 8 // 4096) * 4096
        mapping = Memory(fd, 0, self._stacks + workers * STACK)
        self._bytes = memoryview(mapping.array())
        self._words = self._bytes[: self._stacks].cast("q")

    def clear(self, worker: int) -> None:
        """Before a worker starts under this number."""
        self._words[worker * LINE : (worker + 1) * LINE] = memoryview(bytes(LINE * 8)).cast("q")
        start = self.stack_offset(worker)
        self._bytes[start : start + STACK] = bytes(STACK)

    def claim(self, worker: int, number: int) -> None:
        """The worker has read the ticket of this request."""
        self._words[worker * LINE + STAGE] = Stage.LOADING
        self._words[worker * LINE + CLAIM] = number + 1  # last: until then the parent takes the request for lost

    def set_stage(self, worker: int, stage: Stage) -> None:
        self._words[worker * LINE + STAGE] = stage

    def claimed(self, worker: int) -> int | None:
        """The request that a worker took last; it may have been answered since."""
        number = self._words[worker * LINE + CLAIM]
        return number - 1 if number else None

    def stage(self, worker: int) -> Stage:
        return Stage(self._words[worker * LINE + STAGE])

    def write_stack(self, worker: int, text: str) -> None:
        """A worker's last words, in the place of its stack."""
        data = text.encode(errors="replace")[: STACK - 1] + b"\0"
        start = self.stack_offset(worker)
        self._bytes[start : start + len(data)] = data

    def stack_offset(self, worker: int) -> int:
        return self._stacks + worker * STACK

    def stack(self, worker: int) -> str:
        """What the worker's fault handler has written."""
        start = self.stack_offset(worker)
        text = bytes(self._bytes[start : start + STACK]).split(b"\0", 1)[0].decode(errors="replace")
        return text.strip()
