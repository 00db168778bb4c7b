"""The life of a worker process: read a ticket, load what it names into its slot, send a ticket back."""

from __future__ import annotations

import contextlib
import ctypes
import decimal
import faulthandler
import locale
import math
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from agnoload.errors import AgnoloadError
from agnoload.inspect import differing_values
from agnoload.messages import Failure, Reply, Request, Start, StreamReport, describe_request
from agnoload.monitoring.logs import Listener
from agnoload.protocols import ClosableFetch
from agnoload.system import resident
from agnoload.transport.arena import Slot, Slots
from agnoload.transport.memory import Mapping as Memory
from agnoload.transport.payload import Payload
from agnoload.transport.remote_errors import describe
from agnoload.transport.wire import EncodedSpan, encode

REQUEST = struct.Struct("<4q")
"""number, slot, bytes of the request in the slot, its form; a number below zero ends the worker."""
PICKLED, PACKED = 0, 1
REPLY = struct.Struct("<10q4d")
"""number, slot, worker, kind, checksum, offset, nbytes, arrays, end, samples, started, fetched, collated, finished."""

_PIECE = struct.Struct("<2I")
"""Before each thing that a worker has said: its bytes, and their check sum."""

EXTRAS, ERROR, END, STARTUP = 1, 2, 4, 8
"""Kinds of a reply, as bits: the value is (batch, extras); it is (error, extras); it is the end; no request's."""

DUMP_SIGNAL = signal.SIGUSR2
GROUP_SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Those that a terminal or a scheduler sends to all processes of a program, beside SIGINT."""
_DEATH_SIGNAL, _NAME = 1, 15  # PR_SET_PDEATHSIG, PR_SET_NAME


def checksum(slot: Slot, place: EncodedSpan) -> int:
    """Of all that is unpickled of a batch: what was not written to its end, or not by a worker, is never read."""
    return zlib.crc32(slot.view[place.offset : place.end])


class WorkerFetch(ClosableFetch, Protocol):
    """What a worker runs: a fetch that is told once which worker it serves, before its first request."""

    def begin(self, worker: int) -> None: ...

    def parts(self) -> Mapping[str, Any]:
        """The user's objects in it, by the names that an error shall use."""


class Extras(NamedTuple):
    """What an answer brings along beside its batch, where it does; the first fields are those of `Reply`."""

    failed: Sequence[Failure] = ()
    notices: Sequence[str] = ()
    log_records: Sequence[Any] = ()
    stream: StreamReport | None = None
    imported: Sequence[str] = ()
    """Modules that the worker has imported since its last answer."""


class Stage(IntEnum):
    """What a worker is doing."""

    LAUNCHED = 0
    STARTING = 1
    IDLE = 2
    LOADING = 3
    SENDING = 4


