"""The book of requests under way, and the pool that answers in any order."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agnoload
from agnoload.errors import AgnoloadError
from agnoload.messages import Reply, Request
from agnoload.planning.plan import Plan
from agnoload.planning.state import EpochPosition
from agnoload.planning.window import Window
from agnoload.testing import FakePool

PLAN = Plan(EpochPosition(0))


def request(number: int) -> Request:
    return Request(number, 0, number, [number], number)


def drive(window: Window, pool: FakePool, total: int) -> list[int]:
    """Run `total` requests through a window, as the loader does; gives the numbers as they come out."""
    came: list[int] = []
    number = 0
    while len(came) < total:
        while window.room and number < total:
            window.add(PLAN, request(number))
            pool.submit(request(number))
            number += 1
        popped = window.pop()
        if popped is None:
            window.arrived(pool.receive())
        else:
            assert popped[1].number == popped[2].number
            came.append(popped[2].number)
    return came


ORDERS = st.lists(st.integers(0, 10), max_size=40)


@given(order=ORDERS, limit=st.integers(1, 8), total=st.integers(0, 30))
def test_in_order_the_batches_come_by_number_whatever_the_order_of_arrival(
    order: list[int], limit: int, total: int
) -> None:
    assert drive(Window(limit, in_order=True), FakePool(order), total) == list(range(total))


@given(order=ORDERS, limit=st.integers(1, 8), total=st.integers(0, 30))
def test_out_of_order_each_batch_comes_once_and_as_it_arrives(order: list[int], limit: int, total: int) -> None:
    pool, arrivals = FakePool(order), []
    receive = pool.receive
    pool.receive = lambda timeout=None: arrivals.append(reply := receive()) or reply  # type: ignore[func-returns-value, method-assign]
    came = drive(Window(limit, in_order=False), pool, total)
    assert came == [reply.number for reply in arrivals]
    assert sorted(came) == list(range(total))


@given(order=ORDERS, limit=st.integers(1, 8), total=st.integers(0, 30), in_order=st.booleans())
def test_never_more_than_the_limit_is_under_way(order: list[int], limit: int, total: int, in_order: bool) -> None:
    pool, most = FakePool(order), [0]
    submit = pool.submit
    window = Window(limit, in_order)
    pool.submit = lambda item: (submit(item), most.append(len(window)))[0]  # type: ignore[func-returns-value, method-assign]
    drive(window, pool, total)
    assert max(most) <= limit
    assert max(most) == min(limit, total)


def test_a_request_counts_until_its_batch_is_taken() -> None:
    window = Window(2, in_order=True)
    window.add(PLAN, request(0))
    window.add(PLAN, request(1))
    assert (window.room, window.waiting, len(window)) == (False, 2, 2)
    window.arrived(Reply(1))
    assert (window.room, window.waiting, len(window)) == (False, 1, 2)
    assert window.pop() is None
    window.arrived(Reply(0))
    assert window.pop() is not None
    assert (window.room, window.waiting, len(window)) == (True, 0, 1)


def test_an_empty_window_gives_nothing() -> None:
    assert Window(1, in_order=True).pop() is None
    assert Window(1, in_order=False).pop() is None


@pytest.mark.parametrize("in_order", [True, False])
def test_a_second_reply_to_a_request_is_refused(in_order: bool) -> None:
    window = Window(2, in_order)
    window.add(PLAN, request(0))
    window.add(PLAN, request(1))
    window.arrived(Reply(1))
    with pytest.raises(RuntimeError, match="reply 1 answers no open request"):
        window.arrived(Reply(1))
    window.arrived(Reply(0))
    window.pop()
    with pytest.raises(RuntimeError, match="reply 0 answers no open request"):
        window.arrived(Reply(0))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_reply_that_nobody_asked_for_is_refused(in_order: bool) -> None:
    with pytest.raises(RuntimeError, match="reply 5 answers no open request"):
        Window(2, in_order).arrived(Reply(5))


# ------------------------------------------------------------------------------------------------ the fake pool


def test_a_fake_pool_answers_in_the_order_it_was_given() -> None:
    pool = FakePool([2, 0, 5])
    for number in range(4):
        pool.submit(request(number))
    assert [pool.receive().number for _ in range(4)] == [2, 0, 3, 1]
    assert [item.number for item in pool.submitted] == [0, 1, 2, 3]
    assert not pool.ready()


def test_a_fake_pool_refuses_what_a_pool_must_refuse() -> None:
    pool = FakePool()
    with pytest.raises(AgnoloadError, match="no request"):
        pool.receive()
    pool.close()
    pool.close()
    with pytest.raises(AgnoloadError, match="closed"):
        pool.submit(request(0))


# ------------------------------------------------------------------------------------------------ the loader on it


def answered(order: list[int], **options: Any) -> agnoload.DataLoader[Any]:
    """A loader whose pool answers in a chosen order."""
    loader = agnoload.DataLoader(list(range(23)), 3, shuffle=True, seed=3, num_workers=2, **options)
    loader._keeper.open = lambda fetch, workers: (FakePool(order, fetch), None)  # type: ignore[method-assign]
    return loader


@given(order=ORDERS, factor=st.integers(1, 4))
def test_a_loader_gives_the_same_batches_whatever_the_order_of_the_answers(order: list[int], factor: int) -> None:
    wanted = [batch.tolist() for batch in agnoload.DataLoader(list(range(23)), 3, shuffle=True, seed=3)]
    found = answered(order, prefetch_factor=factor)
    assert [batch.tolist() for batch in found] == wanted


@given(order=ORDERS, factor=st.integers(1, 4))
def test_a_loader_out_of_order_gives_each_batch_once(order: list[int], factor: int) -> None:
    wanted = [batch.tolist() for batch in agnoload.DataLoader(list(range(23)), 3, shuffle=True, seed=3)]
    found = [batch.tolist() for batch in answered(order, prefetch_factor=factor, in_order=False)]
    assert sorted(found) == sorted(wanted)


@given(order=ORDERS, taken=st.integers(0, 8))
def test_a_state_taken_out_of_order_leaves_exactly_the_rest(order: list[int], taken: int) -> None:
    first = answered(order, in_order=False)
    iterator = iter(first)
    came = [batch.tolist() for _, batch in zip(range(taken), iterator, strict=False)]
    again = answered(order[::-1], in_order=False)
    again.load_state_dict(first.state_dict())
    rest = [batch.tolist() for batch in again] if len(came) < 8 else []
    assert sorted(chain.from_iterable(came + rest)) == list(range(23))
