"""Several sources mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np

from agnoload._types import Source
from agnoload.datasets.base import length_of
from agnoload.errors import OptionError, StateError
from agnoload.samplers.apportion import exact_shares
from agnoload.seeding import Purpose, check_seed, generator
from agnoload.streams.base import IterableDataset, RowsStream, seed_and_epoch
from agnoload.streams.iterators import Lazy, OpenableStream, OpenOptions, StreamIterator, is_stream
from agnoload.streams.shards import open_stream
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
        self.weights = [_weight(weight) for weight in members("the weights of Mixture", weights, "numbers")]
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
        given = {"batch_size": self.batch_size, "shuffle": self.shuffled, "with_source": self.with_source}
        words += [f"{name}={value}" for name, value in given.items() if value]
        if self.seed is not None:
            words.append(f"seed={self.seed}")
        return ", ".join(words) + ")"


def _weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise OptionError(f"the weights of a Mixture must be positive, finite numbers, got {weight!r}")
    return number


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
        self._choices = _choices(mixture, options, *items(choices, "the choices of a mixture", 2))
        self._over = False

    def inside(self) -> Iterable[StreamIterator]:
        return self._sources

    def _open(self, number: int, state: Any) -> StreamIterator:
        source = self._mixture.datasets[number]
        stream = source if is_stream(source) else RowsStream(source, self._mixture.shuffled)
        return open_stream(stream, self._options.inner(state, number)._replace(again=self._again[number]))

    def next_raw(self) -> Any:
        while not self._over:
            number = self._choices.next()
            try:
                raw = self._sources[number].next_raw()
            except StopIteration:
                if self._is_over(number):
                    break
                try:
                    raw = self._begin_again(number)
                except StopIteration:
                    continue
            self._fresh[number] = False
            return Lazy((partial(_with_source, number), raw)) if self._mixture.with_source else raw
        self._over = True  # for good: whoever asks again must not be given what the other sources still have
        raise StopIteration

    def _is_over(self, number: int) -> bool:
        self._ended[number] = True
        stop = self._mixture.stop
        return stop == "first" or (stop == "last" and all(self._ended))

    def _begin_again(self, number: int) -> Any:
        """The first raw sample of a source that has ended; `StopIteration` if it yields none."""
        self._again[number] += 1
        self._fresh[number] = True
        self._sources[number] = self._open(number, None)
        try:
            return self._sources[number].next_raw()
        except StopIteration:
            if self._mixture.stop == "last":
                raise
            raise OptionError(
                "the sources of a Mixture with stop='never' must yield samples each time they begin, but source "
                f"{number} yields none"
            ) from None

    def state(self) -> Any:
        states = [None if fresh else source.state() for fresh, source in zip(self._fresh, self._sources, strict=True)]
        if any(state is None and not fresh for fresh, state in zip(self._fresh, states, strict=True)):
            return None
        return {
            "choices": self._choices.state(),
            "sources": states,
            "again": list(self._again),
            "ended": list(self._ended),
        }


def _with_source(number: int, sample: Any) -> tuple[Any, int]:
    return sample, number


Owed = list[int] | None
"""What each source is owed before a block, in the unit of `exact_shares`; None where nothing is."""


class _Choices:
    """The source of each place: `draw(number, owed)` gives those of a block of `size`, and what is owed after it."""

    def __init__(self, place: int, owed: Owed, size: int, draw: Callable[[int, Owed], tuple[list[int], Owed]]) -> None:
        self._place = place
        self._owed = self._after = owed
        self._size = size
        self._draw = draw
        self._block: list[int] = []

    def next(self) -> int:
        slot = self._place % self._size
        if not slot or not self._block:
            if self._block:
                self._owed = self._after
            self._block, self._after = self._draw(self._place // self._size, self._owed)
        self._place += 1
        return self._block[slot]

    def state(self) -> list[Any]:
        done = self._block and not self._place % self._size
        owed = self._after if done else self._owed
        return [self._place, None if owed is None else list(owed)]


def _choices(mixture: Mixture[Any], options: OpenOptions, place: int, owed: Owed) -> _Choices:
    whole(place, "the place of a mixture", FARTHEST)
    if owed is not None:
        items(owed, "what a mixture owes", len(mixture.datasets))
        if not all(type(share) is int for share in owed) or sum(owed) != 0:
            raise StateError(f"what a mixture owes in a state must be ints that add up to 0, got {shown(owed)}")
    if (owed is None) != (mixture.per == "sample") and place:
        raise StateError(
            f"the state of a mixture must have been saved with per={mixture.per!r}, got one where {shown(owed)} is owed"
        )
    return _drawn(mixture, options, place) if mixture.per == "sample" else _exact(mixture, options, place, owed)


def _drawn(mixture: Mixture[Any], options: OpenOptions, place: int) -> _Choices:
    """Each place drawn by itself."""
    seed, epoch = seed_and_epoch(mixture.seed)
    bounds = np.cumsum(mixture.weights) / math.fsum(mixture.weights)

    def draw(number: int, owed: Owed) -> tuple[list[int], Owed]:
        position = options.again << 32 | number
        numbers = generator(seed, epoch, Purpose.MIXTURE, position, options.node).random(DRAWS)
        return np.minimum(np.searchsorted(bounds, numbers, side="right"), len(bounds) - 1).tolist(), None

    return _Choices(place, None, DRAWS, draw)


def _exact(mixture: Mixture[Any], options: OpenOptions, place: int, owed: Owed) -> _Choices:
    """Each batch with its exact shares; for several ranks, a block is one batch of each, sample by sample in turn."""
    size = mixture.batch_size or options.size
    if size is None:
        raise OptionError("a Mixture with per='batch' needs batch_size where no loader says it")
    weights = _whole(mixture.weights)

    def draw(number: int, owed: Owed) -> tuple[list[int], Owed]:
        batches = []
        for _ in range(options.world):
            counts, owed = exact_shares(weights, size, owed or [0] * len(weights))
            batches.append(_spread(counts))
        return [source for turn in zip(*batches, strict=True) for source in turn], owed

    return _Choices(place, owed or [0] * len(weights), size * options.world, draw)


def _spread(counts: list[int]) -> list[int]:
    """Every source as often as counted, each spread evenly over the batch."""
    places = [((turn + 0.5) / count, source) for source, count in enumerate(counts) for turn in range(count)]
    return [source for _, source in sorted(places)]


def _whole(weights: list[float]) -> list[int]:
    """Weights as whole numbers in the same proportions: as they are written, so that 0.1 is a tenth."""
    exact = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]
