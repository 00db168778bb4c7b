"""Plans: the requests of one epoch, and how far it has been delivered. The base of all, and that of our samplers."""

from __future__ import annotations

from collections.abc import Iterator

from agnoload.messages import EMPTY, Reply, Request, request_numbers
from agnoload.planning.state import EpochPosition, check_order, was_delivered
from agnoload.samplers.order import BatchOrder


class Plan:
    """The requests of one epoch, from `start` on.

    The iterator asks `next` while its window has room, says `answered` when a reply has arrived, in any order, and
    `delivered` when the user has the batch, or when it turned out to be empty. No method waits, none loads anything.
    """

    source: str | None = None
    """Which object of the user's it iterates once an epoch, if any."""
    ends_by_reply = False
    """Whether only the replies tell where the epoch ends."""

    def __init__(self, start: EpochPosition, before: int = 0) -> None:
        self.start = start
        self.epoch = start.epoch
        self.seed = start.seeds.samples
        self.resumed = start.position > 0 or bool(start.ahead)
        """Whether some of it was delivered before."""
        self.others = False
        """Whether other ranks may have batches left where this one has none, so that it stays in their epoch."""
        self.before = before
        """The number of batches before `start`."""
        self.batches = before
        """The number of the next batch."""
        self.given = 0
        """How many of its own batches have reached the user, with samples or as an error."""
        self.exhausted = False
        """Whether `next` will give no more."""

    @property
    def delivered_all(self) -> bool:
        """Whether the epoch is over for the user."""
        raise NotImplementedError

    @property
    def passed(self) -> bool:
        """Whether its start turned out to be its end, so that the next epoch follows; once it is `exhausted`."""
        return self.resumed and not self.given and not self.others

    def next(self) -> Request | None:
        """The next request; None if there is none, now or ever."""
        raise NotImplementedError

    def answered(self, request: Request, reply: Reply) -> None:
        """The reply has arrived."""

    def delivered(self, request: Request, reply: Reply) -> None:
        """The user has the batch, or it is empty."""
        self.given += reply.batch is not EMPTY or reply.error is not None

    def complaint(self) -> str | None:
        """What to warn of once all of it has been delivered."""

    def position(self) -> EpochPosition:
        """How far it has been delivered; the start of the next epoch once all of it has."""
        raise NotImplementedError

    def end(self) -> EpochPosition:
        """The start of the next epoch, which has no seeds yet."""
        return EpochPosition(self.epoch + 1, seeds=self.start.seeds, begun=False)


class OrderedPlan(Plan):
    """A plan that knows its batches one ahead; a subclass gives `_requests`.

    What was delivered is a watermark, the number of the first batch that was not, and the batches beyond it, which
    there are where they are delivered out of order.
    """

    def __init__(self, start: EpochPosition, before: int) -> None:
        super().__init__(start, before)
        self._watermark = before
        self._last: Request | None = None
        """The one before the watermark."""
        self._beyond: dict[int, Request] = {}
        self._broken: Exception | None = None
        self._iterator = self._requests()
        self._next = self._pull()

    def _requests(self) -> Iterator[Request]:
        raise NotImplementedError

    def _pull(self) -> Request | None:
        """The next batch, leaving out what was delivered before, ahead of the start."""
        for request in self._iterator:
            if not self.start.ahead or not was_delivered(self.start, request.start, request.stop):
                return request
            self.batches += 1
            self._advance(request)
        self.exhausted = True
        return None

    @property
    def delivered_all(self) -> bool:
        return self.exhausted and self._watermark == self.batches

    def next(self) -> Request | None:
        request = self._next
        if request is None:
            if self._broken is not None:
                raise self._broken
            return None
        self._next = None
        self.batches += 1
        try:
            self._next = self._pull()
        except Exception as error:  # a sampler's: the batch that it gave before is still good
            self._broken = error
        return request

    def delivered(self, request: Request, reply: Reply) -> None:
        super().delivered(request, reply)
        self._advance(request)

    def _advance(self, request: Request) -> None:
        self._beyond[request.batch] = request
        while self._watermark in self._beyond:
            self._last = self._beyond.pop(self._watermark)
            self._watermark += 1

    def position(self) -> EpochPosition:
        if self.delivered_all:
            return self.end()
        reached = self.start.position if self._last is None else self._last.stop
        stretches = [*self.start.ahead, *((batch.start, batch.stop) for batch in self._beyond.values())]
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(stretches):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            elif stop > reached:
                joined.append((start, stop))
        return EpochPosition(self.epoch, reached, self.start.seeds, ahead=tuple(joined))


class OrderPlan(OrderedPlan):
    """The batches of a sampler of ours; `single` where each is one key, which is not batched."""

    def __init__(self, start: EpochPosition, whole: BatchOrder, *, single: bool = False) -> None:
        self._order = whole.after(start.position) if start.position else whole
        self._single = single
        check_order(start, self._order, whole.end)
        super().__init__(start, max(0, len(whole) - len(self._order)))
        self.others = self.exhausted and start.position < whole.end

    def _requests(self) -> Iterator[Request]:
        order, reached = self._order, self.start.position
        for number in range(len(order)):
            keys = order.batch(number)
            start, reached = reached, order.reached(number + 1)
            yield Request(
                next(request_numbers), self.epoch, self.batches, int(keys[0]) if self._single else keys,
                order.position(number), self.seed, order.stride, start=start, stop=reached,
            )  # fmt: skip


class Progress:
    """What the user has received of an iterator's batches: what a state saves.

    It knows nothing of the iterator, so that a loader can keep it when its iterator has been dropped.
    """

    def __init__(self, plan: Plan, counts: bool) -> None:
        self._plan = plan
        self._counts = counts
        self._failed = plan.start.failed
        self.asked = False
        """Whether the user has asked for a batch."""
        self.over = False
        """Whether nobody can ask any more."""

    def delivered(self, plan: Plan, request: Request, reply: Reply) -> str | None:
        """A batch has reached the user, or was empty; what to warn of where that ends its epoch."""
        if plan is not self._plan:
            self._plan, self._failed = plan, plan.start.failed
        if self._counts and reply.error is None:
            self._failed = self._failed.plus(reply)
        plan.delivered(request, reply)
        return plan.complaint() if plan.delivered_all else None

    @property
    def epoch(self) -> int:
        """The epoch that the last batch was from."""
        return self._plan.epoch

    @property
    def position(self) -> EpochPosition:
        """Where the data that was yielded ends."""
        position = self._plan.position()
        return position if self._plan.delivered_all else position._replace(failed=self._failed)
