"""Streams in random order."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.streams import Mixture


def values(batches):
    return [value for batch in batches for value in batch]


@pytest.mark.parametrize("epoch", [0, 1])
def test_c12_each_value_once_and_none_too_early(kit, epoch):
    order = values(kit.deliver(kit.Count(1000).shuffle(100), 100, seed=0, epoch=epoch))
    assert sorted(order) == list(range(1000))
    assert all(value <= place + 100 for place, value in enumerate(order))
    assert order != sorted(order)


def test_c12_one_order_for_any_workers_and_another_in_the_next_epoch(kit):
    stream = kit.Count(1000).shuffle(100)
    orders = [kit.deliver(stream, 100, seed=0, workers=workers, ahead=3) for workers in range(4)]
    assert orders[1:] == orders[:1] * 3
    assert kit.deliver(stream, 100, seed=0, epoch=1) != orders[0]
    assert kit.deliver(stream, 100, seed=1) != orders[0]


def test_c12_a_buffer_of_one_keeps_the_order(kit):
    assert values(kit.deliver(kit.Count(1000).shuffle(1), 100, seed=0)) == list(range(1000))
    assert kit.deliver(kit.Shards([2, 3]).shuffle(1), 5) == kit.deliver(kit.Shards([2, 3]), 5)


def test_c12_a_buffer_of_all_shuffles_all(kit):
    firsts = [values(kit.deliver(kit.Count(1000).shuffle(1000), 100, seed=seed))[0] for seed in range(200)]
    assert min(firsts) < 50
    assert max(firsts) > 950
    assert 400 < sum(firsts) / 200 < 600


def test_c12_a_resumed_run_gives_the_same_rest(kit):
    stream = kit.Count(1000).shuffle(100)
    loader = kit.Loader(stream, 100, seed=0)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.plan.state()
    rest = list(batches)
    assert len(values(rest)) == 700
    for workers in range(3):
        assert kit.deliver(stream, 100, seed=0, workers=workers, state=state) == rest


@given(st.integers(0, 40), st.integers(1, 50))
def test_every_value_comes_once_whatever_the_buffer(kit, n, buffer_size):
    order = values(kit.deliver(kit.Count(n).shuffle(buffer_size), 7))
    assert sorted(order) == list(range(n))
    assert all(value < place + buffer_size for place, value in enumerate(order))


def test_all_orders_of_a_small_stream_are_equally_likely(kit):
    counts = {}
    for seed in range(1200):
        order = tuple(values(kit.deliver(kit.Count(3).shuffle(3), 3, seed=seed)))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 20.5  # chi-square, 5 degrees: p = 0.001


def test_the_order_of_shards_is_shuffled_and_each_by_itself(kit):
    shards = kit.Shards([20] * 6, lanes=1).shuffle(20)
    order = values(kit.deliver(shards, 10))
    runs = [[shard for shard, _ in order[start : start + 20]] for start in range(0, 120, 20)]
    assert all(len(set(run)) == 1 for run in runs)
    assert [run[0] for run in runs] != list(range(6))
    within = [tuple(place for _, place in order[start : start + 20]) for start in range(0, 120, 20)]
    assert all(sorted(places) == list(range(20)) for places in within)
    assert len(set(within)) == 6, "two shards were shuffled in the same way"


def test_shuffles_within_one_pipeline_draw_different_numbers(kit):
    mixed = Mixture([kit.Count(50).shuffle(50), kit.Count(50).shuffle(50)], [1, 1], per="batch", with_source=True)
    order = values(kit.deliver(mixed, 2))
    parts = [[value for value, source in order if source == number] for number in (0, 1)]
    assert sorted(parts[0]) == sorted(parts[1])
    assert parts[0] != parts[1]


def test_a_seed_of_its_own_goes_before_the_loaders(kit):
    stream = kit.Count(20).shuffle(20, seed=3)
    assert kit.deliver(stream, 20, seed=0) == kit.deliver(stream, 20, seed=1)
    assert list(stream) == list(stream) == values(kit.deliver(stream, 20))
    assert kit.deliver(stream, 20, epoch=1) != kit.deliver(stream, 20)


def test_without_a_loader_each_run_is_another(kit):
    stream = kit.Count(30).shuffle(30)
    assert list(stream) != list(stream)
    shards = kit.Shards([3] * 30).shuffle(2)
    assert sorted(value for number in range(30) for value in shards.shard(number)) == list(kit.Shards([3] * 30))


@pytest.mark.parametrize("buffer_size", [0, -3, 2.5, True, None])
def test_a_buffer_that_is_none_is_refused(kit, buffer_size):
    with pytest.raises(OptionError, match="buffer_size"):
        kit.Count(3).shuffle(buffer_size)


def test_ranks_that_split_a_shuffled_stream_agree_on_the_order(kit):
    for stream in (kit.Count(40), kit.Shards([5] * 8)):
        parts = [kit.deliver(stream.shuffle(10).split_by_rank(rank, 3), 4, rank=rank) for rank in range(3)]
        assert sorted(values(values(parts))) == sorted(stream)


def test_a_shuffled_stream_pickles(kit):
    stream = kit.Count(10).map(kit.negative).shuffle(4, seed=1).split_by_rank(1, 2)
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)
