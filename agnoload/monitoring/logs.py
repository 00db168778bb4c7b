"""Log records and warnings of workers reach the user's process: records through its handlers, warnings once.

A worker captures what is logged while it loads a batch, and the reply takes the records along; those of a batch that
kills its worker are lost with it. Prints need no relay: a worker writes to the same standard output and error.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TextIO

from agnoload.transport.remote_errors import Described, describe, portable, rebuild

REMEMBERED = 10_000
"""Distinct warnings that are remembered; then the memory is cleared, and each may come once more."""


class LogRecord(NamedTuple):
    """A log record as plain values."""

    attributes: dict[str, Any]


class WarningRecord(NamedTuple):
    """A warning, and the place in the user's code that it is for."""

    warning: Described
    filename: str
    lineno: int
    module: str | None


LogRecords = list[LogRecord | WarningRecord]


class LogSettings(NamedTuple):
    """The levels of a process's loggers and its warning filters, as plain values."""

    level: int
    levels: dict[str, int]
    disabled: int
    filters: list[Any]


def log_settings() -> LogSettings:
    """What a worker must know of this process.

    A filter on a class of some package must not make workers import the package: from the first such filter on, a
    worker lets every warning through, and the filters apply where the warning arrives.
    """
    root = logging.getLogger()
    known = root.manager.loggerDict.copy()  # another thread may be making loggers
    levels = {name: each.level for name, each in known.items() if isinstance(each, logging.Logger) and each.level}
    filters: list[Any] = list(takewhile(lambda entry: entry[2].__module__ == "builtins", warnings.filters))
    if len(filters) < len(warnings.filters):
        filters.append(("always", None, Warning, None, 0))
    return LogSettings(root.level, levels, root.manager.disable, filters)


class WorkerLogCapture(logging.Handler):
    """In a worker: collects log records and warnings until a reply takes them along."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self._worker = worker
        self._records: LogRecords = []
        self._seen: set[Any] = set()

    def install(self, settings: LogSettings | None) -> None:
        """Replace all handlers, also those that a forked process has inherited, and `warnings.showwarning`."""
        root = logging.getLogger()
        for logger in (root, *root.manager.loggerDict.values()):
            if isinstance(logger, logging.Logger):
                logger.handlers.clear()
                logger.propagate = True
        root.addHandler(self)
        warnings.showwarning = self._show_warning
        if settings is not None:
            root.setLevel(settings.level)
            for name, level in settings.levels.items():
                logging.getLogger(name).setLevel(level)
            logging.disable(settings.disabled)
            warnings.resetwarnings()
            warnings.filters[:] = settings.filters  # type: ignore[index]

    def drain(self) -> LogRecords:
        """The records since the last call."""
        records, self._records = self._records, []
        return records

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
        self._records.append(LogRecord(attributes))

    def _show_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if _first_time((str(message), category, filename, lineno), self._seen):
            warning = message if isinstance(message, Warning) else category(message)
            frame = sys._getframe()
            while frame.f_back is not None and frame.f_code.co_filename != filename:
                frame = frame.f_back
            module = frame.f_globals.get("__name__") if frame.f_code.co_filename == filename else None
            self._records.append(WarningRecord(describe(warning), filename, lineno, module))


class WorkerLogRelay:
    """A loader's side: passes on what its workers logged, each distinct warning once."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def replay(self, records: Sequence[LogRecord | WarningRecord]) -> None:
        """Hand records to this process's handlers and give the warnings, which a filter may turn into errors."""
        for record in records:
            if isinstance(record, LogRecord):
                made = logging.makeLogRecord(record.attributes)
                logger = logging.getLogger(made.name)
                if logger.isEnabledFor(made.levelno):
                    logger.handle(made)
            elif _first_time((record.warning.name, record.warning.text, record.filename, record.lineno), self._seen):
                warning = rebuild(record.warning)
                if not isinstance(warning, Warning):
                    warning = UserWarning(str(warning))
                warnings.warn_explicit(warning, type(warning), record.filename, record.lineno, record.module)


def _first_time(key: Any, seen: set[Any]) -> bool:
    if key in seen:
        return False
    if len(seen) >= REMEMBERED:
        seen.clear()
    seen.add(key)
    return True
