"""Asked for a GPU where none can be seen: the reason, in the constructor, and nothing is made."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

REFUSED = """
    import os, sys, psutil, agnoload
    name, device = sys.argv[1:]
    for pin in (False, True):
        try:
            agnoload.DataLoader(range(8), 4, num_workers=2, backend=name, device=device, pin_memory=pin)
        except agnoload.BackendUnavailable as error:
            print(error)
        else:
            raise SystemExit("it was taken")
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    assert not any("memfd" in name for name in opened), opened
    assert psutil.Process().children() == []
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("torch", "cuda", "device 'cuda' cannot be used: "),
        ("jax", "gpu:0", "JAX has no 'gpu' devices here: "),
        ("cupy", "cuda:0", "CuPy finds no "),
    ],
)
def test_c53_without_a_gpu_a_device_is_a_clear_error_and_nothing_is_made(name: str, device: str, reason: str) -> None:
    pytest.importorskip(name)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(REFUSED), name, device]
    done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(reason) for line in lines)
