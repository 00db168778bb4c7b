"""A checkpoint: where the data that was yielded ends. Integers and strings, so that it is plain JSON.

What counts is what the user has received; what was prefetched is loaded again. `position` counts the samples of the
epoch's global sequence, over all ranks, so other numbers of workers, ranks and another batch size can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agnoload.errors import StateError
from agnoload.messages import Tally
from agnoload.validate import MOST_RANKS, items, same, shown, whole

VERSION = 1
DRAWN_AT_MOST = 1 << 20
"""A state may ask a generator for this many seeds."""


class EpochSeeds(NamedTuple):
    """What an epoch runs on."""

    samples: int
    """Keys the randomness of samples."""
    order: int
    """Keys the order."""
    drawn: int = 0
    """The number of seeds that the loader's generator had given by then, this one included; 0 without a generator."""


class Place(NamedTuple):
    """Where an epoch stands."""

    epoch: int
    position: int = 0
    seeds: EpochSeeds = EpochSeeds(0, 0)
    """Those of the epoch; where it has not `begun`, those of the one before."""
    begun: bool = True
    """Whether the epoch has its seeds already; with a generator they are drawn when it begins."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Out of order: the stretches of the sequence, (start, stop), that were delivered beyond `position`."""
    sampler: Any = None
    """What a stranger's sampler needs to go on."""
    stream: Any = None
    """What a stream's plan needs to go on."""
    tally: Tally = Tally()
    """What has failed of the epoch so far, where that is counted."""
    rank: int | None = None
    """The rank that saved it, of a stream that is split sample by sample: it may have had its last, others not."""


def capture(place: Place, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a dict for `json.dumps`; `facts` are compared when it is restored."""
    state: dict[str, Any] = {
        "version": VERSION,
        "seed": place.seeds.samples,
        "order_seed": place.seeds.order,
        "epoch": place.epoch,
        "position": place.position,
        "facts": dict(facts),
    }
    if place.seeds.drawn:
        state["drawn"] = place.seeds.drawn
    if not place.begun:
        state["begun"] = False
    if place.ahead:
        state["ahead"] = [list(pair) for pair in place.ahead]
    if place.tally.tried:
        state["failed"] = list(place.tally)
    for name in ("sampler", "stream", "rank"):
        value = getattr(place, name)
        if value is not None:
            state[name] = value
    return state


def restore(state: Any, facts: Mapping[str, Any]) -> Place:
    """Where to go on; `StateError` with both sides if the state is not this loader's, or is none at all."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be the dict that state_dict() gave, got {type(state).__name__}: {shown(state)}")
    if "version" not in state:
        raise StateError(f"a state must be what state_dict() gave, got a dict without a version: {shown(dict(state))}")
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
    stream = state.get("stream")
    if not begun and (position or ahead or stream is not None):
        raise StateError("an epoch that has not begun must stand at position 0, with nothing ahead and no stream")
    epoch, tally = whole(state.get("epoch"), "epoch"), _tally(state.get("failed", [0, 0]))
    rank = None if state.get("rank") is None else whole(state["rank"], "rank", MOST_RANKS)
    return Place(epoch, position, seeds, begun, ahead, state.get("sampler"), stream, tally, rank)


_FIELDS = {
    "version", "seed", "order_seed", "epoch", "position", "facts", "drawn", "begun", "ahead", "sampler", "stream",
    "failed", "rank",
}  # fmt: skip


def _tally(counts: Any) -> Tally:
    failed, tried = (whole(count, "failed") for count in items(counts, "failed", 2))
    if failed > tried:
        raise StateError(f"failed in a state must be at most as many as were tried, got {failed} of {tried}")
    return Tally(failed, tried)


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
