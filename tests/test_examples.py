"""The programs under docs/examples run as a reader would run them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
ALONE = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads of a BLAS that wait for each other would take the cores from whatever else runs."""


def run_example(name: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """What an example prints; its warnings are errors."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    env = ALONE | (environment or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


ONE_AFTER_THE_OTHER = """
import json, runpy, sys
for path, *arguments in json.loads(sys.argv[1]):
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    print("---", flush=True)
"""


def run_examples(*commands: list[str]) -> list[str]:
    """What examples print that run one after the other in one interpreter, which imports a framework once."""
    programs = json.dumps([[str(EXAMPLES / name), *arguments] for name, *arguments in commands])
    command = [sys.executable, "-W", "error", "-c", ONE_AFTER_THE_OTHER, programs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=ALONE)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("---\n")[:-1]


def needs(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


NO_FRAMEWORK = """
import runpy, sys
class NoFramework:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "jax", "cupy"):
            raise ImportError(name)
if "numpy" in sys.argv:
    sys.meta_path.insert(0, NoFramework())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_the_digits_are_learnt_with_numpy_also_where_there_is_no_framework(backend: str) -> None:
    needs("sklearn", "tqdm", *([] if backend == "numpy" else [backend]))
    epochs, wanted = ("60", 0.95) if backend == "numpy" else ("20", 0.9)
    arguments = [str(EXAMPLES / "digits.py"), "--backend", backend, "--epochs", epochs]
    command = [sys.executable, "-W", "error", "-c", NO_FRAMEWORK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=ALONE)
    assert done.returncode == 0, done.stderr
    match = re.fullmatch(r"accuracy: (0\.\d{3})", done.stdout.splitlines()[-1])
    assert match, done.stdout
    assert float(match[1]) >= wanted


def test_shards_hold_every_spectrum_once_and_do_not_depend_on_workers(tmp_path: Path) -> None:
    for workers in ["0", "2"]:
        run_example("shards.py", str(tmp_path / workers), "--signals", "50", "--shard", "20", "--workers", workers)
    alone, helped = ([np.load(p) for p in sorted((tmp_path / w).glob("*.npy"))] for w in ["0", "2"])
    assert [a.shape for a in alone] == [(20, 2049), (20, 2049), (10, 2049)]
    for a, b in zip(alone, helped, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_torch_loop_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    needs("torch")
    stopped, unbroken = ["torch_loop.py", str(tmp_path / "stopped")], ["torch_loop.py", str(tmp_path / "unbroken")]
    _, resumed, whole = run_examples(
        [*stopped, "--steps", "20"], [*stopped, "--steps", "10"], [*unbroken, "--steps", "30"]
    )
    assert resumed == whole != ""


def test_the_jax_loop_shards_batches_over_eight_devices() -> None:
    needs("jax")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    said, last = run_example("jax_sharded.py", environment=flags).splitlines()
    assert said == "8 devices, 8 shards a batch"
    assert float(last.removeprefix("accuracy: ")) > 0.95


STAND_IN_FOR_CUPY = """
from types import SimpleNamespace

import numpy
from numpy import *


class ndarray(numpy.ndarray):
    def set(self, source, stream=None):
        self[...] = source


def empty(shape, dtype):
    return numpy.empty(shape, dtype).view(ndarray)


class Device:
    def __init__(self, number=0):
        self.id = number

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Event:
    done = True


class Stream:
    def __init__(self, non_blocking=False):
        pass

    def record(self):
        return Event()

    def wait_event(self, event):
        pass


runtime = SimpleNamespace(
    getDeviceCount=lambda: 1,
    hostRegister=lambda address, size, flags: None,
    hostUnregister=lambda address: None,
    deviceSynchronize=lambda: None,
    CUDARuntimeError=RuntimeError,
)
cuda = SimpleNamespace(runtime=runtime, Device=Device, Stream=Stream, get_current_stream=Stream)
"""
"""NumPy under CuPy's names, with one GPU that copies at once."""


def learnt(said: str) -> bool:
    match = re.fullmatch(r"accuracy: ([01]\.\d{3})\n", said)
    return match is not None and float(match[1]) > 0.95


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("raise ModuleNotFoundError(name='cupy')", "backend 'cupy' needs cupy, which is not installed: pip install"),
        (STAND_IN_FOR_CUPY.replace("lambda: 1,", "lambda: 0,"), "CuPy finds no NVIDIA GPU"),
        (STAND_IN_FOR_CUPY, None),
    ],
    ids=["no CuPy", "no GPU", "a stand-in"],
)
def test_the_cupy_loop_learns_or_says_what_is_missing(module: str, reason: str | None, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(module)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = run_example("cupy_loop.py", environment={"PYTHONPATH": path})
    assert learnt(said) if reason is None else said.startswith(reason)


@pytest.mark.gpu
def test_the_cupy_loop_learns_on_a_gpu() -> None:
    needs("cupy")
    said = run_example("cupy_loop.py")
    if said.startswith("CuPy finds no"):
        pytest.skip(said)
    assert learnt(said)


def make_images(folder: Path) -> None:
    """Two classes of 20 small images: bright at the top, or bright at the left."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ["left", "top"]:
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 100, (40, 40, 3), np.uint8)
            (pixels[:20] if name == "top" else pixels[:, :20])[...] += 100
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


EXAMPLES_WITH_TWO_LOADERS = {
    "tabular.py": ["sklearn"],
    "text.py": [],
    "image_folder.py": ["PIL"],
    "hdf5.py": ["h5py"],
    "hugging_face.py": ["datasets", "sklearn"],
}


def test_both_loaders_train_to_the_same_loss(tmp_path: Path) -> None:
    needs("torch")
    commands = []
    for name, modules in EXAMPLES_WITH_TWO_LOADERS.items():
        if any(importlib.util.find_spec(module) is None for module in modules):
            continue
        arguments = (
            [] if name in ("tabular.py", "text.py") else [str(tmp_path / name)]
        )  # data: written by the first run
        if name == "image_folder.py":
            make_images(tmp_path / name)
            arguments.append("--plain")
        commands += [[name, *arguments, "--loader", loader] for loader in ("agnoload", "torch")]
    printed = run_examples(*commands)
    for command, ours, theirs in zip(commands[::2], printed[::2], printed[1::2], strict=True):
        assert ours.startswith("loss: "), command
        assert ours == theirs, command
