"""A dataset cut into random parts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from agnoload.arguments import members
from agnoload.datasets.base import length_of
from agnoload.datasets.combine import Subset
from agnoload.errors import OptionError
from agnoload.seeding import Purpose, check_seed, draw_seed
from agnoload.seeding import generator as keyed_generator
from agnoload.typed import Samples

S = TypeVar("S")

_seed_from: Callable[[Any], int | None] | None = None


def set_seed_from(function: Callable[[Any], int | None] | None) -> None:
    """Give the way from other libraries' generators to a seed (None for what it does not know), or None to take it
    back; asked for every generator that is not NumPy's or Python's."""
    global _seed_from
    _seed_from = function


def random_split(dataset: Samples[S], lengths: Sequence[float], generator: Any = None) -> list[Subset[S]]:
    """Cut a dataset into parts at random, each sample in exactly one of them.

    `lengths` are numbers of samples that add up to `len(dataset)`, or fractions that add up to 1: each part gets the
    whole samples of its share, and what is left goes to the first parts, one each. `generator`: a seed, a generator of
    NumPy's, Python's or a loaded framework's (it is advanced), or None for another split each time.

    >>> [len(part) for part in random_split(range(10), [0.5, 0.25, 0.25], generator=7)]
    [6, 2, 2]
    >>> a, b = random_split(range(5), [3, 2], generator=7)
    >>> sorted([*a, *b])
    [0, 1, 2, 3, 4]
    """
    total = length_of(dataset, "random_split")
    sizes = _sizes(list(members("the lengths of random_split", lengths, "numbers of samples, or fractions")), total)
    order = _numpy_generator(generator).permutation(total).astype(np.int64, copy=False)
    ends = np.cumsum([0, *sizes])
    return [Subset(dataset, order[start:end]) for start, end in pairwise(ends.tolist())]


def _sizes(lengths: list[float], total: int) -> list[int]:
    numbers = all(isinstance(length, (int, float, np.integer, np.floating)) for length in lengths)
    if not lengths or not numbers or any(math.isnan(length) or length < 0 for length in lengths):
        raise OptionError(f"the lengths of random_split must be numbers of samples, or fractions, got {lengths}")
    if math.isclose(sum(lengths), 1) and max(lengths) <= 1:
        sizes = [math.floor(total * fraction) for fraction in lengths]
        for part in range(total - sum(sizes)):
            sizes[part % len(sizes)] += 1
        return sizes
    if any(length != int(length) for length in lengths):
        raise OptionError(f"the fractions of random_split must add up to 1, got {lengths}, that is {sum(lengths)}")
    if sum(lengths) != total:
        raise OptionError(
            f"the lengths of random_split must add up to the dataset's length {total}, got {lengths}, that is "
            f"{sum(lengths)}"
        )
    return [int(length) for length in lengths]


def _numpy_generator(generator: Any) -> np.random.Generator:
    if isinstance(generator, np.random.Generator):
        return generator
    if generator is None:
        seed = draw_seed()
    elif isinstance(generator, (int, np.integer)):
        seed = check_seed(generator, "generator")
    elif isinstance(generator, random.Random):
        seed = generator.getrandbits(63)
    elif isinstance(generator, np.random.RandomState):
        seed = int(generator.randint(0, np.iinfo(np.int64).max, dtype=np.int64))
    else:
        drawn = None if _seed_from is None else _seed_from(generator)
        if drawn is None:
            raise OptionError(
                "the generator of random_split must be a seed, a generator of NumPy's, Python's or a loaded "
                f"framework's, or None, got {type(generator).__qualname__}"
            )
        seed = drawn
    return keyed_generator(seed, 0, Purpose.SPLIT)
