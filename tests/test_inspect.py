"""The walk over the user's objects: each path leads to its object, near ones come first, and none is missed."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.inspect import LONG, find_large_lists, walk_objects


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


OBJECTS = st.recursive(
    st.builds(Holder),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.lists(inner, min_size=1, max_size=3).map(deque),
        st.dictionaries(st.sampled_from(["a", 1]), inner, min_size=1),
        st.builds(Slotted, inner),
        st.dictionaries(st.sampled_from(["left", "right"]), inner, min_size=1).map(lambda parts: Holder(**parts)),
    ),
    max_leaves=8,
)


def leaves(thing: Any) -> list[Any]:
    """The `Holder` objects without attributes."""
    if isinstance(thing, Holder) and not vars(thing):
        return [thing]
    parts = [thing.part] if isinstance(thing, Slotted) else vars(thing).values() if isinstance(thing, Holder) else thing
    return [leaf for part in (thing.values() if isinstance(thing, dict) else parts) for leaf in leaves(part)]


@given(value=OBJECTS)
@settings(max_examples=40)
def test_each_path_leads_to_its_object_and_near_ones_come_first(value: Any) -> None:
    kinds = (Holder, Slotted, list, tuple, deque, dict)  # not what the classes themselves hold
    found = [(path, thing) for path, thing, _ in walk_objects({"dataset": value}) if isinstance(thing, kinds)]
    found = [(path, thing) for path, thing in found if "__" not in path]
    assert all(eval(path, {"dataset": value}) is thing for path, thing in found)
    depths = [path.count(".") + path.count("[") for path, _ in found]
    assert depths == sorted(depths)
    assert {id(leaf) for leaf in leaves(value)} <= {id(thing) for _, thing in found}


@given(sizes=st.lists(st.integers(0, 2 * LONG), max_size=4), limit=st.integers(0, 2 * LONG))
@settings(max_examples=40)
def test_every_large_list_is_named(sizes: list[int], limit: int) -> None:
    dataset = Holder(**{f"part{number}": ["x"] * size for number, size in enumerate(sizes)})
    wanted = [f"dataset.part{number}" for number, size in enumerate(sizes) if size > limit]
    assert find_large_lists(dataset, limit) == wanted
