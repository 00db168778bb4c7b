"""A dataset cut into random parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from agnoload._types import Samples
from agnoload.datasets.base import length_of
from agnoload.datasets.combine import Subset
from agnoload.errors import OptionError
from agnoload.seeding import Purpose, draw_from, draw_seed
from agnoload.seeding import generator as keyed_generator
from agnoload.validate import members

S = TypeVar("S")


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
    rng = generator
    if not isinstance(rng, np.random.Generator):
        rng = keyed_generator(draw_seed() if generator is None else draw_from(generator), 0, Purpose.SPLIT)
    order = rng.permutation(total).astype(np.int64, copy=False)
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
