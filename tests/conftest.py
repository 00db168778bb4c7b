"""What holds around every test: nothing is left behind."""

from __future__ import annotations

import compileall
import contextlib
import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

import agnoload
from agnoload.pools.preload import kept_server
from agnoload.testing import no_leaks

for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        # By `nohup`, or `&` in a script. A function that does nothing ignores it as well, but not in the programs that
        # tests start: there they do what they do by default.
        signal.signal(number, lambda *_: None)

# The same examples in each run, however busy the machine is; `--hypothesis-profile=explore` tries others. The fixtures
# that count what is left stand around a whole property, not around each of its examples.
quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=quiet)
settings.register_profile("explore", deadline=None, suppress_health_check=quiet)
settings.load_profile("same")


class WithoutTests(importlib.machinery.PathFinder):
    """Finds no package `tests`, so that what a test defines goes to workers by value.

    Otherwise each template would import the test's module, and with it pytest and hypothesis: that takes ten times as
    long as all else that workers do in most tests.
    """

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname == "tests" and path is None else super().find_spec(fullname, path, target)


def pytest_configure() -> None:
    """Have the core compiled once, not in each program that a test starts: that takes as long as its imports."""
    sys.dont_write_bytecode = False  # pytest keeps the compiled tests, too
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutTests
    compileall.compile_dir(str(Path(agnoload.__file__).parent), quiet=2)


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> Iterator[None]:
    """All tests share one, or most of their time would go into starting it."""
    with kept_server():
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Processes, threads, descriptors and shared memory are as many after a test as before it."""
    with no_leaks():
        yield


@pytest.fixture(autouse=True)
def nothing_on_stderr(request: pytest.FixtureRequest) -> Iterator[None]:
    """Neither the loader nor its workers write to standard error; a test that wants something there takes it away."""
    kind = "capsys" if "capsys" in request.fixturenames else "capfd"
    captured = request.getfixturevalue(kind)
    yield
    assert captured.readouterr().err == ""


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The folder's kit.py, as a module that no worker can import: it would import pytest along with a test's own."""
    name = f"agnoload_{request.path.parent.name}_kit"
    spec = importlib.util.spec_from_file_location(name, request.path.with_name("kit.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


# ---------------------------------------------------------------------------------------------- programs

PATIENCE = 30.0
"""A bound against hanging, not a measure."""


class Program:
    """A Python program under way. A mark in its environment finds it, and all that it has started."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process = process
        self._mark = mark

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def line(self) -> str:
        """The next line that it prints; blocks until there is one."""
        return self.stdout.readline().strip()

    def alive(self) -> list[psutil.Process]:
        """Every process that has the mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("AGNOLOAD_MARK") == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> tuple[int, str, str]:
        """Wait for its end, and that of all that it has started; exit code and output."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def gone(self) -> float:
        """Seconds until the last process that it has started was gone."""
        began = time.monotonic()
        while alive := self.alive():
            psutil.wait_procs(alive, timeout=0.05)
            assert time.monotonic() - began < PATIENCE, f"processes left: {[p.cmdline() for p in alive]}"
        return time.monotonic() - began


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a program from its text: `program(text, "-W", "error", stdin=False, **environment)`."""
    started: list[Program] = []

    def start(text: str, *flags: str, stdin: bool = False, **options: Any) -> Program:
        mark = uuid.uuid4().hex
        path = tmp_path / "program.py"
        path.write_text(text)
        environment = {**os.environ, "AGNOLOAD_MARK": mark, "PYTHONUNBUFFERED": "1"}
        with open(path if stdin else os.devnull) as read:
            process = subprocess.Popen(
                [sys.executable, *flags, "-" if stdin else str(path)],
                stdin=read,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env=environment,
                start_new_session=True,
                **options,
            )
        started.append(Program(process, mark))
        return started[-1]

    # Whoever reads a line of one that hangs would wait for ever.
    watchdog = threading.Timer(4 * PATIENCE, lambda: [one.process.kill() for one in started])
    watchdog.start()
    yield start
    watchdog.cancel()
    watchdog.join()
    for one in started:
        with one.process:
            one.process.kill()
        for process in one.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
