"""A checkpoint: how far the data has been delivered. Integers and strings, so that it is plain JSON.

What counts is what the user has received; what was only prefetched is loaded again. `position` counts the samples of
the epoch's global sequence, over all ranks, so other numbers of workers, ranks and another batch size can resume from
it. This file alone decides which states are legal: nothing else looks into the dict that a user hands in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

from agnoload.errors import StateError
from agnoload.messages import FailureCount, LaneStart
from agnoload.samplers.order import BatchOrder
from agnoload.validate import FARTHEST, MOST_RANKS, fields, items, same, shown, whole

VERSION = 1
DRAWN_AT_MOST = 1 << 20
"""A state may ask a generator for this many seeds."""

Kind = Literal["stream", "lanes", "workers"]
"""How a stream is read: as a whole, in lanes of shards, or split over the workers by itself."""
Subject = Literal["order", "sampler", "stream"]
"""What a state resumes: an order of ours, a user-defined sampler, or a stream."""


class EpochSeeds(NamedTuple):
    """What an epoch runs on."""

    samples: int
    """Keys the randomness of samples."""
    order: int
    """Keys the order."""
    drawn: int = 0
    """How many seeds the loader's generator had given by then, this one included; 0 without a generator."""


class SamplerPosition(NamedTuple):
    """How far a user-defined sampler has come: by its own `state_dict`, or by a check sum of the keys that it gave."""

    sum: int | None = None
    state: Any = None
    """What counts where `sum` is None."""


class StreamPosition(NamedTuple):
    """How far a stream has been delivered, lane by lane."""

    kind: Kind
    lanes: list[LaneStart]
    turn: int
    """The lane that comes next."""
    merged: int
    """How many of the samples that were left over at the ends of lanes have been delivered."""
    ahead: set[tuple[int, int]]
    """Out of order: batches that were delivered ahead of others, each by its lane and its first place there."""
    size: int
    world: int
    share: tuple[int, int] | None
    """Rank and number of ranks, where each rank has a state of its own."""
    shards: int | None


class EpochPosition(NamedTuple):
    """How far an epoch has been delivered."""

    epoch: int
    position: int = 0
    seeds: EpochSeeds = EpochSeeds(0, 0)
    """Those of the epoch; where it has not `begun`, those of the one before."""
    begun: bool = True
    """Whether the epoch has its seeds already; with a generator they are drawn when it begins."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Out of order: the stretches of the sequence, (start, stop), that were delivered beyond `position`."""
    sampler: SamplerPosition | None = None
    stream: StreamPosition | None = None
    failed: FailureCount = FailureCount()
    """How many samples of the epoch have failed so far, where that is counted."""
    rank: int | None = None
    """The rank that saved it, of a stream that is split sample by sample: it may have had its last, others not."""


