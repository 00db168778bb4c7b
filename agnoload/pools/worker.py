"""The life of a worker process: read a ticket, load what it names into its slot, send a ticket back."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from agnoload.errors import AgnoloadError
from agnoload.inspect import Values, differing_values
from agnoload.messages import Reply, Request, Start, describe_request
from agnoload.monitoring.logs import WorkerLogCapture
from agnoload.pools.channel import (
    END,
    ERROR,
    EXTRAS,
    NO_EXTRAS,
    STARTUP,
    ReplyExtras,
    ReplyTicket,
    next_ticket,
    read_request,
)
from agnoload.pools.environment import (
    GROUP_SIGNALS,
    ParentEnvironment,
    apply_environment,
    handled_signals,
    mute_signals,
)
from agnoload.pools.status import DUMP_SIGNAL, Stage, WorkerStatusBoard
from agnoload.protocols import WorkerFetch
from agnoload.transport.arena import Slot, Slots
from agnoload.transport.payload import Payload
from agnoload.transport.remote_errors import describe
from agnoload.transport.wire import encode

_DEATH_SIGNAL, _NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME


def main(start: Start, extra: list[int], inherited: Any = None) -> None:
    """Everything a worker process does, from its first line to its end."""
    signal.set_wakeup_fd(-1)  # a fork has the parent's, or the server's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    for stream in (sys.stdout, sys.stderr):  # line by line: whole, and also if the worker hangs or is killed later
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    logs = WorkerLogCapture(start.worker)
    board = WorkerStatusBoard(start.arena, start.workers)
    values: Values = {}
    try:
        if inherited is None:
            # A program that a sample starts must not keep our memory, or write into it or into our pipes.
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):  # the descriptor of the listing itself
                    os.set_inheritable(fd, fd <= 2)
            payload = Payload(start.payload)
            os.close(start.payload)
            parent: ParentEnvironment = payload.environment
            apply_environment(parent.imports)
            # Modules that a template imported ahead of us may have set handlers up: those stay.
            free = [number for number in GROUP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            mute_signals(parent.signals, free)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            logs.install(parent.logs)
            values = parent.values
        else:
            mute_signals(handled_signals(), (signal.SIGTERM,))  # the user's handler, inherited, must not answer ours
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, DUMP_SIGNAL})
            logs.install(None)

        def read() -> Any:
            if inherited is not None:
                return inherited
            frameworks: list[Callable[[], None]] = pickle.loads(parent.frameworks)
            for apply in frameworks:
                apply()
            value = payload.value(extra)
            for apply in frameworks:  # also to those that the dataset has imported
                apply()
            return value

        # The Python stack of a crash, or of a hang when the parent asks by signal, goes to this worker's place on the
        # board: by a descriptor with a file position of its own, which no other worker moves.
        stack = os.open(f"/proc/self/fd/{start.arena}", os.O_RDWR | os.O_CLOEXEC)
        os.lseek(stack, board.stack_offset(start.worker), os.SEEK_SET)
        faulthandler.enable(stack, all_threads=False)
        faulthandler.register(DUMP_SIGNAL, stack, all_threads=False, chain=False)
        board.set_stage(start.worker, Stage.STARTING)
        Worker(start, board, logs).run(read, values)
    except BaseException:  # ours: the user's are sent as replies
        board.write_stack(start.worker, traceback.format_exc())
        raise SystemExit(1) from None


reading = False
"""Whether this process imports or unpickles what a worker needs. To start workers is an error meanwhile: each of them
would do the same."""


def check_reading() -> None:
    """`AgnoloadError` if a module of the user's starts workers while a worker imports it."""
    if not reading:
        return
    frame: Any = sys._getframe()
    while frame is not None and (frame.f_code.co_name != "<module>"):
        frame = frame.f_back
    name = frame.f_globals.get("__name__") if frame is not None else "the dataset"
    raise AgnoloadError(
        f"{name} iterates a loader with worker processes while a worker imports or unpickles it, and so each worker "
        'would start others without end. Do that in a function, or under `if __name__ == "__main__":`'
    )


