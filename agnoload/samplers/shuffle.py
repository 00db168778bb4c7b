"""Random orders of 0, 1, ... n - 1: an array for small n, a keyed bijection in constant memory for large n.

The bijection is a Feistel network over two numbers, `x = left * b + right` with `a * b >= n`, whose rounds add a keyed
hash of one number to the other modulo its range; what falls outside `n` goes through again until it falls inside
("cycle walking"), which happens to fewer than one in `sqrt(n)`. So it is exact for every n, needs no memory, and gives
any place, and the place of any index, at once. Source: Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002 (the generalised Feistel cipher with cycle walking); the hash is Appleby's 32-bit finaliser of MurmurHash3.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from agnoload.errors import OptionError
from agnoload.protocols import IndexArray
from agnoload.samplers.order import BLOCK, Order, from_array
from agnoload.seeding import Purpose, Rewinder

ARRAY_BELOW = 1 << 20
"""Part of the saved format: fewer items are shuffled by `Generator.permutation`, more go through the bijection."""

ROUNDS = 8
"""Part of the saved format: the rounds of the Feistel network."""

LARGEST = 1 << 62
"""The bijection holds up to this n."""

_U32 = npt.NDArray[np.uint32]


class Bijection:
    """A one-to-one map of `0 <= i < n` onto itself, chosen by eight 32-bit keys; calls take and give int64 arrays.

    >>> import numpy as np
    >>> shuffle = Bijection(10**12, np.arange(8, dtype=np.uint32))
    >>> places = np.array([0, 1, 999_999_999_999])
    >>> bool((shuffle.inverse(shuffle(places)) == places).all())
    True
    """

    def __init__(self, n: int, keys: npt.NDArray[np.uint32]) -> None:
        if not 1 <= n <= LARGEST:
            raise OptionError(f"a shuffle must be over 1 to 2**62 items, got {n}")
        self.n = n
        self.b = isqrt(n - 1) + 1
        self.a = -(-n // self.b)
        self.keys = [np.uint32(key) for key in keys]

    def __call__(self, places: npt.ArrayLike) -> IndexArray:
        """The indices at `places`."""
        return self._walk(places, self._forward)

    def inverse(self, indices: npt.ArrayLike) -> IndexArray:
        """The places of `indices`."""
        return self._walk(indices, self._backward)

    def _walk(self, values: npt.ArrayLike, step: Any) -> IndexArray:
        source = np.asarray(values, np.int64)
        result = np.empty(len(source), np.int64)
        for start in range(0, len(source), 2 * BLOCK):  # in blocks that stay in the processor's cache
            result[start : start + 2 * BLOCK] = step(source[start : start + 2 * BLOCK])
        outside = np.flatnonzero(result >= self.n)
        while outside.size:
            result[outside] = step(result[outside])
            outside = outside[result[outside] >= self.n]
        return result

    def _forward(self, x: IndexArray) -> IndexArray:
        left, right = self._split(x)
        for number in range(ROUNDS):
            source, target, size = (left, right, self.b) if number % 2 else (right, left, self.a)
            np.add(target, _hash(source, self.keys[number], size), out=target)
            np.minimum(target, target - np.uint32(size), out=target)  # modulo: what is too small wraps to the top
        return left.astype(np.int64) * self.b + right

    def _backward(self, x: IndexArray) -> IndexArray:
        left, right = self._split(x)
        for number in reversed(range(ROUNDS)):
            source, target, size = (left, right, self.b) if number % 2 else (right, left, self.a)
            np.subtract(target, _hash(source, self.keys[number], size), out=target)
            np.minimum(target, target + np.uint32(size), out=target)
        return left.astype(np.int64) * self.b + right

    def _split(self, x: IndexArray) -> tuple[_U32, _U32]:
        left = x // self.b
        return left.astype(np.uint32), (x - left * self.b).astype(np.uint32)


def _hash(values: _U32, key: np.uint32, size: int) -> _U32:
    """A number below `size` for each value, by a key."""
    h = values ^ key
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    wide = h.astype(np.uint64)
    wide *= np.uint64(size)
    wide >>= np.uint64(32)
    return wide.astype(np.uint32)


def shuffled(
    n: int,
    seed: int,
    epoch: int,
    purpose: Purpose = Purpose.ORDER,
    position: int = 0,
    rank: int = 0,
    *,
    array_below: int = ARRAY_BELOW,
    rewinder: Rewinder | None = None,
) -> Order:
    """0, 1, ... n - 1 in a random order, any place at once; the key of the randomness is that of `seeding.generator`.

    From `array_below` items on no array is stored.
    """
    rng = (rewinder or Rewinder()).rewind(seed, epoch, purpose, position, rank)
    if n < array_below:
        return from_array(rng.permutation(n))
    bijection = Bijection(n, rng.integers(1 << 32, size=ROUNDS, dtype=np.uint32))
    return Order(n, lambda start, stop, step: bijection(np.arange(start, stop, step, dtype=np.int64)))
