"""The shuffles: exact for every n, even, without visible order, in constant memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.samplers import RandomSampler
from agnoload.samplers.shuffle import ARRAY_BELOW, LARGEST, Bijection, shuffled
from agnoload.seeding import Purpose, generator

EDGES = [4**k + d for k in range(3, 11) for d in (-1, 0, 1)]
"""Where the two numbers of the bijection just fill n, and where they waste the most."""
seeds = st.integers(0, 2**32)


def bijection(n, seed=0):
    return Bijection(n, np.random.default_rng(seed).integers(1 << 32, size=8, dtype=np.uint32))


def assert_covers(n, seed):
    indices = bijection(n, seed)(np.arange(n))
    assert indices.dtype == np.int64
    assert (np.bincount(indices, minlength=n) == 1).all()


def test_the_bijection_is_exact_at_its_edges():
    for n in [*range(1, 66), *EDGES]:
        assert_covers(n, n)


@settings(max_examples=60)
@given(st.integers(1, 50_000), seeds)
def test_a_bijection_of_any_length_and_key_takes_each_index_once(n, seed):
    assert_covers(n, seed)


@settings(max_examples=30)
@given(st.integers(2**20, LARGEST), seeds)
def test_a_huge_shuffle_gives_distinct_indices(n, seed):
    places = np.unique(np.random.default_rng(seed).integers(n, size=2000))
    indices = bijection(n, seed)(places)
    assert ((indices >= 0) & (indices < n)).all()
    assert len(np.unique(indices)) == len(places)


@settings(max_examples=50)
@given(st.integers(1, 3000), seeds, st.sampled_from([1, 4000]), st.data())
def test_any_place_of_a_shuffle_is_that_of_the_whole(n, seed, array_below, data):
    order = shuffled(n, seed, 0, array_below=array_below)
    start = data.draw(st.integers(0, n - 1))
    stop, step = data.draw(st.integers(start, n)), data.draw(st.integers(1, 7))
    assert (order.indices(start, stop, step) == order.indices(0, n)[start:stop:step]).all()


def test_neighbours_of_a_large_shuffle_do_not_correlate_and_the_first_indices_land_evenly():
    for seed in range(3):
        indices = bijection(10**6, seed)(np.arange(10**6))
        assert abs(np.corrcoef(indices[1:], indices[:-1])[0, 1]) < 0.01
        for n in (10**6, 4**10 + 1, 10**12):
            counts = np.bincount(bijection(n, seed)(np.arange(1000)) * 20 // n, minlength=20)
            assert ((counts - 50) ** 2 / 50).sum() < 49  # chi-square with 19 degrees of freedom: 1 in 5,000


def test_all_orders_of_four_are_equally_likely():
    keys = np.random.default_rng(0).integers(1 << 32, size=(1200, 8), dtype=np.uint32)
    orders = Counter(tuple(Bijection(4, each)(np.arange(4)).tolist()) for each in keys)
    assert len(orders) == 24
    assert sum((count - 50) ** 2 / 50 for count in orders.values()) < 53  # 23 degrees of freedom: 1 in 2,500


def test_a_bijection_over_nothing_or_too_much_is_refused():
    for n in (0, LARGEST + 1):
        with pytest.raises(OptionError, match=f"got {n}"):
            bijection(n)


def test_the_switch_to_the_bijection_is_at_a_fixed_size():
    assert ARRAY_BELOW == 2**20
    below, above = shuffled(2**20 - 1, 3, 0), shuffled(2**20, 3, 0)
    assert (below.indices(0, 2**20 - 1) == generator(3, 0, Purpose.ORDER).permutation(2**20 - 1)).all()
    assert (np.bincount(above.indices(0, 2**20)) == 1).all()
    assert (above.indices(0, 9) != generator(3, 0, Purpose.ORDER).permutation(2**20)[:9]).any()


def test_the_first_index_of_a_huge_dataset_and_any_chunk_of_draws_need_no_memory():
    tracemalloc.start()
    try:
        for n in (2 * 10**7, 10**8, 10**15):
            assert 0 <= next(iter(RandomSampler(range(n), seed=0))) < n
        order = RandomSampler(range(1000), replacement=True, num_samples=10**8, seed=0).order(0, 0)
        last = order.indices(10**8 - 3, 10**8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (last.shape, last.dtype) == ((3,), np.int64)
    assert peak < 5_000_000
