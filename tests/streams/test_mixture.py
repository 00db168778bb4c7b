"""Sources mixed by weight."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agnoload.errors import OptionError
from agnoload.streams import Mixture
from agnoload.streams.mixture import exact_shares

A, B = range(50_000), range(-2_000, 0)


def values(batches):
    return [value for batch in batches for value in batch]


def test_c13_never_keeps_the_shares_for_ever(kit):
    mixture = Mixture([A, B], [0.5, 0.5], stop="never")
    delivered = values(islice(kit.Loader(mixture, 100), 1000))
    assert len(delivered) == 100_000
    assert abs(sum(value < 0 for value in delivered) / 100_000 - 0.5) < 0.01


def test_c13_first_ends_with_a_source_and_repeats_nothing(kit):
    delivered = values(kit.deliver(Mixture([A, B], [0.5, 0.5], stop="first"), 100))
    assert len(set(delivered)) == len(delivered)
    assert sum(value < 0 for value in delivered) == 2_000
    assert 3_500 < len(delivered) < 4_500


def test_c13_last_delivers_each_at_least_once(kit):
    delivered = values(kit.deliver(Mixture([A, B], [0.5, 0.5], stop="last"), 1000))
    assert set(delivered) == {*A, *B}
    assert len(delivered) < 120_000


@pytest.mark.parametrize("per", ["sample", "batch"])
@pytest.mark.parametrize("stop", ["first", "last", "never"])
def test_c13_one_sequence_for_any_workers_and_after_a_resume(kit, per, stop):
    mixture = Mixture(
        [kit.Resumable(40), range(-7, 0), kit.Count(30).shuffle(9)], [0.6, 0.3, 0.1], stop, per, shuffle=True
    )
    alone = list(islice(kit.Loader(mixture, 8), 12))
    for workers in range(1, 4):
        loader = kit.Loader(mixture, 8, workers=workers, ahead=5)
        batches = iter(loader)
        for done in range(len(alone)):
            assert next(batches) == alone[done]
            state = json.loads(json.dumps(loader.plan.state()))
            if done % 4 == 1:
                rest = list(islice(kit.Loader(mixture, 8, workers=3 - workers, state=state), len(alone) - done - 1))
                assert rest == alone[done + 1 :]


def test_each_batch_has_its_exact_shares_and_the_long_run_too(kit):
    mixture = Mixture([range(999)] * 3, [0.6, 0.3, 0.1], per="batch", with_source=True)
    counts = [Counter(source for _, source in batch) for batch in islice(kit.Loader(mixture, 16), 10)]
    assert [[count[source] for source in range(3)] for count in counts[:3]] == [[10, 5, 1], [9, 5, 2], [10, 4, 2]]
    for end in (5, 10):
        assert sum(counts[:end], Counter()) == {0: 48 * end // 5, 1: 24 * end // 5, 2: 8 * end // 5}


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    size=st.integers(1, 20),
    batches=st.integers(1, 30),
)
def test_shares_are_never_further_off_than_one_sample(weights, size, batches):
    owed = [0] * len(weights)
    given_out = [0] * len(weights)
    for batch in range(1, batches + 1):
        counts, owed = exact_shares(weights, size, owed)
        assert sum(counts) == size
        assert min(counts) >= 0
        given_out = [total + count for total, count in zip(given_out, counts, strict=True)]
        for total, weight in zip(given_out, weights, strict=True):
            assert abs(total - weight * size * batch / sum(weights)) < len(weights)
    assert sum(owed) == 0


def test_the_batches_of_each_rank_have_their_exact_shares(kit):
    mixture = Mixture([range(100)] * 3, [0.6, 0.3, 0.1], per="batch", with_source=True)
    batches = [list(islice(kit.Loader(mixture.split_by_rank(rank, 2), 10), 3)) for rank in range(2)]
    for batch in values(batches):
        assert Counter(source for _, source in batch) == {0: 6, 1: 3, 2: 1}
    delivered = values(values(batches))
    assert len(set(delivered)) == len(delivered) == 60


def test_the_source_of_each_sample_is_told(kit):
    mixture = Mixture([[1, 2], kit.Count(2).map(kit.negative)], [1, 1], stop="last", with_source=True)
    assert {source for _, source in mixture} == {0, 1}
    assert all((source == 1) == (value <= 0) for value, source in mixture)


def test_map_style_sources_are_loaded_only_where_they_are_delivered(kit):
    loaded = []

    class Loud:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            loaded.append(index)
            return index

    mixture = Mixture([Loud()], [1])
    batches = kit.deliver(mixture, 4, workers=0)
    assert loaded == values(batches) == list(range(20))
    loaded.clear()
    loader = kit.Loader(mixture, 4, state=_after(kit, mixture, 4))
    assert loaded == list(range(16))
    loaded.clear()
    assert list(loader) == [[16, 17, 18, 19]]
    assert loaded == [16, 17, 18, 19]


def _after(kit, mixture, batches):
    loader = kit.Loader(mixture, 4)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.plan.state()


def test_shuffled_map_style_sources_are_another_permutation_each_pass(kit):
    mixture = Mixture([range(30)], [1], stop="never", shuffle=True)
    delivered = values(islice(kit.Loader(mixture, 30), 3))
    passes = [delivered[start : start + 30] for start in (0, 30, 60)]
    assert all(sorted(one) == list(range(30)) for one in passes)
    assert len(set(map(tuple, passes))) == 3
    assert list(range(30)) not in passes


def test_a_shuffled_stream_is_shuffled_anew_each_pass(kit):
    mixture = Mixture([kit.Count(30).shuffle(30)], [1], stop="never")
    first, second = islice(kit.Loader(mixture, 30), 2)
    assert sorted(first) == sorted(second)
    assert first != second


def test_sources_without_samples(kit):
    assert list(Mixture([[], [1]], [1, 1], stop="first", seed=0)) in ([], [1])
    assert list(Mixture([[], [1, 2]], [1, 1], stop="last", per="batch", batch_size=2)) == [1, 2]
    with pytest.raises(OptionError, match="source 0 yields none"):
        list(islice(Mixture([[], [1]], [1, 1], stop="never"), 10))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[1]], [1, 2]), "1 source and 2 weights"),
        (([], []), "at least one"),
        (([[1]], [0]), "positive.*got 0"),
        (([[1]], [float("nan")]), "nan"),
        (([[1]], [float("inf")]), "inf"),
        (([[1]], ["much"]), "much"),
        (([[1]], [1], "soon"), "'first', 'last' or 'never', got 'soon'"),
        (([[1]], [1], "first", "epoch"), "'sample' or 'batch', got 'epoch'"),
        (([3], [1]), "Mixture needs a dataset"),
    ],
)
def test_what_cannot_be_mixed_is_refused(arguments, words):
    with pytest.raises(OptionError, match=words):
        Mixture(*arguments)
    with pytest.raises(OptionError, match="batch_size"):
        Mixture([[1]], [1], batch_size=0)


def test_per_batch_needs_to_know_the_batch_size():
    with pytest.raises(OptionError, match="needs batch_size"):
        next(iter(Mixture([[1]], [1], per="batch")))


def test_a_mixture_pickles_and_says_what_it_is(kit):
    mixture = Mixture([[1, 2], [3]], [2, 1], stop="last", per="batch", batch_size=3)
    assert list(pickle.loads(pickle.dumps(mixture))) == list(mixture)
    assert repr(mixture) == "Mixture([[1, 2], [3]], [2.0, 1.0], stop='last', per='batch', batch_size=3)"


@pytest.mark.parametrize(("name", "value"), [("seed", "x"), ("seed", -1), ("shuffle", "x"), ("with_source", 1)])
def test_options_of_the_wrong_kind_are_refused_at_once(name, value):
    with pytest.raises(OptionError, match=rf"{name} must be .* got {value!r}"):
        Mixture([range(3)], [1.0], **{name: value})
