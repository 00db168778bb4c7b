"""Several sources mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import partial
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np

from agnoload._types import Source
from agnoload.datasets.base import length_of
from agnoload.errors import OptionError, StateError
from agnoload.samplers.apportion import exact_shares
from agnoload.seeding import Purpose, check_seed, generator
from agnoload.streams.base import IterableDataset
from agnoload.streams.iterators import (
    Lazy,
    OpenableStream,
    OpenOptions,
    StreamIterator,
    is_stream,
    paired,
    seed_and_epoch,
)
from agnoload.streams.shards import IndexIterator, open_stream
from agnoload.validate import FARTHEST, brief, fields, flag, integer, items, members, number_of, shown, whole, word

T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S")

Stop = Literal["first", "last", "never"]
Per = Literal["sample", "batch"]

DRAWS = 512
"""Numbers drawn at a time; part of the saved format: a mixture that resumes jumps to the block that it is in."""


class Mixture(OpenableStream[T_co], IterableDataset[T_co]):
    """Samples of several streams or map-style datasets, mixed by weight: a stream.

    `weights` are positive numbers, the shares that they have of their sum. `per="sample"`: the source of each sample is
    drawn, from the loader's seed (or `seed`). `per="batch"`: each batch holds exactly its share of every source, by
    largest remainder (of equal ones the first), and what was rounded is made up for in the batches that follow, so that
    the shares are exact in the long run: 16 samples at 0.6, 0.3 and 0.1 are 10, 5 and 1, then 9, 5 and 2. The batch
    size is the loader's, or `batch_size`.

    `stop="first"`: the mixture ends when a source that is due has no more; no sample comes twice. `"last"`: sources
    that end begin again until each has ended once; every sample comes at least once. `"never"`: it does not end;
    use `loader.steps(n)`.

    `shuffle=True` goes through map-style datasets in another order each time; shuffle streams with `stream.shuffle`.
    With `with_source=True` the samples are pairs `(sample, source)`, `source` being the number of their source. Samples
    of map-style datasets are loaded only by the worker that delivers them.

    >>> mixed = Mixture([["a"] * 9, ["b"] * 9, ["c"] * 9], [6, 3, 1], per="batch", batch_size=10)
    >>> "".join(sorted(mixed)[:10])
    'aaaaaaaaab'
    >>> list(Mixture([[1, 2, 3], [-1]], [1, 1], stop="last", per="batch", batch_size=2))
    [1, -1, 2, -1, 3, -1]
    """

    @overload
    def __init__(
        self: Mixture[tuple[S, int]], streams_or_datasets: Iterable[Source[S]], weights: Iterable[float],
        stop: Stop = "first", per: Per = "sample", *, with_source: Literal[True], batch_size: int | None = None,
        shuffle: bool = False, seed: int | None = None,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, streams_or_datasets: Iterable[Source[T_co]], weights: Iterable[float], stop: Stop = "first",
        per: Per = "sample", *, batch_size: int | None = None, shuffle: bool = False, with_source: bool = False,
        seed: int | None = None,
    ) -> None: ...  # fmt: skip
    @overload  # of different kinds
    def __init__(
        self: Mixture[Any], streams_or_datasets: Iterable[Any], weights: Iterable[float], stop: Stop = "first",
        per: Per = "sample", *, batch_size: int | None = None, shuffle: bool = False, with_source: bool = False,
        seed: int | None = None,
    ) -> None: ...  # fmt: skip
    def __init__(
        self,
        streams_or_datasets: Iterable[Source[Any]],
        weights: Iterable[float],
        stop: Stop = "first",
        per: Per = "sample",
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        with_source: bool = False,
        seed: int | None = None,
    ) -> None:
        self.datasets = list(members("the sources of Mixture", streams_or_datasets, "streams or datasets"))
        self.weights: list[float] = []
        for weight in members("the weights of Mixture", weights, "numbers"):
            try:
                self.weights.append(float(weight))
            except (TypeError, ValueError):
                self.weights.append(math.nan)
            if not 0 < self.weights[-1] < math.inf:
                raise OptionError(f"the weights of a Mixture must be positive, finite numbers, got {weight!r}")
        if not self.datasets or len(self.datasets) != len(self.weights):
            raise OptionError(
                f"Mixture needs one weight for each source, and at least one; got "
                f"{number_of(len(self.datasets), 'source')} and {number_of(len(self.weights), 'weight')}"
            )
        if batch_size is not None:
            batch_size = integer("batch_size of Mixture", batch_size, 1, "a positive int or None")
        for source in self.datasets:
            if not is_stream(source):
                length_of(source, "Mixture")
        self.stop: Stop = word("stop", stop, get_args(Stop))
        self.per: Per = word("per", per, get_args(Per))
        self.batch_size = batch_size
        self.shuffled = flag("shuffle", shuffle)
        self.with_source = flag("with_source", with_source)
        self.seed = None if seed is None else check_seed(seed)

    def open(self, options: OpenOptions) -> StreamIterator:
        return _MixtureIterator(self, options)

    def __repr__(self) -> str:
        some, more = slice(4), ", ..." * (len(self.datasets) > 4)
        parts = ", ".join(map(brief, self.datasets[some])) + more
        weights = ", ".join(map(repr, self.weights[some])) + more
        words = [f"Mixture([{parts}], [{weights}], stop={self.stop!r}, per={self.per!r}"]
        given = {
            "batch_size": self.batch_size,
            "shuffle": self.shuffled or None,
            "with_source": self.with_source or None,
            "seed": self.seed,
        }
        words += [f"{name}={value}" for name, value in given.items() if value is not None]
        return ", ".join(words) + ")"


class _MixtureIterator(StreamIterator):
    def __init__(self, mixture: Mixture[Any], options: OpenOptions) -> None:
        self._mixture = mixture
        self._options = options
        count = len(mixture.datasets)
        state = options.state
        if state is None:
            none: list[Any] = [None] * count
            state = {"choices": [0, None], "sources": none, "again": [options.again] * count, "ended": [False] * count}
        choices, states, again, ended = fields(state, "a mixture", "choices", "sources", "again", "ended")
        states = items(states, "the sources of a mixture", count)
        self._again = [whole(number, "again", (1 << 31) - 1) for number in items(again, "again", count)]
        self._ended: list[bool] = items(ended, "ended", count)
        if not all(isinstance(end, bool) for end in self._ended):
            raise StateError(f"ended in a state must be bools, got {shown(ended)}")
        self._fresh = [inner is None for inner in states]
        """Of which sources nothing was read since they were opened."""
        self._sources = [self._open(number, inner) for number, inner in enumerate(states)]
        place, owed = items(choices, "the choices of a mixture", 2)
        drawn = mixture.per == "sample"
        if whole(place, "the place of a mixture", FARTHEST) and (owed is None) != drawn:
            raise StateError(
                f"the state of a mixture must have been saved with per={mixture.per!r}, got one where "
                f"{shown(owed)} is owed"
            )
        self._choices = _Drawn(mixture, options, place) if drawn else _Exact(mixture, options, place, owed)
        self._over = False

    def inside(self) -> Iterable[StreamIterator]:
        return self._sources

    def _open(self, number: int, state: Any) -> StreamIterator:
        source, again = self._mixture.datasets[number], self._again[number]
        options = self._options.inner(state, number)._replace(again=again)
        if is_stream(source):
            return open_stream(source, options)
        order: Any = range(len(source))
        if self._mixture.shuffled:
            order = generator(*seed_and_epoch(None), Purpose.MIXTURE, again, options.node).permutation(len(order))
        return IndexIterator(source, order, state)

    def next_raw(self) -> Any:
        stop = self._mixture.stop
        while not self._over:
            number = self._choices.next()
            try:
                raw = self._sources[number].next_raw()
            except StopIteration:
                self._ended[number] = True
                if stop == "first" or (stop == "last" and all(self._ended)):
                    break
                self._again[number] += 1
                self._fresh[number] = True
                self._sources[number] = self._open(number, None)
                try:
                    raw = self._sources[number].next_raw()
                except StopIteration:
                    if stop == "last":
                        continue
                    raise OptionError(
                        "the sources of a Mixture with stop='never' must yield samples each time they begin, but "
                        f"source {number} yields none"
                    ) from None
            self._fresh[number] = False
            return Lazy((partial(paired, number), raw)) if self._mixture.with_source else raw
        self._over = True  # for good: whoever asks again must not be given what the other sources still have
        raise StopIteration

    def state(self) -> Any:
        states = [None if fresh else source.state() for fresh, source in zip(self._fresh, self._sources, strict=True)]
        # A source that cannot say where it is leaves the whole without a state: it is read again.
        if any(state is None and not fresh for fresh, state in zip(self._fresh, states, strict=True)):
            return None
        return {
            "choices": self._choices.state(),
            "sources": states,
            "again": list(self._again),
            "ended": list(self._ended),
        }


class _Drawn:
    """The source of each place, drawn by itself."""

    def __init__(self, mixture: Mixture[Any], options: OpenOptions, place: int) -> None:
        self._options = options
        self._seed, self._epoch = seed_and_epoch(mixture.seed)
        self._bounds = np.cumsum(mixture.weights) / math.fsum(mixture.weights)
        self._place = place
        self._block: list[int] = []

    def next(self) -> int:
        number, slot = divmod(self._place, DRAWS)
        if not slot or not self._block:
            position, node = self._options.again << 32 | number, self._options.node
            numbers = generator(self._seed, self._epoch, Purpose.MIXTURE, position, node).random(DRAWS)
            sources = np.searchsorted(self._bounds, numbers, side="right")
            self._block = np.minimum(sources, len(self._bounds) - 1).tolist()
        self._place += 1
        return self._block[slot]

    def state(self) -> list[Any]:
        return [self._place, None]


class _Exact:
    """Each batch with its exact shares; for several ranks, a block is one batch of each, sample by sample in turn."""

    def __init__(self, mixture: Mixture[Any], options: OpenOptions, place: int, owed: Any) -> None:
        size = mixture.batch_size or options.size
        if size is None:
            raise OptionError("a Mixture with per='batch' needs batch_size where no loader says it")
        owed = items([0] * len(mixture.weights) if owed is None else owed, "what a mixture owes", len(mixture.weights))
        if not all(type(share) is int for share in owed) or sum(owed) != 0:
            raise StateError(f"what a mixture owes in a state must be ints that add up to 0, got {shown(owed)}")
        # Whole numbers in the proportions of the weights as they are written, so that 0.1 is a tenth.
        exact = [Fraction(repr(weight)) for weight in mixture.weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * common) for weight in exact]
        self._size = size
        self._world = options.world
        self._place = place
        self._owed = self._after = owed
        """What each source is owed before the block and after it, in the unit of `exact_shares`."""
        self._block: list[int] = []

    def next(self) -> int:
        slot = self._place % (self._size * self._world)
        if not slot or not self._block:
            self._owed = self._after
            batches = []
            for _ in range(self._world):
                counts, self._after = exact_shares(self._weights, self._size, self._after)
                # Each source is spread evenly over the batch.
                turns = [((turn + 0.5) / count, k) for k, count in enumerate(counts) for turn in range(count)]
                batches.append([source for _, source in sorted(turns)])
            self._block = [source for turn in zip(*batches, strict=True) for source in turn]
        self._place += 1
        return self._block[slot]

    def state(self) -> list[Any]:
        done = self._block and not self._place % (self._size * self._world)
        return [self._place, list(self._after if done else self._owed)]
