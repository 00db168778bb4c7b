"""cloudpickle as it is used here: for what plain pickle cannot name, such as the classes of a script or notebook."""

from __future__ import annotations

import io
import pickle
import types
import uuid
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy.typing as npt

from agnoload.memory import NUMPYS_OWN, PYTHONS_OWN


def _code(code: types.CodeType) -> Any:
    function, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    named = tuple(code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)
    return function, named


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


def _with_slots(value: type, reduced: Any) -> Any:
    """A class as cloudpickle reduces it, with the `__slots__` that it must be made with: later they are but a name.

    A `NamedTuple` gives them to itself, and refuses any other.
    """
    slots = value.__dict__.get("__slots__")
    if (
        slots is None
        or NamedTuple in getattr(value, "__orig_bases__", ())
        or not isinstance(reduced, tuple)
        or reduced[0].__name__ != "_make_skeleton_class"
    ):
        return reduced
    function, (meta, name, bases, attributes, *others), *state = reduced
    return function, (meta, name, bases, {**attributes, "__slots__": slots}, *others), *state


Packed = tuple[Callable[[npt.NDArray[Any]], Any], npt.NDArray[Any]]
_packer: Callable[[Any], Packed | None] | None = None


def set_packer(function: Callable[[Any], Packed | None] | None) -> None:
    """Give the way in which other libraries' arrays travel: as a NumPy array, and what makes them again of it.

    The function is called with whatever is pickled that is no builtin, and gives None for what is not its own.
    """
    global _packer
    _packer = function


def as_array(value: Any) -> Any:
    """Another library's array in the reduced form that pickle takes, NotImplemented for anything else."""
    packed = None if _packer is None else _packer(value)
    return NotImplemented if packed is None else (packed[0], (packed[1],))


def own_by_name(value: Any) -> Any:
    """The generator behind `random` or `np.random`, in the reduced form that pickle takes: the other process has its
    own. NotImplemented for anything else."""
    if value is PYTHONS_OWN:
        return _own, ("random",)
    return (_own, ("numpy",)) if value is NUMPYS_OWN else NotImplemented


def _own(module: str) -> Any:
    return PYTHONS_OWN if module == "random" else NUMPYS_OWN


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the file names of code that travels by value, so that a worker's traceback shows the lines."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _code, memoryview: _view}, cloudpickle.Pickler.dispatch_table
    )
    classes: dict[str, type] | None = None
    """Collects the classes that travel by value, if given, each under a name for `learn_classes`."""
    alone = False
    """A class itself is to be written, not the way to it."""

    def reducer_override(self, value: Any) -> Any:
        reduced = own_by_name(value)
        if reduced is NotImplemented:
            reduced = as_array(value)
        if reduced is not NotImplemented:
            return reduced
        reduced = super().reducer_override(value)
        if isinstance(value, type):
            reduced = _with_slots(value, reduced)
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
    return NotImplemented if name is None else (_class, (name,))


def _class(name: str) -> type:
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
