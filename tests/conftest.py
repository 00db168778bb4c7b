"""What holds around every test: nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from agnoload.pools.start import kept_server
from agnoload.testing import no_leaks

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
