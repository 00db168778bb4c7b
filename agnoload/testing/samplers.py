"""Checks of what plugs into this library, for its users' tests and its own: each raises `AssertionError` in words."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agnoload.samplers import BatchOrder, DistributedSampler, Order, SeededSampler, has_random_access
from agnoload.samplers.base import is_split, loader_epoch
from agnoload.testing._require import require
from agnoload.validate import number_of

_SEEDS = (0, 7)
_EPOCHS = (0, 1, 5)
_PLACES = 40
"""The number of places in an epoch, evenly spaced, where a sampler is stopped and resumed."""
_SPAN = 200
"""The number of items that are compared at the beginning and at the end of what is left."""


def check_sampler(make_sampler: Callable[[], Any]) -> None:
    """Check that a sampler keeps what loaders rely on; `make_sampler()` makes a fresh, equal one at each call.

    Every sampler: `len` (if it has one) is what comes in every epoch; it yields ints, or lists of ints; each loop is
    the next epoch, and one that is left early changes nothing that follows; two fresh ones yield the same (so a random
    one of your own needs a fixed seed); it survives pickling; `set_epoch`, if it has it, brings an epoch back; and
    `DistributedSampler` deals it out exactly.

    A sampler of this library moreover: the order is a function of `(seed, epoch)`, the same whether it is iterated,
    taken as a whole, piece by piece or from any border on, on 1 to 5 ranks; positions rise without a gap.

    >>> from agnoload.samplers import RandomSampler
    >>> check_sampler(lambda: RandomSampler(range(10)))
    """
    token = loader_epoch.set((_SEEDS[1], 0))  # samplers of ours that were given no seed would each draw one
    try:
        sampler = make_sampler()
        epochs = [_listed(sampler) for _ in range(2)]
        for epoch, items in enumerate(epochs):
            _check_items(sampler, items, epoch)
        _check_repeats(make_sampler, epochs)
        if not is_split(sampler):
            _check_ranks(make_sampler, epochs[0])
        if has_random_access(sampler):
            for seed in _SEEDS:
                for epoch in _EPOCHS:
                    _check_order(make_sampler, seed, epoch)
            if not is_split(sampler):
                _check_resplit(make_sampler)
    finally:
        loader_epoch.reset(token)


def _same(found: Sequence[Any], wanted: Sequence[Any], words: str) -> None:
    """Require two sequences to be equal; the text shows where they part."""
    for place, (one, other) in enumerate(zip(found, wanted, strict=False)):
        require(one == other, f"{words}: at place {place} came {one}, not {other}")
    require(len(found) == len(wanted), f"{words}: {number_of(len(found), 'item')} came, not {len(wanted)}")


def _listed(sampler: Iterable[Any]) -> list[Any]:
    return list(iter(sampler))  # not list(sampler), which would ask for a length first


def _check_items(sampler: Any, items: list[Any], epoch: int) -> None:
    if hasattr(sampler, "__len__"):
        text = (
            f"len must be the same in every epoch: {number_of(len(items), 'item')} came in epoch {epoch}, and len is "
        )
        text += f"{len(sampler)}; leave __len__ out if it varies"
        require(len(sampler) == len(items), text)
    for place, item in enumerate(items):
        keys = item if isinstance(item, list) else [item]
        odd = next((key for key in keys if type(key) is not int), None)
        require(odd is None, f"indices must be of type int, item {place} of epoch {epoch} holds {odd!r}")


def _check_repeats(make_sampler: Callable[[], Any], epochs: list[list[Any]]) -> None:
    fresh = make_sampler()
    _same(_listed(fresh), epochs[0], "two fresh samplers must yield the same: make a new one at each call, with a seed")
    left = make_sampler()
    next(iter(left), None)
    _same(_listed(left), epochs[1], "after a loop that was left early the next epoch must be the same as ever")
    copied = pickle.loads(pickle.dumps(make_sampler()))
    _same(_listed(copied), epochs[0], "a pickled copy must yield the same")
    if not hasattr(fresh, "set_epoch"):
        return
    for number in (0, 1, 0):
        fresh.set_epoch(number)
        found = _listed(fresh)
        advances = number == 0 or epochs[0] != epochs[1] or found == epochs[1]
        require(advances, "a second loop must be epoch 1, but it repeated epoch 0: move on to the next in __iter__")
        _same(found, epochs[number], f"set_epoch({number}) must bring epoch {number} back")


def _check_ranks(make_sampler: Callable[[], Any], whole: list[Any]) -> None:
    for world in range(1, 6):
        ranks = [_listed(DistributedSampler(make_sampler(), world, rank, tail="keep")) for rank in range(world)]
        _same(_in_turns(ranks), whole, f"{world} ranks in turns must yield what one does")


def _in_turns(ranks: list[list[Any]]) -> list[Any]:
    longest = max(map(len, ranks))
    return [items[place] for place in range(longest) for items in ranks if place < len(items)]


def _check_order(make_sampler: Callable[[], Any], seed: int, epoch: int) -> None:
    sampler: SeededSampler[Any] = make_sampler()
    words = f"seed {seed}, epoch {epoch}: "
    whole = _items(_order(sampler, seed, epoch))
    _same(_items(_order(make_sampler(), seed, epoch)), whole, words + "a fresh sampler must give the same order")
    order = _order(sampler, seed, epoch)
    require(len(order) == len(sampler), f"{words}the order has {number_of(len(order), 'item')}, len is {len(sampler)}")
    places = range(0, len(whole), max(1, len(whole) // _PLACES))
    for place in reversed(places):
        _same(_items(order, place, place + 1), whole[place : place + 1], words + "one item by itself must be the same")
    if isinstance(order, Order):
        for start, step in ((0, 2), (1, 3), (len(whole) // 2, 5)):
            found = order.indices(start, len(whole), step).tolist() if start < len(whole) else []
            _same(found, whole[start::step], words + f"indices(start={start}, step={step}) must skip")
    for place in (*places, len(whole)):
        rest = _order(make_sampler(), seed, epoch).after(order.reached(place))
        left = f"{words}what is left after {number_of(place, 'item')} must be the rest"
        require(len(rest) == len(whole) - place, f"{left}: {len(rest)} items are left, not {len(whole) - place}")
        _same(_items(rest, 0, min(_SPAN, len(rest))), whole[place : place + _SPAN], left)
        _same(_items(rest, max(0, len(rest) - _SPAN)), whole[max(place, len(whole) - _SPAN) :], left)
        if place < len(whole):
            where = _position(order, place)
            require(_position(rest, 0) == where, f"{words}the position of item {place} must stay {where}")
            reached = order.reached(place)
            require(is_split(sampler) or reached == where, f"{words}item {place} must be at {reached}, not {where}")


def _check_resplit(make_sampler: Callable[[], Any]) -> None:
    """Stop on three ranks, resume on two."""
    seed, epoch = _SEEDS[1], _EPOCHS[1]
    whole = _items(_order(make_sampler(), seed, epoch))
    for turns in sorted({0, 1, len(whole) // 6, len(whole) // 3}):
        first = [_order(DistributedSampler(make_sampler(), 3, rank, tail="keep"), seed, epoch) for rank in range(3)]
        done = _in_turns([_items(order)[:turns] for order in first])
        later = [_order(DistributedSampler(make_sampler(), 2, rank, tail="keep"), seed, epoch) for rank in range(2)]
        rest = _in_turns([_items(order.after(first[0].reached(turns))) for order in later])
        _same(done + rest, whole, f"{turns} turns on three ranks and the rest on two must yield what one rank does")


def _order(sampler: SeededSampler[Any], seed: int, epoch: int) -> Order | BatchOrder:
    return sampler.batches(seed, epoch) if sampler.yields_batches else sampler.order(seed, epoch)


def _items(order: Order | BatchOrder, start: int = 0, stop: int | None = None) -> list[Any]:
    end = len(order) if stop is None else stop
    if isinstance(order, Order):
        return list(order.indices(start, end).tolist())
    return [order.batch(number).tolist() for number in range(start, end)]


def _position(order: Order | BatchOrder, place: int) -> int:
    return order.first + place * order.stride if isinstance(order, Order) else order.position(place)
