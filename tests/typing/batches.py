"""What type checkers say of batches: each line that reveals a type says which one. Read by mypy and pyright, never run.

Arrays are written NDArray[dtype].
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypedDict, reveal_type

import numpy as np
import numpy.typing as npt

import agnoload
from agnoload import DataLoader

F32 = npt.NDArray[np.float32]


class Arrays(agnoload.Dataset[F32]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int, /) -> F32:
        return np.zeros(2, np.float32)


class Labelled(agnoload.Dataset[tuple[F32, int]]): ...


class Triples(agnoload.Dataset[tuple[F32, float, np.int16]]): ...


class Named(NamedTuple):
    x: F32
    y: int


class NamedTuples(agnoload.Dataset[Named]): ...


class Fields(agnoload.Dataset[dict[str, F32]]): ...


class Mixed(agnoload.Dataset[dict[str, F32 | int]]): ...


class Texts(agnoload.Dataset[dict[str, str]]): ...


class Row(TypedDict):
    x: F32
    name: str


class Rows(agnoload.Dataset[Row]): ...


class Captioned(agnoload.Dataset[tuple[F32, str]]): ...


class Unsaid(agnoload.Dataset[Any]): ...


class UnsaidFields(agnoload.Dataset[dict[str, Any]]): ...


class Strangers:
    """Somebody's dataset, of no class of ours."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> tuple[F32, F32]:
        return np.zeros(2, np.float32), np.zeros(2, np.float32)


class Stream(agnoload.IterableDataset[F32]):
    def __iter__(self) -> Iterator[F32]:
        return iter([np.zeros(2, np.float32)])


class Generated:
    def __iter__(self) -> Iterator[dict[str, F32]]:
        return iter([{"x": np.zeros(2, np.float32)}])


def names_of(samples: list[tuple[F32, int]]) -> set[str]:
    return {str(label) for _, label in samples}


def counted(samples: Sequence[Any]) -> int:
    return len(samples)


def of_one(sample: F32) -> bytes:
    return sample.tobytes()


# With a collate_fn, a batch is what that returns.
reveal_type(next(iter(DataLoader(Labelled(), 2, collate_fn=names_of))))  # set[str]
reveal_type(next(iter(DataLoader(Labelled(), 2, collate_fn=counted, num_workers=2))))  # int
reveal_type(next(iter(DataLoader(Labelled(), 2, collate_fn=lambda samples: 2 * len(samples)))))  # int
reveal_type(next(iter(DataLoader(Unsaid(), 2, collate_fn=names_of))))  # set[str]
reveal_type(next(iter(DataLoader(Arrays(), None, collate_fn=of_one))))  # bytes

# Without one, it is an array or has the samples' container.
reveal_type(next(iter(DataLoader(Arrays(), 2, shuffle=True))))  # NDArray[Any]
reveal_type(next(iter(DataLoader(Labelled(), 2, True, num_workers="auto"))))  # tuple[Any, ...]
reveal_type(next(iter(DataLoader(Triples(), 2))))  # tuple[Any, ...]
reveal_type(next(iter(DataLoader(Strangers(), 2))))  # tuple[Any, ...]
reveal_type(next(iter(DataLoader(Fields(), 2))))  # dict[str, Any]
reveal_type(next(iter(DataLoader(Mixed(), 2))))  # dict[str, Any]
reveal_type(next(iter(DataLoader([1.5, 2.5], 2))))  # NDArray[Any]
reveal_type(next(iter(DataLoader(range(4), 2))))  # NDArray[Any]
reveal_type(next(iter(DataLoader(np.zeros((4, 2)), 2))))  # NDArray[float64]
reveal_type(next(iter(DataLoader(Stream(), 2))))  # NDArray[Any]
reveal_type(next(iter(DataLoader(Generated(), 2))))  # dict[str, Any]
reveal_type(next(iter(DataLoader(Labelled(), None))))  # tuple[NDArray[float32], int]

