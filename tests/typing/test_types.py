"""The types of batches, as mypy and pyright see them; and that the wheel says that there are types."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import agnoload
from agnoload import _types

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BATCHES = HERE / "batches.py"
MISTAKES = HERE / "mistakes.py"

Said = dict[tuple[str, int], list[str]]
"""By file and line, what a type checker has to say."""


def run(command: list[str], pattern: str) -> Said:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *command, str(BATCHES), str(MISTAKES)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    said: Said = {}
    for name, line, text in re.findall(pattern, done.stdout, re.MULTILINE):
        said.setdefault((Path(name).name, int(line)), []).append(text)
    assert said, done.stdout + done.stderr
    return said


def mypy() -> Said:
    return run(["mypy", "--strict"], r"^(.+?\.py):(\d+): ((?:error|note): .*)$")


def pyright() -> Said:
    return run(["pyright", "--pythonpath", sys.executable], r"^\s*(.+?\.py):(\d+):\d+ - (.*)$")


@pytest.fixture(scope="module", params=[mypy, pytest.param(pyright, marks=pytest.mark.slow)], ids=["mypy", "pyright"])
def said(request: pytest.FixtureRequest) -> Said:
    check: Callable[[], Said] = request.param
    if importlib.util.find_spec(check.__name__) is None:
        pytest.skip(f"{check.__name__} is not installed")
    return check()


def plain(text: str) -> str:
    """A revealed type without the names of modules, and with arrays as NumPy's users write them."""
    text = re.search(r'(?:Revealed type is|Type of ".*" is) "(.*)"', text)[1]  # type: ignore[index]
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)
    text = text.replace("floating[_32Bit]", "float32").replace("floating[_64Bit]", "float64")
    text = re.sub(r"\bLiteral\[\d+\]\??", "int", text)
    return re.sub(
        r"ndarray\[(?:tuple\[Any, \.\.\.\]|tuple\[int(?:, int)*\]|Any), dtype\[(\w+)\]\]", r"NDArray[\1]", text
    )


def marked(path: Path, pattern: str) -> dict[int, str]:
    """The lines that match, and what the match names."""
    found = ((n, re.search(pattern, line)) for n, line in enumerate(path.read_text().splitlines(), 1))
    return {number: match[1] for number, match in found if match}


REVEALED = marked(BATCHES, r"^ *reveal_type\(.*\)  # (.+)$")


@pytest.mark.slow
def test_c58_batches_have_the_types_that_can_be_said_and_a_strict_program_has_no_error(said: Said) -> None:
    notes = {line: [plain(note) for note in said.get((BATCHES.name, line), [])] for line in REVEALED}
    assert notes == {line: [text] for line, text in REVEALED.items()}
    texts = [text for (name, _), texts in said.items() if name == BATCHES.name for text in texts]
    assert [text for text in texts if "error" in text.split(":")[0]] == []


@pytest.mark.slow
def test_each_mistake_is_an_error(said: Said) -> None:
    wrong = marked(MISTAKES, r"^.*  # (wrong)$")
    errors = {line for line in wrong for text in said.get((MISTAKES.name, line), []) if "error" in text}
    assert errors == set(wrong)


def test_the_types_know_every_option_and_no_other() -> None:
    options = list(inspect.signature(agnoload.DataLoader).parameters)
    assert options[:23] == [  # the contract; later options follow
        "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
        "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
        "persistent_workers", "pin_memory_device", "in_order", "backend", "device", "seed", "worker_type", "on_error",
        "max_worker_restarts",
    ]  # fmt: skip
    assert set(_types.AnyOptions.__annotations__) | {"dataset", "batch_size", "shuffle"} == set(options)
    assert _types.NumpyOptions.__annotations__.keys() == _types.AnyOptions.__annotations__.keys()


def test_c58_the_wheel_says_that_it_is_typed(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "agnoload/py.typed" in names
    assert {f"agnoload_{name}/__init__.py" for name in ("torch", "jax", "cupy")} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
