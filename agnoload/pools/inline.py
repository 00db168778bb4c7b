"""The pool that is no pool: requests are answered in the thread that asks."""

from __future__ import annotations

from collections import deque

import numpy as np

from agnoload.errors import AgnoloadError
from agnoload.messages import Reply, Request
from agnoload.protocols import ClosableFetch


class InlinePool:
    """Keeps requests and answers the oldest one when it is asked for."""

    def __init__(self, fetch: ClosableFetch) -> None:
        self._fetch = fetch
        self._requests: deque[Request] = deque()

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def receive(self, timeout: float | None = None) -> Reply:
        if not self._requests:
            raise AgnoloadError("receive() was called while no request was under way")
        return self._fetch(self._requests.popleft(), np.empty)

    def ready(self) -> bool:
        return False  # loading ahead would keep the user waiting for what is there already

    def close(self) -> None:
        self._requests.clear()
        self._fetch.close()
