"""Draws by weight: exact in float64, at any size, never what cannot be drawn."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.samplers import WeightedRandomSampler
from agnoload.samplers.basic import DRAWS

weights_of_any_size = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1e6), st.floats(0, allow_infinity=False)), min_size=1, max_size=30
).filter(any)
"""Any weights that can be drawn by: tiny and huge ones and 0, side by side."""


def drawn(sampler, seed=0):
    order = sampler.order(seed, 0)
    return order.indices(0, len(order))


@pytest.mark.slow
def test_more_weights_than_float32_could_count_and_the_lighter_half_gets_a_third_of_the_draws():
    n = 2**24 + 1
    weights = np.ones(n)
    weights[: n // 2] = 2
    tracemalloc.start()
    try:
        sampler = WeightedRandomSampler(weights, 100_000)
        indices = drawn(sampler)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * n
    assert (indices.min() >= 0, indices.max() < n) == (True, True)
    assert abs((indices >= n // 2).mean() - 1 / 3) < 0.01


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1, -1], "got -1 at index 1"),
        ([float("nan"), 1], "got nan at index 0"),
        ([1, float("inf")], "got inf at index 1"),
        ([0, 0], "got 2 weights of 0"),
        ([], "must not be empty"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (["a"], "must be numbers"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights, words):
    for replacement in (True, False):
        with pytest.raises(OptionError, match=words):
            WeightedRandomSampler(weights, 1, replacement)
    with pytest.raises(OptionError, match="num_samples 3 and 1 such weights"):
        WeightedRandomSampler([1, 0, 0], 3, replacement=False)


@settings(max_examples=50)
@given(weights_of_any_size, st.integers(0, 2**40))
def test_a_weight_of_0_is_never_drawn(weights, seed):
    possible = set(np.flatnonzero(weights).tolist())
    assert set(drawn(WeightedRandomSampler(weights, 200), seed).tolist()) <= possible


@settings(max_examples=50)
@given(weights_of_any_size, st.integers(0, 2**40), st.data())
def test_draws_without_replacement_are_distinct_and_of_some_weight(weights, seed, data):
    possible = set(np.flatnonzero(weights).tolist())
    wanted = data.draw(st.integers(1, len(possible)))
    indices = drawn(WeightedRandomSampler(weights, wanted, replacement=False), seed).tolist()
    assert len(set(indices)) == wanted
    assert set(indices) <= possible


class Rounded(np.random.Generator):
    """Draws the largest and the least of what can be drawn."""

    def random(self, size=None):
        return np.resize([np.nextafter(1.0, 0.0), 0.0], size)


def test_a_weight_of_0_is_not_drawn_at_the_edges_of_rounding_either(monkeypatch):
    monkeypatch.setattr("agnoload.samplers.basic.Rewinder.rewind", lambda *key: Rounded(np.random.PCG64(0)))
    for weights in ([0, 0.1, 0.2, 0.7, 0], [0, 1e300, 1e300, 0], [0, 3e-320, 1e-320, 0, 0], [0, 1 / 3, 0]):
        indices = drawn(WeightedRandomSampler(weights, DRAWS))
        assert (np.asarray(weights)[indices] > 0).all()


@settings(max_examples=25)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any), st.integers(-1070, 1000), st.booleans())
def test_only_ratios_of_weights_matter(weights, exponent, replacement):
    count = 100 if replacement else int(np.count_nonzero(weights))
    scaled = np.ldexp(np.array(weights, float), exponent)
    found = [drawn(WeightedRandomSampler(each, count, replacement)).tolist() for each in (weights, scaled)]
    assert found[0] == found[1]


def test_draws_with_replacement_follow_the_weights():
    weights = np.array([1, 2, 3, 4])
    counts = np.bincount(drawn(WeightedRandomSampler(weights, 100_000)), minlength=4)
    expected = weights * 10_000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom: 1 in 1,000


def test_draws_without_replacement_are_successive_draws():
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    sampler = WeightedRandomSampler(weights, 2, replacement=False)
    pairs = Counter(tuple(drawn(sampler, seed).tolist()) for seed in range(3000))
    assert len(pairs) == 12
    misfit = 0.0
    for (one, two), count in pairs.items():
        expected = 3000 * weights[one] / 10 * weights[two] / (10 - weights[one])
        misfit += (count - expected) ** 2 / expected
    assert misfit < 31.3  # 11 degrees of freedom: 1 in 1,000


def test_weights_come_as_lists_and_arrays_of_any_numbers_and_are_not_changed():
    kinds = [1, 0, 3], np.array([1, 0, 3], np.float32), np.array([1, 0, 3], np.int8)
    for replacement in (True, False):
        lists = [list(WeightedRandomSampler(kind, 2, replacement, seed=1)) for kind in kinds]
        assert lists == [lists[0]] * 3
    assert [np.asarray(kind).tolist() for kind in kinds] == [[1, 0, 3]] * 3
