"""Mixed streams: with which shares, until when, for any workers and after a resume."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import DataLoader, Mixture, OptionError
from agnoload.samplers.apportion import exact_shares

WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=5)


def flat(batches):
    return [value for batch in batches for value in batch]


def of_sizes(kit, sizes):
    """Sources of given sizes, streams and datasets in turn; source k holds 100 * k, 100 * k + 1, ..."""
    ranges = [range(100 * k, 100 * k + size) for k, size in enumerate(sizes)]
    return [kit.Resumable(len(r), start=r.start) if k % 2 else r for k, r in enumerate(ranges)]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    stop=st.sampled_from(["first", "last"]),
    per=st.sampled_from(["sample", "batch"]),
    shuffle=st.booleans(),
    workers=st.integers(0, 2),
)
def test_a_mixture_ends_with_its_first_source_or_gives_every_sample(
    kit, deliver, sizes, weights, stop, per, shuffle, workers
):
    mixture = Mixture(of_sizes(kit, sizes), weights[: len(sizes)], stop, per, shuffle=shuffle, with_source=True)
    batches = deliver(mixture, 3, workers)
    assert batches == deliver(mixture, 3)
    values = [value for value, source in flat(batches)]
    assert [value // 100 for value in values] == [source for _, source in flat(batches)]
    everything = {100 * k + n for k, size in enumerate(sizes) for n in range(size)}
    counts = Counter(value // 100 for value in values)
    if stop == "first":
        assert len(set(values)) == len(values)
        assert any(counts[k] == size for k, size in enumerate(sizes))
    else:
        assert set(values) == everything
    if not shuffle:
        for k, size in enumerate(sizes):
            own = [value for value in values if value // 100 == k]
            assert own == [100 * k + n % size for n in range(len(own))]


@settings(max_examples=10)
@given(weights=WEIGHTS, size=st.integers(1, 12), world=st.integers(1, 3), workers=st.integers(0, 2))
def test_the_batches_of_each_rank_have_their_exact_shares(kit, deliver, weights, size, world, workers):
    mixture = Mixture(of_sizes(kit, [100] * len(weights)), weights, per="batch", with_source=True)
    owed, wanted = [0] * len(weights), []
    for _ in range(2 * world):
        counts, owed = exact_shares(weights, size, owed)
        wanted.append({k: count for k, count in enumerate(counts) if count})
    for rank in range(world):
        batches = deliver(mixture.split_by_rank(rank, world), size, workers)
        assert [dict(Counter(source for _, source in batch)) for batch in batches[:2]] == wanted[rank::world]


@settings(max_examples=30)
@given(weights=WEIGHTS, size=st.integers(1, 20), batches=st.integers(1, 30))
def test_in_the_long_run_no_share_is_off_by_more_than_a_sample_for_each_source(weights, size, batches):
    owed, totals = [0] * len(weights), [0] * len(weights)
    for batch in range(1, batches + 1):
        counts, owed = exact_shares(weights, size, owed)
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        for total, weight in zip(totals, weights, strict=True):
            assert abs(total - weight * size * batch / sum(weights)) < len(weights)


def test_shares_of_a_batch_are_those_by_largest_remainder(kit, load):
    mixture = Mixture([kit.Rows(160), kit.Rows(160), kit.Count(160)], [0.6, 0.3, 0.1], per="batch", with_source=True)
    counts = [[sources.count(k) for k in range(3)] for _, sources in load(mixture, 16)]
    assert counts[:2] == [[10, 5, 1], [9, 5, 2]]
    assert np.sum(counts[:10], 0).tolist() == [96, 48, 16]
    mixture = Mixture([range(40), range(40), range(40)], [0.6, 0.3, 0.1], per="batch", with_source=True)
    lists = [each for batch in DataLoader(mixture.batch(4), 5, collate_fn=list) for each in batch]
    assert lists == list(DataLoader(mixture, 4, collate_fn=list)), "shares of the lists, not of the loader's batches"


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=3), shuffle=st.booleans(), workers=st.integers(0, 2))
def test_a_mixture_without_end_goes_on_and_resumes(kit, sizes, shuffle, workers):
    def make(workers=0):
        mixture = Mixture(of_sizes(kit, sizes), [3, 2, 1][: len(sizes)], stop="never", shuffle=shuffle)
        return DataLoader(mixture, 4, seed=3, num_workers=workers, worker_type="thread")

    with make() as loader:
        whole = [batch.tolist() for batch in loader.steps(12)]
    with make(workers) as loader:
        first = [batch.tolist() for batch in loader.steps(5)]
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        assert first + [batch.tolist() for batch in loader.steps(7)] == whole


@pytest.mark.slow
def test_sources_of_50000_and_2000_samples_are_mixed_half_and_half(kit):
    def make(stop):
        sources = [kit.Rows(50_000), kit.Rows(2_000, sign=-1)]
        return DataLoader(Mixture(sources, [0.5, 0.5], stop=stop), 1000, seed=0)

    with make("never") as loader:
        values = np.concatenate(list(loader.steps(100)))
    assert len(values) == 100_000
    assert abs((values < 0).mean() - 0.50) < 0.01
    values = np.concatenate(list(make("first")))
    assert len(np.unique(values)) == len(values)
    assert (values < 0).sum() == 2_000
    assert len(np.unique(np.concatenate(list(make("last"))))) == 52_000


def test_rows_are_loaded_only_by_the_worker_that_delivers_them_also_after_a_resume(kit, deliver, tmp_path):
    log = tmp_path / "log"
    mixture = Mixture([kit.Rows(30, log=log), kit.Rows(30, log=log)], [1, 1])
    batches = deliver(mixture, 5, 3)
    assert log.stat().st_size == len(flat(batches))
    loader = DataLoader(mixture, 5, seed=7, collate_fn=list)
    assert list(itertools.islice(loader, 4)) == batches[:4]
    log.write_bytes(b"")
    assert deliver(mixture, 5, state=loader.state_dict()) == batches[4:]
    assert log.stat().st_size == len(flat(batches[4:]))


def test_each_pass_through_a_source_has_an_order_of_its_own(kit):
    for mixture in (
        Mixture([range(30)], [1], stop="never", shuffle=True),
        Mixture([kit.Count(30).shuffle(30)], [1], stop="never"),
    ):
        passes = [batch.tolist() for batch in DataLoader(mixture, 30).steps(3)]
        assert [sorted(one) for one in passes] == [list(range(30))] * 3
        assert len(set(map(tuple, passes))) == 3


def test_sources_without_samples():
    assert list(Mixture([[], [1]], [1, 1], stop="first", seed=0)) in ([], [1])
    assert list(Mixture([[], [1, 2]], [1, 1], stop="last", per="batch", batch_size=2)) == [1, 2]
    with pytest.raises(OptionError, match="source 0 yields none"):
        list(itertools.islice(Mixture([[], [1]], [1, 1], stop="never"), 10))


REJECTED = [
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
]


def test_what_cannot_be_mixed_is_rejected_at_once():
    for arguments, options, words in REJECTED:
        with pytest.raises(OptionError, match=words):
            Mixture(*arguments, **options)
    with pytest.raises(OptionError, match="needs batch_size"):
        next(iter(Mixture([[1]], [1], per="batch")))


def test_a_mixture_pickles_and_says_what_it_is():
    mixture = Mixture([[1, 2], [3]], [2, 1], stop="last", per="batch", batch_size=3)
    assert list(pickle.loads(pickle.dumps(mixture))) == list(mixture)
    assert repr(mixture) == "Mixture([[1, 2], [3]], [2.0, 1.0], stop='last', per='batch', batch_size=3)"
    assert repr(Mixture([[1]], [1], shuffle=True, seed=0)).endswith("per='sample', shuffle=True, seed=0)")
