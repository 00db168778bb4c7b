"""The tests of this folder start nothing, so nothing can be left behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Not counted here."""


@pytest.fixture(autouse=True)
def nothing_on_stderr() -> None:
    """Not looked at here."""
