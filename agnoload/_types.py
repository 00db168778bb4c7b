"""What a type checker knows of a batch: what `collate_fn` returns, or what becomes of a sample's type.

Types can name a batch of arrays, numbers, tuples and dicts, with NumPy's arrays as leaves. Another backend's arrays
have no name here, so they are `Any`, in the same containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, final

import numpy as np
import numpy.typing as npt

from agnoload.backend.base import Backend

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", default=Any, covariant=True)
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
B = TypeVar("B")
K = TypeVar("K")
ScalarT = TypeVar("ScalarT", bound=np.generic)

Leaf = npt.NDArray[Any] | np.generic | complex
"""What becomes an array: arrays and numbers; a type checker takes `complex` for all of Python's numbers."""


class Samples(Protocol[S_co]):
    """Gives a sample for an index; to be loaded it needs a length, too."""

    def __getitem__(self, index: int, /) -> S_co: ...


Source = Samples[S] | Iterable[S]
"""A dataset, of either kind."""


class Named(Protocol):
    """A named tuple: in a batch its fields keep their names but are arrays, which no type can say."""

    def _asdict(self) -> dict[str, Any]: ...


@final
class Unsaid:
    """Nothing has this type but `Any`: it matches samples of an unknown type, and no others."""


class KeywordOptions(TypedDict, total=False):
    """The options that go by keyword only, but for `backend`."""

    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    device: Any
    seed: int | None
    worker_type: Literal["process", "thread"]
    on_error: Literal["raise", "skip", "replace"] | Callable[[Exception, Any], str]
    max_worker_restarts: int
    retry: Any
    max_failed: float | None


class KnownOptions(KeywordOptions, total=False):
    """All options that do not change the type of a batch."""

    sampler: Any
    batch_sampler: Any
    num_workers: int | Literal["auto"]
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], object] | None
    multiprocessing_context: Any
    generator: Any


class NumpyOptions(KnownOptions, total=False):
    """Batches are collated by default, and stay NumPy's."""

    collate_fn: None
    backend: Literal["numpy"]


class AnyOptions(KnownOptions, total=False):
    """Batches are collated by default, for any backend."""

    collate_fn: None
    backend: str | Backend
