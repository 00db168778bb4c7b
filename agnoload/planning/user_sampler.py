"""Samplers that cannot be seen through, most of them strangers': what we can learn of them, tell them, and save.

Such a sampler is iterated, in the process that iterates the loader. What it draws from the process's generators
follows from the loader's seed and the epoch, and the user's own states are put back, so its order is the same in
every run unless it has a source of its own.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import chain, islice
from typing import Any

import numpy as np

from agnoload.errors import SampleStopped, StateError
from agnoload.global_rng import IsolatedGlobalRng
from agnoload.planning.plan import Cut, Plan, key_of, keys_of
from agnoload.planning.state import Place
from agnoload.protocols import Stateful
from agnoload.samplers.base import SeededSampler
from agnoload.samplers.order import BLOCK
from agnoload.streams import go_back
from agnoload.validate import shown, whole

DEPTH = 8
"""A sampler in a sampler in a sampler: so far we look."""
_END = object()
_DRAWS_NOTHING = (list, tuple, range, np.ndarray)


class Stranger:
    """A sampler, with what it is made of."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.parts = list(_chain(sampler))
        self._shown = 0
        self._begun: list[tuple[Plan, Any]] = []
        self._back: list[Any] = []

    def share(self) -> tuple[int, int] | None:
        """The rank and the number of ranks that it has been made for, by the names that are usual; None if unknown."""
        for part in self.parts:
            rank, world = getattr(part, "rank", None), getattr(part, "num_replicas", None)
            if type(rank) is type(world) is int and 0 <= rank < world:
                return rank, world
        return None

    def asked(self) -> int | None:
        """The epoch that the user has told it since we did; None if none."""
        for part in self.parts:
            if isinstance(part, SeededSampler):
                asked = part.pop_epoch()
                if asked is not None:
                    return asked
        shown = self._epoch_shown()
        return None if shown == self._shown else shown

    def forget(self) -> None:
        """What the user has told it until now does not count any more."""
        self.asked()
        self._shown = self._epoch_shown()

    def tell(self, seed: int, epoch: int) -> None:
        """An epoch begins."""
        for part in self.parts:
            if isinstance(part, SeededSampler):
                part.lend_seed(seed)
        for part in self.parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
                break
        self.forget()

    def left(self) -> list[Any]:
        """The state where the epoch began that the user has not had whole; nothing if there is none such."""
        return [state for plan, state in self._begun if not plan.complete][:1]

    def leave(self) -> None:
        """The next epoch begins, wherever workers had prefetched to: the sampler goes back if one was left early."""
        self._back = self.left()
        self._begun.clear()

    def begin(self, plan: Plan, holder: Any) -> None:
        """Note where an epoch begins: where the sampler stands, or where the one began that was left early."""
        while self._back:
            go_back(holder, self._back.pop())
        self._begun = [begun for begun in self._begun if not begun[0].complete]
        with suppress(Exception):  # it has no state before it is iterated
            self._begun.append((plan, copy.deepcopy(holder.state_dict())))

    def _epoch_shown(self) -> int:
        """What the first stranger that can be told an epoch shows as its own."""
        for part in self.parts:
            if callable(getattr(part, "set_epoch", None)) and not isinstance(part, SeededSampler):
                epoch = getattr(part, "epoch", None)
                return epoch if type(epoch) is int and epoch >= 0 else self._shown
        return self._shown

    def identity(self) -> str:
        """What must be equal for a saved state to fit."""
        if isinstance(self.sampler, SeededSampler):
            return self.sampler.identity()
        try:
            return f"{type(self.sampler).__name__}({len(self.sampler)})"
        except (TypeError, NotImplementedError):
            return type(self.sampler).__name__


def _chain(sampler: Any) -> Iterator[Any]:
    for _ in range(DEPTH):
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner
        if not hasattr(sampler, "__iter__"):
            return


