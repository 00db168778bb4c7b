"""Streams: datasets that are iterated, and who yields what of them.

`cursor`: how a stream is read. `base`: the streams, and `map`, `filter` and `+` of them. `ranks`, `shuffle`, `group`,
`mixture`, `files`: what else is made of streams. `read` and `plan`: a worker's and the loader's side;
`compare`: whether workers have read the same.
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
from agnoload.streams.plan import Rest, StreamPlan, StreamRequest
from agnoload.streams.ranks import RankStream, settle_ranks, split_of
from agnoload.streams.read import COLLATING, Portion, StreamReader, is_shared
from agnoload.streams.shuffle import ShuffledStream

__all__ = [
    "COLLATING",
    "ChainDataset",
    "FileStream",
    "FilteredStream",
    "IterableDataset",
    "MappedStream",
    "Mixture",
    "Portion",
    "RankStream",
    "Rest",
    "ShuffledStream",
    "StreamPlan",
    "StreamReader",
    "StreamRequest",
    "first_states",
    "go_back",
    "is_indexed",
    "is_shared",
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
