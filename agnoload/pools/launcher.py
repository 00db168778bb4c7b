"""How a worker process starts, by each start method, and how this process learns of its end.

forkserver (the default): a small process of our own with NumPy loaded, which knows nothing of the user's program, forks
    the workers, or forks a template that imports the dataset's modules and then forks them (see `server`). It is
    reached by a socket pair, so it has no name that could be left behind or that others could connect to.
spawn: a new Python process that calls one function, `server.work`.
fork: a copy of this process, by `multiprocess`.

A worker gets descriptors and nothing else; what it has to do lies in the payload. No start method looks at `__main__`,
so no worker runs the user's script again.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from agnoload.errors import AgnoloadError, warn
from agnoload.messages import Start
from agnoload.pools.environment import GROUP_SIGNALS, THREADS, directory, search_path
from agnoload.pools.worker import die_with, main
from agnoload.transport.memory import anonymous_file

REPORT = struct.Struct("<2q")
"""What a server reports of a process that it has forked: its pid (minus an errno if the fork failed) and 0; later its
exit status and the most memory that it had resident, in KiB."""

TEMPLATE = -1
"""In place of a worker's number: the server forks a template."""

SERVER = b"agnoload-server"
"""The name of a template, as `ps` shows it."""

READY = b"+"
"""The last message of a template that has imported everything; before it come the names that it was about to import."""

PATIENCE = (60, 240)
"""Seconds of importing after which there is a warning; seconds after that until the import is left to the workers."""

UNKNOWN = 256
"""In place of an exit code that somebody else has collected: no process can have it."""

HELD = (signal.SIGINT, *GROUP_SIGNALS)
"""Blocked while a process starts, and for good in those that fork workers: the parent answers them."""


class Process:
    """A worker process as its parent sees it."""

    sentinel: int
    """Readable once the process has ended, or its pid is known."""

    failed: Exception | None = None
    """Why it has ended before it started."""

    rss: int | None = None
    """Once it has ended: the most memory that it had resident, in bytes, where the system counts that by itself."""

    _pid = 0
    _exitcode: int | None = None

    @property
    def pid(self) -> int:
        """Waits until it is known; 0 if there was none."""
        while self.exitcode() is None and not self.started:
            _readable(self.sentinel, None)
        return self._pid

    @property
    def started(self) -> bool:
        """Whether its pid is known; a signal before that is lost."""
        return self._pid > 0

    def exitcode(self) -> int | None:
        """None while it runs; then its exit status, or minus the signal that ended it."""
        raise NotImplementedError

    def kill(self, number: int) -> None:
        if self.exitcode() is None and self.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def close(self) -> None:
        """Release the descriptors of a process that has ended."""
        raise NotImplementedError


@contextlib.contextmanager
def interrupts_held() -> Iterator[set[Any]]:
    """Around a start: the signals that end programs wait until the pool knows the process. Gives what was blocked.

    A new process inherits the mask, and unblocks them when it is ready. If another thread takes the signal meanwhile,
    its handler runs here all the same, and may raise: then a process that the pool does not know yet is ended by the
    finalizer of its handle, or ends by itself at the end of its pool's pipes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Where a program has closed its standard streams, occupy their numbers for a while.

    Otherwise our own pipes and memory would get them, and a library that complains would write there.
    """
    taken = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)  # new processes have streams, then
            taken.append(fd)
        os.close(fd)
        yield
    finally:
        for fd in taken:
            os.close(fd)


