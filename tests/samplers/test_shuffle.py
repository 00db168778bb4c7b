"""The shuffles: exact for every n, even, without visible order, in constant memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.samplers import RandomSampler
from agnoload.samplers.shuffle import ARRAY_BELOW, LARGEST, Bijection, shuffled
from agnoload.seeding import Purpose, generator

EDGES = [4**k + d for k in range(1, 11) for d in (-1, 0, 1)]


def bijection(n, seed=0):
    return Bijection(n, np.random.default_rng(seed).integers(1 << 32, size=8, dtype=np.uint32))


def assert_covers(n):
    places = np.arange(n)
    shuffle = bijection(n, n)
    indices = shuffle(places)
    assert indices.dtype == np.int64
    assert (np.bincount(indices, minlength=n) == 1).all()


@pytest.mark.parametrize("n", [*range(1, 66), *(n for n in EDGES if n > 64)])
def test_c22_the_bijection_takes_each_index_once(n):
    assert_covers(n)


@pytest.mark.slow
def test_c22_the_bijection_takes_each_index_once_for_every_n_up_to_5000():
    for n in range(1, 5001):
        assert_covers(n)


@pytest.mark.parametrize("n", [10**8, 10**12, LARGEST])
def test_a_huge_shuffle_gives_distinct_indices(n):
    indices = bijection(n)(np.unique(np.random.default_rng(1).integers(n, size=10_000)))
    assert ((indices >= 0) & (indices < n)).all()
    assert len(np.unique(indices)) == len(indices)


@given(st.integers(1, 3000), st.integers(0, 2**32), st.data())
def test_any_place_of_a_shuffle_is_that_of_the_whole(n, seed, data):
    order = shuffled(n, seed, 0, array_below=data.draw(st.sampled_from([1, 4000])))
    whole = order.indices(0, n)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start, n))
    step = data.draw(st.integers(1, 7))
    assert (order.indices(start, stop, step) == whole[start:stop:step]).all()


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_of_a_large_shuffle_do_not_correlate(seed):
    indices = bijection(10**6, seed)(np.arange(10**6))
    assert abs(np.corrcoef(indices[1:], indices[:-1])[0, 1]) < 0.01


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [10**6, 4**10 + 1, 10**12])
def test_the_first_thousand_indices_land_evenly(n, seed):
    places = bijection(n, seed)(np.arange(1000))
    counts = np.bincount(places * 20 // n, minlength=20)
    assert ((counts - 50) ** 2 / 50).sum() < 49  # chi-square with 19 degrees of freedom: 1 in 5,000


def test_all_orders_of_four_are_equally_likely():
    keys = np.random.default_rng(0).integers(1 << 32, size=(4800, 8), dtype=np.uint32)
    orders = Counter(tuple(Bijection(4, each)(np.arange(4)).tolist()) for each in keys)
    assert len(orders) == 24
    assert sum((count - 200) ** 2 / 200 for count in orders.values()) < 53  # 23 degrees of freedom: 1 in 2,500


def test_a_bijection_over_nothing_is_refused():
    with pytest.raises(OptionError, match="got 0"):
        bijection(0)
    with pytest.raises(OptionError, match="got 4611686018427387905"):
        bijection(LARGEST + 1)


def test_the_switch_to_the_bijection_is_at_a_fixed_size():
    assert ARRAY_BELOW == 2**20
    below, above = shuffled(2**20 - 1, 3, 0), shuffled(2**20, 3, 0)
    expected = generator(3, 0, Purpose.ORDER).permutation(2**20 - 1)
    assert (below.indices(0, 2**20 - 1) == expected).all()
    for order in (below, above):
        assert (np.bincount(order.indices(0, len(order))) == 1).all()


@pytest.mark.parametrize("n", [2 * 10**7, 10**8, 10**15])
def test_c22_the_first_index_of_a_huge_dataset_needs_no_memory(n):
    tracemalloc.start()
    try:
        first = next(iter(RandomSampler(range(n), seed=0)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 <= first < n
    assert peak < 5_000_000


def test_c22_a_hundred_million_draws_with_replacement_come_in_chunks():
    tracemalloc.start()
    try:
        order = RandomSampler(range(1000), replacement=True, num_samples=10**8, seed=0).order(0, 0)
        last = order.indices(10**8 - 3, 10**8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert last.shape == (3,)
    assert last.dtype == np.int64
    assert peak < 5_000_000
