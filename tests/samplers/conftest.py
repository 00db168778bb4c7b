"""Samplers start and open nothing, and no rank of the environment reaches them."""

from __future__ import annotations

import pytest

from agnoload.system import VARIABLES


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """To look for what is left would take ten times as long as the tests do."""


@pytest.fixture(autouse=True, scope="session")
def no_ranks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for names in VARIABLES for name in names):
            patch.delenv(name, raising=False)
        yield
