"""Exceptions on their way between processes: type, arguments and attributes stay, the traceback travels as text."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

from agnoload.errors import CALLED, add_note, attributes_of, text_of
from agnoload.transport import pickling


class Described(NamedTuple):
    """An exception in a form that always pickles; each of the first two is the fallback of the one before it."""

    whole: bytes | None
    """The pickled exception, if that comes back as it went."""
    parts: bytes | None
    """The pickled (class, arguments, attributes, notes): for constructors that pickle cannot call."""
    members: tuple[Described, ...] | None
    """Of an exception group: its exceptions, each by itself."""
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
        add_note(error, where)
    members = tuple(map(describe, error.exceptions)) if isinstance(error, BaseExceptionGroup) else None
    whole = _whole(error) if members is None else None
    return Described(whole, _parts(error), members, type(error).__qualname__, text_of(error), _trace(error))


def restore(described: Described, *notes: str) -> BaseException:
    """The exception again, its worker's traceback as its cause, with notes added."""
    error = rebuild(described)
    object.__setattr__(error, "__cause__", RemoteTraceback(described.trace))  # a frozen class lets nobody set it
    for note in notes:
        add_note(error, note)
    return error


def rebuild(described: Described) -> BaseException:
    """The exception alone; a `RuntimeError` with its name and text where it cannot be made again."""
    for make in (_from_whole, _from_parts):
        try:
            error = make(described)
        except CALLED:
            continue
        if isinstance(error, BaseException):
            return error
    return RuntimeError(f"{described.name}: {described.text}")


def portable(value: Any) -> Any:
    """A value that cannot travel is shown as its text."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    try:
        pickle.loads(dumps(value))
    except CALLED:
        return _repr(value)
    return value


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except CALLED:
        return f"<{type(value).__qualname__}>"


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except CALLED:  # a text that cannot be made, somewhere in the chain
        return "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__qualname__}: {text_of(error)}\n"


def dumps(value: Any) -> bytes:
    """As a pickle, by value where need be."""
    try:
        return pickle.dumps(value, 5)
    except CALLED:
        return pickling.dumps(value)


def _whole(error: BaseException) -> bytes | None:
    try:
        data = dumps(error)
        back = pickle.loads(data)
        same = attributes_of(back).keys() == attributes_of(error).keys()
        same = same and type(back).__qualname__ == type(error).__qualname__ and _repr(back.args) == _repr(error.args)
    except CALLED:
        return None
    return data if same and text_of(back) == text_of(error) else None


def _parts(error: BaseException) -> bytes | None:
    args = error.args
    if isinstance(error, BaseExceptionGroup):
        args = (error.message,)
    elif isinstance(error, OSError):  # its file names are not among its arguments
        args = (*args, *error.__reduce__()[1][len(args) :]) if len(args) == 2 else args
    try:
        attributes = {name: portable(value) for name, value in attributes_of(error).items()}
        data = dumps((type(error), tuple(portable(value) for value in args), attributes))
        pickle.loads(data)
    except CALLED:
        return None
    return data


def _from_whole(described: Described) -> Any:
    return pickle.loads(described.whole) if described.whole is not None else None


def _from_parts(described: Described) -> Any:
    if described.parts is None:
        return None
    kind, args, attributes = pickle.loads(described.parts)
    if described.members is not None:
        args = (*args, [rebuild(member) for member in described.members])
    # Around the constructors of its own, which may want anything; the built-in base keeps more than arguments and
    # attributes: errno, the code of SystemExit, the members of a group.
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    made: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(made, *args)
    attributes_of(made).update(attributes)
    return made
