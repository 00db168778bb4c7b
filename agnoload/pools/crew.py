"""The worker processes of one pool: what they are given, which of them live, and how they end."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

from agnoload.messages import Start
from agnoload.pools import diagnose
from agnoload.pools.environment import handled_signals, parent_environment
from agnoload.pools.launcher import ForkServer, Process, interrupts_held, start_process
from agnoload.pools.preload import Preload, preload
from agnoload.protocols import WorkerFetch
from agnoload.system import method_of
from agnoload.transport.memory import sending
from agnoload.transport.payload import Digest, digest, pack

ASKED, TERMINATED, KILLED = 0.1, 0.3, 0.5
"""Seconds that a worker has to end after it was asked to, after SIGTERM, after SIGKILL: a second in all."""

LONGEST_WAIT = 1e6
"""Seconds of one wait at most, as long as the system can wait; who waits longer waits again."""


class Crew:
    """Starts, watches and ends the workers that run `fetch`."""

    def __init__(self, fetch: WorkerFetch, context: Any, variables: Mapping[str, str], preload: Preload | None) -> None:
        self.owner = os.getpid()
        self.kills_before = diagnose.oom_kills()
        self.processes: dict[int, Process] = {}
        self.preload = preload
        """The modules that the workers import, and the fork server that has them loaded."""
        self.digest: Digest | None = None
        self.fetch: WorkerFetch | None = fetch
        """What forked workers inherit; None once no worker can be started any more."""
        self.payload = -1
        # Where the program handles SIGTERM, workers ignore it: it is sent to whole process groups.
        self.end_signal = signal.SIGKILL if signal.SIGTERM in handled_signals() else signal.SIGTERM
        self._method = method_of(context)
        self._variables = variables
        self._classes: list[type] = []  # those that go by value live as long as instances may come back
        self._descriptors: list[int] = []  # of shared files in the dataset, which stay theirs
        self._server: ForkServer | None = None
        self._poll = select.poll()

    def prepare(self, replies: int, reuse: bool) -> None:
        """Pack what workers need, once for all of them; `replies` is what `wait` watches besides the workers."""
        fetch = self.fetch
        assert fetch is not None
        self._poll.register(replies, select.POLLIN)
        if self._method == "fork":
            diagnose.warn_about_fork()
        else:
            parts = fetch.parts()
            parent = parent_environment(self._variables, parts)
            with sending() as self._descriptors:
                self.payload, self._classes, modules = pack(fetch, parent, parts, self._method)
            self.fetch = None
            if self._method == "forkserver":
                self.preload = preload(parent.imports, modules, self.preload)
                self._server = self.preload.server()
        if reuse:
            with suppress(Exception) if self._method == "fork" else nullcontext():  # a fork may hold what cannot pickle
                self.digest = self.digest_of(fetch)

    def digest_of(self, fetch: WorkerFetch) -> Digest:
        """What workers that are started now would be given; equal to `digest` if these were given the same."""
        parts = fetch.parts()
        return digest((parent_environment(self._variables, parts)._replace(logs=None), fetch), parts)

    def start(self, start: Start) -> None:
        if self.preload is not None and not (self._server and self._server.running()):  # somebody has ended it
            self._server = self.preload.server()
        with interrupts_held() as blocked:
            process = start_process(self._method, start, self._descriptors, self.fetch, self._server, blocked)
            self.processes[start.worker] = process
            self._poll.register(process.sentinel, select.POLLIN)

    def wait(self, seconds: float | None) -> list[int]:
        """Wait until a reply comes or something happens to a worker; gives the descriptors that say so."""
        milliseconds = None if seconds is None else math.ceil(min(seconds, LONGEST_WAIT) * 1000)
        return [fd for fd, _ in self._poll.poll(milliseconds)]

    def remove(self, worker: int) -> Process:
        """Forget a worker that has ended."""
        process = self.processes.pop(worker)
        self._poll.unregister(process.sentinel)
        process.close()
        return process

    def end(self) -> None:
        """Wait for workers that were asked to end, then end them by force."""
        found = self.processes.values()
        running = {process.sentinel: process for process in found if process.exitcode() is None and process.started}
        for number, seconds in ((0, ASKED), (self.end_signal, TERMINATED), (signal.SIGKILL, KILLED)):
            for process in running.values():
                if number:
                    process.kill(number)
            deadline = time.monotonic() + seconds
            while running and (left := deadline - time.monotonic()) > 0:
                poll = select.poll()
                for fd in running:
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll(math.ceil(left * 1000)):
                    running.pop(fd).exitcode()

    def close(self) -> None:
        """Let go of all workers, and of what they were given."""
        for process in self.processes.values():
            process.close()
        self.processes.clear()
        if self.payload >= 0:
            os.close(self.payload)
            self.payload = -1
        self.preload = self._server = self.fetch = None
