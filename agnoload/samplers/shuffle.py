"""Random orders of 0, 1, ... n - 1: an array for small n, a keyed bijection in constant memory for large n.

The bijection is a Feistel network over two numbers, `x = left * b + right` with `a * b >= n`, whose rounds add a keyed
hash of one number to the other modulo its range; what falls outside `n` goes through again until it falls inside
("cycle walking"), which happens to fewer than one in `sqrt(n)`. So it is exact for every n, needs no memory, and gives
any place at once. Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (the generalised
Feistel cipher with cycle walking); the hash is Appleby's 32-bit finaliser of MurmurHash3.
"""

from __future__ import annotations

from math import isqrt

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


class Bijection:
    """A one-to-one map of `0 <= i < n` onto itself, chosen by eight 32-bit keys; a call takes and gives an int64 array.

    >>> shuffle = Bijection(10**12, np.arange(8, dtype=np.uint32))
    >>> len(set(shuffle(np.arange(1000)).tolist()))
    1000
    """

    def __init__(self, n: int, keys: npt.NDArray[np.uint32]) -> None:
        if not 1 <= n <= LARGEST:
            raise OptionError(f"a shuffle must be over 1 to 2**62 items, got {n}")
        self.n = n
        self.b = isqrt(n - 1) + 1
        self.a = -(-n // self.b)
        self.keys = [np.uint32(key) for key in keys]

    def __call__(self, places: IndexArray) -> IndexArray:
        result = np.empty(len(places), np.int64)
        for start in range(0, len(places), 2 * BLOCK):  # in blocks that stay in the processor's cache
            result[start : start + 2 * BLOCK] = self._rounds(places[start : start + 2 * BLOCK])
        outside = np.flatnonzero(result >= self.n)
        while outside.size:
            result[outside] = self._rounds(result[outside])
            outside = outside[result[outside] >= self.n]
        return result

    def _rounds(self, x: IndexArray) -> IndexArray:
        left = (quotient := x // self.b).astype(np.uint32)
        right = (x - quotient * self.b).astype(np.uint32)
        for number, key in enumerate(self.keys):
            source, target, size = (left, right, self.b) if number % 2 else (right, left, self.a)
            h = source ^ key
            h ^= h >> np.uint32(16)
            h *= np.uint32(0x85EBCA6B)
            h ^= h >> np.uint32(13)
            h *= np.uint32(0xC2B2AE35)
            h ^= h >> np.uint32(16)
            wide = h.astype(np.uint64)  # the high half of hash times size is a number below size, without a division
            wide *= np.uint64(size)
            wide >>= np.uint64(32)
            np.add(target, wide.astype(np.uint32), out=target)
            np.minimum(target, target - np.uint32(size), out=target)  # modulo: what is too small wraps to the top
        return left.astype(np.int64) * self.b + right


def shuffled(
    n: int, seed: int, epoch: int, purpose: Purpose = Purpose.ORDER, position: int = 0, rank: int = 0, *,
    array_below: int = ARRAY_BELOW, rewinder: Rewinder | None = None,
) -> Order:  # fmt: skip
    """0, 1, ... n - 1 in a random order, any place at once; the key of the randomness is that of `seeding.generator`.

    From `array_below` items on no array is stored.
    """
    rng = (rewinder or Rewinder()).rewind(seed, epoch, purpose, position, rank)
    if n < array_below:
        return from_array(rng.permutation(n))
    bijection = Bijection(n, rng.integers(1 << 32, size=ROUNDS, dtype=np.uint32))
    return Order(n, lambda start, stop, step: bijection(np.arange(start, stop, step, dtype=np.int64)))
