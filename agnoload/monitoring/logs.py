"""What is logged and warned of in workers reaches the user's process: records through its handlers, warnings once.

A worker collects what was said while it loaded a batch, and the batch brings it along. What it has said of a batch that
it does not finish lies in shared memory, where its parent finds it. Prints need no way of their own: a worker writes to
the same standard output and error as its parent.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TextIO

from agnoload.errors import CALLED
from agnoload.transport.remote_errors import Described, describe, dumps, portable, rebuild

REMEMBERED = 10_000
"""Warnings are told apart up to so many; then the counting begins again."""


class Logged(NamedTuple):
    """A log record as plain values."""

    attributes: dict[str, Any]


class Warned(NamedTuple):
    """A warning, and the place in the user's code that it is for."""

    what: Described
    filename: str
    lineno: int
    module: str | None


Said = list[Logged | Warned]


def settings() -> dict[str, Any]:
    """What a worker must know of this process: the levels of its loggers and its warning filters, as plain values.

    No worker shall import a package for the sake of a filter on its warnings: from the first such filter on, the worker
    lets everything through, and the filters are applied where the warning arrives.
    """
    root = logging.getLogger()
    known = root.manager.loggerDict.copy()  # another thread may be making loggers
    named = {name: logger for name, logger in known.items() if isinstance(logger, logging.Logger)}
    levels = {name: logger.level for name, logger in named.items() if logger.level}
    filters: list[Any] = list(takewhile(lambda entry: entry[2].__module__ == "builtins", warnings.filters))
    if len(filters) < len(warnings.filters):
        filters.append(("always", None, Warning, None, 0))
    return {"level": root.level, "levels": levels, "disabled": root.manager.disable, "filters": filters}


class Listener(logging.Handler):
    """In a worker: collects log records and warnings until a reply takes them along."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self._worker = worker
        self.keep: Callable[[bytes], None] | None = None
        """Is given each thing that was said at once, as `heard` reads it, in case no reply takes it along."""
        self._said: Said = []
        self._seen: set[Any] = set()

    def install(self, around: Mapping[str, Any] | None) -> None:
        """Take the place of all handlers, also of those that a forked process has inherited, and of `showwarning`."""
        root = logging.getLogger()
        for logger in (root, *root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):
                logger.handlers.clear()
                logger.propagate = True
        root.addHandler(self)
        warnings.showwarning = self._show
        if around is not None:
            root.setLevel(around["level"])
            for name, level in around["levels"].items():
                logging.getLogger(name).setLevel(level)
            logging.disable(around["disabled"])
            warnings.resetwarnings()
            warnings.filters[:] = around["filters"]  # type: ignore[index]

    def take(self) -> Said:
        """What was said since the last time."""
        said, self._said = self._said, []
        return said

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:
            self.handleError(record)
            return
        attributes = {name: portable(value) for name, value in vars(record).items() if name not in ("args", "exc_info")}
        if record.exc_info and not record.exc_text:
            attributes["exc_text"] = logging.Formatter().formatException(record.exc_info)
        attributes |= {"msg": text, "worker": self._worker, "processName": f"agnoload-worker-{self._worker}"}
        self._say(Logged(attributes))

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        key = (str(message), category, filename, lineno)
        if not _first_time(key, self._seen):
            return
        warning = message if isinstance(message, Warning) else category(message)
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename != filename:
            frame = frame.f_back
        module = frame.f_globals.get("__name__") if frame.f_code.co_filename == filename else None
        self._say(Warned(describe(warning), filename, lineno, module))

    def _say(self, what: Logged | Warned) -> None:
        self._said.append(what)
        if self.keep is not None:
            self.keep(dumps(what))


def heard(pieces: Iterable[bytes]) -> Said:
    """What a worker has said that did not live to answer, as far as it can be read."""
    said: Said = []
    for piece in pieces:
        with contextlib.suppress(*CALLED):
            said.append(pickle.loads(piece))
    return said


class Journal:
    """A loader's side: passes on what its workers said, each distinct warning once."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def replay(self, said: Sequence[Logged | Warned]) -> None:
        """Hand records to the handlers of this process, and give the warnings; a filter may make one an error."""
        for item in said:
            if isinstance(item, Logged):
                record = logging.makeLogRecord(item.attributes)
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)
            else:
                self._warn(item)

    def _warn(self, warned: Warned) -> None:
        if not _first_time((warned.what.name, warned.what.text, warned.filename, warned.lineno), self._seen):
            return
        warning = rebuild(warned.what)
        if not isinstance(warning, Warning):
            warning = UserWarning(str(warning))
        warnings.warn_explicit(warning, type(warning), warned.filename, warned.lineno, warned.module)


def _first_time(key: Any, seen: set[Any]) -> bool:
    if key in seen:
        return False
    if len(seen) >= REMEMBERED:
        seen.clear()
    seen.add(key)
    return True
