"""A look into a dataset and what it wraps, without reading a sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from agnoload.datasets.cache import CachedDataset

WRAPPED = {"dataset", "datasets", "source", "sources"}
"""The attributes by which datasets, ours and others', hold the datasets that they are made of."""

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MANY = 256
"""A list of more datasets than that is not walked through."""


def find_large_lists(dataset: Any, limit: int = 100_000) -> list[str]:
    """The paths of the attributes that hold more than `limit` Python objects in one container.

    Reading such a container changes the reference count inside each object, so memory that workers shared with their
    parent becomes their own, page by page. Only the lengths of containers in attributes are looked at, in the dataset
    and in those that it wraps (`dataset`, `datasets`).

    >>> find_large_lists([0] * 11, limit=10)
    ['dataset']
    """
    if _is_large(dataset, limit):
        return ["dataset"]
    return [
        f"{path}.{name}"
        for path, found in _walk(dataset)
        for name, value in _attributes(found)
        if _is_large(value, limit)
    ]


def find_caches(dataset: Any) -> list[CachedDataset[Any]]:
    """Every `CachedDataset` in a dataset and in those that it wraps."""
    return [found for _, found in _walk(dataset) if isinstance(found, CachedDataset)]


def _walk(dataset: Any) -> Iterator[tuple[str, Any]]:
    """A dataset and all that it wraps, each once, with its path."""
    waiting = [("dataset", dataset)]
    seen: set[int] = set()
    while waiting:
        path, found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield path, found
        for name, value in _attributes(found):
            if name in WRAPPED:
                waiting += _parts(f"{path}.{name}", value)


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and len(value) <= _MANY:
        return [(f"{path}[{key!r}]", part) for key, part in list(value.items())]
    if isinstance(value, (list, tuple)):
        return [(f"{path}[{place}]", part) for place, part in enumerate(value)] if len(value) <= _MANY else []
    return [(path, value)]


def _attributes(found: Any) -> list[tuple[str, Any]]:
    own = list(getattr(found, "__dict__", {}).items())
    slots = [name for base in type(found).__mro__ for name in _slots(base)]
    return own + [(name, getattr(found, name)) for name in slots if hasattr(found, name)]


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in {"__dict__", "__weakref__"}]


def _is_large(value: Any, limit: int) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype.hasobject and value.size > limit)
    return isinstance(value, _CONTAINERS) and len(value) > limit
