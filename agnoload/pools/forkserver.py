"""The process that forks workers: it has NumPy and this library loaded, one thread, and nothing of the user's."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys

from agnoload.pools.start import Start
from agnoload.pools.worker import main

_LONG = struct.Struct("<q")
_FDS = 64


def serve(fd: int) -> None:
    """Fork a worker for each message, report its pid and later its status, end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    os.set_blocking(wake_r, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # the collector of a worker must not touch, and so copy, the pages that all of them share
    children: dict[int, int] = {}
    with socket.socket(fileno=fd) as connection:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(wake_r, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    _reap(children)
                    continue
                message, fds, _, _ = socket.recv_fds(connection, 1024, _FDS)
                if not message:
                    return
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (wake_r, wake_w, *children.values()):
                        os.close(other)
                    connection.close()
                    _run(message, fds)
                children[pid] = fds[0]
                for other in fds[1:]:
                    os.close(other)
                os.write(fds[0], _LONG.pack(pid))


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report = children.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for this one any more
            os.write(report, _LONG.pack(status))
        os.close(report)


def _run(message: bytes, fds: list[int]) -> None:
    """In the forked process: take the parent's output, work, and end without the server's clean-up."""
    code = 1
    try:
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
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
