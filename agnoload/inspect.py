"""What is within reach of the user's objects: a look at what a dataset is made of that runs none of its code."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

LIMIT = 4096
"""So many objects are looked at; a dataset of usual size has a few dozen."""
LONG = 256
"""A container with more entries holds samples, not parts of a dataset: only its first one is looked at."""

ATTEMPTS = 100
"""So often a container is looked at while other threads change it."""

_LEAVES = (str, bytes, int, float, complex, np.ndarray, np.generic, types.ModuleType, type, type(None))
_LOADERS = ("agnoload.loader", "agnoload.iterator")
"""A loader within a dataset, and its iterator: what they draw from they seed by themselves."""
_CONTAINERS = (dict, list, tuple, deque)


Step = tuple[Callable[[Any], Any], Any, Any]
"""A look, a place, and what the look finds there until somebody lays another object there."""


class Reached(NamedTuple):
    """An object and the path to it."""

    path: str
    thing: Any
    one_of_many: bool = False
    """It lies in the first entry of a long container; the others were not looked at."""
    way: tuple[Step, ...] = ()
    """What was looked at on the path, but for what nobody can change."""


def within_reach(roots: Mapping[str, Any]) -> Iterator[Reached]:
    """Every object that some objects hold, once, near ones first, in an order that is the same in every process.

    Looked at are attributes, containers, partial functions, what methods are bound to, what functions close over, their
    default values, and the global variables that they name.

    >>> rate = {"high": 1}
    >>> found = within_reach({"dataset": [functools.partial(lambda x, by=rate: x)]})
    >>> [reached.path for reached in found if reached.thing is rate]
    ['dataset[0].func.__defaults__[0]']
    """
    waiting = deque(Reached(path, thing) for path, thing in roots.items())
    seen: dict[int, Any] = {}
    while waiting and len(seen) < LIMIT:
        reached = waiting.popleft()
        thing = reached.thing
        if not issubclass(type(thing), _LEAVES) and id(thing) not in seen:
            seen[id(thing)] = thing
            yield reached
            many = reached.one_of_many or (issubclass(type(thing), _CONTAINERS) and _length(thing) > LONG)
            for part in _parts(thing):
                way = reached.way if part.step is None else (*reached.way, part.step)
                waiting.append(Reached(reached.path + part.name, part.thing, many, way))


class _Part(NamedTuple):
    name: str
    thing: Any
    step: Step | None = None
    """None: an object cannot be laid there after the whole was made."""


def _parts(thing: Any) -> Iterator[_Part]:
    """What an object holds; of a long container the first entry."""
    kind = type(thing)  # and not isinstance, which asks an object for the class that it pretends to be
    if issubclass(kind, _CONTAINERS):
        return iter(_entries(thing, _length(thing) if _length(thing) <= LONG else 1))
    if issubclass(kind, functools.partial):
        return iter([_Part(".func", thing.func), _Part(".args", thing.args), _Part(".keywords", thing.keywords)])
    if kind is types.MethodType:
        return iter([_Part(".__self__", thing.__self__), _Part("", thing.__func__)])
    if kind in (types.BuiltinMethodType, types.MethodWrapperType):
        return iter([_Part(".__self__", thing.__self__)])  # of a function, its module
    return _parts_of_function(thing) if kind is types.FunctionType else _parts_of_object(thing)


def _base(container: Any) -> Any:
    """The built-in class of a container: its methods are not the user's."""
    return next(base for base in _CONTAINERS if issubclass(type(container), base))


def _length(container: Any) -> int:
    length: int = _base(container).__len__(container)
    return length


def _entries(container: Any, count: int) -> list[_Part]:
    base = _base(container)
    look = functools.partial(base.__getitem__, container)
    if base is not dict:
        found = enumerate(_seen_at_once(base.__iter__, container, count))
        return [_Part(f"[{place}]", part, None if base is tuple else (look, place, part)) for place, part in found]
    entries = _seen_at_once(lambda entered: iter(dict.items(entered)), container, count)
    return [
        _Part(f"[{key!r}]", part, (look, key, part)) if type(key) in (str, int) else _Part("[...]", part)
        for key, part in entries
    ]


