"""Samples that cannot be loaded: left out, replaced, tried again, counted; the same for any number of workers."""

from __future__ import annotations

import itertools
import json
import os
import random
import time

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadError, Batch, DataLoader, OptionError, SampleStopped, StateError, sample_rng
from agnoload.errors import TooManyFailed
from agnoload.fetching.error_policy import FailureBudget, Retry
from agnoload.messages import Failure, Reply

WORKERS = (0, 1, 2)


class Holes:
    """The ints 0 to n - 1; those in `bad` raise."""

    def __init__(self, n: int = 10, bad: tuple[int, ...] = (3, 7)) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"no file for {index}")
        return index


def loader(*args, workers: int = 0, **options) -> DataLoader:
    if workers == -1:
        return DataLoader(*args, num_workers=2, worker_type="thread", **options)
    return DataLoader(*args, num_workers=workers, **options)


def lists(batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [-1, *WORKERS])
def test_c43_raise_names_the_sample_in_its_first_batch(workers) -> None:
    with loader(Holes(), 4, workers=workers) as data, pytest.raises(OSError, match="no file for 3") as caught:
        next(iter(data))
    assert any("index 3" in note and "batch 0" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [-1, *WORKERS])
def test_c43_skip_leaves_out_the_sample_and_the_batch_that_has_no_other(workers) -> None:
    with loader(Holes(), 4, workers=workers, on_error="skip") as data:
        assert lists(data) == [[0, 1, 2], [4, 5, 6], [8, 9]]
        assert [failure.index for failure in data.stats().failed] == [3, 7]
        assert data.stats().failed[0].error == "OSError: no file for 3"
    with loader(Holes(), batch_sampler=[[3, 7], [0, 1], [7]], workers=workers, on_error="skip") as data:
        assert lists(data) == [[0, 1]]
    with loader(Holes(4), batch_size=None, workers=workers, on_error="skip") as data:
        assert list(data) == [0, 1, 2]


