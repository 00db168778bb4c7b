"""What the parts of a saved state must be: it may come from a file that was cut short, or edited, or is another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agnoload.errors import StateError

LARGEST = (1 << 63) - 1
"""No epoch and no position is larger: they are parts of a key."""
FARTHEST = 1 << 44
"""No stream, and no lane of one, is longer, so that its places on `MOST_RANKS` ranks are parts of a key too."""
MOST_RANKS = 1 << 16
SHOWN = 200
"""Characters of a value in an error."""


def shown(value: Any) -> str:
    """A value in an error, shortened: a state may hold, or be, anything."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints, or the repr is the user's
        return type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def same(saved: Any, here: Any) -> bool:
    """Whether a part of a state is what it must be here; 1 is not True."""
    try:
        return repr(saved) == repr(here)
    except Exception:  # as for `shown`
        return False


def whole(value: Any, what: str, largest: int | None = LARGEST) -> int:
    """A non-negative int, or `StateError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (largest is not None and value > largest):
        limit = "" if largest is None else " below 2**63" if largest == LARGEST else f" of at most {largest}"
        raise StateError(f"{what} in a state must be a non-negative int{limit}, got {shown(value)}")
    return value


def items(value: Any, what: str, count: int | None = None) -> list[Any]:
    """A list, of so many things, or `StateError`."""
    if not isinstance(value, (list, tuple)) or (count is not None and len(value) != count):
        wanted = "a list" if count is None else f"a list of {count}"
        raise StateError(f"{what} in a state must be {wanted}, got {shown(value)}")
    return list(value)


def fields(value: Any, what: str, *names: str) -> list[Any]:
    """What a dict holds under just these names, or `StateError`."""
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise StateError(f"{what} in a state must be a dict of {', '.join(names)}, got {shown(value)}")
    return [value[name] for name in names]
