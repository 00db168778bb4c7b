"""cloudpickle as it is used here: for what plain pickle cannot name, such as the classes of a script or notebook."""

from __future__ import annotations

import io
import pickle
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle


def _code(code: types.CodeType) -> Any:
    function, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    named = tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)
    return function, named


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the file names of code that travels by value, so that a worker's traceback shows the lines."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: _code}, cloudpickle.Pickler.dispatch_table)


def dumps(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle `value`, by value where it has no name that another process could import."""
    stream = io.BytesIO()
    Pickler(stream, 5, buffer_callback=buffer_callback).dump(value)
    return stream.getvalue()
