"""What workers log, warn of and print reaches the user's process."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler
from types import SimpleNamespace
from typing import Any

import pytest

from agnoload import DataLoader


class Talks:
    """Logs, warns or prints once a sample."""

    def __init__(self, say: Callable[[int], object]) -> None:
        self.say = say

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.say(index)
        return index


def through(say: Callable[[int], object], workers: int = 2, epochs: int = 1, **options: Any) -> None:
    with DataLoader(Talks(say), 2, num_workers=workers, **options) as loader:
        for _ in range(epochs):
            list(loader)


@contextmanager
def loggers_of_the_user(heard: list[str]) -> Iterator[None]:
    """One that shows errors only, and one with a handler and a filter of its own, which does not propagate."""
    quiet, loud = logging.getLogger("quiet"), logging.getLogger("loud")
    loud.addHandler(QueueHandler(SimpleNamespace(put_nowait=lambda record: heard.append(record.getMessage()))))
    loud.addFilter(lambda record: "3" not in record.getMessage())
    loud.propagate = False
    quiet.setLevel(logging.ERROR)
    loud.setLevel(logging.INFO)
    yield
    quiet.setLevel(logging.NOTSET)
    loud.setLevel(logging.NOTSET)
    loud.propagate = True
    loud.handlers.clear()
    loud.filters.clear()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_records_warnings_and_prints_arrive_as_without_workers(method, caplog, capfd) -> None:
    def say(index: int) -> None:
        logging.getLogger("user.data").warning("sample %d of %s", index, "six", extra={"shape": (2, 3)})
        for name in ("quiet", "loud"):
            logging.getLogger(name).info("%s %d", name, index)
        warnings.warn(f"sample {index % 2} is odd", RuntimeWarning, stacklevel=1)
        print("sample", index)
        print("whisper", index, file=sys.stderr)
        subprocess.run(["echo", f"child {index}"], check=True, timeout=120)

    heard: list[str] = []
    caplog.set_level(logging.DEBUG)
    with loggers_of_the_user(heard), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        through(say, epochs=2, multiprocessing_context=method)
    # Records: in the order of the batches, with their worker, past the levels and filters of this process.
    assert [r.getMessage() for r in caplog.records] == [f"sample {n} of six" for n in range(6)] * 2
    for record in caplog.records:
        assert (record.name, record.levelname, record.funcName, record.shape) == ("user.data", "WARNING", "say", (2, 3))
        assert record.processName == f"agnoload-worker-{record.worker}"
        assert record.process != logging.makeLogRecord({}).process
        assert record.pathname.endswith("test_logs.py")
    assert heard == [f"loud {n}" for n in (0, 1, 2, 4, 5)] * 2
    # Warnings: each distinct one once a loader.
    caught = [warning for warning in caught if "fork()" not in str(warning.message)]  # Python's and JAX's, of the start
    assert sorted(str(warning.message) for warning in caught) == ["sample 0 is odd", "sample 1 is odd"]
    assert {(warning.category, warning.filename) for warning in caught} == {(RuntimeWarning, __file__)}
    # Prints: line by line, those of programs that a sample starts, too.
    out, err = capfd.readouterr()
    printed = [f"{what} {n}" for what in ("sample", "child") for n in range(6)]
    assert sorted(out.splitlines()) == sorted(2 * printed)
    assert sorted(err.splitlines()) == sorted(2 * [f"whisper {n}" for n in range(6)])


def test_tracebacks_and_what_cannot_travel_are_logged_as_text(caplog) -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

        def __reduce__(self):
            raise TypeError

    def say(index: int) -> None:
        try:
            raise KeyError(index)
        except KeyError:
            logging.getLogger("user").exception(Odd(), extra={"lock": threading.Lock()})

    through(say)
    record = caplog.records[0]
    assert record.getMessage() == "odd"
    assert "KeyError: 0" in record.exc_text
    assert "KeyError: 0" in logging.Formatter().format(record)
    assert "lock" in record.lock


def test_records_come_with_the_first_batch_and_with_an_error(caplog) -> None:
    def say(index: int) -> None:
        logging.error("about to fail")
        raise KeyError(index)

    def up(worker: int) -> None:
        logging.error("worker %d is up", worker)

    def down(worker: int) -> None:
        logging.error("no disk")
        raise OSError

    with pytest.raises(KeyError):
        through(say, 1, worker_init_fn=up)
    assert [record.getMessage() for record in caplog.records] == ["worker 0 is up", "about to fail"]
    caplog.clear()
    with pytest.raises(OSError, match="before its first batch"):
        through(say, 1, worker_init_fn=down)
    assert caplog.text.count("no disk") == 1


def test_a_disabled_level_stays_disabled(caplog) -> None:
    logging.disable(logging.CRITICAL)
    try:
        through(lambda index: logging.critical("%d", index))
    finally:
        logging.disable(logging.NOTSET)
    assert caplog.records == []


# ---------------------------------------------------------------------------------------------- warnings


class Mine(UserWarning):
    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"{index}: {why}")
        self.index = index


def test_a_warning_class_of_the_users_is_that_class_and_an_ignored_warning_does_not_arrive() -> None:
    def say(index: int) -> None:
        warnings.warn(Mine(index, "blurred"), stacklevel=1)
        warnings.warn("old", RuntimeWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="o.d")
        through(say)
    assert [warning.message.index for warning in caught] == list(range(6))
    assert {warning.category for warning in caught} == {Mine}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_warning_that_is_an_error_is_the_samples_error(workers) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="old") as caught:
            through(lambda index: warnings.warn("old", RuntimeWarning, stacklevel=1), workers)
    assert any("index 0" in note for note in caught.value.__notes__)


def test_a_warning_of_a_users_class_that_is_an_error_is_one_when_it_arrives() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=Mine)
        with pytest.raises(Mine, match="old"):
            through(lambda index: warnings.warn(Mine(index, "old"), stacklevel=1))


# ---------------------------------------------------------------------------------------------- whole programs

PROGRAM = """
import warnings, logging, agnoload

class Data:
    def __len__(self): return 4
    def __getitem__(self, index):
        warnings.warn("an old way", DeprecationWarning)
        logging.getLogger("user").warning("sample %d", index)
        print("print", index)
        return index

for batch in agnoload.DataLoader(Data(), 2, num_workers=1):
    print(batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_program_shows_the_same_with_workers_and_without(workers, program) -> None:
    code, out, err = program(PROGRAM.replace("num_workers=1", f"num_workers={workers}")).end()
    assert code == 0
    assert sorted(out.splitlines()) == ["[0 1]", "[2 3]", "print 0", "print 1", "print 2", "print 3"]
    lines = err.splitlines()
    assert sum("DeprecationWarning: an old way" in line for line in lines) == 1  # it is shown for __main__ only
    assert [line for line in lines if line.startswith("sample")] == [f"sample {n}" for n in range(4)]


@pytest.mark.slow
def test_prints_before_a_hang_are_seen(capfd) -> None:
    def say(index: int) -> None:
        print("before")
        threading.Event().wait()

    with DataLoader(Talks(say), num_workers=1, timeout=1) as loader, pytest.raises(TimeoutError):
        next(iter(loader))
    assert capfd.readouterr().out == "before\n"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&- <&-"])
def test_a_program_without_standard_streams_loads_all_the_same(closed, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("print(batch)", f"open({str(tmp_path / 'out')!r}, 'a').write(str(batch))"))
    command = ["sh", "-c", f"exec {sys.executable} -W ignore {program} {closed}"]
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
    assert (tmp_path / "out").read_text() == "[0 1][2 3]"
