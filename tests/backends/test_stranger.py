"""A backend by somebody else: the one of the documentation, installed as a wheel and found by its entry point."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import agnoload

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


def files_of_the_page() -> dict[str, str]:
    """The files that the page shows, by their titles."""
    blocks = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return dict(blocks)


def build_wheel(files: dict[str, str], folder: Path) -> Path:
    """What a build tool makes of these files; by hand, because there may be no network to fetch a tool from."""
    project: dict[str, Any] = tomllib.loads(files["pyproject.toml"])["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    info = f"{name}-{version}.dist-info"
    entries = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in project["entry-points"].items()
    )
    requires = "".join(f"Requires-Dist: {name}\n" for name in project["dependencies"])
    contents = {
        "agnoload_ctypes.py": files["agnoload_ctypes.py"],
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entries,
    }
    record = "".join(f"{path},sha256={digest(text)},{len(text.encode())}\n" for path, text in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with that wheel, which sees this one's packages behind its own."""
    folder = tmp_path_factory.mktemp("stranger")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    site = Path(found.stdout.strip())
    ours = [sysconfig.get_path("purelib"), str(Path(agnoload.__file__).parents[1])]
    (site / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    files = files_of_the_page()
    wheel = build_wheel(files, folder)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "agnoload_ctypes.py").exists()
    (folder / "test_agnoload_ctypes.py").write_text(files["test_agnoload_ctypes.py"])
    return python


def run(python: Path, *arguments: str) -> str:
    command = [str(python), "-W", "error", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=python.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_pages_backend_is_found_by_its_entry_point(stranger: Path) -> None:
    code = (
        "import agnoload; print(agnoload.list_backends()['ctypes'], type(agnoload.get_backend('ctypes')).__module__);"
        "from agnoload import plugins; print(plugins.to_numpy(agnoload.get_backend('ctypes').convert("
        "__import__('numpy').arange(3))))"
    )
    assert run(stranger, "-c", code) == "ready agnoload_ctypes\n[0 1 2]\n"
    assert "ctypes" not in agnoload.list_backends()  # only there


def test_the_pages_own_tests_pass_there(stranger: Path) -> None:
    out = run(stranger, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_agnoload_ctypes.py")
    assert "2 passed" in out


def test_the_page_shows_every_backend_and_every_member_of_the_contract() -> None:
    page = PAGE.read_text()
    assert set(re.findall(r'^\| `"(\w+)"` \|', page, re.MULTILINE)) == {"numpy", "torch", "jax", "cupy"}
    public = {name for name in vars(agnoload.Backend) if not name.startswith("_")}
    assert {name for name in public if not re.search(rf"\b{name}\b", page)} == set()
