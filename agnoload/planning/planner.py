"""`Planner`: which samples a loader's epochs are made of, as plans, and which saved states fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agnoload import seeding
from agnoload.errors import OptionError
from agnoload.options import Options
from agnoload.planning.plan import OrderPlan, Plan
from agnoload.planning.state import EpochPosition, Subject, capture, restore
from agnoload.planning.stream_plan import StreamPlan
from agnoload.planning.user_sampler import UserSampler, UserSamplerPlan
from agnoload.samplers.base import has_random_access, parts_of
from agnoload.samplers.basic import RandomSampler, SequentialSampler
from agnoload.samplers.distributed import DistributedSampler
from agnoload.samplers.order import batched
from agnoload.seeding import Rewinder, SampleContext
from agnoload.streams import need_length, resolve_ranks
from agnoload.system import rank_and_world
from agnoload.validate import number_of


class Planner:
    """Makes the plans of a loader's epochs; `world` is the rank and the number of ranks that its backend knows of.

    `say` gives a warning once.
    """

    def __init__(self, options: Options, world: tuple[int, int] | None, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self.is_split = bool(options.stream and resolve_ranks(options.dataset, world))
        """Whether the ranks share a stream, so that their seeds must agree."""
        sampler = options.sampler if options.batch_sampler is None else options.batch_sampler
        if sampler is None and not options.stream:
            shuffled = options.shuffle and len(options.dataset)
            sampler = RandomSampler(options.dataset) if shuffled else SequentialSampler(options.dataset)
        for part in parts_of(sampler) if world else ():
            if isinstance(part, DistributedSampler):
                part.resolve_ranks(world)
        wanted = getattr(sampler, "data_length", None)
        if wanted is not None and wanted != len(options.dataset):
            raise OptionError(
                f"the sampler was made for {number_of(wanted, 'sample')} (one label, weight or length each), "
                f"but the dataset has {len(options.dataset)}"
            )
        self.sampler: Any = sampler
        """What orders the samples, or the batches; None for a stream."""
        self.user_sampler = UserSampler(sampler)
        self.has_random_access = has_random_access(sampler)
        self.init_splits = options.worker_init_fn is not None
        """Whether `worker_init_fn` counts as what splits a stream over the workers."""
        self.rank, self.world_size = self.user_sampler.share or rank_and_world(world)

    def plan(self, place: EpochPosition, workers: int) -> Plan:
        """The requests of an epoch from `place` on."""
        options, sampler, order_seed = self._options, self.sampler, place.seeds.order
        if options.stream:
            plan = self._stream_plan(place, workers)
            for doubt in plan.doubts(options.dataset):
                self._say(doubt)
            return plan
        if not self.has_random_access:
            return UserSamplerPlan(place, self.user_sampler, options, self.rank)
        if options.batch_sampler is not None:
            return OrderPlan(place, sampler.batches(order_seed, place.epoch))
        batches = batched(sampler.order(order_seed, place.epoch), options.batch_size or 1, options.drop_last)
        return OrderPlan(place, batches, single=options.batch_size is None)

    def _stream_plan(self, place: EpochPosition, workers: int) -> StreamPlan:
        return StreamPlan(place, self._options, workers, self_sharded=workers > 0 and self.init_splits, rank=self.rank)

    def length(self, seed: int, epoch: int) -> int:
        """The number of batches of an epoch; `TypeError` where dataset or sampler has no length."""
        options = self._options
        if options.batch_sampler is not None:
            return len(options.batch_sampler)
        if options.stream:  # where shards are shuffled and then split, a rank has others in each epoch
            context = SampleContext(Rewinder())
            context.at(seed, epoch, 0, 1, 0)
            with seeding.use(context):
                total = need_length(options.dataset)
        else:
            total = len(self.sampler)
        size = options.batch_size or 1
        return total // size if options.drop_last else -(-total // size)

    def warn_if_unsplit(self) -> None:
        """Warn, once, that every rank loads everything, as far as it can be known."""
        if self.world_size > 1 and self.has_random_access and self.user_sampler.share is None:
            self._say(
                f"this process is rank {self.rank} of {self.world_size}, and nothing splits the dataset over the "
                "ranks: each loads all samples. Pass sampler=agnoload.DistributedSampler(dataset), or ignore this if "
                "that is what you want or each rank has a dataset of its own"
            )

    # ------------------------------------------------------------------------------------------------ states

    def save(self, place: EpochPosition) -> dict[str, Any]:
        """The state of a place, for `json.dumps`."""
        return capture(place, self._facts(bool(place.ahead)))

    def read(self, state: Any) -> EpochPosition:
        """The place that a state holds; `StateError` if it does not fit."""
        out_of_order = isinstance(state, Mapping) and bool(state.get("ahead"))
        stream = self._options.stream
        subject: Subject = "stream" if stream else "order" if self.has_random_access else "sampler"
        return restore(state, self._facts(out_of_order), subject)

    def restored(self, place: EpochPosition, workers: Callable[[], int]) -> Plan | None:
        """Check a place before it is taken over: the plan from there on, unless it must wait for the next `iter`."""
        if self._options.stream:
            self._stream_plan(place, workers())
        # A user's sampler is not touched before it is needed.
        return self.plan(place, 0) if self.has_random_access and place.begun else None

    def _facts(self, out_of_order: bool) -> dict[str, Any]:
        """What must be equal for a state to fit."""
        options = self._options
        facts: dict[str, Any] = {"kind": "stream", "dataset": type(options.dataset).__name__}
        if not options.stream:
            facts = {"kind": "map", "length": len(options.dataset), "sampler": self.user_sampler.identity()}
        if out_of_order:  # it lists batches of one rank
            facts |= {"batch_size": options.cut_size, "rank": self.rank}
        if out_of_order or not (options.stream or self.has_random_access):
            facts["world_size"] = self.world_size
        if options.generator is not None:
            facts["seeds"] = "from a generator"
        return facts
