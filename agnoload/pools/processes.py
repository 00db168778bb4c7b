"""The pool of worker processes: tickets through pipes, batches through the arena.

Workers pull: any free worker reads the next ticket from one pipe, so nothing is bound to a worker before the worker is
free. Requests that must be answered by one worker (streams) go through a pipe of its own. All replies come back through
one pipe. Tickets have a fixed size below the kernel's atomic limit, and fewer are under way than a pipe holds, so
neither side can block while it writes, and a worker killed in the middle of anything leaves no half ticket.

One thread at a time is inside a pool. Whoever closes it meanwhile, another thread or a signal handler, wakes that
thread and leaves the rest to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import pickle
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agnoload.backend import registry
from agnoload.errors import CALLED, AgnoloadError, LoaderClosed, WorkerDied, WorkerTimeout, add_note, warn
from agnoload.inspect import plain_values
from agnoload.messages import Reply, Request, Start, describe_request, plain_indices
from agnoload.monitoring.logs import Logged, Warned, heard, settings
from agnoload.pools.launcher import (
    UNKNOWN,
    ForkServer,
    Preload,
    Process,
    import_environment,
    interrupts_held,
    preload,
    standard_streams,
    start_process,
)
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
    Control,
    Extras,
    Stage,
    WorkerFetch,
    answered,
    check_reading,
    checksum,
)
from agnoload.system import method_of
from agnoload.transport import pickling
from agnoload.transport.arena import Arena, Fence, Slot
from agnoload.transport.memory import Attach, sending
from agnoload.transport.payload import Digest, digest, pack
from agnoload.transport.remote_errors import Described, restore
from agnoload.transport.wire import EncodedSpan, decode

SILENCE = 60.0
"""Seconds without a batch after which one warning tells what the workers are doing."""

FOREVER = 1e6
"""Seconds of one wait at most, as long as the system can wait; who waits longer waits again."""

TICKETS = 512
"""Tickets under way at most, fewer where pipes are small."""

ASKED, TERMINATED, KILLED = 0.1, 0.3, 0.5
"""Seconds that a worker has, when its pool is closed, to end as it was asked to, by SIGTERM, by SIGKILL."""


_NO_EXTRAS = Extras()


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
        listen: Callable[[Sequence[Logged | Warned]], None] | None = None,
        preload: Preload | None = None,
    ) -> None:
        self._inherited: WorkerFetch | None = fetch  # by workers that are started later
        self._workers = workers
        self._context = method_of(context)
        self._owned = owned
        self._restarts = restarts
        self._listen = listen
        self._pid = os.getpid()
        self.waiting = False
        self._flights: dict[int, _Flight] = {}
        self._backlog: deque[_Flight] = deque()
        self._tickets = 0
        self._ready: deque[Reply] = deque()
        self._fatal: BaseException | None = None
        self._warned = False
        self._oom = oom_kills()
        self._inside = threading.RLock()
        self._closed = self._ended = False
        self._processes: dict[int, Process] = {}
        self._latest: dict[int, Process] = {}
        self._around: dict[str, Any] = {}
        self.preload = preload
        self._server: ForkServer | None = None
        self._by_sentinel: dict[int, int] = {}
        self._poll = select.poll()
        self._arena: Arena | None = None
        self._payload = self._replies = self._replies_w = -1
        self._pipes: list[tuple[int, int]] = []
        self._extra: list[int] = []  # descriptors of shared files in the dataset, which stay theirs
        self._environment = environment or {}
        self._digest: Digest | None = None
        self._classes: list[type] = []
        check_reading()
        for needed, there in (("/proc", os.path.isdir("/proc/self/fd")), ("memfd", hasattr(os, "memfd_create"))):
            if not there:
                raise AgnoloadError(
                    f"worker processes need {needed}, which is not there: use worker_type='thread' or num_workers=0"
                )
        self._end_signal = signal.SIGKILL if signal.SIGTERM in answered() else signal.SIGTERM
        try:
            with standard_streams():
                self._open(fetch, window, reuse, attach, fence)
        except BaseException:
            self.close()
            raise

    def _open(self, fetch: WorkerFetch, window: int, reuse: bool, attach: Attach | None, fence: Fence | None) -> None:
        method, workers = self._context, self._workers
        if method == "fork":
            _warn_about_threads()
            _warn_about_devices()
        else:
            with sending() as self._extra:
                self._around = surroundings(self._environment, fetch.parts())
                self._payload, self._classes, self._around["modules"] = pack(fetch, self._around, fetch.parts(), method)
        if method == "forkserver":
            self.preload = preload(self._around, self._around["modules"], self.preload)
            self._server = self.preload.server()
        if reuse:
            with contextlib.suppress(*(() if method != "fork" else (Exception,))):  # a fork may hold what cannot pickle
                self._digest = self._digest_of(fetch)
        self._arena = Arena(1 + workers, window + workers + 1, attach, fence)
        self._control = Control(self._arena.fd, workers)
        self._replies, self._replies_w = os.pipe()
        os.set_blocking(self._replies, False)
        for _ in range(workers if self._owned else 1):
            self._pipes.append(os.pipe())
        room = min(_tickets_in(self._replies, REPLY.size), _tickets_in(self._pipes[0][0], REQUEST.size))
        self._room = max(min(TICKETS, room - workers - 1), 1)  # beside one that stops each worker, one that wakes us
        self._poll.register(self._replies, select.POLLIN)
        for worker in range(workers):
            self._start(worker)
        for process in self._processes.values():
            if not process.pid and process.failed is not None:
                raise process.failed
        if method != "fork" or not self._restarts:  # a kept pool would keep the dataset, and all that this knows
            self._inherited = None

    # ------------------------------------------------------------------------------------------------ the protocol

    def submit(self, request: Request) -> None:
        self._enter()
        try:
            slot = self.arena.acquire()
            self.arena.trim()
            flight = self._flights[request.number] = _Flight(request, slot)
            self._send(flight)
        finally:
            self._leave()

    def receive(self, timeout: float | None = None) -> Reply:
        """The next reply, in the order in which they come; `WorkerTimeout` after `timeout` seconds without one."""
        self.waiting = False
        self._enter()
        try:
            began = time.monotonic()
            while not self._ready:
                self._wait_on(timeout, time.monotonic() - began)
            return self._ready.popleft()
        finally:
            self._leave()

    def ready(self) -> bool:
        self._enter()
        try:
            if not self._ready:
                self._take_replies()
            return bool(self._ready)
        finally:
            self._leave()

    def close(self) -> None:
        """End all workers, whatever they do, within a second, and close every descriptor.

        A thread that is in `receive` is woken and gets `LoaderClosed`.
        """
        if self._closed:
            return
        self._closed = True
        if not self.is_ours:
            self._ended = True
            self._let_go()
            return
        if self._replies_w >= 0:
            os.write(self._replies_w, REPLY.pack(*[-1] * 10, *[0.0] * 4))
        if not self._inside._is_owned():  # type: ignore[attr-defined]  # a signal handler: what it interrupted ends
            self._end_all()

    # ------------------------------------------------------------------------------------------------ one at a time

    def _enter(self) -> None:
        check_process(self._pid)
        self._inside.acquire()
        if self._closed:
            self._leave()
            raise LoaderClosed("the loader was closed before the end of its data")

    def _leave(self) -> None:
        self._inside.release()
        if self._closed and not self._inside._is_owned():  # type: ignore[attr-defined]
            self._end_all()

    def _end_all(self) -> None:
        with self._inside:
            if self._ended:
                return
            self._ended = True
            processes = list(self._processes.values())
            try:
                self._ask_to_stop()
                _end(processes, ((0, ASKED), (self._end_signal, TERMINATED), (signal.SIGKILL, KILLED)))
            except BaseException:  # Ctrl-C, a second time
                for process in processes:
                    process.kill(signal.SIGKILL)
                raise
            finally:
                for process in processes:
                    process.close()
                self._let_go()

    def _let_go(self) -> None:
        pipes = [fd for pipe in self._pipes for fd in pipe]
        for fd in (self._replies, self._replies_w, self._payload, *pipes):
            if fd >= 0:
                os.close(fd)
        self._flights.clear()
        self.preload = self._server = None
        if self._arena is not None:
            self._arena.close()

    # ------------------------------------------------------------------------------------------------ for the loader

    def pids(self) -> dict[int, int]:
        """The process of each living worker."""
        return {worker: process.pid for worker, process in self._processes.items()}

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, not one that this process is a fork of."""
        return os.getpid() == self._pid

    @property
    def arena(self) -> Arena:
        arena = self._arena
        if arena is None:
            raise AgnoloadError("this pool was never opened")
        return arena

    @property
    def whole(self) -> bool:
        """Whether all workers live, as far as is known, and are of use."""
        return self._fatal is None and len(self._processes) == self._workers

    def reusable(self, fetch: WorkerFetch) -> bool:
        """Whether the workers live, and what they were given is what `fetch` would give them now."""
        self._enter()
        try:
            self._wait(0)
        finally:
            self._leave()
        return self.whole and self._digest is not None and self._digest == self._digest_of(fetch)

    @property
    def unseen(self) -> str | None:
        """The path to a container within which `reusable` may overlook a change."""
        return self._digest and self._digest.unseen

    def _digest_of(self, fetch: WorkerFetch) -> Digest:
        parts = fetch.parts()
        around = {name: value for name, value in surroundings(self._environment, parts).items() if name != "journal"}
        return digest((around, fetch), parts)

    def abandon(self) -> None:
        """Nobody wants what is under way any more; the workers go on with what comes next."""
        self._enter()
        try:
            if not self._owned:
                for number in self._unread():
                    self._tickets -= 1
                    self.arena.give_back(self._flights.pop(number).slot.number)
            for flight in self._backlog:
                del self._flights[flight.request.number]
                self.arena.give_back(flight.slot.number)
            self._backlog.clear()
            for flight in self._flights.values():
                flight.abandoned = True
            self._ready.clear()
        finally:
            self._leave()

    # ------------------------------------------------------------------------------------------------ sending

    def _send(self, flight: _Flight) -> None:
        if self._tickets >= self._room:
            self._backlog.append(flight)
            return
        request, slot = flight.request, flight.slot
        data = request.packed()
        form = PACKED if data is not None else PICKLED
        if data is None:
            try:
                data = pickle.dumps(request, 5)
            except (pickle.PicklingError, AttributeError, TypeError):
                data = pickling.dumps(request)
            else:
                if b"_main__" in data and self._payload >= 0:  # perhaps a class of the script, which only forks have
                    data = pickling.dumps(request)
        slot.reset()
        slot.put(data)
        self._tickets += 1
        pipe = self._pipes[request.owner or 0 if self._owned else 0][1]
        os.write(pipe, REQUEST.pack(request.number, slot.number, len(data), form))

    def _start(self, worker: int) -> None:
        self._control.clear(worker)
        requests = self._pipes[worker if self._owned else 0][0]
        start = Start(worker, self._workers, self._pid, self._payload, self.arena.fd, requests, self._replies_w)
        if self.preload is not None and not (self._server and self._server.running()):  # somebody has ended it
            self._server = self.preload.server()
        with interrupts_held():
            process = start_process(self._context, start, self._extra, self._inherited, self._server)
            self._processes[worker] = process
            self._latest[worker] = process
            self._by_sentinel[process.sentinel] = worker
            self._poll.register(process.sentinel, select.POLLIN)

    # ------------------------------------------------------------------------------------------------ receiving

    def _wait_on(self, timeout: float | None, waited: float) -> None:
        """One step of waiting for a reply that is not there yet."""
        if self._fatal is not None:
            raise self._fatal
        if all(flight.abandoned for flight in self._flights.values()):
            raise AgnoloadError("receive() was called while no request was under way")
        if timeout is not None and waited >= timeout:
            raise self._timed_out(waited)
        if waited >= SILENCE and not self._warned:
            self._warned = True
            warn(f"no batch for {waited:.0f} s: {self._doing()[0]}")
        limits = [limit - waited for limit in (timeout, None if self._warned else SILENCE) if limit is not None]
        self._wait(max(min(limits), 0.0) if limits else None)
        if self._closed:
            raise LoaderClosed("the loader was closed while it waited for a batch")

    def _wait(self, seconds: float | None) -> None:
        """Wait for a reply or a death and take up all that is there; finished batches come before a death."""
        milliseconds = None if seconds is None else math.ceil(min(seconds, FOREVER) * 1000)
        self.waiting = True
        events = self._poll.poll(milliseconds)
        self.waiting = False
        self._take_replies()
        for fd, _ in events:
            worker = self._by_sentinel.get(fd)
            if worker is not None and not self._closed and self._processes[worker].exitcode() is not None:
                self._died(worker)
        while self._backlog and self._tickets < self._room and not self._closed:
            self._send(self._backlog.popleft())

    def _take_replies(self) -> None:
        while not self._closed:
            try:
                data = os.read(self._replies, REPLY.size * 64)
            except BlockingIOError:
                return
            if len(data) % REPLY.size:
                self._refuse(None, "a ticket of another size")
                return
            for ticket in REPLY.iter_unpack(data):
                if not self._closed:
                    self._take(*ticket)
            if len(data) < REPLY.size * 64:
                return

    def _take(
        self, number: int, slot_number: int, worker: int, kind: int, check: int, offset: int, nbytes: int, arrays: int,
        end: int, samples: int, started: float, fetched: float, collated: float, finished: float,
    ) -> None:  # fmt: skip
        arena, place = self.arena, EncodedSpan(offset, nbytes, arrays, end)
        if not (worker in self._latest and arena.has(slot_number) and offset >= 0 and 0 <= nbytes <= end - offset):
            return self._refuse(worker, "a ticket that names no place of its own")
        flight, slot = self._flights.get(number), arena[slot_number]
        if flight is not None and flight.slot is slot:
            self._tickets -= 1
            del self._flights[number]
            if flight.abandoned:
                return arena.give_back(slot_number)
        elif not kind & STARTUP:  # another worker took it for lost and has answered
            return None
        slot.reach(end)
        if checksum(slot, place) != check:
            return self._refuse(worker, "an answer that is not what it wrote", flight)
        if flight is None:
            return self._never_began(worker, *decode(place, slot, None))
        copy = bool(kind & ERROR) or arena.full(end)
        error: BaseException | None = None
        batch, extras, last = None, _NO_EXTRAS, bool(kind & END)
        try:
            value = decode(place, slot, None if copy else arena)
        except CALLED as broken:  # out of the user's own classes; due when the batch is
            add_note(broken, f"while {describe_request(flight.request)} from worker {worker} was decoded")
            error = broken
            # Without the extras it is not known where a stream stands.
            last = flight.request.owner is not None and bool(kind & (ERROR | EXTRAS))
        else:
            if kind & (ERROR | EXTRAS):
                batch, extras = value
            else:
                batch = value
            if kind & ERROR:
                error, batch = restore(batch, f"in {self._name(worker)}"), None
        finally:
            if copy or not arrays:
                arena.give_back(slot_number)
        if extras.imported and self.preload is not None:
            self.preload.learn(extras.imported)
        times = (started, fetched, collated, finished)
        self._ready.append(Reply(number, worker, batch, error, samples, last, *extras[:4], *times, end))
        return None

    def _never_began(self, worker: int, described: Described, extras: Extras) -> None:
        """A worker could not read the dataset, or its `worker_init_fn` has raised: nobody waits for the others."""
        if self._fatal is None:
            self._fatal = restore(described, f"in {self._name(worker)}, before its first batch")
            self._hear(extras.log_records)

    def _refuse(self, worker: int | None, what: str, flight: _Flight | None = None) -> None:
        """What came through the pipe or lies in the slot was not written by our code: nothing can be trusted."""
        process = None if worker is None else self._latest.get(worker)
        who = f"worker {worker} (pid {process.pid})" if process is not None else "a worker"
        request = flight.request if flight is not None else None
        where = f" for {describe_request(request)}" if request is not None else ""
        self._fatal = self._fatal or WorkerDied(
            f"{who} is not trusted any more: it sent {what}{where}; something in it writes to memory or files that are "
            "not its own",
            worker,
            process.pid if process is not None else None,
            batch=request.batch if request is not None else None,
            indices=plain_indices(request.indices) if request is not None else None,
        )

    # ------------------------------------------------------------------------------------------------ deaths

    def _died(self, worker: int) -> None:
        """A worker has ended: load what it had in work again, or answer it with `WorkerDied`."""
        process = self._processes.pop(worker)
        del self._by_sentinel[process.sentinel]
        self._poll.unregister(process.sentinel)
        code = process.exitcode()
        process.close()
        self._fatal = self._fatal or process.failed
        if self._fatal is not None:
            return
        self._hear(heard(self._control.said(worker)))
        lost = self._lost(worker)
        culprit = next((flight for flight in lost if flight.request.number == self._control.claimed(worker)), None)
        wanted = [flight for flight in lost if not flight.abandoned]
        for flight in lost:
            self._tickets -= 1
            if flight.abandoned:
                del self._flights[flight.request.number]
        if culprit is not None:
            culprit.deaths += 1
        if self._restarts > 0 and (culprit is None or culprit.deaths < 2):
            self._restarts -= 1
            with standard_streams():
                if self._owned:
                    self._renew_pipe(worker)
                self._start(worker)
            self._send_again(wanted)
            return
        error = self._obituary(worker, process, code, culprit or (lost[0] if lost else None))
        for flight in wanted:
            del self._flights[flight.request.number]
            self._ready.append(Reply(flight.request.number, worker, error=error, end=True))
        if not wanted or not self._processes or self._owned:
            self._fatal = error

    def _hear(self, said: Sequence[Logged | Warned]) -> None:
        """Pass on what a worker has said of a batch that it will not answer; nothing of it may come in our way."""
        if self._listen is not None:
            with contextlib.suppress(*CALLED):
                self._listen(said)

    def _lost(self, worker: int) -> list[_Flight]:
        """The requests that died with a worker, in their order."""
        if self._owned:
            return sorted(
                (f for f in self._flights.values() if f.request.owner == worker and f not in self._backlog),
                key=lambda flight: flight.request.number,
            )
        claimed = self._control.claimed(worker)
        if claimed in self._flights:
            twice = any(self._control.claimed(other) == claimed for other in self._processes)
            return [] if twice else [self._flights[claimed]]
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
        self._tickets -= len(waiting)
        self._send_again(self._flights[number] for number in waiting)
        for number in missing:
            self._flights[number].slot = self.arena.acquire()
        return [self._flights[number] for number in sorted(missing)]

    def _send_again(self, flights: Iterable[_Flight]) -> None:
        """Requests that are due before those that nobody has read yet."""
        flights = list(flights)
        if not self._owned:
            unread = self._unread()
            self._tickets -= len(unread)
            flights += [self._flights[number] for number in unread]
        for flight in sorted(flights, key=lambda flight: flight.request.number):
            self._send(flight)

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

    def _obituary(self, worker: int, process: Process, code: int | None, flight: _Flight | None) -> WorkerDied:
        kills = oom_kills() - self._oom
        code = None if code == UNKNOWN else code
        request = flight.request if flight is not None else None
        stage = self._control.stage_of(worker)
        text = f"worker {worker} (pid {process.pid}) {_how(code)} {_doing(stage, request)}"
        rss = process.rss or self._control.memory(worker) or None
        if rss is not None:
            text += f"; it had {'up to ' * bool(process.rss)}{rss / 2**20:,.0f} MiB of memory"
            text += " before this batch" * (not process.rss and request is not None)
        if kills:
            text += f"; the control group counted {kills} out-of-memory kill{'s' * (kills > 1)}: use fewer workers"
        if flight is not None and flight.deaths > 1:
            text += "; this request has ended two workers in a row, so it is not loaded again"
        error = WorkerDied(
            text,
            worker,
            process.pid,
            code,
            request.batch if request else None,
            plain_indices(request.indices) if request else None,
            kills,
            rss,
        )
        if stack := self._control.stack(worker):
            error.add_note(f"the worker's Python stack at its end:\n{stack}")
        return error

    # ------------------------------------------------------------------------------------------------ waiting too long

    def _timed_out(self, waited: float) -> WorkerTimeout:
        text, worker = self._doing()
        if worker is not None:
            _end([self._processes[worker]], ((self._end_signal, 1.0), (signal.SIGKILL, KILLED)))
            self._hear(heard(self._control.said(worker)))
        return WorkerTimeout(f"no batch came within {waited:.1f} s: {text}")

    def _doing(self) -> tuple[str, int | None]:
        """What the oldest request under way is waiting for, with its worker's stack; and that worker."""
        number = min(number for number, flight in self._flights.items() if not flight.abandoned)
        what = describe_request(self._flights[number].request)
        claims = {self._control.claimed(worker): worker for worker in self._processes}
        stages = {worker: self._control.stage_of(worker) for worker in self._processes}
        worker = claims.get(number)
        if worker is None:
            what, worker = self._holding_up(what, claims, stages)
        if worker is None:
            return what, None
        if stages[worker] == Stage.LAUNCHED:
            return f"worker {worker} is busy with {what}: its process has not begun yet", worker
        return f"{self._name(worker)} is busy with {what}; its stack:\n{self._ask_stack(worker)}", worker

    def _name(self, worker: int) -> str:
        return f"worker {worker} (pid {self._latest[worker].pid})"

    def _holding_up(
        self, what: str, claims: Mapping[int | None, int], stages: Mapping[int, Stage]
    ) -> tuple[str, int | None]:
        """Why no worker has taken a request, and the worker that is to blame."""
        for worker, stage in stages.items():
            if stage <= Stage.STARTING:
                return "its start (reading the dataset, worker_init_fn)", worker
        for number, worker in claims.items():
            if number in self._flights:
                other = describe_request(self._flights[number].request)
                return f"{other}, which nobody waits for any more, while {what} waits for a free worker", worker
        return f"{what} waits for a free worker", None

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

    def _ask_to_stop(self) -> None:
        """Idle workers end by themselves; what nobody has started to load is taken back first."""
        if not self._owned and self._pipes:
            with contextlib.suppress(OSError):
                self._unread()
        for worker, process in self._processes.items():
            if self._control.stage_of(worker) != Stage.IDLE:
                process.kill(self._end_signal)
            with contextlib.suppress(OSError):
                os.write(self._pipes[worker if self._owned else 0][1], REQUEST.pack(-1, 0, 0, 0))


