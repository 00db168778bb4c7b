"""Checks of arguments and of saved states, and how errors and reprs name things."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError, StateError


def integer(name: str, value: Any, low: int, what: str) -> int:
    """A Python int that is at least `low` and that 64 bits hold; `what` describes it in the error."""
    given = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not given or not low <= value < 1 << 63:
        raise OptionError(f"{name} must be {what}, got {value!r}")
    return int(value)


def positive(name: str, value: Any) -> int:
    """A positive Python int."""
    return integer(name, value, 1, "a positive int")


def number(name: str, value: Any, low: float, what: str, high: float = math.inf) -> float:
    """A finite number, as a Python float, from `low` to `high`; `what` describes it in the error."""
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
    """One of some words; `or_else` names what else the caller allows."""
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
    """An iterator over the value; `what` describes it in the error."""
    try:
        found: Iterator[Any] = iter(value)
    except TypeError:
        raise OptionError(f"{name} must be {what}, got {type(value).__name__}: {value!r}") from None
    return found


def array_of(name: str, value: Any) -> npt.NDArray[Any]:
    """A list, array, tensor or column as a NumPy array, without a copy where possible."""
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of unequal length
        raise OptionError(f"{name} must be an array, or lists that make one, got {shown(value)}: {error}") from None


def brief(thing: Any) -> str:
    """A dataset or sampler in a few words: its own repr if that is short."""
    kind = type(thing)
    if getattr(kind, "__repr__", None) is object.__repr__ or (kind in _BUILT_IN and len(thing) > 8):
        return counted(thing)
    text = repr(thing)
    return text if len(text) <= 120 and "\n" not in text else counted(thing)


_BUILT_IN = {list, tuple, dict, set, str, bytes, np.ndarray}
"""Types whose repr shows all that is in them."""


def counted(thing: Any) -> str:
    """The name of a thing's type, and its length if it has one: `Images(1000 items)`."""
    try:
        return f"{type(thing).__name__}({number_of(len(thing), 'item')})"
    except Exception:  # user code, or the thing is half made; a repr must not fail
        return f"{type(thing).__name__}()"


def number_of(count: int, thing: str, things: str | None = None) -> str:
    """A count with its noun: `1 batch`, `2 batches`; `things` for an irregular plural."""
    return f"{count} {thing if count == 1 else things or thing + ('es' if thing.endswith(('s', 'ch')) else 's')}"


def name_of(function: Any) -> str:
    """A function as a person would name it."""
    return getattr(function, "__qualname__", None) or repr(function)


LARGEST = (1 << 63) - 1
"""The largest epoch and position: both are parts of a random key."""
FARTHEST = 1 << 44
"""The longest stream and lane, so that its positions on `MOST_RANKS` ranks are parts of a key too."""
MOST_RANKS = 1 << 16
SHOWN = 200
"""Characters of a value in an error."""


def shown(value: Any) -> str:
    """A value in an error, shortened: a state may hold anything."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python prints, or the repr is the user's
        return type(value).__name__
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def same(saved: Any, here: Any) -> bool:
    """Whether a part of a state equals what this loader has; 1 is not True."""
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
    """A list, of `count` members if given, or `StateError`."""
    if not isinstance(value, (list, tuple)) or (count is not None and len(value) != count):
        wanted = "a list" if count is None else f"a list of {count}"
        raise StateError(f"{what} in a state must be {wanted}, got {shown(value)}")
    return list(value)


def fields(value: Any, what: str, *names: str) -> list[Any]:
    """The values of a dict that has exactly these names, or `StateError`."""
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise StateError(f"{what} in a state must be a dict of {', '.join(names)}, got {shown(value)}")
    return [value[name] for name in names]
