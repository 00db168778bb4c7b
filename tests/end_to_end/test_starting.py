"""How workers begin, in programs that are not as tidy as a script of ten lines: their signals, streams and folders."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import agnoload
from agnoload import DataLoader, Subset
from agnoload.pools import crew, diagnose, preload


def run(text: str, folder: pathlib.Path, *shell: str) -> tuple[int, str, str]:
    """A program of its own, in a process group of its own."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [*shell, sys.executable, "-W", "error", str(path)],
        check=False, cwd=folder, capture_output=True, text=True, timeout=60, start_new_session=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_module_that_iterates_a_loader_while_a_worker_imports_it_is_named_with_the_guard(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            import agnoload
            class Data:
                def __len__(self): return 4
                def __getitem__(self, index): return index
            print("imported", flush=True)
            next(iter(agnoload.DataLoader(Data(), 2, num_workers=1)))
        """)
    )
    code, out, err = run("import mine", tmp_path)
    assert code == 1
    assert out.count("imported") <= 3
    assert "AgnoloadError: mine iterates a loader with worker processes while a worker imports" in err
    assert 'under `if __name__ == "__main__":`' in err


@pytest.mark.slow
def test_handled_signals_to_the_group_end_no_worker_and_fork_asks_for_temporary_files(
    tmp_path,
) -> None:
    text = """
        import os, signal, tempfile, agnoload

        class Data:
            def __len__(self): return 20
            def __getitem__(self, index): return index

        for name in ("SIGUSR1", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name)
            signal.signal(number, lambda *_: print("handled", end=" "))
            for method in ("forkserver", "spawn"):
                with agnoload.DataLoader(Data(), 1, num_workers=2, multiprocessing_context=method) as loader:
                    for batch in loader:
                        if batch[0] == 5:
                            os.killpg(0, number)
                print(batch[0] + 1, "batches")

        def nowhere(): raise FileNotFoundError(2, "No usable temporary directory found")

        tempfile.gettempdir = nowhere
        try:
            list(agnoload.DataLoader(range(4), 2, num_workers=1, multiprocessing_context="fork"))
        except agnoload.AgnoloadError as error:
            print("set TMPDIR to one that can be written to" in str(error))
        print(len(list(agnoload.DataLoader(range(4), 2, num_workers=1))))
    """
    assert run(text, tmp_path) == (0, "handled 20 batches\n" * 6 + "True\n2\n", "")


UNTIDY = """
    import pathlib, signal, subprocess, sys

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.path += [pathlib.Path("/nowhere"), *(f"/nowhere/{i:0500}" for i in range(400)), "/secret"]

    import agnoload, mine
    from agnoload.pools import preload

    class Data:
        def __len__(self): return 1
        def __getitem__(self, index):
            lines = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True).stdout
            mask = int(lines.split()[1], 16)
            ignored = [bool(mask >> number - 1 & 1) for number in (signal.SIGHUP, signal.SIGTERM)]
            return ignored, len(sys.path), sys.path[-1], type(sys.path[0]).__name__

    loader = agnoload.DataLoader(Data(), None, num_workers=1)
    [(ignored, length, last, kind)] = loader
    print(*ignored)
    print(len(sys.path) - length, last, kind)
    print("secret" in pathlib.Path(f"/proc/{preload._current._process.pid}/cmdline").read_text())

    for method in ("forkserver", "spawn", "fork"):
        print(*agnoload.DataLoader(mine.Data(), None, num_workers=1, multiprocessing_context=method))
"""
MINE = """
    import signal

    def late(*_): raise TimeoutError

    class Data:
        def __len__(self): return 1
        def __getitem__(self, index):
            try:
                signal.raise_signal(signal.SIGALRM)
            except TimeoutError:
                return "late"

    signal.signal(signal.SIGALRM, late)
