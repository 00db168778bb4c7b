"""How much is loaded ahead, and what happens between epochs."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import DataLoader, OptionError
from agnoload.testing import FakePool

MIB = 1 << 20
POOLS: dict[str, dict[str, Any]] = {
    "inline": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_type": "thread"},
}
each_pool = pytest.mark.parametrize("workers", POOLS.values(), ids=POOLS)
few = settings(max_examples=20, deadline=None)


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


class Bad:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise LookupError(index)
        return index


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


@pytest.mark.slow
def test_no_more_is_loaded_ahead_than_workers_times_factor_and_memory_stays_within_that(tmp_path: Path) -> None:
    """C32."""
    calls = tmp_path / "calls"
    with DataLoader(Counted(calls), num_workers=2, prefetch_factor=2) as loader:
        iterator = iter(loader)
        first = next(iterator)
        pool: Any = iterator._pool
        wait_until(lambda: nothing_under_way(pool))
        assert calls.stat().st_size == 5
        assert first[0, 0] == 0
        for number, batch in enumerate(iterator, 1):
            assert batch[0, -1] == number
            if number < 60:
                assert pool.arena.nbytes() <= 7 * (8 * MIB + 4096) + MIB


def test_threads_load_no_more_ahead_either_and_without_workers_nothing_is(tmp_path: Path) -> None:
    """C32."""
    calls = tmp_path / "calls"
    with DataLoader(Counted(calls, 10), num_workers=2, prefetch_factor=2, worker_type="thread") as loader:
        iterator = iter(loader)
        next(iterator)
        pool: Any = iterator._pool
        window = iterator._supply._window
        wait_until(lambda: pool._replies.qsize() + len(window._arrived) == 4)
        assert calls.stat().st_size == 5
    calls.unlink()
    iterator = iter(DataLoader(Counted(calls, 10), 4))
    assert not calls.exists()
    next(iterator)
    assert calls.stat().st_size == 4


@few
@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=20), st.booleans())
def test_what_is_asked_for_and_not_delivered_never_exceeds_workers_times_factor(
    workers: int, factor: int, order: list[int], in_order: bool
) -> None:
    pools: list[FakePool] = []

    def opened(fetch: Any, workers: int) -> Any:
        pools.append(FakePool(order, fetch))
        return pools[-1], None

    loader = DataLoader(range(20), num_workers=workers, prefetch_factor=factor, in_order=in_order)
    loader._keeper.open = opened  # type: ignore[method-assign]
    for delivered, _ in enumerate(loader, 1):
        assert len(pools[0].submitted) == min(20, delivered + workers * factor)


@pytest.mark.slow
@each_pool
def test_nothing_is_loaded_for_an_iterator_that_is_dropped(workers: dict[str, Any], tmp_path: Path) -> None:
    with DataLoader(Counted(tmp_path / "calls", 10), 4, **workers) as loader:
        next(iter(loader))
        gc.collect()
        assert lists(loader)[-1][-1][0] == 63


# ------------------------------------------------------------------------------------------------ steps


def test_the_first_batches_of_the_next_epoch_are_loaded_while_the_last_ones_are_used() -> None:
    """C57."""
    loaded = [threading.Event() for _ in range(2)]

    class Twice:
        calls = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 0:
                loaded[Twice.calls].set()
                Twice.calls += 1
            return index

    steps = DataLoader(Twice(), 1, num_workers=1, worker_type="thread", prefetch_factor=3).steps(8)
    for _ in range(2):  # [0], [1]: asked for are then [2], [3] and the first of the next epoch
        next(steps)
    assert loaded[1].wait(60)
    assert lists(steps) == [[2], [3], [0], [1], [2], [3]]


@pytest.mark.parametrize("n", [-1, 2.0, True, "3"])
def test_steps_must_be_a_count(n: Any) -> None:
    with pytest.raises(OptionError, match="steps"):
        DataLoader(range(4)).steps(n)


class Dry(agnoload.IterableDataset[int]):
    """Gives nothing from epoch 2 on."""

    def __iter__(self) -> Any:
        return iter(range(6 if self.epoch < 2 else 0))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Unreadable:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(index)


@pytest.mark.parametrize(
    "workers", [{}, pytest.param(POOLS["processes"], marks=pytest.mark.slow), POOLS["threads"]], ids=POOLS
)
def test_steps_over_data_that_gives_nothing_are_an_error(workers: dict[str, Any]) -> None:
    for options in (
        {"dataset": []},
        {"dataset": range(3), "batch_size": 4, "drop_last": True},
        {"dataset": Unreadable(), "batch_size": 2, "on_error": "skip"},
    ):
        with DataLoader(**options, **workers) as loader:
            assert list(loader) == list(loader.steps(0)) == []
            with pytest.raises(OptionError, match=r"steps\(5\) needs a batch in every epoch, but epoch 2 has none af"):
                next(loader.steps(5))
    with DataLoader(Dry(), 2, **workers) as loader:
        steps = loader.steps(8)
        assert lists(islice(steps, 6)) == [[0, 1], [2, 3], [4, 5]] * 2
        with pytest.raises(OptionError, match=r"steps\(8\) .* epoch 2 has none after 6"):
            next(steps)


# ------------------------------------------------------------------------------------------------ kept workers


def pids(loader: Any) -> set[int]:
    return {int(pid) for batch in loader for pid in batch}


def test_kept_workers_live_on_and_read_a_large_dataset_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """C35."""
    texts = agnoload.PackedList(f"text {number}" for number in range(200_000))
    data = texts.map(lambda text: (text, os.getpid()))
    with DataLoader(data, 1000, sampler=range(4000), num_workers=2, persistent_workers=True) as loader:
        first = list(loader)
        monkeypatch.setattr("agnoload.pools.crew.start_process", lambda *_: pytest.fail("a process was started"))
        monkeypatch.setattr("agnoload.pools.crew.pack", lambda *_: pytest.fail("it was packed again"))
        epochs = [first, *(list(loader) for _ in range(3))]
        assert len({pid for epoch in epochs for _, found in epoch for pid in found.tolist()} - {os.getpid()}) <= 2
        assert all([names for names, _ in epoch] == [names for names, _ in first] for epoch in epochs)
        for _ in range(3):  # left early
            assert next(iter(loader))[0][0] == "text 0"
        monkeypatch.undo()  # two iterators at once need two sets
        one, other = iter(loader), iter(loader)
        assert [names for names, _ in one] == [names for names, _ in other] == [names for names, _ in first]
    assert first[3][0][999] == "text 3999"


def test_workers_that_are_not_kept_end_with_their_epoch() -> None:
    with DataLoader(Pids(), num_workers=2) as loader:
        first = pids(loader)
        for pid in first:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        assert not first & pids(loader)


# ------------------------------------------------------------------------------------------------ which epoch


DEEDS = st.sampled_from(["whole", "break", "close", "unasked", "kept open", "set", "copy", "steps", "state"])


def check_epochs(deeds: list[str], workers: dict[str, Any]) -> None:
    """After each deed `epoch` is the one that the next `iter` begins, and a state that of the data yielded last."""
    orders = DataLoader(range(8), 2, shuffle=True, seed=5)
    wanted = [lists(orders) for _ in range(2 * len(deeds) + 12)]
    open_ones, epoch = [], 0
    with DataLoader(range(8), 2, shuffle=True, seed=5, **workers) as loader:
        for deed in [*deeds, "whole"]:
            if deed == "set":
                loader.set_epoch(epoch := (epoch + 3) % 7)
            elif deed == "unasked":  # nobody asks it for a batch: it counts as no epoch
                iter(loader).close()
                assert loader.state_dict()["epoch"] in (epoch - 1, epoch)
            elif deed == "steps":
                assert lists(loader.steps(6)) == [*wanted[epoch], *wanted[epoch + 1][:2]]
                assert (loader.epoch, loader.state_dict()["epoch"]) == (epoch + 2, epoch + 1)
                epoch += 2
            else:
                batches = iter(loader)
                assert next(batches).tolist() == wanted[epoch][0]
                state = loader.state_dict()
                assert (loader.epoch, state["epoch"], state["position"]) == (epoch, epoch, 2)
                if deed == "whole":
                    assert lists(batches) == wanted[epoch][1:]
                    assert list(batches) == []  # what has ended stays ended
                elif deed == "kept open":
                    open_ones.append((batches, epoch))
                    epoch -= 1  # it is under way, and so is its epoch, until the next one begins
                    loader.set_epoch(epoch + 1)
                elif deed == "close":
                    loader.close()
                elif deed == "state":
                    batches.close()
                    loader.load_state_dict(state)
                    assert (loader.epoch, lists(loader)) == (epoch, wanted[epoch][1:])
                else:
                    del batches
                epoch += 1
            assert loader.epoch == epoch
        for batches, of in open_ones:
            if "close" not in deeds:  # that closes them, too
                assert lists(batches) == wanted[of][1:]


@few
@given(st.lists(DEEDS, max_size=7))
def test_epochs_count_up_by_themselves_however_each_ends(deeds: list[str]) -> None:
    check_epochs(deeds, {})


@pytest.mark.parametrize("workers", [pytest.param(POOLS["processes"], marks=pytest.mark.slow), POOLS["threads"]])
def test_epochs_count_up_with_workers(workers: dict[str, Any]) -> None:
    check_epochs(["whole", "unasked", "unasked", "break", "steps", "state", "set", "kept open", "close"], workers)


@each_pool
def test_after_an_error_the_epoch_goes_on_behind_its_batch(workers: dict[str, Any]) -> None:
    with DataLoader(Bad(), 2, **workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(LookupError):
            next(iterator)
        state = loader.state_dict()
        assert (loader.epoch, state["epoch"], state["position"]) == (0, 0, 4)
        next(iter(loader))
        assert loader.state_dict()["epoch"] == 1


@few
@given(st.lists(st.sampled_from(["whole", "unasked", "break"]), max_size=5), st.integers(0, 9))
def test_a_generator_gives_one_seed_for_each_epoch_that_is_asked_for_a_batch(deeds: list[str], seed: int) -> None:
    """So a loader that resumes draws as many from its own."""

    def make() -> DataLoader[Any]:
        return DataLoader(range(40), 8, shuffle=True, generator=np.random.default_rng(seed))

    def orders() -> Any:
        generator = np.random.default_rng(seed)
        while True:
            drawn = int(generator.integers(1 << 63, dtype=np.uint64))
            yield agnoload.RandomSampler(range(40)), drawn

    given, loader = orders(), make()
    for epoch, deed in enumerate([*(deed for deed in deeds if deed != "unasked"), "whole"]):
        for _ in range(deeds.count("unasked")):
            iter(loader).close()
        sampler, drawn = next(given)
        batches = iter(loader)
        wanted = sampler.order(drawn, epoch).indices(0, 40).reshape(5, 8).tolist()
        assert next(batches).tolist() == wanted[0]
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert lists(resumed) == wanted[1:]
        if deed == "whole":
            assert lists(batches) == wanted[1:]
