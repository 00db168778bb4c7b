"""What holds around every test: nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from agnoload.testing import no_leaks

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "local")


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
