"""torch's own things through the loader: samples of tensors, generators, datasets and samplers as they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader
from agnoload.testing import check_resume

torch = pytest.importorskip("torch")
import torch.utils.data as data  # noqa: E402


def same(one: Any, other: Any) -> bool:
    """Whether two lists of batches are equal bit for bit, with their types."""
    return repr(agnoload.map_leaves(_plain, one)) == repr(agnoload.map_leaves(_plain, other))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return type(leaf).__name__, leaf.dtype, leaf.shape, leaf.tolist()
    return type(leaf).__name__, leaf


class Tensors(agnoload.Dataset):
    """Samples of tensors, and draws from torch's global generator."""

    def __init__(self) -> None:
        self.table = torch.arange(400.0).reshape(40, 10)
        self.layer = torch.nn.Linear(10, 2)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {
            "row": self.table[index],
            "half": self.table[index, :3].bfloat16(),
            "out": self.layer(self.table[index]),
            "draw": torch.rand(2, dtype=torch.float64),
            "label": torch.tensor(index),
        }


@pytest.mark.slow
def test_samples_of_tensors_with_any_workers_and_any_backend() -> None:
    dataset = Tensors()
    jax = pytest.importorskip("jax")
    state = torch.random.get_rng_state()
    found: dict[str, Any] = {}
    for backend in ("numpy", "torch", "jax"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", agnoload.AgnoloadWarning)  # JAX narrows
            found[backend] = list(DataLoader(dataset, 8, shuffle=True, seed=3, backend=backend))
    assert torch.equal(state, torch.random.get_rng_state())
    with DataLoader(dataset, 8, shuffle=True, seed=3, backend="torch", num_workers=1) as loader:  # JAX is not there
        assert same(found["torch"], list(loader))
    batch = found["torch"][0]
    assert {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in batch.items()} == {
        "row": (torch.float32, (8, 10)),
        "half": (torch.bfloat16, (8, 3)),
        "out": (torch.float32, (8, 2)),
        "draw": (torch.float64, (8, 2)),
        "label": (torch.int64, (8,)),
    }
    draws = torch.cat([batch["draw"] for batch in found["torch"]])
    assert len(draws.unique()) == 80
    for one, other in zip(found["torch"], found["numpy"], strict=True):
        assert torch.equal(one["row"], dataset.table[one["label"]])
        assert torch.equal(one["half"], dataset.table[one["label"], :3].bfloat16())
        assert other["half"].dtype.name == "bfloat16"
        for name in one:
            assert (other[name] == agnoload.get_backend("torch").to_numpy(one[name])).all()
    assert isinstance(found["jax"][0]["half"], jax.Array)
    assert found["jax"][0]["half"].dtype == "bfloat16"
    assert found["jax"][0]["label"].tolist() == batch["label"].tolist()


def stacked(samples: list[Any]) -> Any:
    """A collate function as one written for torch."""
    rows = torch.stack([sample["row"] for sample in samples])
    return {"rows": rows, "first": rows[0], "count": len(samples), "lengths": torch.tensor([len(r) for r in rows])}


@pytest.mark.slow
def test_a_collate_function_that_returns_tensors_is_used_as_it_is() -> None:
    dataset = Tensors()
    alone = list(DataLoader(dataset, 8, collate_fn=stacked, backend="torch", seed=0))
    assert all(torch.equal(batch["rows"], dataset.table[8 * n : 8 * n + 8]) for n, batch in enumerate(alone))
    assert same(list(DataLoader(dataset, 8, collate_fn=stacked, seed=0)), alone)  # with the backend of NumPy, too
    with DataLoader(dataset, 8, collate_fn=stacked, num_workers=1, seed=0, persistent_workers=True) as loader:
        batches = list(loader)
        assert same(batches, alone)
        arena = loader._keeper.kept._pools[0].arena  # type: ignore[union-attr]
        assert arena.lent == 5  # a tensor of a worker's lies in its slot
        kept = [batch["first"] for batch in batches]
        del batches
        assert arena.lent == 5
        del kept
        assert arena.lent == 0


def test_a_generator_of_torch_gives_a_seed_for_each_epoch() -> None:
    def orders(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(range(40), 40, shuffle=True, generator=generator, backend="torch")
        return [batch.tolist() for _ in range(3) for batch in loader]

    state = torch.random.get_rng_state()
    first = orders(3)
    assert first == orders(3)
    assert first != orders(4)
    assert len({tuple(order) for order in first}) == 3
    sampler = agnoload.RandomSampler(range(40), generator=torch.Generator().manual_seed(5))
    again = agnoload.RandomSampler(range(40), generator=torch.Generator().manual_seed(5))
    one, other = (list(DataLoader(range(40), 8, sampler=s, backend="torch")) for s in (sampler, again))
    assert same(one, other)
    assert torch.equal(state, torch.random.get_rng_state())


# -- torch's own datasets and samplers


class Pictures:
    """As torchvision's: a list of files and a target for each, a loader and a transform."""

    def __init__(self, transform: Any = None) -> None:
        self.samples = [(f"{n}.png", n % 3) for n in range(20)]
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        path, target = self.samples[index]
        image = np.full((4, 4, 3), int(path.partition(".")[0]), np.uint8)
        return image if self.transform is None else self.transform(image), target

    def __len__(self) -> int:
        return len(self.samples)


class Scaled(torch.nn.Module):
    def forward(self, image: Any) -> Any:
        return torch.from_numpy(image).permute(2, 0, 1).float() / 255


def both(dataset: Any, batch_size: int | None = 4, **options: Any) -> tuple[list[Any], list[Any]]:
    """All batches of torch's loader and of ours."""
    theirs = list(data.DataLoader(dataset, batch_size, **options))
    ours = list(DataLoader(dataset, batch_size, backend="torch", **options))
    return theirs, ours


def as_lists(batches: list[Any]) -> list[Any]:
    """torch makes lists of tuples, and that is all that may differ."""
    return [list(batch) if isinstance(batch, tuple) else batch for batch in batches]


DATASETS = {
    "TensorDataset": lambda: data.TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10)),
    "Subset": lambda: data.Subset(data.TensorDataset(torch.arange(10)), [7, 1, 3, 3]),
    "random_split": lambda: data.random_split(range(10), [0.5, 0.5], torch.Generator().manual_seed(0))[0],
    "ConcatDataset": lambda: data.ConcatDataset([data.TensorDataset(torch.arange(n)) for n in (5, 3)]),
    "StackDataset": lambda: data.StackDataset(image=torch.rand(6, 2), label=list(range(6))),
    "Pictures": lambda: Pictures(Scaled()),
}


