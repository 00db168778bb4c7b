"""What every pool must do, whatever it is made of: one suite for all of them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agnoload.errors import AgnoloadError
from agnoload.messages import EMPTY, Reply, Request
from agnoload.pools.channel import MAX_TICKETS
from agnoload.pools.inline import InlinePool
from agnoload.pools.processes import ProcessPool
from agnoload.pools.threads import ThreadPool

KINDS = ["inline", "thread", "fork", "forkserver", "spawn"]
PROCESSES = KINDS[2:]
MIB = 1 << 20
Point = namedtuple("Point", "x y")
_numbers = itertools.count()


@dataclass
class Labelled:
    values: np.ndarray
    label: str


class Unhappy(Exception):
    """Its constructor is not what pickle would call."""

    def __init__(self, where: str, *, code: int) -> None:
        super().__init__(where)
        self.code = code


class Obey:
    """Answers a request by doing what its key says."""

    def __init__(self, begin: Callable[[int], None] = lambda worker: None) -> None:
        self._begin = begin
        self._worker = 0

    def begin(self, worker: int) -> None:
        self._worker = worker
        self._begin(worker)

    def close(self) -> None:
        pass

    def parts(self) -> dict[str, Any]:
        return {"begin": self._begin}

    def __call__(self, request: Request, empty: Any) -> Reply:
        started = time.monotonic()
        try:
            batch = self._obey(request.indices, empty)
        except Exception as error:
            return Reply(request.number, self._worker, error=error, started=started)
        return Reply(request.number, self._worker, batch, samples=3, started=started, fetched=time.monotonic())

    def _obey(self, key: Any, empty: Any) -> Any:
        if callable(key):
            return key(empty)
        return key.sum() if isinstance(key, np.ndarray) else key


def make(kind: str, fetch: Obey, workers: int = 2, window: int = 4, **options: Any) -> Any:
    if kind == "inline":
        fetch.begin(0)
        return InlinePool(fetch)
    if kind == "thread":
        return ThreadPool(fetch, workers=workers, window=window, **options)
    return ProcessPool(fetch, workers=workers, window=window, context=kind, **options)


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One pool of each kind for all tests that leave it as it was."""
    pool = make(request.param, Obey())
    if isinstance(pool, ProcessPool):
        pool.pids()  # waits until all have begun, so that none begins within a test
    yield pool
    pool.close()


@pytest.fixture
def pool(shared: Any) -> Any:
    return shared


def ask(pool: Any, key: Any, owner: int | None = None) -> Request:
    number = next(_numbers)
    request = Request(number, 0, number, key, number, owner=owner)
    pool.submit(request)
    return request


def answer(pool: Any, key: Any) -> Any:
    """The batch for one key; an error is raised."""
    request = ask(pool, key)
    reply = pool.receive(60)
    assert reply.number == request.number
    if reply.error is not None:
        raise reply.error
    return reply.batch


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


# ------------------------------------------------------------------------------------------------ requests


@pytest.mark.slow
def test_every_request_is_answered_once_with_its_own_value(pool: Any) -> None:
    wanted = {ask(pool, ("key", n)).number: ("key", n) for n in range(100)}
    replies = [pool.receive(60) for _ in range(100)]
    assert {reply.number: reply.batch for reply in replies} == wanted


def test_more_requests_than_the_pipe_holds_tickets(pool: Any) -> None:
    wanted = {ask(pool, n).number: n for n in range(MAX_TICKETS + 300)}
    found = [pool.receive(60) for _ in range(len(wanted))]
    assert {reply.number: reply.batch for reply in found} == wanted


@pytest.mark.parametrize(
    "key",
    ["text", ("a", 1), 3, -(2**80), None, 2.5, b"bytes", frozenset({1, 2}), [1, "two", (3,)], Point(1, 2), {"a": [1]}],
    ids=repr,
)
def test_a_key_of_any_type_arrives_untouched(pool: Any, key: Any) -> None:
    found = answer(pool, key)
    assert found == key
    assert type(found) is type(key)


