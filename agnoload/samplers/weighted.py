"""Draws by weight, in float64, of as many weights as fit into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.base import SeededSampler, digest, vector
from agnoload.samplers.basic import DRAWS, draws
from agnoload.samplers.order import Order, from_array
from agnoload.seeding import Purpose, generator
from agnoload.validate import flag, number_of, positive

Floats = npt.NDArray[np.float64]
_SLICE = 1 << 16


class WeightedRandomSampler(SeededSampler[int]):
    """`num_samples` indices drawn in proportion to `weights`; one with weight 0 is never drawn.

    With `replacement` each draw is independent: a binary search in the running sum of the weights, which takes 8 bytes
    a weight beside a copy of the weights. Without, each draw is among the indices that are left ("successive
    sampling"), by the keys of Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006; that takes 16
    bytes a weight. All in float64, with no limit on their number. `OptionError` for weights that are negative, not
    finite or all 0, and for more distinct draws than there are weights above 0.

    `weights` can be set, to equally many, with effect from the next epoch on; the array that reading it returns is
    read-only.

    >>> sampler = WeightedRandomSampler([0.0, 1.0, 3.0], 1000, seed=0)
    >>> drawn = list(sampler)
    >>> drawn.count(0), 700 < drawn.count(2) < 800
    (0, True)
    """

    _fixed = ("num_samples", "replacement")

    def __init__(
        self, weights: Any, num_samples: int, replacement: bool = True, generator: Any = None, *,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(seed=seed, generator=generator)
        self.replacement = flag("replacement", replacement)
        self.num_samples = positive("num_samples", num_samples)
        self.weights = weights

    @property
    def weights(self) -> npt.NDArray[Any]:
        """The weights, one for each index."""
        return self._weights

    @weights.setter
    def weights(self, weights: Any) -> None:
        array = vector("weights", weights).view()  # not a copy: the table beside it has as many bytes
        if not array.size:
            raise OptionError("weights must not be empty, got none")
        if array.dtype.kind not in "fiub":
            raise OptionError(f"weights must be numbers, got {array.dtype}")
        if not (array.min() >= 0 and np.isfinite(array.max())):  # a NaN anywhere is the least
            bad = int(np.flatnonzero(~((array >= 0) & np.isfinite(array)))[0])
            raise OptionError(f"weights must be finite and not negative, got {array[bad]} at index {bad}")
        drawable = int(np.count_nonzero(array))
        if not drawable:
            raise OptionError(f"weights must not all be 0, got {number_of(len(array), 'weight')} of 0")
        if self.data_length not in (None, len(array)):
            raise OptionError(f"weights must be {self.data_length}, as before, got {len(array)}: make a new sampler")
        if not self.replacement and self.num_samples > drawable:
            raise OptionError(
                f"num_samples must be at most the number of weights above 0 when replacement is False, got num_samples "
                f"{self.num_samples} and {drawable} such weights: draw fewer, or with replacement"
            )
        array.flags.writeable = False
        self._weights = array
        self._table: Floats = _running_sum(array) if self.replacement else array.astype(np.float64, copy=False)
        self.data_length = len(array)

    def __len__(self) -> int:
        return self.num_samples

    def order(self, seed: int, epoch: int) -> Order:
        if not self.replacement:
            return from_array(successive(self._table, self.num_samples, seed, epoch))
        running, total = self._table, self._table[-1]

        def draw(rng: np.random.Generator, picked: slice) -> IndexArray:
            # At most (1 - 2**-53) * total, which no rounding takes up to the total, so the search ends before the end.
            targets = rng.random(DRAWS)[picked] * total
            found: IndexArray = np.searchsorted(running, targets, side="right").astype(np.int64, copy=False)
            return found

        return draws(self.num_samples, seed, epoch, draw)

    def identity(self) -> str:
        return f"WeightedRandomSampler({self.num_samples}, {self.replacement}, {digest(self._table)})"

    def __repr__(self) -> str:
        words = (number_of(len(self._table), "weight"), f"num_samples={self.num_samples}")
        return self._repr_of(*words, *(() if self.replacement else ("replacement=False",)))


def successive(weights: Floats, wanted: int, seed: int, epoch: int) -> IndexArray:
    """`wanted` distinct indices, each drawn by weight among those that are left, in the order of the draws.

    The smallest values of `exponential / weight` are such draws; their logarithms are compared, so that no weight is
    too small or too large for it, and a weight of 0 comes after all others.
    """
    keys = generator(seed, epoch, Purpose.ORDER).standard_exponential(len(weights))
    with np.errstate(divide="ignore"):
        np.log(keys, out=keys)
        for start in range(0, len(keys), _SLICE):
            keys[start : start + _SLICE] -= np.log(weights[start : start + _SLICE])
    if wanted < len(keys):
        first = np.argpartition(keys, wanted - 1)[:wanted].astype(np.int64)
        first.sort()  # ties, should there be any, go by index
        return first[np.argsort(keys[first], kind="stable")]
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _running_sum(array: npt.NDArray[Any]) -> Floats:
    with np.errstate(over="ignore"):
        running: Floats = np.cumsum(array, dtype=np.float64)
    if np.isfinite(running[-1]) and running[-1] > 1e-290:
        return running
    return np.cumsum(array / np.float64(array.max()))  # the sum over- or underflows: only ratios matter
