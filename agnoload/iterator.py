"""The loop: requests go out while the window has room, batches come out in their order."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from agnoload.backend.base import Backend
from agnoload.batching.tree import map_leaves
from agnoload.errors import AgnoloadError, LoaderClosed, OptionError, SampleStopped, add_note, one_line
from agnoload.fetching.error_policy import FailureBudget
from agnoload.messages import EMPTY, Reply, Request
from agnoload.monitoring.logs import WorkerLogRelay
from agnoload.monitoring.stats import Recorder
from agnoload.planning.plan import Plan, Progress
from agnoload.planning.state import EpochPosition
from agnoload.planning.window import Window
from agnoload.protocols import Pool

BatchT = TypeVar("BatchT")

CLOSED = "was closed before its end"

PLACED_AHEAD = 2
"""Batches whose copy to a device is under way before they are due."""

_GONE = Reply(-1)


class Account:
    """Takes note of what replies say beside their batch: times, log records, warnings, and samples that failed."""

    def __init__(
        self, recorder: Recorder, journal: WorkerLogRelay, say: Callable[[str], None], budget: FailureBudget | None
    ) -> None:
        self._recorder = recorder
        self._journal = journal
        self.say = say
        self.budget = budget
        self._since: float | None = None
        self._ends: dict[int, float] = {}

    def arrived(self, reply: Reply) -> None:
        """A reply has come, in any order."""
        self._recorder.arrived(reply, self._ends)

    def heard(self, reply: Reply, epoch: int) -> Reply:
        """It is the next one in order; what it says may be an error in the place of its batch."""
        if reply.failed:
            self._recorder.noted(reply.failed)
        if reply.log_records or reply.notices:
            try:
                self._journal.replay(reply.log_records)
                for text in reply.notices:
                    self.say(text)
            except Exception as warning:  # it is an error where the user has said so
                return reply._replace(error=warning, batch=None)
        if self.budget is None or reply.error is not None:
            return reply
        if error := self.budget.count(epoch, reply):
            return reply._replace(error=error, batch=None, end=True)
        return reply

    def delivered(self, reply: Reply, began: float) -> None:
        """The user, who has asked for it at `began`, has the batch."""
        now = time.monotonic()
        self._recorder.delivered(reply, self._since, began, now)
        self._since = now

    def ended(self, plan: Plan, yielded: int) -> None:
        """The last batch of the iterator has been delivered: an error if too many samples failed."""
        if self.budget is not None and plan.delivered_all and (error := self.budget.ended()):
            raise error
        if not yielded and plan.source is not None and self._recorder.sums().batches:
            self.say(
                f"the {plan.source} gives nothing any more, though it gave batches in an epoch before: one that can be "
                "iterated only once, as a generator or an open file can, must start again in __iter__"
            )


class Due:
    """A batch whose turn is near. What makes it ready may be interrupted, and is then done again."""

    __slots__ = ("_finish", "last", "plan", "reply", "request")

    def __init__(self, plan: Plan, request: Request, reply: Reply) -> None:
        self.plan = plan
        self.request = request
        self.reply = reply
        self.last = reply.error is not None and (reply.end or not isinstance(reply.error, Exception))
        """Whether it is an error that nothing can come after."""
        self._finish: Callable[[], Any] | None = None

    def start(self, convert: Callable[[Any], Any] | None, put: Callable[[Any], Callable[[], Any]]) -> None:
        """Start it on its way to the device; an error is due when the batch is."""
        if self._finish is None and self.reply.error is None:
            try:
                self._finish = _named(self.request, partial(put, self.made(convert)))
            except Exception as error:
                self.reply = self.reply._replace(error=error)

    def made(self, convert: Callable[[Any], Any] | None) -> Any:
        """The batch as the user gets it; its error is raised."""
        if self.reply.error is not None:
            raise self.reply.error
        make = self._finish or (convert and partial(convert, self.reply.batch))
        return self.reply.batch if make is None else _named(self.request, make)


class Supply:
    """Asks for the batches of one epoch, or for `limit` of one epoch after the other, and gives them in their order."""

    def __init__(
        self,
        plan: Plan,
        next_plan: Callable[[EpochPosition], Plan],
        pool: Pool,
        window: Window,
        limit: int | None,
        timeout: float | None,
        account: Account,
    ) -> None:
        self._plan = plan
        """The plan that is asked next; requests of plans before it may be under way."""
        self._next_plan = next_plan
        self._pool = pool
        self._window = window
        self.limit = self._to_ask = limit
        self._timeout = timeout
        self._account = account
        self.progress = Progress(plan, counts=account.budget is not None)
        self.yielded = 0
        self.before = plan.before
        """How many batches of the epoch were delivered before the state that it resumes from."""
        self._stuck: Exception | None = None
        """What the sampler or the next epoch raised: due when all that was asked for before has been delivered."""
        self._empty_epoch: int | None = None
        """Steps end at an epoch that gave nothing, since the next one may give nothing either."""
        self._receiving = False

    def next(self, wait: bool) -> Due | None:
        """The next batch or error in the window's order; None at the end, or if it would have to wait."""
        window, pool = self._window, self._pool
        while True:
            if self._empty_epoch is not None:
                raise self._too_few(self._empty_epoch)
            self._ask()
            if (popped := window.pop()) is not None:
                plan, request, reply = popped
                reply = self._account.heard(reply, plan.epoch)
                while self.limit is not None and plan.ends_by_reply and pool.ready():  # is it the last of the epoch?
                    self._receive()
                self._ask()  # workers load while the user works
                if reply.error is not None or reply.batch is not EMPTY:
                    return Due(plan, request, reply)
                if self._to_ask is not None:
                    self._to_ask += 1
                self.delivered(plan, request, reply)
                if self.limit is not None and plan.delivered_all and not (plan.given or plan.resumed):
                    self._empty_epoch = plan.epoch
            elif not wait and not (len(window) and pool.ready()):
                return None
            elif len(window):
                self._receive()
            elif self._stuck is not None:
                raise self._stuck
            elif self.yielded or not self._plan.passed:
                self._account.ended(self._plan, self.yielded)
                if self._to_ask:
                    raise self._too_few(self._plan.epoch)
                return None
            else:  # the state was one of the very end
                self._plan, self.before = self._next_plan(self._plan.end()), 0

    def delivered(self, plan: Plan, request: Request, reply: Reply) -> None:
        """The user has the batch, or it is empty."""
        complaint = self.progress.delivered(plan, request, reply)
        if complaint is not None:
            try:
                self._account.say(complaint)
            except Warning as warning:  # the user wants an error, but the batch is good
                self._stuck = warning

    @property
    def interrupted(self) -> bool:
        """After an exception: whether it came from a wait in the pool, which has changed nothing."""
        receiving, self._receiving = self._receiving, False
        return receiving and self._pool.waiting

    def _receive(self) -> None:
        self._receiving = True
        reply = self._pool.receive(self._timeout)
        self._receiving = False
        self._account.arrived(reply)
        plan, request = self._window.arrived(reply)
        plan.answered(request, reply)

    def _ask(self) -> None:
        """Submit requests while the window has room and there is something to ask for."""
        window = self._window
        while window.room and self._to_ask != 0 and self._stuck is None and self._empty_epoch is None:
            plan = self._plan
            try:
                request = plan.next()
                if request is None:
                    # Steps go on in the next epoch; where one has no batch at all, the next one has none either.
                    if self.limit is None or not plan.exhausted or (plan.batches == 0 and not plan.resumed):
                        return
                    self._plan = self._next_plan(plan.end())
                    continue
            except Exception as error:  # due once all that was asked for before has been delivered
                self._stuck = error
                return
            if self._to_ask is not None:
                self._to_ask -= 1
            window.add(plan, request)
            self._pool.submit(request)

    def _too_few(self, epoch: int) -> OptionError:
        return OptionError(
            f"steps({self.limit}) needs a batch in every epoch, but epoch {epoch} has none after {self.yielded} "
            "steps: the dataset (or this rank's share of it) is empty, drop_last or on_error leaves nothing of it, or "
            "it is a stream that can be read only once"
        )


