"""Streams: datasets that are iterated, and what is made of them.

From the bottom: `iterators` (what a pass through a stream is, and that through the user's own), `shards` (passes in
parts), `steps`, `group` and `ranks` (the passes of what is made of one stream), `base` (the streams themselves), then
`mixture` and `files` with its `readers`, and `layout` (what a stream is made of, and which lanes, workers and ranks
read what).
"""

from agnoload.streams.base import ChainDataset, IterableDataset, MappedStream
from agnoload.streams.files import FileStream
from agnoload.streams.iterators import go_back, is_indexed, is_stream
from agnoload.streams.layout import first_states, part_without_state, resolve_ranks, split_of
from agnoload.streams.mixture import Mixture
from agnoload.streams.readers import read_jsonl, read_lines, read_npy, read_npz, read_parquet, read_tar
from agnoload.streams.shards import length_or_none, need_length

__all__ = [
    "ChainDataset",
    "FileStream",
    "IterableDataset",
    "MappedStream",
    "Mixture",
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
