"""What type checkers say of a user's program; checked by mypy and pyright, never run."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import agnoload


class Pairs(agnoload.Dataset[tuple[int, str]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, str(index)


def total(samples: list[tuple[int, str]]) -> int:
    return sum(number for number, _ in samples)


def stacked(samples: list[Any]) -> dict[str, npt.NDArray[np.float64]]:
    return {"x": np.stack(samples)}


loader = agnoload.DataLoader(Pairs(), 2, collate_fn=total)
assert_type(next(iter(loader)), int)
for batch in loader:
    assert_type(batch, int)
for batch in loader.steps(3):
    assert_type(batch, int)

with agnoload.DataLoader(Pairs(), 2, collate_fn=stacked) as arrays:
    for fields in arrays:
        assert_type(fields["x"], npt.NDArray[np.float64])
assert_type(len(arrays), int)
assert_type(arrays.seed, int)
assert_type(agnoload.sample_rng(), np.random.Generator)
