"""cloudpickle as it is used here: for what plain pickle cannot name, such as the classes of a script or notebook."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import threading
import types
import uuid
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy as np

from agnoload.backend import registry
from agnoload.errors import CALLED, add_note
from agnoload.seeding import NUMPY_GLOBAL, PYTHON_GLOBAL
from agnoload.system import free_in_forks
from agnoload.transport import spawning
from agnoload.transport.mapped import MappedFiles

_cloud: Any = cloudpickle.cloudpickle
free_in_forks(_cloud._DYNAMIC_CLASS_TRACKER_LOCK)


def _code(code: types.CodeType) -> Any:
    function, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    # Comparing bytes with text is a warning under `python -b`.
    return function, tuple(code.co_filename if type(a) is str and a == "<dynamic-code>" else a for a in arguments)


def _view(view: memoryview) -> Any:
    """A memoryview over a copy, where cloudpickle would make bytes of it."""
    shape = view.shape if view.ndim != 1 else None
    data = view.tobytes()
    kept = data if view.readonly else bytearray(data)
    try:
        _seen(kept, view.format, shape)
    except (TypeError, ValueError):  # a format, or a shape, that no memoryview can be given
        return bytes, (data,)
    return _seen, (kept, view.format, shape)


def _seen(data: bytes | bytearray, form: str, shape: tuple[int, ...] | None) -> memoryview:
    bare: Any = memoryview(data)
    view: memoryview = bare.cast(form) if shape is None else bare.cast(form, shape)
    return view


def _class(value: type, reduced: Any) -> Any:
    """A class as cloudpickle reduces it, for `_skeleton`, with the `__slots__` that cannot be added later.

    A `NamedTuple` gives them to itself, and refuses any other.
    """
    if not isinstance(reduced, tuple) or reduced[0] is not _cloud._make_skeleton_class:
        return reduced
    _, (meta, name, bases, attributes, *others), *state = reduced
    slots = value.__dict__.get("__slots__")
    if slots is not None and NamedTuple not in getattr(value, "__orig_bases__", ()):
        attributes = {**attributes, "__slots__": slots}
    return _skeleton, (meta, name, bases, attributes, *others), *state


def _skeleton(meta: Any, name: str, bases: Any, attributes: dict[str, Any], token: str, extra: Any) -> type:
    """A class that is still to get its attributes.

    A metaclass or `__init_subclass__` that travels by value has run where the class was defined, and what it has
    changed travels too: it does not run again. One of an imported module does, since that module was imported afresh.
    """
    made: type | None = _cloud._DYNAMIC_CLASS_TRACKER_BY_ID.get(token)
    if made is not None:
        return made
    imported = next(kind for kind in meta.__mro__ if kind not in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS)
    call = meta if imported is meta else functools.partial(imported.__new__, meta)
    try:
        with _hooks_removed(types.resolve_bases(bases)):
            made = _cloud._make_skeleton_class(call, name, bases, attributes, token, extra)
    except Exception as error:
        add_note(
            error,
            f"while the class {name} was rebuilt in this process: it is not in a module that can be imported here, so "
            "the metaclass or __init_subclass__ that it inherits was called again, with an empty class and without "
            f"keywords. Define {name} in a module",
        )
        raise
    return made


@contextmanager
def _hooks_removed(bases: tuple[type, ...]) -> Iterator[None]:
    by_value = {kind for base in bases for kind in base.__mro__ if kind in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS}
    hooks = {kind: vars(kind)["__init_subclass__"] for kind in by_value if "__init_subclass__" in vars(kind)}
    for kind in hooks:
        type.__delattr__(kind, "__init_subclass__")
    try:
        yield
    finally:
        for kind, hook in hooks.items():
            type.__setattr__(kind, "__init_subclass__", hook)


def _cached_function(value: Any) -> Any:
    """A function under `functools.lru_cache`: elsewhere its cache is empty."""
    found = _cloud._lookup_module_and_qualname(value)
    if found is not None and not _cloud._is_registered_pickle_by_value(found[0]):
        return value.__qualname__
    parameters = value.cache_parameters()
    state = {name: held for name, held in vars(value).items() if name not in ("__wrapped__", "cache_parameters")}
    return _cached, (value.__wrapped__, parameters["maxsize"], parameters["typed"]), state


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _cached_property(value: functools.cached_property[Any]) -> Any:
    """Without the lock that it has before Python 3.12."""
    return type(value), (value.func,), {name: held for name, held in vars(value).items() if name != "lock"}


def _generic_method(value: functools.singledispatchmethod[Any]) -> Any:
    """Without the cache of weak references that it has in Python 3.13."""
    return type(value), (value.func,), {"dispatcher": value.dispatcher}


_DISPATCHING = {code for code in functools.singledispatch.__code__.co_consts if isinstance(code, types.CodeType)}


def _dispatcher(registry: Mapping[type, Callable[..., Any]]) -> Any:
    made = functools.singledispatch(registry[object])
    for kind, function in registry.items():
        made.register(kind, function)
    return made


def _import_home(value: Any) -> None:
    """Import the module that a class or function names, as plain pickle does: cloudpickle looks only at those that are
    imported already, and would send a copy."""
    module = getattr(value, "__module__", None)
    if isinstance(module, str) and module not in sys.modules:
        with suppress(*CALLED):
            importlib.import_module(module)


def _text_file(file: io.TextIOWrapper) -> Any:
    """Only the standard streams, which every process has: of any other file cloudpickle would send what is in it."""
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(f"an open file cannot be pickled: {file!r}")


def as_array(value: Any) -> Any:
    """Another library's array in the reduced form that pickle takes, NotImplemented for anything else."""
    packed = registry.pack(value)
    return NotImplemented if packed is None else (packed[0], (packed[1],))


