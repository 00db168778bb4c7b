"""The fork server stays for the whole folder, so that it is not started for every test anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agnoload.pools.start import release_server, use_server


class _User:
    pass


@pytest.fixture(scope="package", autouse=True)
def one_fork_server() -> Iterator[None]:
    user = _User()
    use_server(user)
    yield
    release_server(user)
