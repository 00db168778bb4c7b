"""Samples to batch, field by field, each array of the batch written once, into the memory that it is given.

`collate` walks *columns*: the values that one field has in all samples. A column's types choose its *rule* (looked up
by type and remembered); rules for containers cut the column into those of its children, rules for arrays and numbers
find the common dtype and check the shapes before they take memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from agnoload.backend import registry
from agnoload.batching.tree import Node, Path, map_leaves, node_of, path_text
from agnoload.errors import CollateError, OptionError, add_note
from agnoload.protocols import Empty
from agnoload.system import free_in_forks

Array = npt.NDArray[Any]
Column = list[Any]
Special = Callable[[Column, Path], Any]
"""Asked first for every column; `NotImplemented` leaves it to the rules."""


class Run:
    """One batch in the making: where its memory comes from, and what is batched in a way of its own."""

    __slots__ = ("empty", "special")

    def __init__(self, empty: Empty, special: Special | None = None) -> None:
        self.empty = empty
        self.special = special

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return new_array(self.empty, shape, dtype)


def new_array(empty: Empty, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory for one array; what holds references to objects cannot lie in memory that processes share."""
    return np.empty(shape, dtype) if dtype.hasobject else empty(shape, dtype)


Rule = Callable[[Column, Path, Run], Any]


def collate(samples: Iterable[Any], empty: Empty = np.empty, special: Special | None = None) -> Any:
    """Make one batch of a list of samples, each of its arrays written once, into what `empty(shape, dtype)` gives.

    `CollateError` names the path to the field and, as `items`, the places of two samples that do not fit together.
    """
    try:
        iterator = iter(samples)
    except TypeError:
        raise CollateError(f"a batch must be made of a list of samples, got {type(samples).__name__}") from None
    column = list(iterator)
    if not column:
        raise CollateError("a batch needs at least one sample, got none")
    return _collate(column, (), Run(empty, special))


def default_collate(batch: Iterable[Any]) -> Any:
    """Make one batch of a list of samples: what a loader does when it has no `collate_fn`; for use inside your own.

    Arrays and numbers are stacked along a new first axis, into their common dtype as NumPy promotes them; mappings,
    lists, tuples, named tuples and dataclasses keep their type and are batched field by field, and so are other
    sequences (`range`, `UserList`, `deque`), as lists; strings and bytes become lists; what is None in all samples
    stays None. Samples may hold any library's arrays. An int beyond int64 gives uint64 or, beyond that, Python ints in
    an object array. `CollateError` when shapes, keys or lengths differ, when a field is None in some samples only, for
    types that nobody registered (`register_collate`), and for what is no array but can be made one, such as an image.

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
    if rule is _foreign:
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
    for kind in kinds:
        if not isinstance(kind, _Type):
            raise OptionError(f"register_collate needs a class or a tuple of classes, got {kind!r}")
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


def _collate(column: Column, path: Path, run: Run) -> Any:
    if run.special is not None:
        batch = run.special(column, path)
        if batch is not NotImplemented:
            return batch
    kinds = set(map(type, column))
    rule = _rule(kinds.pop()) if len(kinds) == 1 else _mixed_rule(column, kinds, path)
    return rule(column, path, run)


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
    built_in: Rule | None = None
    for base in kind.__mro__:
        if base in registered:
            return _Registered(base, registered[base])
        built_in = _BUILT_IN.get(base)
        if built_in is not None:
            break
    if built_in is None or built_in in (_dicts, _lists, _tuples):
        for base, function in registered.items():
            if base not in kind.__mro__ and issubclass(kind, base):
                return _Registered(base, function)
    if built_in is None or kind not in _BUILT_IN:
        if issubclass(kind, np.ndarray):
            masked = "numpy.ma" in sys.modules and issubclass(kind, np.ma.MaskedArray)
            return _masked if masked else _foreign
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
        raise _none_in_some(column, path)
    registered = {rule for rule in rules if isinstance(rule, _Registered)}
    if len(registered) == 1:
        return registered.pop()
    if not registered:
        if rules <= {_arrays, _scalars, _foreign, *_NUMBER_RULES}:
            return _foreign
        node = node_of(type(column[0]))
        fields = getattr(column[0], "_fields", ())
        if node is not None and (
            all(issubclass(kind, Mapping) for kind in kinds)
            or (fields and all(issubclass(kind, tuple) and getattr(kind, "_fields", ()) == fields for kind in kinds))
        ):
            return _Container(type(column[0]), node)
    other = next(item for item, value in enumerate(column) if _rule(type(value)) != _rule(type(column[0])))
    names = _name(column[0]), _name(column[other])
    twin = ", another class of that name: make the class once, not for each sample" * (names[0] == names[1])
    raise collate_error(
        path,
        (0, other),
        f"all samples must have the same type, but item 0 is {names[0]} and item {other} is {names[1]}{twin}; make "
        "them one type in the dataset, or give a collate_fn",
    )


class _Registered:
    """The rule of a type that has a function of the user's; two of them are one if their function is."""

    def __init__(self, kind: type, function: Callable[..., Any]) -> None:
        self.kind = kind
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Registered) and other.function is self.function

    def __hash__(self) -> int:
        return id(self.function)

    def __call__(self, column: Column, path: Path, run: Run) -> Any:
        try:
            return self.function(column, collate_fn_map=dict(_registered))
        except Exception as error:
            add_note(error, f"in the collate function registered for {self.kind.__qualname__}, for {_field(path)}")
            raise


