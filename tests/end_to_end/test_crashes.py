"""The crash matrix: every way to fail, at every place where a user's code runs.

For each cell: which error comes, that what was finished before comes first, and, by the fixture around every test, that
nothing is left. The default start method has every cell; each other one has each way and each place once, as what a
worker does does not depend on how it has started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from agnoload import DataLoader, WorkerDied, WorkerTimeout

PATIENCE = {"forkserver": 1, "spawn": 6, "fork": 1}
"""Seconds for a batch where none comes; an interpreter must have started within them."""
DEEDS = ("raise", "sys.exit", "os._exit", "SIGKILL", "SIGSEGV", "MemoryError", "RecursionError", "hang")
DEADLY = {"os._exit": 7, **{name: -getattr(signal, name) for name in ("SIGKILL", "SIGSEGV", "SIGTERM")}}
RAISED = {
    "raise": KeyError,
    "sys.exit": SystemExit,
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
    "hang": WorkerTimeout,
}
PLACES = ("unpickling", "worker_init_fn", "getitem", "getitems", "collate", "encoding", "half-written slot")


def do(deed: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if deed == "raise":
        raise KeyError("deed")
    if deed == "sys.exit":
        sys.exit(3)
    if deed == "os._exit":
        os._exit(7)
    if deed in ("SIGKILL", "SIGSEGV", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, deed))
    if deed == "MemoryError":
        bytearray(1 << 62)
    if deed == "RecursionError":
        do(deed)
    if deed == "hang":
        while True:
            time.sleep(60)


class Numbers:
    """The ints 0 to 7; at 3, or when it is unpickled, the deed is done."""

    def __init__(self, deed: str, place: str) -> None:
        self.deed, self.place = deed, place

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3 and self.place == "getitem":
            do(self.deed)
        return index

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        if self.place == "unpickling":
            do(self.deed)


class Batches(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        if 3 in indices:
            do(self.deed)
        return indices


class Trap:
    """Does the deed when it is pickled."""

    def __init__(self, deed: str) -> None:
        self.deed = deed

    def __reduce__(self) -> tuple[object, ...]:
        do(self.deed)
        return Trap, (self.deed,)


class Collate:
    def __init__(self, deed: str, place: str) -> None:
        self.deed, self.place = deed, place

    def __call__(self, samples: list[int]) -> object:
        if samples == [3]:
            if self.place == "collate":
                do(self.deed)
            elif self.place == "encoding":
                return Trap(self.deed)
            elif self.place == "half-written slot":
                return [np.full(1 << 18, 7.0), Trap(self.deed)]
        return samples


def until_error(loader: DataLoader) -> tuple[list, BaseException]:
    """What a loader gives before it fails, and how it fails."""
    got = []
    try:
        with loader:
            for batch in loader:
                got.append(batch)  # what came before the error counts
    except BaseException as error:
        return got, error
    raise AssertionError(f"no error after {got}")


def mark(deed: str, place: str, method: str) -> object:
    """The cells that are always run: every deed in `__getitem__`, and two deeds everywhere."""
    quick = method == "forkserver" and (place == "getitem" or deed in ("raise", "SIGKILL"))
    return pytest.param(deed, place, method, marks=() if quick else pytest.mark.slow)


CELLS = [mark(deed, place, "forkserver") for place in PLACES for deed in DEEDS]
CELLS += [mark(deed, place, "spawn") for deed, place in zip(DEEDS, itertools.cycle(PLACES))]
CELLS += [mark(deed, place, "fork") for deed, place in zip(DEEDS, itertools.cycle(PLACES[1:]))]  # nothing is pickled


@pytest.mark.parametrize(("deed", "place", "method"), CELLS)
def test_a_crash_is_an_error_that_says_what_and_leaves_nothing(deed: str, place: str, method: str) -> None:
    numbers = (Batches if place == "getitems" else Numbers)(deed, place)
    loader = DataLoader(
        numbers,
        1,
        num_workers=2,
        collate_fn=Collate(deed, place),
        worker_init_fn=(lambda _: do(deed)) if place == "worker_init_fn" else None,
        multiprocessing_context=method,
        timeout=PATIENCE[method] if deed == "hang" else 0,
    )
    got, error = until_error(loader)
    at_start = place in ("unpickling", "worker_init_fn")
    assert got == ([] if at_start else [[0], [1], [2]])
    if deed in DEADLY:
        assert isinstance(error, WorkerDied)
        assert error.exitcode == DEADLY[deed]
        assert (error.batch, error.indices) == ((None, None) if at_start else (3, [3]))
        assert error.worker in (0, 1)
        assert str(error.pid) in str(error)
    else:
        assert type(error) is RAISED[deed]
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "worker" in text
    assert at_start or "batch 3" in text
    if deed == "hang":
        assert "do" in text.split("its stack:")[1]  # where it hangs


class Opened:
    """Does the deed when it is unpickled, which is in the parent."""

    def __init__(self, deed: str) -> None:
        self.deed = deed

    def __setstate__(self, state: dict[str, str]) -> None:
        do(state["deed"])


class GivesOpened(Numbers):
    def __getitem__(self, index: int) -> object:
        return Opened(self.deed) if index == 3 else index


@pytest.mark.parametrize("deed", ["raise", "sys.exit", "MemoryError", "RecursionError"])
def test_a_batch_that_fails_to_be_decoded_is_an_error_in_its_place(deed: str) -> None:
    loader = DataLoader(GivesOpened(deed, "decoding"), 1, num_workers=2, collate_fn=list)
    got, error = until_error(loader)
    assert got == [[0], [1], [2]]
    assert type(error) is RAISED[deed]
    assert any("batch 3 (indices [3])" in note and "decoded" in note for note in error.__notes__)


PARENT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import os, signal, time, agnoload

class Opened:
    def __setstate__(self, state):
        print("opened", flush=True)
        if {deed!r} == "hang":
            time.sleep(60)
        if {deed!r} == "os._exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, {deed!r}))
    def __reduce__(self):
        return (Opened, (), {{"a": 1}})

class Data:
    def __len__(self): return 8
    def __getitem__(self, index): return Opened() if index == 3 else index

for batch in agnoload.DataLoader(Data(), 1, num_workers=2, collate_fn=list):
    print(batch, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["os._exit", "SIGKILL", "SIGSEGV", "hang"])
def test_a_parent_that_dies_over_a_batch_leaves_nothing(deed: str, program) -> None:
    one = program(PARENT.format(deed=deed))
    while one.line() != "opened":  # a batch is decoded when it arrives, perhaps before those ahead of it
        pass
    if deed == "hang":
        one.process.send_signal(signal.SIGINT)
    code, _, err = one.end()
    assert code == {**DEADLY, "hang": -signal.SIGINT}[deed]
    one.gone()
    assert err.count("Traceback") == (deed == "hang")


class Rendezvous:
    """Sample 1 begins in one worker and never ends, sample 0 ends in the other once sample 1 has begun."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        with open(self.path, "rb" if index == 0 else "wb"):  # each waits for the other
            pass
        if index == 1:
            do("hang")
        return os.getpid()


