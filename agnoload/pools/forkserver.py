"""The process that forks workers: it has NumPy and this library loaded, one thread, and nothing of the user's.

It ends with its parent, and the kernel ends the workers with it, whatever they are doing: so nothing that the parent
started outlives it, however it went. Nothing else ends it: a signal to the whole process group is the parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys

from agnoload.messages import Start
from agnoload.pools.start import REPORT
from agnoload.pools.worker import GROUP_SIGNALS, answer, die_with, main

_FDS = 253  # the most that a message can bring


def serve(fd: int, parent: int) -> None:
    """Fork a worker for each message, report its pid and later its status, end when the parent does."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer(dict.fromkeys(GROUP_SIGNALS, False))
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    os.set_blocking(wake_r, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the thread that has started this process had blocked
    watched = [wake_r]
    # A process that the parent has forked holds the socket, too: its end alone would not tell of the parent's.
    with contextlib.suppress(AttributeError):
        try:
            watched.append(os.pidfd_open(parent))
        except ProcessLookupError:
            os._exit(0)
    gc.collect()
    gc.freeze()  # the collector of a worker must not touch, and so copy, the pages that all of them share
    children: dict[int, int] = {}
    with socket.socket(fileno=fd) as connection:
        poll = select.poll()
        for each in (fd, *watched):
            poll.register(each, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    _reap(children)
                elif ready != fd or not _fork(connection, children, [*watched, wake_w]):
                    os._exit(0)


def _fork(connection: socket.socket, children: dict[int, int], mine: list[int]) -> bool:
    """Answer one message; False if there will be none any more."""
    message, fds, flags, _ = socket.recv_fds(connection, 1024, _FDS)
    if not message:
        return False
    if flags & socket.MSG_CTRUNC:  # too many open files: the parent sees its pipe end
        for each in fds:
            os.close(each)
        return True
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (*mine, *children.values()):
            os.close(each)
        connection.close()
        _run(message, fds, server)
    if not _report(fds[0], pid, 0) and pid > 0:
        os.kill(pid, signal.SIGKILL)  # its pool was closed meanwhile
    for each in fds[1:]:
        os.close(each)
    if pid > 0:
        children[pid] = fds[0]
    else:
        os.close(fds[0])
    return True


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        report = children.pop(pid)
        _report(report, status, usage.ru_maxrss)
        os.close(report)


def _report(pipe: int, what: int, more: int) -> bool:
    """False if nobody waits for this one any more."""
    try:
        os.write(pipe, REPORT.pack(what, more))
    except BrokenPipeError:
        return False
    return True


def _run(message: bytes, fds: list[int], server: int) -> None:
    """In the forked process: take the parent's output, work, and end without the server's clean-up."""
    code = 1
    try:
        die_with(server)
        status, out, err, *rest = fds
        os.close(status)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        main(Start(*struct.unpack("<3q", message), *rest[:4]), rest[4:])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # a temporary folder of the dataset's, a loader within it
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
