"""A loader in miniature: a plan, readers that have no processes around them, and answers in any order."""

from __future__ import annotations

import contextvars
import json
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import pytest

from agnoload import seeding, worker_info
from agnoload.fetching.stream_reader import StreamReader
from agnoload.messages import Reply
from agnoload.planning.state import EpochPosition, capture, restore
from agnoload.planning.stream_plan import StreamPlan
from agnoload.seeding import Purpose, Rewinder, SampleContext
from agnoload.streams import IterableDataset


class Plan(StreamPlan):
    """A plan that begins with, and gives, what a loader's state says of its stream."""

    def __init__(self, stream, *, state=None, epoch=0, **options):
        saved = {"version": 1, "seed": 0, "order_seed": 0, "epoch": epoch, "position": 0, "facts": {}, "stream": state}
        super().__init__(restore(saved, {}, "stream"), stream, **options)

    def state(self):
        return capture(EpochPosition(self.epoch, stream=self._saved()), {})["stream"]


class Worker:
    """One reader with a stream, a sample context and worker facts of its own."""

    def __init__(self, stream, number, workers, loader):
        self.stream = stream
        self.queue = deque()
        self.context = contextvars.copy_context()
        self.context.run(self._open, number, workers, loader)

    def _open(self, number, workers, loader):
        sample = SampleContext(Rewinder())
        seeding._context.set(sample)
        if workers:
            worker_info.set_worker_info(worker_info.WorkerInfo(number, workers, loader.seed, self.stream, loader.epoch))

        def begin(first, stride, rank):
            loader.begun.append((number, first, stride, rank))
            sample.at(loader.seed, loader.epoch, first, stride, rank)
            numbers = seeding.generator(loader.seed, loader.epoch, Purpose.GLOBALS, first, rank)
            random.seed(numbers.integers(1 << 62).item())
            np.random.seed(numbers.integers(1 << 32))

        self.reader = StreamReader(
            self.stream,
            worker=number,
            workers=max(1, workers),
            begin=begin,
            start=loader.plan.reader_start,
            self_sharded=loader.self_sharded and workers > 0,
            drop_last=loader.drop_last,
            rank=loader.rank,
            failed=loader.failed,
        )

    def read(self, request):
        return self.context.run(self.reader.read, request.lane_batch, request.lane, request.size)


@dataclass
class Loader:
    """Delivers the batches of one epoch of a stream: iterate it."""

    stream: Any
    size: int
    workers: int = 0
    seed: int = 7
    epoch: int = 0
    drop_last: bool = False
    self_sharded: bool = False
    rank: int = 0
    state: Any = None
    ahead: int = 1
    in_order: bool = True
    schedule: random.Random = field(default_factory=lambda: random.Random(0))
    failed: Any = None
    begun: list = field(default_factory=list)

    def __iter__(self):
        before = random.getstate(), np.random.get_state()
        try:
            yield from self._batches()
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])

    def _batches(self):
        state = None if self.state is None else json.loads(json.dumps(self.state))
        self.plan = plan = Plan(
            self.stream,
            size=self.size,
            workers=self.workers,
            drop_last=self.drop_last,
            self_sharded=self.self_sharded,
            rank=self.rank,
            state=state,
            epoch=self.epoch,
        )
        self.first_state = plan.state()
        copies = [cloudpickle.loads(cloudpickle.dumps(self.stream)) for _ in range(self.workers)] or [self.stream]
        self.pool = [Worker(copy, number, self.workers, self) for number, copy in enumerate(copies)]
        asked = deque()  # requests in order, and their samples once they are there
        while True:
            while len(asked) < self.ahead and (request := plan.next()) is not None:
                asked.append([request, request.indices])
                if request.owner is not None:
                    self.pool[request.owner].queue.append(request)
            if not asked:
                break
            entry = self._choose(asked)
            if entry[1] is None:
                worker = self.schedule.choice([worker for worker in self.pool if worker.queue])
                request = worker.queue.popleft()
                portion = worker.read(request)
                if portion.error is not None:
                    raise portion.error
                next(one for one in asked if one[0] == request)[1] = portion.samples
                plan.answered(request, Reply(request.number, samples=len(portion.samples), stream=portion.report))
                continue
            asked.remove(entry)
            request, samples = entry
            plan.delivered(request, Reply(request.number, samples=len(samples)))  # as a loader does if it holds nothing
            if samples:
                yield samples

    def _choose(self, asked):
        """What to deliver, or wait for, next."""
        if self.in_order:
            return asked[0]
        there = [entry for entry in asked if entry[1] is not None]
        return self.schedule.choice(there) if there else asked[0]


def deliver(stream, size, **options):
    return list(Loader(stream, size, **options))


class Count(IterableDataset):
    """0, 1, ... n - 1."""

    def __init__(self, n, length=True):
        self.n = n
        self.length = length

    def __iter__(self):
        return iter(range(self.n))

    def __len__(self):
        if not self.length:
            raise TypeError("none")
        return self.n


class Shards(IterableDataset):
    """Shard i yields (i, 0), (i, 1), ..."""

    def __init__(self, sizes, lanes=16):
        self.sizes = sizes
        self.num_shards = len(sizes)
        self.lanes = lanes

    def shard(self, number):
        return ((number, place) for place in range(self.sizes[number]))


class Resumable(IterableDataset):
    """0, 1, ... n - 1, and says where it stands; `pulled` counts what was read."""

    def __init__(self, n):
        self.n = n
        self.at = 0
        self.pulled = 0

    def __iter__(self):
        while self.at < self.n:
            self.at += 1
            self.pulled += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class ResumableShards(Shards):
    """Shards that say where they stand."""

    def shard(self, number):
        return _ResumableShard(number, self.sizes[number])


class _ResumableShard(Resumable):
    def __init__(self, number, n):
        super().__init__(n)
        self.number = number

    def __iter__(self):
        return ((self.number, place) for place in super().__iter__())


class SelfSplitting(IterableDataset):
    """Splits 0, 1, ... n - 1 over the workers by itself."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = worker_info.get_worker_info()
        step, start = (1, 0) if info is None else (info.num_workers, info.id)
        for value in range(start, self.n, step):
            yield value, seeding.current() and draws()


class Drawing(IterableDataset):
    """Each sample draws from all that it can, while it is read."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for value in range(self.n):
            yield value, draws()


class Wandering(IterableDataset):
    """Where it goes depends on what it draws: a shuffle written by hand."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        buffer = []
        for value in range(self.n):
            buffer.append(value)
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4) if value % 2 else int(seeding.sample_rng().integers(4)))
        while buffer:
            yield buffer.pop(np.random.randint(len(buffer)))


def draws():
    return seeding.sample_rng().integers(1 << 62).item(), int(np.random.randint(1 << 62)), random.getrandbits(62)


def with_draws(sample):
    return sample, draws()


def is_third(sample):
    return sample % 3 == 0


def negative(sample):
    return -sample


@pytest.fixture(scope="session")
def kit():
    """What the tests of streams are made with."""
    return _Kit


class _Kit:
    Loader = Loader
    Plan = Plan
    deliver = staticmethod(deliver)
    Count = Count
    Shards = Shards
    Resumable = Resumable
    ResumableShards = ResumableShards
    SelfSplitting = SelfSplitting
    Drawing = Drawing
    Wandering = Wandering
    draws = staticmethod(draws)
    with_draws = staticmethod(with_draws)
    is_third = staticmethod(is_third)
    negative = staticmethod(negative)