# -- containers


def _dicts(column: Column, path: Path, run: Run) -> Any:
    first = column[0]
    if list(map(len, column)).count(len(first)) != len(column):
        raise _keys_differ(column, path)
    batch = {}
    for key in first:
        try:
            values = [sample[key] for sample in column]
        except KeyError:
            raise _keys_differ(column, path) from None
        batch[key] = _collate(values, (*path, key), run)
    return batch


def _lists(column: Column, path: Path, run: Run) -> Any:
    length = len(column[0])
    if list(map(len, column)).count(length) != len(column):
        raise _lengths_differ(column, path)
    return [_collate(list(values), (*path, place), run) for place, values in enumerate(zip(*column, strict=True))]


def _tuples(column: Column, path: Path, run: Run) -> Any:
    return tuple(_lists(column, path, run))


class _Container:
    """The rule for the other nodes of the walk: named tuples, dataclasses, mappings, subclasses of list and tuple."""

    def __init__(self, kind: type, node: Node) -> None:
        self.kind = kind
        self.node = node

    def __call__(self, column: Column, path: Path, run: Run) -> Any:
        node = self.node
        first = column[0]
        keys = node.keys(first)
        if not node.fixed:
            if issubclass(self.kind, Mapping):
                if any(sample.keys() != first.keys() for sample in column):
                    raise _keys_differ(column, path)
            elif any(len(sample) != len(first) for sample in column):
                raise _lengths_differ(column, path)
        get = node.get
        children = [_collate([get(sample, key) for sample in column], (*path, key), run) for key in keys]
        if node.fixed and not isinstance(first, tuple):
            first = object.__new__(self.kind)  # a dataclass: what stands beside its fields belongs to one sample only
        return node.rebuild(first, children)


# -- arrays and numbers

_dtype = attrgetter("dtype")
_ndim = attrgetter("ndim")
_shape = attrgetter("shape")

JOINED_BYTES = 2048
"""Up to this size of an item `bytes.join` and one copy are faster than `np.concatenate`, which takes 70 ns an item."""


def _arrays(column: Column, path: Path, run: Run) -> Array:
    """Stack arrays: find the common dtype, check the shapes, take memory, write."""
    first = column[0]
    count = len(column)
    dtype = first.dtype
    one_dtype = list(map(_dtype, column)).count(dtype) == count
    if not one_dtype:
        dtype = common_dtype(column, path)
    shape = first.shape
    if len(shape) == 1:  # the lengths of the arrays are read faster than their shapes
        same = list(map(_ndim, column)).count(1) == count and list(map(len, column)).count(shape[0]) == count
    else:
        same = list(map(_shape, column)).count(shape) == count
    if not same:
        raise _shapes_differ(column, path)
    out = run.new((count, *shape), dtype)
    if one_dtype and write_joined(out, column):
        return out
    if shape:
        np.concatenate(column, out=out.reshape((count * shape[0], *shape[1:])))
    else:
        np.concatenate([array.reshape(1) for array in column], out=out)
    return out


