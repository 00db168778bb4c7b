"""Samples that cannot be loaded: left out, replaced, tried again, counted; the same for any number of workers."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import AgnoloadError, Batch, DataLoader, OptionError, SampleStopped, sample_rng
from agnoload.errors import TooManyFailed
from agnoload.fetching.error_policy import JUDGED_FROM, FailureBudget, ReplacementKeys, Retry
from agnoload.messages import Failure, Reply
from agnoload.testing import FakePool

few = settings(max_examples=15, deadline=None)
ORDERS = st.lists(st.integers(0, 9), max_size=20)
BAD = st.sets(st.integers(0, 19), max_size=12)
SIZES = st.integers(1, 7)


class Holes:
    """The ints 0 to n - 1; those in `bad` raise."""

    def __init__(self, n: int = 10, bad: Any = (3, 7)) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"no file for {index}")
        return index


class Stops(Holes):
    """`next` of nothing in sample 5."""

    def __init__(self, error: type[BaseException] = StopIteration) -> None:
        super().__init__(8)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error
        return index


class StopsAtOnce(Stops):
    def __getitems__(self, indices: list[int]) -> object:
        return [self[index] for index in indices]


class Stream(agnoload.IterableDataset):
    def __init__(self, says: int, gives: int) -> None:
        self.says, self.gives = says, gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self):
        return iter(range(self.gives))


def lists(batches: Any) -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in batches]


def batches_of(n: int, size: int) -> list[list[int]]:
    return [list(range(low, min(low + size, n))) for low in range(0, n, size)]


def outcome(loader: DataLoader[Any]) -> tuple[list[Any], BaseException | None]:
    """What a loader gives in an epoch, and the error that ends it."""
    got: list[Any] = []
    with loader:
        try:
            for batch in loader:
                got.append(np.asarray(batch).tolist())
        except BaseException as error:
            return got, error
    return got, None


def answered(order: list[int], *arguments: Any, **options: Any) -> DataLoader[Any]:
    """A loader whose pool answers in a chosen order."""
    loader = DataLoader(*arguments, num_workers=2, **options)
    loader._keeper.open = lambda fetch, workers: (FakePool(order, fetch), None)  # type: ignore[method-assign]
    return loader


# ------------------------------------------------------------------------------------------------ any workers


def decide(error: Exception, index: int) -> str:
    assert isinstance(error, OSError)
    return {3: "skip", 7: "replace"}[index]


def breaks(error: Exception, index: int) -> str:
    raise KeyError(index)


def stop(*_: object) -> str:
    raise StopIteration


def collate_stops(samples: Any) -> Any:
    if samples in ([4, 5], 4):
        next(iter([]))
    return np.asarray(samples)


class StopsToConvert(agnoload.Backend):
    name = "stops"

    def convert(self, leaf: object) -> object:
        raise StopIteration


class Ends:
    """A sampler that raises after five indices."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self):
        yield from range(5)
        raise self.error

    def __len__(self) -> int:
        return 8


def scene(dataset: Any, batch_size: int | None = 2, **options: Any) -> dict[str, Any]:
    return {"dataset": dataset, "batch_size": batch_size, "seed": 3, **options}


