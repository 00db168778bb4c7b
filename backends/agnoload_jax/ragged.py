"""Ragged fields of a batch in the forms that JAX's functions take; a field is what `agnoload.ragged_collate` has made.

All work within `jit`. It compiles again for each shape: `ragged_collate(multiple_of=...)` keeps them few.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from agnoload import Packed, Padded, Ragged


def segment_ids(field: Packed | Ragged, axis: int = 0) -> Any:
    """Which item each row of the values (along `axis`) came from, for `jax.ops.segment_sum` and its like: int32.

    Rows of padding have the number of items, so with `num_segments` items they are left out.

    >>> segment_ids(Packed(jnp.zeros((6, 2)), jnp.array([0, 3, 4]))).tolist()
    [0, 0, 0, 1, 2, 2]
    """
    rows = jnp.arange(field.values.shape[axis])
    return jnp.searchsorted(jnp.asarray(field.offsets)[1:], rows, side="right").astype(jnp.int32)


def mask(field: Padded, side: str = "right", axis: int = 0) -> Any:
    """Which places of a padded field hold rows: bool, (items, width), for items padded at `side` along their `axis`.

    >>> mask(Padded(jnp.zeros((2, 3)), jnp.array([3, 1]))).tolist()
    [[True, True, True], [True, False, False]]
    """
    lengths = jnp.asarray(field.lengths)[:, None]
    width = field.values.shape[1 + axis]
    places = jnp.arange(width)
    return places >= width - lengths if side == "left" else places < lengths