def write_joined(out: Array, arrays: Column) -> bool:
    """Write many small arrays of one dtype into `out`, one after the other, by way of `bytes.join`; False if that would
    not be faster than `np.concatenate`, or is not possible."""
    dtype = out.dtype
    if not 0 < out.nbytes <= JOINED_BYTES * len(arrays) or dtype.kind not in "fiubcUSV" or dtype.hasobject:
        return False
    try:
        joined = b"".join(arrays)
    except (TypeError, ValueError, BufferError):
        return False  # some array is not C-contiguous
    out[...] = np.frombuffer(joined, dtype).reshape(out.shape)
    return True


def _scalars(column: Column, path: Path, run: Run) -> Array:
    """NumPy's own scalars."""
    dtype = column[0].dtype
    if dtype.kind not in "fiubc" or list(map(_dtype, column)).count(dtype) != len(column):
        return _foreign(column, path, run)
    out = run.new((len(column),), dtype)
    out[...] = column
    return out


def _number_rule(dtype: np.dtype[Any]) -> Rule:
    def numbers(column: Column, path: Path, run: Run) -> Array:
        out = run.new((len(column),), dtype)
        out[...] = column
        return out

    return numbers


def _ints(column: Column, path: Path, run: Run) -> Array:
    array = _int_array(column)
    out = run.new(array.shape, array.dtype)
    out[...] = array
    return out


def _int_array(column: Column) -> Array:
    """Python ints as int64; what does not fit as uint64 or, beyond that too, as Python ints: no value is changed."""
    try:
        return np.array(column, np.int64)
    except OverflowError:
        fits = min(column) >= 0 and max(column) < 1 << 64
        return np.array(column, np.uint64 if fits else object)


def _foreign(column: Column, path: Path, run: Run) -> Array:
    """Other libraries' arrays, and arrays and numbers of several kinds in one column."""
    return _arrays([as_array(value, path, item) for item, value in enumerate(column)], path, run)


def holds_arrays(column: Column) -> bool:
    """Whether a column is of arrays, NumPy's or another library's, that have a first axis."""
    if any(_rule(kind) not in (_arrays, _foreign) for kind in set(map(type, column))):
        return False
    return getattr(column[0], "ndim", 0) > 0


