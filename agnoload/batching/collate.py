"""Samples to batch, field by field, each array of the batch written once, into the memory that it is given.

`collate` walks *columns*: the values that one field has in all samples. A column's types choose its *rule* (looked up
by type and remembered); rules for containers cut the column into those of its children, rules for arrays and numbers
find the common dtype and check the shapes before they take memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agnoload.backend import registry
from agnoload.batching.stacking import (
    Array,
    CollateContext,
    Column,
    Hook,
    collate_error,
    differ,
    field_name,
    keys_differ,
    lengths_differ,
    new_array,
    stack,
    type_name,
)
from agnoload.batching.tree import Node, Path, map_leaves, node_of
from agnoload.errors import CollateError, OptionError, add_note
from agnoload.protocols import Empty
from agnoload.system import free_in_forks

Rule = Callable[[Column, Path, CollateContext], Any]


def collate(samples: Iterable[Any], empty: Empty = np.empty, hook: Hook | None = None) -> Any:
    """Make one batch of a list of samples, each of its arrays written once, into what `empty(shape, dtype)` gives.

    `CollateError` names the path to the field and, as `items`, which two samples do not fit together.
    """
    try:
        iterator = iter(samples)
    except TypeError:
        raise CollateError(f"a batch must be made of a list of samples, got {type(samples).__name__}") from None
    column = list(iterator)
    if not column:
        raise CollateError("a batch needs at least one sample, got none")
    return _collate(column, (), CollateContext(empty, hook))


def default_collate(batch: Iterable[Any]) -> Any:
    """Make one batch of a list of samples: what a loader does when it has no `collate_fn`; for use inside your own.

    Arrays and numbers are stacked along a new first axis, into their common dtype as NumPy promotes them; mappings,
    lists, tuples, named tuples and dataclasses keep their type and are batched field by field, and so are other
    sequences (`range`, `UserList`, `deque`), as lists; strings and bytes become lists; what is None in all samples
    stays None. Samples may hold any library's arrays. An int beyond int64 gives uint64 or, beyond that, Python ints in
    an object array. `CollateError` when shapes, keys or lengths differ, when a field is None in some samples only, for
    unknown types (see `register_collate`), and for what can be converted to an array but is none, such as an image.

    >>> default_collate([{"x": np.float32(1.5), "y": 3}, {"x": np.float32(2.5), "y": 4}])
    {'x': array([1.5, 2.5], dtype=float32), 'y': array([3, 4])}
    >>> default_collate([("a", [1, 2]), ("b", [3, 4])])
    (['a', 'b'], [array([1, 3]), array([2, 4])])
    """
    return collate(batch)


def default_convert(data: Any) -> Any:
    """Turn the leaves of one sample into NumPy arrays, and change nothing else: what is done without batching.

    Arrays stay as they are, NumPy scalars become arrays without axes, another library's arrays become NumPy arrays;
    Python's own numbers, strings and unknown objects are left alone, and so are the containers.

    >>> default_convert({"x": np.float32(1.5), "name": "a", "n": 3})
    {'x': array(1.5, dtype=float32), 'name': 'a', 'n': 3}
    """
    return map_leaves(_convert, data)


def _convert(leaf: Any) -> Any:
    if type(leaf) is np.ndarray:
        return leaf
    rule = _rule(type(leaf))
    if rule is _scalars:
        return np.asarray(leaf)
    if rule is _foreign and not _is_masked(leaf):
        array = registry.to_numpy(leaf)
        if array is not None:
            return array
        if hasattr(leaf, "__dlpack__") and hasattr(leaf, "__array__"):  # an array, not just convertible like an image
            return np.asarray(leaf)
    return leaf


# -- the registry

# Both are replaced, never changed, by a registration: threads that collate meanwhile hold on to those before it.
_registered: Mapping[type, Callable[..., Any]] = {}
_rules: dict[type, Rule] = {}
_registering = free_in_forks(threading.Lock())
_Type = type


def register_collate(type: type | tuple[type, ...], function: Callable[..., Any] | None) -> None:  # noqa: A002
    """Let `function` batch the values of a type, in every loader of this process and in its workers.

    It is called as `function(batch, collate_fn_map=...)` with the list of a field's values; the map holds what is
    registered. The nearest class counts: a function for `float` also gets subclasses of `float`, but not NumPy's
    scalars. A function for a type that is found in some of a field's values gets them all. `None` takes a function
    back.

    >>> def in_single(batch, *, collate_fn_map=None):
    ...     return np.array(batch, np.float32)
    >>> register_collate(float, in_single)
    >>> default_collate([1.5, 2.5])
    array([1.5, 2.5], dtype=float32)
    >>> register_collate(float, None)
    """
    kinds = type if isinstance(type, tuple) else (type,)
    if not all(isinstance(kind, _Type) for kind in kinds):
        raise OptionError(f"register_collate needs a class or a tuple of classes, got {type!r}")
    if function is not None and not callable(function):
        raise OptionError(f"register_collate needs a function(batch, *, collate_fn_map=None) or None, got {function!r}")
    with _registering:
        registered = registry_snapshot()
        for kind in kinds:
            if function is None:
                registered.pop(kind, None)
            else:
                registered[kind] = function
        install_registry(registered)


def registry_snapshot() -> dict[type, Callable[..., Any]]:
    """What is registered now, for `install_registry` in a worker."""
    return dict(_registered)


def install_registry(snapshot: Mapping[type, Callable[..., Any]]) -> None:
    """Make a worker's registry that of the process it works for; called before any user code runs there."""
    global _registered, _rules
    _registered = dict(snapshot)
    _rules = {}  # after it: a rule that is found from here on is one of the new registry


