"""Samples read from an HDF5 file, which every worker opens for itself, a torch network, and either loader.

    python docs/examples/hdf5.py FILE --loader agnoload    # or torch: the same loss

The file is written first where there is none.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch

import agnoload


def write_waves(path: Path, count: int = 800) -> None:
    """Noisy sines of one of four frequencies, in chunks of one wave: a sample is one read."""
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=count)
    angles = (np.arange(64) + rng.integers(64, size=(count, 1))) * (labels[:, None] + 1) / 8
    waves = np.sin(angles) + rng.normal(scale=0.5, size=(count, 64))
    with h5py.File(path, "w") as file:
        file.create_dataset("wave", data=waves, dtype=np.float32, chunks=(1, 64))
        file["label"] = labels


class Waves:
    """((64,) float32, label); an open file cannot be sent to a worker, so each opens it with its first sample."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: h5py.File | None = None
        with h5py.File(path) as file:
            self.length = len(file["label"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        if self.file is None:
            self.file = h5py.File(self.path)
        return self.file["wave"][index], self.file["label"][index]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tell waves apart that an HDF5 file holds.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--loader", choices=["agnoload", "torch"], default="agnoload")
    options = parser.parse_args()
    if not options.file.exists():
        write_waves(options.file)
    dataset = Waves(options.file)
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    if options.loader == "torch":
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=order, num_workers=2)
    else:
        loader = agnoload.DataLoader(dataset, batch_size=32, sampler=order, num_workers=2, backend="torch")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