def as_array(value: Any, path: Path, item: int) -> Array:
    """One value of a column as a plain NumPy array, or `CollateError`."""
    kind = type(value)
    if kind is np.ndarray:
        return value  # type: ignore[no-any-return]
    rule = _rule(kind)
    if rule is _ints:
        return _int_array([value]).reshape(())
    if rule is _masked:
        raise _would_lose_mask(path, item)
    if rule is _scalars or rule in _NUMBER_RULES or isinstance(value, np.ndarray):
        return np.asarray(value)
    try:
        array = registry.to_numpy(value)
        if array is None and (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
            held = hasattr(value, "dtype") and hasattr(value, "shape")
            if not held and not hasattr(value, "__dlpack__"):
                raise _converted(path, item, value)
            array = np.asarray(value)
    except CollateError:
        raise
    except Exception as error:
        raise collate_error(
            path, (item,), f"item {item} ({_name(value)}) does not become a NumPy array: {error}"
        ) from error
    if array is None:
        raise collate_error(
            path,
            (item,),
            f"item {item} is {_name(value)}, which nothing here can batch; return arrays, numbers, strings, dicts, "
            "lists, tuples or dataclasses, give a collate_fn, or tell how with "
            f"agnoload.register_collate({kind.__name__}, function)",
        )
    return array


def _masked(column: Column, path: Path, run: Run) -> NoReturn:
    raise _would_lose_mask(path, 0)


def common_dtype(arrays: Column, path: Path) -> np.dtype[Any]:
    """The dtype that holds the values of all arrays, as NumPy promotes; never one that turns numbers into text."""
    dtypes = list(map(_dtype, arrays))
    first = dtypes[0]
    for item, dtype in enumerate(dtypes):
        if _family(dtype) != _family(first) and not (dtype.kind == "O" or first.kind == "O"):
            raise _dtypes_differ(arrays, item, path)
    distinct = list(dict.fromkeys(dtypes))
    try:
        return distinct[0] if len(distinct) == 1 else np.result_type(*distinct)
    except TypeError:
        item = next((item for item, dtype in enumerate(dtypes) if not _promote(first, dtype)), len(dtypes) - 1)
        raise _dtypes_differ(arrays, item, path) from None


def _family(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "fiubc":
        return "number"
    if dtype.kind == "V" and dtype.names is None:  # an extension such as bfloat16, or plain bytes
        return "number" if dtype.isbuiltin == 2 else "V"
    return "T" if dtype.kind == "U" else dtype.kind


def _promote(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    try:
        np.result_type(one, other)
    except TypeError:
        return False
    return True


# -- strings and nothing


def _kept(column: Column, path: Path, run: Run) -> Any:
    return list(column)


def _nothing(column: Column, path: Path, run: Run) -> None:
    return None


_floats = _number_rule(np.dtype(np.float64))
_bools = _number_rule(np.dtype(np.bool_))
_complexes = _number_rule(np.dtype(np.complex128))
_NUMBER_RULES = {_bools, _ints, _floats, _complexes}

_BUILT_IN: dict[type, Rule] = {
    np.ndarray: _arrays,
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


# -- what goes wrong


def collate_error(path: Path, items: tuple[int, ...], message: str) -> CollateError:
    """The error for a field, whose path stands first in the text."""
    return CollateError(f"{_field(path)}: {message}", path_text(path), items)


def _field(path: Path) -> str:
    return f"field {path_text(path)}" if path else "the samples"


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint(path: Path, value: Any) -> str:
    if path:
        function = f"ragged_collate(fields=[{path_text(path)!r}])"
    else:
        function = "ragged_collate()" + ("" if hasattr(value, "dtype") else ", which takes samples that are arrays")
    return f"make them equal in the dataset, or batch them as ragged: collate_fn=agnoload.{function}"


def _shapes_differ(arrays: Column, path: Path) -> CollateError:
    first = arrays[0].shape
    other = next(item for item, array in enumerate(arrays) if array.shape != first)
    return collate_error(
        path,
        (0, other),
        f"arrays must have one shape to be stacked, but item 0 has {first} and item {other} has "
        f"{arrays[other].shape}; {_hint(path, arrays[0])}",
    )


def _dtypes_differ(arrays: Column, other: int, path: Path) -> CollateError:
    return collate_error(
        path,
        (0, other),
        f"arrays must have dtypes that NumPy can promote to one, but item 0 has {arrays[0].dtype} and item {other} has "
        f"{arrays[other].dtype}; convert them in the dataset",
    )


def _lengths_differ(column: Column, path: Path) -> CollateError:
    first = len(column[0])
    other = next(item for item, value in enumerate(column) if len(value) != first)
    return collate_error(
        path,
        (0, other),
        f"a {_name(column[0])} is batched place by place, so all must have one length, but item 0 has {first} and item "
        f"{other} has {len(column[other])}; {_hint(path, column[0])}",
    )


def _keys_differ(column: Column, path: Path) -> CollateError:
    first = column[0].keys()
    other = next(item for item, value in enumerate(column) if value.keys() != first)
    missing = [key for key in first if key not in column[other]]
    lacks, has = (other, 0) if missing else (0, other)
    keys = missing or [key for key in column[other] if key not in first]
    names = ", ".join(map(repr, keys))
    return collate_error(
        path,
        (lacks, has),
        f"all samples must have the same keys, but {names} is missing in item {lacks} and there in item {has}; "
        "give every sample all keys, or drop them in the dataset",
    )


def _none_in_some(column: Column, path: Path) -> CollateError:
    none = next(item for item, value in enumerate(column) if value is None)
    other = next(item for item, value in enumerate(column) if value is not None)
    return collate_error(
        path,
        (none, other),
        f"a field must be None in all samples or in none, but item {none} is NoneType and item {other} is "
        f"{_name(column[other])}; give a value that means 'missing', or use agnoload.register_collate(type(None), ...)",
    )


def _converted(path: Path, item: int, value: Any) -> CollateError:
    """What makes an array when asked may not hold what that array says, like an image that has a palette."""
    return collate_error(
        path,
        (item,),
        f"item {item} is {_name(value)}, which is no array but can be made one, and how must be said: return "
        'numpy.asarray(sample), of an image numpy.asarray(image.convert("RGB")), or tell how with '
        f"agnoload.register_collate({type(value).__name__}, function)",
    )


def _would_lose_mask(path: Path, item: int) -> CollateError:
    return collate_error(
        path,
        (item,),
        f"item {item} is a masked array, which would lose its mask; return array.filled(...), or the data and the mask "
        "as two fields, or use agnoload.register_collate(numpy.ma.MaskedArray, function)",
    )
