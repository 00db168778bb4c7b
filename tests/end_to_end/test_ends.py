"""Ends: however a loop, a loader or a program comes to its end, nothing of it stays."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from agnoload import AgnoloadError, DataLoader, Dataset, Subset
from agnoload.errors import LoaderClosed
from agnoload.pools import launcher, preload

METHODS = ("forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork")
LATE = 5.0
"""Seconds for what shall take one at most, on a machine that others use, too."""


def samples(n: int, load: Callable[[int], object]) -> Dataset[Any]:
    """A dataset of `n` samples, which a function loads."""
    return Subset(range(n), range(n)).map(load)


class Sleeps:
    """The ints 0 to n - 1; sample `at` writes its pid to the gate, and then takes for ever."""

    def __init__(self, gate: str, at: int = 0, n: int = 8) -> None:
        self.gate, self.at, self.n = gate, at, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            with open(self.gate, "w") as gate:
                gate.write(str(os.getpid()))
            threading.Event().wait()
        return index


@pytest.fixture
def gate(tmp_path) -> str:
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


def begun(gate: str) -> int:
    """The pid of the worker that is in the sample that takes for ever; waits until it is."""
    with open(gate) as told:
        return int(told.read())


def workers() -> list[psutil.Process]:
    """All worker processes below this one; the fork server is none, nor is multiprocess's tracker of names."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            serves = "server import serve" in line or "resource_tracker import" in line
            template = process.name() == launcher.SERVER.decode()  # it lives as long as its loader
            if not template and (process.ppid() != os.getpid() or not serves):
                found.append(process)
    return found


def none_left(began: float | None = None) -> bool:
    psutil.wait_procs(workers(), timeout=LATE)
    return not workers() and (began is None or time.monotonic() - began < LATE)


# ---------------------------------------------------------------------------------------------- leaving a loop


@pytest.mark.parametrize("method", METHODS)
def test_c40_leaving_a_loop_ends_workers_that_are_in_a_sample(method, gate) -> None:
    loader = DataLoader(Sleeps(gate, at=2), 1, num_workers=2, multiprocessing_context=method)
    for batch in loader:
        if batch[0] == 1:
            pid = begun(gate)
            began = time.monotonic()
            break
    assert none_left(began)
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_c40_the_first_batch_again_and_again_holds_no_more_than_one_set_of_workers(method) -> None:
    loader = DataLoader(range(100), 4, num_workers=2, multiprocessing_context=method)
    for _ in range(2):  # what the first workers had to import, a template has for the second ones
        next(iter(loader))
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        assert len(workers()) <= 2
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert none_left()


def test_c40_an_iterator_that_is_dropped_or_left_by_an_exception_ends_its_workers_without_the_collector() -> None:
    def loop() -> None:
        for _ in loader:
            raise ZeroDivisionError

    loader = DataLoader(range(100), 4, num_workers=2)
    gc.collect()
    gc.disable()
    try:
        batches = iter(loader)
        next(batches)
        assert len(workers()) == 2
        del batches
        assert none_left()
        with pytest.raises(ZeroDivisionError) as caught:
            loop()
        del caught  # its traceback holds the iterator
        assert none_left()
    finally:
        gc.enable()


def test_batches_outlive_their_loader() -> None:
    loader = DataLoader(np.arange(40.0), 4, num_workers=2, persistent_workers=True)
    kept = list(loader)
    loader.close()
    del loader
    gc.collect()
    assert np.concatenate(kept).tolist() == list(range(40))


# ---------------------------------------------------------------------------------------------- closing


def test_c41_loaders_in_turn_leave_no_process_at_all() -> None:
    for number in range(3):
        with DataLoader(range(20), 4, num_workers=2, persistent_workers=True) as loader:
            assert len(list(loader)) == 5
            assert len(workers()) == 2
        if number % 2:
            loader.close()
        assert workers() == []


