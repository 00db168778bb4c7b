"""Things in a few words, for `repr` and for errors."""

from __future__ import annotations

from typing import Any

import numpy as np


def brief(thing: Any) -> str:
    """A dataset, sampler or whatever else stands in their place, in some words: its own if they are few."""
    kind = type(thing)
    if getattr(kind, "__repr__", None) is object.__repr__ or (kind in _BUILT_IN and len(thing) > 8):
        return counted(thing)
    text = repr(thing)
    return text if len(text) <= 120 and "\n" not in text else counted(thing)


_BUILT_IN = {list, tuple, dict, set, str, bytes, np.ndarray}
"""Types that would say all that is in them."""


def counted(thing: Any) -> str:
    """The name of a thing's type, and how much is in it if it says so: `Images(1000 items)`."""
    try:
        return f"{type(thing).__name__}({number_of(len(thing), 'item')})"
    except Exception:  # of the user's, or the thing is not made yet; a repr must not fail
        return f"{type(thing).__name__}()"


def number_of(count: int, thing: str, things: str | None = None) -> str:
    """A count with its noun: `1 batch`, `2 batches`; `things` where it is not said in this way."""
    return f"{count} {thing if count == 1 else things or thing + ('es' if thing.endswith(('s', 'ch')) else 's')}"


def name_of(function: Any) -> str:
    """A function as a person would name it."""
    return getattr(function, "__qualname__", None) or repr(function)