def die_with(parent: int, lasts: bool = True, name: bytes = b"agnoload-worker") -> None:
    """End this process when its parent has gone, also in the middle of a sample; `name` is for the eyes of the user.

    `lasts`: the thread that has started it ends no sooner than the parent. Then the kernel kills this process when that
    thread ends. Else a thread of its own watches the parent; C code that holds the interpreter lock holds it up.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_NAME, name)
    if lasts:
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)
        return
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="agnoload-parent-watch", daemon=True).start()


def end_copy(owner: int, error: BaseException | None = None) -> None:
    """End this process, as a program ends, if user code has forked it and let it out of a sample: it is no worker.

    Otherwise it would read tickets, and the pool would take its replies for the worker's.
    """
    if os.getpid() == owner:
        return
    code = error.code if isinstance(error, SystemExit) else error
    with contextlib.suppress(Exception):
        if code is not None and not isinstance(code, int):
            traceback.print_exception(error)
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class Worker:
    """One worker over its descriptors; a test can drive it with plain pipes, in a thread."""

    def __init__(self, start: Start, board: WorkerStatusBoard, logs: WorkerLogCapture) -> None:
        self._number = start.worker
        self._pid = os.getpid()
        self._requests = start.requests
        self._replies = start.replies
        self._slots = Slots(start.arena)
        self._board = board
        self._logs = logs
        self._notices: list[str] = []
        self._loaded = dict.fromkeys(sys.modules)

    def run(self, read: Callable[[], WorkerFetch], values: Values | None = None) -> None:
        """Read the payload, then answer tickets until one says stop or the pipe ends.

        The first reply brings a notice if the user's modules do not have the `values` that they have in the parent.
        """
        global reading
        board, worker, slots = self._board, self._number, self._slots
        try:
            reading = True
            fetch = read()
            reading = False
            fetch.begin(worker)
            self._notices = differing_values(values or {})
        except BaseException as error:  # also SystemExit: the parent must hear of it, whatever it is
            self._send(Reply(-1, worker, error=error), slots[1 + worker], None)
            return
        board.set_stage(worker, Stage.IDLE)
        while True:
            end_copy(self._pid)
            ticket = next_ticket(self._requests)
            if ticket.number < 0:
                fetch.close()
                return
            board.claim(worker, ticket.number)
            slot = slots[ticket.slot]
            request = read_request(ticket, slot)
            try:
                reply = fetch(request, slot.empty)
            except BaseException as error:
                reply = Reply(ticket.number, error=error)
            self._send(reply, slot, request)
            del reply
            # Only now: whoever ends the pool spares an idle worker the signal that breaks off what it does.
            board.set_stage(worker, Stage.IDLE)

    def _send(self, reply: Reply, slot: Slot, request: Request | None) -> None:
        """Encode a reply into its slot and send the ticket; what cannot be encoded becomes an error."""
        end_copy(self._pid, reply.error)
        kind = STARTUP if request is None else 0
        value: Any = reply.batch
        notices, imported = reply.notices, []
        if self._notices and request is not None:
            notices, self._notices = [*self._notices, *notices], []
        if len(sys.modules) != len(self._loaded):
            imported = [name for name in list(sys.modules) if name not in self._loaded]
            self._loaded = dict.fromkeys(sys.modules)
        extras = ReplyExtras(reply.failed, notices, self._logs.drain(), reply.stream, imported)
        if reply.error is not None:
            kind |= ERROR
            value = (describe(reply.error), extras)
        elif any(extras):
            kind |= EXTRAS
            value = (value, extras)
        if reply.end:
            kind |= END
        try:
            place = encode(value, slot)
        except BaseException as error:
            end_copy(self._pid, error)
            slot.reset()
            lost = reply.stream is not None  # how far a stream was read: nobody can read on
            kind = (kind & STARTUP) | ERROR | END * lost
            what = describe_request(request) if request is not None else "an error"
            where = f"while {what} was encoded in worker {self._number} (pid {os.getpid()})"
            place = encode((describe(error, where), NO_EXTRAS), slot)
        ticket = ReplyTicket(
            reply.number, slot.number, self._number, kind, *place, reply.samples, reply.started, reply.fetched,
            reply.collated, time.monotonic(),
        )  # fmt: skip
        end_copy(self._pid)
        os.write(self._replies, ticket.packed())
