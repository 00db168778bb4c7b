"""The one assertion of all checks: also under `python -O`, and with a text of its own."""

from __future__ import annotations


def require(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)
