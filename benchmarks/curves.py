"""How the rates change with batch size, sample size, fields, workers and length: `python -m benchmarks.curves`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.__main__ import measure
from benchmarks.measure import machine

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "curves.json"
CHART = HERE.parent / "docs" / "images" / "curves.svg"


@dataclass(frozen=True)
class Curve:
    """One option of one workload, and the figure that is watched."""

    title: str
    workload: str
    option: str
    values: tuple[int, ...]
    key: str = "rate"
    unit: str = "batches/s"


CURVES = [
    Curve("samples of 1 KiB a batch", "small", "batch_size", (1, 4, 16, 64, 256, 1024)),
    Curve("bytes a sample, 32 a batch", "small", "width", (64, 1024, 16_384, 262_144, 1_048_576)),
    Curve("fields a sample, 256 a batch", "fields", "count", (1, 3, 10, 30, 100)),
    Curve("workers, on images in memory", "big", "workers", (0, 1, 2, 4, 8)),
    Curve("workers, on JPEGs", "decode", "workers", (0, 1, 2, 4, 8)),
    Curve("length of a shuffle", "shuffle", "length", (10**4, 10**6, 10**7, 10**8, 10**9), "seconds", "s to first"),
]
TOO_LONG = ("shuffle", 10**9)
"""A list of so many integers does not fit into memory: only agnoload is asked."""


def run_all(loaders: list[str], rounds: int, quick: bool) -> list[dict[str, Any]]:
    runs = []
    for curve in CURVES:
        for value in curve.values[:2] if quick else curve.values:
            able = [name for name in loaders if name == "agnoload" or (curve.workload, value) != TOO_LONG]
            runs += measure([f"{curve.workload}@{curve.option}={value}"], able, rounds, quick=True)
    return runs


def draw(document: dict[str, Any], path: Path = CHART) -> None:
    """One panel a curve, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    colours = {"agnoload": "#2a6f97", "torch": "#d1603d", "floor": "#999999"}
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "agnoload", "svg.fonttype": "none"}):
        chart, panels = pyplot.subplots(2, 3, figsize=(11, 6), layout="constrained")
        for curve, axes in zip(CURVES, panels.flat, strict=True):
            for loader, colour in colours.items():
                points = []
                for value in curve.values:
                    name = f"{curve.workload}@{curve.option}={value}"
                    runs = [r for r in document["runs"] if (r["workload"], r["loader"]) == (name, loader)]
                    found = [r[curve.key] for r in runs if curve.key in r]
                    if found:
                        points.append((value, median(found)))
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", color=colour, label=loader, markersize=4)
            axes.set_xscale("symlog" if 0 in curve.values else "log")
            axes.set_yscale("log")
            axes.set_title(curve.title, loc="left", fontsize=10)
            axes.set_ylabel(curve.unit)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        panels.flat[0].legend(frameon=False)
        chart.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
        pyplot.close(chart)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--loaders", default="agnoload,torch,floor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two points a curve, one round")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where the runs are kept")
    parser.add_argument("--table", action="store_true", help="measure nothing: draw the chart from that file")
    options = parser.parse_args()
    if options.table:
        draw(json.loads(options.json.read_text()))
        return
    rounds = 1 if options.quick else options.rounds
    runs = run_all(options.loaders.split(","), rounds, options.quick)
    command = " ".join(["python -m benchmarks.curves", *sys.argv[1:]])
    document = {"machine": machine(), "command": command, "rounds": rounds, "runs": runs}
    options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
