"""Every block of Python in the README and the documentation runs, page by page, from top to bottom."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRAMEWORKS = ["torch", "jax"]
OPTIONAL = [*FRAMEWORKS, "sklearn", "pyarrow", "h5py", "PIL", "fsspec"]
"""A page that uses one of these is left out where it is not installed: what follows may need what stood before."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block, in order; but for those that need a GPU."""
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text()) if not uses("cupy", text)]


def uses(module: str, text: str) -> bool:
    """Whether code needs a module: it imports it, or asks for the backend of that name."""
    return bool(re.search(rf"^\s*(>>> )?(import|from) {module}\b|backend=\"{module}\"", text, re.MULTILINE))


def program(page: Path) -> str:
    """One script of all blocks of a page; blocks that show output are compared with it."""
    lines = ["import doctest", "_runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)"]
    for kind, text in blocks(page):
        if kind == "python":
            lines.append(text)
        else:
            lines.append(f"_test = doctest.DocTestParser().get_doctest({text!r}, {{}}, {page.name!r}, None, 0)")
            lines.append("_test.globs = globals()")
            lines.append("_runner.run(_test, clear_globs=False)")
    return "\n".join([*lines, "assert not _runner.summarize(verbose=False).failed"])


PAGE_AFTER_PAGE = """
import os, runpy, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    runpy.run_path("page.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_frameworks", [False, True])
def test_the_code_of_the_pages_runs(with_frameworks: bool, tmp_path: Path) -> None:
    folders = []
    for page in PAGES:
        code = "".join(text for _, text in blocks(page))
        missing = [name for name in OPTIONAL if uses(name, code) and importlib.util.find_spec(name) is None]
        if code and not missing and with_frameworks == any(uses(name, code) for name in FRAMEWORKS):
            folders.append(tmp_path / page.stem)
            folders[-1].mkdir()
            (folders[-1] / "page.py").write_text(program(page))
    command = [sys.executable, "-W", "error", "-c", PAGE_AFTER_PAGE, *map(str, folders)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # torch's threads would spin on cores that other tests use
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_block_says_its_language() -> None:
    fences = {page.name: re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE) for page in PAGES}
    assert [name for name, found in fences.items() if not all(found[0::2])] == []  # only what says python is run


def test_every_public_name_is_in_the_reference() -> None:
    import agnoload

    listed = re.findall(r"^::: agnoload\.(\w+)", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(listed))
    assert set(agnoload.__all__) - set(listed) - {"__version__"} == set()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name not in navigation] == []