def _seen_at_once(entries: Callable[[Any], Iterator[Any]], container: Any, count: int | None = None) -> list[Any]:
    """The first `count` entries of a container that another thread may be changing; none if it never rests."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(RuntimeError):  # it was changed in between
            return list(islice(entries(container), count))
    return []


def _items(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return iter(attributes.items())


def _parts_of_function(function: types.FunctionType) -> Iterator[_Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            held = cell.cell_contents
            yield _Part(f".{name}", held, (functools.partial(getattr, cell), "cell_contents", held))
    for name in ("__defaults__", "__kwdefaults__"):
        held = getattr(function, name)
        yield _Part(f".{name}", held, (functools.partial(getattr, function), name, held))
    if _needs_no_look(function.__globals__.get("__name__", "")):
        return
    names = _names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if type(value) is not types.ModuleType:
            yield _Part(f".{name}", value, (function.__globals__.get, name, value))
        elif not _needs_no_look(value.__name__):
            for inner in names:
                held = vars(value).get(inner)
                yield _Part(f".{name}.{inner}", held, (vars(value).get, inner, held))


def _parts_of_object(thing: Any) -> Iterator[_Part]:
    if type(thing).__module__ in _LOADERS:
        return
    with contextlib.suppress(AttributeError):
        attributes = object.__getattribute__(thing, "__dict__")
        for name, part in _seen_at_once(_items, attributes):
            yield _Part(f".{name}", part, (attributes.__getitem__, name, part))
    for base in type(thing).__mro__:
        for name, part in _seen_at_once(_items, vars(base)):
            if isinstance(part, types.MemberDescriptorType):  # a slot
                with contextlib.suppress(AttributeError):
                    held = part.__get__(thing)
                    yield _Part(f".{name}", held, (part.__get__, thing, held))
            elif not _needs_no_look(base.__module__):
                yield _Part(f".{name}", _function_of(part), (vars(base).__getitem__, name, part))


def _function_of(part: Any) -> Any:
    """The function in a static method, a class method or a property; anything else itself."""
    if isinstance(part, (staticmethod, classmethod)):
        return part.__func__
    return part.fget if isinstance(part, property) else part


def _names(code: types.CodeType) -> dict[str, None]:
    """The names that a piece of code, and what is defined inside of it, looks up."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


@functools.cache
def _needs_no_look(module: str) -> bool:
    """Whether a module is Python's, NumPy's or this library's: its code holds nothing of the user's."""
    root = module.partition(".")[0]
    return root in ("numpy", "agnoload") or (root in sys.stdlib_module_names and root != "__main__")


def modules_of(roots: Mapping[str, Any]) -> list[str]:
    """The modules that a process imports when it unpickles some objects, as far as a look at the nearest of them tells.

    These are the modules of their classes and functions. Of a script, which no other process imports, they are those
    that its functions name, and of another file of the user's those at its top, first: so each can be tried by itself.
    """
    found: dict[str, None] = {}
    for reached in islice(within_reach(roots), NEAR):
        thing = reached.thing
        code = type(thing) in (types.FunctionType, types.BuiltinFunctionType)
        for home in [thing] if code else type(thing).__mro__:
            module = sys.modules.get(home.__module__ or "")
            if _is_users(home.__module__):
                found |= dict.fromkeys(_modules_in(vars(module).values()))
            if module is not None:
                found[module.__name__] = None
        if type(thing) is types.FunctionType and thing.__module__ in ("__main__", "__mp_main__"):
            found |= dict.fromkeys(_modules_in(map(thing.__globals__.get, _names(thing.__code__))))
    return list(found)


def _modules_in(values: Iterable[Any]) -> list[str]:
    return [value.__name__ for value in list(values) if type(value) is types.ModuleType]


# ---------------------------------------------------------------------------------------------- values of modules

_PLAIN = (int, float, complex, bool, str, bytes, type(None))

NEAR = 512
"""Objects that are looked at for them at each start of workers; what lies farther away belongs to a framework."""

Values = dict[tuple[str, str], Any]
"""By module and name there, such as `("conf", "SIZE")` or `("conf", "Options.size")`."""


def plain_values(roots: Mapping[str, Any]) -> Values:
    """Numbers, texts and the like in the user's modules, and in classes there, under names that the objects' code uses.

    The program may have set them since the import; another process, which imports the modules by itself, does not see
    that.
    """
    found: Values = {}
    for reached in islice(within_reach(roots), NEAR):
        thing = reached.thing
        if type(thing) is types.FunctionType:
            names = _names(thing.__code__)
            holders = [sys.modules.get(thing.__module__), *map(thing.__globals__.get, names)]
            for holder in holders:
                found |= _plain_values_of(holder, names)
        else:
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
    if not isinstance(module, str) or module in ("__main__", "__mp_main__") or _needs_no_look(module):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(path, str) and not any(f"{kind}-packages" in path for kind in ("site", "dist"))


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
