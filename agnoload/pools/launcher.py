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
import importlib
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
from typing import Any, Protocol

from agnoload.errors import AgnoloadError, warn
from agnoload.messages import Start
from agnoload.pools import worker
from agnoload.pools.worker import GROUP_SIGNALS, die_with, end_with, main
from agnoload.system import method_of, resident
from agnoload.transport.memory import anonymous_file

THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""What workers have in their environment before NumPy loads: the workers themselves are the parallelism."""

REPORT = struct.Struct("<2q")
"""What the fork server says of a worker: its pid (minus an errno: it could not be forked) and 0; later its exit status
and the most memory that it had resident, in KiB."""

TEMPLATE = -1
"""In place of a worker's number: what is to be forked is a template."""

SERVER = b"agnoload-server"
"""The name of a template, as `ps` shows it."""

READY, LEFT_OUT = b"+", b"-"
"""How the one message of a template begins: it has imported all; it cannot import the module that follows."""

PATIENCE = (60, 240)
"""Seconds of importing after which there is a warning, and, after more of them, it is left to the workers."""

UNKNOWN = 256
"""For the exit code of a process that somebody else has collected: one that no process can have."""


HELD = (signal.SIGINT, *GROUP_SIGNALS)
"""Blocked while a process starts, and for good in those that fork workers: they are the parent's to answer."""


class Process(Protocol):
    """A worker process as its parent sees it."""

    sentinel: int
    """Readable once the process has ended, or its pid is known."""

    @property
    def pid(self) -> int: ...

    @property
    def started(self) -> bool:
        """Whether its pid is known; a look at `pid` waits for it, and a signal before that is lost."""

    failed: Exception | None
    """Why it has ended before it started."""

    rss: int | None
    """Once it has ended: the most memory that it had resident, in bytes, where the system tells."""

    def exitcode(self) -> int | None:
        """None while it runs; then its exit status, or minus the signal that ended it."""

    def kill(self, number: int) -> None: ...

    def close(self) -> None:
        """Let go of a process that has ended."""


def start_process(
    context: Any, start: Start, extra: list[int], inherited: Any, server: ForkServer | None = None
) -> Process:
    """Start one worker by a method's name or a `multiprocessing`/`multiprocess` context.

    `extra` are more descriptors for it; `inherited` is what it runs under fork, where nothing needs to be packed;
    `server` is what forks it under forkserver.
    """
    if server is not None:
        return server.start(start, extra)
    if isinstance(context, str):
        try:
            import multiprocess
        except FileNotFoundError as error:  # at its import it looks for a place for temporary files
            raise AgnoloadError(
                f"multiprocessing_context={context!r} needs a directory for temporary files: set TMPDIR to one that "
                f"can be written to, or use the default (forkserver). {error}"
            ) from error
        context = multiprocess.get_context(context)
    try:
        return _ContextProcess(context, start, extra, inherited)
    except FileNotFoundError as error:
        raise AgnoloadError(
            "the start method 'spawn' needs a working directory, and this one has been removed: os.chdir() to another, "
            "or use the default (forkserver)"
        ) from error


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Around a start: signals are handled when the process is known to its pool, and can say what it does with them.

    A new process inherits what is blocked, and unblocks it when it is ready. But the system may pick another thread for
    a signal, and its handler runs in the first one all the same: so the handlers are put off, too.
    """
    came: dict[int, None] = {}
    handlers: dict[int, Any] = {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    _held[threading.get_ident()] = handlers, before
    try:
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, lambda number, _: came.setdefault(number))
        yield
    finally:
        _released()
        for late in came:
            handlers[late](late, None)


_held: dict[int, tuple[dict[int, Any], set[int]]] = {}
"""By thread: the handlers that are put off, and what was blocked before."""


def _released(*still: int) -> None:
    """What `interrupts_held` has put off is handled as before; but some signals stay blocked."""
    handlers, before = _held.pop(threading.get_ident())
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, {*before, *still})


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Where a program has closed its standard streams, take their numbers for a while.

    Else our own pipes and memory would get them, and a library that complains would write there.
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


def directory() -> str:
    """The working directory; the root where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return "/"


