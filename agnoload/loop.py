"""The loop: requests go out while the window has room, batches come out in their order."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from agnoload.errors import AgnoloadError
from agnoload.messages import EMPTY, Reply, Request
from agnoload.plan import Cut, Plan
from agnoload.protocols import Backend, Pool
from agnoload.state import Place
from agnoload.stats import Recorder
from agnoload.tree import map_leaves, walk
from agnoload.window import Window

BatchT = TypeVar("BatchT")

PLACED_AHEAD = 2
"""Batches whose copy to a device is under way before they are due."""


_numbers = count()
"""Numbers of requests, never used twice in a process: a pool may serve one iterator after the other."""


class _Entry(NamedTuple):
    """A request that is out, and the plan that it is from."""

    plan: Plan
    cut: Cut


class Progress:
    """What the user has received of an iterator's requests, in whatever order: what a state saves.

    It knows nothing of the iterator, so that a loader can keep it when its iterator has been dropped.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cut: Cut | None = None
        self._open: dict[int, _Entry] = {}  # in the order of the requests
        self._delivered: set[int] = set()

    def issued(self, number: int, plan: Plan, cut: Cut) -> None:
        self._open[number] = _Entry(plan, cut)

    def answered(self, number: int, reply: Reply) -> Plan:
        """A reply has come out of the window; gives the plan that it belongs to."""
        plan, cut = self._open[number]
        plan.answered(cut, reply)
        return plan

    def delivered(self, number: int) -> None:
        """A batch has reached the user, or was empty."""
        entries, delivered = self._open, self._delivered
        delivered.add(number)
        plan, cut = entries[number]
        plan.delivered(cut)
        while entries and (first := next(iter(entries))) in delivered:
            delivered.remove(first)
            self._plan, self._cut = entries.pop(first)
            self._plan.outstanding -= 1
            if self._at_end:
                self._plan.ended()

    @property
    def _at_end(self) -> bool:
        return self._plan.exhausted and not self._plan.outstanding

    @property
    def epoch(self) -> int:
        """The epoch that the last batch was from."""
        return self._plan.epoch

    @property
    def place(self) -> Place:
        """Where the data that was yielded ends."""
        if self._at_end:
            return self._plan.end()
        entries = [self._open[number] for number in self._delivered]
        return self._plan.place_after(self._cut, [cut for plan, cut in entries if plan is self._plan])


class LoaderIterator(Generic[BatchT], Iterator[BatchT]):
    """Iterates the batches of one epoch, or of one after the other; made by `iter(loader)` and `loader.steps(n)`.

    It owns its pool unless `release` says where the pool goes back to.
    """

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        *,
        next_plan: Callable[[Place], Plan],
        say: Callable[[str], None],
        limit: int | None,
        window: Window,
        timeout: float | None,
        backend: Backend,
        device: Any,
        recorder: Recorder,
        release: Callable[[Any], None] | None,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._next_plan = next_plan
        self._say = say
        self._chained = limit is not None
        self._to_issue = limit
        self._window = window
        self._timeout = timeout
        self._convert = None if type(backend) is Backend else partial(map_leaves, backend.convert)
        self._put = partial(backend.place, device=device) if device is not None else None
        self._recorder = recorder
        self._release = release
        self._due: deque[tuple[int, Reply, Callable[[], Any]]] = deque()
        self._closed = False
        self._failed: str | None = None
        self._yielded = 0
        self._since: float | None = None
        self.progress = Progress(plan)
        self._finalizer = weakref.finalize(self, _close, pool, release, os.getpid())

    def __iter__(self) -> LoaderIterator[BatchT]:
        return self

    def __next__(self) -> BatchT:
        if self._closed:
            if self._failed is not None:
                raise AgnoloadError(f"this iterator has ended with an error ({self._failed}): make a new one")
            raise StopIteration
        began = time.monotonic()
        since = self._since or began
        try:
            due = self._take()
            if due is None:
                self.close()
                raise StopIteration
            number, reply, give = due
            batch = give()
        except StopIteration:
            raise
        except BaseException as error:
            self._failed = type(error).__name__
            self.close()
            raise
        self._yielded += 1
        self.progress.delivered(number)
        now = time.monotonic()
        self._since = now
        if not reply.nbytes:  # it did not travel
            reply = reply._replace(nbytes=sum(leaf.nbytes for _, leaf in walk(reply.batch) if hasattr(leaf, "nbytes")))
        self._recorder.delivered(reply, since, began, now)
        return batch  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give the pool back, or end it; what was prefetched is lost, what was yielded stays valid."""
        if not self._closed:
            self._closed = True
            self._due.clear()
            self._finalizer.detach()
            _close(self._pool, self._release, os.getpid())

    # ------------------------------------------------------------------------------------------------ the loop

    def _take(self) -> tuple[int, Reply, Callable[[], Any]] | None:
        """The next batch to give out, its number and what makes it; None at the end."""
        put = self._put
        if put is None:
            got = self._next_reply(wait=True)
            return got and (*got, partial(self._made, got[1]))
        due = self._due
        while len(due) <= PLACED_AHEAD:
            got = self._next_reply(wait=not due)
            if got is None:
                break
            reply = got[1]
            due.append((*got, partial(self._made, reply) if reply.error is not None else put(self._made(reply))))
        return due.popleft() if due else None

    def _made(self, reply: Reply) -> Any:
        if reply.error is not None:
            raise reply.error
        return reply.batch if self._convert is None else self._convert(reply.batch)

    def _next_reply(self, wait: bool) -> tuple[int, Reply] | None:
        """The next reply in the window's order that holds a batch or an error; None at the end, or if it must wait."""
        window, pool = self._window, self._pool
        while True:
            self._issue()
            popped = window.pop()
            if popped is not None:
                number, reply = popped[0].number, popped[1]
                self.progress.answered(number, reply)
                self._issue()  # workers go on while the user works
                if reply.error is None and reply.batch is EMPTY:
                    if self._to_issue is not None:
                        self._to_issue += 1
                    self.progress.delivered(number)
                    continue
                return number, reply
            if not len(window):
                if self._yielded or not self._plan.resumed:
                    return None
                self._plan = self._next_plan(self._plan.end())  # the state was one of the very end
                continue
            if not wait and not pool.ready():
                return None
            reply = pool.receive(self._timeout)
            self._recorder.arrived(reply)
            for text in (reply.extras or {}).get("notices", ()):
                self._say(text)
            window.arrived(reply)

    def _issue(self) -> None:
        """Submit requests while the window has room and there is something to ask for."""
        window = self._window
        while window.room and self._to_issue != 0:
            plan = self._plan
            item = plan.next()
            if item is None:
                if not (self._chained and plan.exhausted) or (plan.number == 0 and not plan.resumed):
                    return  # the end; also where an epoch has no batch at all: the next one has none either
                self._plan = self._next_plan(plan.end())
                continue
            cut, batch = item
            number = next(_numbers)
            if self._to_issue is not None:
                self._to_issue -= 1
            request = Request(
                number, plan.epoch, batch, cut.indices, cut.first, plan.seed, cut.stride, cut.rank, cut.owner, cut.lane,
                cut.size,
            )  # fmt: skip
            self.progress.issued(number, plan, cut)
            window.add(request)
            self._pool.submit(request)


def _close(pool: Pool, release: Callable[[Any], None] | None, owner: int) -> None:
    if release is not None and os.getpid() == owner:
        release(pool)
    else:
        pool.close()