# Where leaves cannot be said, the containers can.
reveal_type(next(iter(DataLoader(Captioned(), 2))))  # tuple[Any, ...]
reveal_type(next(iter(DataLoader(Texts(), 2))))  # dict[str, Any]
reveal_type(next(iter(DataLoader(Rows(), 2))))  # Any
reveal_type(next(iter(DataLoader(UnsaidFields(), 2))))  # dict[str, Any]
reveal_type(next(iter(DataLoader(Labelled(), 2, backend="torch", device="cuda"))))  # tuple[Any, ...]
reveal_type(next(iter(DataLoader(Fields(), 2, backend=agnoload.Backend()))))  # dict[str, Any]
reveal_type(next(iter(DataLoader(Arrays(), 2, backend="jax"))))  # Any
reveal_type(next(iter(DataLoader(Labelled(), 2, backend="jax", collate_fn=names_of))))  # Any
reveal_type(next(iter(DataLoader(Unsaid(), 2))))  # Any
reveal_type(next(iter(DataLoader(NamedTuples(), 2))))  # Any

# However a batch is taken.
loader = DataLoader(Arrays(), 2, persistent_workers=True, num_workers=2, seed=3)
for batch in loader:
    reveal_type(batch)  # NDArray[Any]
for batch in loader.steps(3):
    reveal_type(batch)  # NDArray[Any]
reveal_type(list(loader))  # list[NDArray[Any]]
with DataLoader(Labelled(), 2) as opened:
    for _pixels, labels in opened:
        reveal_type(labels)  # Any


# An annotation says what a batch is.
class Shuffled(DataLoader[F32]): ...


def of_arrays() -> DataLoader[F32]:
    return DataLoader(Arrays(), 2)


def of_batches() -> DataLoader[set[str]]:
    return DataLoader(Labelled(), 2, collate_fn=names_of)


reveal_type(next(iter(Shuffled(Arrays(), 2))))  # NDArray[float32]
reveal_type(next(iter(of_arrays())))  # NDArray[float32]
reveal_type(next(iter(of_batches())))  # set[str]

# Datasets say what a sample is.
x, y = np.zeros((4, 2)), np.zeros(4)
reveal_type(agnoload.ArrayDataset(x, y)[0])  # tuple[NDArray[Any], NDArray[Any]]
reveal_type(agnoload.ArrayDataset(x=x, y=y)[0])  # dict[str, NDArray[Any]]
reveal_type(next(iter(DataLoader(agnoload.ArrayDataset(x, y), 2))))  # tuple[Any, ...]
reveal_type(next(iter(DataLoader(agnoload.TensorDataset(x=x, y=y), 2))))  # dict[str, Any]
reveal_type(agnoload.StackDataset(Arrays(), Labelled())[0])  # tuple[NDArray[float32], tuple[NDArray[float32], int]]
reveal_type((Arrays() + Arrays())[0])  # NDArray[float32]
reveal_type(agnoload.ConcatDataset([Arrays(), Arrays()])[0])  # NDArray[float32]
reveal_type(agnoload.Subset(Labelled(), [0])[0])  # tuple[NDArray[float32], int]
reveal_type(agnoload.random_split(Labelled(), [0.5, 0.5])[0][0])  # tuple[NDArray[float32], int]
reveal_type(agnoload.CachedDataset(Arrays(), 1 << 20)[0])  # NDArray[float32]
reveal_type(agnoload.PackedList(["a"])[0])  # str
reveal_type(Arrays().map(of_one)[0])  # bytes
reveal_type(next(iter(Stream().map(of_one))))  # bytes
reveal_type(next(iter(Stream().shuffle(10).filter(of_one))))  # NDArray[float32]
reveal_type(next(iter(agnoload.Mixture([Stream(), Stream()], [1, 1]))))  # NDArray[float32]
reveal_type(
    next(iter(agnoload.Mixture([Arrays(), Arrays()], [1, 1], with_source=True)))
)  # tuple[NDArray[float32], int]