SKIPPED, BY_DRAWS = [[0, 1, 2], [4, 5, 6], [8, 9]], None
MORE = Holes(20, (3, 7, 11))
STOPPED = "SampleStopped: StopIteration was raised while "
SCENES: dict[str, tuple[dict[str, Any], Any, str, list[int]]] = {
    "raise": (scene(Holes(), 4), [], "OSError: no file for 3", [3]),
    "skip": (scene(Holes(), 4, on_error="skip"), SKIPPED, "", [3, 7]),
    "skip whole batches": (
        scene(Holes(), 1, batch_sampler=[[3, 7], [0, 1], [7]], on_error="skip"), [[0, 1]], "", [3, 7, 7],
    ),
    "skip, without batches": (scene(Holes(4), None, on_error="skip"), [0, 1, 2], "", [3]),
    "skip, a stopped sample": (scene(Stops(), on_error="skip"), [[0, 1], [2, 3], [4], [6, 7]], "", [5]),
    "replace": (scene(Holes(), 4, on_error="replace"), BY_DRAWS, "", [3, 7]),
    "replace, by a user's sampler": (
        scene(Holes(), 1, batch_sampler=[[3, 1], [0, 7]], on_error="replace"), [[1, 1], [0, 0]], "", [3, 7],
    ),
    "replace, none is good": (scene(Holes(10, range(10)), 4, on_error="replace"), [], "OSError: no file for 0", [0]),
    "a callable": (scene(Holes(), 4, on_error=decide), BY_DRAWS, "", [3, 7]),
    "a callable that raises": (scene(Holes(), 4, on_error=breaks), [], "KeyError: 3", [3]),
    "too many": (
        scene(MORE, 4, on_error="skip", max_failed=2), SKIPPED[:2], "TooManyFailed: 3 samples of epoch 0", [3, 7, 11],
    ),
    "a sample stops": (scene(Stops()), [[0, 1], [2, 3]], f"{STOPPED}index 5 ", [5]),
    "a generator is closed": (
        scene(Stops(GeneratorExit)), [[0, 1], [2, 3]], "SampleStopped: GeneratorExit was raised while index 5 ", [5],
    ),
    "a batch of samples stops": (scene(StopsAtOnce(), 6), [], f"{STOPPED}6 indices", []),
    "on_error stops": (scene(Stops(), 6, on_error=stop), [], "SampleStopped: ", [5]),
    "collate stops": (scene(range(8), collate_fn=collate_stops), [[0, 1], [2, 3]], f"{STOPPED}batch 2 ", []),
    "collate of one stops": (scene(range(8), None, collate_fn=collate_stops), [0, 1, 2, 3], f"{STOPPED}batch 4 ", []),
    "a backend stops": (scene(range(8), backend=StopsToConvert()), [], "SampleStopped: ", []),
    "a sampler stops": (
        scene(range(8), sampler=Ends(GeneratorExit())), [[0, 1], [2, 3]], "SampleStopped: GeneratorExit", [],
    ),
    "a sampler raises": (
        scene(range(8), 1, sampler=Ends(KeyError("no more"))), [[0], [1], [2], [3], [4]], "KeyError: 'no more'", [],
    ),
}  # fmt: skip
"""By name: options, the batches that come, the error behind them, and the indices in the account."""
NOTES = {
    "raise": r"while index 3 was loaded \(item 3 of batch 0, epoch 0\)",
    "replace, none is good": "none of 10 other samples",
    "a callable that raises": "batch 0",
}


@pytest.mark.parametrize(
    "workers",
    [
        {},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
        {"num_workers": 2, "worker_type": "thread"},
    ],
    ids=["inline", "processes", "threads"],
)
def test_a_bad_sample_is_treated_as_asked_for_with_any_workers(workers: dict[str, Any]) -> None:
    """C43, C45: what comes, what is raised, with which notes, and which samples are in the account."""
    for name, (options, batches, text, indices) in SCENES.items():
        loader = DataLoader(**options, **workers)
        got, error = outcome(loader)
        said = "" if error is None else f"{type(error).__name__}: {error}"
        assert got == (outcome(DataLoader(**options))[0] if batches is BY_DRAWS else batches), name
        assert said.startswith(text), name
        assert bool(said) == bool(text), name
        assert [failure.index for failure in loader.stats().failed] == indices, name
        assert re.search(NOTES.get(name, ""), "\n".join(getattr(error, "__notes__", []))), name
    if workers.get("num_workers"):
        assert isinstance(outcome(DataLoader(range(8), 2, worker_init_fn=stop, **workers))[1], SampleStopped)


@pytest.mark.parametrize("gives", [6, 10])
def test_a_stream_of_another_length_than_it_says_is_one_warning(gives: int) -> None:
    """C45."""
    with DataLoader(Stream(8, gives), 2) as data, pytest.warns(agnoload.AgnoloadWarning) as warned:
        assert np.concatenate(list(data)).tolist() == list(range(gives))
    (warning,) = warned
    assert "8" in str(warning.message)
    assert str(gives) in str(warning.message)


def test_an_iterator_that_has_ended_with_an_error_says_so() -> None:
    batches = iter(DataLoader(range(8), 4, sampler=Ends(OSError("no more keys"))))
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(OSError, match="no more keys"):
        next(batches)
    for _ in range(2):
        with pytest.raises(AgnoloadError, match="has ended with an error \\(OSError\\)"):
            next(batches)


# ------------------------------------------------------------------------------------------------ skip and replace


@few
@given(bad=BAD, size=SIZES, order=ORDERS)
def test_skip_leaves_out_the_bad_samples_and_the_batches_that_have_no_other(
    bad: set[int], size: int, order: list[int]
) -> None:
    loader = answered(order, Holes(20, bad), size, on_error="skip")
    wanted = [[index for index in batch if index not in bad] for batch in batches_of(20, size)]
    assert lists(loader) == [batch for batch in wanted if batch]
    assert [(failure.index, failure.error) for failure in loader.stats().failed] == [
        (index, f"OSError: no file for {index}") for index in sorted(bad)
    ]


