"""What workers log, warn of and print reaches the user's process."""

from __future__ import annotations

import logging
import logging.handlers
import subprocess
import sys
import threading
import warnings

import pytest

from agnoload import DataLoader

METHODS = ("forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork")


class Talks:
    """Logs, warns or prints once a sample."""

    def __init__(self, say) -> None:
        self.say = say

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.say(index)
        return index


def through(say, workers: int = 2, **options) -> list[list[int]]:
    with DataLoader(Talks(say), 2, num_workers=workers, **options) as loader:
        return [batch.tolist() for batch in loader]


# ---------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize("method", METHODS)
def test_records_reach_the_handlers_tagged_in_the_order_of_the_batches(method, caplog) -> None:
    def say(index: int) -> None:
        logging.getLogger("user.data").warning("sample %d of %s", index, "six", extra={"shape": (2, 3)})

    caplog.set_level(logging.DEBUG)
    through(say, multiprocessing_context=method)
    assert [record.getMessage() for record in caplog.records] == [f"sample {n} of six" for n in range(6)]
    for record in caplog.records:
        assert (record.name, record.levelname, record.funcName, record.shape) == ("user.data", "WARNING", "say", (2, 3))
        assert record.processName == f"agnoload-worker-{record.worker}"
        assert record.process != logging.makeLogRecord({}).process
        assert record.pathname.endswith("test_logs.py")


@pytest.mark.parametrize("method", METHODS)
def test_levels_filters_and_propagation_are_those_of_the_parent(method, caplog) -> None:
    def say(index: int) -> None:
        for name in ("quiet", "loud", "other"):
            logging.getLogger(name).info("%s %d", name, index)

    quiet, loud = logging.getLogger("quiet"), logging.getLogger("loud")
    heard: list[str] = []
    handler = logging.handlers.QueueHandler(type("Q", (), {"put_nowait": lambda _, r: heard.append(r.getMessage())})())
    caplog.set_level(logging.WARNING)
    quiet.setLevel(logging.ERROR)
    loud.setLevel(logging.INFO)
    loud.propagate = False
    loud.addHandler(handler)
    loud.addFilter(lambda record: "3" not in record.getMessage())
    try:
        through(say, multiprocessing_context=method)
    finally:
        quiet.setLevel(logging.NOTSET)
        loud.setLevel(logging.NOTSET)
        loud.propagate = True
        loud.handlers.clear()
        loud.filters.clear()
    assert caplog.records == []
    assert heard == [f"loud {n}" for n in (0, 1, 2, 4, 5)]


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


def test_records_of_worker_init_fn_come_with_the_first_batch(caplog) -> None:
    caplog.set_level(logging.INFO)
    with DataLoader(range(4), 2, num_workers=1, worker_init_fn=lambda w: logging.info("worker %d is up", w)) as loader:
        next(iter(loader))
    assert [record.getMessage() for record in caplog.records] == ["worker 0 is up"]


def test_records_come_with_the_error_too(caplog) -> None:
    def say(index: int) -> None:
        logging.error("about to fail")
        raise KeyError(index)

    with pytest.raises(KeyError):
        through(say)
    assert "about to fail" in caplog.text

    def init(_: int) -> None:
        logging.error("no disk")
        raise OSError

    caplog.clear()
    with DataLoader(range(4), num_workers=1, worker_init_fn=init) as loader, pytest.raises(OSError):  # noqa: PT011
        next(iter(loader))
    assert caplog.text.count("no disk") == 1


def test_a_disabled_level_stays_disabled(caplog) -> None:
    logging.disable(logging.CRITICAL)
    try:
        through(lambda index: logging.critical("%d", index))
    finally:
        logging.disable(logging.NOTSET)
    assert caplog.records == []


# ---------------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize("method", METHODS)
def test_each_distinct_warning_comes_once_a_loader(method) -> None:
    def say(index: int) -> None:
        warnings.warn(f"sample {index % 2} is odd", RuntimeWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with DataLoader(Talks(say), 2, num_workers=2, multiprocessing_context=method) as loader:
            for _ in range(2):
                list(loader)
    caught = [warning for warning in caught if "fork()" not in str(warning.message)]  # Python's and JAX's, of the start
    assert sorted(str(warning.message) for warning in caught) == ["sample 0 is odd", "sample 1 is odd"]
    assert {warning.category for warning in caught} == {RuntimeWarning}
    assert {warning.filename for warning in caught} == {__file__}


def test_a_warning_class_of_the_users_is_that_class() -> None:
    class Mine(UserWarning):
        def __init__(self, index: int, why: str) -> None:
            super().__init__(f"{index}: {why}")
            self.index = index

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        through(lambda index: warnings.warn(Mine(index, "blurred"), stacklevel=1))
    assert [warning.message.index for warning in caught] == list(range(6))
    assert {warning.category for warning in caught} == {Mine}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_warning_that_is_an_error_is_the_samples_error(workers) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="old") as caught:
            through(lambda index: warnings.warn("old", RuntimeWarning, stacklevel=1), workers)
    assert any("index 0" in note for note in caught.value.__notes__)


def test_a_warning_of_a_foreign_class_that_is_an_error_is_one_when_it_arrives() -> None:
    class Mine(UserWarning):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=Mine)
        with pytest.raises(Mine, match="old"):
            through(lambda index: warnings.warn("old", Mine, stacklevel=1))


def test_an_ignored_warning_does_not_arrive() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="o.d")
        through(lambda index: warnings.warn("old", RuntimeWarning, stacklevel=1))
    assert caught == []


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


# ---------------------------------------------------------------------------------------------- prints


@pytest.mark.parametrize("method", METHODS)
def test_prints_reach_the_output_of_the_parent_line_by_line(method, capfd) -> None:
    def say(index: int) -> None:
        print("sample", index)
        print("whisper", index, file=sys.stderr)
        subprocess.run(["echo", f"child {index}"], check=True, timeout=120)

    through(say, multiprocessing_context=method)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(f"{what} {n}" for what in ("sample", "child") for n in range(6))
    assert sorted(err.splitlines()) == [f"whisper {n}" for n in range(6)]


@pytest.mark.slow
def test_prints_before_a_hang_are_seen(capfd) -> None:
    def say(index: int) -> None:
        print("before")
        threading.Event().wait()

    with DataLoader(Talks(say), num_workers=1, timeout=1) as loader, pytest.raises(TimeoutError):
        next(iter(loader))
    assert capfd.readouterr().out == "before\n"


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_program_without_standard_streams_loads_all_the_same(closed, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("print(batch)", f"open({str(tmp_path / 'out')!r}, 'a').write(str(batch))"))
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -W ignore {program} {closed}"],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0
    assert (tmp_path / "out").read_text() == "[0 1][2 3]"
