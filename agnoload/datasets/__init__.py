"""Map-style datasets: something with `__getitem__` and `__len__`, what is made of others, and what is kept compactly.

`base`: what all share, datasets one after the other, and how a loader asks for whole batches. `arrays`: rows of arrays.
`combine`: datasets side by side, or some samples of one. `split`: random parts. `packed`: lists in one piece of memory.
`cache`: decoded samples that all workers share.
"""

from agnoload.datasets.arrays import ArrayDataset, TensorDataset
from agnoload.datasets.base import Batch, ConcatDataset, Dataset, MappedDataset, gather_of, getitems_of, refuse_table
from agnoload.datasets.cache import CachedDataset, find_caches
from agnoload.datasets.combine import StackDataset, Subset
from agnoload.datasets.packed import PackedList
from agnoload.datasets.split import random_split

__all__ = [
    "ArrayDataset",
    "Batch",
    "CachedDataset",
    "ConcatDataset",
    "Dataset",
    "MappedDataset",
    "PackedList",
    "StackDataset",
    "Subset",
    "TensorDataset",
    "find_caches",
    "gather_of",
    "getitems_of",
    "random_split",
    "refuse_table",
]
