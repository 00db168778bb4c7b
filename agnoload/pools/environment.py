"""What makes a worker look like the process that it works for: its paths, settings and signals.

`parent_environment` reads them in the parent. They travel at the head of the payload, and `apply_environment` puts them
in place before the worker unpickles anything of the user's.
"""

from __future__ import annotations

import contextlib
import decimal
import locale
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from agnoload.backend import registry
from agnoload.inspect import Values, plain_values
from agnoload.monitoring.logs import LogSettings, log_settings

THREADS = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""What workers have in their environment before NumPy loads: the workers themselves are the parallelism."""

GROUP_SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a terminal or a scheduler sends to all processes of a program, besides SIGINT."""


class ImportEnvironment(NamedTuple):
    """What must be in place before a process imports the user's modules."""

    path: list[str]
    argv: list[str]
    environ: dict[str, str]
    directory: str
    errstate: Any
    decimal: decimal.Context
    locale: str


class ParentEnvironment(NamedTuple):
    """All settings of the parent that a worker takes over, as plain values."""

    imports: ImportEnvironment
    logs: LogSettings | None
    frameworks: bytes
    """Pickled functions that give frameworks the parent's settings; unpickling them imports the frameworks."""
    values: Values
    """Plain values in the user's modules; the worker compares them with those that its own imports have."""
    signals: dict[int, bool]
    """What `handled_signals` says."""


def import_environment(variables: Mapping[str, str]) -> ImportEnvironment:
    """This process's settings; `variables` are more for `os.environ`."""
    context = decimal.getcontext().copy()
    context.clear_flags()
    return ImportEnvironment(
        path=search_path(),
        argv=list(sys.argv),
        environ={**os.environ, **THREADS, **variables},
        directory=directory(),
        errstate=np.geterr(),
        decimal=context,
        locale=locale.setlocale(locale.LC_ALL),
    )


def parent_environment(variables: Mapping[str, str], parts: Mapping[str, Any]) -> ParentEnvironment:
    """This process's settings; `parts` are the user's objects that the worker will run."""
    return ParentEnvironment(
        imports=import_environment(variables),
        logs=log_settings(),
        frameworks=pickle.dumps(registry.framework_settings()),
        values=plain_values(parts),
        signals=handled_signals(),
    )


def apply_environment(parent: ImportEnvironment) -> None:
    """Put the parent's settings in place; those of a fork server are as old as the server."""
    sys.path[:] = parent.path
    sys.argv[:] = parent.argv
    os.environ.clear()
    os.environ.update(parent.environ)
    try:
        os.chdir(parent.directory)
    except OSError:  # somebody has removed it since
        os.chdir("/")
    np.seterr(**parent.errstate)
    decimal.setcontext(parent.decimal)
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, parent.locale)
    sys.modules["__main__"].__loader__ = None  # else its repr, as in errors of pickle, warns before Python 3.12


def directory() -> str:
    """The working directory; the root where somebody has removed it."""
    try:
        return os.getcwd()
    except OSError:
        return "/"


def search_path() -> list[str]:
    """`sys.path` for another process, wherever that one works."""
    return [str(entry) or directory() for entry in sys.path if isinstance(entry, str)]  # as the import system does


def handled_signals() -> dict[int, bool]:
    """The signals to the whole program that this process handles, blocks or ignores; True for those that it ignores."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in GROUP_SIGNALS}
    return {n: h is signal.SIG_IGN for n, h in handlers.items() if h is not signal.SIG_DFL or n in blocked}


def mute_signals(handled: Mapping[int, bool], numbers: Iterable[int]) -> None:
    """Let the signals that the parent handles do nothing in this worker: they are the parent's to answer.

    A handler that does nothing is used instead of SIG_IGN, because programs that a sample starts would inherit SIG_IGN.
    """
    for number in numbers:
        ignored = handled.get(number)
        kind = signal.SIG_DFL if ignored is None else signal.SIG_IGN if ignored else lambda *_: None
        signal.signal(number, kind)
        signal.siginterrupt(number, False)
