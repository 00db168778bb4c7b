"""The pool of worker processes: tickets through pipes, batches through the arena.

One thread at a time is inside a pool. Whoever closes it meanwhile, another thread or a signal handler, wakes that
thread and leaves the rest to it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agnoload.errors import CALLED, AgnoloadError, LoaderClosed, WorkerTimeout, add_note, warn
from agnoload.messages import Reply, Request, Start, describe_request
from agnoload.monitoring.logs import LogRecord, WarningRecord
from agnoload.pools import diagnose
from agnoload.pools.channel import (
    END,
    ERROR,
    EXTRAS,
    NO_EXTRAS,
    STARTUP,
    Channel,
    ReplyTicket,
    write_request,
)
from agnoload.pools.crew import Crew
from agnoload.pools.diagnose import check_process, corruption_report, death_report, what_holds_up, worker_name
from agnoload.pools.launcher import standard_streams
from agnoload.pools.preload import Preload
from agnoload.pools.status import Stage, WorkerStatusBoard
from agnoload.pools.worker import check_reading
from agnoload.protocols import WorkerFetch
from agnoload.transport.arena import STRIDE, Arena, Fence, Slot
from agnoload.transport.memory import Attach
from agnoload.transport.remote_errors import restore
from agnoload.transport.wire import decode


@dataclass(slots=True, eq=False)
class InFlight:
    """A request under way: its slot, how many workers died over it, and whether anybody still wants the reply."""

    request: Request
    slot: Slot
    deaths: int = 0
    abandoned: bool = False


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
        listen: Callable[[Sequence[LogRecord | WarningRecord]], None] | None = None,
        preload: Preload | None = None,
    ) -> None:
        check_reading()
        for needed, there in (
            ("/proc", os.path.isdir("/proc/self/fd")),
            ("memfd", hasattr(os, "memfd_create")),
            ("pidfd", hasattr(os, "pidfd_open")),
        ):
            if not there:
                raise AgnoloadError(
                    f"worker processes need {needed}, which this system lacks: use worker_type='thread' or "
                    "num_workers=0"
                )
        self.waiting = False
        self._workers = workers
        self._owned = owned
        self._restarts = restarts
        self._listen = listen
        self._in_flight: dict[int, InFlight] = {}
        self._ready: deque[Reply] = deque()
        self._fatal: BaseException | None = None
        self._warned = self._closed = False
        self._inside = threading.RLock()  # a signal handler may close the pool within another call of its thread
        self.crew = Crew(fetch, context, environment or {}, preload)
        self._channel = Channel(workers, owned)
        with standard_streams():
            # Slot 0 is the board; each worker has one for an error at its start, when no request has given it any.
            self.arena = Arena(1 + workers, window + workers + 1, attach, fence)
            try:
                self._board = WorkerStatusBoard(self.arena.fd, workers)
                self._channel.open()
                self.crew.prepare(self._channel.replies, reuse)
                for worker in range(workers):
                    self._start(worker)
                for process in self.crew.processes.values():
                    if not process.pid and process.failed is not None:
                        raise process.failed
            except BaseException:
                self.close()
                raise
        if not restarts:
            self.crew.fetch = None  # a kept pool would keep the dataset, and all that the dataset refers to

    # ------------------------------------------------------------------------------------------------ the protocol

    def submit(self, request: Request) -> None:
        with self:
            slot = self.arena.acquire()
            self.arena.trim()
            try:
                ticket = write_request(request, slot, self.crew.payload >= 0)
            except BaseException:
                self.arena.give_back(slot.number)
                raise
            self._in_flight[request.number] = InFlight(request, slot)
            self._channel.send([(request.owner or 0, ticket)])

    def receive(self, timeout: float | None = None) -> Reply:
        """The next reply, in the order in which they come; `WorkerTimeout` after `timeout` seconds without one."""
        self.waiting = False
        with self:
            began = time.monotonic()
            while not self._ready:
                if self._fatal is not None:
                    raise self._fatal
                if all(flight.abandoned for flight in self._in_flight.values()):
                    raise AgnoloadError("receive() was called while no request was under way")
                waited = time.monotonic() - began
                late = timeout is not None and waited >= timeout
                if late or (not self._warned and waited >= diagnose.SILENCE):
                    requests = {number: flight.request for number, flight in self._in_flight.items()}
                    oldest = min(number for number, flight in self._in_flight.items() if not flight.abandoned)
                    text = what_holds_up(oldest, requests, self._board, self.crew.processes)
                    if late:  # and nobody keeps this pool, in which a worker hangs
                        self._fatal = WorkerTimeout(f"no batch came within {waited:.1f} s: {text}")
                        raise self._fatal
                    self._warned = True
                    warn(f"no batch for {waited:.0f} s: {text}")
                silence = None if self._warned else diagnose.SILENCE
                limits = [limit - waited for limit in (timeout, silence) if limit is not None]
                self._wait(max(min(limits), 0.0) if limits else None)
                if self._closed:
                    raise LoaderClosed("the loader was closed while it waited for a batch")
            return self._ready.popleft()

    def ready(self) -> bool:
        with self:
            if not self._ready:
                self._take_replies()
            return bool(self._ready)

    def close(self) -> None:
        """End all workers, whatever they do, within a second, and close every descriptor.

        A thread that is in `receive` wakes and gets `LoaderClosed`.
        """
        if self._closed:
            return
        self._closed = True
        if not self.is_ours:  # a forked copy: the workers are the parent's
            self._let_go()
            return
        self._channel.wake()
        if not self._inside._is_owned():  # type: ignore[attr-defined]  # else a signal handler: whom it interrupts ends
            self._end()

    # ------------------------------------------------------------------------------------------------ one at a time

    def __enter__(self) -> None:
        """Each method works on the pool within `with self`: one thread at a time."""
        check_process(self.crew.owner)
        self._inside.acquire()
        if self._closed:
            self.__exit__()
            raise LoaderClosed("the loader was closed before the end of its data")

    def __exit__(self, *_: object) -> None:
        self._inside.release()
        # Somebody closed it meanwhile and left the end to us, unless we are a signal handler within another call.
        if self._closed and not self._inside._is_owned():  # type: ignore[attr-defined]
            self._end()

    def _end(self) -> None:
        """Idle workers end by themselves; the others get signals. A second call finds nothing to do."""
        with self._inside:
            crew, channel = self.crew, self._channel
            try:
                channel.take_back()  # nobody starts to load what nobody wants
                for worker, process in crew.processes.items():
                    if self._board.stage(worker) != Stage.IDLE:
                        process.kill(crew.end_signal)
                    channel.stop(worker)
                crew.end()
            except BaseException:  # Ctrl-C, a second time: wait no more
                for process in crew.processes.values():
                    process.kill(signal.SIGKILL)
                raise
            finally:
                self._let_go()

    def _let_go(self) -> None:
        self._channel.close()
        self._in_flight.clear()
        self.crew.close()
        self.arena.close()

    # ------------------------------------------------------------------------------------------------ for the loader

    def pids(self) -> dict[int, int]:
        """The process of each living worker."""
        return {worker: process.pid for worker, process in self.crew.processes.items()}

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, not one that this process is a fork of."""
        return os.getpid() == self.crew.owner

    @property
    def whole(self) -> bool:
        """Whether all workers live and work, as far as the pool knows."""
        return self._fatal is None and len(self.crew.processes) == self._workers

    def reusable(self, fetch: WorkerFetch) -> bool:
        """Whether the workers live, and what they were given is what `fetch` would give them now."""
        with self:
            self._wait(0)
        given = self.crew.digest
        return self.whole and given is not None and given == self.crew.digest_of(fetch)

    def abandon(self) -> None:
        """Nobody wants what is under way any more; workers finish what they have started, then take what comes next."""
        with self:
            for number in self._channel.take_back():
                self.arena.give_back(self._in_flight.pop(number).slot.number)
            self._channel.waiting.clear()
            for flight in self._in_flight.values():
                flight.abandoned = True
            self._ready.clear()

    # ------------------------------------------------------------------------------------------------ receiving

    def _start(self, worker: int) -> None:
        self._board.clear(worker)
        channel, crew = self._channel, self.crew
        fds = (crew.payload, self.arena.fd, channel.pipes[worker][0], channel.replies_end)
        crew.start(Start(worker, self._workers, crew.owner, *fds))

    def _wait(self, seconds: float | None) -> None:
        """Wait for a reply or a death, and handle all that is there; finished batches come before a death."""
        self.waiting = True
        events = self.crew.wait(seconds)  # an interrupt behind it loses nothing: the next wait reports the same
        self.waiting = False
        dead = []
        if events != [self._channel.replies]:  # a sentinel says that a worker has ended, or that its pid is known
            crew = self.crew.processes.items()
            dead = [worker for worker, each in crew if each.sentinel in events and each.exitcode() is not None]
        self._take_replies()  # after the look at who is dead: so all replies of the dead are there
        for worker in dead:
            if not self._closed:
                self._died(worker)
        if not self._closed:
            self._channel.flush()

    def _take_replies(self) -> None:
        if not self._closed:
            for ticket in self._channel.receive():
                self._take(ticket)

    def _take(self, ticket: ReplyTicket) -> None:
        arena, worker, kind = self.arena, ticket.worker, ticket.kind
        in_range = 0 <= worker < self._workers and arena.has(ticket.slot)
        if not (in_range and 0 <= ticket.offset <= ticket.offset + ticket.nbytes <= ticket.end <= STRIDE):
            if not self._closed:  # `close` wakes us with such a ticket
                self._fatal = self._fatal or corruption_report(worker, self.crew.processes.get(worker))
            return
        slot, flight = arena[ticket.slot], self._in_flight.get(ticket.number)
        if kind & STARTUP:
            # It could not read the dataset, or `worker_init_fn` has raised: nobody waits for the others.
            described, around = decode(ticket.place, slot, None)
            if self._fatal is None:
                name = worker_name(worker, self.crew.processes[worker])
                self._fatal = restore(described, f"in {name}, before its first batch")
                if self._listen is not None:
                    with suppress(*CALLED):  # a handler of the user's must not come in the way of the error
                        self._listen(around.log_records)
            return
        if flight is None or flight.slot is not slot:
            return  # of a worker that was frozen: its request was taken for lost, and another one has answered
        self._channel.under_way -= 1
        del self._in_flight[ticket.number]
        if flight.abandoned:
            arena.give_back(ticket.slot)
            return
        copy = bool(kind & ERROR) or arena.full(ticket.end)  # who keeps an error must not keep a slot
        error: BaseException | None = None
        batch, extras, last = None, NO_EXTRAS, bool(kind & END)
        try:
            value = decode(ticket.place, slot, None if copy else arena)
        except CALLED as broken:  # out of the user's own classes; due when the batch is
            add_note(broken, f"while {describe_request(flight.request)} from worker {worker} was decoded")
            error = broken
            # Without the extras nobody knows how far a stream was read.
            last = flight.request.owner is not None and bool(kind & (ERROR | EXTRAS))
        else:
            batch, extras = value if kind & (ERROR | EXTRAS) else (value, NO_EXTRAS)
            if kind & ERROR:
                error = restore(batch, f"in {worker_name(worker, self.crew.processes[worker])}")
                batch = None
        finally:
            if copy or not ticket.arrays:
                arena.give_back(ticket.slot)
        if extras.imported and self.crew.preload is not None:
            self.crew.preload.learn(extras.imported)
        times = ticket[9:]
        self._ready.append(
            Reply(ticket.number, worker, batch, error, ticket.samples, last, *extras[:4], *times, ticket.end)
        )

    # ------------------------------------------------------------------------------------------------ deaths

    def _died(self, worker: int) -> None:
        """A worker has ended: load what it had in work again, or answer it with `WorkerDied`."""
        process = self.crew.remove(worker)
        self._fatal = self._fatal or process.failed
        if self._fatal is not None:
            return
        claimed = self._board.claimed(worker)
        lost = self._lost(worker, claimed)
        culprit = next((flight for flight in lost if flight.request.number == claimed), None)
        self._channel.under_way -= len(lost)
        for flight in lost:
            if flight.abandoned:
                self.arena.give_back(self._in_flight.pop(flight.request.number).slot.number)
        wanted = [flight for flight in lost if not flight.abandoned]
        if culprit is not None:
            culprit.deaths += 1
        if self._restarts > 0 and (culprit is None or culprit.deaths < 2):
            self._restarts -= 1
            with standard_streams():
                self._channel.renew(worker)
                self._start(worker)
            scripts = self.crew.payload >= 0
            tickets = [(f.request.owner or 0, write_request(f.request, f.slot, scripts)) for f in wanted]
            self._channel.send(tickets, first=True)
            return
        blamed = culprit or (lost[0] if lost else None)
        request, deaths = (blamed.request, blamed.deaths) if blamed is not None else (None, 0)
        kills = diagnose.oom_kills() - self.crew.kills_before
        error = death_report(worker, process, self._board, request, deaths, kills)
        for flight in wanted:
            del self._in_flight[flight.request.number]
            self._ready.append(Reply(flight.request.number, worker, error=error, end=True))
        if not wanted or not self.crew.processes or self._owned:
            self._fatal = error

    def _lost(self, worker: int, claimed: int | None) -> list[InFlight]:
        """The requests that died with a worker, in their order."""
        in_flight, claimed_by = self._in_flight, self._board.claimed
        if self._owned:
            unsent = self._channel.take_back()
            return [f for n, f in sorted(in_flight.items()) if f.request.owner == worker and n not in unsent]
        if claimed in in_flight:
            flight = in_flight[claimed]
            if any(claimed_by(other) == claimed for other in self.crew.processes):
                # The other one was frozen when this was taken for lost: it may still write into the old slot.
                flight.slot = self.arena.acquire()
            return [flight]
        # It may have died between reading a ticket and claiming it. Take back what nobody has read, and give the living
        # time to claim what they have read; what nobody claims then was lost. It gets another slot, in case the system
        # has only frozen a worker that read it: that one may still write into the old slot, which nobody uses again.
        unsent = self._channel.take_back()
        deadline = time.monotonic() + 0.5
        while True:
            held = {claimed_by(other) for other in self.crew.processes} | unsent
            self._take_replies()
            missing = sorted(number for number in in_flight if number not in held)
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        for number in missing:
            in_flight[number].slot = self.arena.acquire()
        return [in_flight[number] for number in missing]
