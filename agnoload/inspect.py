"""What the user's objects are made of: one walk over them, which runs none of their code.

It finds generators, long containers, caches, what cannot be pickled, and values that were set in modules.
"""

from __future__ import annotations

import functools
import sys
import types
from _io import _IOBase  # `io.IOBase` is an abstract class: each check against it runs Python code
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

LIMIT = 4096
"""The most objects that are visited; a usual dataset has a few dozen."""
NEAR = 512
"""The most classes and functions among them, and the most objects that a look at the nearest visits: those farther away
belong to a framework."""
LONG = 256
"""A container with more entries holds samples, not parts of a dataset: only its first entry is visited."""

_LEAVES = (
    *(str, bytes, int, float, complex, np.generic, types.ModuleType, types.CodeType, type(None), _IOBase),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_LOADERS = ("agnoload.loader", "agnoload.iterator")
"""A loader within a dataset, and its iterator: they seed what they draw from by themselves."""
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_CODE = (type, types.FunctionType)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
"""Such as `rng.normal`, of a generator."""


class Visited(NamedTuple):
    """An object and the path to it."""

    path: str
    thing: Any
    one_of_many: bool = False
    """It lies in the first entry of a long container; the other entries were not visited."""


def walk_objects(roots: Mapping[str, Any]) -> Iterator[Visited]:
    """Every object that some objects hold, once, near ones first, in an order that is the same in every process.

    >>> class Noisy: ...
    >>> noisy = Noisy()
    >>> noisy.scale = [3]
    >>> [path for path, thing, _ in walk_objects({"dataset": noisy}) if thing is noisy.scale]
    ['dataset.scale']
    """
    waiting = deque(Visited(path, thing) for path, thing in roots.items())
    seen: dict[int, Any] = {}
    code = 0
    while waiting and len(seen) < LIMIT:
        path, thing, one_of_many = visited = waiting.popleft()
        kind = type(thing)  # not isinstance, which believes an object that pretends to be of another class
        if id(thing) in seen or issubclass(kind, _LEAVES):
            continue
        if issubclass(kind, _CODE):
            code += 1
            if code > NEAR:
                continue
        seen[id(thing)] = thing
        yield visited
        long = issubclass(kind, _CONTAINERS) and length_of(thing) > LONG
        for step, part in islice(parts_of(thing), 1 if long else None):
            waiting.append(Visited(path + step, part, one_of_many or long))


def parts_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """What an object is made of, each part with the end of its path: entries, attributes, slots, and its class; of a
    function the variables that it closes over, its default values, and the global variables that its code names.
    """
    kind = type(thing)
    if issubclass(kind, _LEAVES) or kind.__module__ in _LOADERS:
        return
    if issubclass(kind, _CONTAINERS):
        base = _base_of(thing)
        entries: Iterable[tuple[Any, Any]] = dict.items(thing) if base is dict else enumerate(base.__iter__(thing))
        with suppress(RuntimeError):  # another thread changes it: a long one ends here, others are read at once
            for key, part in list(entries) if length_of(thing) <= LIMIT else entries:
                has_key = type(key) in (str, int) and base not in (set, frozenset)
                yield f"[{key!r}]" if has_key else "[...]", part
    elif issubclass(kind, types.FunctionType):
        yield from _parts_of_function(thing)
    elif issubclass(kind, type):
        for base in thing.__mro__:
            if not _needs_no_visit(str(base.__module__)):
                yield from ((f".{name}", part) for name, part in dict(vars(base)).items())
    else:
        with suppress(AttributeError):
            attributes = object.__getattribute__(thing, "__dict__")
            yield from ((f".{name}", part) for name, part in dict(attributes).items())
        for base in kind.__mro__:
            for name, slot in dict(vars(base)).items():
                if type(slot) is types.MemberDescriptorType or (name == "__self__" and base in _BOUND):
                    with suppress(AttributeError):  # an empty slot
                        yield f".{name}", slot.__get__(thing)
        yield "", kind


def _base_of(container: Any) -> Any:
    """The built-in class of a container: its methods are not the user's."""
    return next(base for base in _CONTAINERS if issubclass(type(container), base))


def length_of(container: Any) -> int:
    length: int = _base_of(container).__len__(container)
    return length


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # an empty cell
            yield f".{name}", cell.cell_contents
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    if _needs_no_visit(function.__globals__.get("__name__", "")):
        return
    names = _names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        yield f".{name}", value
        if type(value) is types.ModuleType and not _needs_no_visit(value.__name__):
            yield from ((f".{name}.{inner}", vars(value)[inner]) for inner in names if inner in vars(value))


def _names(code: types.CodeType) -> dict[str, None]:
    """The names that a piece of code, and what is defined inside of it, looks up."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


@functools.cache
def _needs_no_visit(module: str) -> bool:
    """Whether a module is Python's, NumPy's or this library's: its code holds nothing of the user's."""
    root = module.partition(".")[0]
    return root in ("numpy", "agnoload") or (root in sys.stdlib_module_names and root != "__main__")


def find_large_lists(dataset: Any, limit: int = 100_000) -> list[str]:
    """The paths of the containers within a dataset that hold more than `limit` Python objects.

    Reading such a container changes the reference count inside each object, so memory that workers shared with their
    parent becomes their own, page by page.

    >>> find_large_lists([0] * 11, limit=10)
    ['dataset']
    """
    found = []
    for path, thing, _ in walk_objects({"dataset": dataset}):
        if issubclass(type(thing), np.ndarray):
            objects = thing.size if thing.dtype.hasobject else 0
        else:
            objects = length_of(thing) if issubclass(type(thing), _CONTAINERS) else 0
        if objects > limit:
            found.append(path)
    return found


def modules_of(roots: Mapping[str, Any], is_importable: Callable[[str], bool]) -> list[str]:
    """The modules that a process imports when it unpickles some objects, as far as a look at the nearest of them tells.

    These are the modules of their classes and functions. Of what no other process can import, such as a script, they
    are those that its functions name, and of another file of the user's those at its top, first: so each can be tried
    by itself.
    """
    found: dict[str, None] = {}
    for _, thing, _ in islice(walk_objects(roots), NEAR):
        is_class = issubclass(type(thing), type)
        code = type(thing) in (types.FunctionType, types.BuiltinFunctionType)
        for made in thing.__mro__ if is_class else [thing] if code else ():
            name = vars(made).get("__module__") if is_class else made.__module__
            if not isinstance(name, str) or type(module := sys.modules.get(name)) is not types.ModuleType:
                continue
            if "<locals>" not in made.__qualname__ and name not in ("__main__", "__mp_main__") and is_importable(name):
                if _is_users(name):
                    found |= _modules_in({key: value for key, value in vars(module).items() if key.isidentifier()})
                found[name] = None
            elif type(thing) is types.FunctionType:
                found |= _modules_in({key: thing.__globals__.get(key) for key in _names(thing.__code__)})
    return [name for name in found if is_importable(name)]


def _modules_in(values: Mapping[str, Any]) -> dict[str, None]:
    return {value.__name__: None for value in values.values() if type(value) is types.ModuleType}


# ---------------------------------------------------------------------------------------------- values of modules

_PLAIN = (int, float, complex, bool, str, bytes, type(None))

Values = dict[tuple[str, str], Any]
"""By module and name there, such as `("conf", "SIZE")` or `("conf", "Options.size")`."""


def plain_values(roots: Mapping[str, Any]) -> Values:
    """Numbers, texts and the like in the user's modules, and in classes there, under names that the objects' code uses.

    The program may have set them since the import; another process, which imports the modules by itself, does not see
    that.
    """
    found: Values = {}
    for _, thing, _ in islice(walk_objects(roots), NEAR):
        if type(thing) is types.FunctionType:
            names = _names(thing.__code__)
            for holder in (sys.modules.get(thing.__module__), *map(thing.__globals__.get, names)):
                found |= _plain_values_of(holder, names)
        else:  # the classes of objects; one that code merely names is looked at for the names in that code
            for base in type(thing).__mro__:
                found |= _plain_values_of(base, vars(base))
    return found


def _plain_values_of(holder: Any, names: Mapping[str, Any]) -> Values:
    if type(holder) is types.ModuleType:
        module, prefix = holder.__name__, ""
    elif issubclass(type(holder), type):
        module, prefix = holder.__module__, f"{holder.__qualname__}."
    else:
        return {}
    if not _is_users(module) or "<locals>" in prefix:
        return {}
    values = {name: vars(holder)[name] for name in list(names) if name in vars(holder) and name[0] != "_"}
    return {(module, prefix + name): value for name, value in values.items() if _is_plain(value)}


def _is_users(module: Any) -> bool:
    """Whether it is a file of the user's own that other processes import, not a script and not an installed package."""
    if not isinstance(module, str) or module in ("__main__", "__mp_main__") or _needs_no_visit(module):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(path, str) and not any(f"{kind}-packages" in path for kind in ("site", "dist"))


def specs_of_users_files() -> dict[str, Any]:
    """The import system's note about each of the user's own files that is imported; `importlib.reload`, or another
    import after the module was dropped, makes a new one."""
    return {name: getattr(module, "__spec__", None) for name, module in list(sys.modules.items()) if _is_users(name)}


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= LONG and all(map(_is_plain, value))
    return type(value) in _PLAIN and not (isinstance(value, (str, bytes)) and len(value) > LONG)


def differing_values(values: Values) -> list[str]:
    """One sentence about the values that this process's modules do not have; an empty list if they have them all."""
    found = []
    for (module, name), value in values.items():
        if (holder := sys.modules.get(module)) is not None:
            *classes, last = name.split(".")
            for each in classes:
                holder = vars(holder).get(each, holder)
            here = vars(holder).get(last, "missing")
            text = repr(here) if _is_plain(here) else f"of type {type(here).__name__}"
            if type(here) is not type(value) or text != repr(value):
                found.append(f"{module}.{name} is {value!r} here and {text} in the workers")
    if not found:
        return []
    return [
        f"workers import your modules by themselves and do not see what is set there later: {'; '.join(found)}. Keep "
        'such a value on the dataset, set it in worker_init_fn, or use multiprocessing_context="fork"'
    ]