"""


@pytest.mark.slow
def test_workers_start_in_a_program_that_has_changed_much(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    code, out, err = run(UNTIDY, tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "True False",  # workers and their programs ignore the signals that the program ignores
        "1 /secret str",  # all of the search path, but for the Path, whose text no import would look at
        "False",  # on no command line
        *["late"] * 3,  # a handler that a module installs when it is imported
    ]


@pytest.mark.slow
def test_a_worker_s_death_is_noticed_where_sigchld_is_blocked() -> None:
    with preload.kept_server(), contextlib.ExitStack() as stack:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        if preload._current is not None:  # the one that began before
            preload._current.stop()
        killed = Subset(range(4), range(4)).map(lambda index: os.kill(os.getpid(), signal.SIGKILL))
        loader = stack.enter_context(DataLoader(killed, 1, num_workers=1, timeout=30))
        with pytest.raises(agnoload.WorkerDied, match="SIGKILL"):
            list(loader)


def inherited(index: int) -> list[str]:
    """What a program that is started without care has open, as `ls` sees it; its own listing is one of them."""
    reader, writer = os.pipe()
    os.posix_spawnp("ls", ["ls", "/proc/self/fd"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)])
    os.close(writer)
    with open(reader) as lines:
        found = lines.read().split()
    os.wait()
    return found


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_program_that_a_sample_starts_has_none_of_the_loader_s_descriptors(method) -> None:
    with DataLoader(Subset([0], [0]).map(inherited), None, num_workers=1, multiprocessing_context=method) as loader:
        assert list(loader) == [["0", "1", "2", "3"]]


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_a_timeout_that_is_longer_than_the_system_can_wait_is_no_limit(worker_type, monkeypatch) -> None:
    monkeypatch.setattr(diagnose, "SILENCE", 1e300)
    for timeout in (3e6, 1e300):
        with DataLoader(range(4), 2, num_workers=1, worker_type=worker_type, timeout=timeout) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    with pytest.raises(agnoload.OptionError, match="timeout must be a number of seconds"):
        DataLoader(range(4), timeout=10**400)


@pytest.mark.slow
def test_a_very_large_prefetch_factor_has_as_many_requests_under_way_as_there_is_room_for() -> None:
    with DataLoader(range(4200), 1, num_workers=2, prefetch_factor=1 << 40) as loader:
        assert [int(batch[0]) for batch in loader] == list(range(4200))


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_workers_start_and_are_replaced_though_the_working_directory_has_gone(method, tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    options = {"multiprocessing_context": method, "max_worker_restarts": 2, "prefetch_factor": 1}
    with DataLoader(range(40), 1, num_workers=2, **options) as loader:
        batches = iter(loader)
        for pid in batches._pool.pids().values():
            os.kill(pid, signal.SIGKILL)
        assert len(list(batches)) == 40
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_a_handler_that_raises_while_a_worker_starts_leaves_no_process(method, monkeypatch) -> None:
    """Another thread may receive the signal, and the handler then runs in the first one, whatever that has blocked."""

    class Mine(Exception):
        pass

    def ring(*_: object) -> None:
        raise Mine

    def elsewhere() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.raise_signal(signal.SIGALRM)

    def interrupted(*arguments):
        process = begin(*arguments)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return process  # never: its pool knows nothing of it

    begin = crew.start_process
    monkeypatch.setattr(crew, "start_process", interrupted)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        loader = DataLoader(range(4), 2, num_workers=2, multiprocessing_context=method)
        with pytest.raises(Mine):
            iter(loader)
        assert signal.getsignal(signal.SIGALRM) is ring
        assert signal.SIGALRM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGALRM, before)
    loader.close()  # the fixtures see a process or a descriptor that is left


@pytest.mark.slow
def test_a_library_that_writes_to_a_closed_standard_stream_harms_nothing(tmp_path) -> None:
    text = """
        import os, agnoload

        class Data:
            def __len__(self): return 8
            def __getitem__(self, index):
                for number in (1, 2):
                    os.write(number, b"a complaint")
                return index

        for method in ("forkserver", "spawn", "fork"):
            loader = agnoload.DataLoader(Data(), 1, num_workers=2, multiprocessing_context=method)
            found = [int(batch[0]) for epoch in range(2) for batch in loader]
            loader.close()
            with open("found", "a") as file:
                print(method, found == [*range(8)] * 2, file=file)
    """
    run(text, tmp_path, "sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    assert (tmp_path / "found").read_text() == "forkserver True\nspawn True\nfork True\n"


def test_a_stopped_fork_server_delays_neither_a_timeout_nor_close() -> None:
    loader = DataLoader(range(40), 1, num_workers=1, timeout=1, max_worker_restarts=1, prefetch_factor=1)
    batches = iter(loader)
    pool = batches._pool  # type: ignore[attr-defined]
    next(batches)
    server, begin = preload._current, pool._start
    assert server is not None
    servers = {server._process.pid, pool.crew._server._process.pid}  # a template, where frameworks are loaded

    def stopped(worker: int) -> None:
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        begin(worker)

    pool._start = stopped
    os.kill(pool.pids()[0], signal.SIGKILL)
    try:
        with pytest.raises(agnoload.WorkerTimeout, match=r"worker 0 .*: its process has not started yet"):
            list(batches)
        loader.close()
    finally:
        server.stop()
    assert server._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("missing", ["/proc", "memfd"])
def test_a_missing_system_facility_is_named(missing, monkeypatch) -> None:
    if missing == "memfd":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os.path, "isdir", lambda path: not str(path).startswith("/proc"))
    with pytest.raises(
        agnoload.AgnoloadError, match=f"need {missing}, which this system lacks: use worker_type='thread'"
    ):
        iter(DataLoader(range(4), 2, num_workers=1))
