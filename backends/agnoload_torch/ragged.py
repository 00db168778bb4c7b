"""Ragged fields of a batch in torch's own forms; a field is what `agnoload.ragged_collate` has made of it."""

from __future__ import annotations

from typing import Any

import torch

from agnoload import Packed, Padded, Ragged


def to_nested(field: Packed | Ragged) -> Any:
    """The items as one nested tensor of the jagged layout, which shares the memory of the values.

    `values()` and `offsets()` of the result give the two tensors back. Items must differ along their first axis.

    >>> field = Packed(torch.arange(4), torch.tensor([0, 3, 4]))
    >>> [item.tolist() for item in to_nested(field).unbind()]
    [[0, 1, 2], [3]]
    """
    values, offsets = torch.as_tensor(field.values), torch.as_tensor(field.offsets)
    return torch.nested.nested_tensor_from_jagged(values[: int(offsets[-1])], offsets)


def segment_ids(field: Packed | Ragged, axis: int = 0) -> Any:
    """Which item each row of the values (along `axis`) came from: int64, what graph libraries call the batch vector.

    Rows of padding have the number of items. Nothing waits for the device.

    >>> segment_ids(Packed(torch.zeros(6, 2), torch.tensor([0, 3, 4]))).tolist()
    [0, 0, 0, 1, 2, 2]
    """
    offsets = torch.as_tensor(field.offsets)
    rows = torch.arange(field.values.shape[axis], device=offsets.device)
    return torch.searchsorted(offsets[1:], rows, right=True)


def mask(field: Padded, side: str = "right", axis: int = 0) -> Any:
    """Which places of a padded field hold rows: bool, (items, width), for items padded at `side` along their `axis`.

    >>> mask(Padded(torch.zeros(2, 3), torch.tensor([3, 1]))).tolist()
    [[True, True, True], [True, False, False]]
    """
    lengths = torch.as_tensor(field.lengths)[:, None]
    width = field.values.shape[1 + axis]
    places = torch.arange(width, device=lengths.device)
    return places >= width - lengths if side == "left" else places < lengths