class ForeignPlan(Plan):
    """Batches of such a sampler: counted here, and after a resume passed over one by one, without loading any.

    A sampler with `state_dict` and `load_state_dict` goes on by itself: what it says behind each batch is what a state
    saves once the batch has been yielded. Of another one a check sum of the keys is saved.
    """

    source = "sampler"

    def __init__(
        self, place: Place, stranger: Stranger, batch_size: int | None, drop_last: bool, *, batched: bool, rank: int
    ) -> None:
        self._stranger = stranger
        self._size = batch_size
        self._drop_last = drop_last
        self._batched = batched
        self._rank = rank
        self._sum = 0
        self._stateful: Any = next((part for part in stranger.parts if isinstance(part, Stateful)), None)
        self._last: Any = None
        plain = type(stranger.sampler) in _DRAWS_NOTHING
        self._private = None if plain else IsolatedGlobalRng(place.seeds.order, place.epoch)
        super().__init__(place)

    def _pull(self) -> Cut | None:
        try:
            with self._private or nullcontext():
                return self._pulled()
        except GeneratorExit as error:
            raise SampleStopped("GeneratorExit was raised by the sampler: it is not the end of the data") from error
        finally:
            if self._private is not None:
                self._private.restore()

    def _pulled(self) -> Cut | None:
        cut = super()._pull()
        if cut is None and any(part is self._stateful for part in self._stranger.parts):
            self._last = self._mark()
        return cut

    def place_after(self, cut: Cut | None, ahead: list[Cut]) -> Place:
        return super().place_after(cut, ahead)._replace(sampler=self.place.sampler if cut is None else cut.mark)

    def end(self) -> Place:
        return super().end()._replace(sampler=self._last)

    def _cuts(self, position: int) -> Iterator[Cut]:
        items = self._open()
        yield from self._whole(items, position) if self._batched else self._cut(items, position)

    def _whole(self, items: Iterator[Any], position: int) -> Iterator[Cut]:
        """The batches of a batch sampler."""
        at = position if self._stateful is not None else 0
        while (batch := next(items, _END)) is not _END:
            keys = self._counted(batch)
            start, at = at, at + len(keys)
            if start < position < at:
                raise StateError(
                    f"position {position} of the state lies inside a batch of positions {start} to {at - 1}: go on "
                    "with the batches that it was saved with"
                )
            if at == position:
                self._verify()
            if start < position:
                self.number += 1
            else:
                yield self._next_cut(keys, start, at)
        self._within(at)

    def _cut(self, items: Iterator[Any], position: int) -> Iterator[Cut]:
        """Batches cut from what a sampler of single keys gives."""
        at = position if self._stateful is not None else 0
        while keys := list(islice(items, min(position - at, BLOCK))):
            at += len(self._counted(keys))
        self._verify()
        size = self._size or 1
        while keys := list(islice(items, size)):
            if len(keys) == size or not self._drop_last:
                start, at = at, at + len(keys)
                counted = self._counted(keys)
                yield self._next_cut(key_of(keys[0]) if self._size is None else counted, start, at)
        self._within(at)

    def _next_cut(self, keys: Any, start: int, stop: int) -> Cut:
        return Cut(keys, start, 1, self._rank, stop, start=start, mark=self._mark())

    # ------------------------------------------------------------------------------------------------ its state

    def _open(self) -> Iterator[Any]:
        """Begin the epoch, or let the sampler go back to where it stood."""
        stranger, holder, position = self._stranger, self._stateful, self.place.position
        saved = checked(self.place.sampler, position)
        border = "state" in saved and not position  # what it said behind its last batch: it may or may not begin anew
        if holder is not None:
            stranger.begin(self, holder)
        if border and holder is not None:
            go_back(holder, saved["state"])
        stranger.tell(self.place.seeds.order, self.epoch)
        if holder is not None and position and "state" in saved:
            go_back(holder, saved["state"])
        iterator: Iterator[Any] = iter(stranger.sampler)
        if holder is None and isinstance(iterator, Stateful):
            self._stateful = holder = iterator
            if position and "state" in saved:
                go_back(iterator, saved["state"])
        if saved and ("state" in saved) != (holder is not None):
            has = ("without", "with") if holder is not None else ("with", "without")
            raise StateError(
                f"this state was saved with a sampler {has[0]} state_dict and load_state_dict, but this loader's, "
                f"{type(stranger.sampler).__name__}, is one {has[1]}"
            )
        if border:
            for first in iterator:
                return chain([first], iterator)
            stranger.tell(self.place.seeds.order, self.epoch)
            return iter(stranger.sampler)
        return iterator

    def _mark(self) -> dict[str, Any]:
        """What a state needs to go on behind what was taken last."""
        if self._stateful is None:
            return {"sum": self._sum}
        return {"state": copy.deepcopy(self._stateful.state_dict())}  # it may go on changing what it gave

    def _counted(self, batch: Any) -> Any:
        keys = keys_of(batch)
        if self._stateful is None:
            self._sum = zlib.crc32(_bytes(keys), self._sum)
        return keys

    def _verify(self) -> None:
        """What was passed over must be what was delivered."""
        saved = self.place.sampler
        if saved is not None and "sum" in saved and saved["sum"] != self._sum:
            raise StateError(
                f"the sampler, {type(self._stranger.sampler).__name__}, gives other indices than when this state was "
                f"saved (check sums {saved['sum']} and {self._sum}), so it cannot be continued: give it a seed of its "
                "own, or state_dict and load_state_dict"
            )

    def _within(self, found: int) -> None:
        place = self.place
        wanted = place.ahead[-1][1] if place.ahead else place.position
        if found < wanted:
            raise StateError(f"position {wanted} of the state lies beyond the {found} samples that the sampler gives")


def checked(saved: Any, position: int) -> dict[str, Any]:
    """What a state holds of a sampler."""
    if saved is None and not position:
        return {}
    if not isinstance(saved, dict) or set(saved) not in ({"state"}, {"sum"}):
        raise StateError(f"sampler in a state must be a dict of 'state' or of 'sum', got {shown(saved)}")
    if "sum" in saved:
        whole(saved["sum"], "the check sum of a sampler")
    return saved


def _bytes(keys: Any) -> bytes:
    """Integers and text among keys, the same however they are cut into batches."""
    if isinstance(keys, np.ndarray):
        return keys.tobytes()
    return b"".join(_bytes_of(key) for key in keys)


def _bytes_of(key: Any) -> bytes:
    if type(key) is int and -(1 << 63) <= key < 1 << 63:
        return key.to_bytes(8, sys.byteorder, signed=True)
    return key.encode("utf-8", "replace") if isinstance(key, str) else b""
