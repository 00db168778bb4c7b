"""The book of requests under way: which one may go out, and which batch may come out. No threads, no arrays."""

from __future__ import annotations

from collections import deque

from agnoload.messages import EMPTY, Reply, Request
from agnoload.planning.plan import Plan


class Window:
    """Holds at most `limit` requests between their submission and the delivery of their batch.

    One whose reply turns out to hold nothing (every sample was skipped, a stream had ended) takes no room any more.
    In order, replies come out by number, whatever the order in which they arrived; otherwise as they arrived, but none
    before all of the epoch before have come out.

    >>> from agnoload.planning.state import EpochPosition
    >>> window, plan = Window(2, in_order=True), Plan(EpochPosition(0))
    >>> for number in (0, 1): window.add(plan, Request(number, 0, number, None, 0))
    >>> window.room
    False
    >>> _ = window.arrived(Reply(1)); window.pop() is None
    True
    >>> _ = window.arrived(Reply(0)); [window.pop()[2].number, window.pop()[2].number]
    [0, 1]
    """

    def __init__(self, limit: int, in_order: bool) -> None:
        self._limit = limit
        self._in_order = in_order
        self._requests: dict[int, tuple[Plan, Request]] = {}  # in the order of submission
        self._arrived: dict[int, Reply] = {}
        self._queue: deque[int] = deque()
        self._hollow = 0

    @property
    def room(self) -> bool:
        """Whether another request may go out."""
        return len(self._requests) - self._hollow < self._limit

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, plan: Plan, request: Request) -> None:
        """A request of a plan goes out."""
        self._requests[request.number] = plan, request
        if self._in_order:
            self._queue.append(request.number)

    def arrived(self, reply: Reply) -> tuple[Plan, Request]:
        """A reply has come; it must answer a request that is under way and has no reply yet, which comes back."""
        if reply.number not in self._requests or reply.number in self._arrived:
            raise RuntimeError(f"reply {reply.number} answers no open request: a pool must answer each exactly once")
        self._arrived[reply.number] = reply
        self._hollow += _is_hollow(reply)
        if not self._in_order:
            self._queue.append(reply.number)
        return self._requests[reply.number]

    def pop(self) -> tuple[Plan, Request, Reply] | None:
        """The next request and its reply to deliver, or None if it has not arrived yet."""
        if not self._queue:
            return None
        number = self._queue[0]
        if not self._in_order:  # but no batch overtakes the end of an epoch: what the next one gives must wait
            oldest = next(iter(self._requests.values()))[0]
            if self._requests[number][0] is not oldest:
                number = next((n for n in self._queue if self._requests[n][0] is oldest), -1)
        reply = self._arrived.pop(number, None)
        if reply is None:
            return None
        self._queue.remove(number)  # it is the first one, or one of the first
        self._hollow -= _is_hollow(reply)
        return *self._requests.pop(number), reply


def _is_hollow(reply: Reply) -> bool:
    return reply.batch is EMPTY and reply.error is None