def own_by_name(value: Any) -> Any:
    """The generator behind `random` or `np.random`, in the reduced form that pickle takes: the other process has its
    own. NotImplemented for anything else."""
    if value is PYTHON_GLOBAL:
        return _own, ("random",)
    return (_own, ("numpy",)) if value is NUMPY_GLOBAL else NotImplemented


def _own(module: str) -> Any:
    return PYTHON_GLOBAL if module == "random" else NUMPY_GLOBAL


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the file names of code that travels by value, so that a worker's traceback shows the lines."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {
            types.CodeType: _code,
            memoryview: _view,
            io.TextIOWrapper: _text_file,
            functools._lru_cache_wrapper: _cached_function,
            functools.cached_property: _cached_property,
            functools.singledispatchmethod: _generic_method,
            threading.local: lambda _: (threading.local, ()),  # to a thread of another process it is empty anyway
        },
        cloudpickle.Pickler.dispatch_table,
    )
    classes: dict[str, type] | None = None
    """Collects the classes that travel by value, if given, each under a name for `learn_classes`."""
    modules: dict[str, None] | None = None
    """Collects the modules that are imported for what travels by name, if given."""
    alone = False
    """A class itself is to be written, not the way to it."""
    files: MappedFiles | None = None
    """For a worker: what lies in mapped files goes as its place there, and objects of `multiprocessing` go too."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return NotImplemented if self.files is None else self.files.reduce(value)
        reduced = own_by_name(value)
        if reduced is NotImplemented:
            reduced = as_array(value)
        if reduced is NotImplemented and self.files is not None:
            reduced = spawning.reduce(value)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(value, (type, types.FunctionType)):
            _import_home(value)
        reduced = super().reducer_override(value)
        if self.modules is not None and isinstance(value, types.ModuleType):
            self.modules[value.__name__] = None
        elif self.modules is not None and reduced is NotImplemented and isinstance(value, (type, types.FunctionType)):
            self.modules[str(value.__module__)] = None
        if isinstance(value, type):
            reduced = _class(value, reduced)
        elif reduced is not NotImplemented and value.__code__ in _DISPATCHING:
            return _dispatcher, (dict(value.registry),)
        if self.classes is not None and reduced is not NotImplemented and isinstance(value, type):
            token = uuid.uuid4().hex
            _by_name[token] = self.classes[token] = value
        elif _inherits and reduced is not NotImplemented and isinstance(value, type) and not self.alone:
            return _inherited, (id(value), value.__module__, value.__qualname__, _alone(value))
        return reduced


_by_name: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_names: dict[type, str] = {}


def learn_classes(classes: dict[str, type]) -> None:
    """In a worker: what has come by value goes back by name, as the very class that it was made from."""
    _names.update({value: name for name, value in classes.items()})


def class_by_name(value: type) -> Any:
    """A class that this process has learnt, in the reduced form that pickle takes; NotImplemented for any other."""
    name = _names.get(value)
    return NotImplemented if name is None else (_class_named, (name,))


def _class_named(name: str) -> type:
    return _by_name[name]


_inherits = False
_found: weakref.WeakValueDictionary[tuple[int, str, str], type] = weakref.WeakValueDictionary()
_written: weakref.WeakKeyDictionary[type, bytes | None] = weakref.WeakKeyDictionary()


def inherit_classes() -> None:
    """In a forked process: its classes are those of the parent, which finds them again by their addresses."""
    global _inherits
    _inherits = True


def _alone(value: type) -> bytes | None:
    """A class for a process that does not have it; None if it cannot travel."""
    if value not in _written:
        stream = io.BytesIO()
        pickler = Pickler(stream, 5)
        pickler.alone = True
        try:
            pickler.dump(value)
            _written[value] = stream.getvalue()
        except Exception:
            _written[value] = None
    return _written[value]


def _inherited(address: int, module: str, name: str, alone: bytes | None) -> type:
    """The living class that a fork of this process means, or a copy of one that was made there."""
    key = (address, module, name)
    found = _found.get(key) or next((kind for kind in _living() if id(kind) == address), None)
    if found is not None and (found.__module__, found.__qualname__) == (module, name):
        _found[key] = found
        return found
    if alone is None:
        raise pickle.UnpicklingError(f"the class {module}.{name} cannot travel")
    copy: type = pickle.loads(alone)  # not kept under its address: there the fork may have another one next time
    return copy


def _living() -> Iterator[type]:
    """Every class of this process."""
    seen: set[type] = set()
    waiting: list[type] = [object]
    while waiting:
        kind: type
        for kind in type.__subclasses__(waiting.pop()):
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
                yield kind


def dumps(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickle `value`, by value where it has no name that another process could import."""
    stream = io.BytesIO()
    Pickler(stream, 5, buffer_callback=buffer_callback).dump(value)
    return stream.getvalue()
