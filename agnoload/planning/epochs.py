"""Which epoch comes next, on which seeds, and from which place in it: what a loader remembers between its iterators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from agnoload.backend import registry
from agnoload.errors import OptionError, StateError
from agnoload.planning.plan import Progress
from agnoload.planning.state import EpochPosition, EpochSeeds, SamplerPosition
from agnoload.planning.user_sampler import UserSampler
from agnoload.samplers.base import effective_seed, given_seed
from agnoload.seeding import check_seed, draw_from, draw_seed, no_generator
from agnoload.validate import LARGEST, shown


class EpochCounter:
    """Counts epochs and hands out their seeds.

    `user_sampler` orders the samples; `seed` and `generator` are the loader's options. Where none is given, the
    seed is `default`, so that ranks which share a stream agree; without a default one is drawn. A generator gives one
    seed for each epoch, when the epoch begins.
    """

    def __init__(self, user_sampler: UserSampler, seed: int | None, generator: Any, default: int | None = None) -> None:
        self._user_sampler = user_sampler
        self._given = seed
        self._generator = generator
        self._drawn: list[int] = []
        """The seeds that the generator has given; kept, so that a state of an earlier epoch can be loaded."""
        self._next = EpochPosition(0, seeds=EpochSeeds(0, 0), begun=False)
        """Where the next iterator begins, unless one is under way."""
        self._running: Progress | None = None
        if generator is None:
            known = default if seed is None else seed
            drawn = draw_seed() if known is None else known
            self._next = EpochPosition(0, seeds=EpochSeeds(drawn, effective_seed(user_sampler.sampler, seed, drawn)))
        elif isinstance(generator, (int, np.integer)):
            draw_from(generator)  # it checks the number
        elif not (isinstance(generator, _GENERATORS) or registry.gives_seeds(generator)):
            raise no_generator(generator)

    @property
    def place(self) -> EpochPosition:
        """Where the data that was yielded ends."""
        return self._next if self._running is None else self._running.position

    @property
    def epoch(self) -> int:
        """The epoch that is running, else the one that the next iterator begins."""
        running = self._running
        if running is not None and running.over and running.asked:
            return running.epoch + 1
        return self.place.epoch

    @property
    def start(self) -> EpochPosition:
        """The start of that epoch, for a copy of the loader."""
        place, left = self.place, self._user_sampler.unfinished()
        begun = place.begun and place.epoch == self.epoch
        sampler = SamplerPosition(None, left[0]) if left else place.sampler if not place.position else None
        return EpochPosition(self.epoch, seeds=place.seeds, begun=begun, sampler=sampler)

    def twin(self) -> EpochCounter:
        """Another one that begins at this epoch and leaves the generator alone: for measurements."""
        self.heed_sampler()
        twin = EpochCounter(self._user_sampler, None, None)
        twin._next = EpochPosition(self.place.epoch, seeds=self.place.seeds._replace(drawn=0))
        return twin

    @property
    def order_seed(self) -> int | None:
        """The seed of the orders of all epochs; None where each epoch has its own."""
        return self.place.seeds.order if self._generator is None else None

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator begin this epoch, unless a restored state is within that epoch."""
        epoch = check_seed(epoch, "epoch")
        if epoch > LARGEST:
            raise OptionError(f"epoch must be below 2**63, got {epoch}")
        if self._running is not None or self._next.epoch != epoch:
            self._next = EpochPosition(epoch, seeds=self.place.seeds, begun=self._generator is None)
            self._running = None

    def heed_sampler(self) -> None:
        """If the user has set an epoch on the sampler, begin that one: once."""
        asked = self._user_sampler.pop_epoch()
        if asked is not None:
            self.set_epoch(asked)

    def begin(self) -> EpochPosition:
        """Where an iterator begins that is created now."""
        self.heed_sampler()
        running = self._running
        if running is not None and running.over and not running.asked:
            return running.position  # nobody has asked that iterator for a batch: it does not count as an epoch
        if running is not None:
            return self.following(EpochPosition(running.epoch + 1, seeds=self.place.seeds, begun=False))
        return self._next if self._next.begun else self.following(self._next)

    def following(self, place: EpochPosition) -> EpochPosition:
        """The beginning of an epoch, with its seeds."""
        seeds = place.seeds
        if self._generator is not None:
            seed = self._seed_number(seeds.drawn)
            seeds = EpochSeeds(seed, effective_seed(self._user_sampler.sampler, seed, seed), seeds.drawn + 1)
        return place._replace(seeds=seeds, begun=True)

    def began(self, running: Progress) -> None:
        """An iterator has been created."""
        self._running = running

    def check(self, place: EpochPosition) -> None:
        """`StateError` if a seed that was given is not the one that a state was saved with."""
        seeds, given = place.seeds, self._given
        if bool(seeds.drawn) != (self._generator is not None) and (seeds.drawn or place.begun):
            wanted = "0 without a generator" if self._generator is None else "1 or more with a generator"
            raise StateError(f"drawn in a state must be {wanted}, got {seeds.drawn}")
        if given is not None and seeds.samples != given:
            raise StateError(
                f"this state was saved with seed {shown(seeds.samples)}, but this loader was given seed {given}"
            )
        own = given_seed(self._user_sampler.sampler)
        order = given if own is None else own
        if order is not None and order != seeds.order:
            raise StateError(
                f"this state was saved with a sampler on seed {shown(seeds.order)}, but this loader's is on {order}: "
                "give the sampler, or the loader, the seed that it had"
            )

    def restore(self, place: EpochPosition) -> None:
        """Let the next iterator begin where a state was saved; a generator is asked for the seeds up to there."""
        seeds = place.seeds
        if seeds.drawn and (found := self._seed_number(seeds.drawn - 1)) != seeds.samples:
            raise StateError(
                f"this state was saved with a generator that gave seed {shown(seeds.samples)} as number {seeds.drawn}, "
                f"but this loader's gives {found}: seed it as the first loader's was, and draw nothing from it before"
            )
        self._user_sampler.pop_epoch()
        self._next = place
        self._running = None

    def _seed_number(self, number: int) -> int:
        while len(self._drawn) <= number:
            self._drawn.append(draw_from(self._generator))
        return self._drawn[number]


_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
