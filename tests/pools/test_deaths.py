"""Workers that die: what is said, what is delivered, and how a loader goes on without them.

Every way to die at every place with every start method is the crash matrix's. Here most workers start by fork, which is
the quickest: the pool does not know how its workers started.
"""

from __future__ import annotations

import itertools
import os
import pickle
import resource
import select
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import DataLoader, WorkerDied, sample_rng
from agnoload.pools import diagnose, preload
from agnoload.pools.channel import ReplyTicket
from agnoload.pools.status import WorkerStatusBoard


def die(how: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), getattr(signal, how))


class Dies:
    """The ints 0 to 7 with draws; a worker that loads `at` dies as long as there is another file in the folder."""

    def __init__(self, folder: str, at: int = 3, how: str = "SIGKILL") -> None:
        self.folder, self.at, self.how = folder, at, how
        self.memory: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        if index == self.at:
            for name in os.listdir(self.folder):
                os.remove(os.path.join(self.folder, name))
                self.memory = np.ones(40 << 17)  # 40 MiB
                die(self.how)
        return index, sample_rng().random(), np.random.random()


@pytest.fixture
def folder(tmp_path) -> Iterator[str]:
    """A folder; each file in it is one more death."""
    path = tmp_path / "deaths"
    path.mkdir()
    return str(path)


def deaths(folder: str, n: int) -> str:
    for number in range(n):
        open(os.path.join(folder, str(number)), "x").close()
    return folder


def forks(dataset: Any, batch_size: int = 1, num_workers: int = 2, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size, num_workers=num_workers, multiprocessing_context="fork", **options)


def until_death(loader: DataLoader) -> tuple[list, WorkerDied]:
    got = []
    try:
        with loader:
            for batch in loader:
                got.append(batch)  # what came before the death counts
    except WorkerDied as error:
        return got, error
    raise AssertionError(f"no death after {got}")


def bits(batches: list) -> bytes:
    """Batches to the last bit."""
    return b"".join(np.asarray(leaf).tobytes() for batch in batches for leaf in batch)


@pytest.mark.parametrize("method", [pytest.param("forkserver", marks=pytest.mark.slow), "fork"])
def test_a_death_says_who_what_where_and_with_how_much_memory_after_what_was_finished(method, folder) -> None:
    for how, said, code in (("SIGKILL", "SIGKILL", -9), ("SIGSEGV", "SIGSEGV", -11), ("exit", "exit code 7", 7)):
        loader = DataLoader(Dies(deaths(folder, 1), 3, how), 1, num_workers=2, multiprocessing_context=method)
        got, error = until_death(loader)
        assert [int(batch[0][0]) for batch in got] == [0, 1, 2]
        assert said in str(error)
        assert "batch 3 (indices [3])" in str(error)
        assert f"worker {error.worker} (pid {error.pid})" in str(error)
        assert (error.batch, error.indices, error.exitcode, error.oom_kills) == (3, [3], code, 0)
        assert error.rss is not None
        assert error.rss > 40 << 20
        assert f"{error.rss / 2**20:,.0f} MiB" in str(error)
        notes = getattr(error, "__notes__", [])
        assert len(notes) == (how == "SIGSEGV")
        if notes:
            assert "Segmentation fault" in notes[0]
            assert "in die" in notes[0]
            assert "in __getitem__" in notes[0]


@pytest.mark.parametrize(("method", "code"), [("forkserver", -9), ("fork", None)])
def test_a_death_whose_exit_code_somebody_else_has_collected_says_so(method, code, folder) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects children at once
    try:
        loader = DataLoader(Dies(deaths(folder, 1)), 1, num_workers=2, multiprocessing_context=method)
        got, error = until_death(loader)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [int(batch[0][0]) for batch in got] == [0, 1, 2]
    assert (error.exitcode, error.batch, error.indices) == (code, 3, [3])
    assert ("collected its exit code" in str(error)) == (code is None)


def test_a_death_counts_out_of_memory_kills(folder, monkeypatch) -> None:
    counts = iter([5, 7])
    monkeypatch.setattr(diagnose, "oom_kills", lambda: next(counts))
    _, error = until_death(forks(Dies(deaths(folder, 1))))
    assert error.oom_kills == 2
    assert "2 out-of-memory kills" in str(error)