def capture(position: EpochPosition, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a dict for `json.dumps`; `facts` are compared when it is restored."""
    state: dict[str, Any] = {
        "version": VERSION,
        "seed": position.seeds.samples,
        "order_seed": position.seeds.order,
        "epoch": position.epoch,
        "position": position.position,
        "facts": dict(facts),
    }
    if position.seeds.drawn:
        state["drawn"] = position.seeds.drawn
    if not position.begun:
        state["begun"] = False
    if position.ahead:
        state["ahead"] = [list(pair) for pair in position.ahead]
    if position.failed.tried:
        state["failed"] = list(position.failed)
    if (sampler := position.sampler) is not None:
        state["sampler"] = {"state": sampler.state} if sampler.sum is None else {"sum": sampler.sum}
    if (stream := position.stream) is not None:
        state["stream"] = {
            **stream._asdict(),
            "lanes": [list(lane) for lane in stream.lanes],
            "ahead": sorted(map(list, stream.ahead)),
            "share": None if stream.share is None else list(stream.share),
        }
    if position.rank is not None:
        state["rank"] = position.rank
    return state


# ---------------------------------------------------------------------------------------------------- what is legal


def restore(state: Any, facts: Mapping[str, Any], subject: Subject) -> EpochPosition:
    """Where to resume; `StateError` with both sides if the state is not this loader's, or is no state at all."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"a state must be the dict that state_dict() gave, got {type(state).__name__}: {shown(state)}")
    if not same(state["version"], VERSION):
        raise StateError(f"this version reads states of version {VERSION}, got version {shown(state['version'])}")
    if unknown := sorted(map(str, set(state) - _FIELDS)):
        raise StateError(
            f"a state must have the fields {', '.join(sorted(_FIELDS))} only, got {shown(', '.join(unknown))[1:-1]}"
        )
    saved = state.get("facts")
    if not isinstance(saved, Mapping):
        raise StateError(f"facts in a state must be a dict, got {shown(saved)}")
    for name in sorted({*facts, *map(str, saved)}):
        if not same(saved.get(name), facts.get(name)):
            raise StateError(
                f"this state was saved with {shown(name)[1:-1]} {shown(saved.get(name))}, but this loader has "
                f"{shown(facts.get(name))}: load it into a loader over the same data with the same options"
            )
    begun = state.get("begun", True)
    if not isinstance(begun, bool):
        raise StateError(f"begun in a state must be a bool, got {shown(begun)}")
    seeds = EpochSeeds(
        whole(state.get("seed"), "seed", None),
        whole(state.get("order_seed"), "order_seed", None),
        whole(state.get("drawn", 0), "drawn", DRAWN_AT_MOST),
    )
    position = whole(state.get("position"), "position")
    ahead = _ahead(state.get("ahead", []), position)
    sampler, stream = _parts(state, subject, position)
    if not begun and (position or ahead or stream is not None):
        raise StateError("the state of an epoch that has not begun must have position 0, nothing ahead and no stream")
    epoch, failed = whole(state.get("epoch"), "epoch"), _failed(state.get("failed", [0, 0]))
    rank = None if state.get("rank") is None else whole(state["rank"], "rank", MOST_RANKS)
    return EpochPosition(epoch, position, seeds, begun, ahead, sampler, stream, failed, rank)


_FIELDS = {
    "version", "seed", "order_seed", "epoch", "position", "facts", "drawn", "begun", "ahead", "sampler", "stream",
    "failed", "rank",
}  # fmt: skip


def _parts(state: Mapping[str, Any], subject: Subject, position: int) -> tuple[Any, Any]:
    """What the state says of a user-defined sampler, and of a stream; only what this loader has may be there."""
    sampler, stream = state.get("sampler"), state.get("stream")
    for name, what, saved in (("sampler", "user-defined sampler", sampler), ("stream", "stream", stream)):
        if saved is not None and subject != name:
            raise StateError(f"this state was saved with a {what}, but this loader has none; got {name}={shown(saved)}")
    if subject == "stream":
        if position and stream is None:
            raise StateError(f"the state of a stream at position {position} must have a field stream, got none")
        return None, None if stream is None else _stream(stream)
    if subject == "order" or (sampler is None and not position):
        return None, None
    if not isinstance(sampler, dict) or set(sampler) not in ({"state"}, {"sum"}):
        raise StateError(f"sampler in a state must be a dict of 'state' or of 'sum', got {shown(sampler)}")
    if "sum" in sampler:
        return SamplerPosition(whole(sampler["sum"], "the check sum of a sampler")), None
    return SamplerPosition(None, sampler["state"]), None


def _failed(counts: Any) -> FailureCount:
    failed, tried = (whole(count, "failed") for count in items(counts, "failed", 2))
    if failed > tried:
        raise StateError(f"failed in a state must be at most the number of samples tried, got {failed} of {tried}")
    return FailureCount(failed, tried)


def _ahead(pairs: Any, position: int) -> tuple[tuple[int, int], ...]:
    """Stretches in their order, none at another one or before the position."""
    found: list[tuple[int, int]] = []
    for pair in items(pairs, "ahead"):
        start, stop = (whole(end, "a stretch ahead") for end in items(pair, "a stretch ahead", 2))
        if not (position <= start < stop) or (found and start <= found[-1][1]):
            raise StateError(
                f"ahead in a state must be stretches (start, stop) in their order, apart from each other and behind "
                f"position {position}, got {shown(pairs)}"
            )
        found.append((start, stop))
    return tuple(found)


def check_order(start: EpochPosition, batches: BatchOrder, end: int) -> None:
    """An epoch in an order of ours: `batches` are what is left of it, `end` is where it ends."""
    if start.position > end:
        raise StateError(f"position {start.position} of the state lies beyond the {end} samples of the epoch")
    for border in chain(*start.ahead):  # what was delivered ahead must be whole batches
        count = bisect_left(range(len(batches) + 1), border, key=lambda n: batches.reached(n) if n else start.position)
        if count > len(batches) or border != (batches.reached(count) if count else start.position):
            raise StateError(
                f"a state that was saved out of order can be resumed with the same batches only: it has delivered "
                f"positions {_stretches(start)}, but no batch of this loader begins or ends at {border}"
            )


def was_delivered(start: EpochPosition, low: int, high: int) -> bool:
    """Whether a batch from `low` to before `high` was delivered ahead; a part of one cannot have been."""
    for begin, stop in start.ahead:
        if begin <= low and high <= stop:
            return True
        if begin < high and low < stop:
            raise StateError(
                f"a state that was saved out of order can be resumed with the same batches only: it has delivered "
                f"positions {_stretches(start)}, but a batch of this loader holds {low} to {high - 1}"
            )
    return False


def _stretches(start: EpochPosition) -> str:
    return ", ".join(f"{begin} to {stop - 1}" for begin, stop in start.ahead[:8])


# ---------------------------------------------------------------------------------------------------- streams


def _stream(state: Any) -> StreamPosition:
    """The position of a stream, as far as it can be judged without the stream."""
    kind, saved_lanes, turn, merged, saved_ahead, size, world, share, shards = fields(
        state, "stream", *StreamPosition._fields
    )
    lanes = [_lane(lane) for lane in items(saved_lanes, "lanes")]
    if kind not in get_args(Kind) or not lanes:
        raise StateError(f"a stream's state must have a kind of {get_args(Kind)} and lanes, got {shown(state)}")
    whole(turn, "turn", len(lanes) - 1)
    whole(merged, "merged", FARTHEST)
    if not whole(size, "size") or not whole(world, "world", MOST_RANKS):
        raise StateError(f"size and world in a stream's state must be at least 1, got {size} and {world}")
    ahead = {_batch_ahead(pair, lanes, size) for pair in items(saved_ahead, "ahead")}
    return StreamPosition(kind, lanes, turn, merged, ahead, size, world, share, shards)


def _lane(lane: Any) -> LaneStart:
    count, at, inner = items(lane, "a lane", 3)
    whole(count, "the samples of a lane", FARTHEST)
    return LaneStart(count, whole(at, "the place of a lane's state", count), inner)


def _batch_ahead(pair: Any, lanes: list[LaneStart], size: int) -> tuple[int, int]:
    lane, place = items(pair, "what is ahead", 2)
    whole(lane, "the lane of what is ahead", len(lanes) - 1)
    if (
        whole(place, "the place of what is ahead", FARTHEST) < lanes[lane].delivered
        or (place - lanes[lane].delivered) % size
    ):
        raise StateError(
            f"what is ahead in a stream's state must begin whole batches of {size} behind the {lanes[lane].delivered} "
            f"samples of lane {lane}, got {place}"
        )
    return lane, place


def fitted(saved: StreamPosition, here: StreamPosition, workers: int) -> StreamPosition:
    """The position at which this loader resumes a stream; `here` is its start, and `workers` read it."""
    if not any(lane.delivered for lane in saved.lanes) and not saved.ahead and not saved.merged:
        return here  # nothing was delivered: whoever saved it, all of it comes
    kind, width = here.kind, len(here.lanes)
    if saved.kind == "workers" and kind == "stream":  # the readers will find that it splits itself
        kind, width = "workers", workers
    if (saved.kind, len(saved.lanes)) != (kind, width):
        raise StateError(
            f"this state was saved from {_described(saved.kind, len(saved.lanes))}, but this loader reads "
            f"{_described(kind, width)}: resume with the same lanes and workers"
        )
    for what, before, now in (
        ("number of shards", saved.shards, here.shards),
        (
            "rank and number of ranks, since each rank of it has a state of its own",
            saved.share if saved.share is None else tuple(items(saved.share, "share")),
            here.share,
        ),
    ):
        if not same(before, now):
            raise StateError(
                f"the state of a stream must be resumed with the same {what}: saved with {shown(before)}, got {now}"
            )
    lanes = saved.lanes
    if saved.world != here.world:
        lanes = [_for_other_ranks(lane, saved.world, here.world) for lane in lanes]
    if (saved.size, saved.world) != (here.size, here.world) and (saved.merged or saved.ahead):
        raise StateError(
            f"this state was saved in the middle of a group of batches (batch_size={saved.size}, world_size="
            f"{saved.world}), so it can only be resumed with the same values; got {here.size} and {here.world}"
        )
    return saved._replace(lanes=lanes)


def _for_other_ranks(lane: LaneStart, saved: int, here: int) -> LaneStart:
    """Where a rank resumes a stream that was split over another number of ranks, all at the same place of it."""
    if lane.delivered * saved % here:
        raise StateError(
            f"this state was saved after {lane.delivered} samples on each of {saved} ranks, which {here} ranks cannot "
            "share evenly: resume with a number of ranks that divides their product"
        )
    known = lane.at * saved % here == 0
    return LaneStart(
        lane.delivered * saved // here, lane.at * saved // here if known else 0, lane.state if known else None
    )


def _described(kind: str, width: int) -> str:
    if kind == "stream":
        return "a stream that is read as a whole"
    return f"a stream in {width} lanes" if kind == "lanes" else f"a stream that splits itself over {width} workers"
