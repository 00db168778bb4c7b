"""Shuffled and mixed streams through a loader."""

from __future__ import annotations

import itertools
import json
import warnings

import numpy as np
import pytest

from agnoload import DataLoader, Mixture


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


def test_c12_the_seed_is_the_loaders_and_another_one_gives_another_order(kit, load):
    orders = [flat(load(kit.Count(100).shuffle(50), 10, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


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