def test_the_kernels_count_is_read_in_both_forms(tmp_path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    assert diagnose.oom_kills(tmp_path) == 0
    for line, file, text in (
        ("0::/mine", "mine/memory.events", "low 0\noom 3\noom_kill 2\n"),
        ("5:cpu,memory:/", "memory/memory.oom_control", "under_oom 0\noom_kill 4\n"),
    ):
        (tmp_path / "proc/self/cgroup").write_text(line)
        path = tmp_path / "sys/fs/cgroup" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        assert diagnose.oom_kills(tmp_path) == int(text.split()[-1])


def test_errors_keep_what_they_carry_when_they_are_pickled() -> None:
    error = WorkerDied("gone", 1, 912, -9, 17, [5, 6], 2, 1 << 20)
    error.add_note("a note")
    back = pickle.loads(pickle.dumps(error))
    assert vars(back) == vars(error)
    assert str(back) == "gone"


# ---------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("in_order", [True, False])
def test_after_a_restart_the_epoch_is_bit_identical(in_order, folder) -> None:
    undisturbed = list(DataLoader(Dies(folder), 2, shuffle=True, seed=5))
    loader = DataLoader(
        Dies(deaths(folder, 1)), 2, shuffle=True, seed=5, num_workers=2, max_worker_restarts=1, in_order=in_order
    )
    with loader:
        got = list(loader)
    key = {int(batch[0][0]): place for place, batch in enumerate(undisturbed)}
    got = got if in_order else sorted(got, key=lambda batch: key[int(batch[0][0])])
    assert bits(got) == bits(undisturbed)
    assert os.listdir(folder) == []  # it did die


@settings(max_examples=6)
@given(st.integers(1, 3), st.sets(st.integers(0, 19), max_size=4))
def test_any_few_deaths_leave_the_batches_as_they_are(workers: int, deadly: set[int]) -> None:
    class DiesOnce:
        """Each of the deadly samples kills the first worker that loads it; a pipe tells the others."""

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[int, float]:
            if index in pipes and os.read(pipes[index][0], 1) == b"1":
                die("SIGKILL")
            return index, sample_rng().random()

    pipes: dict[int, tuple[int, int]] = {}
    undisturbed = list(DataLoader(DiesOnce(), 1, shuffle=True, seed=3))
    pipes |= {index: os.pipe() for index in deadly}
    for _, writer in pipes.values():
        os.write(writer, b"10")
    with forks(DiesOnce(), 1, workers, shuffle=True, seed=3, max_worker_restarts=4) as loader:
        assert bits(list(loader)) == bits(undisturbed)
    for fd in (fd for pipe in pipes.values() for fd in pipe):
        os.close(fd)


def test_workers_start_again_although_the_fork_server_died_with_them() -> None:
    with DataLoader(range(40), 1, num_workers=2, max_worker_restarts=4, prefetch_factor=1) as loader:
        batches = iter(loader)
        got = [int(next(batches)[0])]
        assert preload._current is not None
        os.kill(preload._current._process.pid, signal.SIGKILL)
        assert got + [int(batch[0]) for batch in batches] == list(range(40))


def test_a_request_that_kills_two_workers_is_the_culprit(folder) -> None:
    got, error = until_death(forks(Dies(deaths(folder, 3)), max_worker_restarts=9))
    assert [int(batch[0][0]) for batch in got] == [0, 1, 2]
    assert "two workers in a row" in str(error)
    assert (error.batch, error.indices) == (3, [3])
    assert len(os.listdir(folder)) == 1


def test_restarts_are_used_up(folder) -> None:
    class DiesEverywhere(Dies):
        def __getitem__(self, index: int) -> tuple[int, float, float]:
            if not os.path.exists(os.path.join(self.folder, str(index))):
                open(os.path.join(self.folder, str(index)), "x").close()
                die("SIGKILL")
            return index, 0.0, 0.0

    got, error = until_death(forks(DiesEverywhere(folder), num_workers=1, max_worker_restarts=3))
    assert [int(batch[0][0]) for batch in got] == [0, 1, 2]
    assert error.batch == 3
    assert "in a row" not in str(error)


def test_a_worker_that_dies_at_its_start_is_restarted_and_given_up_if_it_always_does(folder) -> None:
    def init(_: int) -> None:
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
            die("SIGKILL")

    deaths(folder, 1)
    with forks(range(4), 2, 1, worker_init_fn=init, max_worker_restarts=1) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    _, error = until_death(forks(range(4), num_workers=1, worker_init_fn=lambda _: die("exit"), max_worker_restarts=2))
    assert error.batch is None
    assert "before its first batch" in str(error)


def test_an_idle_worker_that_dies_is_replaced(tmp_path) -> None:
    os.mkfifo(tmp_path / "meet")

    class Rendezvous:
        """Sample 1 is begun by one worker, then sample 0 ended by the other; sample 1 waits for the end of that one."""

        def __init__(self, path: str) -> None:
            self.path = path

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index < 2:
                with open(self.path, "rb" if index == 0 else "wb"):
                    pass
            if index == 1:
                with open(self.path, "rb") as told:
                    told.read()
            return os.getpid()

    with forks(Rendezvous(str(tmp_path / "meet")), max_worker_restarts=1) as loader:
        batches = iter(loader)
        first = next(batches)
        os.kill(int(first[0]), signal.SIGKILL)
        with open(tmp_path / "meet", "wb"):
            pass
        rest = list(batches)
    assert len(rest) == 3


def test_kept_workers_that_have_died_between_epochs_are_replaced() -> None:
    class Pid:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return os.getpid()

    with forks(Pid(), num_workers=1, persistent_workers=True) as loader:
        (pid,) = {int(batch[0]) for batch in loader}
        (again,) = {int(batch[0]) for batch in loader}
        assert again == pid
        os.kill(pid, signal.SIGKILL)
        select.select([loader._keeper.kept._pools[0].crew.processes[0].sentinel], [], [])
        (other,) = {int(batch[0]) for batch in loader}
    assert other != pid


def test_a_kept_worker_that_dies_over_what_nobody_wants_is_an_error_all_the_same(tmp_path) -> None:
    os.mkfifo(tmp_path / "gate")

    class Dawdles:
        def __init__(self, gate: str) -> None:
            self.gate = gate

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 1:
                with open(self.gate, "rb") as gate:
                    gate.read()
                die("SIGKILL")
            return index

    dataset = Dawdles(str(tmp_path / "gate"))
    with forks(dataset, num_workers=1, persistent_workers=True) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0]
        with open(tmp_path / "gate", "wb"):  # the worker is in sample 1
            batches.close()
            batches = iter(loader)
        with pytest.raises(WorkerDied, match=r"batch 1 \(indices \[1\]\)"):  # and dies there
            next(batches)
        batches = iter(loader)  # with a fresh one
        assert next(batches).tolist() == [0]


