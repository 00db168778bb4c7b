"""Tickets through pipes: which request lies in which slot, and which reply.

Workers pull: any free worker reads the next ticket from one pipe that all share, so the pool binds nothing to a worker
before the worker is free. Requests that one worker must answer (streams) go through a pipe of its own. All replies come
back through one pipe.

A ticket is smaller than `PIPE_BUF`, so the kernel writes and reads it whole: a worker killed in the middle of anything
leaves no half ticket. At most `room` tickets are under way, fewer than a pipe holds, so neither side ever blocks while
it writes; further tickets wait in this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from agnoload.messages import Failure, Request, StreamReport
from agnoload.monitoring.logs import LogRecord, WarningRecord
from agnoload.system import free_in_forks
from agnoload.transport import pickling
from agnoload.transport.arena import Slot
from agnoload.transport.wire import EncodedSpan

MAX_TICKETS = 512
"""Tickets under way at most; fewer where the system makes pipes small."""

PICKLED, PACKED = 0, 1
"""Forms of a request in its slot."""

EXTRAS, ERROR, END, STARTUP = 1, 2, 4, 8
"""Kinds of a reply, as bits. EXTRAS: the value is (batch, extras). ERROR: it is (error, extras). END: no reply can
follow. STARTUP: it answers no request; the worker could not start."""


class ReplyExtras(NamedTuple):
    """What a reply brings along besides its batch, where it does; the first fields are those of `Reply`."""

    failed: Sequence[Failure] = ()
    notices: Sequence[str] = ()
    log_records: Sequence[LogRecord | WarningRecord] = ()
    stream: StreamReport | None = None
    imported: Sequence[str] = ()
    """Modules that the worker has imported since its last reply."""


NO_EXTRAS = ReplyExtras()

_REQUEST = struct.Struct("<4q")
_REPLY = struct.Struct("<9q4d")
_READ = 64  # tickets read at once


class RequestTicket(NamedTuple):
    """Says that a request lies in a slot."""

    number: int
    slot: int
    nbytes: int
    form: int

    def packed(self) -> bytes:
        return _REQUEST.pack(*self)


STOP = RequestTicket(-1, 0, 0, 0)
"""Ends the worker that reads it."""


class ReplyTicket(NamedTuple):
    """Says that the reply to a request lies in a slot; times as in `Reply`."""

    number: int
    slot: int
    worker: int
    kind: int
    offset: int
    nbytes: int
    arrays: int
    end: int
    samples: int
    started: float
    fetched: float
    collated: float
    finished: float

    @property
    def place(self) -> EncodedSpan:
        return EncodedSpan(*self[4:8])

    def packed(self) -> bytes:
        return _REPLY.pack(*self)


_INVALID = ReplyTicket(-1, -1, -1, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)


def write_request(request: Request, slot: Slot, scripts: bool) -> RequestTicket:
    """Put a request into its slot; gives the ticket. `scripts`: workers lack the classes of the user's script."""
    data, form = request.packed(), PACKED
    if data is None:
        form = PICKLED
        try:
            data = pickle.dumps(request, 5)
            by_value = scripts and b"_main__" in data
        except (pickle.PicklingError, AttributeError, TypeError):
            by_value = True
        if by_value or data is None:
            data = pickling.dumps(request)
    slot.reset()
    slot.put(data)
    return RequestTicket(request.number, slot.number, len(data), form)


def read_request(ticket: RequestTicket, slot: Slot) -> Request:
    """The request that lies in a slot; the slot is empty afterwards."""
    slot.reach(ticket.nbytes)
    data = slot.view[: ticket.nbytes]
    request: Request = Request.unpacked(data) if ticket.form == PACKED else pickle.loads(data)
    slot.reset()
    return request


def next_ticket(pipe: int) -> RequestTicket:
    """In a worker: the next ticket; `STOP` when nobody can write one any more."""
    data = os.read(pipe, _REQUEST.size)
    return RequestTicket._make(_REQUEST.unpack(data)) if data else STOP


_closing = free_in_forks(threading.RLock())
"""Whoever closes pipes waits for whoever wakes their reader, who would write into a number that is another file's."""


