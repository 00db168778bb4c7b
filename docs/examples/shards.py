"""Preprocessing with NumPy alone: all cores compute spectra of signals, this process writes them as `.npy` shards.

python docs/examples/shards.py OUT [--signals 2000] [--workers 2]
"""

import argparse
from pathlib import Path

import numpy as np

import agnoload


class Spectra(agnoload.Dataset):
    """Sample i is the magnitude spectrum, 2,049 float32 values, of a noisy tone."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        tone = np.sin(np.arange(4096) * (index + 1) / 1000)
        noise = agnoload.sample_rng().normal(scale=0.1, size=4096)
        return np.abs(np.fft.rfft(tone + noise)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write spectra of made-up signals as shards.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--signals", type=int, default=2000)
    parser.add_argument("--shard", type=int, default=500, help="spectra in one file")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    loader = agnoload.DataLoader(Spectra(options.signals), options.shard, num_workers=options.workers, seed=0)
    with loader:
        for number, batch in enumerate(loader):
            np.save(options.out / f"shard-{number:04}.npy", batch)
            print(f"shard {number + 1} of {len(loader)}: {len(batch)} spectra")


if __name__ == "__main__":
    main()
