"""What happened when: the timeline that `loader.trace(path)` writes, in the Chrome trace format."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple, TextIO

from agnoload.messages import Reply


class _Span(NamedTuple):
    """One box of a timeline."""

    row: int
    name: str
    start: float
    end: float
    request: int | None = None
    samples: int | None = None


class Timeline:
    """Events for Perfetto and chrome://tracing: a row for the consumer and one for each worker.

    Batches that the consumer's own thread loads (`inline`) lie on the consumer's row, within its waiting.
    """

    CONSUMER = 0

    def __init__(self, inline: bool) -> None:
        self._inline = inline
        self._spans: list[_Span] = []

    def loaded(self, reply: Reply, since: float) -> None:
        """A reply has come from a worker that had ended what it did before at `since`."""
        row, number, add = (self.CONSUMER if self._inline else reply.worker + 1), reply.number, self._spans.append
        if not self._inline:
            add(_Span(row, "wait", since, reply.started))
        add(_Span(row, "fetch", reply.started, reply.fetched, number, reply.samples))
        add(_Span(row, "collate", reply.fetched, reply.collated, number))
        if not self._inline:
            add(_Span(row, "encode", reply.collated, reply.finished, number))

    def waited(self, since: float, began: float, now: float) -> None:
        """The consumer worked on a batch from `since` to `began`, and then waited."""
        self._spans.append(_Span(self.CONSUMER, "work", since, began))
        self._spans.append(_Span(self.CONSUMER, "wait", began, now))

    def write(self, file: TextIO) -> None:
        """As JSON in the Chrome trace format; times in microseconds."""
        pid = os.getpid()
        spans = [span for span in self._spans if span.end > span.start > 0]
        names = {self.CONSUMER: "consumer"}
        names.update({row: f"worker {row - 1}" for row in sorted({span.row for span in spans} - {self.CONSUMER})})
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in names.items()
        ]
        for row, name, start, end, *said in spans:
            args = {key: value for key, value in zip(("request", "samples"), said, strict=True) if value is not None}
            box = {"ph": "X", "pid": pid, "tid": row, "name": name, "cat": "agnoload", "args": args}
            events.append({**box, "ts": start * 1e6, "dur": (end - start) * 1e6})
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
