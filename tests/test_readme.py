"""What the README promises: its commands are the ones that are checked, and the versions they take are pinned."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """The README's lines for a shell that set up everything by themselves."""
    return re.findall(r"^\$ (python3 -m venv .*)$", README, re.MULTILINE)


def test_two_commands_do_all_the_set_up() -> None:
    job, tests = commands()
    assert job.endswith("docs/examples/digits.py --backend numpy")
    assert tests.endswith("-m pytest -q -n 2 --dist worksteal")


def test_the_checks_run_the_commands_of_the_readme() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run"), "--commands"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == commands()


def test_the_tests_never_take_another_torch_than_the_pinned_one() -> None:
    _, tests = commands()
    assert "-c constraints.txt" in tests
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_job_installs_no_framework() -> None:
    job, _ = commands()
    extras = re.search(r'"\.\[(.*?)\]"', job)
    assert extras
    assert extras[1] == "examples"


def test_the_readme_is_read_in_three_minutes() -> None:
    prose = re.sub(r"```.*?```|<!--.*?-->", "", README, flags=re.DOTALL)
    assert len(prose.split()) < 700


def test_every_link_of_the_readme_leads_somewhere() -> None:
    paths = [p for p in re.findall(r"\]\(([^)#]+)", README) if "://" not in p]
    assert paths
    assert [p for p in paths if not (ROOT / p).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_figures_come_from_the_measured_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    monkeypatch.syspath_prepend(str(ROOT))
    import json

    from benchmarks import curves, report

    text = (ROOT / page).read_text()
    assert "<!-- figures:" in text
    for kept, parts in [
        (report.RESULTS, report.PARTS),
        (report.RIVALS, report.RIVAL_PARTS),
        (curves.RESULTS, curves.PARTS),
    ]:
        assert report.fill(text, report.Results(json.loads(kept.read_text())), parts) == text