# ---------------------------------------------------------------------------------------------- between two lines


def _lethal(at: int):
    """`WorkerStatusBoard.claim` that kills worker 0 between reading its n-th ticket and claiming it."""
    claim, claims = WorkerStatusBoard.claim, [0]

    def lethal(self: WorkerStatusBoard, worker: int, number: int) -> None:
        claims[0] += worker == 0
        if worker == 0 and claims[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        claim(self, worker, number)

    return lethal


@pytest.mark.parametrize(("at", "workers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_death_between_reading_a_ticket_and_claiming_it_loses_nothing(at, workers, monkeypatch) -> None:
    monkeypatch.setattr(WorkerStatusBoard, "claim", _lethal(at))
    loader = DataLoader(range(40), 2, num_workers=workers, multiprocessing_context="fork", max_worker_restarts=1)
    with loader:
        pool = iter(loader)
        monkeypatch.undo()  # the worker that takes its place is an ordinary one
        assert [batch.tolist() for batch in pool] == [[n, n + 1] for n in range(0, 40, 2)]


def test_a_death_between_reading_a_ticket_and_claiming_it_is_an_error_without_restarts(monkeypatch) -> None:
    monkeypatch.setattr(WorkerStatusBoard, "claim", _lethal(3))
    got, error = until_death(DataLoader(range(8), 1, num_workers=1, multiprocessing_context="fork"))
    assert [batch.tolist() for batch in got] == [[0], [1]]
    assert error.batch == 2


def test_a_worker_frozen_before_its_claim_that_wakes_later_doubles_nothing(tmp_path, monkeypatch) -> None:
    """Worker 0 reads a ticket and is held; worker 1 dies meanwhile, and worker 0's request is taken for lost, too."""
    for name in ("held", "gate"):
        os.mkfifo(tmp_path / name)
    claim, claims = WorkerStatusBoard.claim, {0: 0, 1: 0}

    def hindered(self: WorkerStatusBoard, worker: int, number: int) -> None:
        claims[worker] += 1
        if worker == 0 and claims[0] == 1:
            with open(tmp_path / "held", "wb"), open(tmp_path / "gate", "rb"):
                pass
        if worker == 1 and claims[1] == 3:
            with open(tmp_path / "held", "rb"):
                os.kill(os.getpid(), signal.SIGKILL)
        claim(self, worker, number)

    monkeypatch.setattr(WorkerStatusBoard, "claim", hindered)
    loader = DataLoader(
        range(60), 1, num_workers=2, multiprocessing_context="fork", max_worker_restarts=1, prefetch_factor=10
    )
    with loader:
        batches = iter(loader)
        monkeypatch.undo()  # the worker that takes the dead one's place is an ordinary one
        got = [next(batches).tolist() for _ in range(30)]
        with open(tmp_path / "gate", "wb"):
            pass
        got += [batch.tolist() for batch in batches]
        assert got == [[n] for n in range(60)]


# ---------------------------------------------------------------------------------------------- corruption


TICKET = ReplyTicket(0, 2, 0, 0, 64, 0, 0, 64, 0, 0.0, 0.0, 0.0, 0.0)


def test_a_corrupted_reply_is_an_error_that_says_so() -> None:
    class Waits:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            os.read(gate[0], 1)
            return index

    fields = itertools.product(("worker", "slot", "offset", "nbytes", "end"), (-1, 1 << 40))
    gate = os.pipe()
    for wrong in (b"something else", *(TICKET._replace(**{name: value}).packed() for name, value in fields)):
        with forks(Waits(), num_workers=1) as loader:
            batches = iter(loader)
            os.write(batches._pool._channel.replies_end, wrong)
            with pytest.raises(WorkerDied, match="sent a corrupted reply"):
                next(batches)
    for fd in gate:
        os.close(fd)


def test_a_worker_that_closes_what_is_not_its_own_dies_with_its_last_words() -> None:
    class Closes:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            os.closerange(3, 256)
            return index

    _, error = until_death(forks(Closes(), num_workers=1))
    assert "exit code 1" in str(error)
    assert "Bad file descriptor" in error.__notes__[0]