def test_a_key_of_a_class_without_an_importable_name_arrives(pool: Any) -> None:
    @dataclass(frozen=True)
    class Local:
        n: int

    assert answer(pool, Local(3)) == Local(3)


def test_a_large_request(pool: Any) -> None:
    assert answer(pool, np.arange(1_000_000)) == 499_999_500_000


def test_nothing_under_way_is_an_error_not_a_hang(pool: Any) -> None:
    assert not pool.ready()
    with pytest.raises(AgnoloadError, match="no request"):
        pool.receive(60)


# ------------------------------------------------------------------------------------------------ batches


def test_a_batch_keeps_structure_dtypes_and_values(pool: Any) -> None:
    def build(empty: Any) -> Any:
        x = empty((4, 3), np.float32)
        x[...] = np.arange(12).reshape(4, 3)
        return {"x": x, "y": (np.arange(3, dtype=">i2"), ["a", None]), "z": Point(np.float64(1.5), x[1:, ::2])}

    batch, wanted = answer(pool, build), build(np.empty)
    assert (batch["x"].dtype, batch["x"].tolist()) == (np.float32, wanted["x"].tolist())
    assert (batch["y"][0].dtype, batch["y"][0].tolist(), batch["y"][1]) == (np.dtype(">i2"), [0, 1, 2], ["a", None])
    assert type(batch["z"]) is Point
    assert (batch["z"].x, batch["z"].y.tolist()) == (1.5, wanted["z"].y.tolist())
    assert batch["x"].flags.writeable
    batch["z"].y[0, 0] = 99
    assert batch["x"][1, 0] == 99


@pytest.mark.slow
def test_large_batches_and_then_larger_ones(pool: Any) -> None:
    for mebibytes in (1, 3, 40, 2):

        def build(empty: Any, n: int = mebibytes * MIB) -> Any:
            array = empty((n,), np.uint8)
            array[:] = n % 251
            return array

        batch = answer(pool, build)
        assert batch.nbytes == mebibytes * MIB
        assert (batch == batch.nbytes % 251).all()


@pytest.mark.parametrize(
    "batch", [np.zeros((0, 3), np.float32), [], {}, None, (), "", np.array(5), np.zeros(0, object)], ids=repr
)
def test_an_empty_batch_is_a_batch(pool: Any, batch: Any) -> None:
    found = answer(pool, lambda empty: batch)
    if isinstance(batch, np.ndarray):
        assert (found.shape, found.dtype) == (batch.shape, batch.dtype)
    else:
        assert found == batch
    assert type(found) is type(batch)


def test_the_empty_batch_stays_the_same_object(pool: Any) -> None:
    assert answer(pool, lambda empty: EMPTY) is EMPTY


def test_a_batch_of_a_custom_class(pool: Any) -> None:
    batch = answer(pool, lambda empty: Labelled(np.arange(4), "four"))
    assert type(batch) is Labelled
    assert (batch.values.tolist(), batch.label) == ([0, 1, 2, 3], "four")


def test_a_batch_of_a_local_class_is_an_instance_of_that_very_class(pool: Any) -> None:
    class Local:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

    batch = answer(pool, lambda empty: Local(np.arange(4)))
    assert isinstance(batch, Local)
    assert batch.values.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_batches_that_are_kept_stay_what_they_are(pool: Any) -> None:
    def filled(number: int) -> Callable[[Any], Any]:
        def build(empty: Any) -> Any:
            array = empty((100_000,), np.uint8)
            array[:] = number
            return array

        return build

    kept = [answer(pool, filled(number)) for number in range(60)]
    assert all((batch == number).all() for number, batch in enumerate(kept))
    kept[::2] = [None] * 30
    more = [answer(pool, filled(number)) for number in range(60, 90)]
    assert all((batch == number).all() for number, batch in enumerate(kept) if batch is not None)
    assert all((batch == 60 + number).all() for number, batch in enumerate(more))


