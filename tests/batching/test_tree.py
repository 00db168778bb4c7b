"""The walk: what it takes for nodes, what comes back, and where an error says it was."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.batching.tree import Node, map_leaves, path_text, register_node, walk

few = settings(max_examples=40)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Plain:
    x: Any
    total: Any = field(init=False)
    seen: InitVar[int] = 0

    def __post_init__(self, seen: int) -> None:
        self.total = self.x + seen
        self.beside = "kept"


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


@dataclass
class Strict:
    x: Any

    def __post_init__(self) -> None:
        if not isinstance(self.x, int):
            raise TypeError("x must be an int")


class Attributes(dict[str, Any]):
    """A dict whose keys are attributes: a well-known idiom, whose copies keep the old attributes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.__dict__ = self


class Tagged(dict[str, Any]):
    """A dict that its constructor does not build from items."""

    def __init__(self, tag: str, version: int) -> None:
        self.tag = tag


class Foreign(Mapping[str, Any]):
    def __init__(self, path: str, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def double(leaf: Any) -> Any:
    return leaf * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: leaf,
        lambda leaf: {"a": leaf, 2: [leaf, (), [], {}]},
        lambda leaf: (leaf, (leaf,)),
        lambda leaf: Point(leaf, {"k": leaf}),
        lambda leaf: namedtuple("old", "x y")(leaf, leaf),
        lambda leaf: OrderedDict(b=leaf, a=leaf),
        lambda leaf: defaultdict(list, a=leaf),
        lambda leaf: Frozen(leaf, y=[leaf]),
        lambda leaf: Slotted(leaf, leaf),
        lambda leaf: UserDict(a=leaf),
        lambda leaf: types.MappingProxyType({"a": leaf}),
        lambda leaf: Attributes(a=leaf),
    ],
)
def test_a_tree_comes_back_as_the_same_types_with_other_leaves(make: Any) -> None:
    mapped, expected = map_leaves(double, make(3)), make(6)
    assert mapped == expected
    assert type(mapped).__name__ == type(expected).__name__
    assert repr(mapped) == repr(expected)  # the order of keys, and the factory of a defaultdict
    assert vars(mapped) == vars(expected) if isinstance(mapped, Attributes) else True


def test_a_dict_with_a_constructor_of_its_own_keeps_its_type_and_attributes() -> None:
    tagged = Tagged("t", 1)
    tagged["a"] = 1
    mapped = map_leaves(double, tagged)
    assert type(mapped) is Tagged
    assert (mapped, mapped.tag) == ({"a": 2}, "t")
    assert tagged == {"a": 1}


def test_what_cannot_be_built_from_its_items_becomes_a_plain_dict_or_tuple() -> None:
    class Pair(tuple):  # type: ignore[type-arg]
        __slots__ = ()

        def __new__(cls, one: int, two: int) -> Pair:
            return super().__new__(cls, (one, two))

    for original, expected in ((Foreign("somewhere", {"a": 1}), {"a": 2}), (Pair(1, 2), (2, 4))):
        mapped = map_leaves(double, original)
        assert type(mapped) is type(expected)
        assert mapped == expected


def test_a_dataclass_is_copied_field_by_field_without_its_constructor() -> None:
    original = Plain(1, 10)
    mapped = map_leaves(double, original)
    assert (mapped.x, mapped.total, mapped.beside) == (2, 22, "kept")
    assert (original.x, original.total) == (1, 11)
    assert map_leaves(str, Strict(1)).x == "1"


def test_all_else_is_a_leaf() -> None:
    for leaf in ("text", b"bytes", {1}, range(3), None, np.zeros((2, 2)), Plain, Point, object()):
        seen: list[Any] = []
        map_leaves(seen.append, [leaf])
        assert len(seen) == 1
        assert seen[0] is leaf


def test_walk_gives_leaves_with_their_paths_in_order() -> None:
    tree = {"b": Point(1, [2]), "a": Slotted(3, {"k": 4}), "two words": {7: {None: 5}}}
    leaves = [(path_text(path), leaf) for path, leaf in walk(tree)]
    texts = ["b.x", "b.y[0]", "a.x", "a.y.k", "['two words'][7][None]"]
    assert leaves == list(zip(texts, [1, 2, 3, 4, 5], strict=True))


def test_a_registered_type_is_a_node() -> None:
    class Box:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    register_node(Box, Node(lambda _: ("inside",), getattr, lambda _, children: Box(*children), fixed=True))
    assert map_leaves(double, [Box(2)])[0].inside == 4
    assert list(walk(Box(2))) == [(("inside",), 2)]


trees = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), children, max_size=3)
        | st.builds(Point, children, children)
        | st.builds(Frozen, children)
    ),
    max_leaves=12,
)


@few
@given(trees)
def test_mapping_the_identity_gives_an_equal_tree_and_sees_the_leaves_of_the_walk(tree: Any) -> None:
    mapped: list[Any] = []

    def note(leaf: Any) -> Any:
        mapped.append(leaf)
        return leaf

    assert map_leaves(note, tree) == tree
    assert [leaf for _, leaf in walk(tree)] == mapped


@few
@given(trees, st.data())
def test_an_error_has_a_note_with_the_path_to_the_leaf(tree: Any, data: st.DataObject) -> None:
    paths = [path for path, _ in walk(tree)]
    if not paths:
        return
    number = data.draw(st.integers(0, len(paths) - 1))
    left = [number]

    def fail(leaf: Any) -> Any:
        if left[0] == 0:
            raise ZeroDivisionError
        left[0] -= 1

    with pytest.raises(ZeroDivisionError) as caught:
        map_leaves(fail, tree)
    notes = [f"at the leaf {path_text(paths[number])}"] if paths[number] else []
    assert getattr(caught.value, "__notes__", []) == notes
    assert vars(caught.value).keys() <= {"__notes__"}
