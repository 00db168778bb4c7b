"""cloudpickle as it is used here: for what plain pickle cannot name, such as the classes of a script or notebook."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from agnoload.backend import registry
from agnoload.errors import CALLED, add_note
from agnoload.system import free_in_forks

_cloud: Any = cloudpickle.cloudpickle
free_in_forks(_cloud._DYNAMIC_CLASS_TRACKER_LOCK)


def as_array(value: Any) -> Any:
    """Another library's array in the reduced form that pickle takes, NotImplemented for anything else."""
    packed = registry.pack(value)
    return NotImplemented if packed is None else (packed[0], (packed[1],))


# ---------------------------------------------------------------------------------------------------- classes

_learned: set[type] = set()


def learn_classes(classes: Iterable[type]) -> None:
    """In a worker: what has come by value goes back by name, as the very class that it was made from.

    The names are cloudpickle's own, which the class has in both processes; built-in types have none.
    """
    _learned.update(kind for kind in classes if kind in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS)


def class_by_name(value: type) -> Any:
    """A class that this process has learned, in the reduced form that pickle takes; NotImplemented for any other."""
    if value not in _learned:
        return NotImplemented
    return _class_named, (_cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS[value],)


def _class_named(name: str) -> type:
    kind: type = _cloud._DYNAMIC_CLASS_TRACKER_BY_ID[name]
    return kind


def _skeleton(meta: Any, name: str, bases: Any, attributes: dict[str, Any], token: str, extra: Any) -> type:
    """A class that is still to get its attributes.

    A metaclass or `__init_subclass__` that travels by value has run where the class was defined, and what it has
    changed travels too: it does not run again. One of an imported module does, since that module was imported afresh.
    """
    made: type | None = _cloud._DYNAMIC_CLASS_TRACKER_BY_ID.get(token)
    if made is not None:
        return made
    by_value = _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS
    imported = next(kind for kind in meta.__mro__ if kind not in by_value)
    call = meta if imported is meta else functools.partial(imported.__new__, meta)
    above = {kind for base in types.resolve_bases(bases) for kind in base.__mro__ if kind in by_value}
    hooks = {kind: vars(kind)["__init_subclass__"] for kind in above if "__init_subclass__" in vars(kind)}
    try:
        for kind in hooks:  # `type.__new__` would call them
            type.__delattr__(kind, "__init_subclass__")
        made = _cloud._make_skeleton_class(call, name, bases, attributes, token, extra)
    except Exception as error:
        add_note(
            error,
            f"while the class {name} was rebuilt in this process: it is not in a module that can be imported here, so "
            "its inherited metaclass or __init_subclass__ was called again, with an empty class and without keywords. "
            f"Define {name} in a module",
        )
        raise
    finally:
        for kind, hook in hooks.items():
            type.__setattr__(kind, "__init_subclass__", hook)
    return made


# ---------------------------------------------------------------------------------------------------- functions


def _reduce_code(code: types.CodeType) -> Any:
    function, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    # Comparing bytes with text is a warning under `python -b`.
    return function, tuple(code.co_filename if type(a) is str and a == "<dynamic-code>" else a for a in arguments)


def _reduce_method(value: Any) -> Any:
    """Without the lock that a `cached_property` has before Python 3.12, and the weak references that a
    `singledispatchmethod` has in Python 3.13; both are made again with the rest."""
    state = {name: held for name, held in vars(value).items() if name not in ("lock", "_method_cache")}
    return type(value), (value.func,), state


def _reduce_cached_function(value: Any) -> Any:
    """A function under `functools.lru_cache`: elsewhere its cache is empty."""
    found = _cloud._lookup_module_and_qualname(value)
    if found is not None and not _cloud._is_registered_pickle_by_value(found[0]):
        return value.__qualname__
    state = {name: held for name, held in vars(value).items() if name not in ("__wrapped__", "cache_parameters")}
    return _cached, (value.__wrapped__, value.cache_parameters()), state


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


_DISPATCHING = {code for code in functools.singledispatch.__code__.co_consts if isinstance(code, types.CodeType)}


def _dispatcher(registry: Mapping[type, Callable[..., Any]]) -> Any:
    made = functools.singledispatch(registry[object])
    for kind, function in registry.items():
        made.register(kind, function)
    return made


def _reduce_text_file(file: io.TextIOWrapper) -> Any:
    """Only the standard streams, which every process has: of any other file cloudpickle would send what is in it."""
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(f"an open file cannot be pickled: {file!r}")


# ---------------------------------------------------------------------------------------------------- the pickler


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **cloudpickle.Pickler.dispatch_table.maps[0],
    types.CodeType: _reduce_code,
    io.TextIOWrapper: _reduce_text_file,
    functools._lru_cache_wrapper: _reduce_cached_function,
    functools.cached_property: _reduce_method,
    functools.singledispatchmethod: _reduce_method,
    threading.local: lambda _: (threading.local, ()),  # a thread of another process has set nothing in it
}


class Pickler(pickle.Pickler):
    """cloudpickle, with the file names of code that travels by value, so that a worker's traceback shows the lines.

    Not a subclass of its pickler, whose `dispatch_table` is asked for every object and takes longer than most of them.
    """

    _function_reduce = cloudpickle.Pickler._function_reduce
    _dynamic_function_reduce = cloudpickle.Pickler._dynamic_function_reduce
    _function_getnewargs = cloudpickle.Pickler._function_getnewargs

    def __init__(self, stream: Any, protocol: int, **options: Any) -> None:
        super().__init__(stream, protocol, **options)
        self.globals_ref: dict[int, dict[str, Any]] = {}  # for cloudpickle: what functions of one module share

    def reducer_override(self, value: Any) -> Any:
        reduce = _REDUCERS.get(type(value))
        if reduce is not None:
            return reduce(value)
        if isinstance(value, type) and value in _learned:
            return class_by_name(value)
        if isinstance(value, (type, types.FunctionType)):
            return self.reduce_definition(value)
        # The generators behind `random` and `np.random`: the other process has its own under these names.
        if value is random._inst:
            return "_inst"
        if value is np.random.mtrand._rand:
            return "_rand"
        return as_array(value)

    def reduce_definition(self, value: type | types.FunctionType) -> Any:
        """A class or function in the reduced form that pickle takes; NotImplemented if it goes by name."""
        # As plain pickle does: cloudpickle would send a copy of what lies in a module that is not imported yet.
        if isinstance(value.__module__, str) and value.__module__ not in sys.modules:
            with suppress(*CALLED):
                importlib.import_module(value.__module__)
        reduced = cloudpickle.Pickler.reducer_override(self, value)
        if reduced is NotImplemented:
            return reduced
        if isinstance(value, types.FunctionType) and value.__code__ in _DISPATCHING:
            return _dispatcher, (dict(value.registry),)  # type: ignore[attr-defined]
        if reduced[0] is not _cloud._make_skeleton_class:
            return reduced
        _, (meta, name, bases, attributes, *others), *state = reduced
        slots = vars(value).get("__slots__")
        # Slots cannot be added later. A `NamedTuple` gives itself its own, and refuses any other.
        if slots is not None and NamedTuple not in getattr(value, "__orig_bases__", ()):
            attributes = {**attributes, "__slots__": slots}
        return _skeleton, (meta, name, bases, attributes, *others), *state


def dumps(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle `value`, by value where it has no name that another process could import."""
    stream = io.BytesIO()
    Pickler(stream, 5, buffer_callback=buffer_callback).dump(value)
    return stream.getvalue()