@pytest.mark.parametrize("batch_size", [4, None])
def test_torchs_map_datasets_give_what_they_give_there(batch_size: int | None) -> None:
    for make in DATASETS.values():
        theirs, ours = both(make(), batch_size)
        assert same(as_lists(ours), as_lists(theirs))


class Counted(data.IterableDataset):  # type: ignore[name-defined,misc]
    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return ({"n": torch.tensor(n), "x": torch.full((2,), float(n))} for n in range(self.length))


@pytest.mark.slow
def test_torchs_streams_give_what_they_give_there_and_are_not_doubled_by_workers() -> None:
    for batch_size in (4, None):
        for dataset in (Counted(), data.ChainDataset([Counted(3), Counted(4)])):
            theirs, ours = both(dataset, batch_size)
            assert same(ours, theirs)
            assert ours
    with DataLoader(Counted(), 4, backend="torch", num_workers=2) as loader:
        assert same(list(loader), list(DataLoader(Counted(), 4, backend="torch")))


SAMPLERS = {
    "SequentialSampler": lambda: {"sampler": data.SequentialSampler(range(20))},
    "SubsetRandomSampler": lambda: {"sampler": data.SubsetRandomSampler([3, 5, 7], torch.Generator().manual_seed(0))},
    "RandomSampler": lambda: {"sampler": data.RandomSampler(range(20), generator=torch.Generator().manual_seed(0))},
    "WeightedRandomSampler": lambda: {
        "sampler": data.WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 30, generator=torch.Generator().manual_seed(0))
    },
    "BatchSampler": lambda: {"batch_sampler": data.BatchSampler(data.SequentialSampler(range(20)), 3, True)},
    "DistributedSampler": lambda: {"sampler": data.DistributedSampler(range(20), 3, 1, seed=5)},
}


def test_torchs_samplers_give_what_they_give_there() -> None:
    dataset = data.TensorDataset(torch.arange(20))
    for name, make in SAMPLERS.items():
        size = 1 if name == "BatchSampler" else 4
        theirs, ours = data.DataLoader(dataset, size, **make()), DataLoader(dataset, size, backend="torch", **make())
        assert len(ours) == len(theirs)
        assert same(as_lists(list(ours)), as_lists(list(theirs)))


def test_torchs_distributed_sampler_gets_the_epoch_by_itself() -> None:
    def epochs(by_hand: bool, make: Any) -> list[Any]:
        sampler = data.DistributedSampler(range(20), 2, 1, seed=5)
        loader = make(range(20), sampler=sampler, batch_size=4)
        found = []
        for epoch in range(3):
            if by_hand:
                sampler.set_epoch(epoch)
            found.append([batch.tolist() for batch in loader])
        return found

    ours = epochs(False, DataLoader)
    assert ours == epochs(True, data.DataLoader)
    assert ours[0] != ours[1] != ours[2]
    assert ours == epochs(True, DataLoader)


def test_torchs_samplers_resume_on_the_loaders_seed_and_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    loaders = [DataLoader(range(9), 4, sampler=data.RandomSampler(range(9)), seed=3) for _ in range(2)]
    orders = [[batch.tolist() for _ in range(2) for batch in loader] for loader in loaders]
    assert orders[0] == orders[1]
    assert orders[0][:3] != orders[0][3:]
    for batches in (False, True):
        sampler: Any = data.RandomSampler(range(9))
        options = {"batch_sampler": data.BatchSampler(sampler, 4, False)} if batches else {"sampler": sampler}
        check_resume(lambda options=options: DataLoader(range(9), seed=3, **options))
    assert torch.equal(torch.get_rng_state(), before)
