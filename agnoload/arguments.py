"""What an argument must be: each function gives it back, or raises an `OptionError` that says what came instead."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from agnoload.errors import OptionError


def integer(name: str, value: Any, low: int, what: str) -> int:
    """A Python int that is at least `low` and that 64 bits hold; `what` says so in words."""
    given = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not given or not low <= value < 1 << 63:
        raise OptionError(f"{name} must be {what}, got {value!r}")
    return int(value)


def positive(name: str, value: Any) -> int:
    """A positive Python int."""
    return integer(name, value, 1, "a positive int")


def number(name: str, value: Any, low: float, what: str, high: float = math.inf) -> float:
    """A finite number, as a Python float, from `low` to `high`; `what` says so in words."""
    given = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        found = float(value) if given else math.nan
    except OverflowError:  # an int beyond all floats
        found = math.inf
    if not low <= found <= high or found == math.inf:
        raise OptionError(f"{name} must be {what}, got {value!r}")
    return found


def flag(name: str, value: Any) -> bool:
    """A bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise OptionError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def word(name: str, value: Any, words: Collection[str], or_else: str = "") -> Any:
    """One of some words; `or_else` says what the caller has allowed in their place."""
    if not isinstance(value, str) or value not in words:  # an array would be compared element by element
        *others, last = [*map(repr, words), *filter(None, [or_else])]
        raise OptionError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
    return value


def sized(name: str, value: Any) -> Any:
    """Something with a length."""
    try:
        len(value)
    except TypeError:
        raise OptionError(f"{name} must have a length, got {type(value).__name__}: {value!r}") from None
    return value


def members(name: str, value: Any, what: str) -> Iterator[Any]:
    """Something to iterate; `what` says of what."""
    try:
        found: Iterator[Any] = iter(value)
    except TypeError:
        raise OptionError(f"{name} must be {what}, got {type(value).__name__}: {value!r}") from None
    return found
