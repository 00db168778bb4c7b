"""The processes that fork workers: a base, with NumPy and this library loaded, and its templates.

A template is forked from the base or from another template, imports the modules that a dataset needs, and forks workers
that have them loaded. It runs nothing else of the user's. A process that is forked must have one thread, and may share
no open file: a template that gets more by an import names the module to its parent and ends, and is made again without.

The base ends with its parent, and the kernel ends with it what it has forked, whatever that is doing: so nothing that
the parent started outlives it, however it went. Nothing else ends it: a signal to the process group is the parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import os
import pickle
import pkgutil
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NoReturn

from agnoload.messages import Start
from agnoload.pools import worker
from agnoload.pools.environment import apply_environment
from agnoload.pools.launcher import HELD, READY, REPORT, SERVER, TEMPLATE

_FDS = 253  # the most that a message can bring
RARELY = (1_000_000, 10, 10)
"""A large package makes so many objects that the collector would take a tenth of the time of its import."""


def serve(fd: int, parent: int) -> None:
    """The base: it ends when the parent does."""
    _read_nothing()
    signal.pthread_sigmask(signal.SIG_SETMASK, HELD)  # and not what the thread had blocked that started this process
    try:  # a process that the parent has forked holds the socket, too: its end alone would not tell of the parent's
        watched = [os.pidfd_open(parent)]
    except ProcessLookupError:
        os._exit(0)
    _serve(fd, watched)


def _serve(fd: int, watched: list[int]) -> NoReturn:
    """Fork a process for each message, report its pid and later its status; end when one of `watched` is readable."""
    # A handler of its own and a pipe wake the poll when a child ends; the handler itself has nothing to do.
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
        for each in (fd, wake_r, *watched):
            poll.register(each, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    while children:
                        pid, status, usage = os.wait4(-1, os.WNOHANG)
                        if pid == 0:
                            break
                        if (report := children.pop(pid, -1)) >= 0:  # not a program that a module's import has started
                            _report(report, status, usage.ru_maxrss)
                            os.close(report)
                elif ready != fd or not _fork(connection, children, [*watched, wake_r, wake_w]):
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
        with _ending():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            os.dup2(fds[1], 1)
            os.dup2(fds[2], 2)
            for each in (*mine, *children.values(), *fds[:3]):
                os.close(each)
            numbers = struct.unpack("<3q", message)
            if numbers[0] == TEMPLATE:
                _become_template(server, *fds[3:])
            worker.die_with(server)
            worker.main(Start(*numbers, *fds[3:7]), fds[7:])
    if not _report(fds[0], pid, 0) and pid > 0:
        os.kill(pid, signal.SIGKILL)  # its pool was closed meanwhile
    for each in fds[1:]:
        os.close(each)
    if pid > 0:
        children[pid] = fds[0]
    else:
        os.close(fds[0])
    return True


def _report(pipe: int, what: int, more: int) -> bool:
    """False if nobody waits for this one any more."""
    try:
        os.write(pipe, REPORT.pack(what, more))
    except BrokenPipeError:
        return False
    return True


def _become_template(server: int, file: int, link: int) -> NoReturn:
    """In the forked process: import what the parent names, and serve it.

    What the imports print and warn of the parent has shown when it imported them itself. One that fails is left to the
    workers, which say so.
    """
    try:
        worker.die_with(server, name=SERVER)
        with open(file, "rb") as given:
            around, modules, backends = pickle.load(given)
        apply_environment(around)
        worker.reading = True  # until a worker that is forked from here has read its dataset
        before = gc.get_threshold()
        gc.set_threshold(*RARELY)
        for name in itertools.chain(modules, _modules_of(backends)):  # the second once the first are there
            if name not in sys.modules:
                os.write(link, name.encode())
                held = _shared()
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
                if any(now > then for now, then in zip(_shared(), held, strict=True)):
                    os._exit(0)
        if gc.get_threshold() == RARELY:  # and no module has set it up in its own way
            gc.set_threshold(*before)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(link, READY)
        _serve(link, [])
    finally:
        os._exit(1)


def _modules_of(backends: list[tuple[str, str]]) -> Iterator[str]:
    """The packages of the backends whose framework is there by now, whole: each worker would import them."""
    for framework, package in backends:
        if framework in sys.modules:
            yield package
            for inner in pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", ())):
                yield f"{package}.{inner.name}"


def _shared() -> tuple[int, int]:
    """What a forked process would lack, and what it would share: the threads, and the open files."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def work(start: tuple[int, ...], extra: list[int], lasts: bool) -> None:
    """The whole life of a worker that is a new Python process."""
    with _ending():
        worker.die_with(start[2], lasts)
        _read_nothing()
        worker.main(Start(*start), extra)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """After the block this process ends, without what the server would do at its end."""
    code = 1
    try:
        yield
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


def _read_nothing() -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