# -- which rule


def _collate(column: Column, path: Path, context: CollateContext) -> Any:
    if context.hook is not None:
        batch = context.hook(column, path)
        if batch is not NotImplemented:
            return batch
    kinds = set(map(type, column))
    rule = _rule(kinds.pop()) if len(kinds) == 1 else _mixed_rule(column, kinds, path)
    return rule(column, path, context)


def _rule(kind: type) -> Rule:
    rules = _rules
    try:
        return rules[kind]
    except KeyError:
        rule = rules[kind] = _find_rule(kind)
        return rule


def _find_rule(kind: type) -> Rule:
    """The nearest class that has a rule; an abstract class of the user's goes before our rules for containers."""
    registered = _registered
    for base in kind.__mro__:
        if base in registered:
            return _Registered(base, registered[base])
        if base in _BUILT_IN:
            break
    built_in = _BUILT_IN.get(base)
    if built_in in (None, _dicts, _lists, _tuples):
        for abstract in registered:
            if abstract not in kind.__mro__ and issubclass(kind, abstract):
                return _Registered(abstract, registered[abstract])
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    if issubclass(kind, np.ndarray):
        return _foreign
    node = node_of(kind)
    if node is not None:
        return _Container(kind, node) if node.columns else _foreign
    if built_in is None and issubclass(kind, Sequence) and not hasattr(kind, "__array__"):
        return _lists  # range, UserList, deque and their like
    return built_in or _foreign


def _mixed_rule(column: Column, kinds: set[type], path: Path) -> Rule:
    """The rule for a column of several types: a registered function if there is one, else what the types share."""
    rules = {_rule(kind) for kind in kinds}
    if len(rules) == 1:
        return rules.pop()
    if _nothing in rules:
        must, missing = "a field must be None in all samples or in none", "no value (NoneType)"
        advice = "give a value that means 'missing', or use agnoload.register_collate(type(None), ...)"
        raise differ(path, column, must, lambda value: missing if value is None else "a value", advice)
    registered = [rule for rule in rules if isinstance(rule, _Registered)]
    if registered and all(rule.function is registered[0].function for rule in registered):
        return registered[0]
    if not registered:
        if rules <= {stack, _scalars, _foreign, *_NUMBERS}:
            return _foreign
        # Mappings of several types, and named tuples with the same fields, become the type of the first sample.
        mappings = all(issubclass(kind, Mapping) for kind in kinds)
        fields = {getattr(kind, "_fields", None) if issubclass(kind, tuple) else None for kind in kinds}
        node = node_of(type(column[0]))
        if node is not None and (mappings or (len(fields) == 1 and None not in fields)):
            return _Container(type(column[0]), node)
    twins = len(set(map(type_name, kinds))) == 1
    advice = "make the class once, not for each sample" if twins else "make them one type in the dataset"
    advice += ", or give a collate_fn"
    must = "all samples must have the same type"
    raise differ(path, column, must, lambda value: f"type {type_name(type(value))}", advice, key=type)


@dataclass(frozen=True, eq=False)
class _Registered:
    """The rule of a type that has a function of the user's."""

    kind: type
    function: Callable[..., Any]

    def __call__(self, column: Column, path: Path, context: CollateContext) -> Any:
        try:
            return self.function(column, collate_fn_map=dict(_registered))
        except Exception as error:
            add_note(error, f"in the collate function registered for {self.kind.__qualname__}, for {field_name(path)}")
            raise


# -- containers: the usual ones have functions of their own, which are quicker than `_Container`


def _dicts(column: Column, path: Path, context: CollateContext) -> Any:
    first = column[0]
    if list(map(len, column)).count(len(first)) != len(column):
        raise keys_differ(column, path)
    batch = {}
    for key in first:
        try:
            values = [sample[key] for sample in column]
        except KeyError:
            raise keys_differ(column, path) from None
        batch[key] = _collate(values, (*path, key), context)
    return batch


def _lists(column: Column, path: Path, context: CollateContext) -> Any:
    if list(map(len, column)).count(len(column[0])) != len(column):
        raise lengths_differ(column, path)
    return [_collate(list(values), (*path, place), context) for place, values in enumerate(zip(*column, strict=True))]


def _tuples(column: Column, path: Path, context: CollateContext) -> Any:
    return tuple(_lists(column, path, context))


