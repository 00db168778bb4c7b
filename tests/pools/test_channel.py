"""The pipes of a pool, without a pool: every ticket arrives once, in order, whatever was taken back meanwhile."""

from __future__ import annotations

import os
import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.pools.channel import STOP, Channel, ReplyTicket, RequestTicket, next_ticket

REPLY = ReplyTicket(*[0] * 9, *[0.0] * 4)


def ticket(number: int) -> RequestTicket:
    return RequestTicket(number, number + 1, 8, 0)


def unread(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


@given(
    st.integers(1, 3),
    st.lists(st.sampled_from(["send", "read", "answer", "take back", "send first", "drop"]), max_size=40),
)
def test_each_request_is_read_once_and_in_order(room: int, steps: list[str]) -> None:
    channel = Channel(workers=2, owned=False)
    channel.open()
    channel.room = room
    numbers, waiting, read = iter(range(1000)), [], []
    pipe = channel.pipes[0][0]
    for step in steps:
        if step == "send":
            waiting.append(next(numbers))
            channel.send([(0, ticket(waiting[-1]))])
        elif step == "read" and unread(pipe):
            read.append(next_ticket(pipe))
            assert read[-1] == ticket(waiting.pop(0))
        elif step == "answer" and read:
            channel.under_way -= 1
            channel.flush()
            read.pop()
        elif step == "take back":
            assert channel.take_back() == set(waiting)
            assert not unread(pipe)
            channel.flush()
        elif step == "send first" and read:  # a worker has died over it
            lost = read.pop().number
            channel.under_way -= 1
            channel.send([(0, ticket(lost))], first=True)
            waiting.insert(0, lost)
        elif step == "drop":
            assert channel.take_back() == set(waiting)
            channel.waiting.clear()
            waiting.clear()
        assert unread(pipe) == bool(waiting and len(read) < room)
    channel.close()


def test_a_pipe_of_its_own_brings_each_worker_its_tickets() -> None:
    channel = Channel(workers=2, owned=True)
    channel.open()
    for number in range(4):
        channel.send([(number % 2, ticket(number))])
    channel.take_back()  # what lies in a worker's own pipe stays there
    assert [next_ticket(channel.pipes[1][0]).number for _ in range(2)] == [1, 3]
    channel.renew(0)
    channel.stop(0)
    assert next_ticket(channel.pipes[0][0]) == STOP
    channel.close()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_all_replies_that_are_there_are_received(count: int) -> None:
    channel = Channel(workers=1, owned=False)
    channel.open()
    for number in range(count):
        os.write(channel.replies_end, REPLY._replace(number=number, finished=number / 2).packed())
    assert channel.receive() == [REPLY._replace(number=number, finished=number / 2) for number in range(count)]
    assert channel.receive() == []
    channel.close()


def test_half_a_ticket_is_received_as_one_out_of_range() -> None:
    channel = Channel(workers=1, owned=False)
    channel.open()
    os.write(channel.replies_end, b"garbage")
    assert [found.slot for found in channel.receive()] == [-1]
    channel.close()


def test_a_worker_ends_when_nobody_can_send_it_a_ticket_any_more() -> None:
    channel = Channel(workers=1, owned=False)
    channel.open()
    pipe = os.dup(channel.pipes[0][0])
    channel.close()
    assert next_ticket(pipe) == STOP
    os.close(pipe)
