"""The pipes of a pool, without a pool: every ticket arrives once, in order, whatever was taken back meanwhile."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.pools import channel as channel_module
from agnoload.pools.channel import STOP, Channel, ReplyTicket, RequestTicket, next_ticket

REPLY = ReplyTicket(*[0] * 9, *[0.0] * 4)


@contextmanager
def opened(workers: int, owned: bool) -> Iterator[Channel]:
    channel = Channel(workers, owned)
    channel.open()
    yield channel
    channel.close()


def ticket(number: int) -> RequestTicket:
    return RequestTicket(number, number + 1, 8, 0)


def unread(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


@settings(max_examples=40)
@given(
    st.integers(1, 3),
    st.lists(
        st.sampled_from(["send", "send", "read", "answer", "take back", "send first", "drop"]), min_size=20, max_size=40
    ),
)
def test_each_request_is_read_once_and_in_order(room: int, steps: list[str]) -> None:
    numbers, waiting, read = iter(range(1000)), [], []
    with opened(2, owned=False) as channel:
        channel.room = room
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


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), max_size=30))
def test_a_pipe_of_its_own_brings_each_worker_its_tickets_in_order(owners: list[int]) -> None:
    with opened(3, owned=True) as channel:
        for number, owner in enumerate(owners):
            channel.send([(owner, ticket(number))])
        assert channel.take_back() == set()  # what lies in a worker's own pipe stays there
        channel.renew(0)  # worker 0 has died: what it had is lost
        for worker in range(3):
            channel.stop(worker)
            wanted = [number for number, owner in enumerate(owners) if owner == worker != 0]
            assert [next_ticket(channel.pipes[worker][0]) for _ in wanted] == [ticket(number) for number in wanted]
            assert next_ticket(channel.pipes[worker][0]) == STOP


@settings(max_examples=20)
@given(st.integers(0, 200))
def test_all_replies_that_are_there_are_received(count: int) -> None:
    wanted = [REPLY._replace(number=number, finished=number / 2) for number in range(count)]
    with opened(1, owned=False) as channel:
        for reply in wanted:
            os.write(channel.replies_end, reply.packed())
        assert channel.receive() == wanted
        assert channel.receive() == []


def test_half_a_ticket_is_received_as_one_out_of_range() -> None:
    with opened(1, owned=False) as channel:
        os.write(channel.replies_end, b"garbage")
        assert [found.slot for found in channel.receive()] == [-1]


def test_a_ticket_is_written_whole_or_not_at_all_and_all_that_are_under_way_fit_the_pipe() -> None:
    with opened(3, owned=False) as channel:
        for size in (len(STOP.packed()), len(REPLY.packed())):
            assert size <= select.PIPE_BUF
            assert size * (channel.room + 3 + 1) <= 1 << 16


def test_a_worker_ends_when_nobody_can_send_it_a_ticket_any_more() -> None:
    with opened(1, owned=False) as channel:
        pipe = os.dup(channel.pipes[0][0])
    assert next_ticket(pipe) == STOP
    os.close(pipe)


def test_no_thread_closes_pipes_while_another_wakes_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wake would go into a number that belongs to another file by then."""
    channel, free, write = Channel(1, owned=False), [], os.write
    channel.open()

    def try_to_close_meanwhile(fd: int, data: bytes) -> int:
        other = threading.Thread(target=lambda: free.append(channel_module._closing.acquire(blocking=False)))
        other.start()
        other.join()
        return write(fd, data)

    monkeypatch.setattr(channel_module.os, "write", try_to_close_meanwhile)
    channel.wake()
    assert free == [False]
    channel.close()
    channel.wake()  # nobody is left to wake
    assert free == [False]
