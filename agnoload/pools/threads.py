"""The pool of threads: for decoders that release the interpreter lock, slow storage, and free-threaded Python."""

from __future__ import annotations

import copy
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from agnoload.errors import AgnoloadError, LoaderClosed, WorkerTimeout, add_note, warn
from agnoload.global_rng import GlobalRngMonitor
from agnoload.messages import Reply, Request, describe_request
from agnoload.pools import diagnose
from agnoload.pools.diagnose import check_process
from agnoload.pools.worker import end_copy
from agnoload.protocols import WorkerFetch
from agnoload.transport.buffer_pool import BatchBuffers, BufferPool


class ThreadPool:
    """Answers requests in `workers` threads of this process, each with a copy of `fetch` over the same dataset.

    With `say` it warns, once, if samples draw from generators that the threads share. It compares the generators before
    the first request and after the first reply. Meanwhile the user's own thread waits here, so it is not the one that
    draws.
    """

    def __init__(
        self,
        fetch: WorkerFetch,
        *,
        workers: int,
        window: int,
        owned: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._open: dict[int, Request] = {}
        self._busy: dict[int, int] = {}
        self._replies: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        self._arrived: deque[Reply | BaseException] = deque()
        self.waiting = False
        self._queues: list[queue.SimpleQueue[Request | None]] = [
            queue.SimpleQueue() for _ in range(workers if owned else 1)
        ]
        self._owned = owned
        self._memory = BufferPool(window + workers + 1)
        self._closed = threading.Event()
        self._warned = False
        self._say = say
        self._generators: GlobalRngMonitor | None = None
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(
                target=Context().run,  # an empty one: free-threaded Python would hand on that of whoever iterates
                args=(self._work, copy.copy(fetch), number),
                name=f"agnoload-{number}",
                daemon=True,
            )
            for number in range(workers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # the system has no more threads
            self.close()
            raise

    def submit(self, request: Request) -> None:
        self._check()
        if self._say is not None and self._generators is None:
            self._generators = GlobalRngMonitor()
        self._open[request.number] = request
        self._queues[request.owner or 0 if self._owned else 0].put(request)

    def receive(self, timeout: float | None = None) -> Reply:
        self.waiting = False
        self._check()
        if not self._open:
            raise AgnoloadError("receive() was called while no request was under way")
        began = time.monotonic()
        limit = timeout if timeout is not None else None if self._warned else diagnose.SILENCE
        limit = limit and min(limit, threading.TIMEOUT_MAX)
        try:
            reply = self._get(limit)
        except queue.Empty:
            waited = time.monotonic() - began
            if timeout is not None:
                raise WorkerTimeout(f"no batch came within {waited:.1f} s: {self._doing()}") from None
            self._warned = True
            warn(f"no batch for {waited:.0f} s: {self._doing()}")
            reply = self._get(None)
        if isinstance(reply, BaseException):
            raise reply
        self._check()  # whoever has closed it meanwhile has forgotten what is open
        self._open.pop(reply.number, None)
        if self._say is not None and self._generators is not None:
            say, self._say = self._say, None
            if names := self._generators.drawn():
                say(
                    f"samples draw from {' and '.join(names)}, which all threads of this process share, so what they "
                    "draw depends on which thread comes first. Draw from agnoload.sample_rng() instead, or use worker "
                    "processes"
                )
        return reply

    def _get(self, timeout: float | None) -> Reply | BaseException:
        self.waiting = True
        try:
            if not self._arrived:  # in one step: what a signal handler raises cannot come between and lose a reply
                self._arrived.extend(map(self._replies.get, (True,), (timeout,)))
        except queue.Empty:
            self.waiting = False
            raise
        self.waiting = False
        return self._arrived.popleft()

    def ready(self) -> bool:
        return bool(self._arrived) or not self._replies.empty()

    def close(self) -> None:
        """Let the threads end; one that is in the middle of a sample ends after it, and nobody waits for it."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._replies.put(LoaderClosed("the loader was closed while it waited for a batch"))
        for requests in self._queues:
            for _ in self._threads:
                requests.put(None)
        deadline = time.monotonic() + 0.5
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._open.clear()

    def _check(self) -> None:
        check_process(self._pid)
        if self._closed.is_set():
            raise LoaderClosed("the loader was closed before the end of its data")

    def _work(self, fetch: WorkerFetch, worker: int) -> None:
        requests = self._queues[worker if self._owned else 0]
        try:
            fetch.begin(worker)
            end_copy(self._pid)
        except BaseException as error:
            end_copy(self._pid, error)
            add_note(error, f"in worker {worker}, before its first batch")
            self._replies.put(error)
            return
        while (request := requests.get()) is not None and not self._closed.is_set():
            self._busy[worker] = request.number
            try:
                reply = fetch(request, BatchBuffers(self._memory))
            except BaseException as error:
                reply = Reply(request.number, worker, error=error)
            end_copy(self._pid, reply.error)
            if reply.error is not None:
                add_note(reply.error, f"in worker {worker} (a thread)")
            reply = reply._replace(worker=worker, finished=time.monotonic())
            self._busy.pop(worker, None)
            self._replies.put(reply)
            del reply, request
        fetch.close()

    def _doing(self) -> str:
        """What the oldest request under way is waiting for, with its thread's stack."""
        number = min(self._open)
        what = describe_request(self._open[number])
        worker = next((w for w, n in self._busy.copy().items() if n == number), None)
        if worker is None:
            return f"{what} waits for a free worker"
        frame: Any = sys._current_frames().get(self._threads[worker].ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (it has none)"
        return f"worker {worker} (a thread) is busy with {what}; its stack:\n{stack}"
