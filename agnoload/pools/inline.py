"""The pool without workers: it answers requests in the thread that asks."""

from __future__ import annotations

from collections import deque

import numpy as np

from agnoload.errors import AgnoloadError
from agnoload.messages import Reply, Request
from agnoload.protocols import ClosableFetch


class InlinePool:
    """Keeps requests, and answers the oldest one when `receive` asks for it."""

    def __init__(self, fetch: ClosableFetch) -> None:
        self._fetch = fetch
        self._requests: deque[Request] = deque()
        self.waiting = False

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def receive(self, timeout: float | None = None) -> Reply:
        if not self._requests:
            raise AgnoloadError("receive() was called while no request was under way")
        requests = self._requests  # `close`, in another thread or within the fetch, replaces it
        # What an interrupt breaks off is loaded again, so `waiting` stays true if the fetch raises; a stream has moved
        # on, and cannot go back.
        self.waiting = requests[0].owner is None
        reply = self._fetch(requests[0], np.empty)
        self.waiting = False
        requests.popleft()
        return reply

    def ready(self) -> bool:
        return False  # loading ahead would keep the user waiting for what is there already

    def close(self) -> None:
        self._requests = deque()
        self._fetch.close()
