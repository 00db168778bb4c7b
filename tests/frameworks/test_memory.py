"""Where the memory of batches is, and how long it stays: no framework is imported at the top, so workers have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader
from agnoload.batching.tree import walk


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


class Numbered(agnoload.Dataset):
    """No torch in it: its workers have none either."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full((3, 5), index, np.float32), "pair": (index, [np.int16(index), f"sample {index}"])}


def spied() -> Any:
    """A torch backend that remembers where the arrays lie that it is given."""
    from agnoload_torch import TorchBackend

    class Spy(TorchBackend):
        def __init__(self) -> None:
            super().__init__()
            self.addresses: list[int] = []

        def convert(self, leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                self.addresses.append(leaf.ctypes.data)
            return super().convert(leaf)

    return Spy()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "worker_type": "thread"}, {"num_workers": 2}])
def test_tensors_lie_in_the_memory_of_the_batch_and_have_the_types_of_the_samples(
    torch: Any, options: dict[str, Any]
) -> None:
    spy = spied()
    with DataLoader(Numbered(), 4, backend=spy, persistent_workers=True, **options) as loader:
        kept = list(loader)
        tensors = [leaf for batch in kept for leaf in (batch["x"], batch["pair"][0], batch["pair"][1][0])]
        assert [tensor.data_ptr() for tensor in tensors] == spy.addresses
        for number, batch in enumerate(kept):
            rows = [*range(4 * number, 4 * number + 4)]
            index, (short, names) = batch["pair"]
            assert [leaf.dtype for leaf in (batch["x"], index, short)] == [torch.float32, torch.int64, torch.int16]
            assert batch["x"].shape == (4, 3, 5)
            assert batch["x"][:, 0, 0].tolist() == index.tolist() == short.tolist() == rows
            assert names == [f"sample {n}" for n in rows]
        if options == {"num_workers": 2}:
            arena = loader._keeper.kept._pools[0].arena
            slots = [arena[number].mapping for number in range(1, arena._next)]
            for tensor in tensors:
                assert sum(m.address <= tensor.data_ptr() < m.address + m.nbytes for m in slots) == 1
            assert arena.lent == 10
            del kept, batch, index, short, tensors, tensor
            assert arena.lent == 0


def test_what_is_written_into_a_batch_does_not_reach_the_dataset(torch: Any) -> None:
    x = np.arange(8, dtype=np.float32)
    for dataset in (agnoload.ArrayDataset(x), list(x.reshape(8, 1))):
        for batch in DataLoader(dataset, 4, backend="torch"):
            (batch[0] if isinstance(batch, tuple) else batch).fill_(-1)
    assert x.tolist() == [*range(8)]


# -- batches that are kept


class Filled(agnoload.Dataset):
    """Batch k of one sample holds k."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full((16, 8), index, np.int32), "more": np.full(3, index, np.float32)}


def torchs(name: str) -> Any:
    return getattr(pytest.importorskip("torch"), name)


Way = Callable[[Any], Any]
WAYS: dict[str, list[Way]] = {
    "numpy": [
        lambda batch: batch,
        lambda batch: batch["x"][0, 3:7, ::2],
        lambda batch: torchs("from_numpy")(batch["x"])[0, 1],
        lambda batch: torchs("from_dlpack")(batch["x"]),
        lambda batch: pytest.importorskip("jax").numpy.from_dlpack(batch["x"]),
    ],
    "torch": [lambda batch: batch, lambda batch: batch["x"][0, 3:7, ::2]],
    "jax": [lambda batch: batch],
}
"""What of a batch is kept."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", WAYS)
def test_batches_that_are_kept_stay_and_their_slots_come_free_with_the_last_view(backend: str) -> None:
    # Before there is a pool: JAX sets variables of the environment at its import, and kept workers are started again.
    for module in ("torch", "jax"):
        pytest.importorskip(module)
    with DataLoader(Filled(), num_workers=2, persistent_workers=True, backend=backend) as loader:
        for way in WAYS[backend]:
            kept = [way(batch) for batch in loader]
            arena = loader._keeper.kept._pools[0].arena  # type: ignore[union-attr]
            assert arena.lent == 200
            for number, value in enumerate(kept):
                assert all((np.asarray(leaf) == number).all() for _, leaf in walk(value)), number
            del value
            kept[10:] = []
            assert arena.lent == 10
            for number, again in enumerate(loader):  # into the memory that has come free
                assert (np.asarray(again["x"]) == number).all()
            del again
            assert all((np.asarray(leaf) == 3).all() for _, leaf in walk(kept[3]))
            kept.clear()
            assert arena.lent == 0
            arena.trim()
            assert len(arena._free) + len(arena._cold) == arena._next - arena._reserved
