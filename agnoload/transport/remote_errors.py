"""Exceptions on their way between processes: type, arguments and attributes stay, the traceback travels as text."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from agnoload.errors import CALLED, add_note, attributes_of, text_of
from agnoload.transport import pickling


class Described(NamedTuple):
    """An exception in a form that always pickles."""

    pickled: bytes | None
    """None for a class that cannot travel."""
    name: str
    text: str
    trace: str


class RemoteTraceback(Exception):
    """The traceback of a worker, shown as the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class _Call:
    """Becomes, when it is unpickled, what a function makes of some arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def describe(error: BaseException, where: str = "") -> Described:
    """An exception as data; `where` is added as a note."""
    if where:
        add_note(error, where)
    try:
        trace = "".join(traceback.format_exception(error))
    except CALLED:  # an exception in the chain has no text
        trace = "".join(traceback.format_tb(error.__traceback__)) + f"{type(error).__qualname__}: {text_of(error)}\n"
    return Described(_pickled(error), type(error).__qualname__, text_of(error), trace)


def restore(described: Described, *notes: str) -> BaseException:
    """The exception again, its worker's traceback as its cause, with notes added."""
    error = rebuild(described)
    object.__setattr__(error, "__cause__", RemoteTraceback(described.trace))  # a frozen class lets nobody set it
    for note in notes:
        add_note(error, note)
    return error


def rebuild(described: Described) -> BaseException:
    """The exception alone; a `RuntimeError` with its name and text where it cannot be made again."""
    with suppress(*CALLED):
        error = pickle.loads(described.pickled) if described.pickled is not None else None
        if isinstance(error, BaseException):
            return error
    return RuntimeError(f"{described.name}: {described.text}")


def portable(value: Any) -> Any:
    """The value, or its text if it cannot travel."""
    if type(value) in (str, int, float, bool, type(None)):
        return value
    try:
        pickle.loads(dumps(value))
    except CALLED:
        return _repr(value)
    return value


def dumps(value: Any) -> bytes:
    """As a pickle, by value where need be."""
    try:
        return pickle.dumps(value, 5)
    except CALLED:
        return pickling.dumps(value)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except CALLED:
        return f"<{type(value).__qualname__}>"


def _pickled(error: BaseException) -> bytes | None:
    """A pickle of the exception if that comes back as it went, else one that makes it of its parts."""
    if not isinstance(error, BaseExceptionGroup):  # equal texts would not show that its members came back
        with suppress(*CALLED):
            data = dumps(error)
            back = pickle.loads(data)
            same = attributes_of(back).keys() == attributes_of(error).keys()
            same = (
                same and type(back).__qualname__ == type(error).__qualname__ and _repr(back.args) == _repr(error.args)
            )
            if same and text_of(back) == text_of(error):
                return data
    with suppress(*CALLED):
        if isinstance(error, BaseExceptionGroup):  # each member in its own best way
            args: tuple[Any, ...] = (error.message, [_Call(rebuild, describe(member)) for member in error.exceptions])
        else:
            args = error.args
            if isinstance(error, OSError) and len(args) == 2:  # its file names are not among its arguments
                args = (*args, *error.__reduce__()[1][2:])
            args = tuple(map(portable, args))
        attributes = {name: portable(value) for name, value in attributes_of(error).items()}
        data = dumps(_Call(_made_of_parts, type(error), args, attributes))
        pickle.loads(data)
        return data
    return None


def _made_of_parts(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    # Around the constructors of its own, which may want anything; the built-in base keeps more than arguments and
    # attributes: errno, the code of SystemExit, the members of a group.
    builtin: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    made: BaseException = builtin.__new__(kind, *args)
    builtin.__init__(made, *args)
    attributes_of(made).update(attributes)
    return made
