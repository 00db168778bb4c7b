"""Draws by weight: exact in float64, at any size, never what cannot be drawn."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.samplers import WeightedRandomSampler
from agnoload.samplers.basic import DRAWS


def drawn(sampler, seed=0):
    order = sampler.order(seed, 0)
    return order.indices(0, len(order))


@pytest.mark.slow
def test_c23_more_weights_than_float32_could_count():
    n = 2**24 + 1
    weights = np.ones(n)
    tracemalloc.start()
    try:
        sampler = WeightedRandomSampler(weights, 100_000)
        indices = drawn(sampler)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * n
    assert indices.min() >= 0
    assert indices.max() < n
    assert len(np.unique(indices)) > 99_000


def test_c23_the_lighter_half_gets_a_third_of_the_draws():
    weights = np.repeat([2.0, 1.0], 2**23)
    share = (drawn(WeightedRandomSampler(weights, 100_000)) >= 2**23).mean()
    assert abs(share - 1 / 3) < 0.01


def test_c23_more_distinct_draws_than_weights_above_0_are_refused():
    with pytest.raises(OptionError, match=r"num_samples 3 and 1 such weights"):
        WeightedRandomSampler([1, 0, 0], 3, replacement=False)


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
@pytest.mark.parametrize("replacement", [True, False])
def test_c23_weights_that_cannot_be_drawn_by_are_refused(weights, words, replacement):
    with pytest.raises(OptionError, match=words):
        WeightedRandomSampler(weights, 1, replacement)


@pytest.mark.parametrize("replacement", [True, False])
def test_c23_a_weight_of_0_is_never_drawn(replacement):
    weights = np.zeros(1000)
    weights[[3, 500, 998]] = 1e-300, 1.0, 1e300
    indices = drawn(WeightedRandomSampler(weights, 3 if not replacement else 10_000, replacement))
    assert set(indices) <= {3, 500, 998}


class Rounded(np.random.Generator):
    """Draws the largest and the least of what can be drawn."""

    def random(self, size=None):
        return np.resize([np.nextafter(1.0, 0.0), 0.0], size)


@pytest.mark.parametrize(
    "weights", [[0, 0.1, 0.2, 0.7, 0], [0, 1e300, 1e300, 0], [0, 3e-320, 1e-320, 0, 0], [0, 1 / 3, 0]]
)
def test_c23_a_weight_of_0_is_not_drawn_at_the_edges_of_rounding_either(weights, monkeypatch):
    monkeypatch.setattr("agnoload.samplers.basic.Rewinder.rewind", lambda *key: Rounded(np.random.PCG64(0)))
    indices = drawn(WeightedRandomSampler(weights, DRAWS))
    assert (np.asarray(weights)[indices] > 0).all()


@pytest.mark.parametrize("scale", [1e308, 5e-324 * 2**10, 1.0])
def test_only_ratios_of_weights_matter(scale):
    weights = np.array([1.0, 0.25, 0.5, 0.25]) * scale
    assert (
        drawn(WeightedRandomSampler(weights, 200)).tolist() == drawn(WeightedRandomSampler([4, 1, 2, 1], 200)).tolist()
    )


def test_draws_with_replacement_follow_the_weights():
    weights = np.array([1, 2, 3, 4])
    counts = np.bincount(drawn(WeightedRandomSampler(weights, 100_000)), minlength=4)
    expected = weights * 10_000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom: 1 in 1,000


def test_draws_without_replacement_are_successive_draws():
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    sampler = WeightedRandomSampler(weights, 2, replacement=False)
    pairs = Counter(tuple(drawn(sampler, seed).tolist()) for seed in range(6000))
    assert len(pairs) == 12
    misfit = 0.0
    for (one, two), count in pairs.items():
        expected = 6000 * weights[one] / 10 * weights[two] / (10 - weights[one])
        misfit += (count - expected) ** 2 / expected
    assert misfit < 31.3  # 11 degrees of freedom: 1 in 1,000


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda w: max(w) > 0), st.data())
def test_draws_without_replacement_are_distinct_and_of_some_weight(weights, data):
    possible = {i for i, w in enumerate(weights) if w > 0}
    wanted = data.draw(st.integers(1, len(possible)))
    indices = drawn(
        WeightedRandomSampler(weights, wanted, replacement=False), data.draw(st.integers(0, 2**40))
    ).tolist()
    assert len(set(indices)) == wanted
    assert set(indices) <= possible


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_come_as_lists_arrays_and_tensors_and_are_not_changed(replacement):
    torch = pytest.importorskip("torch")
    kinds = [1, 0, 3], np.array([1, 0, 3], np.float32), torch.tensor([1.0, 0.0, 3.0]), np.array([1, 0, 3], np.int8)
    lists = [list(WeightedRandomSampler(kind, 2, replacement, seed=1)) for kind in kinds]
    assert lists == [lists[0]] * 4
    assert kinds[1].tolist() == [1, 0, 3]
    assert kinds[2].tolist() == [1, 0, 3]
