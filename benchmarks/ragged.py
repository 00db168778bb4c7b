"""What batching items of unequal length costs, beside the barest rival for each form.

256 arrays of 10 to 500 rows x 64 float32 (and 256 short token sequences), packed against one `np.concatenate` of the
same rows and padded against `torch.nn.utils.rnn.pad_sequence`. The rivals take turns in one process, each writing into
fresh memory every time; ratios are of medians. `python benchmarks/ragged.py [repeats]`; torch is left out if missing.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from statistics import median, quantiles
from typing import Any

import numpy as np

from agnoload.batching.packing import pack_sequences
from agnoload.batching.ragged import Ragged
from agnoload.batching.ragged_collate import ragged_collate

Work = Callable[[], Any]


def alternate(works: dict[str, Work], repeats: int) -> dict[str, tuple[list[float], float]]:
    """Wall times of each work and its CPU seconds, the works taking turns."""
    walls: dict[str, list[float]] = {name: [] for name in works}
    cpu = dict.fromkeys(works, 0.0)
    for number in range(repeats + 3):
        for name, work in works.items():
            busy, start = time.process_time(), time.perf_counter()
            kept = work()
            wall, busy = time.perf_counter() - start, time.process_time() - busy
            del kept
            if number >= 3:  # the first rounds warm up
                walls[name].append(wall)
                cpu[name] += busy
    return {name: (walls[name], cpu[name]) for name in works}


def report(title: str, works: dict[str, Work], repeats: int) -> None:
    """Print a table: the first work is what the others are compared with."""
    print(f"\n{title}")
    results = alternate(works, repeats)
    rival = median(next(iter(results.values()))[0])
    for name, (walls, cpu) in results.items():
        low, _, high = quantiles(walls, n=4)
        middle = median(walls)
        print(
            f"  {name:34}{middle * 1e6:9.0f} us  ({low * 1e6:.0f} to {high * 1e6:.0f})"
            f"{middle / rival:7.2f} x{cpu / repeats * 1e6:10.0f} us CPU"
        )


def compare(title: str, items: Sequence[np.ndarray[Any, Any]], repeats: int) -> None:
    items = list(items)
    packed, padded, listed = (ragged_collate(form) for form in ("packed", "padded", "list"))
    ragged = Ragged.from_list(items)
    report(
        f"{title}: packed",
        {
            "np.concatenate": lambda: np.concatenate(items),
            "Ragged.from_list": lambda: Ragged.from_list(items),
            "ragged_collate('packed')": lambda: packed(items),
            "ragged_collate('list')": lambda: listed(items),
        },
        repeats,
    )
    rivals: dict[str, Work] = {}
    try:
        import torch
        from torch.nn.utils.rnn import pad_sequence
    except ImportError:
        print("torch is not installed: no pad_sequence to compare with")
    else:
        tensors = [torch.from_numpy(item) for item in items]
        rivals["pad_sequence of tensors"] = lambda: pad_sequence(tensors, batch_first=True)
        rivals["pad_sequence of arrays"] = lambda: pad_sequence(list(map(torch.from_numpy, items)), batch_first=True)
    report(
        f"{title}: padded",
        {**rivals, "ragged_collate('padded')": lambda: padded(items), "Ragged.padded": ragged.padded},
        repeats,
    )


def main(repeats: int) -> None:
    print(f"{date.today()}, {platform.machine()}, NumPy {np.__version__}, Python {platform.python_version()}")
    print(f"python {' '.join(sys.argv)}")
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 501, 256)
    compare("256 x 10..500 rows x 64 float32", [rng.random((n, 64), np.float32) for n in lengths], repeats)
    compare("256 x 1..60 int64", [rng.integers(0, 1000, n) for n in rng.integers(1, 61, 256)], repeats)
    many = rng.integers(1, 2000, 200_000)
    report("200,000 lengths into rows of 2,048", {"pack_sequences": lambda: pack_sequences(many, 2048)}, 5)
    print(f"  fill {pack_sequences(many, 2048).fill:.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
