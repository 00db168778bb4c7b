"""Streams: placeholder until the branch with them is merged."""

from typing import Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class IterableDataset(Generic[T_co]):
    """A dataset that is iterated."""


class StreamReader:
    """Placeholder."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError
