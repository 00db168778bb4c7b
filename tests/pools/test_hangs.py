"""Waiting for what does not come: by `timeout` an error, without it one report, and never more work than is free."""

from __future__ import annotations

import importlib
import os
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agnoload import AgnoloadWarning, DataLoader, WorkerTimeout
from agnoload.errors import LoaderClosed
from agnoload.pools import crew, diagnose
from agnoload.pools.launcher import start_process


class Gate:
    """The ints 0 to n - 1; sample `at` waits until the gate is opened for writing."""

    def __init__(self, path: str, at: int = 5, n: int = 8) -> None:
        self.path, self.at, self.n = path, at, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.wait_at_the_gate()
        return index

    def wait_at_the_gate(self) -> None:
        with open(self.path, "rb"):
            pass


class Stubborn(Gate):
    def wait_at_the_gate(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().wait_at_the_gate()


@pytest.fixture
def gate(tmp_path) -> str:
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


def opened(gate: str) -> None:
    with open(gate, "wb"):
        pass


@pytest.fixture
def after_silence(monkeypatch) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Does something once the report of a long silence has been made; from then on a short one is long."""
    threads: list[threading.Thread] = []

    def arrange(deed: Callable[[], object]) -> None:
        reported = threading.Event()
        holds_up = diagnose.what_holds_up

        def report(*arguments):
            text = holds_up(*arguments)
            reported.set()
            return text

        monkeypatch.setattr(diagnose, "SILENCE", 0.1)
        monkeypatch.setattr("agnoload.pools.processes.what_holds_up", report)
        threads.append(threading.Thread(target=lambda: (reported.wait(30), deed())))
        threads[0].start()

    yield arrange
    for thread in threads:
        thread.join()


# ---------------------------------------------------------------------------------------------- a limit


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Gate, Stubborn])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_timeout_names_worker_indices_seconds_and_stack_and_ends_the_worker(kind, persistent, gate) -> None:
    """Also one that ignores SIGTERM. The crash matrix does this with every start method."""
    loader = DataLoader(kind(gate), 1, num_workers=2, timeout=0.5, persistent_workers=persistent)
    batches = iter(loader)
    assert [int(next(batches)[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(WorkerTimeout) as caught:
        next(batches)
    text = str(caught.value)
    found = re.match(r"no batch came within 0\.\d s: worker [01] \(pid (\d+)\) is busy with batch 5", text)
    assert found is not None, text
    assert "indices [5]" in text
    assert "in wait_at_the_gate" in text
    assert "test_hangs.py" in text
    assert isinstance(caught.value, TimeoutError)
    assert not psutil.pid_exists(int(found[1]))
    loader.close()


def test_a_timeout_without_workers_is_accepted() -> None:
    assert [batch.tolist() for batch in DataLoader(range(4), 2, timeout=2)] == [[0, 1], [2, 3]]


def test_a_timeout_of_a_start_says_so(gate) -> None:
    def init(_: int) -> None:
        with open(gate, "rb"):
            pass

    loader = DataLoader(range(4), num_workers=1, timeout=0.5, worker_init_fn=init, multiprocessing_context="fork")
    with loader, pytest.raises(WorkerTimeout, match="is busy with its start") as caught:
        next(iter(loader))
    assert "in init" in str(caught.value)


def test_threads_time_out_with_their_stack(gate) -> None:
    loader = DataLoader(Gate(gate, at=0), 1, num_workers=1, worker_type="thread", timeout=0.1)
    with pytest.raises(WorkerTimeout, match=r"worker 0 \(a thread\) is busy with batch 0") as caught:
        next(iter(loader))
    assert "in wait_at_the_gate" in str(caught.value)
    opened(gate)


# ---------------------------------------------------------------------------------------------- one report


def test_after_a_minute_of_silence_one_report_then_it_waits_on(gate, after_silence) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with DataLoader(Gate(gate, at=2), 1, num_workers=1, multiprocessing_context="fork") as loader:
            batches = iter(loader)
            assert [next(batches).tolist() for _ in range(2)] == [[0], [1]]
            after_silence(lambda: opened(gate))
            assert [batch.tolist() for batch in batches] == [[n] for n in range(2, 8)]
    (report,) = [warning for warning in caught if "no batch for" in str(warning.message)]
    assert report.category is AgnoloadWarning
    assert report.filename == __file__
    text = str(report.message)
    assert re.search(r"worker 0 \(pid \d+\) is busy with batch 2 \(indices \[2\]\); its stack:", text)
    assert "in wait_at_the_gate" in text


def test_threads_report_silence_too(gate, monkeypatch) -> None:
    monkeypatch.setattr(diagnose, "SILENCE", 0.1)
    loader = DataLoader(Gate(gate, at=0, n=1), 1, num_workers=1, worker_type="thread")
    opener = threading.Timer(0.5, opened, (gate,))
    opener.start()
    with pytest.warns(AgnoloadWarning, match="no batch for") as caught:
        assert [batch.tolist() for batch in loader] == [[0]]
    opener.join()
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_a_silence_at_the_start_asks_no_worker_that_could_not_answer(monkeypatch) -> None:
    """The signal that asks for a stack would end a process that does not listen for it yet."""
    monkeypatch.setattr(diagnose, "SILENCE", 0.0)
    loader = DataLoader(range(4), 2, num_workers=1, multiprocessing_context="spawn")
    with loader, pytest.warns(AgnoloadWarning, match="its start"):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_lock_that_somebody_holds_reaches_workers_by_fork_alone(tmp_path, monkeypatch, after_silence) -> None:
    name = f"holder_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("import threading\nlock = threading.Lock()\n")
    monkeypatch.syspath_prepend(tmp_path)
    holder = importlib.import_module(name)

    class Locks:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index > 0:
                with importlib.import_module(name).lock:
                    return index
            return index

    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    with holder.lock:
        assert [batch.tolist() for batch in DataLoader(Locks(), 2, num_workers=2)] == [[0, 1], [2, 3]]
        loader = DataLoader(Locks(), 1, num_workers=1, multiprocessing_context="fork")
        with pytest.warns(AgnoloadWarning, match="copies this process of 2 threads"):
            batches = iter(loader)
        assert next(batches).tolist() == [0]
        after_silence(loader.close)
        with pytest.warns(AgnoloadWarning, match="in __getitem__"), pytest.raises(LoaderClosed):
            next(batches)
    end.set()
    other.join()


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_fork_of_a_process_that_has_opened_a_gpu_is_warned_of_before_it_is_made(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr(diagnose, "DEVICES", (str(device),))
    starts: list[int] = []
    monkeypatch.setattr(crew, "start_process", lambda *a: starts.append(len(caught)) or start_process(*a))
    with device.open(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AgnoloadWarning)
        with DataLoader(range(8), 4, num_workers=2, multiprocessing_context=method) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    said = [str(each.message) for each in caught if issubclass(each.category, AgnoloadWarning)]
    assert len(said) == (method == "fork")
    if said:
        assert f"has opened {device}: a driver does not work in a copy" in said[0]
        assert caught[0].filename == __file__
        assert starts == [1, 1]


# ---------------------------------------------------------------------------------------------- one slow sample


def test_a_slow_sample_comes_first_in_order(gate) -> None:
    with DataLoader(Gate(gate, at=0), 1, num_workers=2, multiprocessing_context="fork") as loader:
        batches = iter(loader)
        opener = threading.Thread(target=opened, args=(gate,))
        opener.start()
        assert [int(batch[0]) for batch in batches] == list(range(8))
        opener.join()


@pytest.mark.parametrize("prefetch_factor", [1, 2])
def test_out_of_order_a_slow_sample_holds_up_nobody_and_a_state_gives_the_others_once(prefetch_factor, gate) -> None:
    """One worker is held for the whole epoch; the other does everything else, however small the window."""
    options = {"num_workers": 2, "in_order": False, "seed": 0, "prefetch_factor": prefetch_factor}
    with DataLoader(Gate(gate, at=0, n=50), 1, multiprocessing_context="fork", **options) as loader:
        batches = iter(loader)
        got = [int(next(batches)[0]) for _ in range(3)]
        state = loader.state_dict()
        got += [int(next(batches)[0]) for _ in range(46)]
        assert got == list(range(1, 50))
        opened(gate)
        assert [int(batch[0]) for batch in batches] == [0]
    with DataLoader(Gate(gate, at=-1, n=50), 1, **options) as loader:
        loader.load_state_dict(state)
        rest = [int(batch[0]) for batch in loader]
    assert sorted(got[:3] + rest) == list(range(50))
