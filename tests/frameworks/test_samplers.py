"""Samplers and splits take torch's tensors and generators, and ranks get what torch's own sampler gives them."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload.samplers import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, is_sampler
from agnoload.samplers.classes import ClassIndex

torch = pytest.importorskip("torch")
data = torch.utils.data


def test_indices_masks_weights_and_labels_come_as_tensors_and_are_not_changed():
    mask, weights = torch.tensor([False, False, True, True]), torch.tensor([1.0, 0.0, 3.0])
    assert sorted(SubsetRandomSampler(torch.tensor([2, 5, 7]))) == [2, 5, 7]
    assert sorted(SubsetRandomSampler(mask)) == [2, 3]
    assert ClassIndex("labels", torch.tensor([1, 0, 1])).members.tolist() == [1, 0, 2]
    for replacement in (True, False):
        ours = WeightedRandomSampler(weights, 2, replacement, seed=1)
        assert list(ours) == list(WeightedRandomSampler([1, 0, 3], 2, replacement, seed=1))
    assert (mask.tolist(), weights.tolist()) == ([False, False, True, True], [1.0, 0.0, 3.0])


def test_a_generator_gives_the_seed_at_once():
    for make in (
        lambda generator: RandomSampler(range(9), generator=generator),
        lambda generator: SubsetRandomSampler([1, 2], generator),
        lambda generator: WeightedRandomSampler([1, 2], 2, generator=generator),
        lambda generator: agnoload.BalancedBatchSampler([0, 1], 2, generator=generator),
        lambda generator: agnoload.ClassUniformBatchSampler([0, 1], 2, 1, generator=generator),
        lambda generator: agnoload.CyclicClassBatchSampler([0, 1], 2, 2, generator=generator),
        lambda generator: agnoload.BucketBatchSampler([1, 2], 2, generator=generator),
    ):
        generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        sampler, alike, following = make(generator), make(other), make(other)
        assert sampler.seed == alike.seed != following.seed
        assert list(sampler) == list(alike)
        assert pickle.loads(pickle.dumps(sampler)).seed == sampler.seed


def test_random_split_takes_a_generator_which_moves_on():
    def parts():
        generator = torch.Generator().manual_seed(3)
        return [[list(part) for part in agnoload.random_split(range(9), [4, 5], generator)] for _ in range(2)]

    first, second = parts()
    assert sorted(first[0] + first[1]) == list(range(9))
    assert first != second
    assert parts() == [first, second]


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 8), st.booleans())
@pytest.mark.filterwarnings("ignore::agnoload.errors.AgnoloadWarning")
def test_shares_agree_with_those_of_torch(n, world, drop_last):
    for rank in range(world):
        theirs = data.DistributedSampler(range(n), world, rank, shuffle=False, drop_last=drop_last)
        assert list(DistributedSampler(range(n), world, rank, shuffle=False, drop_last=drop_last)) == list(theirs)


def test_samplers_and_datasets_of_torch_are_known_from_each_other():
    assert is_sampler(data.SequentialSampler(range(3)))
    assert not is_sampler(data.TensorDataset(torch.zeros(3)))
    assert list(DistributedSampler(data.SequentialSampler(range(5)), 2, 1, tail="keep")) == [1, 3]