def _python(function: str, arguments: tuple[Any, ...], fds: Iterable[int]) -> subprocess.Popen[bytes]:
    """A new Python process that calls one function of our `server`, with some descriptors of this one."""
    code = (  # the search path comes through a file: it may be long, and all users of a machine see command lines
        "import marshal, sys; sys.path[:] = marshal.load(sys.stdin.buffer); "
        f"from agnoload.pools.server import {function}; {function}{arguments}"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    with open(anonymous_file("agnoload-path", 0), "w+b") as path:
        marshal.dump(search_path(), path)
        path.seek(0)
        return subprocess.Popen(
            [sys.executable, *flags, "-c", code],
            stdin=path,
            pass_fds=tuple(fds),
            cwd=directory(),  # Python 3.13 cannot load NumPy where the directory has been removed
            env={**os.environ, **THREADS},
        )


def _readable(fd: int, milliseconds: int | None = 0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


# ---------------------------------------------------------------------------------------------- spawn, fork


def start_process(
    method: str, start: Start, extra: list[int], inherited: Any, server: ForkServer | None, blocked: set[Any]
) -> Process:
    """Start one worker, under `interrupts_held`; `extra` are more descriptors for it.

    Under forkserver `server` forks it. Under fork it runs `inherited`, since nothing needs to be packed there, and has
    the same signals `blocked` as this thread had.
    """
    if server is not None:
        return server.start(start, extra)
    lasts = threading.get_native_id() == start.parent  # the first thread of a process ends with it
    if method == "spawn":
        return _Child(_python("work", (tuple(start), extra, lasts), [*start[3:], *extra]), counted=False)
    try:
        import multiprocess.process
    except FileNotFoundError as error:  # at its import it looks for a place for temporary files
        raise AgnoloadError(
            "multiprocessing_context='fork' needs a directory for temporary files: set TMPDIR to one that can be "
            f"written to, or use the default (forkserver). {error}"
        ) from error
    process = multiprocess.get_context("fork").Process(
        target=_run_fork, args=(start, extra, lasts, inherited, blocked), name="agnoload-worker"
    )
    process.start()
    # multiprocess would wait for it at exit before we get to end it; we own its end.
    multiprocess.process._children.discard(process)
    return _Child(process._popen, counted=True)


def _run_fork(start: Start, extra: list[int], lasts: bool, inherited: Any, blocked: set[Any]) -> None:
    die_with(start.parent, lasts)
    os.environ.update(THREADS)
    # A fork holds the pool's ends of the pipe, too; without them it sees the end of its pool.
    pipe = os.readlink(f"/proc/self/fd/{start.requests}")
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if fd != start.requests and os.readlink(f"/proc/self/fd/{fd}") == pipe:
                os.close(fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*blocked, signal.SIGINT})  # that one `main` unblocks
    main(start, extra, inherited)


class _Child(Process):
    """A worker that is a child of this process; `handle` is its object in `subprocess` or `multiprocess`.

    `counted`: whether the memory that the system counts for it is its own. A process that is spawned has its parent's
    counted until it loads its own program.
    """

    def __init__(self, handle: Any, counted: bool) -> None:
        self._pid = handle.pid
        self._handle = handle
        self._counted = counted
        self.sentinel = os.pidfd_open(self._pid)  # no pipe: what the worker forks would hold that open after its death
        handle.returncode = UNKNOWN  # its library need not look after it: we collect it
        self._lost = weakref.finalize(self, _end_lost, os.getpid(), self._pid, self.sentinel)
        self._lost.atexit = False  # then its pool ends it

    def exitcode(self) -> int | None:
        if self._exitcode is None and _readable(self.sentinel):
            try:
                _, status, usage = os.wait4(self._pid, 0)
            except ChildProcessError:  # somebody else has collected it, or the system does at once
                self._exitcode = UNKNOWN
            else:
                self._exitcode = os.waitstatus_to_exitcode(status)
                self.rss = usage.ru_maxrss * 1024 if self._counted else None
        return self._exitcode

    def close(self) -> None:
        if self._lost.detach() is not None:
            os.close(self.sentinel)
            getattr(self._handle, "close", lambda: None)()  # the pipes of multiprocess


def _end_lost(owner: int, pid: int, sentinel: int) -> None:
    """A handler has raised before the pool knew this process."""
    os.close(sentinel)
    if os.getpid() == owner:  # not in a fork of it: the child is not the fork's
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# ---------------------------------------------------------------------------------------------- the fork server


class _Served(Process):
    """A process that a server forks: a pipe brings its pid, and at its end its status and memory.

    A start does not wait for the server, which may be stopped.
    """

    def __init__(self, status: int) -> None:
        self.sentinel = status
        self._close = weakref.finalize(self, os.close, status)
        self._close.atexit = False

    def exitcode(self) -> int | None:
        while self._exitcode is None and _readable(self.sentinel):
            data = os.read(self.sentinel, REPORT.size)
            what, more = REPORT.unpack(data) if data else (0, 0)
            if not self._pid and what > 0:
                self._pid = what
            elif not self._pid:
                self.failed = RuntimeError("agnoload's fork server ended before it had started a worker")
                if what:
                    self.failed = OSError(-what, f"no worker could be started: {os.strerror(-what)}")
                self._exitcode = UNKNOWN
            elif data:
                self._exitcode = os.waitstatus_to_exitcode(what)
                self.rss = more * 1024
            else:  # the server is gone, and the kernel kills its workers
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(self._pid)
                    _readable(fd, 1000)
                    os.close(fd)
                self._exitcode = -signal.SIGKILL
        return self._exitcode

    def close(self) -> None:
        self._close()


class ForkServer:
    """The parent's handle on a process that forks workers: the base, or a template that is forked from another one.

    A template imports some modules first; `settings` are what that takes.
    """

    def __init__(self, forked_from: ForkServer | None = None, settings: Any = None) -> None:
        self._lock = threading.Lock()
        self.forked_from = forked_from  # which must end no sooner
        self.base: ForkServer = self if forked_from is None else forked_from.base
        self.used = False
        """Of the base: whether it, or a template of it, has forked a worker."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                if forked_from is None:
                    self._process: Any = _python("serve", (theirs.fileno(), os.getpid()), [theirs.fileno()])
                else:
                    with open(anonymous_file("agnoload-template", 0), "w+b") as file:
                        pickle.dump(settings, file)
                        file.seek(0)
                        self._process = forked_from._fork((TEMPLATE, 0, 0), [file.fileno(), theirs.fileno()])
        except BaseException:
            self._socket.close()
            raise
        self.stop = weakref.finalize(self, _stop_server, self._socket, self._process)
        """End the server, and with it every process that it has forked; also at this process's exit."""
        servers.add(self)

    def start(self, start: Start, extra: list[int]) -> Process:
        """Have a worker forked."""
        self.base.used = True
        return self._fork(start[:3], [*start[3:], *extra])

    def _fork(self, numbers: tuple[int, ...], fds: list[int]) -> _Served:
        status_r, status_w = os.pipe()
        served = _Served(status_r)
        try:
            message = struct.pack("<3q", *numbers)
            with self._lock, open(os.devnull, "wb") as nowhere:
                # A worker writes where the program writes now; the server began with what it had then.
                kept = [n for n in (1, 2) if numbers[0] != TEMPLATE and os.path.exists(f"/proc/self/fd/{n}")]
                out, err = (n if n in kept else nowhere.fileno() for n in (1, 2))
                socket.send_fds(self._socket, [message], [status_w, out, err, *fds])
        except BaseException:
            served.close()  # the server kills a process that nobody waits for
            raise
        finally:
            os.close(status_w)
        return served

    def verdict(self) -> str | None:
        """Of a template: None when it is ready, or the module by whose import it has ended or hangs."""
        last, (soon, late) = "", PATIENCE
        while True:
            if not _readable(self._socket.fileno(), soon * 1000):
                what = f"the import of {last}, which the dataset needs, has" if last else "the fork server has"
                warn(f"no worker has started for {soon} s: {what} not ended; timeout= does not count this")
                if not _readable(self._socket.fileno(), late * 1000):
                    return last
            message = self._socket.recv(4096)
            if message == READY:
                return None
            if not message:
                return last
            last = message.decode()

    def running(self) -> bool:
        """Whether it is there; its socket tells, also where the system collects children by itself."""
        poll = select.poll()
        if self.stop.alive:
            poll.register(self._socket, 0)
        return self.stop.alive and not poll.poll(0)

    def forget(self) -> None:
        """In a forked child: the server is the parent's."""
        self.stop.detach()
        self._socket.close()
        if self.forked_from is None:
            self._process.returncode = 0  # not our child: nothing to wait for


def _stop_server(connection: socket.socket, process: Any) -> None:
    connection.close()
    if isinstance(process, subprocess.Popen):
        process.kill()  # it has nothing to put in order, and may have been stopped
        process.wait()
    else:
        process.kill(signal.SIGKILL)
        _readable(process.sentinel, 500)  # until it has been collected
        process.close()


servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
"""All that this process has; one that is forked from it has none."""
