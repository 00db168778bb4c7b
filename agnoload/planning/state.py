"""A checkpoint: how far the data has been delivered. Integers and strings, so that it is plain JSON.

What counts is what the user has received; what was only prefetched is loaded again. `position` counts the samples of
the epoch's global sequence, over all ranks, so other numbers of workers, ranks and another batch size can resume from
it. This file alone decides which states are legal: nothing else looks into the dict that a user hands in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import chain, pairwise
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
    sampler, stream = position.sampler, position.stream
    values: dict[str, Any] = {
        "seed": position.seeds.samples,
        "order_seed": position.seeds.order,
        "epoch": position.epoch,
        "position": position.position,
        "drawn": position.seeds.drawn,
        "begun": position.begun,
        "ahead": [list(pair) for pair in position.ahead],
        "sampler": None,
        "stream": None,
        "failed": list(position.failed),
        "rank": position.rank,
    }
    if sampler is not None:
        values["sampler"] = {"state": sampler.state} if sampler.sum is None else {"sum": sampler.sum}
    if stream is not None:
        values["stream"] = {
            **stream._asdict(),
            "lanes": [list(lane) for lane in stream.lanes],
            "ahead": sorted(map(list, stream.ahead)),
            "share": None if stream.share is None else list(stream.share),
        }
    kept = {name: value for name, value in values.items() if value != _FIELDS[name][0]}
    return {"version": VERSION, "facts": dict(facts), **kept}


# ---------------------------------------------------------------------------------------------------- what is legal


def restore(state: Any, facts: Mapping[str, Any], subject: Subject) -> EpochPosition:
    """Where to resume; `StateError` with both sides if the state is not this loader's, or is no state at all."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"a state must be the dict that state_dict() gave, got {type(state).__name__}: {shown(state)}")
    if not same(state["version"], VERSION):
        raise StateError(f"this version reads states of version {VERSION}, got version {shown(state['version'])}")
    known = sorted(["version", "facts", *_FIELDS])
    if unknown := sorted(map(str, set(state) - set(known))):
        raise StateError(f"a state must have the fields {', '.join(known)} only, got {shown(', '.join(unknown))[1:-1]}")
    saved = state.get("facts")
    if not isinstance(saved, Mapping):
        raise StateError(f"facts in a state must be a dict, got {shown(saved)}")
    for name in sorted({*facts, *map(str, saved)}):
        if not same(saved.get(name), facts.get(name)):
            raise StateError(
                f"this state was saved with {shown(name)[1:-1]} {shown(saved.get(name))}, but this loader has "
                f"{shown(facts.get(name))}: load it into a loader over the same data with the same options"
            )
    for name, what in (("sampler", "user-defined sampler"), ("stream", "stream")):
        if state.get(name) is not None and subject != name:
            raise StateError(
                f"this state was saved with a {what}, but this loader has none; got {name}={shown(state[name])}"
            )
    found = {name: check(state.get(name, default)) for name, (default, check) in _FIELDS.items()}
    position, ahead = found["position"], found["ahead"]
    borders = list(chain(*ahead))
    if borders and (borders[0] < position or any(low >= high for low, high in pairwise(borders))):
        raise StateError(
            "ahead in a state must be stretches (start, stop) in their order, apart from each other and after "
            f"position {position}, got {shown(state['ahead'])}"
        )
    if not found["begun"] and (borders or position or found["stream"] is not None):
        raise StateError("the state of an epoch that has not begun must have position 0, nothing ahead and no stream")
    if position and subject != "order" and found[subject] is None:
        raise StateError(f"{subject} in a state at position {position} must be a dict, got None")
    seeds = EpochSeeds(found.pop("seed"), found.pop("order_seed"), found.pop("drawn"))
    return EpochPosition(**found, seeds=seeds)


def _begun(value: Any) -> bool:
    if not isinstance(value, bool):
        raise StateError(f"begun in a state must be a bool, got {shown(value)}")
    return value


def _ahead(pairs: Any) -> tuple[tuple[int, ...], ...]:
    stretches = (items(pair, "a stretch ahead", 2) for pair in items(pairs, "ahead"))
    return tuple(tuple(whole(end, "a stretch ahead") for end in pair) for pair in stretches)


def _sampler(value: Any) -> SamplerPosition | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) not in ({"state"}, {"sum"}):
        raise StateError(f"sampler in a state must be a dict of 'state' or of 'sum', got {shown(value)}")
    if "sum" in value:
        return SamplerPosition(whole(value["sum"], "the check sum of a sampler"))
    return SamplerPosition(None, value["state"])


def _failed(counts: Any) -> FailureCount:
    failed, tried = (whole(count, "failed") for count in items(counts, "failed", 2))
    if failed > tried:
        raise StateError(f"failed in a state must be at most the number of samples tried, got {failed} of {tried}")
    return FailureCount(failed, tried)


