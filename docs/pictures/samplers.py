"""Draws what each sampler puts into the batches of an epoch: `python docs/pictures/samplers.py` writes docs/images/.

Every picture is made by the sampler itself, at seed 0 and epoch 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

import agnoload

IMAGES = Path(__file__).parents[1] / "images"
SIZES = (60, 30, 18, 12)
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), SIZES))
LENGTHS = np.clip(np.random.default_rng(1).lognormal(2.6, 0.6, 60).astype(int), 3, 60)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
PADDING = "#d9d9d9"
INK = "#333333"
CELL, GAP = 12, 8


def rectangle(x: float, y: float, width: float, height: float, colour: str, edge: str = "#ffffff") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="{edge}"/>'


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole file; the title is what a screen reader says."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="sans-serif" font-size="10">'
    )
    body = [f"<title>{escape(title)}</title>", rectangle(0, 0, width, height, "#ffffff"), *parts]
    return "\n".join([head, *body, "</svg>", ""])


def classes(title: str, batches: list[list[int]]) -> str:
    """A column for each batch, a cell for each sample, sorted and coloured by class."""
    tallest = max(map(len, batches))
    parts = [text(8, 14 + CELL, "class", "start")]
    for k, size in enumerate(SIZES):
        y = 22 + CELL + k * (CELL + 4)
        parts += [rectangle(8, y, CELL, CELL, COLOURS[k]), text(24, y + 10, f"{k}: {size} items", "start")]
    for number, batch in enumerate(batches):
        x = 100 + number * (CELL + GAP)
        parts += [rectangle(x, 10 + i * CELL, CELL, CELL, COLOURS[k]) for i, k in enumerate(np.sort(LABELS[batch]))]
        parts.append(text(x + CELL / 2, 24 + tallest * CELL, str(number)))
    width = 100 + len(batches) * (CELL + GAP)
    parts.append(text(92, 24 + tallest * CELL, "batch", "end"))
    return picture(width, 34 + tallest * CELL, title, parts)


def lengths(title: str, batches: list[list[int]]) -> str:
    """A group of bars for each batch: as long as the item, and in grey what padding adds."""
    bar, x, parts, bottom = 7, 10.0, [], 10 + int(LENGTHS.max()) * 2
    for number, batch in enumerate(batches):
        longest = int(LENGTHS[batch].max())
        for place, index in enumerate(batch):
            length, left = int(LENGTHS[index]), x + place * bar
            parts.append(rectangle(left, bottom - 2 * longest, bar, 2 * longest, PADDING))
            parts.append(rectangle(left, bottom - 2 * length, bar, 2 * length, COLOURS[0]))
        parts.append(text(x + len(batch) * bar / 2, bottom + 14, str(number)))
        x += len(batch) * bar + GAP
    return picture(x + 2, bottom + 22, title, parts)


def ranks(title: str, world: int, items: int) -> str:
    """A row for each rank and a cell for each index that it gets, for the three ways to treat what is left over."""
    parts, size, y = [], 22, 10
    for tail in ("pad", "drop", "keep"):
        parts.append(text(8, y + world * size / 2 + 4, f'tail="{tail}"', "start"))
        for rank in range(world):
            sampler = agnoload.DistributedSampler(range(items), world, rank, shuffle=False, tail=tail)
            parts.append(text(130, y + 15, f"rank {rank}", "end"))
            for place, (index, repeat) in enumerate(zip(sampler, sampler.is_padding.tolist(), strict=True)):
                x = 140 + place * size
                parts.append(rectangle(x, y, size, size, PADDING if repeat else COLOURS[rank]))
                parts.append(text(x + size / 2, y + 15, str(index), colour=INK if repeat else "#ffffff"))
            y += size
        y += GAP * 2
    return picture(150 + size * -(-items // world), y - GAP, title, parts)


def in_batches(sampler: Any) -> list[list[int]]:
    return list(agnoload.BatchSampler(sampler, 12, False))


PICTURES: dict[str, Callable[[], str]] = {
    "sequential": lambda: classes("In the order of the data", in_batches(agnoload.SequentialSampler(LABELS))),
    "random": lambda: classes("In a random order", in_batches(agnoload.RandomSampler(LABELS, seed=0))),
    "weighted": lambda: classes(
        "Drawn by weight, each class alike",
        in_batches(agnoload.WeightedRandomSampler(agnoload.imbalance_weights(LABELS), 120, seed=0)),
    ),
    "balanced": lambda: classes(
        "Balanced, alpha 1", list(agnoload.BalancedBatchSampler(LABELS, 12, alpha=1.0, seed=0))
    ),
    "balanced-half": lambda: classes(
        "Balanced, alpha 0.5", list(agnoload.BalancedBatchSampler(LABELS, 12, alpha=0.5, seed=0))
    ),
    "balanced-stratified": lambda: classes(
        "Balanced, alpha 0: the shares of the data", list(agnoload.BalancedBatchSampler(LABELS, 12, alpha=0.0, seed=0))
    ),
    "balanced-random": lambda: classes(
        "Balanced on average", list(agnoload.BalancedBatchSampler(LABELS, 12, kind="random", seed=0))
    ),
    "class-uniform": lambda: classes(
        "Three classes, four samples of each", list(agnoload.ClassUniformBatchSampler(LABELS, 3, 4, seed=0))
    ),
    "cyclic": lambda: classes(
        "Two classes in turn, six samples of each", list(agnoload.CyclicClassBatchSampler(LABELS, 2, 12, seed=0))
    ),
    "buckets": lambda: lengths(
        "Batches of similar length, at most 120 tokens with padding",
        list(agnoload.BucketBatchSampler(LENGTHS, max_tokens=120, seed=0)),
    ),
    "no-buckets": lambda: lengths(
        "The same items in a random order, six a batch",
        list(agnoload.BatchSampler(agnoload.RandomSampler(LENGTHS, seed=0), 6, False)),
    ),
    "distributed": lambda: ranks("Ten indices on three ranks", 3, 10),
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / f"sampler-{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