class Control:
    """The arena's first slot: a line for each worker, which it writes and the parent reads, and room for its stack and
    for what it has said since its last reply.

    A line is (the number of the request taken last, plus one; its stage; its memory; the bytes of what it has said).
    Aligned words: never seen half-written.
    """

    DUMP = 1 << 16
    SAID = 1 << 16
    LOOK = 0.1
    """Seconds between two looks of a worker at its own memory."""

    def __init__(self, fd: int, workers: int) -> None:
        self._dumps = -(-workers * 64 // 4096) * 4096
        self._saids = self._dumps + workers * self.DUMP
        self._mapping = Memory(fd, 0, self._saids + workers * self.SAID)
        self._looked = -math.inf
        self.view = memoryview(self._mapping.array())
        self._words = self.view[: self._dumps].cast("q")

    def claim(self, worker: int, number: int, stage: Stage) -> None:
        self._words[worker * 8 + 1] = stage
        self._words[worker * 8] = number + 1

    def stage(self, worker: int, stage: Stage) -> None:
        self._words[worker * 8 + 1] = stage

    def claimed(self, worker: int) -> int | None:
        number = self._words[worker * 8]
        return number - 1 if number else None

    def stage_of(self, worker: int) -> Stage:
        return Stage(self._words[worker * 8 + 1])

    def clear(self, worker: int) -> None:
        """Before a worker starts under this number."""
        self._words[worker * 8 : worker * 8 + 8] = memoryview(bytes(64)).cast("q")
        start = self.dump_offset(worker)
        self.view[start : start + self.DUMP] = bytes(self.DUMP)

    def look(self, worker: int) -> None:
        """Note the memory that the worker has, now and then."""
        now = time.monotonic()
        if now - self._looked >= self.LOOK:
            self._looked = now
            self._words[worker * 8 + 2] = resident() or self._words[worker * 8 + 2]

    def memory(self, worker: int) -> int:
        """What a worker had when it looked last, in bytes; 0 if it never has."""
        return self._words[worker * 8 + 2]

    def say(self, worker: int, said: bytes) -> None:
        """Keep what the worker has said until its reply takes it along; when the room is full, it begins anew."""
        piece = _PIECE.pack(len(said), zlib.crc32(said)) + said
        if len(piece) > self.SAID:
            return
        used = self._words[worker * 8 + 3]
        if used + len(piece) > self.SAID:
            used = self._words[worker * 8 + 3] = 0
        start = self._saids + worker * self.SAID + used
        self.view[start : start + len(piece)] = piece
        self._words[worker * 8 + 3] = used + len(piece)  # last: what is counted is there

    def forget(self, worker: int) -> None:
        """A reply has taken it along."""
        self._words[worker * 8 + 3] = 0

    def said(self, worker: int) -> list[bytes]:
        """What a worker that has ended, or hangs, has said of the batch that nobody will see."""
        start = self._saids + worker * self.SAID
        used = self._words[worker * 8 + 3]
        data = bytes(self.view[start : start + used]) if 0 <= used <= self.SAID else b""
        found = []
        while len(data) >= _PIECE.size:
            size, check = _PIECE.unpack_from(data)
            piece, data = data[_PIECE.size : _PIECE.size + size], data[_PIECE.size + size :]
            if zlib.crc32(piece) == check:
                found.append(piece)
        return found

    def tell(self, worker: int, text: str) -> None:
        """A worker's last words, in the place of its stack."""
        data = text.encode(errors="replace")[: self.DUMP - 1] + b"\0"
        start = self.dump_offset(worker)
        self.view[start : start + len(data)] = data

    def dump_offset(self, worker: int) -> int:
        return self._dumps + worker * self.DUMP

    def stack(self, worker: int) -> str:
        """What the worker's fault handler has written, the last dump of it."""
        start = self.dump_offset(worker)
        text = bytes(self.view[start : start + self.DUMP]).split(b"\0", 1)[0].decode(errors="replace")
        return text.strip()


def main(start: Start, extra: list[int], inherited: Any = None) -> None:
    """Everything a worker process does, from its first line to its end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _write_lines()
    listener = Listener(start.worker)
    control = Control(start.arena, start.workers)
    listener.keep = partial(control.say, start.worker)
    try:
        compare: Callable[[], list[str]] = list
        if inherited is None:
            _keep_descriptors()
            payload = Payload(start.payload)
            os.close(start.payload)
            settle(payload.surroundings)
            # What a module has set up when it was imported ahead of us stays.
            free = [number for number in GROUP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            answer(payload.surroundings["signals"], free)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            listener.install(payload.surroundings["journal"])
            read = partial(_rebuilt, payload, extra)
            compare = partial(differing_values, payload.surroundings["values"])
        else:
            answer(answered(), (signal.SIGTERM,))  # a forked copy of the user's handler must not answer ours
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, DUMP_SIGNAL})
            listener.install(None)
            read = partial(_identity, inherited)
        _dump_to(start.arena, control.dump_offset(start.worker))
        control.stage(start.worker, Stage.STARTING)
        Worker(start, control, listener).run(read, compare)
    except BaseException:  # not the user's: those are sent as answers
        control.tell(start.worker, traceback.format_exc())
        raise SystemExit(1) from None


def _identity(value: Any) -> Any:
    return value


def _rebuilt(payload: Payload, extra: list[int]) -> Any:
    """What the payload holds; frameworks that it imports get their settings when they are there."""
    frameworks: list[Callable[[], None]] = pickle.loads(payload.surroundings["frameworks"])
    for apply in frameworks:
        apply()
    value = payload.value(extra)
    for apply in frameworks:
        apply()
    return value


reading = False


class NoPools:
    """While this process imports what a dataset needs, starting workers is an error: each of them would do the same.

    A class, since `contextlib` writes into exceptions, which those of users may refuse.
    """

    def __enter__(self) -> None:
        global reading
        reading = True

    def __exit__(self, *_: object) -> None:
        global reading
        reading = False


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


def settle(around: dict[str, Any]) -> None:
    """Make this process look like the one it works for: a fork server's own are those of the time it began."""
    sys.path[:] = around["path"]
    sys.argv[:] = around["argv"]
    os.environ.clear()
    os.environ.update(around["environ"])
    try:
        os.chdir(around["directory"])
    except OSError:  # it has been removed since
        os.chdir("/")
    np.seterr(**around["errstate"])
    decimal.setcontext(around["decimal"])
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, around["locale"])
    sys.modules["__main__"].__loader__ = None  # else its repr, as in errors of pickle, warns before Python 3.12


def answered() -> dict[int, bool]:
    """The signals to the whole program that this process answers in its own way; True for those that it ignores."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in GROUP_SIGNALS}
    return {n: h is signal.SIG_IGN for n, h in handlers.items() if h is not signal.SIG_DFL or n in blocked}


def answer(handled: Mapping[int, bool], numbers: Iterable[int]) -> None:
    """Let a signal that the parent handles do nothing here.

    By a handler, which programs that this process starts do not inherit; they do inherit what is ignored.
    """
    for number in numbers:
        ignored = handled.get(number)
        kind = signal.SIG_DFL if ignored is None else signal.SIG_IGN if ignored else lambda *_: None
        signal.signal(number, kind)
        signal.siginterrupt(number, False)


def _keep_descriptors() -> None:
    """A program that a sample starts must not keep our memory, or write into it or into our pipes."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.set_inheritable(int(name), False)


