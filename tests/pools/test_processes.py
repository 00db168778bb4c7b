"""The pool of worker processes: what only it promises."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.messages import Reply, Request, Start
from agnoload.monitoring.logs import WorkerLogCapture
from agnoload.pools import channel, crew
from agnoload.pools.channel import PACKED, STOP, ReplyTicket, RequestTicket
from agnoload.pools.processes import ProcessPool
from agnoload.pools.status import WorkerStatusBoard
from agnoload.pools.worker import Worker
from agnoload.system import method_of
from agnoload.transport.arena import Arena
from agnoload.transport.payload import DatasetNotPicklable
from agnoload.transport.wire import decode

MIB = 1 << 20
_numbers = itertools.count()


class Run:
    """Answers a request by calling its key."""

    def __init__(self, begin: Callable[[int], None] = lambda worker: None) -> None:
        self._begin = begin

    def begin(self, worker: int) -> None:
        self._begin(worker)

    def close(self) -> None:
        pass

    def parts(self) -> dict[str, Any]:
        return {"begin": self._begin}

    def __call__(self, request: Request, empty: Any) -> Reply:
        try:
            return Reply(request.number, batch=request.indices(empty), samples=1)
        except Exception as error:
            return Reply(request.number, error=error)


def make(*, fetch: Any = None, workers: int = 1, window: int = 2, context: Any = "fork", **options: Any) -> ProcessPool:
    return ProcessPool(fetch or Run(), workers=workers, window=window, context=context, **options)


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    pool = make()
    yield pool
    pool.close()


def ask(pool: ProcessPool, key: Any, owner: int | None = None) -> int:
    number = next(_numbers)
    pool.submit(Request(number, 0, number, key, number, owner=owner))
    return number


def answer(pool: ProcessPool, key: Any) -> Any:
    number = ask(pool, key)
    reply = pool.receive(60)
    assert reply.number == number
    if reply.error is not None:
        raise reply.error
    return reply.batch


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def filled(value: int, nbytes: int = 1000) -> Callable[[Any], Any]:
    def build(empty: Any) -> Any:
        array = empty((nbytes,), np.uint8)
        array[:] = value
        return array

    return build


# ------------------------------------------------------------------------------------------------ tickets


def test_a_worker_can_be_driven_by_plain_pipes() -> None:
    arena = Arena(reserved=2, capacity=2)
    board = WorkerStatusBoard(arena.fd, 1)
    (requests, requests_w), (replies, replies_w) = os.pipe(), os.pipe()
    worker = Worker(Start(0, 1, os.getpid(), -1, arena.fd, requests, replies_w), board, WorkerLogCapture(0))
    fetch = _Sum()
    slots = [arena.acquire(), arena.acquire()]
    for number, slot in enumerate(slots):
        data = Request(number, 0, number, np.arange(number + 3), 0).packed()
        assert data is not None
        slot.put(data)
        os.write(requests_w, RequestTicket(number, slot.number, len(data), PACKED).packed())
    os.write(requests_w, STOP.packed())
    assert not fetch.closed
    worker.run(lambda: fetch)
    assert fetch.closed
    assert board.claimed(0) == 1
    data = os.read(replies, 4096)
    tickets = map(ReplyTicket._make, channel._REPLY.iter_unpack(data))
    found = [(ticket.number, decode(ticket.place, slots[ticket.number], None).tolist()) for ticket in tickets]
    assert found == [(0, [3]), (1, [6])]
    for fd in (requests, requests_w, replies, replies_w):
        os.close(fd)
    arena.close()


class _Sum(Run):
    closed = False

    def close(self) -> None:
        self.closed = True

    def __call__(self, request: Request, empty: Any) -> Reply:
        out = empty((1,), np.int64)
        out[0] = request.indices.sum()
        return Reply(request.number, batch=out)


# ------------------------------------------------------------------------------------------------ memory


def test_beyond_the_limit_batches_are_copied_out_and_their_slots_come_back(
    monkeypatch: pytest.MonkeyPatch, pool: ProcessPool
) -> None:
    monkeypatch.setattr("agnoload.transport.arena.LENT_LIMIT", 5)
    kept = [answer(pool, filled(value)) for value in range(40)]
    assert pool.arena.lent == 5
    assert pool.arena.nbytes() < 9 * MIB
    assert all((batch == value).all() for value, batch in enumerate(kept))
    assert kept[20].flags.writeable
    assert kept[20].ctypes.data % 64 == 0


def test_memory_is_bounded_by_window_workers_and_one_and_what_is_dropped_is_given_back(pool: ProcessPool) -> None:
    for value in range(50):
        assert answer(pool, filled(value, MIB))[0] == value
    assert pool.arena.nbytes() <= (2 + 1 + 1) * (MIB + 4096) + MIB // 2
    kept = [answer(pool, filled(value, MIB)) for value in range(20)]
    assert pool.arena.nbytes() > 20 * MIB
    kept.clear()
    answer(pool, filled(1))
    assert pool.arena.nbytes() < 5 * MIB


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 255), st.booleans()), min_size=1, max_size=40))
def test_no_batch_that_is_kept_ever_changes_and_none_that_is_dropped_holds_a_slot(steps: list[Any]) -> None:
    pool, kept = make(), []
    for value, keep in steps:
        batch = answer(pool, filled(value))
        if keep:
            kept.append((value, batch))
        del batch
    assert pool.arena.lent == len(kept)
    assert all((batch == value).all() for value, batch in kept)
    kept.clear()
    assert pool.arena.lent == 0
    pool.close()


def test_an_error_or_a_batch_without_arrays_lends_nothing_and_takes_no_slot(pool: ProcessPool) -> None:
    def fail(empty: Any) -> None:
        empty((100_000,), np.uint8)[:] = 1
        raise KeyError(np.arange(100))

    for _ in range(30):
        with pytest.raises(KeyError) as caught:
            answer(pool, fail)
        assert caught.value.args[0].tolist() == list(range(100))
        assert len(answer(pool, lambda empty: "a" * 100_000)) == 100_000
    assert pool.arena.lent == 0
    assert pool.arena.nbytes() < 10 * 100_000


# ------------------------------------------------------------------------------------------------ what cannot travel


class _Mine:
    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> Any:
    raise OSError("not here")


def test_what_cannot_travel_is_an_error_of_its_own_request(pool: ProcessPool) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):  # at once, and the request is forgotten
        ask(pool, lock)
    for batch, kind, said in (
        (lambda empty: [empty((5,), np.uint8), threading.Lock()], TypeError, "encoded in worker"),
        (lambda empty: [filled(1)(empty), _Mine()], OSError, "decoded"),
    ):
        with pytest.raises(kind) as caught:
            answer(pool, batch)
        assert any(said in note for note in caught.value.__notes__)
        del caught
    assert answer(pool, filled(3)).tolist() == [3] * 1000


def test_what_cannot_be_pickled_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "start_process", lambda *_: pytest.fail("a process was started"))
    lock = threading.Lock()
    for method in ("forkserver", "spawn"):
        with pytest.raises(DatasetNotPicklable, match=rf"^begin\.lock .*{method!r}"):
            make(fetch=Run(lambda worker: lock), context=method)


def test_under_fork_nothing_needs_to_be_pickled() -> None:
    pool = make(fetch=_Locked())
    number = ask(pool, "any")
    assert pool.receive(60)[:3] == (number, 0, "kept")
    pool.close()


class _Locked(Run):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __call__(self, request: Request, empty: Any) -> Reply:
        with self.lock:
            return Reply(request.number, batch="kept")


# ------------------------------------------------------------------------------------------------ start methods


@pytest.mark.parametrize("library", [multiprocessing, multiprocess], ids=["multiprocessing", "multiprocess"])
def test_a_context_of_either_library_is_taken_by_its_name_and_the_global_one_is_left_alone(library: Any) -> None:
    before = multiprocessing.get_start_method(allow_none=True), multiprocess.get_start_method(allow_none=True)
    for method in ("fork", "forkserver", "spawn"):
        assert method_of(library.get_context(method)) == method
    for context in (library.get_context("fork"), "forkserver"):
        pool = make(context=context)
        assert answer(pool, filled(4)).tolist() == [4] * 1000
        pool.close()
    assert (multiprocessing.get_start_method(allow_none=True), multiprocess.get_start_method(allow_none=True)) == before


def test_a_system_exit_at_the_start_of_a_worker_reaches_the_loop() -> None:
    def leave(worker: int) -> None:
        raise SystemExit(3)

    pool = make(fetch=Run(leave))
    ask(pool, filled(1))
    try:
        with pytest.raises(SystemExit) as caught:
            pool.receive(60)
        assert caught.value.code == 3
    finally:
        pool.close()


def test_a_dead_workers_ticket_makes_room_for_the_next_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(channel, "MAX_TICKETS", 1)
    pool = make(restarts=1)
    first = tmp_path / "first"
    first.touch()

    def dies_once(empty: Any) -> str:
        if first.exists():
            first.unlink()
            os._exit(7)
        return "loaded again"

    assert answer(pool, dies_once) == "loaded again"
    assert answer(pool, filled(3)).tolist() == [3] * 1000
    pool.close()


# ------------------------------------------------------------------------------------------------ used again


def test_a_request_that_is_taken_for_lost_gets_another_slot_and_the_late_reply_is_dropped(
    pool: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was frozen wakes and answers, while another one loads its request again."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    number = ask(pool, lambda empty: fifo.read_text())
    wait_until(lambda: pool._board.claimed(0) == number)
    before = pool._in_flight[number].slot
    with monkeypatch.context() as frozen:
        frozen.setattr(pool._board, "claimed", lambda worker: None)  # as if it had not come so far
        (flight,) = pool._lost(0, None)
    assert flight.request.number == number
    assert flight.slot is not before  # it may still write into that one
    pool._channel.send([(0, channel.write_request(flight.request, flight.slot, False))])
    fifo.write_text("late")
    assert select.select([pool._channel.replies], [], [], 30)[0]
    assert not pool.ready()
    fifo.write_text("again")
    assert pool.receive(60).batch == "again"


def test_what_was_abandoned_is_never_delivered(pool: ProcessPool, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    begun = ask(pool, lambda empty: fifo.read_text())
    wait_until(lambda: pool._board.claimed(0) == begun)
    for _ in range(5):
        ask(pool, filled(1))
    pool.abandon()
    wanted = ask(pool, filled(2))
    fifo.write_text("go")
    reply = pool.receive(60)
    assert (reply.number, reply.batch[0]) == (wanted, 2)
    assert not pool.ready()
    del reply
    assert pool.arena.lent == 0


def test_requests_that_wait_behind_abandoned_ones_are_sent_in_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(channel, "MAX_TICKETS", 2)
    pool = make(owned=True)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ask(pool, lambda empty: fifo.read_text(), owner=0)
    ask(pool, filled(1), owner=0)
    pool.abandon()
    wanted = [ask(pool, filled(2), owner=0) for _ in range(3)]
    fifo.write_text("go")
    assert [pool.receive(60).number for _ in wanted] == wanted
    pool.close()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_pool_is_reusable_while_what_it_was_given_is_the_same(method: str) -> None:
    pool = make(fetch=_Holding(1), context=method, reuse=True)
    assert pool.reusable(_Holding(1))
    assert not pool.reusable(_Holding(2))
    pool.close()


def test_a_pool_that_was_not_made_for_it_is_not_reusable(pool: ProcessPool) -> None:
    assert not pool.reusable(Run())


class _Holding(Run):
    def __init__(self, value: int) -> None:
        super().__init__(print)
        self.value = value
