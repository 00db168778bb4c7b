"""Runs to medians, a table and a chart; written into the places of the documentation that are marked for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import loaders

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "results.json"
RIVALS = HERE / "results" / "rivals.json"
CHART = HERE.parent / "docs" / "images" / "performance.svg"
PAGES = [HERE.parent / "README.md", HERE.parent / "docs" / "performance.md"]


@dataclass(frozen=True)
class Headline:
    """The figure that a workload is about; `scale` takes it into `unit`."""

    what: str
    key: str
    unit: str
    more_is_better: bool
    scale: float = 1.0


_BIG = 64 * 3 * 224 * 224 * 4
_STACKED = 32 * 3 * 128 * 128 * 4
HEADLINES = {
    "small": Headline("32 samples of 1 KiB and a label, 2 workers", "rate", "batches/s", True),
    "fields": Headline("256 dicts of 20 short arrays, 2 workers", "rate", "batches/s", True),
    "big": Headline("64 float32 images of (3, 224, 224), 2 workers", "rate", "GB/s", True, _BIG / 1e9),
    "decode": Headline("32 JPEGs to (3, 224, 224) float32, 2 workers", "rate", "batches/s", True),
    "stacked": Headline("32 images of (3, 128, 128) by `np.stack`, 2 workers", "rate", "GB/s", True, _STACKED / 1e9),
    "inmem": Headline("256 shuffled rows of 50,000 images in memory, no workers", "rate", "batches/s", True),
    "start-forkserver": Headline("first batch, 2 workers, forkserver", "seconds", "s", False),
    "start-early": Headline("first batch, forkserver, loader made 1 s before", "seconds", "s", False),
    "start-spawn": Headline("first batch, 2 workers, spawn", "seconds", "s", False),
    "kept": Headline("3,000 batches of `small`, all kept", "seconds", "s", False),
    "weighted": Headline("100,000 draws by 100,000,000 weights", "seconds", "s", False),
    "shuffle": Headline("first index of a shuffle of 100,000,000", "seconds", "ms", False, 1000),
    "strings": Headline("memory a worker gains over 1,000,000 strings", "mib", "MiB", False),
    "plain": Headline("a later epoch: 40 batches of small arrays, 2 workers", "seconds", "s", False),
    "imports-first": Headline("first epoch of a module that imports torch, forkserver", "seconds", "s", False),
    "imports-early": Headline(
        "first epoch of a module that imports torch, loader made 5 s before", "seconds", "s", False
    ),
    "imports": Headline("a later epoch of a module that imports torch (torch: fork)", "seconds", "s", False),
    "imports-forkserver": Headline("a later epoch of a module that imports torch, forkserver", "seconds", "s", False),
    "imports-threads": Headline("a later epoch of a module that imports torch, 2 threads", "seconds", "s", False),
    "imports-kept": Headline(
        "a later epoch of a module that imports torch, 2 kept workers (torch: fork)", "seconds", "s", False
    ),
    "torchvision-first": Headline("first epoch, 2,000 JPEGs by torchvision, forkserver", "seconds", "s", False),
    "torchvision-early": Headline(
        "first epoch, 2,000 JPEGs by torchvision, loader made 5 s before", "seconds", "s", False
    ),
    "torchvision": Headline("a later epoch, 2,000 JPEGs by torchvision (torch: fork)", "seconds", "s", False),
    "torchvision-forkserver": Headline("a later epoch, 2,000 JPEGs by torchvision, forkserver", "seconds", "s", False),
    "torchvision-threads": Headline("a later epoch, 2,000 JPEGs by torchvision, 2 threads", "seconds", "s", False),
    "torchvision-kept": Headline(
        "a later epoch, 2,000 JPEGs by torchvision, 2 kept workers (torch: fork)", "seconds", "s", False
    ),
}
DETAILS = {
    "first_s": ("first batch (s)", 1.0),
    "p50_ms": ("`next()`, median (ms)", 1.0),
    "p99_ms": ("`next()`, p99 (ms)", 1.0),
    "cpu_ms": ("CPU a batch (ms)", 1.0),
    "peak_mib": ("peak memory (MiB)", 1.0),
    "first_epoch_s": ("first epoch (s)", 1.0),
    "worker_mib": ("a worker's own memory (MiB)", 1.0),
    "gap_s": ("next epoch begins after (ms)", 1000.0),
    "descriptors": ("descriptors", 1.0),
    "bytes_a_weight": ("bytes a weight", 1.0),
    "extra_mib": ("extra memory (MiB)", 1.0),
}

LONGEST_BAR = 100
"""A bar of the chart ends there; its figure is written beside it."""


def figure(value: float) -> str:
    """Two to three digits, as a person would say it."""
    if value >= 1000:
        return f"{round(value, 1 - len(str(int(value))) + 2):,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def unasked(run: dict[str, Any]) -> bool:
    """Whether a loader was not made for a workload, rather than unable to bear it."""
    return bool(run.get("error") == f"no {run['loader']} for this workload")


class Results:
    """All runs of one session of measuring, by workload and loader."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.runs: list[dict[str, Any]] = [run for run in document["runs"] if not unasked(run)]
        self.loaders = list(dict.fromkeys(run["loader"] for run in self.runs))
        self.workloads = [name for name in HEADLINES if any(run["workload"] == name for run in self.runs)]

    def values(self, workload: str, loader: str, key: str) -> list[float]:
        runs = [r for r in self.runs if (r["workload"], r["loader"]) == (workload, loader)]
        return sorted(float(r[key]) for r in runs if key in r)

    def headline(self, workload: str, loader: str) -> float | None:
        line = HEADLINES[workload]
        values = self.values(workload, loader, line.key)
        return median(values) * line.scale if values else None

    def ratio(self, workload: str, rival: str) -> float | None:
        """How many times better than the rival; the median over the median."""
        ours, theirs = self.headline(workload, "agnoload"), self.headline(workload, rival)
        if not ours or not theirs:
            return None
        return ours / theirs if HEADLINES[workload].more_is_better else theirs / ours

    def ratios(self, workload: str, rival: str, key: str | None = None) -> list[float]:
        """The same round by round, which a machine that has other work does not disturb as much; sorted.

        `key`: of another figure, less of which is better.
        """
        line = HEADLINES[workload]
        more, key = (False, key) if key else (line.more_is_better, line.key)
        ours, theirs = (
            [float(r[key]) for r in self.runs if (r["workload"], r["loader"]) == (workload, name) and key in r]
            for name in ["agnoload", rival]
        )
        return sorted(a / b if more else b / a for a, b in zip(ours, theirs, strict=False) if a and b)

    def failure(self, workload: str, loader: str) -> str | None:
        for run in self.runs:
            if (run["workload"], run["loader"]) == (workload, loader) and "error" in run:
                return str(run["error"])
        return None

    def cell(self, workload: str, loader: str, spread: bool) -> str:
        line = HEADLINES[workload]
        values = [v * line.scale for v in self.values(workload, loader, line.key)]
        if not values:
            failure = self.failure(workload, loader)
            return "refused" if failure else ""
        text = f"{figure(median(values))} {line.unit}"
        if spread and len(values) > 1:
            text += f" ({figure(values[0])} to {figure(values[-1])})"
        return text


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short_table(results: Results) -> str:
    """One line a workload: ours, torch's, how many times."""
    rows = []
    for name in results.workloads:
        ratio = results.ratio(name, "torch")
        cells = [results.cell(name, loader, spread=False) for loader in ["agnoload", "torch"]]
        rows.append([HEADLINES[name].what, *cells, f"**{figure(ratio)} x**" if ratio else ""])
    return markdown_table(["", "agnoload", "torch", ""], rows)


