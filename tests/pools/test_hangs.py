"""Waiting for what does not come: by `timeout` an error, without it one report, and never more work than is free."""

from __future__ import annotations

import os
import re
import signal
import threading
import warnings
from pathlib import Path

import psutil
import pytest

from agnoload import AgnoloadWarning, DataLoader, WorkerTimeout
from agnoload.pools import crew, diagnose
from agnoload.pools.launcher import start_process

METHODS = ("forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork")
PATIENCE = {"forkserver": 1, "spawn": 6, "fork": 1}


class Gate:
    """The ints 0 to 7; sample `at` waits until the gate is opened for writing."""

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


@pytest.fixture
def gate(tmp_path) -> str:
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


def pid_in(text: str) -> int:
    found = re.search(r"pid (\d+)", text)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("method", METHODS)
def test_c44_a_timeout_names_worker_indices_seconds_and_stack_and_ends_the_worker(method, gate) -> None:
    seconds = PATIENCE[method]
    loader = DataLoader(Gate(gate), 1, num_workers=2, timeout=seconds, multiprocessing_context=method)
    batches = iter(loader)
    got = [int(next(batches)[0]) for _ in range(5)]
    with pytest.raises(WorkerTimeout) as caught:
        next(batches)
    assert got == [0, 1, 2, 3, 4]
    text = str(caught.value)
    assert re.match(rf"no batch came within {seconds}\.\d s: worker [01] \(pid \d+\) is busy with batch 5", text)
    assert "indices [5]" in text
    assert "in wait_at_the_gate" in text
    assert "test_hangs.py" in text
    assert isinstance(caught.value, TimeoutError)
    assert not psutil.pid_exists(pid_in(text))
    loader.close()


@pytest.mark.slow
def test_c44_a_worker_that_ignores_sigterm_is_killed(gate) -> None:
    class Stubborn(Gate):
        def wait_at_the_gate(self) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            super().wait_at_the_gate()

    with DataLoader(Stubborn(gate, at=0), 1, num_workers=1, timeout=1) as loader:
        with pytest.raises(WorkerTimeout) as caught:
            next(iter(loader))
        assert not psutil.pid_exists(pid_in(str(caught.value)))


def test_c44_a_timeout_without_workers_is_accepted() -> None:
    assert [batch.tolist() for batch in DataLoader(range(4), 2, timeout=2)] == [[0, 1], [2, 3]]


@pytest.mark.slow
def test_c44_a_timeout_of_a_start_says_so(gate) -> None:
    def init(_: int) -> None:
        with open(gate, "rb"):
            pass

    loader = DataLoader(range(4), num_workers=1, timeout=1, worker_init_fn=init)
    with loader, pytest.raises(WorkerTimeout, match="is busy with its start") as caught:
        next(iter(loader))
    assert "in init" in str(caught.value)


def test_c44_threads_time_out_with_their_stack(gate) -> None:
    loader = DataLoader(Gate(gate, at=0), 1, num_workers=1, worker_type="thread", timeout=0.1)
    with pytest.raises(WorkerTimeout, match=r"worker 0 \(a thread\) is busy with batch 0") as caught:
        next(iter(loader))
    assert "in wait_at_the_gate" in str(caught.value)
    with open(gate, "wb"):
        pass


def test_a_timeout_over_what_nobody_wants_any_more_names_it(gate) -> None:
    with DataLoader(Gate(gate, at=1), 1, num_workers=1, persistent_workers=True, timeout=1) as loader:
        batches = iter(loader)
        next(batches)
        fd = os.open(gate, os.O_WRONLY)  # the worker is in sample 1; it reads to the end, which does not come
        os.close(fd)
        next(batches)


