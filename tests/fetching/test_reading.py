"""How a stream is read: forward, in copies of its own for each thread, and with sums that readers compare."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import AgnoloadError
from agnoload.fetching.compare import sketch
from agnoload.fetching.copies import Copies
from agnoload.fetching.stream_reader import StreamReader
from agnoload.worker_info import WorkerInfo, set_worker_info

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


def sums_of(samples: list[Any], size: int) -> list[tuple[int, int]]:
    """The sums before and behind each batch, as one of two readers sends them."""
    set_worker_info(WorkerInfo(0, 2, 0, None))
    try:
        reader = StreamReader(iter(samples), lambda *key: None)
        return [reader.read(number, 0, size)[2].sums or (0, 0) for number in range(len(samples) // size + 1)]
    finally:
        set_worker_info(None)


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
    sums = sums_of(samples, size)
    assert sums_of(list(samples), size) == sums
    place = data.draw(st.integers(0, len(samples) - 2))
    lost = samples[:place] + samples[place + 1 :]
    doubled = samples[: place + 1] + samples[place:]
    moved = [*samples[:place], samples[place + 1], samples[place], *samples[place + 2 :]]
    for other in (lost, doubled, moved):
        found = sums_of(other, size)
        assert found[-1][1] != sums[-1][1]
        before = place // size  # batches that hold the same
        assert found[:before] == sums[:before]


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


@few
@given(st.integers(0, 20), st.integers(1, 5), st.sets(st.integers(0, 8), min_size=1), st.booleans())
def test_a_reader_gives_any_batch_ahead_and_none_behind(n: int, size: int, numbers: set[int], drop_last: bool) -> None:
    """Whatever it reads past for others; behind the end there are no samples."""
    keys: list[tuple[int, int, int]] = []
    reader = StreamReader(iter(range(n)), lambda *key: keys.append(key), drop_last=drop_last)
    for number in sorted(numbers):
        raws, key, report = reader.read(number, 0, size)
        batch = list(range(n))[number * size : (number + 1) * size]
        ended = len(batch) < size
        assert raws == ([] if ended and drop_last else batch)
        assert (report.end, report.places, report.leftover) == (ended, len(raws), None)
        assert key == (number * size, 1, 0)
    assert [first for first, _, _ in keys] == [0, *range(0, keys[-1][0] + 1, size)]  # each batch that it began
    if n > max(numbers) * size:
        with pytest.raises(AgnoloadError, match="a stream is only read forward"):
            reader.read(0, 0, size)
