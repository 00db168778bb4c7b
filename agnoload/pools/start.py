"""How a worker process begins, by each start method, and how this process learns of its end.

forkserver (the default): a small process of our own with NumPy loaded, that knows nothing of the user's program, forks
    the workers. It hangs on a socket pair, so it has no name that could be left behind or be connected to by others,
    and it needs no look at the user's `__main__`.
spawn, fork: through `multiprocess`, or through the context that the user gave. While the process starts, `__main__`
    hides its file, so that the user's script is not run again.

A worker is given descriptors and nothing else; what it shall do lies in the payload.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from agnoload.errors import OptionError

THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""What workers have in their environment before NumPy loads: the workers themselves are the parallelism."""

_LONG = struct.Struct("<q")


class Start(NamedTuple):
    """What a worker is told at its start; the fields from `payload` on are descriptors."""

    worker: int
    workers: int
    parent: int
    payload: int
    arena: int
    requests: int
    replies: int


class Process(Protocol):
    """A worker process as its parent sees it."""

    pid: int
    sentinel: int
    """Readable once the process has ended."""

    def exitcode(self) -> int | None:
        """None while it runs; then its exit status, or minus the signal that ended it."""

    def kill(self, number: int) -> None: ...

    def close(self) -> None:
        """Let go of a process that has ended."""


def start_process(context: Any, start: Start, extra: list[int], inherited: Any) -> Process:
    """Start one worker by a method's name or a `multiprocessing`/`multiprocess` context.

    `extra` are more descriptors for it; `inherited` is what it runs under fork, where nothing needs to be packed.
    """
    if method_of(context) == "forkserver":
        return _server().start(start, extra)
    if isinstance(context, str):
        import multiprocess

        context = multiprocess.get_context(context)
    return _ContextProcess(context, start, extra, inherited)


def method_of(context: Any) -> str:
    """The name of the start method that an option of the loader asks for; `OptionError` if it is none."""
    methods = available_methods()
    if context is None:
        return methods[0]
    name = context if isinstance(context, str) else getattr(context, "get_start_method", lambda: None)()
    if name not in methods:
        raise OptionError(
            f"multiprocessing_context must be one of {', '.join(map(repr, methods))}, a context of multiprocessing or "
            f"multiprocess, or None, got {context!r}"
        )
    return str(name)


def available_methods() -> list[str]:
    """The start methods of this platform, the default first."""
    return ["forkserver", "spawn", "fork"] if hasattr(os, "fork") else ["spawn"]


# ---------------------------------------------------------------------------------------------- through a context


class _ContextProcess:
    def __init__(self, context: Any, start: Start, extra: list[int], inherited: Any) -> None:
        args: tuple[Any, ...] = (*start[:3], [*start[3:], *extra], inherited)
        if context.get_start_method() != "fork":
            args = (*start[:3], [_Sent(fd, context.reducer) for fd in (*start[3:], *extra)], None)
        self._process = context.Process(target=_in_context, args=args, name="agnoload-worker")
        with _hidden_main(), _environment(THREADS):
            self._process.start()
        # Its library would wait for it at exit before we get to end it; we own its end.
        module = sys.modules[type(self._process).__mro__[-2].__module__]
        getattr(module, "_children", set()).discard(self._process)
        self.pid: int = self._process.pid
        self.sentinel: int = self._process.sentinel

    def exitcode(self) -> int | None:
        if _readable(self.sentinel):
            self._process.join(1)  # its end was seen before the system lets us collect it
        code: int | None = self._process.exitcode
        return code

    def kill(self, number: int) -> None:
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        self._process.join()
        self._process.close()


class _Sent:
    """A descriptor among the arguments of a process: duplicated while that process starts, not before."""

    def __init__(self, fd: int, reducer: Any) -> None:
        self._fd = fd
        self._reducer = reducer

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._reducer.DupFd(self._fd),)


def _received(sent: Any) -> int:
    fd: int = sent.detach()
    return fd


def _in_context(worker: int, workers: int, parent: int, fds: list[int], inherited: Any) -> None:
    from agnoload.pools.worker import main

    main(Start(worker, workers, parent, *fds[:4]), fds[4:], inherited)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    saved: dict[str, Any] = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    try:
        main.__dict__.pop("__file__", None)
        main.__spec__ = None
        yield
    finally:
        main.__dict__.update(saved)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------------------------------- the fork server


class _ServedProcess:
    """A worker that the fork server has forked: a pipe brings its pid, and at its end its status."""

    def __init__(self, status: int) -> None:
        self.sentinel = status
        pid = os.read(status, _LONG.size)
        if not pid:
            os.close(status)
            raise RuntimeError("agnoload's fork server ended while it started a worker")
        self.pid: int = _LONG.unpack(pid)[0]
        self._exitcode: int | None = None

    def exitcode(self) -> int | None:
        if self._exitcode is None and _readable(self.sentinel):
            data = os.read(self.sentinel, _LONG.size)
            if data:
                self._exitcode = os.waitstatus_to_exitcode(_LONG.unpack(data)[0])
            else:  # the server itself is gone: nobody will tell, and a worker must not live on unseen
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self._exitcode = -signal.SIGKILL
        return self._exitcode

    def kill(self, number: int) -> None:
        if self.exitcode() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


class ForkServer:
    """The parent's handle on the process that forks workers. One a process, started on first use, see `_server`."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [entry or os.getcwd() for entry in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; from agnoload.pools.forkserver import serve; serve({theirs.fileno()})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **THREADS},
            )
        # At exit the newest finalizers run first: the pools that it serves have ended by then.
        self.stop = weakref.finalize(self, _stop, self._socket, self._process, self.owner)

    def start(self, start: Start, extra: list[int]) -> Process:
        """Have a worker forked."""
        status_r, status_w = os.pipe()
        try:
            message = struct.pack("<3q", *start[:3])
            with self._lock:
                socket.send_fds(self._socket, [message], [status_w, 1, 2, *start[3:], *extra])
        except OSError:
            os.close(status_r)
            raise
        finally:
            os.close(status_w)
        return _ServedProcess(status_r)

    def running(self) -> bool:
        return self._process.poll() is None


def _stop(connection: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """End the server; workers that it has forked are not its to end."""
    connection.close()
    if os.getpid() == owner:
        process.wait()
    else:
        process.returncode = 0  # not our child: nothing to wait for


_current: ForkServer | None = None
_users: weakref.WeakSet[Any] = weakref.WeakSet()
_guard = threading.RLock()


def _server() -> ForkServer:
    global _current
    with _guard:
        if _current is not None and (_current.owner != os.getpid() or not _current.running()):
            _current.stop()
            _current = None
        if _current is None:
            _current = ForkServer()
        return _current


def use_server(user: Any) -> None:
    """`user` (a loader) wants the fork server to stay for as long as it lives or until it releases it."""
    with _guard:
        _users.add(user)


def release_server(user: Any) -> None:
    """The last user that releases the fork server ends it, so that closing a loader leaves no process at all."""
    global _current
    with _guard:
        _users.discard(user)
        if not _users and _current is not None and _current.owner == os.getpid():
            _current.stop()
            _current = None