class LoaderIterator(Generic[BatchT], Iterator[BatchT]):
    """Iterates the batches of one epoch, or of one after the other; made by `iter(loader)` and `loader.steps(n)`.

    It owns its pool unless `release` says where the pool goes back to. Several threads may share it: each batch goes to
    one of them.

    What a sample, `collate_fn` or the backend raises comes in the place of its batch, and the next batch comes after
    it. Where an exception out of a signal handler interrupts a wait, nothing is lost. Any other error is the end.
    """

    def __init__(
        self, loader: Any, supply: Supply, account: Account, backend: Backend, device: Any,
        pool: Pool, release: Callable[[Any], None] | None,
    ) -> None:  # fmt: skip
        self._loader = loader
        self._supply = supply
        self._account = account
        self.progress = supply.progress
        self._convert = None if type(backend) is Backend else partial(map_leaves, backend.convert)
        self._put = partial(backend.place, device=device) if device is not None else None
        self._due: deque[Due] = deque()
        self._pool = pool
        self._turn = threading.RLock()  # re-entrant: a signal handler that asks for a batch must not wait for itself
        self._busy = False
        self._over: str | None = None
        """Why it gives no more, once it does not: empty at the natural end."""
        self._give_back = partial(_give_back, pool, release, os.getpid())
        # What it holds must not know the loader, which may know this iterator: they would never be collected.
        self._finalizer = weakref.finalize(self, _drop, self.progress, self._give_back)

    def __iter__(self) -> LoaderIterator[BatchT]:
        return self

    def __len__(self) -> int:
        """The number of batches to come, for a progress bar; `TypeError` where it is not known.

        A batch whose samples are all skipped counts until then.
        """
        supply = self._supply
        if self._over is not None:
            return 0
        if supply.limit is not None:
            return supply.limit - supply.yielded
        try:
            return max(len(self._loader) - supply.before - supply.yielded, 0)
        except Exception as error:  # list() asks, too, and takes nothing but a TypeError for "unknown"
            raise TypeError(f"the number of batches to come is not known: {one_line(error)}") from error

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        batches = f"{self._supply.yielded} batch{'es' * (self._supply.yielded != 1)}"
        return f"<iterator in epoch {self.progress.epoch}, {batches} delivered, of {self._loader!r}>"

    def __next__(self) -> BatchT:
        taken = False
        try:
            with self._turn:
                if self._over is not None:
                    if not self._over:
                        raise StopIteration
                    kind = LoaderClosed if self._over is CLOSED else AgnoloadError
                    raise kind(f"this iterator {self._over}: make a new one")
                began = time.monotonic()
                self.progress.asked = True
                due = self._due  # whoever closes this meanwhile replaces it
                try:
                    self._busy = True  # whoever drops this iterator meanwhile must not give its pool to another
                    ready = self._ready(due)
                except (StopIteration, GeneratorExit) as error:  # out of user code: not the end of the data
                    raise SampleStopped(f"{type(error).__name__} was raised while a batch was made ready") from error
                finally:
                    self._busy = False
                if ready is None:
                    self._close("")
                    raise StopIteration
                taken = True
                self._gave(due.popleft())
                self._account.delivered(ready[0].reply, began)
                return ready[1]
        except BaseException as error:
            if taken:  # a signal handler has raised: nobody gets this batch, so it must not seem to have been yielded
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

    def _close(self, why: str) -> None:
        if self._over is None:
            self._over = why
            self.progress.over = True
            self._due = deque()  # a new one: another thread may be working on the batches of the old one
            self._finalizer.detach()
            self._give_back(self._busy)

    def _ready(self, due: deque[Due]) -> tuple[Due, BatchT] | None:
        """The next batch, which stays due until it is the user's; None at the end."""
        try:
            # Where batches are placed ahead, those behind it that are there are due, too.
            while len(due) <= (0 if self._put is None else PLACED_AHEAD):
                got = self._supply.next(wait=not due)
                if got is None:
                    break
                due.append(got)
        except BaseException as error:
            if not self._supply.interrupted:  # something is half done
                self._end_with(error)
            raise
        if not due:
            return None
        first = due[0]
        try:
            if self._put is not None:
                for one in tuple(due):
                    one.start(self._convert, self._put)
            return first, first.made(self._convert)
        except BaseException as error:
            if first.last:
                first.reply = _GONE  # the traceback holds `first`: the error must not hold itself
                self._end_with(error)
            elif isinstance(error, (Exception, GeneratorExit)):  # delivered as an error, in the place of its batch
                due.popleft()
                self._gave(first)
                first.reply = _GONE
            raise

    def _gave(self, due: Due) -> None:
        self._supply.yielded += 1
        self._supply.delivered(due.plan, due.request, due.reply)


def _named(request: Request, make: Callable[[], Any]) -> Any:
    """What a backend makes of a batch; its error says which batch that was."""
    try:
        return make()
    except Exception as error:
        add_note(error, f"while batch {request.batch} of epoch {request.epoch} was handed to the backend")
        raise


def _drop(progress: Progress, give_back: Callable[[bool], None]) -> None:
    progress.over = True
    try:
        give_back(False)
    except KeyboardInterrupt:
        if not _exiting():  # at exit a second Ctrl-C has killed the workers, and nobody is left to see it
            raise


def _give_back(pool: Pool, release: Callable[[Any], None] | None, owner: int, busy: bool) -> None:
    # A pool that somebody waits in cannot serve another iterator: it ends, and wakes them. So it does at exit, when a
    # daemon thread may be waiting in it for ever.
    if release is None or busy or os.getpid() != owner or _exiting():
        pool.close()
    else:
        release(pool)


def end_with_program() -> None:
    """For errors that come from the program's end: a daemon thread waits here until it ends with it."""
    if threading.current_thread().daemon and _exiting():
        threading.Event().wait()


def _exiting() -> bool:
    """Whether the interpreter has begun to end."""
    return not threading.main_thread().is_alive()
