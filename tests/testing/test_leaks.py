"""The check that nothing is left behind finds each kind of what could be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import agnoload
from agnoload.testing import leaks, no_leaks


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.2)


def test_a_process_of_a_child_that_is_left_is_named() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with pytest.raises(AssertionError, match="left behind: process"), no_leaks():
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    process.communicate(b"\n", timeout=60)


def test_a_thread_that_is_left_is_named() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="idler")
    with pytest.raises(AssertionError, match="thread idler"), no_leaks():
        thread.start()
    end.set()
    thread.join()


def test_a_descriptor_that_is_left_is_counted_by_kind() -> None:
    with pytest.raises(AssertionError, match="2 more of descriptor pipe"), no_leaks():
        ends = os.pipe()
    for end in ends:
        os.close(end)


def test_a_file_in_shared_memory_that_is_left_is_named() -> None:
    path = Path("/dev/shm") / f"left-{os.getpid()}"
    try:
        with pytest.raises(AssertionError, match=f"/dev/shm/{path.name}"), no_leaks():
            path.touch()
    finally:
        path.unlink()


@pytest.mark.parametrize("hold", ["file", "mmap.mmap(file.fileno(), 1); file.close()"])
def test_a_file_in_shared_memory_that_another_program_uses_is_not_counted(hold: str) -> None:
    path = Path("/dev/shm") / f"another-{os.getpid()}"
    code = f"import mmap, sys; file = open({str(path)!r}, 'w+b'); file.truncate(1); held = {hold}; print(1, flush=True)"
    orphan = ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "-", sys.executable, "-c", f"{code}; sys.stdin.read()"]
    read, write = os.pipe()
    try:
        with no_leaks():
            with subprocess.Popen(orphan, stdin=read, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"1\n"
            assert path.exists()
    finally:
        os.close(read), os.close(write)  # the end of the other program
        path.unlink()


def test_the_block_s_own_error_passes() -> None:
    with pytest.raises(KeyError), no_leaks():
        raise KeyError


def test_an_epoch_with_workers_leaves_nothing() -> None:
    with no_leaks():
        for _ in agnoload.DataLoader(range(4), 2, num_workers=2):
            pass


def test_an_iterator_that_is_kept_is_a_leak() -> None:
    loader = agnoload.DataLoader(range(4), 2, num_workers=2)
    with pytest.raises(AssertionError, match="process"), no_leaks():
        batches = iter(loader)
    batches.close()
