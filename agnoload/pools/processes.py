"""The pool of worker processes: tickets through pipes, batches through the arena.

Workers pull: any free worker reads the next ticket from one pipe, so nothing is bound to a worker before the worker is
free. Requests that must be answered by one worker (streams) go through a pipe of its own. All replies come back through
one pipe. Tickets have a fixed size below the kernel's atomic limit, and fewer are under way than a pipe holds, so
neither side can block while it writes, and a worker killed in the middle of anything leaves no half ticket.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agnoload.errors import AgnoloadError, AgnoloadWarning, WorkerDied, WorkerTimeout
from agnoload.messages import Reply, Request
from agnoload.pools.start import THREADS, Process, Start, method_of, start_process
from agnoload.pools.worker import (
    DUMP_SIGNAL,
    END,
    ERROR,
    EXTRAS,
    PACKED,
    PICKLED,
    REPLY,
    REQUEST,
    STARTUP,
    TICKETS,
    Control,
    Stage,
    WorkerFetch,
)
from agnoload.transport import byvalue
from agnoload.transport.arena import LENT_LIMIT, Arena, Attach, Fence, Slot
from agnoload.transport.failures import restore
from agnoload.transport.payload import digest, pack
from agnoload.transport.shared import sending
from agnoload.transport.wire import Place, decode

SILENCE = 60.0
"""Seconds without a batch after which one warning tells what the workers are doing."""


class _Flight:
    """A request under way: its slot, how many workers died over it, and whether anybody still wants the reply."""

    __slots__ = ("abandoned", "deaths", "request", "slot")

    def __init__(self, request: Request, slot: Slot) -> None:
        self.request = request
        self.slot = slot
        self.deaths = 0
        self.abandoned = False


class ProcessPool:
    """Answers requests in `workers` processes; `window` is the most requests that the loader has under way."""

    def __init__(
        self,
        fetch: WorkerFetch,
        *,
        workers: int,
        window: int,
        context: Any = None,
        owned: bool = False,
        reuse: bool = False,
        restarts: int = 0,
        attach: Attach | None = None,
        fence: Fence | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._fetch = fetch
        self._workers = workers
        self._context = method_of(context) if context is None or isinstance(context, str) else context
        self._owned = owned
        self._restarts = restarts
        self._pid = os.getpid()
        self._flights: dict[int, _Flight] = {}
        self._backlog: deque[_Flight] = deque()
        self._tickets = 0
        self._ready: deque[Reply] = deque()
        self._fatal: BaseException | None = None
        self._oom = oom_kills()
        self._closed = False
        self._processes: dict[int, Process] = {}
        self._extra: list[int] = []
        self._payload = -1
        self._digest = digest(fetch) if reuse else None
        self._poll = select.poll()
        self._by_sentinel: dict[int, int] = {}
        if method_of(self._context) == "fork":
            _warn_about_threads()
        else:
            around = surroundings(environment or {})
            with sending() as self._extra:
                self._payload = pack(fetch, around, fetch.parts(), method_of(self._context))
        self._arena = Arena(1 + workers, window + workers + 1, attach, fence)
        self._control = Control(self._arena.fd, workers)
        self._replies, self._replies_w = os.pipe()
        os.set_blocking(self._replies, False)
        self._pipes = [os.pipe() for _ in range(workers if owned else 1)]
        self._poll.register(self._replies, select.POLLIN)
        try:
            for worker in range(workers):
                self._start(worker)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------ the protocol

    def submit(self, request: Request) -> None:
        slot = self._arena.take()
        self._arena.trim()
        flight = self._flights[request.number] = _Flight(request, slot)
        self._send(flight)

    def receive(self, timeout: float | None = None) -> Reply:
        """The next reply, in the order in which they come; `WorkerTimeout` after `timeout` seconds without one."""
        began = time.monotonic()
        warned = False
        while not self._ready:
            if self._fatal is not None:
                raise self._fatal
            if all(flight.abandoned for flight in self._flights.values()):
                raise AgnoloadError("receive() was called while no request was under way")
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise self._timed_out(waited)
            if waited >= SILENCE and not warned:
                warned = True
                warnings.warn(f"no batch for {waited:.0f} s: {self._doing()[0]}", AgnoloadWarning, stacklevel=4)
            limits = [limit - waited for limit in (timeout, None if warned else SILENCE) if limit is not None]
            self._wait(min(limits) if limits else None)
        return self._ready.popleft()

    def ready(self) -> bool:
        if not self._ready:
            self._take_replies()
        return bool(self._ready)

    def close(self) -> None:
        """End all workers, whatever they do, within a second, and close every descriptor."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._pid:
            self._end(self._processes.values())
        for fd in (self._replies, self._replies_w, self._payload, *self._extra, *(fd for p in self._pipes for fd in p)):
            if fd >= 0:
                os.close(fd)
        self._flights.clear()
        self._arena.close()

    # ------------------------------------------------------------------------------------------------ for the loader

    def pids(self) -> dict[int, int]:
        """The process of each living worker."""
        return {worker: process.pid for worker, process in self._processes.items()}

    @property
    def arena(self) -> Arena:
        return self._arena

    def reusable(self, fetch: WorkerFetch) -> bool:
        """Whether the workers live, and what they were given is what `fetch` would give them now."""
        self.ready()
        whole = self._fatal is None and len(self._processes) == self._workers
        return whole and self._digest is not None and self._digest == digest(fetch)

    def abandon(self) -> None:
        """Nobody wants what is under way any more; the workers go on with what comes next."""
        if not self._owned:
            for number in self._unread():
                self._tickets -= 1
                self._arena.give_back(self._flights.pop(number).slot.number)
        for flight in self._backlog:
            del self._flights[flight.request.number]
            self._arena.give_back(flight.slot.number)
        self._backlog.clear()
        for flight in self._flights.values():
            flight.abandoned = True
        self._ready.clear()

    # ------------------------------------------------------------------------------------------------ sending

    def _send(self, flight: _Flight) -> None:
        if self._tickets >= TICKETS:
            self._backlog.append(flight)
            return
        request, slot = flight.request, flight.slot
        data = request.packed()
        form = PACKED if data is not None else PICKLED
        if data is None:
            try:
                data = pickle.dumps(request, 5)
            except (pickle.PicklingError, AttributeError, TypeError):
                data = byvalue.dumps(request)
        slot.reset()
        slot.put(data)
        self._tickets += 1
        pipe = self._pipes[request.owner or 0 if self._owned else 0][1]
        os.write(pipe, REQUEST.pack(request.number, slot.number, len(data), form))

    def _start(self, worker: int) -> None:
        self._control.clear(worker)
        requests = self._pipes[worker if self._owned else 0][0]
        start = Start(worker, self._workers, self._pid, self._payload, self._arena.fd, requests, self._replies_w)
        process = start_process(self._context, start, self._extra, self._fetch)
        self._processes[worker] = process
        self._by_sentinel[process.sentinel] = worker
        self._poll.register(process.sentinel, select.POLLIN)

    # ------------------------------------------------------------------------------------------------ receiving

    def _wait(self, seconds: float | None) -> None:
        """Wait for a reply or a death and take up all that is there; finished batches come before a death."""
        milliseconds = None if seconds is None else max(0, int(seconds * 1000) + 1)
        events = self._poll.poll(milliseconds)
        self._take_replies()
        for fd, _ in events:
            if fd != self._replies and fd in self._by_sentinel:
                self._died(self._by_sentinel[fd])

    def _take_replies(self) -> None:
        while True:
            try:
                data = os.read(self._replies, REPLY.size * 64)
            except BlockingIOError:
                return
            for ticket in REPLY.iter_unpack(data):
                self._take(*ticket)
            if len(data) < REPLY.size * 64:
                return

    def _take(
        self, number: int, slot_number: int, worker: int, kind: int, offset: int, nbytes: int, arrays: int, end: int,
        samples: int, started: float, fetched: float, collated: float, finished: float,
    ) -> None:  # fmt: skip
        place = Place(offset, nbytes, arrays, end)
        slot = self._arena[slot_number]
        if kind & STARTUP:
            described, _ = decode(place, slot, None)
            self._fatal = self._fatal or restore(described, f"in worker {worker}, before its first batch")
            return
        self._tickets -= 1
        flight = self._flights.pop(number, None)
        if flight is None or flight.slot is not slot:  # answered twice: another worker took it for lost
            return
        if flight.abandoned:
            self._arena.give_back(slot_number)
            return
        copy = bool(kind & ERROR) or self._arena.lent >= LENT_LIMIT
        error: BaseException | None = None
        batch, extras = None, None
        try:
            value = decode(place, slot, None if copy else self._arena)
        except Exception as broken:
            broken.add_note(f"while batch {flight.request.batch} from worker {worker} was decoded")
            error = broken
        else:
            if kind & (ERROR | EXTRAS):
                batch, extras = value
            else:
                batch = value
            if kind & ERROR:
                error, batch = restore(batch, f"in worker {worker} (pid {self._pid_of(worker)})"), None
        finally:
            if copy or not arrays:
                self._arena.give_back(slot_number)
        times = (started, fetched, collated, finished)
        self._ready.append(Reply(number, worker, batch, error, samples, bool(kind & END), extras, *times, end))
        if self._backlog:
            self._send(self._backlog.popleft())

    def _pid_of(self, worker: int) -> int | None:
        process = self._processes.get(worker)
        return process.pid if process is not None else None

    # ------------------------------------------------------------------------------------------------ deaths

    def _died(self, worker: int) -> None:
        """A worker has ended: load what it had in work again, or answer it with `WorkerDied`."""
        process = self._processes.pop(worker)
        del self._by_sentinel[process.sentinel]
        self._poll.unregister(process.sentinel)
        code = process.exitcode()
        stage = self._control.stage_of(worker)
        lost = self._lost(worker)
        pid = process.pid
        process.close()
        if self._fatal is not None:
            return
        culprit = next((flight for flight in lost if flight.deaths >= 1), None)
        for flight in lost:
            flight.deaths += 1
        if self._restarts > 0 and culprit is None:
            self._restarts -= 1
            if self._owned:
                self._renew_pipe(worker)
            self._start(worker)
            for flight in lost:
                self._tickets -= 1
                self._send(flight)
            return
        error = self._obituary(worker, pid, code, stage, culprit or (lost[0] if lost else None), culprit is not None)
        for flight in lost:
            self._tickets -= 1
            del self._flights[flight.request.number]
            if not flight.abandoned:
                self._ready.append(Reply(flight.request.number, worker, error=error))
        if not lost or not self._processes or self._owned:
            self._fatal = error

    def _lost(self, worker: int) -> list[_Flight]:
        """The requests that died with a worker, in their order."""
        if self._owned:
            return sorted(
                (f for f in self._flights.values() if f.request.owner == worker and f not in self._backlog),
                key=lambda flight: flight.request.number,
            )
        claimed = self._control.claimed(worker)
        if claimed in self._flights:
            return [self._flights[claimed]]
        # It may have been killed between reading a ticket and claiming it. Take back what nobody has read; whatever
        # the living do not claim either was lost. Its slot is never used again, in case a frozen worker still writes.
        waiting = self._unread()
        deadline = time.monotonic() + 0.5
        while True:
            held = {self._control.claimed(w) for w in self._processes} | {f.request.number for f in self._backlog}
            self._take_replies()
            missing = [n for n in self._flights if n not in held and n not in waiting]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        for number in waiting:
            flight = self._flights[number]
            self._tickets -= 1
            self._send(flight)
        for number in missing:
            self._flights[number].slot = self._arena.take()
        return [self._flights[number] for number in sorted(missing)]

    def _unread(self) -> list[int]:
        """Take the tickets that no worker has read yet out of the shared pipe; gives their numbers."""
        fd = os.open(f"/proc/self/fd/{self._pipes[0][0]}", os.O_RDONLY | os.O_NONBLOCK)  # non-blocking for us alone
        numbers = []
        try:
            while data := os.read(fd, REQUEST.size * 64):
                numbers += [ticket[0] for ticket in REQUEST.iter_unpack(data)]
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
        return numbers

    def _renew_pipe(self, worker: int) -> None:
        """Tickets that lie in a dead worker's own pipe are sent again through a new one."""
        for fd in self._pipes[worker]:
            os.close(fd)
        self._pipes[worker] = os.pipe()

    def _obituary(
        self, worker: int, pid: int, code: int | None, stage: Stage, flight: _Flight | None, twice: bool
    ) -> WorkerDied:
        kills = oom_kills() - self._oom
        request = flight.request if flight is not None else None
        text = f"worker {worker} (pid {pid}) {_how(code)} {_doing(stage, request)}"
        if kills:
            text += f"; the control group counted {kills} out-of-memory kill{'s' * (kills > 1)}: use fewer workers"
        if twice:
            text += "; this request has ended two workers in a row, so it is not loaded again"
        stack = self._control.stack(worker)
        error = WorkerDied(
            text,
            worker,
            pid,
            code,
            request.batch if request else None,
            _plain(request.indices) if request else None,
            kills,
        )
        if stack:
            error.add_note(f"the worker's Python stack at its end:\n{stack}")
        return error

    # ------------------------------------------------------------------------------------------------ waiting too long

    def _timed_out(self, waited: float) -> WorkerTimeout:
        text, worker = self._doing()
        if worker is not None and worker in self._processes:
            self._end([self._processes[worker]])
        return WorkerTimeout(f"no batch came within {waited:.1f} s: {text}")

    def _doing(self) -> tuple[str, int | None]:
        """What the oldest request under way is waiting for, with its worker's stack; and that worker."""
        number = min(self._flights)
        request = self._flights[number].request
        what = describe_request(request)
        worker = next((w for w in self._processes if self._control.claimed(w) == number), None)
        if worker is None:
            starting = [w for w in self._processes if self._control.stage_of(w) == Stage.STARTING]
            if not starting:
                return f"{what} waits for a free worker", None
            worker = starting[0]
            what = "its start (reading the dataset, worker_init_fn)"
        stack = self._ask_stack(worker)
        return f"worker {worker} (pid {self._processes[worker].pid}) is busy with {what}; its stack:\n{stack}", worker

    def _ask_stack(self, worker: int) -> str:
        before = self._control.stack(worker)
        self._processes[worker].kill(DUMP_SIGNAL)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            time.sleep(0.01)
            text = self._control.stack(worker)
            if text != before:
                time.sleep(0.01)  # the last lines
                return self._control.stack(worker)[len(before) :].strip()
        return "  (it did not answer)"

    # ------------------------------------------------------------------------------------------------ the end

    def _end(self, processes: Iterable[Process]) -> None:
        """Ask, then terminate, then kill; at most a second in all."""
        processes = list(processes)
        if self._closed:
            self._ask_to_stop()
        waits = {process.sentinel: process for process in processes}
        for number, seconds in ((0, 0.1), (signal.SIGTERM, 0.3), (signal.SIGKILL, 0.5)):
            for process in waits.values():
                if number:
                    process.kill(number)
            deadline = time.monotonic() + seconds
            while waits and (left := deadline - time.monotonic()) > 0:
                poll = select.poll()
                for fd in waits:
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll(int(left * 1000) + 1):
                    del waits[fd]
        if self._closed:
            for process in processes:
                if process.sentinel not in waits:
                    process.exitcode()
                    process.close()

    def _ask_to_stop(self) -> None:
        """Idle workers end by themselves; what nobody has started to load is taken back first."""
        if not self._owned:
            with contextlib.suppress(OSError):
                self._unread()
        for number in range(len(self._processes)):
            with contextlib.suppress(OSError):
                os.write(self._pipes[number if self._owned else 0][1], REQUEST.pack(-1, 0, 0, 0))


