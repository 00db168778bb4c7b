"""A pool for tests: answers in any order that the test wants."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from agnoload.errors import AgnoloadError
from agnoload.messages import Reply, Request
from agnoload.protocols import Fetch


class FakePool:
    """A pool that answers one request for each `receive`, in an order of your choice, in the calling thread.

    `order` says, `receive` after `receive`, which of the open requests is answered: 0 for the oldest, 1 for the next,
    and so on, counted round if there are fewer; once it is used up, the oldest. `fetch` answers; without it the batch
    is the request's indices. `submitted` lists the requests that came, `open` those without an answer.

    >>> pool = FakePool([1, 1, 0])
    >>> for number in range(3): pool.submit(Request(number, 0, number, [number], number))
    >>> [pool.receive().batch for _ in range(3)]
    [[1], [2], [0]]
    """

    def __init__(self, order: Iterable[int] = (), fetch: Fetch | None = None) -> None:
        self._order = iter(order)
        self._fetch = fetch or (lambda request, empty: Reply(request.number, batch=request.indices))
        self.submitted: list[Request] = []
        self.open: list[Request] = []
        self.closed = False

    def submit(self, request: Request) -> None:
        if self.closed:
            raise AgnoloadError("submit() was called on a closed pool")
        self.submitted.append(request)
        self.open.append(request)

    waiting = False

    def receive(self, timeout: float | None = None) -> Reply:
        if not self.open:
            raise AgnoloadError("receive() was called while no request was under way")
        return self._fetch(self.open.pop(next(self._order, 0) % len(self.open)), np.empty)

    def ready(self) -> bool:
        return bool(self.open)

    def close(self) -> None:
        self.closed = True
        self.open.clear()
