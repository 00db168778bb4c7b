"""Programs of their own, for frameworks that are set up once a process, or that want several."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest


@pytest.fixture(scope="module")
def start() -> Callable[..., subprocess.Popen[str]]:
    """`start(code, *arguments, **environment)`: a fresh interpreter that runs some code."""

    def begin(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
        return subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return begin


@pytest.fixture(scope="module")
def ended() -> Callable[..., list[str]]:
    """`ended(*processes)`: what they print, once all have ended well."""

    def end(*processes: subprocess.Popen[str]) -> list[str]:
        try:
            outputs = [process.communicate(timeout=400) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
        return [out for out, _ in outputs]

    return end
