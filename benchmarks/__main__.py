"""Runs the workloads, loader against loader, each in a fresh process and by turns: A B C A B C ..."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import psutil
except ModuleNotFoundError:
    sys.exit('the benchmarks need more packages: pip install ".[bench,torch]" -c constraints.txt')

from benchmarks import report
from benchmarks.loaders import LOADERS, lacking, reason_against
from benchmarks.measure import family_mib, machine
from benchmarks.run_one import QUESTIONS


def run_one(loader: str, workload: str, quick: bool, limit: float = 300) -> dict[str, Any]:
    """One measurement; a failed one carries `error`."""
    command = [sys.executable, "-m", "benchmarks.run_one", loader, workload] + ["--quick"] * quick
    cwd = Path(__file__).parents[1]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watched = psutil.Process(process.pid)
    peak, end = 0.0, time.monotonic() + limit
    while True:
        with suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=0.1)
            break
        with suppress(psutil.NoSuchProcess):
            peak = max(peak, family_mib(watched))
        if time.monotonic() > end:
            process.kill()
            out, err = process.communicate()
            err = f"no answer within {limit:.0f} s"
            break
    run: dict[str, Any] = {"loader": loader, "workload": workload}
    if process.returncode:
        return run | {"error": (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]}
    run |= json.loads(out.splitlines()[-1])
    return run | {"peak_mib": round(peak, 1)} if peak and "error" not in run else run


def measure(workloads: list[str], loaders: list[str], rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Every loader on every workload, `rounds` times, the loaders taking turns."""
    runs = []
    for workload in workloads:
        refused = set()
        for number in range(rounds):
            for loader in [name for name in loaders if name not in refused]:
                run = run_one(loader, workload, quick)
                if "error" in run:
                    refused.add(loader)
                figures = ", ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                    for k, v in run.items()
                    if k not in ("loader", "workload")
                )
                print(f"{workload} {number + 1}/{rounds} {loader}: {figures}", file=sys.stderr, flush=True)
                runs.append(run)
    return runs


def installed(names: list[str], reason_for: Callable[[str], str | None] = reason_against) -> list[str]:
    """Those loaders (or workloads) that can be measured here; of the others it is said why not."""
    reasons = {name: reason_for(name) for name in names}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        print(f"left out: {reason}", file=sys.stderr)
    return [name for name, reason in reasons.items() if reason is None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"all when none of {', '.join(QUESTIONS)}")
    parser.add_argument("--loaders", default=",".join(LOADERS), help="which, by commas; all that are installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round on small data, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the runs there, with date, machine and command")
    parser.add_argument(
        "--table", action="store_true", help="measure nothing: write tables and charts from what is kept"
    )
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(QUESTIONS):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")

    if options.table:
        report.publish(options.json or report.RESULTS)
        return
    rounds = 1 if options.quick else options.rounds
    loaders = installed(options.loaders.split(","))
    workloads = installed(options.workloads or list(QUESTIONS), lacking)
    document = {
        "machine": machine(),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "rounds": rounds,
        "runs": measure(workloads, loaders, rounds, options.quick),
    }
    results = report.Results(document)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    tables = [report.full_table, report.rivals_table, report.detail_table, report.conditions]
    print(*filter(None, (table(results) for table in tables)), sep="\n\n")


if __name__ == "__main__":
    main()