class Channel:
    """The parent's side of the pipes. `owned`: each worker has a pipe of its own, else all share one."""

    def __init__(self, workers: int, owned: bool) -> None:
        self.replies = self.replies_end = -1
        self.room = 0
        self.pipes: list[tuple[int, int]] = []
        """Of each worker: where it reads its tickets, and where they are written."""
        self.under_way = 0
        """Tickets that were written, less those that a reply came for or that died with their worker."""
        self.waiting: deque[tuple[int, RequestTicket]] = deque()
        """Tickets, each with its worker, for which there is no room yet."""
        self._workers = workers
        self._owned = owned

    def open(self) -> None:
        """Make the pipes; `close` also after this has failed."""
        self.replies, self.replies_end = os.pipe()
        os.set_blocking(self.replies, False)
        for _ in range(self._workers if self._owned else 1):
            self.pipes.append(os.pipe())
        # The kernel never splits a ticket over two of a pipe's pages.
        room = min(
            fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // mmap.PAGESIZE * (mmap.PAGESIZE // ticket.size)
            for pipe, ticket in ((self.replies, _REPLY), (self.pipes[0][0], _REQUEST))
        )
        # Besides these there must be room for one to stop each worker, and for one to wake us.
        self.room = max(min(MAX_TICKETS, room - self._workers - 1), 1)
        if not self._owned:
            self.pipes *= self._workers

    def send(self, tickets: list[tuple[int, RequestTicket]], first: bool = False) -> None:
        """Behind all others, or before all that no worker has read yet; each with the worker whose pipe it goes to."""
        if first:
            self.take_back()
            self.waiting.extendleft(reversed(tickets))
        else:
            self.waiting.extend(tickets)
        self.flush()

    def flush(self) -> None:
        """Write the tickets that there is room for."""
        while self.waiting and self.under_way < self.room:
            worker, ticket = self.waiting.popleft()
            self.under_way += 1  # first: an interrupt between the two must not let more in than the pipe holds
            os.write(self.pipes[worker][1], ticket.packed())

    def take_back(self) -> set[int]:
        """Tickets that no worker has read yet wait in this process again; gives the numbers of all that wait.

        Those in a worker's own pipe stay there.
        """
        if not self._owned and self.pipes:
            # Open file descriptions share O_NONBLOCK, and workers must block in this pipe: open it for ourselves.
            fd = os.open(f"/proc/self/fd/{self.pipes[0][0]}", os.O_RDONLY | os.O_NONBLOCK)
            unread: list[tuple[int, RequestTicket]] = []
            try:
                while data := os.read(fd, _REQUEST.size * _READ):
                    unread += [(0, RequestTicket._make(fields)) for fields in _REQUEST.iter_unpack(data)]
            except BlockingIOError:
                pass
            finally:
                os.close(fd)
            self.under_way -= len(unread)
            self.waiting.extendleft(reversed(unread))
        return {ticket.number for _, ticket in self.waiting}

    def renew(self, worker: int) -> None:
        """Forget what lies unread in a dead worker's own pipe."""
        if self._owned:
            for fd in self.pipes[worker]:
                os.close(fd)
            self.pipes[worker] = os.pipe()

    def receive(self) -> list[ReplyTicket]:
        """Replies that are there, without waiting."""
        tickets: list[ReplyTicket] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self.replies, _REPLY.size * _READ)
                if len(data) % _REPLY.size:  # not written by `Worker`, which writes whole tickets
                    return [*tickets, _INVALID]
                tickets += map(ReplyTicket._make, _REPLY.iter_unpack(data))
                if len(data) < _REPLY.size * _READ:
                    break
        return tickets

    def wake(self) -> None:
        """Let whoever polls `replies` see something."""
        with _closing:
            if self.replies_end >= 0:
                os.write(self.replies_end, _INVALID.packed())

    def stop(self, worker: int) -> None:
        """Let a worker end once it is idle."""
        with contextlib.suppress(OSError):
            os.write(self.pipes[worker][1], STOP.packed())

    def close(self) -> None:
        with _closing:
            for fd in {self.replies, self.replies_end, *(fd for pipe in self.pipes for fd in pipe)} - {-1}:
                os.close(fd)
            self.pipes.clear()
            self.waiting.clear()
            self.replies = self.replies_end = -1
