"""What readers of one stream compare, and the copies of a stream that threads read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload.fetching.compare import CheckSum, sketch
from agnoload.fetching.copies import Copies

few = settings(max_examples=60, deadline=None)
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
ARRAYS = st.lists(st.integers(-9, 9), max_size=5).map(np.array)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    )


def total(samples: list[Any], size: int, start: int = 0) -> list[int]:
    """The sums before each batch, and behind the last one."""
    sums, found = CheckSum(start), [0]
    for place, sample in enumerate(samples, start):
        sums.note(sample)
        if (place + 1) % size == 0:
            sums.add_noted(False)
            found.append(sums.total)
    sums.add_noted(start + len(samples))
    return [*found, sums.total]


@few
@given(nested(PLAIN | ARRAYS))
def test_equal_samples_have_one_sketch_whichever_process_has_made_them(value: Any) -> None:
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert repr(sketch(other)) == repr(sketch(value))


@few
@given(st.lists(st.integers(), min_size=2, max_size=30, unique=True), st.integers(1, 5), st.data())
def test_a_sample_that_is_lost_doubled_or_moved_shows_in_the_sums(
    samples: list[int], size: int, data: st.DataObject
) -> None:
    sums = total(samples, size)
    assert total(list(samples), size) == sums
    place = data.draw(st.integers(0, len(samples) - 2))
    lost = samples[:place] + samples[place + 1 :]
    doubled = samples[: place + 1] + samples[place:]
    moved = [*samples[:place], samples[place + 1], samples[place], *samples[place + 2 :]]
    for other in (lost, doubled, moved):
        found = total(other, size)
        assert found[-1] != sums[-1]
        whole = place // size  # batches before it
        assert found[: whole + 1] == sums[: whole + 1]


@few
@given(nested(PLAIN | ARRAYS))
def test_a_copy_for_a_thread_is_equal_has_containers_of_its_own_and_shares_the_arrays(value: Any) -> None:
    made = Copies("dataset", value, lambda _: False)
    one, other = made.make(), made.make()

    def compare(left: Any, right: Any) -> None:
        assert type(left) is type(right)
        if isinstance(left, np.ndarray):
            assert left is right
        elif isinstance(left, (list, dict)):
            assert left is not right
            assert len(left) == len(right)
            keys = left if isinstance(left, dict) else range(len(left))
            for key in keys:
                compare(left[key], right[key])
        elif isinstance(left, tuple):
            for a, b in zip(left, right, strict=True):
                compare(a, b)
        else:
            assert left == right

    compare(one, value)
    compare(one, other)