class InTheBackground(Rendezvous):
    """Sample 0 leaves a thread behind that does the deed once the worker is idle."""

    def __init__(self, folder: str, deed: str) -> None:
        super().__init__(os.path.join(folder, "meet"))
        self.folder, self.deed = folder, deed

    def __getitem__(self, index: int) -> int:
        if index == 0:
            threading.Thread(target=self.wait_and_do).start()
        return super().__getitem__(index)

    def wait_and_do(self) -> None:
        with open(os.path.join(self.folder, "told"), "rb"):
            pass
        with contextlib.suppress(KeyError, SystemExit, MemoryError, RecursionError):
            do(self.deed)
        with open(os.path.join(self.folder, "done"), "wb"):
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "method"),
    [*((deed, "forkserver") for deed in [*DEEDS, "SIGTERM"]), ("SIGKILL", "spawn"), ("SIGKILL", "fork")],
)
def test_what_a_thread_does_in_an_idle_worker_is_a_death_or_nothing(deed: str, method: str, tmp_path) -> None:
    for name in ("meet", "told", "done"):
        os.mkfifo(tmp_path / name)
    dataset = InTheBackground(str(tmp_path), deed)
    with DataLoader(dataset, 1, num_workers=2, multiprocessing_context=method) as loader:
        batches = iter(loader)
        (idle,) = next(batches).tolist()
        with open(tmp_path / "told", "wb"):
            pass
        if deed in DEADLY:
            with pytest.raises(WorkerDied, match="while it was idle") as caught:
                next(batches)
            assert (caught.value.pid, caught.value.exitcode) == (idle, DEADLY[deed])
            assert (caught.value.batch, caught.value.indices) == (None, None)
        else:
            if deed != "hang":
                with open(tmp_path / "done", "rb"):
                    pass
            assert psutil.Process(idle).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_stopped_worker_does_not_outlive_its_loader(method: str, tmp_path) -> None:
    os.mkfifo(tmp_path / "meet")
    loader = DataLoader(
        Rendezvous(str(tmp_path / "meet")), 1, num_workers=2, multiprocessing_context=method, timeout=PATIENCE[method]
    )
    batches = iter(loader)
    (idle,) = next(batches).tolist()
    os.kill(idle, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"batch 1 \(indices \[1\]\)"):
        next(batches)
    loader.close()
