"""Shuffled streams: who comes when, with which seed, for any workers and after a resume."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import DataLoader, Mixture


def flat(batches):
    return [value for batch in batches for value in batch]


@settings(max_examples=25)
@given(n=st.integers(0, 40), buffer_size=st.integers(1, 50), seed=st.integers(0, 9), workers=st.integers(0, 2))
def test_every_value_comes_once_and_never_too_early(kit, deliver, n, buffer_size, seed, workers):
    stream = kit.Count(n).shuffle(buffer_size)
    order = flat(deliver(stream, 7, workers, seed=seed))
    assert sorted(order) == list(range(n))
    assert all(value < place + buffer_size for place, value in enumerate(order))
    assert buffer_size > 1 or order == list(range(n))
    assert order == flat(deliver(stream, 7, seed=seed))


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=7), buffer_size=st.integers(2, 9), epoch=st.integers(0, 3)
)
def test_shards_come_in_random_order_each_shuffled_by_itself(kit, deliver, sizes, buffer_size, epoch):
    order = flat(deliver(kit.Sized(sizes, lanes=1).shuffle(buffer_size), 4, epoch=epoch))
    assert sorted(order) == list(range(sum(sizes)))
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    runs = [owner for owner, _ in itertools.groupby(owners[value] for value in order)]
    assert len(runs) == len(set(runs)), "a shard is read as a whole"


def test_a_thousand_values_are_mixed_and_in_another_order_in_the_next_epoch(kit, deliver):
    first, second = (flat(deliver(kit.Count(1000).shuffle(100), 100, epoch=epoch)) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first != second != sorted(second)
    runs = [flat(deliver(kit.Sized([20] * 6, lanes=1).shuffle(20), 20, epoch=epoch)) for epoch in (0, 1)]
    for order in runs:
        shards = [order[start : start + 20] for start in range(0, 120, 20)]
        assert [min(shard) for shard in shards] != sorted(min(shard) for shard in shards)
        assert len({tuple(value % 20 for value in shard) for shard in shards}) == 6, "two were shuffled in the same way"
    assert runs[0] != runs[1]


def test_all_orders_of_a_small_stream_are_equally_likely(kit):
    counts = Counter(tuple(kit.Count(3).shuffle(3, seed=seed)) for seed in range(1200))
    assert len(counts) == 6
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 20.5  # chi-square, 5 degrees: p = 0.001


def test_shuffles_within_one_pipeline_draw_different_numbers(kit, deliver):
    mixed = Mixture([kit.Count(50).shuffle(50), kit.Count(50).shuffle(50)], [1, 1], per="batch", with_source=True)
    order = flat(deliver(mixed, 2))
    one, other = ([value for value, source in order if source == number] for number in (0, 1))
    assert sorted(one) == sorted(other)
    assert one != other


def test_the_seed_is_the_loaders_unless_the_shuffle_has_its_own(kit, deliver):
    orders = [flat(deliver(kit.Count(100).shuffle(50), 10, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    stream = kit.Count(20).shuffle(20, seed=3)
    assert deliver(stream, 20, seed=0) == deliver(stream, 20, seed=1) == [list(stream)] == [list(stream)]
    assert deliver(stream, 20, epoch=1) != deliver(stream, 20)


def test_without_a_loader_each_pass_has_another_order(kit):
    stream = kit.Count(30).shuffle(30)
    assert list(stream) != list(stream)
    shards = kit.Sized([3] * 30).shuffle(2)
    assert sorted(value for number in range(30) for value in shards.shard(number)) == list(range(90))


def test_after_300_samples_a_resumed_loader_gives_the_same_700_and_says_that_it_reads_them_again(kit, load):
    whole = load(kit.Count(1000).shuffle(100), 100)
    loader = DataLoader(kit.Count(1000).shuffle(100), 100, seed=7)
    first = [batch.tolist() for batch in itertools.islice(loader, 3)]
    resumed = DataLoader(kit.Count(1000).shuffle(100), 100, seed=7)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="replays it: it reads the stream again from the start"):
        assert first + [batch.tolist() for batch in resumed] == whole


def test_streams_pickle_and_say_what_they_are(kit):
    shuffled = kit.Count(10).map(kit.negative).shuffle(4, seed=1).split_by_rank(1, 2)
    assert list(pickle.loads(pickle.dumps(shuffled))) == list(shuffled)
    stream = (kit.Named().map(str.upper) + kit.Named().filter(bool)).shuffle(10, seed=3).split_by_rank(0, 2, "pad")
    chain = "ChainDataset([Named().map(str.upper), Named().filter(bool)])"
    assert repr(stream) == f"{chain}.shuffle(10, seed=3).split_by_rank(0, 2, uneven='pad')"
    assert repr(kit.Named().take(3).batch(2).pack(5)) == "Named().take(3).batch(2).pack(5)"
