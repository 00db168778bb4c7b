"""The data that every loader is given: plain map-style datasets, NumPy in, NumPy out."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ENDLESS = 10**9
"""A length that no timed run reaches, so that rates are measured without an epoch's border."""


class Rows:
    """`width` bytes and a label: what is left is the loader's own cost."""

    def __init__(self, width: int = 1024, length: int = ENDLESS) -> None:
        self.length = length
        self.rows = np.random.default_rng(0).integers(0, 256, (1024, width), np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.rows[index % 1024], index % 10


class Fields:
    """A dict of `count` short float32 arrays: a table's row, an agent's step."""

    def __init__(self, count: int = 20, length: int = ENDLESS) -> None:
        self.length = length
        rng = np.random.default_rng(0)
        self.columns = {f"field{k:02}": rng.random((1024, 8), np.float32) for k in range(count)}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: column[index % 1024] for name, column in self.columns.items()}


class Images:
    """Float32 images that are already in memory, more of them than a cache holds: moving bytes is all there is."""

    def __init__(self, side: int = 224, length: int = ENDLESS) -> None:
        self.length = length
        self.images = np.random.default_rng(0).random((128, 3, side, side), np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return self.images[index % 128]


class Jpegs:
    """JPEG files (in memory) of 500 x 375, decoded and resized to (3, 224, 224) float32."""

    def __init__(self, length: int = ENDLESS) -> None:
        from PIL import Image

        self.length = length
        rng = np.random.default_rng(0)
        self.files = []
        for _ in range(64):  # coarse noise made smooth: some 45 KB a file, as photographs have
            coarse = Image.fromarray(rng.integers(0, 256, (75, 100, 3), np.uint8))
            file = io.BytesIO()
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        from PIL import Image

        image = Image.open(io.BytesIO(self.files[index % 64])).resize((224, 224))
        return np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)


@contextmanager
def plain(length: int) -> Iterator[Any]:
    """Small arrays, for which a worker imports nothing."""
    yield Rows(64, length)


@contextmanager
def imports(length: int) -> Iterator[Any]:
    """The same out of a module that imports torch."""
    from benchmarks.imports import Light

    yield Light(64, length)


@contextmanager
def torchvision(length: int) -> Iterator[Any]:
    """A folder of JPEGs of 64 x 64 in ten classes, as torchvision reads it and cuts out a part."""
    from PIL import Image
    from torchvision import datasets, transforms

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for number in range(length):
            path = Path(folder, f"class{number % 10}", f"{number}.jpeg")
            path.parent.mkdir(exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
            coarse.resize((64, 64), Image.Resampling.BICUBIC).save(path, quality=85)
        steps = [transforms.Resize(72), transforms.RandomCrop(64), transforms.ToTensor()]
        yield datasets.ImageFolder(folder, transforms.Compose(steps))


FOLDERS = {"torchvision": torchvision, "imports": imports, "plain": plain}
"""Datasets that are iterated epoch after epoch."""

NEEDS = {"torchvision": "torchvision", "imports": "torch"}
"""The modules of which a workload is about, whatever loads it."""


def in_memory(count: int = 50_000) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the size of CIFAR-10."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 32, 32, 3), np.uint8), rng.integers(0, 10, count)


def strings(count: int) -> list[str]:
    return [f"sentence number {i:09} of a corpus, of some sixty characters" for i in range(count)]


@dataclass(frozen=True)
class Stream:
    """One dataset, loaded batch after batch for as long as the clock runs."""

    dataset: Callable[[], Any]
    batch_size: int
    workers: int = 2
    collate_fn: Callable[[list[Any]], Any] | None = None


STREAMS = {
    "small": Stream(Rows, 32),
    "fields": Stream(Fields, 256),
    "big": Stream(Images, 64),
    "decode": Stream(Jpegs, 32),
    "stacked": Stream(partial(Images, side=128), 32, collate_fn=np.stack),
}