@few
@given(bad=BAD, size=SIZES, order=ORDERS, shuffle=st.booleans(), seed=st.integers(0, 9), data=st.data())
def test_replace_takes_good_samples_of_the_epoch_the_same_in_any_order_and_after_a_resume(
    bad: set[int], size: int, order: list[int], shuffle: bool, seed: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"batch_size": size, "seed": seed, "shuffle": shuffle}
    good = lists(DataLoader(range(20), **options))
    options |= {"dataset": Holes(20, bad), "on_error": "replace"}
    whole = lists(DataLoader(**options))
    for batch, asked in zip(whole, good, strict=True):
        assert len(batch) == len(asked)
        assert not bad & set(batch)
        assert [got for got, index in zip(batch, asked, strict=True) if index not in bad] == [
            index for index in asked if index not in bad
        ]
    assert lists(answered(order, **options)) == whole
    stop = data.draw(st.integers(0, len(whole) - 1))
    first, second = DataLoader(**options), DataLoader(**options)
    assert lists(islice(first, stop)) == whole[:stop]
    second.load_state_dict(first.state_dict())
    assert lists(second) == whole[stop:]


@few
@given(actions=st.dictionaries(st.integers(0, 19), st.sampled_from(["skip", "replace", "raise", "leave"])), size=SIZES)
def test_a_callable_decides_by_error_and_index(actions: dict[int, str], size: int) -> None:
    asked: list[int] = []

    def on_error(error: Exception, index: int) -> str:
        assert str(error) == f"no file for {index}"
        asked.append(index)
        return actions[index]

    got, error = outcome(DataLoader(Holes(20, actions), size, on_error=on_error))
    final = [index for index in sorted(actions) if actions[index] in ("raise", "leave")]
    wanted = []
    for batch in batches_of(20, size):
        if set(batch) & set(final):
            break
        wanted.append(sum(actions.get(index) != "skip" for index in batch))
    assert [len(batch) for batch in got] == [count for count in wanted if count]
    assert asked == [index for index in sorted(actions) if not final or index <= final[0]]
    if not final:
        assert error is None
    elif actions[final[0]] == "raise":
        assert (type(error), str(error)) == (OSError, f"no file for {final[0]}")
    else:
        assert isinstance(error, OptionError)
        assert "'raise', 'skip' or 'replace', got 'leave'" in str(error)


@given(st.integers(0, 2**40), st.integers(0, 9), st.integers(1, 40), st.booleans())
def test_replacements_are_indices_of_that_epoch(seed: int, epoch: int, count: int, batches: bool) -> None:
    sampler: Any = agnoload.RandomSampler(range(50), num_samples=30)
    if batches:
        sampler = agnoload.BatchSampler(sampler, 4, drop_last=True)
    rng = np.random.default_rng(seed)
    found = ReplacementKeys(sampler, None)(seed, epoch, rng, count).tolist()
    orders = sampler.batches(seed, epoch) if batches else [sampler.order(seed, epoch)]
    whole = [index for part in orders for index in part]
    assert set(found) <= set(whole)
    assert len(found) == min(count, 4 if batches else len(found))


def test_replace_draws_for_the_stand_in_as_if_nothing_had_been_drawn() -> None:
    class Noisy(Holes):
        def __getitem__(self, index: int) -> Any:
            drawn = sample_rng().random()
            super().__getitem__(index)
            return drawn

    bad = np.concatenate(list(DataLoader(Noisy(), 4, on_error="replace", seed=1)))
    good = np.concatenate(list(DataLoader(Noisy(bad=()), 4, seed=1)))
    assert bad.tolist() == good.tolist()  # keyed by position, whatever stands there


class Gathers(Holes):
    """Gives whole batches, and counts what it is asked for one by one."""

    singles = calls = 0

    def __getitems__(self, indices: list[int]) -> object:
        self.calls += 1
        return Batch(np.array([super(Gathers, self).__getitem__(index) for index in indices]))

    def __getitem__(self, index: int) -> int:
        self.singles += 1
        return super().__getitem__(index)


def test_whole_batches_are_asked_for_first_tried_again_and_only_bad_ones_are_loaded_one_by_one() -> None:
    dataset = Gathers()
    loader = DataLoader(dataset, 4, on_error="skip", retry=Retry(OSError, times=1, wait=0.0))
    assert lists(loader) == [[0, 1, 2], [4, 5, 6], [8, 9]]
    assert (dataset.calls, dataset.singles) == (5, 10)  # two batches twice; in each, the bad sample twice