@pytest.mark.slow
def test_c34_after_a_minute_of_silence_one_report_then_it_waits_on(gate, monkeypatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with DataLoader(Gate(gate, at=2), 1, num_workers=1) as loader:
            batches = iter(loader)
            got = [next(batches).tolist() for _ in range(2)]
            monkeypatch.setattr(diagnose, "SILENCE", 0.2)
            opener = threading.Timer(1.0, lambda: open(gate, "wb").close())
            opener.start()
            got += [batch.tolist() for batch in batches]
            opener.join()
    assert got == [[n] for n in range(8)]
    (report,) = [warning for warning in caught if "no batch for" in str(warning.message)]
    assert report.category is AgnoloadWarning
    assert report.filename == __file__
    text = str(report.message)
    assert re.search(r"worker 0 \(pid \d+\) is busy with batch 2 \(indices \[2\]\); its stack:", text)
    assert "in wait_at_the_gate" in text


def test_c34_threads_report_silence_too(gate, monkeypatch) -> None:
    monkeypatch.setattr(diagnose, "SILENCE", 0.1)
    loader = DataLoader(Gate(gate, at=0, n=1), 1, num_workers=1, worker_type="thread")
    opener = threading.Timer(0.5, lambda: open(gate, "wb").close())
    opener.start()
    with pytest.warns(AgnoloadWarning, match="no batch for") as caught:
        assert [batch.tolist() for batch in loader] == [[0]]
    opener.join()
    assert caught[0].filename == __file__


def test_c34_a_silence_at_the_start_asks_no_worker_that_could_not_answer(monkeypatch) -> None:
    """The signal that asks for a stack would end a process that does not listen for it yet."""
    monkeypatch.setattr(diagnose, "SILENCE", 0.0)
    loader = DataLoader(range(4), 2, num_workers=1, multiprocessing_context="spawn")
    with loader, pytest.warns(AgnoloadWarning, match="its start"):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


LOCKED = """
import sys, threading, types, warnings
import agnoload
from agnoload.pools import diagnose

module = types.ModuleType("holder")
source = "import threading\\nlock = threading.Lock()\\n"
open("holder.py", "w").write(source)
sys.path.insert(0, "")
import holder

class Data:
    def __len__(self): return 4
    def __getitem__(self, index):
        import holder
        with holder.lock:
            return index

def hold():
    holder.lock.acquire()
    held.set()
    threading.Event().wait()

held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
diagnose.SILENCE = 1.0
method = sys.argv[1] if len(sys.argv) > 1 else None
loader = agnoload.DataLoader(Data(), 2, num_workers=2, multiprocessing_context={method!r})
warnings.simplefilter("always")
batches = iter(loader)
{rest}
"""


def test_c34_a_lock_that_somebody_holds_does_not_reach_workers(program) -> None:
    code, out, err = program(LOCKED.format(method=None, rest="print([b.tolist() for b in batches])")).end()
    assert (code, out.strip(), err) == (0, "[[0, 1], [2, 3]]", "")


@pytest.mark.slow
def test_c34_under_fork_it_does_and_there_is_a_warning_with_the_number_of_threads(program) -> None:
    rest = "threading.Timer(2.5, lambda: (loader.close(), print('closed'))).start()\nnext(batches)"
    code, out, err = program(LOCKED.format(method="fork", rest=rest)).end()
    assert code == 1
    assert out.strip() == "closed"
    assert "copies this process of 2 threads" in err
    assert err.count("no batch for 1 s: worker") == 1
    assert "in __getitem__" in err
    assert "LoaderClosed" in err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------- one slow sample


def test_c47_a_slow_sample_holds_up_nobody_out_of_order(gate) -> None:
    with DataLoader(Gate(gate, at=0), 1, num_workers=2, in_order=False) as loader:
        batches = iter(loader)
        got = [int(next(batches)[0]) for _ in range(7)]
        with open(gate, "wb"):
            pass
        assert (got, int(next(batches)[0])) == ([1, 2, 3, 4, 5, 6, 7], 0)
        assert list(batches) == []


def test_c47_in_order_it_comes_first(gate) -> None:
    with DataLoader(Gate(gate, at=0), 1, num_workers=2) as loader:
        batches = iter(loader)
        opener = threading.Thread(target=lambda: open(gate, "wb").close())
        opener.start()
        assert [int(batch[0]) for batch in batches] == list(range(8))
        opener.join()


def test_c47_a_state_out_of_order_gives_the_others_exactly_once(gate) -> None:
    with DataLoader(Gate(gate, at=0), 1, num_workers=2, in_order=False, seed=0) as loader:
        batches = iter(loader)
        got = [int(next(batches)[0]) for _ in range(3)]
        state = loader.state_dict()
        batches.close()
    with DataLoader(Gate(gate, at=-1), 1, num_workers=2, in_order=False, seed=0) as loader:
        loader.load_state_dict(state)
        rest = [int(batch[0]) for batch in loader]
    assert got == [1, 2, 3]
    assert sorted(got + rest) == list(range(8))


def test_requests_go_to_whoever_is_free(gate) -> None:
    """One worker is held for the whole epoch; the other does everything else, however small the window."""
    with DataLoader(Gate(gate, at=0, n=100), 1, num_workers=2, in_order=False, prefetch_factor=1) as loader:
        batches = iter(loader)
        assert [int(next(batches)[0]) for _ in range(99)] == list(range(1, 100))
        with open(gate, "wb"):
            pass
        assert int(next(batches)[0]) == 0


@pytest.mark.parametrize("method", METHODS)
def test_c50_a_fork_of_a_process_that_has_opened_a_gpu_is_warned_of_before_it_is_made(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr(diagnose, "DEVICES", (str(device),))
    starts: list[int] = []
    monkeypatch.setattr(crew, "start_process", lambda *a, **k: starts.append(len(caught)) or start_process(*a, **k))
    with device.open(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AgnoloadWarning)
        with DataLoader(range(8), 4, num_workers=2, multiprocessing_context=method) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    said = [str(each.message) for each in caught if issubclass(each.category, AgnoloadWarning)]
    if method == "fork":
        assert len(said) == 1
        assert f"has opened {device}: a driver does not work in a copy" in said[0]
        assert caught[0].filename == __file__
        assert starts == [1, 1]
    else:
        assert said == []