def test_c43_replace_takes_good_samples_the_same_for_any_workers() -> None:
    found = []
    for workers in (-1, *WORKERS):
        with loader(Holes(), 4, workers=workers, on_error="replace", seed=3) as data:
            batches = lists(data)
            assert [failure.index for failure in data.stats().failed] == [3, 7]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert [n for batch in batches for n in batch if n not in (3, 7)] == [n for batch in batches for n in batch]
        found.append(batches)
    assert found == [found[0]] * 4
    assert lists(loader(Holes(), 4, on_error="replace", seed=4)) != found[0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_c43_replace_is_the_same_after_a_resume(workers) -> None:
    options = {"on_error": "replace", "seed": 3, "shuffle": True, "workers": workers}
    with loader(Holes(40, (3, 7, 11, 20)), 4, **options) as whole:
        batches = lists(whole)
    with loader(Holes(40, (3, 7, 11, 20)), 4, **options) as first:
        iterator = iter(first)
        lists(itertools.islice(iterator, 3))
        state = first.state_dict()
    with loader(Holes(40, (3, 7, 11, 20)), 4, **options) as second:
        second.load_state_dict(state)
        assert lists(second) == batches[3:]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("batch_size", [4, None])
def test_c43_replace_without_any_good_sample_is_the_error_itself(workers, batch_size) -> None:
    data = loader(Holes(10, tuple(range(10))), batch_size, workers=workers, on_error="replace")
    with data, pytest.raises(OSError, match="no file for 0") as caught:
        next(iter(data))
    assert any("none of 10 other samples" in note for note in caught.value.__notes__)


def test_replace_with_a_sampler_of_the_users_takes_from_the_batch() -> None:
    with loader(Holes(), batch_sampler=[[3, 1], [0, 7]], on_error="replace") as data:
        assert lists(data) == [[1, 1], [0, 0]]


def test_replace_draws_for_the_stand_in_as_if_nothing_had_been_drawn() -> None:
    class Noisy(Holes):
        def __getitem__(self, index: int) -> float:
            drawn = sample_rng().random()
            super().__getitem__(index)
            return drawn

    bad = np.concatenate(list(loader(Noisy(), 4, on_error="replace", seed=1)))
    good = np.concatenate(list(loader(Noisy(bad=()), 4, seed=1)))
    assert bad.tolist() == good.tolist()  # keyed by position, whatever stands there


@pytest.mark.slow
@pytest.mark.parametrize("workers", [-1, *WORKERS])
def test_a_callable_decides_by_error_and_index(workers) -> None:
    def decide(error: Exception, index: int) -> str:
        assert isinstance(error, OSError)
        return {3: "skip", 7: "replace"}[index]

    with loader(Holes(), 4, workers=workers, on_error=decide, seed=0) as data:
        assert [len(batch) for batch in data] == [3, 4, 2]
    with loader(Holes(), 4, workers=workers, on_error=lambda *_: "raise") as data, pytest.raises(OSError, match="3"):
        next(iter(data))
    with (
        loader(Holes(), 4, workers=workers, on_error=lambda *_: "leave") as data,
        pytest.raises(OptionError, match="'raise', 'skip' or 'replace', got 'leave'"),
    ):
        next(iter(data))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_callable_that_raises_is_an_error_that_names_the_batch(workers) -> None:
    def decide(error: Exception, index: int) -> str:
        raise KeyError(index)

    with loader(Holes(), 4, workers=workers, on_error=decide) as data, pytest.raises(KeyError) as caught:
        next(iter(data))
    assert any("batch 0" in note for note in caught.value.__notes__)


class Gathers(Holes):
    """Gives whole batches, and counts what it is asked for one by one."""

    singles = 0

    def __getitems__(self, indices: list[int]) -> object:
        return Batch(np.array([super(Gathers, self).__getitem__(index) for index in indices]))

    def __getitem__(self, index: int) -> int:
        self.singles += 1
        return super().__getitem__(index)


def test_whole_batches_are_asked_for_first_and_only_bad_ones_one_by_one() -> None:
    dataset = Gathers()
    assert lists(loader(dataset, 4, on_error="skip")) == [[0, 1, 2], [4, 5, 6], [8, 9]]
    assert dataset.singles == 8


def test_draws_after_a_whole_batch_that_failed_are_those_of_a_fresh_one() -> None:
    class Draws(Holes):
        def __getitem__(self, index: int) -> tuple[int, float]:
            return super().__getitem__(index), random.random()

    class DrawsAtOnce(Draws):
        def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
            return [self[index] for index in indices]

    one, many = (list(loader(kind(), 5, on_error="skip", seed=2)) for kind in (Draws, DrawsAtOnce))
    assert [leaf.tolist() for batch in one for leaf in batch] == [leaf.tolist() for batch in many for leaf in batch]


# ---------------------------------------------------------------------------------------------- the end of data


class Stops:
    """`next` of nothing in sample 5."""

    def __init__(self, error: type[BaseException] = StopIteration) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error
        return index


def until_error(data) -> tuple[list[list[int]], BaseException]:
    got: list[list[int]] = []
    try:
        with data:
            for batch in data:
                got.append(batch.tolist())
    except BaseException as error:
        return got, error
    raise AssertionError(f"no error after {got}")


@pytest.mark.parametrize("workers", [-1, *WORKERS])
@pytest.mark.parametrize("error", [StopIteration, GeneratorExit])
def test_c45_the_end_of_data_cannot_be_raised_by_accident(error, workers) -> None:
    got, caught = until_error(loader(Stops(error), 2, workers=workers))
    assert got == [[0, 1], [2, 3]]
    assert type(caught) is SampleStopped
    assert "index 5" in str(caught)
    assert error.__name__ in str(caught)


@pytest.mark.parametrize("workers", [-1, *WORKERS])
@pytest.mark.parametrize("batch_size", [2, None])
def test_c45_nor_by_collate(workers, batch_size) -> None:
    def collate(samples: object) -> object:
        if samples in ([4, 5], 4):
            next(iter([]))
        return np.asarray(samples)

    got, caught = until_error(loader(range(8), batch_size, workers=workers, collate_fn=collate))
    assert got == ([[0, 1], [2, 3]] if batch_size else [0, 1, 2, 3])
    assert type(caught) is SampleStopped
    assert ("batch 2" if batch_size else "batch 4") in str(caught)


@pytest.mark.parametrize("workers", WORKERS)
def test_c45_nor_by_any_other_code_of_the_users(workers) -> None:
    def stop(*_: object) -> object:
        raise StopIteration

    class AtOnce(Stops):
        def __getitems__(self, indices: list[int]) -> object:
            return [self[index] for index in indices]

    class Backend(agnoload.Backend):
        name = "stops"

        def convert(self, leaf: object) -> object:
            raise StopIteration

    class Sampler:
        def __iter__(self):
            yield from range(5)
            raise GeneratorExit

        def __len__(self) -> int:
            return 8

    for data in (
        loader(AtOnce(), 6, workers=workers),
        loader(Stops(), 6, workers=workers, on_error=stop),
        loader(range(8), 2, workers=workers, backend=Backend()),
        loader(range(8), 2, workers=workers, sampler=Sampler()),
    ):
        _, caught = until_error(data)
        assert isinstance(caught, SampleStopped)
    if workers:
        _, caught = until_error(loader(range(8), 2, workers=workers, worker_init_fn=stop))
        assert isinstance(caught, SampleStopped)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_stopped_sample_can_be_skipped(workers) -> None:
    with loader(Stops(), 2, workers=workers, on_error="skip") as data:
        assert lists(data) == [[0, 1], [2, 3], [4], [6, 7]]


class Stream(agnoload.IterableDataset):
    def __init__(self, says: int, gives: int) -> None:
        self.says, self.gives = says, gives

    def __len__(self) -> int:
        return self.says

    def __iter__(self):
        return iter(range(self.gives))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("gives", [6, 10])
def test_c45_a_stream_of_another_length_than_it_says_is_one_warning(workers, gives) -> None:
    with loader(Stream(8, gives), 2, workers=workers) as data, pytest.warns(agnoload.AgnoloadWarning) as warned:
        assert np.concatenate(list(data)).tolist() == list(range(gives))
    (warning,) = warned
    assert "8" in str(warning.message)
    assert str(gives) in str(warning.message)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_of_a_sampler_comes_after_the_batches_before_it(workers) -> None:
    class Sampler:
        def __iter__(self):
            yield from range(5)
            raise KeyError("no more indices")

        def __len__(self) -> int:
            return 8

    got, caught = until_error(loader(range(8), 1, workers=workers, sampler=Sampler()))
    assert got == [[0], [1], [2], [3], [4]]
    assert isinstance(caught, KeyError)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_iterator_that_has_ended_with_an_error_says_so(workers) -> None:
    def keys():
        yield from range(4)
        raise OSError("no more keys")

    batches = iter(loader(range(8), 4, workers=workers, sampler=keys()))
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(OSError, match="no more keys"):
        next(batches)
    for _ in range(2):
        with pytest.raises(AgnoloadError, match="has ended with an error \\(OSError\\)"):
            next(batches)


# ---------------------------------------------------------------------------------------------- tries again


class Flaky(Holes):
    """Sample `i` fails the first `i % 3` times, after it has drawn; the tries are counted in files."""

    def __init__(self, folder: str) -> None:
        super().__init__(6, ())
        self.folder = folder

    def __getitem__(self, index: int) -> tuple[int, float]:
        drawn = sample_rng().random()
        tries = sum(name.startswith(f"{index}-") for name in os.listdir(self.folder))
        if tries < index % 3:
            open(os.path.join(self.folder, f"{index}-{tries}"), "x").close()
            raise TimeoutError("not yet")
        return index, drawn


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_succeeds_at_last_is_what_it_would_have_been(workers, tmp_path) -> None:
    (tmp_path / "tries").mkdir()
    dataset = Flaky(str(tmp_path / "tries"))
    with loader(dataset, 3, workers=workers, retry=Retry(OSError, wait=0.0), seed=1) as data:
        tried = [leaf.tolist() for batch in data for leaf in batch]
        assert data.stats().failed == ()
    assert sorted(os.listdir(dataset.folder)) == ["1-0", "2-0", "2-1", "4-0", "5-0", "5-1"]
    assert tried == [leaf.tolist() for batch in loader(dataset, 3, seed=1) for leaf in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_never_succeeds_is_up_to_on_error(workers, tmp_path) -> None:
    (tmp_path / "tries").mkdir()
    dataset = Flaky(str(tmp_path / "tries"))
    with loader(dataset, 3, workers=workers, retry=Retry(TimeoutError, times=1, wait=0.0), on_error="skip") as data:
        assert [batch[0].tolist() for batch in data] == [[0, 1], [3, 4]]
        assert [failure.index for failure in data.stats().failed] == [2, 5]


def test_only_the_errors_that_were_named_are_tried_again(tmp_path) -> None:
    (tmp_path / "tries").mkdir()
    with pytest.raises(TimeoutError):
        list(loader(Flaky(str(tmp_path / "tries")), 3, retry=(KeyError, ValueError)))
    assert os.listdir(tmp_path / "tries") == ["1-0"]


def test_the_pauses_between_tries_grow(tmp_path, monkeypatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(OSError, match="no file for 3"):
        list(loader(Holes(), 4, retry=Retry(OSError, times=4, wait=0.5, factor=3, longest=5)))
    assert pauses == [0.5, 1.5, 4.5, 5.0]


def test_whole_batches_are_tried_again_too(monkeypatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)

    class Once(Gathers):
        failed = False

        def __getitems__(self, indices: list[int]) -> object:
            if not self.failed:
                self.failed = True
                raise OSError
            return indices

    assert lists(loader(Once(4), 4, retry=OSError)) == [[0, 1, 2, 3]]


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
        lambda: loader(range(3), retry=3),
        lambda: loader(range(3), max_failed=-1),
        lambda: loader(range(3), max_failed=1.0),
        lambda: loader(range(3), max_failed=True),
        lambda: loader(range(3), max_failed=float("nan")),
        lambda: loader(range(3), max_failed="5%"),
        lambda: loader(range(3), on_error="ignore"),
    ],
)
def test_what_cannot_be_meant_is_refused(make) -> None:
    with pytest.raises(OptionError):
        make()


# ---------------------------------------------------------------------------------------------- too many


@pytest.mark.parametrize(("workers", "in_order"), [(-1, True), (0, True), (0, False), (1, True), (1, False), (2, True)])
def test_a_count_of_failed_samples_ends_the_epoch_at_the_same_batch_for_any_workers(workers, in_order) -> None:
    got, error = until_error(
        loader(Holes(20, (3, 7, 11, 15)), 4, workers=workers, on_error="skip", max_failed=2, in_order=in_order)
    )
    assert got == [[0, 1, 2], [4, 5, 6]]
    assert type(error) is TooManyFailed
    assert [failure.index for failure in error.failed] == [3, 7, 11]
    assert "max_failed=2" in str(error)
    assert "no file for 11" in str(error)


def test_the_count_begins_again_with_each_epoch() -> None:
    data = loader(Holes(), 4, on_error="skip", max_failed=2)
    assert lists(data) == lists(data) == [[0, 1, 2], [4, 5, 6], [8, 9]]
    assert lists(data.steps(9)) == [[0, 1, 2], [4, 5, 6], [8, 9]] * 3
    assert len(data.stats().failed) == 10


def test_no_failure_at_all_may_be_allowed() -> None:
    got, error = until_error(loader(Holes(), 4, on_error="replace", max_failed=0))
    assert got == []
    assert type(error) is TooManyFailed


@pytest.mark.parametrize("workers", [0, 2])
def test_a_share_of_failed_samples_is_judged_from_the_hundredth_on(workers) -> None:
    bad = tuple(range(0, 20, 2))
    with loader(Holes(1000, bad), 10, workers=workers, on_error="skip", max_failed=0.1) as data:
        assert sum(len(batch) for batch in data) == 990
    got, error = until_error(loader(Holes(1000, (*bad, 21)), 10, workers=workers, on_error="skip", max_failed=0.1))
    assert [len(batch) for batch in got] == [5, 5]
    assert "11 samples" in str(error)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_share_of_failed_samples_is_judged_at_the_end_as_it_is(workers) -> None:
    got, error = until_error(loader(Holes(20, (3, 7, 11)), 4, workers=workers, on_error="skip", max_failed=0.1))
    assert sum(map(len, got)) == 17
    assert type(error) is TooManyFailed
    with loader(Holes(20, (3, 7)), 4, workers=workers, on_error="skip", max_failed=0.1) as data:
        assert sum(map(len, data)) == 18


@pytest.mark.parametrize(("workers", "in_order"), [(-1, True), (0, True), (2, True), (2, False)])
def test_the_count_goes_on_after_a_resume(workers, in_order) -> None:
    options = {"workers": workers, "in_order": in_order, "on_error": "skip", "max_failed": 2}
    data = loader(Holes(20, (3, 7, 11, 15)), 4, **options)
    batches = iter(data)
    first = lists(itertools.islice(batches, 2))
    state = json.loads(json.dumps(data.state_dict()))
    data.close()
    resumed = loader(Holes(20, (3, 7, 11, 15)), 4, **options)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    got, error = until_error(resumed)
    if in_order:
        assert (first, got) == ([[0, 1, 2], [4, 5, 6]], [])
        assert [failure.index for failure in error.failed] == [11]
        assert "3 samples of epoch 0 failed" in str(error)
        assert "2 before the state was saved" in str(error)
    assert type(error) is TooManyFailed


@pytest.mark.parametrize("place", [None, 0])
def test_the_count_of_a_state_is_of_what_was_delivered(place) -> None:
    """Batches under way to a device have been counted, but not delivered; they are loaded again."""

    class Backend(agnoload.Backend):
        name = "places"

        def check(self, device: object, pin_memory: bool) -> object:
            return device

        def place(self, batch: object, device: object) -> object:
            return lambda: batch

    data = loader(Holes(), 2, on_error="skip", max_failed=5, backend=Backend(), device=place)
    batches = iter(data)
    assert "failed" not in data.state_dict()
    found = []
    for _ in batches:
        found.append(data.state_dict().get("failed"))
    assert found == [[0, 2], [1, 4], [1, 6], [2, 8], None]  # at the end the next epoch begins


def test_a_share_is_of_the_whole_epoch_also_after_a_resume() -> None:
    bad = tuple(range(960, 969))
    data = loader(Holes(1000, bad), 10, on_error="skip", max_failed=0.01)
    batches = iter(data)
    lists(itertools.islice(batches, 90))
    resumed = loader(Holes(1000, bad), 10, on_error="skip", max_failed=0.01)
    resumed.load_state_dict(data.state_dict())
    assert sum(map(len, lists(resumed))) == 91


def test_a_share_is_judged_at_the_end_of_each_epoch_of_many() -> None:
    options = {"on_error": "skip", "max_failed": 0.1}
    data = loader(Holes(20, (3, 7, 11)), 4, **options)
    assert [len(batch) for batch in data.steps(1)] == [3]  # that is no end
    data.set_epoch(0)
    batches = data.steps(20)
    assert [len(next(batches)) for _ in range(5)] == [3, 3, 3, 4, 4]
    with pytest.raises(TooManyFailed, match="3 samples of epoch 0 failed"):
        next(batches)
    data.set_epoch(0)
    batches = data.steps(5)
    assert [len(next(batches)) for _ in range(5)] == [3, 3, 3, 4, 4]
    with pytest.raises(TooManyFailed, match="3 samples of epoch 0 failed"):
        next(batches)


@pytest.mark.parametrize("counts", [None, 3, "ab", {}, [1], [1, 2, 3], [-1, 2], [1, 2.0], [True, 2], [1, 1 << 63]])
def test_counts_in_a_state_that_are_none_are_refused(counts) -> None:
    data = loader(Holes(), 4, max_failed=2, on_error="skip")
    with pytest.raises(StateError, match=r"failed in a state must be a (list of 2|non-negative int below)"):
        data.load_state_dict({**data.state_dict(), "failed": counts})


def test_a_ceiling_lists_some_of_the_failed_and_carries_all() -> None:
    error = FailureBudget(0).count(3, Reply(0, failed=[Failure(n, "ValueError: x") for n in range(20)]))
    assert error is not None
    assert "indices 0, 1, 2, 3, 4, 5, 6, 7, ...;" in str(error)
    assert len(error.failed) == 20


@pytest.mark.parametrize("workers", [0, 2])
def test_c43_the_sample_that_ended_the_loop_is_in_the_account(workers: int) -> None:
    class Bad:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            if index in (3, 7):
                raise ValueError(f"bad {index}")
            return index

    with agnoload.DataLoader(Bad(), 4, num_workers=workers) as loader:
        with pytest.raises(ValueError, match="bad 3"):
            list(loader)
        assert [failure.index for failure in loader.stats().failed] == [3]
