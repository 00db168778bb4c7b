"""A data loader for every array framework, with a core that knows none of them."""

from agnoload.backend.base import Backend
from agnoload.backend.registry import get_backend, list_backends
from agnoload.batching.collate import default_collate, default_convert, register_collate
from agnoload.batching.packing import PackedRows, pack_sequences
from agnoload.batching.ragged import Packed, Padded, Ragged
from agnoload.batching.ragged_collate import ragged_collate
from agnoload.batching.tree import map_leaves
from agnoload.datasets import (
    ArrayDataset,
    Batch,
    CachedDataset,
    ConcatDataset,
    Dataset,
    PackedList,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from agnoload.errors import (
    AgnoloadError,
    AgnoloadWarning,
    BackendUnavailable,
    CollateError,
    DatasetNotPicklable,
    LoaderClosed,
    OptionError,
    SampleStopped,
    StateError,
    TooManyFailed,
    WorkerDied,
    WorkerTimeout,
)
from agnoload.fetching.error_policy import Retry
from agnoload.loader import DataLoader
from agnoload.monitoring.benchmark import Benchmark
from agnoload.monitoring.stats import Stats
from agnoload.samplers import (
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    ClassUniformBatchSampler,
    CyclicClassBatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    imbalance_weights,
)
from agnoload.seeding import sample_rng
from agnoload.streams import (
    ChainDataset,
    FileStream,
    IterableDataset,
    Mixture,
    read_jsonl,
    read_lines,
    read_npy,
    read_npz,
    read_parquet,
    read_tar,
)
from agnoload.worker_info import WorkerInfo, get_worker_info


def __getattr__(name: str) -> object:
    """`agnoload.testing`, imported when it is first asked for."""
    if name == "testing":
        from importlib import import_module

        return import_module("agnoload.testing")
    raise AttributeError(f"module 'agnoload' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "AgnoloadError",
    "AgnoloadWarning",
    "ArrayDataset",
    "Backend",
    "BackendUnavailable",
    "BalancedBatchSampler",
    "Batch",
    "BatchSampler",
    "Benchmark",
    "BucketBatchSampler",
    "CachedDataset",
    "ChainDataset",
    "ClassUniformBatchSampler",
    "CollateError",
    "ConcatDataset",
    "CyclicClassBatchSampler",
    "DataLoader",
    "Dataset",
    "DatasetNotPicklable",
    "DistributedSampler",
    "FileStream",
    "IterableDataset",
    "LoaderClosed",
    "Mixture",
    "OptionError",
    "Packed",
    "PackedList",
    "PackedRows",
    "Padded",
    "Ragged",
    "RandomSampler",
    "Retry",
    "SampleStopped",
    "Sampler",
    "SequentialSampler",
    "StackDataset",
    "StateError",
    "Stats",
    "Subset",
    "SubsetRandomSampler",
    "TensorDataset",
    "TooManyFailed",
    "WeightedRandomSampler",
    "WorkerDied",
    "WorkerInfo",
    "WorkerTimeout",
    "default_collate",
    "default_convert",
    "get_backend",
    "get_worker_info",
    "imbalance_weights",
    "list_backends",
    "map_leaves",
    "pack_sequences",
    "ragged_collate",
    "random_split",
    "read_jsonl",
    "read_lines",
    "read_npy",
    "read_npz",
    "read_parquet",
    "read_tar",
    "register_collate",
    "sample_rng",
]
