"""Streams: datasets that are iterated, and who yields what of them.

`cursor`: how a stream is read. `base`: the streams, and `map`, `filter` and `+` of them. `ranks`, `shuffle`, `group`,
`mixture`, `files`: what else is made of streams.
"""

from agnoload.streams.base import (
    ChainDataset,
    FilteredStream,
    IterableDataset,
    MappedStream,
    first_states,
    need_length,
    part_without_state,
)
from agnoload.streams.cursor import go_back, is_indexed, is_stream, length_or_none
from agnoload.streams.files import FileStream, read_jsonl, read_lines, read_npy, read_npz, read_parquet, read_tar
from agnoload.streams.mixture import Mixture
from agnoload.streams.ranks import RankStream, settle_ranks, split_of
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
    "settle_ranks",
    "split_of",
]
