"""What holds around every test: nothing is left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from agnoload.pools.preload import kept_server
from agnoload.testing import no_leaks

for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        # By `nohup`, or `&` in a script. A function that does nothing ignores it as well, but not in the programs that
        # tests start: there they do what they do by default.
        signal.signal(number, lambda *_: None)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "local")


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