def test_a_reply_says_who_loaded_it_and_when(pool: Any) -> None:
    before = time.monotonic()
    request = ask(pool, "key")
    reply = pool.receive(60)
    assert (reply.number, reply.samples, reply.error) == (request.number, 3, None)
    assert reply.worker in (0, 1)
    assert before <= reply.started <= reply.fetched <= time.monotonic()


# ------------------------------------------------------------------------------------------------ errors


def test_an_error_keeps_type_arguments_attributes_and_notes(pool: Any) -> None:
    def fail(empty: Any) -> None:
        error = Unhappy("over there", code=7)
        error.add_note("a note of the user's")
        raise error

    with pytest.raises(Unhappy) as caught:
        answer(pool, fail)
    assert type(caught.value) is Unhappy
    assert caught.value.args == ("over there",)
    assert caught.value.code == 7
    assert caught.value.__notes__[0] == "a note of the user's"


def test_an_error_is_an_answer_and_the_next_request_is_answered_too(pool: Any) -> None:
    def fail(empty: Any) -> None:
        raise KeyError("missing")

    bad, good = ask(pool, fail), ask(pool, "fine")
    replies = {reply.number: reply for reply in (pool.receive(60), pool.receive(60))}
    assert isinstance(replies[bad.number].error, KeyError)
    assert replies[good.number].batch == "fine"


@pytest.mark.parametrize("shared", KINDS[1:], indirect=True)
def test_errors_of_workers_say_which_worker(shared: Any) -> None:
    def fail(empty: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        answer(shared, fail)
    assert any(note.startswith("in worker ") for note in caught.value.__notes__)


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("shared", KINDS[1:], indirect=True)
def test_a_slow_request_does_not_hold_up_the_others(shared: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow = ask(shared, lambda empty, fifo=fifo: fifo.read_text())
    quick = [ask(shared, n).number for n in range(5)]
    assert [shared.receive(60).number for _ in range(5)] == quick
    assert not shared.ready()
    fifo.write_text("now")
    reply = shared.receive(60)
    assert (reply.number, reply.batch) == (slow.number, "now")


@pytest.mark.parametrize("shared", KINDS[1:], indirect=True)
def test_ready_says_that_receive_would_not_wait(shared: Any) -> None:
    assert not shared.ready()
    ask(shared, "key")
    wait_until(shared.ready)
    assert shared.ready()
    assert shared.receive(0).batch == "key"
    assert not shared.ready()


# ------------------------------------------------------------------------------------------------ the ends


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_closing_twice_is_fine_also_with_requests_under_way(kind: str) -> None:
    pool = make(kind, Obey())
    for number in range(10):
        ask(pool, number)
    pool.receive(60)
    pool.close()
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_worker_that_cannot_start_says_why(kind: str) -> None:
    def begin(worker: int) -> None:
        raise Unhappy("at the start", code=3)

    pool = make(kind, Obey(begin))
    with pytest.raises(Unhappy) as caught:
        answer(pool, 1)
    assert caught.value.code == 3
    assert any("before its first batch" in note for note in caught.value.__notes__)
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_owner_answers_its_requests(kind: str) -> None:
    pool = make(kind, Obey(), owned=True)
    wanted = {ask(pool, n, owner=n % 2).number: n % 2 for n in range(8)}
    replies = [pool.receive(60) for _ in range(8)]
    assert {reply.number: reply.worker for reply in replies} == wanted
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_all_workers_take_part(kind: str, tmp_path: Path) -> None:
    """Three requests that wait for each other can only be answered by three workers."""
    pool = make(kind, Obey(), workers=3)

    def meet(empty: Any, here: Path = tmp_path) -> None:
        (here / f"{os.getpid()}-{threading.get_ident()}").touch()
        deadline = time.monotonic() + 30
        while len(list(here.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)

    for _ in range(3):
        ask(pool, meet)
    assert {pool.receive(60).worker for _ in range(3)} == {0, 1, 2}
    pool.close()
