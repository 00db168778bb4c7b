"""A checkpoint: where the data that was yielded ends. Integers and strings, so that it is plain JSON.

What counts is what the user has received; what was prefetched is loaded again. `position` counts the samples of the
epoch's global sequence, over all ranks, so other numbers of workers, ranks and another batch size can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agnoload.errors import StateError
from agnoload.messages import Tally

VERSION = 1
LARGEST = (1 << 63) - 1
"""No epoch and no position is larger: they are parts of a key."""


class Seeds(NamedTuple):
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
    seeds: Seeds = Seeds(0, 0)
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
    for name in ("sampler", "stream"):
        value = getattr(place, name)
        if value is not None:
            state[name] = value
    return state


def restore(state: Any, facts: Mapping[str, Any]) -> Place:
    """Where to go on; `StateError` with both sides if the state is not this loader's, or is none at all."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be the dict that state_dict() gave, got {type(state).__name__}: {state!r:.200}")
    if "version" not in state:
        raise StateError(f"a state must be what state_dict() gave, got a dict without a version: {dict(state)!r:.200}")
    if state.get("version") != VERSION:
        raise StateError(f"this version reads states of version {VERSION}, got version {state.get('version')!r}")
    saved = state.get("facts")
    if not isinstance(saved, Mapping):
        raise StateError(f"facts in a state must be a dict, got {saved!r:.200}")
    for name in sorted({*facts, *map(str, saved)}):
        if saved.get(name) != facts.get(name):
            raise StateError(
                f"this state was saved with {name} {saved.get(name)!r}, but this loader has {facts.get(name)!r}: "
                "load it into a loader over the same data"
            )
    begun = state.get("begun", True)
    if not isinstance(begun, bool):
        raise StateError(f"begun in a state must be a bool, got {begun!r:.200}")
    seeds = Seeds(_number(state, "seed", None), _number(state, "order_seed", None), _number(state, "drawn"))
    return Place(
        _number(state, "epoch"),
        _number(state, "position"),
        seeds,
        begun,
        _ahead(state.get("ahead", [])),
        state.get("sampler"),
        state.get("stream"),
        _tally(state.get("failed", [0, 0])),
    )


def _number(state: Mapping[str, Any], name: str, largest: int | None = LARGEST) -> int:
    value = state.get(name, 0 if name == "drawn" else None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (largest is not None and value > largest):
        limit = "" if largest is None else " below 2**63"
        raise StateError(f"{name} in a state must be a non-negative int{limit}, got {value!r:.200}")
    return value


def _tally(counts: Any) -> Tally:
    if not (
        isinstance(counts, list) and len(counts) == 2 and all(type(n) is int and 0 <= n <= LARGEST for n in counts)
    ):
        raise StateError(f"failed in a state must be two non-negative ints below 2**63, got {counts!r:.200}")
    return Tally(*counts)


def _ahead(pairs: Any) -> tuple[tuple[int, int], ...]:
    try:
        found = tuple((start, stop) for start, stop in pairs)
    except (TypeError, ValueError):
        found = (("", ""),)
    if not all(type(start) is type(stop) is int and 0 <= start <= stop for start, stop in found):
        raise StateError(f"ahead in a state must be pairs of ints, the first not above the second, got {pairs!r:.200}")
    return found
