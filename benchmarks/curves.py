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
from benchmarks.report import Results, conditions, figure, fill, markdown_table

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "curves.json"
CHARTS = HERE.parent / "docs" / "images"
PAGE = HERE.parent / "docs" / "performance.md"


@dataclass(frozen=True)
class Curve:
    """One option of one workload, and the figure that is watched."""

    title: str
    workload: str
    option: str
    values: tuple[int, ...]
    key: str = "rate"
    unit: str = "rate, of the floor's"
    quick: bool = True
    """For a second; not where that is over before what was loaded ahead is used up."""

    @property
    def file(self) -> str:
        return f"curve-{self.workload}-{self.option}.svg"


CURVES = [
    Curve("samples of 1 KiB a batch", "small", "batch_size", (1, 4, 16, 64, 256, 1024)),
    Curve("bytes a sample, 32 a batch", "small", "width", (64, 1024, 16_384, 262_144, 1_048_576)),
    Curve("fields a sample, 256 a batch", "fields", "count", (1, 3, 10, 30, 100)),
    Curve("workers, on images in memory", "big", "workers", (0, 1, 2, 4, 8)),
    Curve("workers, on JPEGs", "decode", "workers", (0, 1, 2, 4, 8), quick=False),
    Curve(
        "length of a shuffle",
        "shuffle",
        "length",
        (10**4, 10**6, 10**7, 10**8, 10**9),
        "seconds",
        "s to the first index",
    ),
]
TOO_LONG = ("shuffle", 10**9)
"""A list of so many integers does not fit into memory: only agnoload is asked."""


def run_all(loaders: list[str], rounds: int, quick: bool) -> list[dict[str, Any]]:
    runs = []
    for curve in CURVES:
        for value in curve.values[:2] if quick else curve.values:
            able = [name for name in loaders if name == "agnoload" or (curve.workload, value) != TOO_LONG]
            runs += measure([f"{curve.workload}@{curve.option}={value}"], able, rounds, quick or curve.quick)
    return runs


def figures(runs: list[dict[str, Any]], curve: Curve, value: int, loader: str, key: str) -> list[float]:
    """One figure of a loader, round by round."""
    name = f"{curve.workload}@{curve.option}={value}"
    return [float(r[key]) for r in runs if (r["workload"], r["loader"]) == (name, loader) and key in r]


def ratios(
    runs: list[dict[str, Any]], curve: Curve, value: int, loader: str, rival: str, key: str | None = None
) -> list[float]:
    """How many times better a loader is than another, by what is watched or another figure; by rounds, sorted."""
    key = key or curve.key
    pairs = zip(*(figures(runs, curve, value, name, key) for name in (loader, rival)), strict=False)
    return sorted(ours / theirs if key == "rate" else theirs / ours for ours, theirs in pairs if ours and theirs)


def watched(runs: list[dict[str, Any]], curve: Curve, value: int, loader: str) -> list[float]:
    """What a chart shows: a rate as a share of the floor's in the same round, seconds as they are; sorted."""
    if curve.key == "rate":
        return ratios(runs, curve, value, loader, "floor")
    return sorted(figures(runs, curve, value, loader, curve.key))


def said(found: list[float], unit: str = "") -> str:
    """Median, least and greatest."""
    if not found:
        return ""
    return f"{figure(median(found))}{unit} ({figure(found[0])} to {figure(found[-1])})"


def table(results: Results) -> str:
    """A row for each point: how many times better than torch's loader and than the floor, in time and in CPU time."""
    runs = results.runs
    rows = []
    for curve in CURVES:
        for value in curve.values:
            cells = [
                said(ratios(runs, curve, value, "agnoload", rival, key))
                for key in (None, "cpu_ms")
                for rival in ("torch", "floor")
            ]
            itself = "" if curve.key == "rate" else said(watched(runs, curve, value, "agnoload"), " s")
            rows.append([curve.title, f"{value:,}", *cells, itself])
    return markdown_table(["", "", "x torch", "x floor", "CPU x torch", "CPU x floor", "itself"], rows)


def draw(document: dict[str, Any], folder: Path = CHARTS) -> None:
    """A small chart for each curve, both axes logarithmic; least and greatest of the rounds are shaded."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    colours = {"agnoload": "#2a6f97", "torch": "#d1603d", "floor": "#999999"}
    for curve in CURVES:
        with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "agnoload", "svg.fonttype": "none"}):
            chart, axes = pyplot.subplots(figsize=(3.4, 2.5), layout="constrained")
            for loader, colour in colours.items():
                found = {value: watched(document["runs"], curve, value, loader) for value in curve.values}
                at = [value for value, rounds in found.items() if rounds]
                axes.plot(at, [median(found[v]) for v in at], "o-", color=colour, label=loader, markersize=3)
                axes.fill_between(at, [found[v][0] for v in at], [found[v][-1] for v in at], color=colour, alpha=0.2)
            axes.set_xscale("symlog" if 0 in curve.values else "log")
            axes.set_xticks(curve.values, [short(value) for value in curve.values])
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if curve.key == "rate" else (1,)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
            axes.set_title(curve.title, loc="left", fontsize=10)
            axes.set_ylabel(curve.unit)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
            chart.savefig(folder / curve.file, format="svg", metadata={"Date": None}, facecolor="white")
            pyplot.close(chart)


def short(value: int) -> str:
    """A number for an axis: 16K, 10M."""
    for unit, letter in [(2**20, "Mi"), (2**10, "Ki"), (10**9, "G"), (10**6, "M"), (10**3, "k")]:
        if value >= unit and value % unit == 0:
            return f"{value // unit}{letter}"
    return str(value)


PARTS = {"curves": table, "curves_conditions": conditions}


def publish(path: Path) -> None:
    """Draw the charts, and write the table into the performance page."""
    document = json.loads(path.read_text())
    draw(document)
    PAGE.write_text(fill(PAGE.read_text(), Results(document), PARTS))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--loaders", default="agnoload,torch,floor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two points a curve, one round")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where the runs are kept")
    parser.add_argument("--table", action="store_true", help="measure nothing: write table and charts from that file")
    options = parser.parse_args()
    if options.table:
        publish(options.json)
        return
    rounds = 1 if options.quick else options.rounds
    runs = run_all(options.loaders.split(","), rounds, options.quick)
    command = " ".join(["python -m benchmarks.curves", *sys.argv[1:]])
    document = {"machine": machine(), "command": command, "rounds": rounds, "runs": runs}
    options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