def rivals_table(results: Results) -> str:
    """How many times better than each rival, round by round: median, least and greatest, and the same of CPU time.

    Nothing where there are no rivals.
    """
    rivals = [name for name in loaders.RIVALS if name in results.loaders]
    if not rivals:
        return ""
    others = [name for name in ("torch", *rivals, "floor") if name in results.loaders]
    rows = []
    for name in results.workloads:
        cells = []
        for rival in others:
            found, cpu = results.ratios(name, rival), results.ratios(name, rival, "cpu_ms")
            cell = f"{figure(median(found))} ({figure(found[0])} to {figure(found[-1])})" if found else ""
            cells.append(cell + (f", CPU {figure(median(cpu))}" if cpu else ""))
        if any(cells):
            rows.append([f"`{name}`", HEADLINES[name].what, *cells])
    return markdown_table(["workload", "", *[f"x {name}" for name in others]], rows)


def full_table(results: Results) -> str:
    """All loaders with spread, and the ratios to torch and to the floor."""
    rows = []
    for name in results.workloads:
        ratios = [results.ratio(name, rival) for rival in ["torch", "floor"]]
        cells = [results.cell(name, loader, spread=True) for loader in results.loaders]
        rows.append([f"`{name}`", HEADLINES[name].what, *cells, *[figure(r) if r else "" for r in ratios]])
    return markdown_table(["workload", "", *results.loaders, "x torch", "x floor"], rows)


