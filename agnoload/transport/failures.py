"""Exceptions on their way between processes: type, arguments and attributes stay, the traceback travels as text."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

from agnoload.transport import byvalue


class Described(NamedTuple):
    """An exception in a form that always pickles; each field is the fallback of the one before it."""

    whole: bytes | None
    """The pickled exception, if that comes back as it went."""
    parts: bytes | None
    """The pickled (class, arguments, attributes): for constructors that pickle cannot call."""
    name: str
    text: str
    trace: str


class RemoteTraceback(Exception):
    """The traceback of a worker, shown as the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def describe(error: BaseException, where: str = "") -> Described:
    """An exception as data; `where` is added as a note."""
    if where:
        error.add_note(where)
    trace = "".join(traceback.format_exception(error))
    return Described(_whole(error), _parts(error), type(error).__qualname__, _text(error), trace)


def restore(described: Described, *notes: str) -> BaseException:
    """The exception again, its worker's traceback as its cause, with notes added."""
    error = _rebuild(described)
    error.__cause__ = RemoteTraceback(described.trace)
    for note in notes:
        error.add_note(note)
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its text cannot be made: {broken!r}>"


def _dumps(value: Any) -> bytes:
    try:
        return pickle.dumps(value, 5)
    except Exception:
        return byvalue.dumps(value)


def _whole(error: BaseException) -> bytes | None:
    try:
        data = _dumps(error)
        back = pickle.loads(data)
    except Exception:
        return None
    same = type(back).__qualname__ == type(error).__qualname__ and repr(back.args) == repr(error.args)
    return data if same and _text(back) == _text(error) else None


def _parts(error: BaseException) -> bytes | None:
    attributes = {name: _portable(value) for name, value in error.__dict__.items()}
    try:
        data = _dumps((type(error), tuple(_portable(value) for value in error.args), attributes))
        pickle.loads(data)
    except Exception:
        return None
    return data


def _portable(value: Any) -> Any:
    """A value that cannot travel is shown as its text."""
    try:
        pickle.loads(_dumps(value))
    except Exception:
        return repr(value)
    return value


def _rebuild(described: Described) -> BaseException:
    if described.whole is not None:
        try:
            error = pickle.loads(described.whole)
        except Exception:
            error = None
        if isinstance(error, BaseException):
            return error
    if described.parts is not None:
        try:
            kind, args, attributes = pickle.loads(described.parts)
            made: BaseException = kind.__new__(kind, *args)
            made.args = args
            made.__dict__.update(attributes)
        except Exception:
            return RuntimeError(f"{described.name}: {described.text}")
        return made
    return RuntimeError(f"{described.name}: {described.text}")
