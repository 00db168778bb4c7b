"""The one walk over a sample or a batch: dict, list, tuple, named tuple and dataclass are nodes, all else is a leaf."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

from agnoload.errors import add_note, attributes_of

Path = tuple[Any, ...]
"""The way from the root to a leaf: keys, names and places, one a level."""


class Node(NamedTuple):
    """How one type of container is taken apart and built again.

    `keys(node)` names the children in order, `get(node, key)` gives one of them, and `rebuild(node, children)` makes a
    container like `node` of other children, in the order of `keys(node)`. `fixed`: the keys are the same for every
    object of the type. `columns`: samples of the type may be batched child by child.
    """

    keys: Callable[[Any], Sequence[Any]]
    get: Callable[[Any, Any], Any]
    rebuild: Callable[[Any, list[Any]], Any]
    fixed: bool = False
    columns: bool = True


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Build a tree like `tree` from what `function` makes of each leaf.

    Mappings, lists, tuples, named tuples and dataclasses come back as the same type; where such a type cannot be built
    from its items alone, as a plain dict, list or tuple. Dataclasses are copied field by field, without a call of
    `__init__` or `__post_init__`. An exception of `function` gets a note with the path to the leaf.

    >>> map_leaves(lambda leaf: leaf * 2, {"x": 1, "target": (2, [3])})
    {'x': 2, 'target': (4, [6])}
    """
    try:
        return _map(function, tree)
    except Exception as error:
        trail = attributes_of(error).pop(_TRAIL, None)
        if trail:
            add_note(error, f"at the leaf {path_text(tuple(reversed(trail)))}")
        raise


_TRAIL = "_agnoload_trail"


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    kind = type(tree)
    node = _nodes[kind] if kind in _nodes else node_of(kind)
    if node is None:
        return function(tree)
    key: Any = None
    try:
        if kind is dict:
            mapping = {}
            for key, value in tree.items():
                mapping[key] = _map(function, value)
            return mapping
        children = []
        if kind is list or kind is tuple:
            for key, value in enumerate(tree):  # noqa: B007 - the key is for the trail below
                children.append(_map(function, value))
            return children if kind is list else tuple(children)
        for key in node.keys(tree):
            children.append(_map(function, node.get(tree, key)))
    except Exception as error:
        attributes_of(error).setdefault(_TRAIL, []).append(key)
        raise
    return node.rebuild(tree, children)


def walk(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Give each leaf with its path, in order.

    >>> [(path_text(path), leaf) for path, leaf in walk({"target": {"boxes": 7}, "y": [1, 2]})]
    [('target.boxes', 7), ('y[0]', 1), ('y[1]', 2)]
    """
    node = node_of(type(tree))
    if node is None:
        yield path, tree
        return
    for key in node.keys(tree):
        yield from walk(node.get(tree, key), (*path, key))


def path_text(path: Path) -> str:
    """A path as one would write it in code: `target.boxes`, `[3].x`, `['two words']`; empty for the root."""
    text = ""
    for key in path:
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}" if text else key
        else:
            text += f"[{key!r}]"
    return text


def node_of(kind: type) -> Node | None:
    """How objects of this type are walked; None if they are leaves. Asked once a type, then remembered."""
    try:
        return _nodes[kind]
    except KeyError:
        node = _nodes[kind] = _find_node(kind)
        return node


def register_node(kind: type, node: Node) -> None:
    """Make objects of a type of this library nodes of the walk."""
    _nodes[kind] = node


def _find_node(kind: type) -> Node | None:
    moves_itself = hasattr(kind, "to") and hasattr(kind, "pin_memory")  # a batch of its own library, not just its items
    if issubclass(kind, Mapping):
        if moves_itself and not issubclass(kind, dict):
            return None
        # Its own keys(): not every mapping iterates its keys.
        return Node(lambda node: tuple(node.keys()), getitem, _rebuild_mapping)
    if issubclass(kind, tuple) and hasattr(kind, "_make") and hasattr(kind, "_fields"):
        names, make = tuple(kind._fields), kind._make
        return Node(lambda _: names, getattr, lambda _, children: make(children), fixed=True, columns=not moves_itself)
    if issubclass(kind, (list, tuple)):
        return Node(lambda node: range(len(node)), getitem, _rebuild_sequence)
    if dataclasses.is_dataclass(kind):
        fields = tuple(field.name for field in dataclasses.fields(kind))
        return Node(lambda _: fields, getattr, _rebuild_dataclass, fixed=True)
    return None


def _rebuild_mapping(node: Any, children: list[Any]) -> Any:
    kind = type(node)
    items = dict(zip(node.keys(), children, strict=True))
    if kind is dict or kind is OrderedDict:
        return kind(items)
    if not isinstance(node, dict) and all(child is node[key] for key, child in items.items()):
        return node
    try:
        # A plain copy of what is no dict would share what holds the items, and one of a dict whose attributes are its
        # items would keep the old attributes.
        if not (isinstance(node, dict) or hasattr(kind, "__copy__")) or getattr(node, "__dict__", None) is node:
            return kind(items)
        clone = copy.copy(node)  # with its attributes
        for key, child in items.items():
            clone[key] = child
    except Exception:  # a mapping of the user's that cannot be built from its items: what it holds matters most
        return items
    return clone


def _rebuild_sequence(node: Any, children: list[Any]) -> Any:
    kind = type(node)
    plain = list if issubclass(kind, list) else tuple
    if kind is plain:
        return plain(children)
    try:
        return kind(children)
    except Exception:  # its constructor takes something else
        return plain(children)


def _rebuild_dataclass(node: Any, children: list[Any]) -> Any:
    kind = type(node)
    clone = object.__new__(kind)
    if hasattr(node, "__dict__"):
        clone.__dict__.update(node.__dict__)
    for field, child in zip(dataclasses.fields(kind), children, strict=True):
        object.__setattr__(clone, field.name, child)  # a frozen class refuses setattr
    return clone


_nodes: dict[type, Node | None] = {kind: _find_node(kind) for kind in (dict, list, tuple)}
