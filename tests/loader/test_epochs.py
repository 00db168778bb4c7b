"""How much is loaded ahead, and what happens between epochs."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader, OptionError

MIB = 1 << 20
POOLS = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}]
each_pool = pytest.mark.parametrize("workers", POOLS, ids=["inline", "processes", "threads"])


class Counted:
    """Large samples; each call leaves a byte in a file."""

    def __init__(self, path: Path, nbytes: int = 8 * MIB, length: int = 64) -> None:
        self.path, self.nbytes, self.length = path, nbytes, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        with self.path.open("ab") as file:
            file.write(b".")
        return np.full(self.nbytes, index, np.uint8)


class Pids:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return os.getpid()


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


# ------------------------------------------------------------------------------------------------ loading ahead


def nothing_under_way(pool: Any) -> bool:
    """Whether all that was asked for has been answered; the pool's own thread is ours."""
    pool._wait(0)
    return not pool._in_flight


def test_c32_no_more_is_loaded_ahead_than_workers_times_factor(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with DataLoader(Counted(calls), num_workers=2, prefetch_factor=2) as loader:
        iterator = iter(loader)
        first = next(iterator)
        pool: Any = iterator._pool
        wait_until(lambda: nothing_under_way(pool))
        assert calls.stat().st_size == 5
        assert pool.arena.nbytes() <= 7 * 8 * MIB
        assert first[0, 0] == 0


def test_c32_memory_stays_within_the_bound_over_an_epoch(tmp_path: Path) -> None:
    with DataLoader(Counted(tmp_path / "calls", MIB), num_workers=2, prefetch_factor=2) as loader:
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            assert batch[0, -1] == number
            if number < 60:
                assert iterator._pool.arena.nbytes() <= 7 * (MIB + 4096) + MIB  # type: ignore[attr-defined]


def test_c32_threads_load_no_more_ahead_either(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with DataLoader(Counted(calls, 10), num_workers=2, prefetch_factor=2, worker_type="thread") as loader:
        iterator = iter(loader)
        next(iterator)
        pool: Any = iterator._pool
        wait_until(
            lambda: pool._replies.qsize() + len(iterator._supply._window) - iterator._supply._window.waiting == 4
        )  # type: ignore[attr-defined]
        assert calls.stat().st_size == 5


def test_without_workers_nothing_is_loaded_ahead(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    iterator = iter(DataLoader(Counted(calls, 10), 4))
    assert not calls.exists()
    next(iterator)
    assert calls.stat().st_size == 4


@pytest.mark.slow
@each_pool
def test_nothing_is_loaded_for_an_iterator_that_is_dropped(workers: dict[str, Any], tmp_path: Path) -> None:
    with DataLoader(Counted(tmp_path / "calls", 10), 4, **workers) as loader:
        next(iter(loader))
        gc.collect()
        assert lists(loader)[-1][-1][0] == 63


@each_pool
@pytest.mark.parametrize("in_order", [True, False])
def test_each_batch_comes_once_in_any_case(workers: dict[str, Any], in_order: bool) -> None:
    with DataLoader(range(100), 3, in_order=in_order, prefetch_factor=5, **workers) as loader:
        found = lists(loader)
    wanted = [list(range(100))[at : at + 3] for at in range(0, 100, 3)]
    assert (found if in_order else sorted(found)) == wanted


# ------------------------------------------------------------------------------------------------ steps


@each_pool
def test_c57_steps_cross_epochs_and_no_batch_spans_two(workers: dict[str, Any]) -> None:
    options: Any = {"batch_size": 4, "shuffle": True, "seed": 3}
    epochs = DataLoader(range(10), **options)
    first, second = lists(epochs), lists(epochs)
    with DataLoader(range(10), **options, **workers) as loader:
        steps = loader.steps(5)
        found = [next(steps).tolist() for _ in range(4)]
        state = loader.state_dict()
        found.append(next(steps).tolist())
        with pytest.raises(StopIteration):
            next(steps)
    assert [len(batch) for batch in found] == [4, 4, 2, 4, 4]
    assert found == first + second[:2]
    with DataLoader(range(10), **options, **workers) as again:
        again.load_state_dict(state)
        assert lists(again.steps(1)) == found[4:]


@each_pool
def test_c57_the_next_epoch_is_under_way_before_this_one_ends(workers: dict[str, Any]) -> None:
    with DataLoader(range(4), 2, **workers) as loader:
        steps = loader.steps(6)
        assert len(list(steps)) == 6
        assert loader.epoch == 3


@pytest.mark.parametrize("n", [-1, 2.0, True, "3"])
def test_steps_must_be_a_count(n: Any) -> None:
    with pytest.raises(OptionError, match="steps"):
        DataLoader(range(4)).steps(n)


def test_no_steps_are_no_batches() -> None:
    assert list(DataLoader(range(4)).steps(0)) == []


@each_pool
@pytest.mark.parametrize("options", [{"dataset": []}, {"dataset": range(3), "batch_size": 4, "drop_last": True}])
def test_steps_over_an_empty_dataset_raise(workers: dict[str, Any], options: dict[str, Any]) -> None:
    with DataLoader(**options, **workers) as loader:
        assert list(loader) == []
        assert list(loader.steps(0)) == []
        steps = loader.steps(5)
        with pytest.raises(OptionError, match=r"steps\(5\) needs a batch in every epoch, but epoch 2 has none after 0"):
            next(steps)


@each_pool
def test_steps_raise_at_an_epoch_without_batches(workers: dict[str, Any]) -> None:
    class Dry(agnoload.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(6 if self.epoch < 2 else 0))

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    with DataLoader(Dry(), 2, **workers) as loader:
        steps = loader.steps(8)
        assert lists(next(steps) for _ in range(6)) == [[0, 1], [2, 3], [4, 5]] * 2
        with pytest.raises(OptionError, match=r"steps\(8\) .* epoch 2 has none after 6"):
            next(steps)


# ------------------------------------------------------------------------------------------------ between epochs


def pids(loader: Any) -> set[int]:
    return {int(pid) for batch in loader for pid in batch}


def test_c35_kept_workers_live_on_from_epoch_to_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    with DataLoader(Pids(), num_workers=2, persistent_workers=True) as loader:
        list(loader)
        monkeypatch.setattr("agnoload.pools.crew.start_process", lambda *_: pytest.fail("a process was started"))
        workers = pids(loader) | pids(loader) | pids(loader)
        assert len(workers) <= 2
        assert os.getpid() not in workers


def test_c35_kept_workers_read_a_large_dataset_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = agnoload.PackedList(f"text {number}" for number in range(200_000))
    with DataLoader(texts, 1000, sampler=range(4000), num_workers=2, persistent_workers=True) as loader:
        first = list(loader)
        monkeypatch.setattr("agnoload.pools.crew.pack", lambda *_: pytest.fail("it was packed again"))
        assert list(loader) == first
    assert first[3][999] == "text 3999"


def test_workers_that_are_not_kept_end_with_their_epoch() -> None:
    with DataLoader(Pids(), num_workers=2) as loader:
        first = pids(loader)
        for pid in first:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        assert not first & pids(loader)


def test_an_epoch_left_early_does_not_disturb_the_next_with_kept_workers() -> None:
    with DataLoader(range(40), 2, num_workers=2, persistent_workers=True) as loader:
        for _ in range(5):
            iterator = iter(loader)
            assert next(iterator).tolist() == [0, 1]
            del iterator
        assert lists(loader) == [[at, at + 1] for at in range(0, 40, 2)]


def test_two_iterators_of_a_loader_with_kept_workers_are_independent() -> None:
    with DataLoader(range(6), 2, num_workers=2, persistent_workers=True) as loader:
        first, second = iter(loader), iter(loader)
        assert [lists(first), lists(second)] == [[[0, 1], [2, 3], [4, 5]]] * 2
        assert lists(loader) == [[0, 1], [2, 3], [4, 5]]


@each_pool
def test_the_epoch_counts_up_by_itself(workers: dict[str, Any]) -> None:
    with DataLoader(range(6), 2, **workers) as loader:
        assert loader.epoch == 0
        iterator = iter(loader)
        next(iterator)
        assert loader.epoch == 0
        list(iterator)
        assert loader.epoch == 1
        list(loader)
        assert loader.epoch == 2
        loader.set_epoch(7)
        assert loader.epoch == 7


@each_pool
@pytest.mark.parametrize("end", [lambda iterator: iterator.close(), lambda iterator: None], ids=["closed", "dropped"])
def test_an_iterator_that_is_never_asked_for_a_batch_counts_no_epoch(
    workers: dict[str, Any], end: Callable[[Any], None]
) -> None:
    def throw_away(loader: Any) -> None:
        before = loader.state_dict()
        end(iter(loader))
        after = loader.state_dict()
        assert (after["epoch"], after["position"]) == (before["epoch"], before["position"])
        assert loader.epoch == before["epoch"]

    want = [lists(DataLoader(range(40), 8, shuffle=True, seed=5).steps(5 * epochs)) for epochs in (1, 2, 3)]
    with DataLoader(range(40), 8, shuffle=True, seed=5, **workers) as loader:
        for epoch in range(2):  # at the start, and after an epoch
            throw_away(loader)
            throw_away(loader)
            assert [*(want[epoch - 1] if epoch else []), *lists(loader)] == want[epoch]
        iterator = iter(loader)
        given = [next(iterator).tolist() for _ in range(2)]
        state = loader.state_dict()
        iterator.close()
        loader.load_state_dict(state)
        throw_away(loader)  # in the middle of an epoch
        assert want[1] + given + lists(loader) == want[2]
        generators = [np.random.default_rng(3) for _ in range(2)]
        one, other = (DataLoader(range(40), 40, shuffle=True, generator=each, **workers) for each in generators)
        with one, other:
            end(iter(one))  # nor does it draw another seed
            assert lists(one) == lists(other)
            end(iter(one))
            assert lists(one) == lists(other)


class Bad:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise LookupError(index)
        return index


@each_pool
def test_after_a_break_the_epoch_is_that_which_comes_next(workers: dict[str, Any]) -> None:
    with DataLoader(range(6), 2, **workers) as loader:
        for _ in loader:
            assert loader.epoch == 0
            break
        assert (loader.epoch, loader.state_dict()["epoch"]) == (1, 0)
        steps = loader.steps(4)
        next(steps), next(steps)
        assert loader.epoch == 1
        next(steps), next(steps)
        assert loader.epoch == 2
        with pytest.raises(StopIteration):
            next(steps)
        assert (loader.epoch, loader.state_dict()["epoch"]) == (3, 2)
        iter(loader)  # nobody asks it for a batch
        assert loader.epoch == 3


@each_pool
def test_after_an_error_the_epoch_goes_on_behind_its_batch(workers: dict[str, Any]) -> None:
    with DataLoader(Bad(), 2, **workers) as loader:
        iterator = iter(loader)
        next(iterator)
        assert loader.epoch == 0
        with pytest.raises(LookupError):
            next(iterator)
        state = loader.state_dict()
        assert (loader.epoch, state["epoch"], state["position"]) == (0, 0, 4)
        next(iter(loader))
        assert loader.state_dict()["epoch"] == 1


@each_pool
def test_after_close_the_epoch_is_that_which_comes_next(workers: dict[str, Any]) -> None:
    loader = DataLoader(range(6), 2, **workers)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert (loader.epoch, loader.state_dict()["epoch"]) == (1, 0)
    with loader:
        next(iter(loader))
        assert loader.state_dict()["epoch"] == 1


def test_an_iterator_that_has_ended_stays_ended() -> None:
    iterator = iter(DataLoader(range(2)))
    assert len(list(iterator)) == 2
    assert list(iterator) == []
