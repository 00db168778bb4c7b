"""What a stream is made of, and how it is laid out over lanes, workers and ranks: all that shows before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from agnoload.errors import OptionError
from agnoload.streams.base import DerivedStream, FilteredStream, MappedStream, RankStream
from agnoload.streams.iterators import FirstState, OpenableStream, first_state, is_ours, is_stateful, is_stream
from agnoload.streams.shards import lanes_of, num_shards_of
from agnoload.system import rank_and_world
from agnoload.validate import brief


def parts_of(stream: Any) -> list[Any]:
    """The streams and datasets that a stream of this library is made of."""
    if isinstance(stream, DerivedStream):
        return [stream.source]
    return list(getattr(stream, "datasets", ())) if isinstance(stream, OpenableStream) else []


def all_parts_of(stream: Any) -> Iterator[Any]:
    """The stream itself, what it is made of, and what that is made of."""
    waiting: list[Any] = [stream]
    while waiting:
        part = waiting.pop()
        waiting += parts_of(part)
        yield part


def part_without_state(stream: Any) -> Any:
    """What a stream is made of that cannot say where it is, as far as that shows before it is read."""
    for part in all_parts_of(stream):
        says = (is_ours(part) and part.keeps_place) or num_shards_of(part) is not None or is_stateful(part)
        if is_stream(part) and not says:
            return part
    return stream


def first_states(stream: Any, known: list[FirstState] | None = None) -> list[FirstState]:
    """The states that all streams of the user's in a stream had before anything was read of them, in their order.

    A stream may have been read in this process before it is copied to a worker: the copy gets them as `known`.
    """
    found: list[FirstState] = []
    for part in all_parts_of(stream):
        if is_stateful(part):
            found.append(first_state(part, known[len(found)] if known else None))
    return found


class Layout(NamedTuple):
    """How the samples of a stream are numbered."""

    lanes: int
    """Into how many lanes its shards are laid; 0 for a stream without shards."""
    first: int
    """Without lanes: the position of the first sample, and the distance to the next one."""
    stride: int
    rank: int
    shards: int | None
    """How many shards there are."""
    share: tuple[int, int] | None
    """Rank and number of ranks where a saved state is good for one rank only; None where it is good for all."""
    shared: bool
    """Whether each reader's samples are its own: the stream says so by `shared_source`."""
    compared: str
    """The streams in it, by name, of which several readers could see different samples: those with user code."""


def layout_of(stream: Any, rank: int | None = None) -> Layout:
    """The layout of a stream; `rank` is that of this process, where the stream is not split."""
    shards = num_shards_of(stream)
    lanes = 0 if shards is None else max(1, min(lanes_of(stream), shards))
    shared = not lanes and is_shared(stream)
    compared = ""
    if not lanes and not shared:  # where user code says which samples come next
        users = [p for p in all_parts_of(stream) if isinstance(p, FilteredStream) or (is_stream(p) and not is_ours(p))]
        compared = ", ".join(type(part).__name__ for part in users)
    split = split_of(stream)
    if split is None:
        return Layout(lanes, 0, 1, rank_and_world()[0] if rank is None else rank, shards, None, shared, compared)
    share = split.rank, split.world
    if split.by_shards:
        return Layout(lanes, 0, 1, split.rank, shards, share, shared, compared)
    return Layout(lanes, *share, 0, shards, None if split.outermost else share, shared, compared)


def is_shared(stream: Any) -> bool:
    """Whether its items go to one reader each; OptionError if those of some parts do."""
    parts = parts_of(stream)
    if getattr(stream, "shared_source", False) or not parts:
        return bool(getattr(stream, "shared_source", False))
    shared = list(map(is_shared, parts))
    if any(shared) and not all(shared):
        raise OptionError(
            f"shared_source must be true for all parts of {brief(stream)} or for none: every worker would deliver all "
            f"of {brief(parts[shared.index(False)])}"
        )
    return all(shared)


class Split(NamedTuple):
    """How a stream is split over ranks."""

    rank: int
    world: int
    by_shards: bool
    outermost: bool
    """All that comes after the split leaves one sample for each."""


def split_of(stream: Any) -> Split | None:
    """How a stream is split over ranks, and all that it is made of in the same way; None if it is not."""
    if isinstance(stream, RankStream):
        return Split(stream.rank, stream.world_size, num_shards_of(stream.source) is not None, True)
    parts = {split_of(part) for part in parts_of(stream)}
    split = parts.pop() if len(parts) == 1 else None
    return split if split is None or isinstance(stream, MappedStream) else split._replace(outermost=False)


def resolve_ranks(stream: Any, backend_world: tuple[int, int] | None) -> bool:
    """Give every split in a stream what the loader's backend knows of rank and world size; whether there is one."""
    splits = [part for part in all_parts_of(stream) if isinstance(part, RankStream)]
    for split in splits:
        split.resolve_rank(backend_world)
    return bool(splits)