def surroundings(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a worker needs to look like this process."""
    return {
        "path": [entry or os.getcwd() for entry in sys.path],
        "argv": list(sys.argv),
        "environ": {**os.environ, **THREADS, **environment},
        "directory": os.getcwd(),
    }


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for memory so far; 0 where it does not say."""
    for path in _oom_files():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _oom_files() -> list[Path]:
    files = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                files.append(Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(Path("/sys/fs/cgroup/memory") / group.lstrip("/") / "memory.oom_control")
    return files


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


def _doing(stage: Stage, request: Request | None) -> str:
    if request is not None:
        return f"while it loaded {describe_request(request)}"
    if stage == Stage.STARTING:
        return "before its first batch: while it read the dataset or in worker_init_fn"
    return "while it was idle"


def _plain(indices: Any) -> Any:
    return indices.tolist() if hasattr(indices, "tolist") else indices


def describe_request(request: Request) -> str:
    """A request for an error: its batch, and of its indices all of a few, the ends of many."""
    values, batch = _plain(request.indices), f"batch {request.batch}"
    if values is None:
        return batch
    if isinstance(values, list) and len(values) > 8:
        return f"{batch} ({len(values)} indices: {', '.join(map(repr, values[:4]))}, ..., {values[-1]!r})"
    return f"{batch} (indices {values!r})" if isinstance(values, list) else f"{batch} (index {values!r})"


def _warn_about_threads() -> None:
    others = threading.active_count() - 1
    if others > 0:
        warnings.warn(
            f"multiprocessing_context='fork' copies this process while {others} more thread{'s' * (others > 1)} may "
            "hold locks that nobody will release in the copy: a worker can hang for ever. Use the default (forkserver)",
            AgnoloadWarning,
            stacklevel=6,
        )