@dataclass(frozen=True, eq=False)
class _Container:
    """The rule for the other nodes of the walk: named tuples, dataclasses, mappings, subclasses of list and tuple."""

    kind: type
    node: Node

    def __call__(self, column: Column, path: Path, context: CollateContext) -> Any:
        node, first = self.node, column[0]
        if not node.fixed:
            if issubclass(self.kind, Mapping):
                # Nothing but a look: a defaultdict would make the keys that it is asked for.
                if any(sample.keys() != first.keys() for sample in column):
                    raise keys_differ(column, path)
            elif any(len(sample) != len(first) for sample in column):
                raise lengths_differ(column, path)
        get = node.get
        children = [
            _collate([get(sample, key) for sample in column], (*path, key), context) for key in node.keys(first)
        ]
        if node.fixed and not isinstance(first, tuple):
            first = object.__new__(self.kind)  # a dataclass: attributes beside its fields belong to one sample only
        return node.rebuild(first, children)


# -- arrays and numbers


def _scalars(column: Column, path: Path, context: CollateContext) -> Array:
    """NumPy's own scalars."""
    dtype = column[0].dtype
    if dtype.kind not in "fiubc" or [value.dtype for value in column].count(dtype) != len(column):
        return _foreign(column, path, context)
    out = new_array(context.empty, (len(column),), dtype)
    out[...] = column
    return out


def _number_rule(dtype: np.dtype[Any]) -> Rule:
    def numbers(column: Column, path: Path, context: CollateContext) -> Array:
        out = new_array(context.empty, (len(column),), dtype)
        out[...] = column
        return out

    return numbers


def _ints(column: Column, path: Path, context: CollateContext) -> Array:
    """Python ints as int64; what does not fit as uint64 or, beyond that too, as Python ints: no value is changed."""
    try:
        array = np.array(column, np.int64)
    except OverflowError:
        fits = min(column) >= 0 and max(column) < 1 << 64
        array = np.array(column, np.uint64 if fits else object)
    out = new_array(context.empty, array.shape, array.dtype)
    out[...] = array
    return out


def _foreign(column: Column, path: Path, context: CollateContext) -> Array:
    """Other libraries' arrays, and arrays and numbers of several kinds in one column."""
    return stack([as_array(value, path, item) for item, value in enumerate(column)], path, context)


def holds_arrays(column: Column) -> bool:
    """Whether a column is of arrays, NumPy's or another library's, that have a first axis."""
    return getattr(column[0], "ndim", 0) > 0 and set(map(_rule, set(map(type, column)))) <= {stack, _foreign}


def as_array(value: Any, path: Path, item: int) -> Array:
    """One value of a column as a plain NumPy array, or `CollateError`."""
    kind = type(value)
    if kind is np.ndarray:
        return value  # type: ignore[no-any-return]
    if _is_masked(value):
        raise collate_error(
            path,
            (item,),
            f"item {item} is a masked array, which would lose its mask; return array.filled(...), or the data and the "
            "mask as two fields, or use agnoload.register_collate(numpy.ma.MaskedArray, function)",
        )
    rule = _rule(kind)
    if rule is _scalars or rule in _NUMBERS or isinstance(value, np.ndarray):
        return np.asarray(value)
    try:
        array = registry.to_numpy(value)
        if array is None:
            # What is only convertible to an array, like an image with a palette, may mean more than that would hold.
            convertible = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
            is_array = hasattr(value, "__dlpack__") or (hasattr(value, "dtype") and hasattr(value, "shape"))
            array = np.asarray(value) if convertible and is_array else None
    except Exception as error:
        message = f"item {item} ({type_name(kind)}) cannot be converted to a NumPy array: {error}"
        raise collate_error(path, (item,), message) from error
    if array is None:
        raise collate_error(
            path,
            (item,),
            f"item {item} is {type_name(kind)}, which agnoload cannot batch; return arrays (for an image, "
            'numpy.asarray(image.convert("RGB"))), numbers, strings, dicts, lists, tuples or dataclasses, give a '
            f"collate_fn, or call agnoload.register_collate({kind.__name__}, function)",
        )
    return array


def _is_masked(value: Any) -> bool:
    return "numpy.ma" in sys.modules and isinstance(value, np.ma.MaskedArray)


# -- strings and nothing


def _kept(column: Column, path: Path, context: CollateContext) -> Any:
    return list(column)


def _nothing(column: Column, path: Path, context: CollateContext) -> None:
    return None


_bools, _floats, _complexes = map(_number_rule, map(np.dtype, (bool, float, complex)))
_NUMBERS = {_bools, _ints, _floats, _complexes}

_BUILT_IN: dict[type, Rule] = {
    np.ndarray: stack,
    np.generic: _scalars,
    bool: _bools,
    int: _ints,
    float: _floats,
    complex: _complexes,
    str: _kept,
    bytes: _kept,
    bytearray: _kept,
    type(None): _nothing,
    dict: _dicts,
    list: _lists,
    tuple: _tuples,
}
