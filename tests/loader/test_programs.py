"""Whole programs: scripts without a guard, classes without an importable name, frameworks that came first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
with open({marks!r}, "a") as file:
    file.write("run\\n")

import sys
from typing import NamedTuple

import numpy as np
import agnoload


class Batch(NamedTuple):
    x: np.ndarray
    names: list


class Data:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return double(index)


def double(value):
    return 2 * value


def together(samples):
    return Batch(np.array(samples), [f"n{{s}}" for s in samples])


loader = agnoload.DataLoader(
    Data(), 2, num_workers=2, collate_fn=together, multiprocessing_context={method!r}, worker_init_fn=lambda n: None
)
for batch in loader:
    assert type(batch) is Batch, type(batch)
    print(batch.x.tolist(), batch.names)
"""
OUTPUT = "[0, 2] ['n0', 'n2']\n[4, 6] ['n4', 'n6']\n[8, 10] ['n8', 'n10']\n"


def execute(command: list[str], **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], capture_output=True, text=True, timeout=100, check=False, **options
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize(("way", "method"), [("file", "forkserver"), ("stdin", "spawn")])
def test_a_program_without_a_guard_runs_once(method: str, way: str, tmp_path: Path) -> None:
    """C36."""
    marks, script = tmp_path / "marks", tmp_path / "program.py"
    text = SCRIPT.format(marks=str(marks), method=method)
    script.write_text(text)
    found = execute([str(script)]) if way == "file" else execute(["-"], input=text)
    assert found == OUTPUT
    assert marks.read_text() == "run\n"


AROUND = """
import dataclasses, os, sys
import agnoload, mine

os.chdir("/")
os.environ["SET_LATE"] = "yes"

@dataclasses.dataclass(slots=True)
class Sample:
    seen: object

class Data(mine.Data):
    def __getitem__(self, index):
        return Sample([super().__getitem__(index), sys.argv[1], os.getcwd(), os.environ["SET_LATE"]])

for workers in (0, 1):
    loader = agnoload.DataLoader(Data(range(2)), None, num_workers=workers, collate_fn=lambda sample: sample)
    print([(type(sample) is Sample, hasattr(sample, "__dict__"), sample.seen) for sample in loader])
"""


def test_workers_have_helpers_arguments_directory_environment_and_classes_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Data(list):\n    pass\n")
    script = tmp_path / "program.py"
    script.write_text(AROUND)
    seen = [(True, False, [index, "argument", "/", "yes"]) for index in range(2)]
    assert execute([str(script), "argument"]) == f"{seen}\n" * 2


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "del loader, batches"])
def test_a_program_ends_quietly_with_an_iterator_under_way(ending: str) -> None:
    program = (
        "import sys, agnoload\n"
        "loader = agnoload.DataLoader(range(100), 2, num_workers=2, persistent_workers=True)\n"
        "batches = iter(loader)\n"
        "print(next(batches))\n" + ending
    )
    assert execute(["-c", program]) == "[0 1]\n"
