"""The benchmarks measure what they say and report what was measured; how fast anything is, no test asks."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def run(loader: str, workload: str, value: float, key: str = "rate") -> dict[str, Any]:
    return {"loader": loader, "workload": workload, key: value}


def results(*runs: dict[str, Any]) -> Any:
    machine = {"date": "2026-01-31", "cores": 2, "processor": "P", "memory_gib": 8, "system": "Linux", "python": "3.11"}
    document = {"machine": machine | {"versions": {"numpy": "2.4"}}, "command": "c", "rounds": 3, "runs": list(runs)}
    return module("report").Results(document)


def test_a_ratio_is_that_of_the_medians_and_above_one_where_we_are_better() -> None:
    rates = [run("agnoload", "small", v) for v in (100, 300, 200)] + [run("torch", "small", v) for v in (50, 10, 20)]
    assert results(*rates).ratio("small", "torch") == 10
    times = [run("agnoload", "kept", 2.0, "seconds"), run("torch", "kept", 8.0, "seconds")]
    assert results(*times).ratio("kept", "torch") == 4
    assert results(*times).ratio("kept", "floor") is None


def test_a_table_shows_median_spread_and_refusals() -> None:
    refusal = {"loader": "torch", "workload": "weighted", "error": "number of categories cannot exceed 2^24"}
    table = module("report").full_table(
        results(
            *[run("agnoload", "small", v) for v in (5000, 5712, 6000)],
            run("agnoload", "weighted", 0.5, "seconds"),
            refusal,
        )
    )
    assert "5,710 batches/s (5,000 to 6,000)" in table
    assert "| 0.5 s | refused |" in table


def test_filling_a_page_changes_marked_places_only_and_twice_is_once() -> None:
    report = module("report")
    page = "before\n<!-- figures: short -->\nold\n<!-- end -->\nafter\n"
    filled = report.fill(page, results(run("agnoload", "small", 10), run("torch", "small", 5)))
    assert filled.startswith("before\n<!-- figures: short -->\n| ")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert "old" not in filled
    assert "**2 x**" in filled
    assert report.fill(filled, results(run("agnoload", "small", 10), run("torch", "small", 5))) == filled


def test_the_floor_makes_the_batches_that_the_loader_makes() -> None:
    import agnoload

    floor, workloads = module("floor"), module("workloads")
    for stream in [workloads.Stream(workloads.Rows, 4), workloads.Stream(workloads.Fields, 4)]:
        ours = iter(agnoload.DataLoader(stream.dataset(), 4))
        for theirs in itertools.islice(floor.batches(stream), 5):
            for a, b in zip(leaves(next(ours)), leaves(theirs), strict=True):
                np.testing.assert_array_equal(a, b, strict=True)


def leaves(batch: Any) -> list[np.ndarray]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def needs(loader: str) -> None:
    if reason := module("loaders").reason_against(loader):
        pytest.skip(reason)


SAME = """
import itertools, sys
import numpy as np
from benchmarks import floor, loaders, workloads

def leaves(batch):
    return list(batch.values()) if isinstance(batch, dict) else list(batch)

if __name__ == "__main__":
    loader = sys.argv[1]
    for stream in [workloads.Stream(workloads.Rows, 4), workloads.Stream(workloads.Fields, 4)]:
        theirs = iter(loaders.of_stream(loader, stream))
        for ours in itertools.islice(floor.batches(stream), 5):
            for a, b in zip(leaves(ours), leaves(next(theirs)), strict=True):
                np.testing.assert_array_equal(a, np.asarray(b), strict=True)
        del theirs
    print("same")
