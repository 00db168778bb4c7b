"""The fork server stays for the whole folder, so that it is not started for every test anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agnoload.pools.start import kept_server


@pytest.fixture(scope="package", autouse=True)
def one_fork_server() -> Iterator[None]:
    with kept_server():
        yield
