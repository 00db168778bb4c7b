"""Samplers without random access, most of them user-defined: what we can learn of them, tell them, and save.

Such a sampler is iterated, in the process that iterates the loader. What it draws from the process's generators
follows from the loader's seed and the epoch, and the user's own states are put back, so its order is the same in
every run unless it has a source of its own.
"""

from __future__ import annotations

import copy
import operator
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import chain, islice
from typing import Any

import numpy as np

from agnoload.errors import OptionError, SampleStopped, StateError
from agnoload.global_rng import IsolatedGlobalRng
from agnoload.messages import Reply, Request, request_numbers
from agnoload.options import Options
from agnoload.planning.plan import OrderedPlan, Plan
from agnoload.planning.state import EpochPosition, SamplerPosition
from agnoload.protocols import Stateful
from agnoload.samplers.base import SeededSampler, loader_epoch, parts_of, pop_epoch
from agnoload.samplers.order import BLOCK
from agnoload.streams import go_back

_END = object()
_DRAWS_NOTHING = (list, tuple, range, np.ndarray)


class UserSampler:
    """A sampler, with the samplers inside it."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.parts = parts_of(sampler)
        users = [part for part in self.parts if not isinstance(part, SeededSampler)]
        self._settable = next((part for part in users if callable(getattr(part, "set_epoch", None))), None)
        """The first user-defined one that has `set_epoch`."""
        self.share: tuple[int, int] | None = None
        """The rank and the number of ranks that it was made for, by the usual names; None if unknown."""
        for part in reversed(self.parts):
            rank, world = getattr(part, "rank", None), getattr(part, "num_replicas", None)
            if type(rank) is type(world) is int and 0 <= rank < world:
                self.share = rank, world
        self._shown = 0
        """The epoch that it showed when we set one."""
        self._started: list[tuple[Plan, Any]] = []
        """Plans of epochs, with the state that the sampler had before each; those delivered whole are dropped."""
        self._rewind: list[Any] = []

    def identity(self) -> str:
        """What must be equal for a saved state to fit. The length of one with `set_epoch` may differ by epoch."""
        if isinstance(self.sampler, SeededSampler):
            return self.sampler.identity()
        if self._settable is not None:
            return type(self.sampler).__name__
        try:
            return f"{type(self.sampler).__name__}({len(self.sampler)})"
        except (TypeError, NotImplementedError):
            return type(self.sampler).__name__

    # ------------------------------------------------------------------------------------------------ its epoch

    def set_epoch(self, epoch: int) -> None:
        """An epoch begins."""
        if self._settable is not None:
            self._settable.set_epoch(epoch)
        self.pop_epoch()

    def pop_epoch(self) -> int | None:
        """The epoch that the user has set on it since the last call; None if none."""
        before, shown = self._shown, getattr(self._settable, "epoch", None)
        if type(shown) is int and shown >= 0:
            self._shown = shown
        asked = pop_epoch(self.sampler)
        return self._shown if asked is None and self._shown != before else asked

    # ------------------------------------------------------------------------------------------------ its own state

    def unfinished(self) -> list[Any]:
        """Its state at the start of the epoch that the user has not received whole, if there is one."""
        return [state for plan, state in self._started if not plan.delivered_all][:1]

    def leave(self) -> None:
        """The next iterator begins, however far workers had prefetched: an epoch that was left early is undone."""
        self._rewind = self.unfinished()
        self._started.clear()

    def start(self, plan: Plan, holder: Any) -> None:
        """An epoch begins: note the state before it; if the one before was left early, that is where it began."""
        while self._rewind:
            go_back(holder, self._rewind.pop())
        self._started = [started for started in self._started if not started[0].delivered_all]
        with suppress(Exception):  # it has no state before it is iterated
            self._started.append((plan, copy.deepcopy(holder.state_dict())))


class UserSamplerPlan(OrderedPlan):
    """Batches of such a sampler. After a resume those that were delivered are passed over, without loading any.

    A sampler with `state_dict` and `load_state_dict` resumes by itself: its state after each batch is what our state
    holds once the batch has been yielded. Of another one our state holds a check sum of the keys that it gave.
    """

    source = "sampler"

    def __init__(self, start: EpochPosition, user: UserSampler, options: Options, rank: int) -> None:
        self._user = user
        self._batched = options.batch_sampler is not None
        self._size = options.cut_size
        self._drop_last = options.drop_last
        self._rank = rank
        self._sum = 0
        self._stateful: Any = next((part for part in user.parts if isinstance(part, Stateful)), None)
        self._saved: dict[int, SamplerPosition] = {}
        """The sampler's position after each batch, by the batch's number."""
        self._end_position: SamplerPosition | None = None
        plain = type(user.sampler) in _DRAWS_NOTHING
        self._private = None if plain else IsolatedGlobalRng(start.seeds.order, start.epoch)
        self._lent = start.seeds.order, start.epoch
        super().__init__(start, 0 if self._batched else -(-start.position // (self._size or 1)))

    def _pull(self) -> Request | None:
        token = loader_epoch.set(self._lent)
        try:
            with self._private or nullcontext():
                request = super()._pull()
                if request is None and any(part is self._stateful for part in self._user.parts):
                    self._end_position = self._sampler_position()
                return request
        except GeneratorExit as error:
            raise SampleStopped("GeneratorExit was raised by the sampler: it is not the end of the data") from error
        finally:
            loader_epoch.reset(token)
            if self._private is not None:
                self._private.restore()

    def delivered(self, request: Request, reply: Reply) -> None:
        super().delivered(request, reply)
        while self._saved and (oldest := next(iter(self._saved))) < self._watermark - 1:
            del self._saved[oldest]

    def position(self) -> EpochPosition:
        if self.delivered_all:
            sampler = self._end_position
        else:
            sampler = self.start.sampler if self._last is None else self._saved[self._last.batch]
        return super().position()._replace(sampler=sampler)

    # ------------------------------------------------------------------------------------------------ its batches

    def _requests(self) -> Iterator[Request]:
        sampler, position = self._open(), self.start.position
        at = position if self._stateful is not None else 0
        if not self._batched:
            while keys := list(islice(sampler, min(position - at, BLOCK))):
                at += len(self._counted(keys))
            self._verify()
        for keys, count in self._cut(sampler):
            low, at = at, at + count
            if low < position < at:
                raise StateError(
                    f"position {position} of the state lies inside a batch of positions {low} to {at - 1}: resume with "
                    "the batches that it was saved with"
                )
            if at == position:
                self._verify()
            if low < position:
                self.before = self.batches = self._watermark = self.batches + 1
            else:
                self._saved[self.batches] = self._sampler_position()
                yield Request(
                    next(request_numbers), self.epoch, self.batches, keys, low, self.seed, 1, self._rank,
                    start=low, stop=at,
                )  # fmt: skip
        wanted = self.start.ahead[-1][1] if self.start.ahead else position
        if at < wanted:
            raise StateError(f"position {wanted} of the state lies beyond the {at} samples that the sampler gives")

    def _cut(self, sampler: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        """What each batch is asked for by, and how many samples it has."""
        if self._batched:
            while (batch := next(sampler, _END)) is not _END:
                keys = self._counted(batch)
                yield keys, len(keys)
            return
        size = self._size or 1
        while batch := list(islice(sampler, size)):
            if len(batch) == size or not self._drop_last:
                keys = self._counted(batch)
                yield key_of(batch[0]) if self._size is None else keys, len(batch)

    def _open(self) -> Iterator[Any]:
        """Begin the epoch, or let the sampler resume within it."""
        user, holder, position, saved = self._user, self._stateful, self.start.position, self.start.sampler
        own = saved is not None and saved.sum is None
        state = saved.state if saved is not None else None
        # The state of a sampler after its last batch: iterated from there, it may give the next epoch or nothing.
        at_end = own and not position
        if holder is not None:
            user.start(self, holder)
        if at_end and holder is not None:
            go_back(holder, state)
        user.set_epoch(self.epoch)
        if holder is not None and position and own:
            go_back(holder, state)
        iterator: Iterator[Any] = iter(user.sampler)
        if holder is None and isinstance(iterator, Stateful):
            self._stateful = holder = iterator
            if position and own:
                go_back(iterator, state)
        if saved is not None and own != (holder is not None):
            has = ("without", "with") if holder is not None else ("with", "without")
            raise StateError(
                f"this state was saved with a sampler {has[0]} state_dict and load_state_dict, but this loader's, "
                f"{type(user.sampler).__name__}, is one {has[1]}"
            )
        if at_end:
            for first in iterator:
                return chain([first], iterator)
            user.set_epoch(self.epoch)
            return iter(user.sampler)
        return iterator

    # ------------------------------------------------------------------------------------------------ its position

    def _sampler_position(self) -> SamplerPosition:
        """What a state needs to resume after what the sampler gave last."""
        if self._stateful is None:
            return SamplerPosition(self._sum)
        return SamplerPosition(None, copy.deepcopy(self._stateful.state_dict()))  # it may change what it gave

    def _counted(self, batch: Any) -> Any:
        keys = keys_of(batch)
        if self._stateful is None:
            self._sum = zlib.crc32(_bytes(keys), self._sum)
        return keys

    def _verify(self) -> None:
        """What was passed over must be what was delivered: an unseeded sampler would skip and repeat in silence."""
        saved = self.start.sampler
        if saved is not None and saved.sum is not None and saved.sum != self._sum:
            raise StateError(
                f"the sampler, {type(self._user.sampler).__name__}, gives other indices than when this state was saved "
                f"(check sums {saved.sum} and {self._sum}), so it cannot be resumed: make it with the same arguments, "
                "on the same rank; one that draws needs a seed of its own, one that changes by epoch set_epoch(n), any "
                "other state_dict and load_state_dict"
            )


def keys_of(batch: Any) -> Any:
    """A user's batch as an int64 array where it is one, else as a list of keys."""
    if isinstance(batch, np.ndarray) and batch.ndim == 1 and batch.dtype.kind in "iu":
        if np.can_cast(batch.dtype, np.int64):
            return batch.astype(np.int64, copy=False)
        batch = batch.tolist()
    try:
        batch = iter(batch)
    except TypeError:
        raise OptionError(
            f"a batch_sampler must yield batches of indices, got {batch!r}: a sampler of single indices is sampler="
        ) from None
    keys = [key_of(key) for key in batch]
    if keys and all(type(key) is int for key in keys):
        try:
            return np.array(keys, np.int64)
        except OverflowError:
            return keys
    return keys


def key_of(key: Any) -> Any:
    """A user's key: untouched, but an index is a Python int, also one in an array or tensor without axes."""
    if type(key) is int or getattr(key, "ndim", None) != 0:
        return key
    try:
        index = operator.index(key)
    except TypeError:  # not an integer
        return key
    return index if isinstance(key, np.generic) or "bool" not in str(key.dtype) else key


def _bytes(keys: Any) -> bytes:
    """Integers and text among keys, the same however they are cut into batches."""
    if isinstance(keys, np.ndarray):
        return keys.tobytes()
    parts = []
    for key in keys:
        if type(key) is int and -(1 << 63) <= key < 1 << 63:
            parts.append(key.to_bytes(8, sys.byteorder, signed=True))
        elif isinstance(key, str):
            parts.append(key.encode("utf-8", "replace"))
    return b"".join(parts)