def search_path() -> list[str]:
    """`sys.path` for another process, wherever that one works."""
    return [str(entry) or directory() for entry in sys.path if isinstance(entry, str)]  # as the import system does


# ---------------------------------------------------------------------------------------------- through a context


class _Killable:
    """How both kinds of process are sent a signal."""

    pid: int

    started = True
    failed: Exception | None = None

    def exitcode(self) -> int | None:
        raise NotImplementedError

    def kill(self, number: int) -> None:
        if self.exitcode() is None and self.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _ContextProcess(_Killable):
    def __init__(self, context: Any, start: Start, extra: list[int], inherited: Any) -> None:
        lasting = threading.get_native_id() == start.parent  # the first thread of a process ends with it
        args: tuple[Any, ...] = (*start[:3], [*start[3:], *extra], lasting, inherited)
        if context.get_start_method() != "fork":
            args = (*start[:3], [_Sent(fd, context.reducer) for fd in (*start[3:], *extra)], lasting, None)
        self._process = context.Process(target=_in_context, args=args, name="agnoload-worker")
        # A process counts the memory of the one that it was spawned from until it loads its own program.
        self._counted = 0
        if context.get_start_method() == "spawn":
            self._counted = resident()
            # A start would begin this helper by itself, and then let through what `interrupts_held` has blocked.
            importlib.import_module(f"{self._library().__name__}.resource_tracker").ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        with _starting, _hidden_main(), _environment(THREADS), _unchosen(self._library()):
            self._process.start()
        # Its library would wait for it at exit before we get to end it; we own its end.
        getattr(sys.modules[f"{self._library().__name__}.process"], "_children", set()).discard(self._process)
        self.pid: int = self._process.pid
        self.rss: int | None = None
        self._exitcode: int | None = None
        try:  # the library's own sentinel is a pipe, which processes that the worker has forked hold open
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            self._pidfd = -1
        self.sentinel: int = self._process.sentinel if self._pidfd < 0 else self._pidfd

    def _library(self) -> Any:
        """`multiprocess` or `multiprocessing`."""
        return sys.modules[type(self._process).__mro__[-2].__module__.partition(".")[0]]

    def exitcode(self) -> int | None:
        if self._exitcode is None and _readable(self.sentinel):
            try:
                _, status, usage = os.wait4(self.pid, 0)
            except ChildProcessError:  # somebody else has collected it, or the system does at once
                self._exitcode = UNKNOWN
            else:
                self._exitcode = os.waitstatus_to_exitcode(status)
                rss = usage.ru_maxrss * 1024
                self.rss = rss if rss > self._counted * 1.01 else None
            self._process._popen.returncode = self._exitcode
        return self._exitcode

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            if self._exitcode is not None:
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


def _in_context(worker: int, workers: int, parent: int, fds: list[int], lasting: bool, inherited: Any) -> None:
    (die_with if lasting else end_with)(parent)
    if inherited is not None:
        _released(signal.SIGINT)
    main(Start(worker, workers, parent, *fds[:4]), fds[4:], inherited)


@contextlib.contextmanager
def _unchosen(library: Any) -> Iterator[None]:
    """A start by `spawn` looks up the start method of the whole program, and so settles it: the program still may."""
    open_ = library.get_start_method(allow_none=True) is None
    try:
        yield
    finally:
        if open_:
            library.set_start_method(None, force=True)


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


class _ServedProcess(_Killable):
    """A worker that the fork server forks: a pipe brings its pid, and at its end its status and memory.

    A start does not wait for the server, which may be stopped.
    """

    def __init__(self, status: int) -> None:
        self.sentinel = status
        self.rss: int | None = None
        self._pid = 0
        self._exitcode: int | None = None

    @property
    def started(self) -> bool:  # type: ignore[override]
        return self._pid > 0

    @property
    def pid(self) -> int:  # type: ignore[override]
        while self.exitcode() is None and not self._pid:
            _readable(self.sentinel, None)
        return self._pid

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
            else:  # the server is gone, and with it, by the kernel's hand, its workers
                _wait_for_end(self._pid, 1.0)
                self._exitcode = -signal.SIGKILL
        return self._exitcode

    def close(self) -> None:
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1


