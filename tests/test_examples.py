"""The programs under docs/examples run as a reader would run them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def run_example(name: str, *arguments: str, cwd: Path | None = None) -> str:
    """What an example prints; its warnings are errors."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_the_digits_are_learnt(backend: str) -> None:
    needs("sklearn", "tqdm", *([] if backend == "numpy" else [backend]))
    last = run_example("digits.py", "--backend", backend).splitlines()[-1]
    match = re.fullmatch(r"accuracy: (0\.\d{3})", last)
    assert match, last
    assert float(match[1]) >= 0.95


def test_the_digits_with_numpy_need_no_framework() -> None:
    needs("sklearn", "tqdm")
    program = f"""
import runpy, sys
for name in ["torch", "jax", "cupy"]:
    sys.modules[name] = None  # an import of it is an ImportError
sys.argv = ["digits.py", "--epochs", "1"]
runpy.run_path({str(EXAMPLES / "digits.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("accuracy: ")