def check_process(owner: int) -> None:
    """An iterator with workers is of no use in a forked copy of the process that made it."""
    if os.getpid() != owner:
        raise AgnoloadError(
            f"this iterator belongs to process {owner}, and this is a fork of it: make one of its own here with "
            "iter(loader)"
        )


def _end(processes: Iterable[Process], steps: Iterable[tuple[int, float]]) -> None:
    """Send one signal after the other (0: none) to those that still run, and give them so many seconds after each."""
    running = {process.sentinel: process for process in processes if process.exitcode() is None and process.started}
    for number, seconds in steps:
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


def _tickets_in(pipe: int, nbytes: int) -> int:
    """How many tickets of a size a pipe holds: no ticket goes over the end of one of its pages."""
    try:
        size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    except (AttributeError, OSError):
        size = mmap.PAGESIZE
    return size // mmap.PAGESIZE * (mmap.PAGESIZE // nbytes)


def surroundings(environment: Mapping[str, str], parts: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker needs to look like this process; `parts` are the user's objects that it will run."""
    return {
        **import_environment(environment),
        "journal": settings(),
        "frameworks": pickle.dumps(registry.framework_settings()),
        "values": plain_values(parts),
        "signals": answered(),
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
    if code is None:
        return "ended (its exit code was collected by a signal handler or a thread of yours)"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


def _doing(stage: Stage, request: Request | None) -> str:
    if request is not None:
        return f"while it loaded {describe_request(request)}"
    if stage <= Stage.STARTING:
        return "before its first batch: while it read the dataset or in worker_init_fn"
    return "while it was idle"


def _warn_about_threads() -> None:
    others = threading.active_count() - 1
    if others > 0:
        warn(
            f"multiprocessing_context='fork' copies this process of {others + 1} threads; those that are not "
            "copied may hold locks that nobody will release in the copy: a worker can hang for ever. Use the "
            "default (forkserver)"
        )


DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel")
"""How the names begin under which accelerators are opened."""


def _warn_about_devices() -> None:
    opened = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                opened.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    devices = sorted(name for name in opened if name.startswith(DEVICES))
    if devices:
        warn(
            f"multiprocessing_context='fork' copies this process, which has opened {', '.join(devices)}: a driver does "
            "not work in a copy, so a sample that uses the device fails or hangs. Use the default (forkserver)"
        )