def _wait_for_end(pid: int, seconds: float) -> None:
    """Wait for a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(int(seconds * 1000))
    os.close(fd)


def _readable(fd: int, milliseconds: int | None = 0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


class ForkServer:
    """The parent's handle on a process that forks workers: the base, see `_server`, or a template of it."""

    def __init__(self, forked_from: ForkServer | None = None, settings: Any = None) -> None:
        self._lock = threading.Lock()
        self.used = False
        self.forked_from = forked_from  # which must end no sooner
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if forked_from is not None:
            try:
                with theirs, open(anonymous_file("agnoload-template", 0), "w+b") as file:
                    pickle.dump(settings, file)
                    file.seek(0)
                    self._process: Any = forked_from._fork((TEMPLATE, 0, 0), [file.fileno(), theirs.fileno()])
            except BaseException:
                self._socket.close()
                raise
        else:
            self._launch(theirs)
        self.stop = weakref.finalize(self, _stop_server, self._socket, self._process)
        """End the server, and with it every process that it has forked; also at this process's exit."""
        _servers.add(self)

    def _launch(self, theirs: socket.socket) -> None:
        code = (  # the search path comes through a file: it may be long, and all users of a machine see command lines
            "import marshal, sys; sys.path[:] = marshal.load(sys.stdin.buffer); "
            f"from agnoload.pools.server import serve; serve({theirs.fileno()}, {os.getpid()})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            with theirs, open(anonymous_file("agnoload-path", 0), "w+b") as path:
                marshal.dump(search_path(), path)
                path.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", code],
                    stdin=path,
                    pass_fds=[theirs.fileno()],
                    cwd=directory(),  # Python 3.13 cannot load NumPy where the directory has been removed
                    env={**os.environ, **THREADS},
                )
        except BaseException:
            self._socket.close()
            raise

    def start(self, start: Start, extra: list[int]) -> Process:
        """Have a worker forked."""
        return self._fork(start[:3], [*start[3:], *extra])

    def _fork(self, numbers: tuple[int, ...], fds: list[int]) -> _ServedProcess:
        self.used = True
        status_r, status_w = os.pipe()
        try:
            message = struct.pack("<3q", *numbers)
            with self._lock, open(os.devnull, "wb") as nowhere:
                out, err = (n if _is_open(n) else nowhere.fileno() for n in (1, 2))
                socket.send_fds(self._socket, [message], [status_w, out, err, *fds])
        except BaseException:
            os.close(status_r)
            raise
        finally:
            os.close(status_w)
        return _ServedProcess(status_r)

    def verdict(self) -> bytes:
        """Of a template: whether it is ready, or the module that it cannot import; nothing if it crashed or hangs."""
        soon, late = PATIENCE
        if not _readable(self._socket.fileno(), soon * 1000):
            warn(f"no worker has started for {soon} s: the modules that the dataset needs are still being imported")
        return self._socket.recv(4096) if _readable(self._socket.fileno(), late * 1000) else b""

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
        return
    process.kill(signal.SIGKILL)
    _readable(process.sentinel, 500)  # until it has been collected
    process.close()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


_OURS = {*sys.stdlib_module_names, "agnoload", "numpy", "cloudpickle", "__main__", "__mp_main__"}


