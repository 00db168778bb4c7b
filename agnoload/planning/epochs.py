"""Which epoch comes next, on which seeds, and from which place in it: what a loader remembers between its iterators."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np

from agnoload.backend import registry
from agnoload.errors import OptionError, StateError
from agnoload.planning.plan import Progress
from agnoload.planning.state import EpochPosition, SamplerPosition, Seeds
from agnoload.planning.user_sampler import UserSampler
from agnoload.samplers.base import SeededSampler, effective_seed
from agnoload.seeding import check_seed, draw_from, draw_seed, no_generator
from agnoload.validate import LARGEST, shown

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)


class Epochs:
    """Counts epochs and hands out their seeds.

    `user_sampler` orders the samples; `seed` and `generator` are the loader's options. `default` is the seed where none
    is given: for what ranks share, so that they agree without being told. None: one is drawn.
    """

    def __init__(self, user_sampler: UserSampler, seed: int | None, generator: Any, default: int | None = None) -> None:
        self._user_sampler = user_sampler
        self._sampler = sampler = user_sampler.sampler
        self._given = seed
        self._numbers = None if generator is None else Numbers(generator)
        self._next = EpochPosition(0, seeds=Seeds(0, 0), begun=False)
        """Where the next iterator begins, unless one is under way."""
        self._progress: Progress | None = None
        if generator is None:
            drawn = next((known for known in (seed, default) if known is not None), None)
            drawn = draw_seed() if drawn is None else drawn
            self._next = self._next._replace(seeds=Seeds(drawn, effective_seed(sampler, seed, drawn)), begun=True)

    @property
    def place(self) -> EpochPosition:
        """Where the data that was yielded ends."""
        return self._next if self._progress is None else self._progress.position

    @property
    def epoch(self) -> int:
        """The epoch that is running, else the one that the next iterator begins."""
        progress = self._progress
        if progress is not None and progress.over and progress.asked:
            return progress.epoch + 1
        return self.place.epoch

    @property
    def start(self) -> EpochPosition:
        """The start of that epoch, for a copy of the loader."""
        place, left = self.place, self._user_sampler.unfinished()
        begun = place.begun and place.epoch == self.epoch
        sampler = SamplerPosition(None, left[0]) if left else place.sampler if not place.position else None
        return EpochPosition(self.epoch, seeds=place.seeds, begun=begun, sampler=sampler)

    def twin(self) -> Epochs:
        """Others, that begin where these stand and do not advance the generator: for measurements."""
        self._heed()
        twin = Epochs(self._user_sampler, self._given, None)
        twin._next = EpochPosition(self.place.epoch, seeds=self.place.seeds)
        return twin

    @property
    def order_seed(self) -> int | None:
        """What the orders of all epochs run on; None where each has its own."""
        return self.place.seeds.order if self._numbers is None else None

    def set_epoch(self, epoch: int) -> None:
        """The next iterator begins this epoch, unless a restored state goes on within it anyway."""
        epoch = check_seed(epoch, "epoch")
        if epoch > LARGEST:
            raise OptionError(f"epoch must be below 2**63, got {epoch}")
        if self._progress is not None or self._next.epoch != epoch:
            self._next = EpochPosition(epoch, seeds=self.place.seeds, begun=self._numbers is None)
            self._progress = None

    def _heed(self) -> None:
        """A sampler may have been asked for an epoch: that is heeded once."""
        asked = self._user_sampler.pop_epoch()
        if asked is not None:
            self.set_epoch(asked)

    def begin(self) -> EpochPosition:
        """Where the iterator begins that is made now."""
        self._heed()
        if self._progress is not None and self._progress.over and not self._progress.asked:
            return self._progress.position  # made only to see whether it can be made: that is not an epoch
        if self._progress is not None:
            return self.following(EpochPosition(self._progress.epoch + 1, seeds=self.place.seeds, begun=False))
        return self._next if self._next.begun else self.following(self._next)

    def following(self, place: EpochPosition) -> EpochPosition:
        """The beginning of an epoch, with its seeds."""
        seeds = place.seeds
        if self._numbers is not None:
            number = self._numbers.number(seeds.drawn)
            seeds = Seeds(number, effective_seed(self._sampler, number, number), seeds.drawn + 1)
        return place._replace(seeds=seeds, begun=True)

    def began(self, progress: Progress) -> None:
        """An iterator has been made."""
        self._progress = progress

    def check(self, place: EpochPosition) -> None:
        """`StateError` if a seed that was given is not the one that a state was saved with."""
        seeds, given = place.seeds, self._given
        if bool(seeds.drawn) != (self._numbers is not None) and (seeds.drawn or place.begun):
            wanted = "0 without a generator" if self._numbers is None else "1 or more with a generator"
            raise StateError(f"drawn in a state must be {wanted}, got {seeds.drawn}")
        if given is not None and seeds.samples != given:
            raise StateError(
                f"this state was saved with seed {shown(seeds.samples)}, but this loader was given seed {given}"
            )
        order = self._sampler.seed if isinstance(self._sampler, SeededSampler) else None
        if given is not None:
            order = effective_seed(self._sampler, given, given)
        if order is not None and order != seeds.order:
            raise StateError(
                f"this state was saved with a sampler on seed {shown(seeds.order)}, but this loader's is on {order}: "
                "give the sampler, or the loader, the seed that it had"
            )

    def restore(self, place: EpochPosition) -> None:
        """The next iterator begins where a state was taken."""
        if self._numbers is not None:
            self._numbers.align(place.seeds)
        self._user_sampler.pop_epoch()
        self._next = place
        self._progress = None


class Numbers:
    """The seeds that a generator gives, one for each epoch; what was drawn once is kept, so any may be asked again."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._drawn: list[int] = []
        if isinstance(generator, (int, np.integer)):
            draw_from(generator)
        elif not (isinstance(generator, _KINDS) or registry.gives_seeds(generator)):
            raise no_generator(generator)

    def number(self, place: int) -> int:
        """The seed at a place in the sequence."""
        while len(self._drawn) <= place:
            self._drawn.append(draw_from(self._generator))
        return self._drawn[place]

    def align(self, seeds: Seeds) -> None:
        """Go on behind the seed that a saved state ends with.

        A generator that gives it at its place is as it was when the first loader began: what that one drew is drawn
        again. Any other one is taken to be where the user wants it.
        """
        last = seeds.drawn - 1
        if last < 0 or (len(self._drawn) > last and self._drawn[last] == seeds.samples):
            return
        try:
            trial = Numbers(copy.deepcopy(self._generator))
            trial._drawn = self._drawn[:]
        except Exception:  # it cannot be copied
            trial = self
        if trial.number(last) == seeds.samples:
            self.number(last)
        else:
            self._drawn = [*self._drawn[:last], *([0] * (last - len(self._drawn))), seeds.samples]
