"""What `loader.stats()` counts, and what its verdict tells a person."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload.batching.tree import walk
from agnoload.messages import Failure, Reply
from agnoload.monitoring.stats import Recorder, Sums, size_of, verdict


class Waiting(agnoload.Dataset[int]):
    """Samples that take `seconds`, without work."""

    def __init__(self, n: int, seconds: float = 0.0) -> None:
        self.n = n
        self.seconds = seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if self.seconds:
            time.sleep(self.seconds)
        return index


class Bad(Waiting):
    """Every fifth sample cannot be loaded."""

    def __getitem__(self, index: int) -> int:
        if index % 5 == 3:
            raise ValueError(f"sample {index} is bad")
        return index


def reply(number: int, worker: int, started: float, finished: float, **more: Any) -> Reply:
    return Reply(number, worker, np.zeros(2), started=started, finished=finished, **{"samples": 2, **more})


# ---------------------------------------------------------------------------------------------- the case


@pytest.mark.slow
def test_c59_an_idle_loop_learns_that_it_waits_and_what_to_do() -> None:
    with agnoload.DataLoader(Waiting(300, 0.01), 10, num_workers=2, worker_type="thread") as loader:
        for _ in loader:
            pass
        stats = loader.stats()
    assert (stats.batches, stats.samples, stats.bytes) == (30, 300, 300 * 8)
    assert stats.wait_seconds > 0.8 * stats.seconds
    assert len(stats.busy) == 2
    assert min(stats.busy) > 0.9
    assert f"waited for data {stats.wait_seconds / stats.seconds:.0%} of the time" in stats.verdict
    assert "add workers" in stats.verdict


@pytest.mark.slow
def test_c59_the_verdict_does_not_blame_the_loader_for_a_loop_that_works() -> None:
    with agnoload.DataLoader(Waiting(300), 10, num_workers=2, worker_type="thread") as loader:
        for _ in loader:
            time.sleep(0.05)  # the user's own work
        stats = loader.stats()
    assert stats.wait_seconds - stats.wait_first < 0.05 * stats.seconds
    assert max(stats.busy) < 0.5
    assert "nothing to gain here" in stats.verdict
    assert "add workers" not in stats.verdict


def test_c59_the_record_is_plain_cannot_be_changed_and_stays_as_it_was() -> None:
    loader = agnoload.DataLoader(Bad(10), 4, on_error="skip")
    list(loader)
    before = loader.stats()
    copy = dataclasses.replace(before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.batches = 7  # type: ignore[misc]
    assert isinstance(before.busy, tuple)
    assert isinstance(before.failed, tuple)
    assert json.loads(json.dumps(dataclasses.asdict(before)))["samples"] == 8
    list(loader)
    assert before == copy
    assert loader.stats().batches == 2 * before.batches


def test_c46_the_verdict_says_that_workers_do_not_help_where_rows_lie_in_memory() -> None:
    rows = np.zeros((200_000, 20), np.float32)
    with agnoload.DataLoader(agnoload.ArrayDataset(x=rows), 256, shuffle=True, num_workers=2, seed=0) as loader:
        for _ in loader.steps(400):
            pass
        assert "workers do not help" in loader.stats().verdict


# ---------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}], ids=str)
def test_every_kind_of_worker_gives_the_same_account(options: dict[str, Any]) -> None:
    dataset = agnoload.ArrayDataset(x=np.zeros((10, 3), np.float32), y=np.zeros(10, np.int64))
    with agnoload.DataLoader(dataset, 4, **options) as loader:
        for _ in range(3):
            list(loader)
        stats = loader.stats()
    assert (stats.batches, stats.samples, stats.bytes) == (9, 30, 30 * (12 + 8))
    assert stats.num_workers == options.get("num_workers", 0)
    assert 1 <= len(stats.busy) <= max(stats.num_workers, 1)
    assert all(0 <= share <= 1 for share in stats.busy)
    assert 0 < stats.wait_first < stats.wait_seconds <= stats.seconds


def test_nothing_was_loaded_yet() -> None:
    stats = agnoload.DataLoader(range(3)).stats()
    assert (stats.batches, stats.samples, stats.wait_seconds, stats.wait_p99, stats.busy) == (0, 0, 0.0, 0.0, ())
    assert stats.verdict == "nothing was loaded yet"
    assert "nothing was loaded yet" in str(stats)


def test_only_what_was_given_out_is_counted_and_of_a_batch_that_was_left_out_its_bad_samples() -> None:
    loader = agnoload.DataLoader(Bad(100), 10, on_error="skip")
    for _ in range(2):
        next(iter(loader))
    assert (loader.stats().batches, loader.stats().samples) == (2, 16)
    assert [index for index, _ in loader.stats().failed] == [3, 8, 3, 8]
    loader = agnoload.DataLoader(Bad(10), batch_sampler=[[3, 8], [0, 1]], on_error="skip")
    assert len(list(loader)) == 1
    stats = loader.stats()
    assert (stats.batches, stats.samples) == (1, 2)
    assert stats.failed == tuple(Failure(number, f"ValueError: sample {number} is bad") for number in (3, 8))
    assert "1 batch, 2 samples, " in str(stats)
    assert "2 bad samples, the first: 3, ValueError: sample 3 is bad" in str(stats)


def test_only_the_first_thousand_bad_samples_are_kept_and_all_are_counted() -> None:
    loader = agnoload.DataLoader(Bad(3000), 4, on_error="skip")
    for _ in range(3):
        list(loader)
    stats = loader.stats()
    assert (stats.num_failed, stats.samples) == (1800, 7200)
    assert [index for index, _ in stats.failed] == [*range(3, 3000, 5), *range(3, 2000, 5)]
    assert "1800 bad samples, the first: 3, " in str(stats)


@pytest.mark.slow
def test_hits_of_a_cache_are_counted_over_all_workers() -> None:
    cached = agnoload.CachedDataset(Waiting(20), max_bytes=1 << 20)
    with agnoload.DataLoader(cached.map(float), 5, num_workers=2) as loader:
        for _ in range(3):
            list(loader)
        stats = loader.stats()
    assert (stats.cache_misses, stats.cache_hits) == (20, 40)
    assert "cache: 40 hits, 20 misses" in str(stats)


def test_the_time_between_epochs_belongs_to_nobody() -> None:
    recorder = Recorder()
    for start in (100.0, 9000.0):  # two epochs, hours apart
        ends: dict[int, float] = {}
        recorder.arrived(reply(0, 0, start, start + 1.0), ends)
        recorder.delivered(reply(0, 0, start, start + 1.0), None, start, start + 2.0)
        recorder.arrived(reply(1, 0, start + 2.0, start + 3.0), ends)
        recorder.delivered(reply(1, 0, start + 2.0, start + 3.0), start + 2.0, start + 4.0, start + 4.5)
    stats = recorder.stats(1, "as asked for", 2, [])
    assert stats.seconds == 2 * 4.5
    assert stats.wait_seconds == 2 * 2.5
    assert stats.wait_first == 2 * 2.0
    assert stats.busy == (2 / 3,)  # a second of three, twice: it was idle from 101 to 102


def test_what_iter_takes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = agnoload.DataLoader(range(4), 2)
    opens, clock = loader._keeper.open, [0.0]

    def slowly(*arguments: Any) -> Any:
        clock[0] += 50.0
        return opens(*arguments)

    monkeypatch.setattr(loader._keeper, "open", slowly)
    monkeypatch.setattr("agnoload.loader.time", SimpleNamespace(monotonic=lambda: clock[0]))
    list(loader)
    stats = loader.stats()
    assert stats.seconds >= stats.wait_seconds >= stats.wait_first >= 50.0
    assert stats.wait_p99 < 50.0


def test_a_reply_about_a_death_counts_as_no_work() -> None:
    recorder = Recorder()
    ends = {0: 5.0}
    recorder.arrived(Reply(3, 0, error=agnoload.WorkerDied("gone", 0, 1, -9, 3, [3], 0)), ends)
    assert recorder.sums() == Sums(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert ends == {0: 5.0}


LEAVES = st.one_of(
    st.builds(np.zeros, st.integers(0, 9), st.sampled_from(["u1", "i2", "f8"])),
    st.builds(np.float32, st.integers(0, 9)),
    st.none() | st.booleans() | st.lists(st.text(max_size=2), max_size=3),
)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(tuple, st.lists(inner, max_size=3)),
        st.builds(agnoload.Padded, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(BATCHES)
def test_bytes_are_those_of_the_arrays_wherever_they_lie(batch: Any) -> None:
    leaves = [leaf for _, leaf in walk(batch)]
    assert size_of(batch) == sum(leaf.nbytes for leaf in leaves if isinstance(leaf, (np.ndarray, np.generic)))


# ---------------------------------------------------------------------------------------------- sums over time

WORK = st.tuples(st.integers(0, 2), *[st.sampled_from([0.0, 0.125, 0.5, 2.0])] * 3)
"""Of a batch: who loads it, how long that worker was idle before, how long it works, how long the user works."""


@settings(max_examples=50)
@given(st.lists(WORK, min_size=1, max_size=30), st.integers(1, 7))
def test_the_account_is_the_sum_of_what_was_noted_however_it_is_cut(
    work: list[tuple[int, float, float, float]], chunk: int
) -> None:
    recorder, ends, since, now = Recorder(), {}, None, 100.0
    recorder.CHUNK = chunk  # type: ignore[misc]
    alive, loading = np.zeros(3), np.zeros(3)
    waited = 0.0
    for number, (worker, idle, busy, use) in enumerate(work):
        began = now + (use if number else 0.0)
        started = max(ends.get(worker, began), began) + idle
        answer = reply(number, worker, started, started + busy)
        alive[worker] += started + busy - ends.get(worker, started)
        loading[worker] += busy
        now = started + busy
        recorder.arrived(answer, ends)
        recorder.delivered(answer, since, began, now)
        waited, since = waited + now - began, now
    stats = recorder.stats(3, "as asked for", 4, [])
    assert (stats.batches, stats.samples, stats.bytes) == (len(work), 2 * len(work), 16 * len(work))
    assert stats.wait_seconds == waited
    assert stats.seconds == now - 100.0
    assert stats.wait_first <= stats.wait_seconds <= stats.seconds
    assert stats.busy == pytest.approx(np.minimum(loading / np.maximum(alive, 1e-9), 1.0)[: len(stats.busy)])
    assert len(recorder._given) < chunk  # notes are summed up and dropped


@given(st.lists(st.floats(1e-7, 5000.0), min_size=1, max_size=50))
def test_percentiles_are_those_of_the_waits(waits: list[float]) -> None:
    recorder = Recorder()
    for number, wait in enumerate(waits):
        recorder.delivered(reply(number, 0, 0.0, 0.1), 0.0, 0.0, wait)
    stats = recorder.stats(0, "as asked for", 1, [])
    assert (stats.wait_p50, stats.wait_p95, stats.wait_p99) == pytest.approx(np.percentile(waits, (50, 95, 99)))


def test_percentiles_forget_waits_beyond_the_last_ten_thousand() -> None:
    recorder = Recorder()
    for wait, times in ((100.0, 3000), (1.0, 10_000)):
        for number in range(times):
            recorder.delivered(reply(number, 0, 0.0, 0.1), 0.0, 0.0, wait)
    assert recorder.stats(0, "as asked for", 1, []).wait_p99 == 1.0
    assert len(recorder._waits) == 10_000


# ---------------------------------------------------------------------------------------------- the verdict


def sums(batches: int = 100, **parts: float) -> Sums:
    """An account in seconds; by default 10 s in all, and nothing waited for at first."""
    return Sums(batches, **{"seconds": 10.0, "waited": 0.0, "first": 0.0, "loading": 0.0, "alive": 10.0, **parts})


HALF = sums(waited=4.3, loading=19.6, alive=20.0)
LATE = "of it until the workers had started: use persistent_workers=True, so that they start only once"
VERDICTS = [  # account, workers, cores, how the verdict begins, how it ends
    (sums(waited=0.2, loading=4.0, alive=20.0), 2, 4, "2% of the time; the loader is 5.0 times faster", "to gain here"),
    (sums(waited=0.2, loading=18.0, alive=20.0), 2, 4, "2%", "2% of the time: nothing to gain here"),
    (HALF, 2, 8, "43%", "; 2 workers 98% busy: add workers (8 usable cores), or make samples cheaper"),
    (HALF, 2, 2, "43%", "or keep them in a CachedDataset"),
    (sums(waited=7.5, loading=7.4), 0, 8, "75%", ": workers load while the loop works, try num_workers=3"),
    (sums(waited=7.5, loading=7.4), 0, 2, "75%", "try num_workers=2"),
    (sums(100_000, waited=7.5, loading=7.4), 0, 8, "75% of the time, but a batch takes 74 ", "workers do not help"),
    (sums(100_000, waited=9.5, loading=8.0, alive=20.0), 2, 8, "95%", "use num_workers=0 or larger batches"),
    (sums(1000, waited=5.0, loading=12.0, alive=20.0), 2, 8, "50%", "raise prefetch_factor, or use in_order=False"),
    (
        sums(waited=3.0, first=2.9, loading=2.0, alive=14.0),
        2,
        8,
        f"30% of the time, 97% {LATE}",
        "nothing to gain here",
    ),
    (sums(waited=9.5, first=6.0, loading=5.6, alive=8.0), 2, 8, f"95% of the time, 63% {LATE}", "dataset's module"),
    (sums(100_000, waited=9.5, first=6.0, loading=3.0, alive=7.0), 2, 8, "95%", "so that they start only once"),
]


@pytest.mark.parametrize(("account", "workers", "cores", "begins", "ends"), VERDICTS)
def test_the_verdict_says_where_the_time_goes_and_what_to_do(
    account: Sums, workers: int, cores: int, begins: str, ends: str
) -> None:
    text = verdict(account, workers, cores)
    assert text.startswith(f"waited for data {begins}")
    assert text.endswith(ends)


SECONDS = st.floats(0.0, 1e6)


@given(st.integers(1, 10**9), st.tuples(*[SECONDS] * 5).map(sorted), st.integers(0, 99), st.integers(1, 99))
def test_the_verdict_is_one_sentence_on_any_account(
    batches: int, seconds: list[float], workers: int, cores: int
) -> None:
    first, waited, total, loading, alive = seconds
    account = Sums(batches, total, waited, first, loading, alive)
    for renewed in (True, False):
        text = verdict(account, workers, cores, renewed=renewed)
        assert text.startswith("waited for data ")
        assert "\n" not in text
        assert "nan" not in text
        if "try num_workers=" in text:
            assert 1 <= int(text.rpartition("=")[2]) <= cores


def test_workers_that_are_kept_are_said_to_start_late_and_not_to_have_batches_of_unequal_length() -> None:
    text = verdict(sums(waited=9.5, first=6.0, loading=5.6, alive=8.0), 2, 8, renewed=False)
    assert "63% of it until the workers had started: iterate by steps(), which has no gap between epochs" in text


def account_of(imports: float, renewed: bool, epochs: int = 2, apart: Sequence[str] = ()) -> agnoload.Stats:
    """Epochs of ten batches that a worker loads in 0.1 s each, after `imports` seconds; the loop does nothing."""
    recorder = Recorder()
    now = 100.0
    for epoch in range(epochs):
        late = imports if renewed or not epoch else 0.0
        recorder.opened(late / 4, renewed)  # the rest is for the worker itself
        ends: dict[int, float] = {}
        since = None
        for number in range(10):
            began, started = now, now + (0.0 if number else 0.75 * late)
            now = started + 0.1
            recorder.arrived(reply(number, 0, started, now), ends)
            recorder.delivered(reply(number, 0, started, now), since, began, now)
            since = now
    return recorder.stats(1, "as asked for", 2, [], apart)


def test_imports_while_a_worker_starts_are_waited_for_and_are_no_work() -> None:
    for renewed, starts in ((True, 2), (False, 1)):
        stats = account_of(8.0, renewed)
        assert stats.wait_seconds == stats.seconds == pytest.approx(starts * 8 + 2.0)
        assert stats.wait_first == pytest.approx(starts * 8 + 0.2)
        assert stats.busy == (1.0,)
        assert "of it until the workers had started: " in stats.verdict
        assert ("persistent_workers=True" in stats.verdict) == renewed
        assert "of it until" not in account_of(0.0, renewed).verdict
    advice = account_of(8.0, renewed=True, epochs=1).verdict.partition("until the workers had started: ")[2]
    assert advice.startswith("the first start imports the dataset's modules for all of them. Make the loader earlier")
    assert "multiprocessing_context='fork' or worker_type='thread'" in advice
    assert "persistent_workers" not in advice
    assert "persistent_workers=True" in account_of(8.0, renewed=True, epochs=1, apart=["pandas"]).verdict


def test_the_account_prints_as_a_person_reads_it() -> None:
    recorder = Recorder()
    ends: dict[int, float] = {}
    for number in range(4):
        answer = reply(number, 0, 10.0 + number, 10.5 + number)
        recorder.arrived(answer, ends)
        recorder.delivered(answer, None if number == 0 else 10.5 + number, 10.0 + number, 10.5 + number)
    stats = recorder.stats(0, "as asked for", 4, [])
    lines = str(stats).splitlines()
    assert lines[0].startswith("4 batches, 8 samples, 0.0 MB in ")
    assert "a batch 500 ms (half)" in lines[1]
    assert lines[2] == "0 workers (as asked for), busy 57%"
    assert lines[-1] == stats.verdict