"""


def run_script(folder: Path, text: str, *arguments: str) -> str:
    """What a program prints that can import the benchmarks."""
    script = folder / "script.py"
    script.write_text(text)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", "grain", "spdl"])
def test_rivals_are_given_the_same_work(loader: str, tmp_path: Path) -> None:
    needs(loader)
    assert run_script(tmp_path, SAME, loader) == "same\n"


def test_a_loader_that_is_not_there_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = module("__main__")
    monkeypatch.setitem(module("loaders").LOADERS, "grain", "a_module_that_is_nowhere")
    assert main.installed(["agnoload", "grain", "floor", "another"]) == ["agnoload", "floor"]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "left out: grain is not installed"
    assert said[1].startswith("left out: there is no loader another; there are agnoload, ")
    monkeypatch.setitem(module("workloads").NEEDS, "torchvision", "a_module_that_is_nowhere")
    lacking = module("loaders").lacking
    assert main.installed(["small", "torchvision", "torchvision-kept", "plain"], lacking) == ["small", "plain"]
    assert capsys.readouterr().err == "left out: a_module_that_is_nowhere is not installed\n"


def test_rivals_are_compared_round_by_round_and_only_those_that_ran() -> None:
    ours = [run("agnoload", "small", v) for v in (100, 300, 200)]
    theirs = [run("grain", "small", v) for v in (10, 10, 100)]
    unable = {"loader": "spdl", "workload": "small", "error": "no spdl for this workload"}
    table = module("report").rivals_table(results(*ours, *theirs, unable))
    assert "| x grain |" in table
    assert "spdl" not in table
    assert "| 10 (2 to 30) |" in table
    assert module("report").rivals_table(results(*ours)) == ""


def point(loader: str, value: int, rate: float, cpu_ms: float) -> dict[str, Any]:
    return run(loader, f"fields@count={value}", rate) | {"cpu_ms": cpu_ms}


def test_a_curve_compares_within_rounds() -> None:
    curves, report = module("curves"), module("report")
    ours = [point("agnoload", 3, rate, 2.0) for rate in (100, 10, 400)]
    theirs = [point("torch", 3, rate, 8.0) for rate in (10, 10, 10)]
    table = curves.table(results(*ours, *theirs))
    assert "| fields a sample, 256 a batch | 3 | 10 (1 to 40) |  | 4 (4 to 4) |  |  |" in table
    page = "<!-- figures: short -->\nold\n<!-- end -->\n<!-- figures: curves -->\n<!-- end -->\n"
    filled = report.fill(page, results(*ours, *theirs), curves.PARTS)
    assert "\nold\n" in filled
    assert table in filled


def test_each_curve_has_a_chart_on_the_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for curve in module("curves").CURVES:
        assert f"](images/{curve.file})" in page
        assert (ROOT / "docs" / "images" / curve.file).is_file()


ALL = """
import sys
from benchmarks import floor, run_one

if __name__ == "__main__":
    timed, rate = run_one.timed, floor.rate
    run_one.timed = lambda batches, seconds: timed(batches, 0.1)  # not to measure, but to see that it runs
    floor.rate = lambda stream, seconds: rate(stream, 0.1)
    run_one.AHEAD["early"] = 0.1
    loader, *workloads = sys.argv[1:]
    for workload in workloads:
        sys.argv[1:] = [loader, workload, "--quick"]
        run_one.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["agnoload", "torch", "grain", "spdl", "jax-dataloader", "floor"])
def test_every_workload_can_be_run(loader: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    needs(loader)
    folders = module("workloads").FOLDERS
    questions = module("run_one").QUESTIONS
    names = [name for name in questions if module("loaders").lacking(name) is None]
    if loader == "torch":  # one workload of each kind: its start-ups are long, and the others differ in our loader only
        names = list({questions[name]: name for name in reversed(names)}.values())
    if loader not in ("agnoload", "torch", "floor"):  # the others know nothing of epochs
        names = [name for name in names if name.partition("-")[0] not in folders]
    lines = run_script(tmp_path, ALL, loader, *names, "fields@count=3,batch_size=8,workers=1").splitlines()
    for name, figures in zip([*names, "fields"], map(json.loads, lines), strict=True):
        headline = module("report").HEADLINES[name]
        assert headline.key in figures or figures["error"] == f"no {loader} for this workload", figures


@pytest.mark.slow
def test_what_a_backend_costs_is_told_for_each_that_is_there() -> None:
    backends = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is not None]
    command = [sys.executable, "-m", "benchmarks.backends", "--rounds", "1", "--seconds", "0.2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith(("| inmem", "| leaf"))]
    wanted = [("| inmem", "torch")] * ("torch" in backends) + [("| leaf", name) for name in backends]
    assert [(row[0], row[1]) for row in rows] == wanted
    assert all(float(row[2].split()[0]) > 0 for row in rows)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For programs that run beside others: torch's threads would spin on cores that these use."""


def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_check.py", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | ONE_THREAD | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_gpu_check_says_that_there_is_no_gpu_and_ends_well() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    done = gpu_check()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "no NVIDIA GPU on this machine: nothing was checked\n"


@pytest.mark.slow
def test_a_part_of_the_gpu_check_that_fails_hides_no_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    written = tmp_path / "found.json"
    dry = ("--dry-run", "--workers", "1", "--json", str(written))
    done = gpu_check(*dry, JAX_PLATFORMS="of_nobody")
    results = json.loads(written.read_text())["results"]
    assert done.returncode == 1
    assert list(results) == [f"{name}: {part}" for part in ("right", "fast") for name in ("torch", "jax", "cupy")]
    for part in ("right", "fast"):
        assert results[f"torch: {part}"]["passed"] is True
        assert "of_nobody" in results[f"jax: {part}"]["error"]
        assert "skipped" in results[f"cupy: {part}"]
        assert f"torch: {part}\n" in done.stdout
    assert results["torch: right"]["mismatches"] == 0
    done = gpu_check(*dry, "--only", "jax")
    assert done.returncode == 0, done.stdout
    assert {facts["passed"] for facts in json.loads(written.read_text())["results"].values()} == {True}
