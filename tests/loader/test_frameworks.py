"""Batches for torch and JAX, and samples made of their arrays, end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agnoload import DataLoader

INLINE, PROCESSES = {"num_workers": 0}, {"num_workers": 1}
SLOW = pytest.param(PROCESSES, marks=pytest.mark.slow)
"""A worker that needs the framework takes seconds to import it."""
each_pool = pytest.mark.parametrize(
    "workers",
    [INLINE, SLOW, {"num_workers": 2, "worker_type": "thread"}],
    ids=["inline", "processes", "threads"],
)


class Rows:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"x": np.full((2, 3), index, np.float32), "y": index, "name": f"row {index}"}


class Tensors(Rows):
    """Samples that a torch dataset would give."""

    def __getitem__(self, index: int) -> Any:
        import torch

        return {"x": torch.full((2, 3), index, dtype=torch.float32), "y": torch.tensor(index), "name": f"row {index}"}


class JaxArrays(Rows):
    def __getitem__(self, index: int) -> Any:
        import jax.numpy as jnp

        return {"x": jnp.full((2, 3), index, jnp.float32), "y": jnp.int32(index), "name": f"row {index}"}


def check(batches: list[Any], array: type) -> None:
    assert [len(batch["name"]) for batch in batches] == [4, 4, 2]
    for number, batch in enumerate(batches):
        indices = list(range(10))[4 * number : 4 * number + 4]
        assert isinstance(batch["x"], array)
        assert isinstance(batch["y"], array)
        assert np.asarray(batch["x"]).tolist() == [[[float(i)] * 3] * 2 for i in indices]
        assert str(np.asarray(batch["x"]).dtype) == "float32"
        assert np.asarray(batch["y"]).tolist() == indices
        assert batch["name"] == [f"row {i}" for i in indices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "backend", "workers"),
    [
        (Rows, "torch", INLINE), (Rows, "torch", {"num_workers": 2}), (Tensors, "numpy", INLINE),
        (Tensors, "torch", INLINE), (Tensors, "numpy", PROCESSES),
        pytest.param(Tensors, "torch", {"num_workers": 2}, marks=pytest.mark.slow),
        (Tensors, "torch", {"num_workers": 2, "worker_type": "thread"}),
    ],
)  # fmt: skip
def test_torch_and_numpy_samples_give_torch_and_numpy_batches(
    dataset: Any, backend: str, workers: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    with DataLoader(dataset(), 4, backend=backend, **workers) as loader:
        check(list(loader), torch.Tensor if backend == "torch" else np.ndarray)


@each_pool
@pytest.mark.parametrize("backend", ["numpy", "jax"])
@pytest.mark.filterwarnings("ignore:.*int64.*int32")
def test_jax_samples_give_jax_and_numpy_batches(workers: dict[str, Any], backend: str) -> None:
    jax = pytest.importorskip("jax")
    with DataLoader(JaxArrays(), 4, backend=backend, **workers) as loader:
        check(list(loader), jax.Array if backend == "jax" else np.ndarray)


def test_c02_a_framework_that_has_no_int64_says_so_once(recwarn: pytest.WarningsRecorder) -> None:
    jax = pytest.importorskip("jax")

    class Large(Rows):
        def __getitem__(self, index: int) -> Any:
            return np.int64(2**40 + 7)

    with pytest.warns(UserWarning, match="int64.*int32") as caught, DataLoader(Large(), 4, backend="jax") as loader:
        batches = list(loader)
    assert len(caught) == 1
    assert isinstance(batches[0], jax.Array)


def test_torch_shares_the_memory_of_the_batch() -> None:
    torch = pytest.importorskip("torch")
    with DataLoader(Rows(), 4, backend="torch", num_workers=1) as loader:
        iterator = iter(loader)
        first = next(iterator)
        arena = iterator._pool.arena  # type: ignore[attr-defined]
        assert arena.lent >= 1
        assert first["x"].untyped_storage().data_ptr() % 64 == 0
        first["x"] += 1
        assert torch.equal(first["x"][0], torch.ones(2, 3))


@each_pool
def test_a_collate_fn_may_return_tensors(workers: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")

    def stack(samples: list[Any]) -> Any:
        return torch.stack([torch.from_numpy(sample["x"]) for sample in samples])

    with DataLoader(Rows(), 4, collate_fn=stack, **workers) as loader:
        batches = list(loader)
    assert [tuple(batch.shape) for batch in batches] == [(4, 2, 3), (4, 2, 3), (2, 2, 3)]
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert batches[1][0, 0, 0] == 4


@each_pool
def test_a_loader_takes_torch_s_dataset_and_generator(workers: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10) * 2)
    options: Any = {"batch_size": 4, "shuffle": True}
    with DataLoader(data, **options, generator=torch.Generator().manual_seed(3), **workers) as loader:
        found = list(loader)
    again = list(DataLoader(data, **options, generator=torch.Generator().manual_seed(3)))
    assert [pair[0].tolist() for pair in found] == [pair[0].tolist() for pair in again]
    assert all(type(pair) is tuple and (pair[1] == 2 * pair[0]).all() for pair in found)
    assert sorted(np.concatenate([pair[0] for pair in found]).tolist()) == list(range(10))


@pytest.mark.parametrize("workers", [INLINE, PROCESSES], ids=str)
def test_torch_s_samplers_are_taken_as_they_are(workers: dict[str, Any]) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    batches = torch_data.BatchSampler(torch_data.SequentialSampler(range(10)), 4, drop_last=True)
    with DataLoader(range(10), batch_sampler=batches, **workers) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with DataLoader(range(10), 4, sampler=torch_data.SubsetRandomSampler([7, 8, 9]), **workers) as loader:
        assert sorted(next(iter(loader)).tolist()) == [7, 8, 9]
