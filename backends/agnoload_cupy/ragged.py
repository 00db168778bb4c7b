"""Ragged fields of a batch on the GPU; a field is what `agnoload.ragged_collate` has made of it."""

from __future__ import annotations

from typing import Any

import cupy

from agnoload import Packed, Padded, Ragged


def segment_ids(field: Packed | Ragged, axis: int = 0) -> Any:
    """Which item each row of the values (along `axis`) came from: int64; rows of padding have the number of items."""
    rows = cupy.arange(field.values.shape[axis])
    return cupy.searchsorted(cupy.asarray(field.offsets)[1:], rows, side="right")


def mask(field: Padded, side: str = "right", axis: int = 0) -> Any:
    """Which places of a padded field hold rows: bool, (items, width), for items padded at `side` along their `axis`."""
    lengths = cupy.asarray(field.lengths)[:, None]
    width = field.values.shape[1 + axis]
    places = cupy.arange(width)
    return places >= width - lengths if side == "left" else places < lengths