@pytest.mark.parametrize("method", METHODS)
def test_c41_closing_ends_a_worker_that_is_in_a_sample_and_ignores_sigterm(method, gate) -> None:
    class Stubborn(Sleeps):
        def __getitem__(self, index: int) -> int:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return super().__getitem__(index)

    loader = DataLoader(Stubborn(gate, at=1), 1, num_workers=2, multiprocessing_context=method, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    pid = begun(gate)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < LATE
    assert not psutil.pid_exists(pid)
    assert workers() == []
    with pytest.raises(LoaderClosed):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_c41_a_closed_loader_starts_afresh_and_its_iterator_says_that_it_was_closed(num_workers) -> None:
    loader = DataLoader(range(8), 2, num_workers=num_workers)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    loader.close()
    for _ in range(2):
        with pytest.raises(LoaderClosed, match="closed before its end"):
            next(batches)
    with loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_c41_an_iterator_that_is_at_its_end_stays_at_its_end_when_the_loader_is_closed() -> None:
    loader = DataLoader(range(4), 2, num_workers=2)
    batches = iter(loader)
    list(batches)
    loader.close()
    assert list(batches) == []


@pytest.mark.parametrize(("kind", "persistent"), [("process", False), ("process", True), ("thread", True)])
def test_closing_from_another_thread_wakes_the_one_that_waits(kind, persistent, tmp_path) -> None:
    gates = [str(tmp_path / name) for name in ("begun", "ended")]
    for path in gates:
        os.mkfifo(path)

    def wait(index: int) -> int:
        open(gates[0], "w").close()
        open(gates[1]).close()
        return index

    loader = DataLoader(samples(2, wait), 1, num_workers=1, worker_type=kind, persistent_workers=persistent)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(lambda: next(iter(loader)))
        open(gates[0]).close()  # the worker is in its sample
        loader.close()
        assert type(first.exception(LATE)) is LoaderClosed
    assert workers() == []
    if kind == "thread":  # nobody can end a thread from outside: let it run out
        open(gates[1], "w").close()


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_in_a_signal_handler_ends_the_wait_that_it_interrupts(persistent, gate) -> None:
    loader = DataLoader(Sleeps(gate, at=1), 1, num_workers=1, persistent_workers=persistent)
    before = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
    try:
        batches = iter(loader)
        next(batches)
        begun(gate)
        timer = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(LoaderClosed):
            next(batches)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert workers() == []


# ---------------------------------------------------------------------------------------------- side by side


def test_loaders_in_threads() -> None:
    def load(number: int) -> list[list[int]]:
        with DataLoader(range(number, number + 20), 4, num_workers=1) as loader:
            return [batch.tolist() for batch in loader]

    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(load, range(0, 80, 20))]
    assert found == [[list(range(k, k + 4)) for k in range(n, n + 20, 4)] for n in range(0, 80, 20)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_threads_that_share_an_iterator_get_each_batch_once(num_workers) -> None:
    with DataLoader(range(400), 4, num_workers=num_workers) as loader:
        batches = iter(loader)
        with ThreadPoolExecutor(3) as threads:
            got = [*threads.map(lambda _: [int(value) for batch in batches for value in batch], range(3))]
    assert sorted(itertools.chain(*got)) == list(range(400))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:multiprocessing_context='fork' copies")
def test_a_loader_that_is_started_in_a_thread_that_ends_goes_on(method) -> None:
    with DataLoader(range(20), 4, num_workers=2, multiprocessing_context=method) as loader:
        with ThreadPoolExecutor(1) as threads:
            batches = threads.submit(iter, loader).result()
        assert len(list(batches)) == 5


@pytest.mark.parametrize("method", [None, "fork"])
def test_a_dataset_may_use_a_loader_with_workers(method) -> None:
    def load(index: int) -> int:
        with DataLoader(range(index, index + 4), 2, num_workers=1, multiprocessing_context=method) as inner:
            return int(sum(batch.sum() for batch in inner))

    with DataLoader(samples(2, load), 1, num_workers=2) as loader:
        assert [int(batch[0]) for batch in loader] == [6, 10]


def test_a_nested_loader_that_is_left_open_ends_with_its_worker() -> None:
    left: list[Any] = []

    def leave(index: int) -> int:
        left.append(iter(DataLoader(range(100), 2, num_workers=1)))
        return int(next(left[-1]).sum())

    with DataLoader(samples(2, leave), 1, num_workers=1) as loader:
        assert [int(batch[0]) for batch in loader] == [1, 1]
    assert none_left()


def test_a_death_is_seen_although_a_process_that_the_worker_forked_lives_on(tmp_path) -> None:
    def fork(index: int) -> None:
        if os.fork() == 0:
            open(fifo).close()  # waits for the end of the test
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    for method in ("fork", "forkserver"):
        fifo = str(tmp_path / method)
        os.mkfifo(fifo)
        loader = DataLoader(samples(2, fork), 1, num_workers=1, multiprocessing_context=method)
        with loader, pytest.raises(AgnoloadError, match="SIGKILL"):
            next(iter(loader))
        open(fifo, "w").close()


COPIES = [("getitem", deed, "forkserver", "process") for deed in ("return", "exit", "words", "raise")]
COPIES += [(place, "words", "forkserver", "process") for place in ("worker_init_fn", "encoding")]
COPIES += [pytest.param("getitem", "raise", "spawn", "process", marks=pytest.mark.slow)]
COPIES += [("encoding", "return", "fork", "process"), ("worker_init_fn", "raise", "fork", "process")]
COPIES += [("getitem", "exit", None, "thread"), ("worker_init_fn", "return", None, "thread")]


@pytest.mark.parametrize(("place", "deed", "method", "kind"), COPIES)
def test_a_copy_of_a_worker_that_comes_out_of_user_code_is_no_worker(place, deed, method, kind, capfd) -> None:
    """It ends as a program would; it answers no request, and takes none away."""

    def fork() -> None:
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            if os.waitstatus_to_exitcode(status) != {"return": 0, "exit": 3, "words": 1, "raise": 1}[deed]:
                raise AssertionError(status)  # the statement names pytest's modules, and workers would import them
        elif deed == "raise":
            raise KeyError("in the copy")
        elif deed != "return":
            sys.exit(3 if deed == "exit" else "in the copy")

    class Answer:
        def __init__(self, index: int) -> None:
            self.index = index

        def __reduce__(self):
            fork()
            return int, (self.index,)

    def load(index: int) -> object:
        if place == "getitem":
            fork()
        return Answer(index) if place == "encoding" and kind == "process" else index

    loader = DataLoader(
        samples(4, load), 1, num_workers=1, collate_fn=list, multiprocessing_context=method, worker_type=kind,
        worker_init_fn=(lambda _: fork()) if place == "worker_init_fn" else None,
    )  # fmt: skip
    with loader:
        assert list(loader) == [[0], [1], [2], [3]]
    assert none_left()
    times = {"getitem": 4, "worker_init_fn": 1, "encoding": 4 * (kind == "process")}[place]
    said = capfd.readouterr().err
    assert said.splitlines().count("SystemExit: in the copy") == (times if deed == "words" else 0)
    assert said.count("KeyError: 'in the copy'") == (times if deed == "raise" else 0)
    assert said.count("Traceback") == (times if deed in ("words", "raise") else 0)


# ---------------------------------------------------------------------------------------------- starts that fail


class Refusal(Exception):
    pass


def test_a_start_that_fails_half_way_leaves_nothing(monkeypatch) -> None:
    starts = itertools.count()
    begin = launcher.ForkServer.start

    def second_fails(self, *args):
        if next(starts) == 1:
            raise Refusal
        return begin(self, *args)

    monkeypatch.setattr(launcher.ForkServer, "start", second_fails)
    loader = DataLoader(range(8), 2, num_workers=3, persistent_workers=True)
    with pytest.raises(Refusal):
        iter(loader)
    assert none_left()
    monkeypatch.undo()
    with loader:
        assert len(list(loader)) == 4


LIMITS = """
import os, resource, warnings
import agnoload

def descriptors(): return sorted(os.listdir("/proc/self/fd"))

def limited(kind, value):
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value, hard))
    try:
        assert len(list(loader)) == 4
    except OSError as error:
        return error
    finally:
        resource.setrlimit(kind, (hard, hard))

warnings.simplefilter("error")
loader = agnoload.DataLoader(range(8), 2, num_workers=2)
assert len(list(loader)) == 4
before = descriptors()
errors = [limited(resource.RLIMIT_NOFILE, len(before) + room) for room in range(20)]
print(len([error for error in errors if error and error.errno == 24]) > 3, len(descriptors()) <= len(before))
assert len(list(loader)) == 4
loader.close()
before = descriptors()
error = limited(resource.RLIMIT_FSIZE, 1 << 20)
loader.close()  # it has started the fork server
print(error.errno, "ulimit -f" in error.__notes__[0], descriptors() == before, len(list(loader)))
"""


@pytest.mark.slow
def test_a_limit_on_descriptors_or_the_size_of_files_is_an_error_that_leaves_nothing(program) -> None:
    assert program(LIMITS).end() == (0, "True True\n27 True True 4\n", "")


def test_a_fork_that_the_system_refuses_is_an_error() -> None:
    """The server answers with the reason; the loader passes it on, and nothing hangs."""
    reader, writer = os.pipe()
    os.write(writer, launcher.REPORT.pack(-11, 0))
    os.close(writer)
    refused = launcher._Served(reader)
    assert refused.exitcode() is not None
    assert isinstance(refused.failed, BlockingIOError)
    assert "no worker could be started" in str(refused.failed)
    refused.close()
    reader, writer = os.pipe()
    os.close(writer)
    orphan = launcher._Served(reader)
    assert orphan.pid == 0
    assert "fork server ended" in str(orphan.failed)
    orphan.close()


def test_the_death_of_the_fork_server_is_the_death_of_its_workers() -> None:
    loader = DataLoader(range(400), 1, num_workers=2, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    server = preload._current
    assert server is not None
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(AgnoloadError, match="SIGKILL"):
        list(batches)
    assert none_left()
    with loader:
        assert len(list(loader)) == 400  # another server


def test_loaders_work_where_the_system_collects_children_by_itself() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        for method in ("forkserver", "fork"):
            with DataLoader(range(8), 2, num_workers=2, multiprocessing_context=method) as loader:
                assert len(list(loader)) == 4
                assert len(list(loader)) == 4
            assert workers() == []
    finally:
        signal.signal(signal.SIGCHLD, before)
