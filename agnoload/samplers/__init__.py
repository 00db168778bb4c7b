"""Which samples come, in which order: every sampler is a function of `(seed, epoch)` to an order, any place at once."""

from agnoload.samplers.balanced import (
    BalancedBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    imbalance_weights,
)
from agnoload.samplers.basic import RandomSampler, SequentialSampler, SubsetRandomSampler
from agnoload.samplers.batch import BatchSampler
from agnoload.samplers.buckets import BucketBatchSampler
from agnoload.samplers.distributed import DistributedSampler
from agnoload.samplers.order import BatchedOrder, BatchOrder, Order
from agnoload.samplers.sampler import Sampler, SeededSampler, effective_seed, is_sampler, is_transparent
from agnoload.samplers.weighted import WeightedRandomSampler

__all__ = [
    "BalancedBatchSampler",
    "BatchOrder",
    "BatchSampler",
    "BatchedOrder",
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
    "effective_seed",
    "imbalance_weights",
    "is_sampler",
    "is_transparent",
]
