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
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.errors import AgnoloadError
from agnoload.messages import EMPTY, Reply, Request
from agnoload.pools.channel import MAX_TICKETS
from agnoload.pools.inline import InlinePool
from agnoload.pools.processes import ProcessPool
from agnoload.pools.threads import ThreadPool

KINDS = ["inline", "thread", "fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
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
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One pool of each kind for all tests that leave it as it was."""
    pool = make(request.param, Obey())
    if isinstance(pool, ProcessPool):
        pool.pids()  # waits until all have begun, so that none begins within a test
    yield pool
    pool.close()


workers = pytest.mark.parametrize("pool", KINDS[1:], indirect=True)
"""Of a test that does not hold for the pool without workers."""


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


# ------------------------------------------------------------------------------------------------ requests


@settings(max_examples=10)
@given(st.integers(1, 60))
def test_every_request_is_answered_once_with_its_own_value(pool: Any, count: int) -> None:
    wanted = {ask(pool, ("key", n)).number: ("key", n) for n in range(count)}
    replies = [pool.receive(60) for _ in range(count)]
    assert {reply.number: reply.batch for reply in replies} == wanted


def test_more_requests_than_the_pipe_holds_tickets(pool: Any) -> None:
    wanted = {ask(pool, n).number: n for n in range(MAX_TICKETS + 300)}
    found = [pool.receive(60) for _ in range(len(wanted))]
    assert {reply.number: reply.batch for reply in found} == wanted


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.frozensets(st.integers())
    ),
    max_leaves=6,
)


@settings(max_examples=25)
@given(KEYS)
def test_a_key_of_any_type_arrives_untouched(pool: Any, key: Any) -> None:
    found = answer(pool, key)
    assert found == key
    assert type(found) is type(key)


def test_a_large_request_and_a_key_of_a_class_without_an_importable_name_arrive(pool: Any) -> None:
    @dataclass(frozen=True)
    class Local:
        n: int

    assert answer(pool, Local(3)) == Local(3)
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


@settings(max_examples=20)
@given(st.sampled_from(["?", "<i2", ">i4", "<f4", "<c8", "<U3", "<M8[s]"]), st.lists(st.integers(0, 5), max_size=3))
def test_an_array_of_any_shape_and_dtype_arrives(pool: Any, dtype: str, shape: list[int]) -> None:
    def build(empty: Any) -> Any:
        array = empty(tuple(shape), np.dtype(dtype))
        array[...] = np.arange(array.size).reshape(shape).astype(dtype)
        return array, array.T.copy()

    for found, wanted in zip(answer(pool, build), build(np.empty), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(found, wanted)


def test_large_batches_and_then_larger_ones(pool: Any) -> None:
    for mebibytes in (1, 3, 20, 2):

        def build(empty: Any, n: int = mebibytes * MIB) -> Any:
            array = empty((n,), np.uint8)
            array[:] = n % 251
            return array

        batch = answer(pool, build)
        assert batch.nbytes == mebibytes * MIB
        assert (batch == batch.nbytes % 251).all()


def test_an_empty_batch_is_a_batch(pool: Any) -> None:
    for batch in ([], {}, None, (), "", np.zeros((0, 3), np.float32), np.array(5), np.zeros(0, object)):
        found = answer(pool, lambda empty, batch=batch: batch)
        assert type(found) is type(batch)
        if isinstance(batch, np.ndarray):
            assert (found.shape, found.dtype) == (batch.shape, batch.dtype)
        else:
            assert found == batch
    assert answer(pool, lambda empty: EMPTY) is EMPTY


def test_a_batch_of_a_class_of_the_users_is_an_instance_of_that_very_class(pool: Any) -> None:
    class Local:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

    for kind, batch in (
        (Labelled, answer(pool, lambda empty: Labelled(np.arange(4), "four"))),
        (Local, answer(pool, lambda empty: Local(np.arange(4)))),
    ):
        assert isinstance(batch, kind)
        assert batch.values.tolist() == [0, 1, 2, 3]


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
    assert [note for note in caught.value.__notes__ if note.startswith("in worker ")] or isinstance(pool, InlinePool)


def test_an_error_is_an_answer_and_the_next_request_is_answered_too(pool: Any) -> None:
    def fail(empty: Any) -> None:
        raise KeyError("missing")

    bad, good = ask(pool, fail), ask(pool, "fine")
    replies = {reply.number: reply for reply in (pool.receive(60), pool.receive(60))}
    assert isinstance(replies[bad.number].error, KeyError)
    assert replies[good.number].batch == "fine"


# ------------------------------------------------------------------------------------------------ order


@workers
def test_a_slow_request_does_not_hold_up_the_others(pool: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow = ask(pool, lambda empty, fifo=fifo: fifo.read_text())
    quick = [ask(pool, n).number for n in range(5)]
    assert [pool.receive(60).number for _ in range(5)] == quick
    assert not pool.ready()
    fifo.write_text("now")
    reply = pool.receive(60)
    assert (reply.number, reply.batch) == (slow.number, "now")


@workers
def test_ready_says_that_receive_would_not_wait(pool: Any) -> None:
    assert not pool.ready()
    ask(pool, "key")
    deadline = time.monotonic() + 30
    while not pool.ready():
        assert time.monotonic() < deadline
    assert pool.ready()
    assert pool.receive(0).batch == "key"
    assert not pool.ready()


@workers
def test_all_workers_take_part(pool: Any, tmp_path: Path) -> None:
    """Requests that wait for each other can only be answered by two workers."""

    def meet(empty: Any, here: Path = tmp_path) -> None:
        (here / f"{os.getpid()}-{threading.get_ident()}").touch()
        deadline = time.monotonic() + 30
        while len(list(here.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)

    for _ in range(2):
        ask(pool, meet)
    assert {pool.receive(60).worker for _ in range(2)} == {0, 1}


# ------------------------------------------------------------------------------------------------ the ends


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_answers_its_requests_and_closing_twice_with_requests_under_way_is_fine(kind: str) -> None:
    pool = make(kind, Obey(), owned=True) if kind != "inline" else make(kind, Obey())
    wanted = {ask(pool, n, owner=n % 2).number: n % 2 for n in range(8)}
    replies = [pool.receive(60) for _ in range(8)]
    if kind != "inline":
        assert {reply.number: reply.worker for reply in replies} == wanted
    for n in range(10):
        ask(pool, n, owner=n % 2)
    pool.receive(60)
    pool.close()
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_worker_that_cannot_start_says_why(kind: str) -> None:
    def begin(worker: int) -> None:
        raise Unhappy("at the start", code=3)

    pool = make(kind, Obey(begin), workers=1)
    with pytest.raises(Unhappy) as caught:
        answer(pool, 1)
    assert caught.value.code == 3
    assert any("before its first batch" in note for note in caught.value.__notes__)
    pool.close()