class Preload:
    """The modules that workers of like loaders need, and the server that has them loaded.

    What workers had to import by themselves the next server imports, forked from the last one: so what has been
    imported once stays as it was, whatever becomes of the files.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self.left_out: set[str] = set()
        """Packages whose import starts a thread, leaves a file open or ends a process: each worker has its own."""
        self._wanted = dict.fromkeys(modules)
        self._tried: dict[str, None] = {}
        self._server: ForkServer | None = None

    def learn(self, modules: Iterable[str]) -> None:
        """A worker had to import these."""
        self._wanted.update(dict.fromkeys(modules))

    def server(self, around: dict[str, Any]) -> ForkServer:
        """The base if there is nothing to import; `around`: what the imports shall find."""
        base = _server()
        with _warming:
            if self._server is None or not self._server.running():
                self._server, self._wanted, self._tried = base, {**self._tried, **self._wanted}, {}
            parts = [[name for name in self._wanted if name not in self._tried and _top(name) not in _OURS]]
            self._tried.update(self._wanted)
            while parts:
                if not (wanted := [name for name in parts.pop() if _top(name) not in self.left_out]):
                    continue
                server = ForkServer(self._server, (around, wanted))
                verdict = server.verdict()
                if verdict == READY:
                    self._server = server
                elif verdict:  # what came before it is kept first, so that it is not imported for each that is left out
                    culprit = verdict[len(LEFT_OUT) :].decode()
                    self.left_out.add(_top(culprit))
                    parts += [wanted[wanted.index(culprit) :], wanted[: wanted.index(culprit)]]
                else:
                    self.left_out |= {*map(_top, wanted)}
            return self._server


_preloads: weakref.WeakValueDictionary[bytes, Preload] = weakref.WeakValueDictionary()
_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_warming = threading.RLock()


def preload(around: dict[str, Any]) -> Preload:
    """What these surroundings need, shared by all loaders that need the same and live at once."""
    key = pickle.dumps((around["path"], around["environ"], around["modules"]))
    with _warming:
        return _preloads.setdefault(key, Preload(around["modules"]))


def _top(module: str) -> str:
    return module.partition(".")[0]


_current: ForkServer | None = None
_users: weakref.WeakSet[Any] = weakref.WeakSet()
_guard = threading.RLock()
_starting = threading.Lock()
"""Held while a start changes what belongs to the whole process: the environment, and what `__main__` says of itself."""


def _server() -> ForkServer:
    global _current
    with _guard:
        if _current is not None and not _current.running():
            _current.stop()
            _current = None
        if _current is None:
            with standard_streams(), interrupts_held():
                _current = ForkServer()
        return _current


def use_server(user: Any) -> None:
    """`user` (a loader) wants the fork server to stay for as long as it lives or until it releases it."""
    with _guard:
        _users.add(user)


def start_server(user: Any, context: Any) -> None:
    """If `user` will need the fork server, have it begin now; it ends with a user that has never needed it."""
    if method_of(context) == "forkserver" and not worker.reading:
        with contextlib.suppress(OSError, AttributeError):  # whoever needs it will say what is missing
            _server()
            weakref.finalize(user, _end_unused)
            use_server(user)


def _end_unused() -> None:
    if _current is not None and not _current.used:
        _end_server()


def release_server(user: Any) -> None:
    """The last user that releases the fork server ends it, so that closing a loader leaves no process at all."""
    with _guard:
        _users.discard(user)
        _end_server()


def _end_server() -> None:
    global _current
    with _guard:
        if not _users and _current is not None:
            _current.stop()
            _current = None


class _Keeper:
    """Who uses the fork server for no loader's sake."""


@contextlib.contextmanager
def kept_server() -> Iterator[None]:
    """Keep the fork server while many loaders come and go, so that it is not started for each of them anew."""
    keeper = _Keeper()
    use_server(keeper)
    try:
        yield
    finally:
        release_server(keeper)


def _forget() -> None:
    """A forked child has no server, no users and nobody who holds a lock."""
    global _current, _users, _guard, _warming, _starting
    _guard, _warming, _starting, _users = threading.RLock(), threading.RLock(), threading.Lock(), weakref.WeakSet()
    for handlers, _ in [held for thread, held in _held.items() if thread != threading.get_ident()]:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for server in list(_servers):
        server.forget()
    _servers.clear()
    _preloads.clear()
    _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
