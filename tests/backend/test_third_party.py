"""A backend by a third party: the one of the documentation, built, installed and found by its entry point."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

import agnoload
from agnoload.backend import registry

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


def files_of_the_page() -> dict[str, str]:
    """The files that the page shows, by their titles."""
    blocks = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return dict(blocks)


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with that package, which sees this one's packages behind its own."""
    pytest.importorskip("hatchling")  # there may be no network to fetch it from
    folder = tmp_path_factory.mktemp("third_party")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    site = Path(found.stdout.strip())
    ours = [sysconfig.get_path("purelib"), str(Path(agnoload.__file__).parents[1])]
    (site / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    project = folder / "project"
    project.mkdir()
    for name, text in files_of_the_page().items():
        (project / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    install = [*pip, "--no-index", "--no-deps", "--no-build-isolation", str(project)]
    done = subprocess.run(
        install, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""}, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "agnoload_ctypes.py").exists()
    assert not (site / "test_agnoload_ctypes.py").exists()
    return python


@pytest.mark.slow
def test_the_pages_backend_is_found_by_its_entry_point_and_its_own_tests_pass(third_party: Path) -> None:
    code = """
        import numpy, pytest, agnoload
        from agnoload.backend import registry
        print(agnoload.list_backends()["ctypes"], type(agnoload.get_backend("ctypes")).__module__)
        print(registry.to_numpy(agnoload.get_backend("ctypes").convert(numpy.arange(3))), flush=True)
        raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "project/test_agnoload_ctypes.py"]))
    """
    command = [str(third_party), "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=third_party.parents[2], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ready agnoload_ctypes\n[0 1 2]\n")
    assert "2 passed" in done.stdout
    assert "ctypes" not in registry.installed()  # only there


def test_the_page_shows_every_backend_and_every_member_of_the_contract() -> None:
    page = PAGE.read_text()
    assert set(re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE)) == {"numpy", "torch", "jax", "cupy"}
    public = {name for name in vars(agnoload.Backend) if not name.startswith("_")}
    assert {name for name in public if not re.search(rf"\b{name}\b", page)} == set()
