"""Samples by their indices: in one call or one by one, tried again, left out or replaced as the error policy says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agnoload import seeding
from agnoload.datasets import Batch, getitems_of
from agnoload.errors import OptionError, SampleStopped, add_note, one_line
from agnoload.fetching.error_policy import REPLACEMENTS, ErrorPolicy
from agnoload.global_rng import RequestGenerators
from agnoload.messages import EMPTY, Failure, Request, StreamReport
from agnoload.seeding import Purpose, SampleContext
from agnoload.validate import number_of


class Loaded(NamedTuple):
    """The samples of a request, not collated yet."""

    samples: Any
    """A list, or a `Batch`; `EMPTY` where all that was asked for is left out, or the stream is at its end."""
    number: int
    """How many samples these are."""
    keys: list[Any] | None = None
    """The key of each sample, where samples have one."""
    failed: Sequence[Failure] = ()
    report: StreamReport | None = None


class IndexedSource:
    """Loads the samples of a dataset with indices."""

    report: StreamReport | None = None

    def __init__(
        self, dataset: Any, batched: bool, policy: ErrorPolicy, context: SampleContext, generators: RequestGenerators
    ) -> None:
        self._dataset = dataset
        self._batched = batched
        self._policy = policy
        self._context = context
        self._generators = generators
        self._getitems = getitems_of(dataset) if batched else None
        self.culprit: Failure | None = None
        """The sample that raised the error of the request."""

    def close(self) -> None:
        """Nothing is open."""

    def load(self, request: Request) -> Loaded:
        """The samples of a request."""
        self._generators.seed()
        if not self._batched:
            keys = [request.indices]
        else:
            keys = request.indices.tolist() if isinstance(request.indices, np.ndarray) else list(request.indices)
        self.culprit = None
        samples: Any
        kept = keys
        failed: Sequence[Failure] = ()
        if self._policy.tolerant:
            samples, kept, failed = self._tolerant(keys, request)
        elif self._getitems is not None:
            samples = self._many(keys, request)
        else:
            context, samples, item = self._context, [], 0
            load = self._policy.retrying(self._dataset.__getitem__, context)
            try:
                for item, key in enumerate(keys):
                    context.item = item
                    samples.append(load(key))
            except BaseException as error:
                raise self._at_sample(error, keys[item], request, item)
        if isinstance(samples, Batch):
            return Loaded(samples, len(keys))
        return Loaded(EMPTY if keys and not samples else samples, len(samples), kept, failed)

    def _many(self, keys: list[Any], request: Request) -> Any:
        """The samples by one call of `__getitems__`."""
        getitems: Any = self._getitems
        try:
            samples = self._policy.retrying(getitems, self._context)(keys)
        except BaseException as error:
            raise stopped(error, f"while {len(keys)} indices were loaded by one call of __getitems__")
        if not isinstance(samples, Batch) and len(samples) != len(keys):
            raise OptionError(
                f"__getitems__ of {type(self._dataset).__name__} must return one sample for each of the {len(keys)} "
                f"indices, or agnoload.Batch(data), got {number_of(len(samples), 'sample')} (batch {request.batch})"
            )
        return samples

    def _tolerant(self, keys: list[Any], request: Request) -> tuple[Any, list[Any], list[Failure]]:
        """The samples that could be loaded, their keys, and those that failed."""
        if self._getitems is not None:
            try:
                return self._many(keys, request), keys, []
            except Exception:
                self._generators.seed()  # one by one, as if nothing had been tried
        context = self._context
        load = self._policy.retrying(self._dataset.__getitem__, context)
        samples: list[Any] = []
        kept: list[Any] = []
        failed: list[Any] = []
        for item, key in enumerate(keys):
            context.item = item
            try:
                got = load(key), key
            except (Exception, GeneratorExit) as error:
                raised = self._at_sample(error, key, request, item)
                failed.append(self.culprit)
                action = self._policy.action(raised, key)
                if action == "skip":
                    continue
                if action == "raise":
                    raise raised
                if action != "replace":
                    raise OptionError(f"on_error must return 'raise', 'skip' or 'replace', got {action!r}") from raised
                got = self._replacement(load, keys, request, raised)
            except BaseException as error:
                raise self._at_sample(error, key, request, item)
            samples.append(got[0])
            kept.append(got[1])
        context.item = 0
        self.culprit = None
        return samples, kept, failed

    def _replacement(
        self, load: Callable[[Any], Any], keys: list[Any], request: Request, cause: BaseException
    ) -> tuple[Any, Any]:
        """Another sample of the epoch in the place of the current one: the first good one of a random row."""
        context, choose = self._context, self._policy.choose
        rng = seeding.generator(request.seed, request.epoch, Purpose.REPLACE, context.position, request.rank)
        if choose is not None:
            others = list(dict.fromkeys(choose(request.seed, request.epoch, rng, REPLACEMENTS).tolist()))
        else:
            places = rng.permutation(len(keys))[:REPLACEMENTS].tolist()
            others = [keys[place] for place in places if place != context.item]
        for key in others:
            context.made = None  # `sample_rng()` gives what it would have given the bad sample
            try:
                return load(key), key
            except Exception:
                continue
        add_note(cause, f"none of {len(others)} other samples of the epoch could be loaded in its place")
        raise cause

    def _at_sample(self, error: BaseException, key: Any, request: Request, item: int) -> BaseException:
        """A sample's error, which says which one it was; remembered as the culprit."""
        self.culprit = Failure(key, one_line(error))
        where = f"while index {key!r} was loaded (item {item} of batch {request.batch}, epoch {request.epoch})"
        if isinstance(error, KeyError) and isinstance(self._dataset, Mapping):
            where += ": this dataset is indexed by names; agnoload.ArrayDataset(**dataset) has a sample for each row"
        return stopped(error, where)


def stopped(error: BaseException, where: str = "") -> BaseException:
    """An error of user code, with a note of where it was raised; a StopIteration becomes one that is not the end."""
    if isinstance(error, (StopIteration, GeneratorExit)):
        what = f"{type(error).__name__} was raised {where}".strip()
        found = SampleStopped(f"{what}: it is an error there, not the end of the data")
        found.__cause__ = error
        return found
    if where:
        add_note(error, where)
    return error
