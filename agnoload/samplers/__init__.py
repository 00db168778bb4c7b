"""Which samples are loaded, in which order: a sampler makes an order, any place at once, from `(seed, epoch)`."""

from agnoload.samplers.balanced import (
    BalancedBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    imbalance_weights,
)
from agnoload.samplers.base import Sampler, SeededSampler, effective_seed, has_random_access, is_sampler
from agnoload.samplers.basic import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler
from agnoload.samplers.buckets import BucketBatchSampler
from agnoload.samplers.distributed import DistributedSampler
from agnoload.samplers.order import BatchOrder, Order, batched
from agnoload.samplers.weighted import WeightedRandomSampler

__all__ = [
    "BalancedBatchSampler",
    "BatchOrder",
    "BatchSampler",
    "BucketBatchSampler",
    "ClassUniformBatchSampler",
    "CyclicClassBatchSampler",
    "DistributedSampler",
    "Order",
    "RandomSampler",
    "Sampler",
    "SeededSampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "batched",
    "effective_seed",
    "has_random_access",
    "imbalance_weights",
    "is_sampler",
]
