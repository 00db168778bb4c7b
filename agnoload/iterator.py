"""The loop: requests go out while the window has room, batches come out in their order."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from agnoload.backend.base import Backend
from agnoload.batching.tree import map_leaves
from agnoload.errors import AgnoloadError, LoaderClosed, OptionError, SampleStopped, add_note, one_line
from agnoload.fetching.error_policy import Ceiling
from agnoload.messages import EMPTY, Reply, Request
from agnoload.monitoring.logs import WorkerLogRelay
from agnoload.monitoring.stats import Recorder
from agnoload.planning.plan import Cut, Plan
from agnoload.planning.state import Place
from agnoload.planning.window import Window
from agnoload.protocols import Pool

BatchT = TypeVar("BatchT")

CLOSED = "was closed before its end"

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

    def __init__(self, plan: Plan, counts: bool) -> None:
        self._plan = plan
        self._counts = counts
        self._cut: Cut | None = None
        self._open: dict[int, _Entry] = {}  # in the order of the requests
        self._delivered: set[int] = set()
        self.asked = False
        """Whether the user has asked for a batch."""
        self.over = False
        """Whether nobody can ask any more."""

    def issued(self, number: int, plan: Plan, cut: Cut) -> None:
        self._open[number] = _Entry(plan, cut)

    def answered(self, reply: Reply) -> None:
        """A reply has come, in any order."""
        plan, cut = self._open[reply.number]
        plan.answered(cut, reply)

    def plan_of(self, number: int) -> Plan:
        """The plan that a request is from."""
        return self._open[number].plan

    def delivered(self, reply: Reply) -> None:
        """A batch has reached the user, or was empty."""
        entries, delivered, number = self._open, self._delivered, reply.number
        delivered.add(number)
        plan, cut = entries[number]
        plan.delivered(cut)
        if self._counts and reply.error is None:
            plan.tally = plan.tally.plus(reply)
        while entries and (first := next(iter(entries))) in delivered:
            delivered.remove(first)
            self._plan, self._cut = entries.pop(first)
            self._plan.outstanding -= 1
            if self._plan.complete:
                self._plan.ended()

    @property
    def epoch(self) -> int:
        """The epoch that the last batch was from."""
        return self._plan.epoch

    @property
    def place(self) -> Place:
        """Where the data that was yielded ends."""
        if self._plan.complete:
            return self._plan.end()
        entries = [self._open[number] for number in self._delivered]
        place = self._plan.place_after(self._cut, [cut for plan, cut in entries if plan is self._plan])
        return place._replace(tally=self._plan.tally)


_GONE = Reply(-1)


class _Due:
    """A batch whose turn is near. What makes it ready may be interrupted, and is then done again."""

    __slots__ = ("_finish", "_request", "last", "reply")

    def __init__(self, request: Request, reply: Reply) -> None:
        self._request = request
        self.reply = reply
        self.last = reply.error is not None and (reply.end or not isinstance(reply.error, Exception))
        """Whether it is an error that nothing can come after."""
        self._finish: Callable[[], Any] | None = None

    def start(self, convert: Callable[[Any], Any] | None, put: Callable[[Any], Callable[[], Any]]) -> None:
        """Start it on its way to the device; an error is due when the batch is."""
        if self._finish is None and self.reply.error is None:
            try:
                self._finish = _named(self._request, partial(put, self.made(convert)))
            except Exception as error:
                self.reply = self.reply._replace(error=error)

    def made(self, convert: Callable[[Any], Any] | None) -> Any:
        """The batch as the user gets it; its error is raised."""
        if self.reply.error is not None:
            raise self.reply.error
        make = self._finish or (convert and partial(convert, self.reply.batch))
        return self.reply.batch if make is None else _named(self._request, make)


class LoaderIterator(Generic[BatchT], Iterator[BatchT]):
    """Iterates the batches of one epoch, or of one after the other; made by `iter(loader)` and `loader.steps(n)`.

    It owns its pool unless `release` says where the pool goes back to. Several threads may share it: each batch goes to
    one of them.

    What a sample, `collate_fn` or the backend raises comes in the place of its batch, and the next batch comes after
    it. Where an exception out of a signal handler interrupts a wait, nothing is lost. Any other error is the end.
    """

    def __init__(
        self,
        loader: Any,
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
        journal: WorkerLogRelay,
        ceiling: Ceiling | None,
        release: Callable[[Any], None] | None,
    ) -> None:
        self._loader = loader
        self._plan = plan
        self._pool = pool
        self._next_plan = next_plan
        self._say = say
        self._chained = limit is not None
        self._limit = self._to_issue = limit
        self._window = window
        self._timeout = timeout
        self._convert = None if type(backend) is Backend else partial(map_leaves, backend.convert)
        self._put = partial(backend.place, device=device) if device is not None else None
        self._recorder = recorder
        self._journal = journal
        self._ceiling = ceiling
        self._release = release
        self._due: deque[_Due] = deque()
        self._turn = threading.RLock()
        self._busy = self._closed = self._receiving = False
        self._over: str | None = None
        """Why there is no more, None at the natural end."""
        self._stuck: Exception | None = None
        """What the sampler or the next epoch raised: due when all that was asked for before has been delivered."""
        self._yielded = 0
        self._before = plan.number or -(-plan.place.position // (loader.batch_size or 1))
        """How many batches of the epoch were delivered before the state that it resumes from."""
        self._barren: int | None = None
        """The epoch that gave nothing: one after the other ends there, since the next one may give nothing either."""
        self._since: float | None = None
        self._ends: dict[int, float] = {}
        self.progress = Progress(plan, counts=ceiling is not None)
        self._pid = os.getpid()
        # What it holds must not know the loader, which may know this iterator: they would never be collected.
        self._finalizer = weakref.finalize(self, _drop, self.progress, pool, release, self._pid)

    def __iter__(self) -> LoaderIterator[BatchT]:
        return self

    def __len__(self) -> int:
        """The number of batches to come, for a progress bar; `TypeError` where it is not known.

        A batch whose samples are all skipped counts until then.
        """
        if self._closed:
            return 0
        if self._limit is not None:
            return self._limit - self._yielded
        try:
            return max(len(self._loader) - self._before - self._yielded, 0)
        except Exception as error:  # list() asks, too, and takes nothing but a TypeError for "unknown"
            raise TypeError(f"how many batches are to come is not known: {one_line(error)}") from error

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        batches = f"{self._yielded} batch{'es' * (self._yielded != 1)}"
        return f"<iterator in epoch {self.progress.epoch}, {batches} delivered, of {self._loader!r}>"

    def __next__(self) -> BatchT:
        due = None
        try:
            with self._turn:
                if self._closed:
                    if self._over is None:
                        raise StopIteration
                    kind = LoaderClosed if self._over is CLOSED else AgnoloadError
                    raise kind(f"this iterator {self._over}: make a new one")
                try:
                    self._busy = True
                    due = self._next()
                except (StopIteration, GeneratorExit) as error:  # out of user code: not the end of the data
                    raise SampleStopped(f"{type(error).__name__} was raised while a batch was made ready") from error
                finally:
                    self._busy = False
                if due is None:
                    self._close(None)
                    raise StopIteration
                return due[0]
        except BaseException as error:
            if due is not None:  # a signal handler has raised: nobody gets this batch
                self._end_with(error)
            raise

    def close(self) -> None:
        """Give the pool back, or end it; what was prefetched is lost, what was yielded stays valid."""
        self._close(CLOSED)

    def _end_with(self, error: BaseException) -> None:
        self._busy = False
        if isinstance(error, LoaderClosed):
            end_with_program()
        self._close(f"has ended with an error ({type(error).__name__})")

    def _close(self, why: str | None) -> None:
        if not self._closed:
            self._over = why
            self._closed = self.progress.over = True
            self._due = deque()
            self._finalizer.detach()
            # A pool that somebody waits in cannot serve another iterator: it ends, and wakes them.
            _give_back(self._pool, None if self._busy else self._release, self._pid)

    # ------------------------------------------------------------------------------------------------ the loop

    def _next(self) -> tuple[BatchT] | None:
        """The next batch, None at the end."""
        began = time.monotonic()
        self.progress.asked = True
        due = self._due  # whoever closes this meanwhile replaces it
        try:
            self._fill(due)
        except BaseException as error:
            waited, self._receiving = self._receiving and self._pool.waiting, False
            if not waited:  # something is half done
                self._end_with(error)
            raise
        if not due:
            return None
        ready = due[0]  # it stays there until it is the user's
        try:
            if self._put is not None:
                for one in tuple(due):
                    one.start(self._convert, self._put)
            batch = ready.made(self._convert)
        except BaseException as error:
            if ready.last or isinstance(error, (Exception, GeneratorExit)):
                due.popleft()
                self._failed(ready, error)
            raise
        try:
            due.popleft()
            self._gave(ready.reply)
            now = time.monotonic()
            self._recorder.delivered(ready.reply, self._since, began, now)
            self._since = now
        except BaseException as error:  # out of a signal handler: nobody gets this batch
            self._end_with(error)
            raise
        return (batch,)

    def _fill(self, due: deque[_Due]) -> None:
        """Wait for the batch that is due; where batches are placed ahead, also take those behind it that are there."""
        while len(due) <= (0 if self._put is None else PLACED_AHEAD):
            got = self._next_reply(wait=not due)
            if got is None:
                break
            due.append(_Due(*got))

    def _failed(self, ready: _Due, error: BaseException) -> None:
        """A batch is an error: the end, or delivered as such."""
        reply, ready.reply = ready.reply, _GONE  # the traceback holds `ready`: the error must not hold itself
        if ready.last:
            self._end_with(error)
        else:
            self._gave(reply)

    def _gave(self, reply: Reply) -> None:
        self._yielded += 1
        self._delivered(reply)

    def _delivered(self, reply: Reply) -> None:
        try:
            self.progress.delivered(reply)
        except Warning as warning:  # of the stream's length; the user wants an error, but the batch is good
            self._stuck = warning

    def _next_reply(self, wait: bool) -> tuple[Request, Reply] | None:
        """The next reply in the window's order that holds a batch or an error; None at the end, or if it must wait."""
        window, pool = self._window, self._pool
        while True:
            if self._barren is not None and self._chained:
                raise self._too_few(self._barren)  # whatever was asked for of the next one
            self._issue()
            popped = window.pop()
            if popped is not None:
                number, reply = popped[0].number, popped[1]
                plan = self.progress.plan_of(number)
                reply = self._heard(reply, plan.epoch)
                while self._chained and not plan.foreseen and pool.ready():  # is this the last batch of the epoch?
                    self._receive()
                self._issue()  # workers go on while the user works
                if reply.error is None and reply.batch is EMPTY:
                    if self._to_issue is not None:
                        self._to_issue += 1
                    self._delivered(reply)
                    if plan.barren:
                        self._barren = plan.epoch
                    continue
                plan.given += 1
                return popped[0], reply
            if not wait and not (len(window) and pool.ready()):
                return None
            if not len(window):
                if self._stuck is not None:
                    raise self._stuck
                if self._yielded or not self._plan.passed:
                    self._judge()
                    if self._to_issue:
                        raise self._too_few(self._plan.epoch)
                    self._look_back()
                    return None
                self._plan, self._before = self._next_plan(self._plan.end()), 0  # the state was one of the very end
                continue
            self._receive()

    def _too_few(self, epoch: int) -> OptionError:
        return OptionError(
            f"steps({self._limit}) needs a batch in every epoch, but epoch {epoch} has none after {self._yielded} "
            "steps: the dataset (or this rank's share of it) is empty, drop_last or on_error leaves nothing of it, or "
            "it is a stream that can be read only once"
        )

    def _look_back(self) -> None:
        """At the end of an epoch without a batch: whether there were some in one before."""
        if self._yielded:
            return
        source = self._plan.source
        if source is not None and self._recorder.sums().batches:
            self._say(
                f"the {source} gives nothing any more, though it gave batches in an epoch before: one that can be "
                "iterated only once, as a generator or an open file can, must begin anew in __iter__"
            )

    def _receive(self) -> None:
        self._receiving = True
        reply = self._pool.receive(self._timeout)
        self._receiving = False
        self._recorder.arrived(reply, self._ends)
        self._window.arrived(reply)
        self.progress.answered(reply)

    def _heard(self, reply: Reply, epoch: int) -> Reply:
        """Take note of what was said and of what failed while a batch was loaded; that may be an error in its place."""
        if reply.failed:
            self._recorder.noted(reply.failed)
        if reply.log_records or reply.notices:
            try:
                self._journal.replay(reply.log_records)
                for text in reply.notices:
                    self._say(text)
            except Exception as warning:  # it is an error where the user has said so
                return reply._replace(error=warning, batch=None)
        if self._ceiling is None or reply.error is not None:
            return reply
        if error := self._ceiling.count(epoch, reply):
            return reply._replace(error=error, batch=None, end=True)
        return reply

    def _judge(self) -> None:
        """At the end: whether too much of the epoch has failed, if it is over."""
        if self._ceiling is not None and self._plan.complete and (error := self._ceiling.ended()):
            raise error

    def _issue(self) -> None:
        """Submit requests while the window has room and there is something to ask for."""
        window = self._window
        while window.room and self._to_issue != 0 and self._stuck is None and self._barren is None:
            try:
                item = self._next_item()
            except Exception as error:
                self._stuck = error
                return
            if item is None:
                return
            plan, cut, batch = item
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

    def _next_item(self) -> tuple[Plan, Cut, int] | None:
        """What to ask for next, of this epoch or the next one; None at the end, or for now."""
        while True:
            plan = self._plan
            item = plan.next()
            if item is not None:
                return plan, *item
            if not (self._chained and plan.exhausted) or (plan.number == 0 and not plan.resumed):
                return None  # also where an epoch has no batch at all: the next one has none either
            self._plan = self._next_plan(plan.end())


def _named(request: Request, make: Callable[[], Any]) -> Any:
    """What a backend makes of a batch; its error says which batch that was."""
    try:
        return make()
    except Exception as error:
        add_note(error, f"while batch {request.batch} of epoch {request.epoch} was handed to the backend")
        raise


def _drop(progress: Progress, pool: Pool, release: Callable[[Any], None] | None, owner: int) -> None:
    progress.over = True
    try:
        _give_back(pool, release, owner)
    except KeyboardInterrupt:
        if not _exiting():  # at exit a second Ctrl-C has killed the workers, and there is nobody left to tell
            raise


def _give_back(pool: Pool, release: Callable[[Any], None] | None, owner: int) -> None:
    if release is None or os.getpid() != owner or _exiting():  # at exit a thread may be waiting in it, for ever
        pool.close()
    else:
        release(pool)


def end_with_program() -> None:
    """For errors that come of the program's end: a daemon thread waits until it is taken along, and says nothing."""
    if threading.current_thread().daemon and _exiting():
        threading.Event().wait()


def _exiting() -> bool:
    """Whether the interpreter has begun to end."""
    return not threading.main_thread().is_alive()
