"""Shuffled and mixed streams: who comes when, with which shares, for any workers and after a resume."""

from __future__ import annotations

import itertools
import json
import pickle
import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload import DataLoader, Mixture, OptionError
from agnoload.samplers.apportion import exact_shares


def flat(batches):
    return [value for batch in batches for value in batch]


# ------------------------------------------------------------------------------------------------ C12: shuffle


def test_c12_a_shuffled_stream_comes_once_in_one_order_for_any_workers_and_another_each_epoch(kit, same_for_all):
    batches = same_for_all(lambda: kit.Count(1000).shuffle(100), 100, epochs=2, seed=0)
    first, second = flat(batches[:10]), flat(batches[10:])
    assert sorted(first) == sorted(second) == list(range(1000))
    assert first != second
    assert all(value <= place + 100 for epoch in (first, second) for place, value in enumerate(epoch))
    assert first != sorted(first)


def test_c12_shards_are_shuffled_too_once_and_the_same_for_any_workers(kit, same_for_all):
    batches = same_for_all(lambda: kit.Shards(200, 5).shuffle(10), 10, epochs=2, seed=0)
    first, second = flat(batches[:20]), flat(batches[20:])
    assert sorted(first) == sorted(second) == list(range(200))
    assert first != second


def test_c12_a_buffer_of_one_keeps_the_order(kit, same_for_all):
    assert flat(same_for_all(lambda: kit.Count(1000).shuffle(1), 100, seed=0)) == list(range(1000))


def test_c12_a_buffer_as_long_as_the_stream_permutes_all(kit, same_for_all):
    order = flat(same_for_all(lambda: kit.Count(1000).shuffle(1000), 100, seed=0))
    assert sorted(order) == list(range(1000))
    # Of a uniform permutation the first 100 have a mean of 499.5 and a standard error of 27.4.
    assert abs(np.mean(order[:100]) - 499.5) < 5 * 27.4
    assert abs(np.mean(order[-100:]) - 499.5) < 5 * 27.4


@pytest.mark.parametrize("workers", [0, 2])
def test_c12_after_300_samples_a_resumed_loader_gives_the_same_700(kit, workers):
    def make():
        return DataLoader(kit.Count(1000).shuffle(100), 100, seed=0, num_workers=workers)

    whole = [batch.tolist() for batch in make()]
    loader = make()
    first = [batch.tolist() for batch in itertools.islice(loader, 3)]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match="replays it: it reads the stream again from the start"):
        rest = [batch.tolist() for batch in resumed]
    assert first + rest == whole


@given(n=st.integers(0, 40), buffer_size=st.integers(1, 50), seed=st.integers(0, 9))
def test_every_value_comes_once_and_never_too_early(kit, deliver, n, buffer_size, seed):
    order = flat(deliver(kit.Count(n).shuffle(buffer_size), 7, seed=seed))
    assert sorted(order) == list(range(n))
    assert all(value < place + buffer_size for place, value in enumerate(order))


def test_all_orders_of_a_small_stream_are_equally_likely(kit):
    counts = Counter(tuple(kit.Count(3).shuffle(3, seed=seed)) for seed in range(1200))
    assert len(counts) == 6
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 20.5  # chi-square, 5 degrees: p = 0.001


