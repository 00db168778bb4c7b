"""The book of requests under way, and loaders whose pool answers in any order."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agnoload import AgnoloadError, DataLoader
from agnoload.messages import EMPTY, Reply, Request
from agnoload.planning.plan import Plan
from agnoload.planning.state import EpochPosition
from agnoload.planning.window import Window
from agnoload.testing import FakePool

PLAN = Plan(EpochPosition(0))
ORDERS = st.lists(st.integers(0, 10), max_size=40)
few = settings(max_examples=30, deadline=None)
many_workers = pytest.mark.filterwarnings("ignore:the stream has .* for 2 workers")


def request(number: int) -> Request:
    return Request(number, 0, number, [number], number)


# ------------------------------------------------------------------------------------------------ the window


@given(
    order=ORDERS,
    limit=st.integers(1, 8),
    total=st.integers(0, 30),
    in_order=st.booleans(),
    hollow=st.sets(st.integers(0, 30)),
)
def test_each_reply_comes_out_once_by_number_or_by_arrival_and_never_more_than_the_limit_are_under_way(
    order: list[int], limit: int, total: int, in_order: bool, hollow: set[int]
) -> None:
    """A reply that holds nothing takes no room."""
    window, pool = Window(limit, in_order), FakePool(order)
    came: list[int] = []
    arrivals: list[int] = []
    number = 0
    while len(came) < total:
        while window.room and number < total:
            window.add(PLAN, request(number))
            pool.submit(request(number))
            number += 1
        kept = [n for n in range(number) if n not in came and not (n in hollow and n in arrivals)]
        assert len(kept) <= limit
        assert len(kept) == limit or number == total
        assert len(window) == number - len(came)
        popped = window.pop()
        if popped is None:
            reply = pool.receive()
            arrivals.append(reply.number)
            if reply.number in hollow:
                reply = reply._replace(batch=EMPTY)
            assert window.arrived(reply)[1].number == reply.number
        else:
            assert popped[0] is PLAN
            assert popped[1].number == popped[2].number
            came.append(popped[2].number)
    assert came == (list(range(total)) if in_order else arrivals)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_reply_that_nobody_waits_for_is_refused(in_order: bool) -> None:
    window = Window(2, in_order)
    assert window.pop() is None
    window.add(PLAN, request(0))
    window.add(PLAN, request(1))
    window.arrived(Reply(1))
    with pytest.raises(RuntimeError, match="reply 1 answers no open request"):
        window.arrived(Reply(1))
    window.arrived(Reply(0))
    window.pop()
    for number in (0, 5):
        if number or in_order:
            with pytest.raises(RuntimeError, match=f"reply {number} answers no open request"):
                window.arrived(Reply(number))


@given(order=ORDERS, total=st.integers(0, 12))
def test_a_fake_pool_answers_each_request_once_in_the_order_that_it_was_given(order: list[int], total: int) -> None:
    pool = FakePool(order)
    for number in range(total):
        pool.submit(request(number))
    left, wanted = list(range(total)), []
    for place in [*order, *[0] * total][:total]:
        wanted.append(left.pop(place % len(left)))
    assert [pool.receive().number for _ in range(total)] == wanted
    assert not pool.ready()
    with pytest.raises(AgnoloadError, match="no request"):
        pool.receive()
    pool.close()
    pool.close()
    with pytest.raises(AgnoloadError, match="closed"):
        pool.submit(request(0))


# ------------------------------------------------------------------------------------------------ the loader on it


def answered(order: list[int], dataset: Any, batch_size: int = 3, **options: Any) -> DataLoader[Any]:
    """A loader whose pool answers in a chosen order."""
    loader = DataLoader(dataset, batch_size, seed=3, num_workers=2, **options)
    loader._keeper.open = lambda fetch, workers: (FakePool(order, fetch), None)  # type: ignore[method-assign]
    return loader


def counted(batches: Any) -> Counter[int]:
    return Counter(value for batch in batches for value in batch.tolist())


@few
@given(order=ORDERS, factor=st.integers(1, 4), in_order=st.booleans())
def test_a_loader_gives_the_same_batches_whatever_the_order_of_the_answers(
    order: list[int], factor: int, in_order: bool
) -> None:
    """Out of order none overtakes the end of an epoch."""
    wanted = [batch.tolist() for batch in DataLoader(range(23), 3, shuffle=True, seed=3).steps(16)]
    loader = answered(order, range(23), shuffle=True, prefetch_factor=factor, in_order=in_order)
    found = [batch.tolist() for batch in loader.steps(16)]
    for part in (slice(8), slice(8, None)):
        assert found[part] == wanted[part] if in_order else sorted(found[part]) == sorted(wanted[part])


@few
@given(order=ORDERS, taken=st.integers(0, 8), again=ORDERS)
def test_a_state_taken_out_of_order_leaves_exactly_the_rest(order: list[int], taken: int, again: list[int]) -> None:
    first = answered(order, range(23), shuffle=True, in_order=False)
    came = counted(islice(first, taken))
    resumed = answered(again, range(23), shuffle=True, in_order=False)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = counted(resumed) if taken < 8 else Counter()
    assert came + rest == Counter(range(23))


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@many_workers
@few
@given(order=ORDERS, sizes=SIZES, lanes=st.integers(1, 5), size=st.integers(1, 4), drop_last=st.booleans())
def test_a_stream_gives_the_same_batches_whatever_the_order_of_the_answers(
    kit: Any, order: list[int], sizes: list[int], lanes: int, size: int, drop_last: bool
) -> None:
    options: dict[str, Any] = {"batch_size": size, "drop_last": drop_last}
    wanted = [batch.tolist() for batch in DataLoader(kit.PlainShards(sizes, lanes), seed=3, **options)]
    found = answered(order, kit.PlainShards(sizes, lanes), **options)
    assert [batch.tolist() for batch in found] == wanted
    total = sum(map(len, wanted))
    assert total == sum(sizes) // size * size if drop_last else total == sum(sizes)


@many_workers
@few
@example(order=[], sizes=[9], lanes=1, size=2, taken=2)
@example(order=[0] * 6 + [1] * 20, sizes=[3] * 4, lanes=4, size=4, taken=1)
@given(order=ORDERS, sizes=SIZES, lanes=st.integers(1, 5), size=st.integers(1, 4), taken=st.integers(0, 12))
def test_a_state_of_a_stream_taken_out_of_order_leaves_exactly_the_rest(
    kit: Any, order: list[int], sizes: list[int], lanes: int, size: int, taken: int
) -> None:
    """What is left over at the ends of lanes is merged into batches, which count as well."""
    first = answered(order, kit.PlainShards(sizes, lanes), size, in_order=False)
    came = counted(islice(first, taken))
    resumed = DataLoader(kit.PlainShards(sizes, lanes), size, seed=3, in_order=False)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    everything = Counter(100 * number + place for number, n in enumerate(sizes) for place in range(n))
    assert came == everything or came + counted(resumed) == everything
