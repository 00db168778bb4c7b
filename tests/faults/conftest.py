"""Programs of their own, for tests of how a program ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

PATIENCE = 30.0
"""A bound against hanging, not a measure."""


class Program:
    """A Python program under way, known again, with all that it has started, by a mark in its environment."""

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
        """Every process that bears the mark."""
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