def test_draws_after_a_whole_batch_that_failed_are_those_of_a_fresh_one() -> None:
    class Draws(Holes):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index), random.random()

    class DrawsAtOnce(Draws):
        def __getitems__(self, indices: list[int]) -> Any:
            return [self[index] for index in indices]

    one, many = (list(DataLoader(kind(), 5, on_error="skip", seed=2)) for kind in (Draws, DrawsAtOnce))
    assert [leaf.tolist() for batch in one for leaf in batch] == [leaf.tolist() for batch in many for leaf in batch]


# ------------------------------------------------------------------------------------------------ tries again


class Flaky(Holes):
    """Sample `i` fails the first `failures[i]` times, after it has drawn; the tries are counted in files."""

    def __init__(self, folder: str, failures: list[int]) -> None:
        super().__init__(len(failures))
        self.folder, self.failures = folder, failures

    def __getitem__(self, index: int) -> Any:
        drawn = sample_rng().random()
        tries = sum(name.startswith(f"{index}-") for name in os.listdir(self.folder))
        if tries < self.failures[index]:
            open(os.path.join(self.folder, f"{index}-{tries}"), "x").close()
            raise TimeoutError("not yet")
        return index, drawn


@few
@given(failures=st.lists(st.integers(0, 3), min_size=1, max_size=7), times=st.integers(1, 3), size=SIZES)
def test_a_sample_that_succeeds_at_last_is_what_it_would_have_been(
    tmp_path_factory: pytest.TempPathFactory, failures: list[int], times: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("tries")
    flaky, good = (Flaky(str(folder), counts) for counts in (failures, [0] * len(failures)))
    loader = DataLoader(flaky, size, retry=Retry((OSError, KeyError), times=times, wait=0.0), on_error="skip", seed=1)
    tried = {int(i): d for batch in loader for i, d in zip(*(leaf.tolist() for leaf in batch), strict=True)}
    wanted = {int(i): d for batch in DataLoader(good, size, seed=1) for i, d in zip(*batch, strict=True)}
    bad = [index for index, count in enumerate(failures) if count > times]
    assert tried == {index: drawn for index, drawn in wanted.items() if index not in bad}
    assert [failure.index for failure in loader.stats().failed] == bad
    assert len(list(folder.iterdir())) == sum(min(count, times + 1) for count in failures)
    flaky.folder = str(tmp_path_factory.mktemp("not tried again"))
    with pytest.raises(TimeoutError) if any(failures) else nullcontext():
        list(DataLoader(flaky, size, retry=(KeyError, ValueError)))
    assert len(os.listdir(flaky.folder)) == bool(any(failures))


@pytest.mark.slow
def test_a_sample_is_tried_again_in_workers_too(tmp_path: Any) -> None:
    with DataLoader(Flaky(str(tmp_path), [0, 1, 2, 3]), 2, num_workers=2, retry=Retry(OSError, wait=0.0)) as loader:
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
        assert loader.stats().failed == ()
    assert len(os.listdir(tmp_path)) == 6


@given(st.integers(1, 9), st.floats(0, 9), st.floats(1, 9), st.floats(0, 99))
def test_the_pauses_between_tries_grow_up_to_the_longest(
    times: int, wait: float, factor: float, longest: float
) -> None:
    slept: list[float] = []
    retry = Retry(OSError, times=times, wait=wait, factor=factor, longest=longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", slept.append)
        with pytest.raises(OSError, match="no file for 3"):
            list(DataLoader(Holes(), 4, retry=retry))
    assert tuple(slept) == retry.pauses
    assert len(slept) == times
    assert slept == sorted(slept)
    assert slept[0] == min(wait, longest)
    assert max(slept) <= longest


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retry(()),
        lambda: Retry(KeyboardInterrupt),
        lambda: Retry("OSError"),
        lambda: Retry(OSError, times=0),
        lambda: Retry(OSError, times=True),
        lambda: Retry(OSError, wait=-1),
        lambda: Retry(OSError, factor=0.5),
        lambda: Retry(OSError, longest=float("nan")),
        lambda: DataLoader(range(3), retry=3),
        *(lambda value=value: DataLoader(range(3), max_failed=value) for value in (-1, 1.0, True, float("nan"), "5%")),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(OptionError):
        make()


# ------------------------------------------------------------------------------------------------ too many


@few
@given(bad=BAD, size=SIZES, order=ORDERS, limit=st.integers(0, 6), in_order=st.booleans(), data=st.data())
def test_the_loop_ends_at_the_batch_with_one_failed_sample_too_many(
    bad: set[int], size: int, order: list[int], limit: int, in_order: bool, data: st.DataObject
) -> None:
    """Counted in the order of the batches, in each epoch again, and over a resume."""
    options: dict[str, Any] = {"batch_size": size, "on_error": "skip", "max_failed": limit}
    failed = list(accumulate(len(bad & set(batch)) for batch in batches_of(20, size)))
    kept = [[index for index in batch if index not in bad] for batch in batches_of(20, size)]
    wanted = [batch for batch, count in zip(kept, failed, strict=True) if batch and count <= limit]
    loader = answered(order if in_order else [], Holes(20, bad), in_order=in_order, **options)
    for _ in range(2):
        got, error = outcome(loader)
        assert (got, type(error) is TooManyFailed) == (wanted, len(bad) > limit)
    if error is not None:
        at = next(place for place, count in enumerate(failed) if count > limit)
        assert [failure.index for failure in error.failed] == sorted(bad)[: failed[at]]  # type: ignore[attr-defined]
        assert f"max_failed={limit}" in str(error)
    stop = data.draw(st.integers(0, len(wanted)))
    first, resumed = (DataLoader(Holes(20, bad), **options) for _ in range(2))
    assert lists(islice(first, stop)) == wanted[:stop]
    state = json.loads(json.dumps(first.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    got, error = outcome(resumed)
    if state["epoch"] == 0:
        assert (got, type(error) is TooManyFailed) == (wanted[stop:], len(bad) > limit)
    if error is not None and state.get("failed", [0])[0]:
        assert f"{state['failed'][0]} before the state was saved" in str(error)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=12), st.floats(0, 0.99))
def test_a_share_is_judged_as_of_a_hundred_samples_and_at_the_end_as_it_is(
    counts: list[tuple[int, int]], share: float
) -> None:
    budget, bad, tried, error = FailureBudget(share), 0, 0, None
    for number, (failed, good) in enumerate(counts):
        error = budget.count(0, Reply(number, samples=good, failed=[Failure(n, "OSError: x") for n in range(failed)]))
        bad, tried = bad + failed, tried + failed + good
        assert (error is None) == (not failed or bad <= share * max(tried, JUDGED_FROM))
    assert (budget.ended() is None) == (bad <= share * tried)
    ended = budget.count(1, Reply(99, samples=1))  # the first batch of the next epoch ends the one before
    assert (ended is None) == (bad <= share * tried)
    assert budget.count(1, Reply(100, samples=1)) is None


def test_the_error_lists_some_of_the_failed_and_carries_all() -> None:
    error = FailureBudget(0).count(3, Reply(0, failed=[Failure(n, "ValueError: x") for n in range(20)]))
    assert error is not None
    assert "indices 0, 1, 2, 3, 4, 5, 6, 7, ...;" in str(error)
    assert len(error.failed) == 20


def test_a_share_is_of_the_whole_epoch_also_after_a_resume_and_of_each_epoch_of_many() -> None:
    data, resumed = (DataLoader(Holes(1000, range(960, 969)), 10, on_error="skip", max_failed=0.01) for _ in range(2))
    list(islice(data, 90))
    resumed.load_state_dict(data.state_dict())
    assert sum(map(len, resumed)) == 91
    data = DataLoader(Holes(20, (3, 7, 11)), 4, on_error="skip", max_failed=0.1)
    assert [len(batch) for batch in data.steps(1)] == [3]  # that is no end
    for steps in (20, 5):
        data.set_epoch(0)
        batches = data.steps(steps)
        assert [len(next(batches)) for _ in range(5)] == [3, 3, 3, 4, 4]
        with pytest.raises(TooManyFailed, match="3 samples of epoch 0 failed"):
            next(batches)


class Places(agnoload.Backend):
    name = "places"

    def check(self, device: object, pin_memory: bool) -> object:
        return device

    def place(self, batch: object, device: object) -> object:
        return lambda: batch


@pytest.mark.parametrize("place", [None, 0])
def test_the_count_of_a_state_is_of_what_was_delivered(place: object) -> None:
    """Batches under way to a device have been counted, but not delivered; they are loaded again."""
    data = DataLoader(Holes(), 2, on_error="skip", max_failed=5, backend=Places(), device=place)
    assert "failed" not in data.state_dict()
    found = [data.state_dict().get("failed") for _ in data]
    assert found == [[0, 2], [1, 4], [1, 6], [2, 8], None]  # at the end the next epoch begins
