"""Streams: datasets that are iterated, and what is made of them.

From the bottom: `iterators` (how a stream is read), `shards` (how it is read in parts), `base` (streams, and `map`,
`filter` and `+` of them), then `shuffle`, `group`, `ranks`, `mixture` and `files` (what else is made of streams) with
its `readers`, and `layout` (what a stream is made of, and which lanes, workers and ranks read what).
"""

from agnoload.streams.base import (
    ChainDataset,
    FilteredStream,
    IterableDataset,
    MappedStream,
)
from agnoload.streams.files import FileStream
from agnoload.streams.iterators import go_back, is_indexed, is_stream
from agnoload.streams.layout import first_states, part_without_state, resolve_ranks, split_of
from agnoload.streams.mixture import Mixture
from agnoload.streams.ranks import RankStream
from agnoload.streams.readers import read_jsonl, read_lines, read_npy, read_npz, read_parquet, read_tar
from agnoload.streams.shards import length_or_none, need_length
from agnoload.streams.shuffle import ShuffledStream

__all__ = [
    "ChainDataset",
    "FileStream",
    "FilteredStream",
    "IterableDataset",
    "MappedStream",
    "Mixture",
    "RankStream",
    "ShuffledStream",
    "first_states",
    "go_back",
    "is_indexed",
    "is_stream",
    "length_or_none",
    "need_length",
    "part_without_state",
    "read_jsonl",
    "read_lines",
    "read_npy",
    "read_npz",
    "read_parquet",
    "read_tar",
    "resolve_ranks",
    "split_of",
]