def _write_lines() -> None:
    """What is printed comes out line by line: whole, and also if the worker hangs or is killed afterwards."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def die_with(parent: int, name: bytes = b"agnoload-worker") -> None:
    """Have the kernel kill this process when the thread that has started it ends; `parent` is that thread's process.

    `name` is for the eyes of the user.
    """
    with contextlib.suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_NAME, name)
    if os.getppid() != parent:
        os._exit(1)


def end_with(parent: int) -> None:
    """A thread of its own ends this process when the parent has gone, also in the middle of a sample.

    For workers that were started by a thread that may end before its process; C code that holds the interpreter lock
    holds up the end.
    """
    try:
        fd = os.pidfd_open(parent)
    except (AttributeError, OSError):
        if not _alive(parent):
            os._exit(1)
        return

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="agnoload-parent-watch", daemon=True).start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_copy(owner: int, error: BaseException | None = None) -> None:
    """End this process, as a program ends, if user code has forked it and let it out of a sample: it is no worker."""
    if os.getpid() == owner:
        return
    code: Any = 0
    if isinstance(error, SystemExit):
        code = error.code
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    with contextlib.suppress(Exception):
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _dump_to(arena: int, offset: int) -> None:
    """Send the Python stack of a crash, or of a hang when the parent asks by signal, to this worker's place."""
    fd = os.open(f"/proc/self/fd/{arena}", os.O_RDWR | os.O_CLOEXEC)  # a file position of its own
    os.lseek(fd, offset, os.SEEK_SET)
    faulthandler.enable(fd, all_threads=False)
    faulthandler.register(DUMP_SIGNAL, fd, all_threads=False, chain=False)


class Worker:
    """One worker over its descriptors; a test can drive it with plain pipes, in a thread."""

    def __init__(self, start: Start, control: Control, listener: Listener) -> None:
        self._number = start.worker
        self._pid = os.getpid()
        self._requests = start.requests
        self._replies = start.replies
        self._slots = Slots(start.arena)
        self._control = control
        self._listener = listener
        self._notices: list[str] = []
        self._loaded = dict.fromkeys(sys.modules)

    def run(self, read: Callable[[], WorkerFetch], compare: Callable[[], list[str]] = list) -> None:
        """Read the payload, then answer tickets until one says stop or the pipe ends.

        `compare` has something to say, with the first answer, if the user's modules are not what they were read for.
        """
        control, number = self._control, self._number
        try:
            with NoPools():
                fetch = read()
            fetch.begin(number)
            self._notices = compare()
        except BaseException as error:  # also SystemExit: the parent must hear of it, whatever it is
            self._send(Reply(-1, number, error=error), self._slots[1 + number], None)
            return
        control.stage(number, Stage.IDLE)
        control.look(number)
        slots, requests = self._slots, self._requests
        while True:
            end_copy(self._pid)
            ticket = os.read(requests, REQUEST.size)
            request_number, slot_number, nbytes, form = REQUEST.unpack(ticket) if ticket else (-1, 0, 0, 0)
            if request_number < 0:
                fetch.close()
                return
            control.claim(number, request_number, Stage.LOADING)
            slot = slots[slot_number]
            slot.reach(nbytes)
            data = slot.view[:nbytes]
            request: Request = Request.unpacked(data) if form == PACKED else pickle.loads(data)
            slot.reset()
            try:
                reply = fetch(request, slot.empty)
            except BaseException as error:
                reply = Reply(request_number, error=error)
            control.stage(number, Stage.SENDING)
            self._send(reply, slot, request)
            del reply
            control.stage(number, Stage.IDLE)
            control.look(number)

    def _send(self, reply: Reply, slot: Slot, request: Request | None) -> None:
        """Encode a reply into its slot and send the ticket; what cannot be encoded becomes an error."""
        end_copy(self._pid, reply.error)
        kind = STARTUP if request is None else 0
        value: Any = reply.batch
        imported: Sequence[str] = ()
        records, notices = self._listener.take(), reply.notices
        if self._notices and request is not None:
            notices, self._notices = [*self._notices, *notices], []
        if len(sys.modules) != len(self._loaded):
            imported = [name for name in list(sys.modules) if name not in self._loaded]
            self._loaded = dict.fromkeys(sys.modules)
        extras = Extras(reply.failed, notices, records, reply.stream, imported)
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
            lost = reply.stream is not None  # where a stream stands: it cannot be read on
            kind = (kind & STARTUP) | ERROR | END * lost
            what = describe_request(request) if request is not None else "an error"
            where = f"while {what} was encoded in worker {self._number} (pid {os.getpid()})"
            place = encode((describe(error, where), Extras()), slot)
        ticket = REPLY.pack(
            reply.number, slot.number, self._number, kind, checksum(slot, place), *place, reply.samples, reply.started,
            reply.fetched, reply.collated, time.monotonic(),
        )  # fmt: skip
        end_copy(self._pid)
        os.write(self._replies, ticket)
        if records:
            self._control.forget(self._number)