def test_the_order_of_shards_is_shuffled_and_each_by_itself(kit, deliver):
    order = flat(deliver(kit.Sized([20] * 6, lanes=1).shuffle(20), 10))
    runs = [order[start : start + 20] for start in range(0, 120, 20)]
    shards = [{value // 20 for value in run} for run in runs]
    assert all(len(shard) == 1 for shard in shards)
    assert shards != [{number} for number in range(6)]
    assert sorted(order) == list(range(120))
    assert len({tuple(value % 20 for value in run) for run in runs}) == 6, "two shards were shuffled in the same way"


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


@pytest.mark.parametrize("buffer_size", [0, -3, 2.5, True, None])
def test_a_buffer_size_that_is_not_a_positive_int_is_rejected(kit, buffer_size):
    with pytest.raises(OptionError, match="buffer_size"):
        kit.Count(3).shuffle(buffer_size)


# ------------------------------------------------------------------------------------------------ C13: mixtures


def sources(kit, n=500, m=40):
    return [kit.Rows(n), kit.Rows(m, sign=-1)]


def streams(kit, n=500, m=40):
    return [kit.Count(n), kit.Count(m).map(kit.negative)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [sources, streams])
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_c13_first_ends_with_a_source_and_gives_no_sample_twice(kit, same_for_all, make, per):
    values = flat(same_for_all(lambda: Mixture(make(kit), [0.5, 0.5], stop="first", per=per), 16, seed=3))
    assert len(set(values)) == len(values)
    assert sorted(value for value in values if value < 0) == list(range(-40, 0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [sources, streams])
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_c13_last_gives_every_sample_at_least_once(kit, same_for_all, make, per):
    values = flat(same_for_all(lambda: Mixture(make(kit), [0.5, 0.5], stop="last", per=per), 16, seed=3))
    first = 1 if make is sources else 0
    assert set(values) == {*range(first, 500 + first), *range(-40, 0)}


def test_c13_never_goes_on_with_its_shares_for_any_workers(kit, everyone):
    expected = None
    for workers in everyone:
        loader = DataLoader(Mixture(sources(kit, 50, 7), [0.5, 0.5], stop="never"), 10, seed=3, **workers)
        with loader:
            found = flat(batch.tolist() for batch in loader.steps(60))
        expected = expected or found
        assert found == expected, workers
        assert len(found) == 600
    assert abs(sum(value < 0 for value in expected) / 600 - 0.5) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_c13_at_its_full_size(kit, workers):
    def make(stop):
        return DataLoader(Mixture(sources(kit, 50_000, 2_000), [0.5, 0.5], stop=stop), 100, seed=0, num_workers=workers)

    with make("never") as loader:
        values = np.concatenate(list(loader.steps(1000)))
    assert len(values) == 100_000
    assert abs((values < 0).mean() - 0.50) < 0.01
    values = np.concatenate(list(make("first")))
    assert len(np.unique(values)) == len(values)
    assert (values < 0).sum() == 2_000
    values = np.concatenate(list(make("last")))
    assert len(np.unique(values)) == 52_000


def test_c13_exact_shares_of_every_batch(kit, same_for_all):
    def make():
        parts = [kit.Rows(160), kit.Rows(160, sign=-1), kit.Count(160).map(lambda value: 1000 + value)]
        return Mixture(parts, [0.6, 0.3, 0.1], stop="first", per="batch", with_source=True)

    batches = same_for_all(make, 16, seed=3)
    counts = [[batch[1].count(source) for source in range(3)] for batch in batches]
    assert counts[:2] == [[10, 5, 1], [9, 5, 2]]
    assert np.sum(counts[:10], 0).tolist() == [96, 48, 16]
    for values, parts in batches:
        assert [2 if value >= 1000 else int(value < 0) for value in values] == parts


def test_c13_a_shuffled_mixture_goes_through_a_source_in_another_order_each_time(kit, same_for_all):
    batches = same_for_all(lambda: Mixture([kit.Rows(50)], [1], shuffle=True), 10, epochs=2, seed=3)
    first, second = flat(batches[:5]), flat(batches[5:])
    assert sorted(first) == sorted(second) == list(range(1, 51))
    assert first != second


def test_c13_rows_of_a_mixture_are_loaded_only_by_the_worker_that_delivers_them(kit, load, tmp_path):
    log = tmp_path / "log"
    batches = load(Mixture([kit.Rows(30, log=log), kit.Rows(30, log=log)], [1, 1]), 5, num_workers=3, seed=1)
    assert log.stat().st_size == sum(map(len, batches))


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["first", "last", "never"])
@pytest.mark.parametrize("workers", [0, 2])
def test_c13_a_mixture_resumes_at_every_batch(kit, stop, workers):
    def make():
        parts = [kit.Rows(20), kit.Rows(7, sign=-1), kit.Resumable(9)]
        return DataLoader(Mixture(parts, [3, 2, 1], stop=stop, shuffle=True), 4, seed=3, num_workers=workers)

    loader = make()
    whole, states = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in itertools.islice(loader.steps(16), 16):
            whole.append(batch.tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
        for place in range(0, 16, 3 if workers else 1):
            resumed = make()
            resumed.load_state_dict(states[place])
            with resumed:
                assert [batch.tolist() for batch in resumed.steps(15 - place)] == whole[place + 1 :], place
    loader.close()


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=5), size=st.integers(1, 20), batches=st.integers(1, 30)
)
def test_shares_are_never_further_off_than_one_sample(weights, size, batches):
    owed = [0] * len(weights)
    totals = [0] * len(weights)
    for batch in range(1, batches + 1):
        counts, owed = exact_shares(weights, size, owed)
        assert sum(counts) == size
        assert min(counts) >= 0
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        for total, weight in zip(totals, weights, strict=True):
            assert abs(total - weight * size * batch / sum(weights)) < len(weights)
    assert sum(owed) == 0


def test_the_batches_of_each_rank_have_their_exact_shares(kit, deliver):
    mixture = Mixture([range(100)] * 3, [0.6, 0.3, 0.1], per="batch", with_source=True)
    batches = [batch for rank in range(2) for batch in deliver(mixture.split_by_rank(rank, 2), 10)[:3]]
    for batch in batches:
        assert Counter(source for _, source in batch) == {0: 6, 1: 3, 2: 1}
    assert len(set(flat(batches))) == 60


def test_rows_are_loaded_only_where_they_are_delivered_also_after_a_resume(deliver):
    loaded = []

    class Loud:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            loaded.append(index)
            return index

    mixture = Mixture([Loud()], [1])
    loader = DataLoader(mixture, 4, collate_fn=list)
    assert flat(itertools.islice(loader, 4)) == loaded == list(range(16))
    loaded.clear()
    assert deliver(mixture, 4, state=loader.state_dict(), seed=loader.seed) == [loaded] == [[16, 17, 18, 19]]


def test_each_pass_through_a_source_has_an_order_of_its_own(kit):
    for mixture in (
        Mixture([range(30)], [1], stop="never", shuffle=True),
        Mixture([kit.Count(30).shuffle(30)], [1], stop="never"),
    ):
        passes = [batch.tolist() for batch in DataLoader(mixture, 30).steps(3)]
        assert [sorted(one) for one in passes] == [list(range(30))] * 3
        assert len(set(map(tuple, passes))) == 3


def test_sources_without_samples(kit):
    assert list(Mixture([[], [1]], [1, 1], stop="first", seed=0)) in ([], [1])
    assert list(Mixture([[], [1, 2]], [1, 1], stop="last", per="batch", batch_size=2)) == [1, 2]
    with pytest.raises(OptionError, match="source 0 yields none"):
        list(itertools.islice(Mixture([[], [1]], [1, 1], stop="never"), 10))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([[1]], [1, 2]), {}, "1 source and 2 weights"),
        (([], []), {}, "at least one"),
        (([[1]], [0]), {}, "positive.*got 0"),
        (([[1]], [float("nan")]), {}, "nan"),
        (([[1]], ["much"]), {}, "much"),
        (([[1]], [1], "soon"), {}, "'first', 'last' or 'never', got 'soon'"),
        (([[1]], [1], "first", "epoch"), {}, "'sample' or 'batch', got 'epoch'"),
        (([3], [1]), {}, "Mixture needs a dataset"),
        (([[1]], [1]), {"batch_size": 0}, "batch_size"),
        (([[1]], [1]), {"seed": "x"}, "seed must be .* got 'x'"),
        (([[1]], [1]), {"shuffle": "x"}, "shuffle must be .* got 'x'"),
        (([[1]], [1]), {"with_source": 1}, "with_source must be .* got 1"),
    ],
)
def test_what_cannot_be_mixed_is_rejected_at_once(arguments, options, words):
    with pytest.raises(OptionError, match=words):
        Mixture(*arguments, **options)


def test_per_batch_needs_a_batch_size_where_no_loader_says_it():
    with pytest.raises(OptionError, match="needs batch_size"):
        next(iter(Mixture([[1]], [1], per="batch")))


def test_streams_pickle_and_say_what_they_are(kit):
    mixture = Mixture([[1, 2], [3]], [2, 1], stop="last", per="batch", batch_size=3)
    shuffled = kit.Count(10).map(kit.negative).shuffle(4, seed=1).split_by_rank(1, 2)
    for stream in (mixture, shuffled):
        assert list(pickle.loads(pickle.dumps(stream))) == list(stream)
    assert repr(mixture) == "Mixture([[1, 2], [3]], [2.0, 1.0], stop='last', per='batch', batch_size=3)"
    stream = (kit.Named().map(str.upper) + kit.Named().filter(bool)).shuffle(10, seed=3).split_by_rank(0, 2)
    chain = "ChainDataset([Named().map(str.upper), Named().filter(bool)])"
    assert repr(stream) == f"{chain}.shuffle(10, seed=3).split_by_rank(0, 2)"