def _stream(state: Any) -> StreamPosition | None:
    """The position of a stream, as far as it can be judged without the stream."""
    if state is None:
        return None
    kind, saved_lanes, turn, merged, saved_ahead, size, world, share, shards = fields(
        state, "stream", *StreamPosition._fields
    )
    lanes = []
    for lane in items(saved_lanes, "lanes"):
        count, at, inner = items(lane, "a lane", 3)
        whole(count, "the samples of a lane", FARTHEST)
        lanes.append(LaneStart(count, whole(at, "the place of a lane's state", count), inner))
    if kind not in get_args(Kind) or not lanes:
        raise StateError(f"a stream's state must have a kind of {get_args(Kind)} and lanes, got {shown(state)}")
    whole(turn, "turn", len(lanes) - 1)
    whole(merged, "merged", FARTHEST)
    if not whole(size, "size") or not whole(world, "world", MOST_RANKS):
        raise StateError(f"size and world in a stream's state must be at least 1, got {size} and {world}")
    ahead = set()
    for pair in items(saved_ahead, "ahead"):
        lane, place = items(pair, "what is ahead", 2)
        begins = lanes[whole(lane, "the lane of what is ahead", len(lanes) - 1)].delivered
        if whole(place, "the place of what is ahead", FARTHEST) < begins or (place - begins) % size:
            raise StateError(
                f"what is ahead in a stream's state must begin whole batches of {size} after the {begins} samples of "
                f"lane {lane}, got {place}"
            )
        ahead.add((lane, place))
    return StreamPosition(kind, lanes, turn, merged, ahead, size, world, share, shards)


_FIELDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "seed": (None, lambda value: whole(value, "seed", None)),
    "order_seed": (None, lambda value: whole(value, "order_seed", None)),
    "epoch": (None, lambda value: whole(value, "epoch")),
    "position": (None, lambda value: whole(value, "position")),
    "drawn": (0, lambda value: whole(value, "drawn", DRAWN_AT_MOST)),
    "begun": (True, _begun),
    "ahead": ([], _ahead),
    "sampler": (None, _sampler),
    "stream": (None, _stream),
    "failed": ([0, 0], _failed),
    "rank": (None, lambda value: None if value is None else whole(value, "rank", MOST_RANKS)),
}
"""The fields beside `version` and `facts`: the value with which one is left out, and what reads one by itself."""


# ---------------------------------------------------------------------------------------------------- does it fit


def check_order(start: EpochPosition, batches: BatchOrder, end: int) -> None:
    """An epoch in an order of ours: `batches` are what is left of it, `end` is where it ends."""
    if start.position > end:
        raise StateError(f"position {start.position} of the state lies beyond the {end} samples of the epoch")

    def reached(number: int) -> int:
        return batches.reached(number) if number else start.position

    for border in chain(*start.ahead):  # what was delivered ahead must be whole batches
        number = bisect_left(range(len(batches) + 1), border, key=reached)
        if number > len(batches) or border != reached(number):
            raise _torn(start, f"no batch of this loader begins or ends at {border}")


def was_delivered(start: EpochPosition, low: int, high: int) -> bool:
    """Whether a batch from `low` to before `high` was delivered ahead; a part of one cannot have been."""
    for begin, stop in start.ahead:
        if begin <= low and high <= stop:
            return True
        if begin < high and low < stop:
            raise _torn(start, f"a batch of this loader holds {low} to {high - 1}")
    return False


def _torn(start: EpochPosition, but: str) -> StateError:
    stretches = ", ".join(f"{begin} to {stop - 1}" for begin, stop in start.ahead[:8])
    return StateError(
        "a state that was saved out of order can be resumed with the same batches only: it has delivered positions "
        f"{stretches}, but {but}"
    )


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
    share = saved.share if saved.share is None else tuple(items(saved.share, "share"))
    of_ranks = "rank and number of ranks, since each rank of it has a state of its own"
    for what, before, now in (("number of shards", saved.shards, here.shards), (of_ranks, share, here.share)):
        if not same(before, now):
            raise StateError(
                f"the state of a stream must be resumed with the same {what}: saved with {shown(before)}, got {now}"
            )
    if (saved.size, saved.world) != (here.size, here.world) and (saved.merged or saved.ahead):
        raise StateError(
            f"this state was saved in the middle of a group of batches (batch_size={saved.size}, world_size="
            f"{saved.world}), so it can only be resumed with the same values; got {here.size} and {here.world}"
        )
    if saved.world == here.world:
        return saved
    lanes = []  # all ranks were at the same place of the stream, so that any number of them can share what is left
    for count, at, state in saved.lanes:
        if count * saved.world % here.world:
            raise StateError(
                f"this state was saved after {count} samples on each of {saved.world} ranks, which {here.world} ranks "
                "cannot share evenly: resume with a number of ranks that divides their product"
            )
        known = at * saved.world % here.world == 0
        delivered = count * saved.world // here.world
        lanes.append(LaneStart(delivered, at * saved.world // here.world, state) if known else LaneStart(delivered))
    return saved._replace(lanes=lanes)


def _described(kind: str, width: int) -> str:
    if kind == "stream":
        return "a stream that is read as a whole"
    return f"a stream in {width} lanes" if kind == "lanes" else f"a stream that splits itself over {width} workers"