def detail_table(results: Results) -> str:
    """What a rate does not show: first batch, tail, CPU, memory."""
    keys = [k for k in DETAILS if any(k in run for run in results.runs)]
    rows = []
    for name in results.workloads:
        for loader in results.loaders:
            found = [results.values(name, loader, key) for key in keys]
            cells = [figure(median(v) * DETAILS[k][1]) if v else "" for k, v in zip(keys, found, strict=True)]
            if any(cells):
                rows.append([f"`{name}`", loader, *cells])
    return markdown_table(["workload", "loader", *[DETAILS[k][0] for k in keys]], rows)


def conditions(results: Results) -> str:
    """Where the figures come from, in one sentence."""
    m = results.document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    return (
        f"Measured on {m['date']} with `{results.document['command']}` on {m['cores']} cores ({m['processor']}, "
        f"{m['memory_gib']} GiB, {m['system']}), Python {m['python']}, {versions}: medians of "
        f"{results.document['rounds']} alternating rounds, each run in a process of its own."
    )


def draw(results: Results, path: Path = CHART) -> None:
    """Bars: how many times better than torch's loader, on a log scale, with both figures beside."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    names = [n for n in results.workloads if results.ratio(n, "torch")]
    names.sort(key=lambda n: results.ratio(n, "torch") or 0)
    ratios = [results.ratio(n, "torch") or 0 for n in names]
    style = {"font.family": "sans-serif", "font.size": 10, "svg.hashsalt": "agnoload", "svg.fonttype": "none"}
    with pyplot.rc_context(style):  # small, and what a bar means above it: a phone shows it as it is
        chart, axes = pyplot.subplots(figsize=(5.6, 0.62 * len(names) + 1.1))
        lengths = [min(ratio, LONGEST_BAR) for ratio in ratios]
        least = min(1, *ratios) * 0.9
        axes.barh(range(len(names)), lengths, color="#2a6f97", height=0.36)
        axes.set_xscale("log")
        axes.set_xlim(least, max(*lengths) * 12)
        axes.set_xticks([t for t in (1, 2, 5, 10, 20, 50, 100) if t <= max(*lengths) * 1.5])
        axes.set_yticks([])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for row, (name, ratio, length) in enumerate(zip(names, ratios, lengths, strict=True)):
            axes.vlines(1, row - 0.26, row + 0.26, color="#444", linewidth=1)
            axes.text(least * 1.02, row + 0.24, HEADLINES[name].what.replace("`", ""), va="bottom")
            pair = " against ".join(results.cell(name, loader, spread=False) for loader in ["agnoload", "torch"])
            axes.text(length * 1.06, row, f"{figure(ratio)} x   ({pair})", va="center", fontsize=9)
        axes.set_title("Times better than torch's DataLoader (agnoload against torch)", loc="left", fontsize=10, pad=14)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_facecolor("white")
        path.parent.mkdir(parents=True, exist_ok=True)
        chart.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None}, facecolor="white")
        pyplot.close(chart)


Part = Callable[[Results], str]
PARTS: dict[str, Part] = {
    "short": short_table,
    "full": full_table,
    "detail": detail_table,
    "conditions": conditions,
}
RIVAL_PARTS: dict[str, Part] = {"rivals": rivals_table, "rivals_conditions": conditions}


def fill(page: str, results: Results, parts: dict[str, Part] = PARTS) -> str:
    """A page with those of its marked places (`<!-- figures: NAME -->` to `<!-- end -->`) written anew."""

    def write(match: re.Match[str]) -> str:
        return f"{match[1]}\n{parts[match[2]](results)}\n{match[3]}" if match[2] in parts else match[0]

    return re.sub(r"(<!-- figures: (\w+) -->)\n.*?(<!-- end -->)", write, page, flags=re.DOTALL)


def publish(path: Path = RESULTS) -> None:
    """Write the chart, and the tables of the README and the performance page; the rivals have a file of their own."""
    results = Results(json.loads(path.read_text()))
    draw(results)
    rivals = Results(json.loads(RIVALS.read_text())) if RIVALS.exists() else None
    for page in PAGES:
        text = fill(page.read_text(), results)
        page.write_text(fill(text, rivals, RIVAL_PARTS) if rivals else text)
