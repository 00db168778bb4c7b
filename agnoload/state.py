"""A checkpoint: where the data that was yielded ends. Integers and strings, so that it is plain JSON.

What counts is what the user has received; what was prefetched is loaded again. `position` counts the samples of the
epoch's global sequence, over all ranks, so other numbers of workers, ranks and another batch size can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agnoload.errors import StateError

VERSION = 1


class Place(NamedTuple):
    """Where an epoch stands."""

    epoch: int
    position: int = 0
    ahead: tuple[tuple[int, int], ...] = ()
    """Out of order: (position, samples) of batches delivered beyond `position`."""
    stream: Any = None
    """What a stream's plan needs to go on, or a function that gives it."""


def capture(place: Place, seed: int, order_seed: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a dict for `json.dumps`; `facts` are compared when it is restored."""
    state: dict[str, Any] = {
        "version": VERSION,
        "seed": seed,
        "order_seed": order_seed,
        "epoch": place.epoch,
        "position": place.position,
        "facts": dict(facts),
    }
    if place.ahead:
        state["ahead"] = [list(pair) for pair in place.ahead]
    if place.stream is not None:
        state["stream"] = place.stream() if callable(place.stream) else place.stream
    return state


def restore(state: Any, facts: Mapping[str, Any]) -> tuple[Place, int, int]:
    """Where to go on, and the two seeds; `StateError` with both sides if the state is not this loader's."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state must be the dict that state_dict() gave, got {type(state).__name__}")
    if state.get("version") != VERSION:
        raise StateError(f"this version reads states of version {VERSION}, got version {state.get('version')!r}")
    numbers = {}
    for name in ("seed", "order_seed", "epoch", "position"):
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StateError(f"{name} in a state must be a non-negative int, got {value!r}")
        numbers[name] = value
    saved = state.get("facts")
    if not isinstance(saved, Mapping):
        raise StateError(f"facts in a state must be a dict, got {saved!r}")
    for name in sorted({*facts, *saved}):
        if saved.get(name) != facts.get(name):
            raise StateError(
                f"this state was saved with {name} {saved.get(name)!r}, but this loader has {facts.get(name)!r}: "
                "load it into a loader over the same data"
            )
    ahead = tuple(_pair(pair) for pair in state.get("ahead", ()))
    place = Place(numbers["epoch"], numbers["position"], ahead, state.get("stream"))
    return place, numbers["seed"], numbers["order_seed"]


def _pair(pair: Any) -> tuple[int, int]:
    try:
        position, samples = pair
        return int(position), int(samples)
    except (TypeError, ValueError):
        raise StateError(f"ahead in a state must hold pairs of ints, got {pair!r}") from None
