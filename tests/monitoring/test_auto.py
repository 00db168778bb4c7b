"""`num_workers="auto"`: what this process may use, and what a probe says."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
import agnoload.loader
from agnoload import DataLoader, system
from agnoload.monitoring.auto import Choice, choose_for_stream, choose_workers
from agnoload.system import local_world_size

MIB = 1 << 20


class Squares(agnoload.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index * index


class Shards(agnoload.IterableDataset[int]):
    num_shards = 6
    lanes = 3

    def shard(self, number: int) -> list[int]:
        return [number]


class Endless(agnoload.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


# ---------------------------------------------------------------------------------------------- what may be used


@contextmanager
def machine(lines: str, files: dict[str, str], cores: int = 16, affine: int = 16) -> Iterator[Path]:
    """The `/proc` and `/sys` of a machine, as far as control groups go; it has so many cores, and so many are ours."""
    files = {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "affine_cores", lambda: affine)
        patch.setattr(system, "machine_cores", lambda: cores)
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        yield Path(folder)


QUOTAS = st.lists(st.none() | st.integers(1000, 1_500_000), min_size=1, max_size=3)
"""Microseconds of each 100,000 that a control group and those inside it allow."""


@settings(max_examples=25)
@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([1, 1, 2, 3, 100]), QUOTAS, st.booleans())
def test_c55_cores_are_bounded_by_affinity_machine_and_the_quotas_of_control_groups(
    cores: int, affine: int, sharing: int, quotas: list[int | None], first_version: bool
) -> None:
    group, files = "", {}
    for quota in quotas:
        group += "/g"
        if first_version:
            files[f"cpu{group}/cpu.cfs_quota_us"] = "-1\n" if quota is None else f"{quota}\n"
            files[f"cpu{group}/cpu.cfs_period_us"] = "100000\n"
        else:
            files[f"{group[1:]}/cpu.max"] = f"{'max' if quota is None else quota} 100000\n"
    lines = f"5:memory:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:{group}\n" if first_version else f"0::{group}\n"
    limits = [affine, cores // sharing, *(math.ceil(q / 100_000 / sharing) for q in quotas if q is not None)]
    with machine(lines, files, cores, affine) as root:
        assert system.usable_cores(sharing, root) == max(1, min(limits))


@settings(max_examples=25)
@given(st.lists(st.none() | st.integers(1, 10**12), min_size=1, max_size=3), st.booleans())
def test_memory_is_bounded_by_the_limits_of_control_groups(limits: list[int | None], first_version: bool) -> None:
    group, files = "", {}
    for limit in limits:
        group += "/g"
        name = f"memory{group}/memory.limit_in_bytes" if first_version else f"{group[1:]}/memory.max"
        files[name] = f"{limit}\n" if limit is not None else "9223372036854771712\n" if first_version else "max\n"
    wanted = min((limit for limit in limits if limit is not None), default=None)
    with machine(f"5:memory:{group}\n" if first_version else f"0::{group}\n", files) as root:
        assert system.memory_limit(root) == wanted
        here = system.physical_memory()
        assert here is not None
        assert system.usable_memory(root) == min(here, wanted or here)


def test_odd_files_of_control_groups_set_no_limit() -> None:
    first = "4:cpu,cpuacct:/box\n"
    for lines, files, expected in [
        ("0::/box\n", {"other/cpu.max": "100000 100000\n"}, 16),
        ("0::/box\n", {"box/cpu.max": "nonsense\n"}, 16),
        ("nonsense\n", {}, 16),
        (first, {"memory/box/cpu.cfs_quota_us": "100000", "memory/box/cpu.cfs_period_us": "100000"}, 16),
        # In a container the group's own folder is the root of what is mounted.
        (first, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
    ]:
        with machine(lines, files) as root:
            assert system.usable_cores(root=root) == expected, files


def test_a_machine_without_control_groups_has_the_cores_of_its_affinity(tmp_path: Path) -> None:
    assert system.usable_cores(root=tmp_path) == len(os.sched_getaffinity(0))
    assert (system.quota_cores(tmp_path), system.memory_limit(tmp_path)) == (None, None)


def test_the_environment_says_how_many_processes_train_together_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_world_size({}) == 1
    assert local_world_size({"LOCAL_WORLD_SIZE": "8"}) == 8
    assert local_world_size({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 2
    assert local_world_size({"LOCAL_WORLD_SIZE": "0"}) == local_world_size({"LOCAL_WORLD_SIZE": "many"}) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(system.machine_cores()))
    with DataLoader(Endless().map(str), 4, num_workers="auto") as loader:
        assert loader.num_workers == 1


PROGRAM = """
import json, os, time, agnoload
from agnoload.system import usable_cores

class Slow(agnoload.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        time.sleep(0.002)
        return index

for cores in os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}:
    os.sched_setaffinity(0, cores)
    with agnoload.DataLoader(Slow(), 8, num_workers="auto") as loader:
        print(json.dumps([usable_cores(), loader.num_workers, [batch.tolist() for batch in loader]]))
"""


@pytest.mark.slow
def test_c55_affinity_counts_and_the_number_of_openmp_threads_does_not() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (usable, workers, batches), (one, at_most_one, same) = map(json.loads, done.stdout.splitlines())
    assert usable == workers == system.usable_cores()
    assert one == 1 >= at_most_one
    assert batches == same == [list(range(8)), list(range(8, 16))]


def test_c55_a_number_is_taken_as_it_is() -> None:
    wanted = system.usable_cores() + 1
    with DataLoader(Squares(), 5, num_workers=wanted) as loader:  # a warning would be an error
        assert loader.num_workers == wanted
        assert np.concatenate(list(loader)).tolist() == [k * k for k in range(40)]
        assert loader.stats().choice == "as asked for"


# ---------------------------------------------------------------------------------------------- which datasets


def test_c55_no_workers_where_whole_batches_are_gathered() -> None:
    rows, named = agnoload.ArrayDataset(np.zeros((100, 4))), agnoload.ArrayDataset(x=np.zeros((100, 4)), y=np.ones(100))
    for dataset in (rows, named, agnoload.Subset(rows, range(50))):
        loader = DataLoader(dataset, 10, shuffle=True, num_workers="auto")
        for _ in range(3):
            list(loader)
        assert loader.num_workers == 0
        assert "gathered in one step" in loader.stats().choice
        assert "gathered in one step" in repr(loader)


def test_the_probe_runs_in_a_worker_and_leaves_the_dataset_alone() -> None:
    class Lazy(Squares):  # opens something on first use that cannot be sent to a worker, as many do with their files
        handle: Any = None

        def __getitem__(self, index: int) -> int:
            self.handle = self.handle or threading.Lock()
            return index * index

    dataset = Lazy()
    with DataLoader(dataset, 4, num_workers="auto") as loader:
        assert "a probe" not in repr(loader)
        assert dataset.handle is None  # with its handle it could not be sent any more
        assert np.concatenate(list(loader)).tolist() == [k * k for k in range(40)]


def test_workers_are_none_where_there_is_nothing_to_load_or_nothing_to_send() -> None:
    empty = DataLoader([], num_workers="auto")
    assert list(empty) == []
    assert empty.num_workers == 0
    dataset = Squares()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    loader = DataLoader(dataset, 4, num_workers="auto")
    assert len(list(loader)) == 10
    assert loader.num_workers == 0
    assert "dataset.lock" in loader.stats().choice


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_probe_that_fails_is_left_to_the_loop(kind: Any) -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> int:
            raise ValueError("never")

    with DataLoader(Broken(), 4, num_workers="auto", worker_type=kind) as loader:
        assert loader.num_workers == system.usable_cores()
        assert "a probe failed with ValueError" in repr(loader)
        with pytest.raises(ValueError, match="never"):
            next(iter(loader))


def test_nothing_is_probed_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("the constructor must not load samples")

    monkeypatch.setattr(agnoload.loader, "choose_for_dataset", forbidden)
    loader = DataLoader(Squares(), 4, num_workers="auto")
    assert len(loader) == 10
    with pytest.raises(AssertionError, match="must not load"):
        _ = loader.num_workers


def test_single_samples_are_probed_one_by_one_and_the_users_generators_are_left_alone() -> None:
    state, arrays = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with DataLoader(Squares(), None, num_workers="auto", worker_type="thread") as loader:
        assert sorted(map(int, loader)) == [k * k for k in range(40)]
        assert "fail" not in loader.stats().choice
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == arrays  # type: ignore[index]


def test_a_stream_has_as_many_workers_as_can_share_it_and_is_not_read() -> None:
    assert choose_for_stream(Shards(), 8).workers == 3
    assert choose_for_stream(Shards(), 2).workers == 2
    assert choose_for_stream(Endless().map(str), 8).workers == 8
    with DataLoader(Endless(), 4, num_workers="auto") as loader:
        assert loader.num_workers == 1
        assert "without shards" in loader.stats().choice


# ---------------------------------------------------------------------------------------------- the probe


class Load:
    """Samples that take `seconds`, the first one more, of so many bytes."""

    def __init__(self, seconds: float, nbytes: int = 100, first: float = 0.0) -> None:
        self.seconds = seconds
        self.nbytes = nbytes
        self.first = first
        self.asked: list[int] = []

    def __call__(self, count: int) -> tuple[float, int]:
        self.asked.append(count)
        return count * self.seconds + (self.first if len(self.asked) == 1 else 0.0), count * self.nbytes


def test_workers_are_none_where_a_batch_costs_less_than_its_transport_and_all_cores_where_it_costs_more() -> None:
    quick = Choice(0, "a batch takes 64 microseconds, less than its way through a worker")
    assert choose_workers(Load(1e-6, first=0.05), 64, 2, 8, 1 << 34) == quick
    assert choose_workers(Load(0.01), 64, 2, 8, 1 << 34) == Choice(8, "a sample takes 10 ms, 8 usable cores")
    short = Choice(7, "a sample takes 10 ms, 32 usable cores, memory for the batches of 7")
    assert choose_workers(Load(0.01, nbytes=MIB), 64, 2, 32, 4 * 64 * MIB * 22) == short  # a quarter is 22 batches


@given(
    st.floats(1e-9, 10.0), st.integers(0, 1 << 40), st.integers(1, 4096), st.integers(1, 16), st.integers(1, 128),
    st.integers(1 << 20, 1 << 40),
)  # fmt: skip
def test_a_probe_is_short_and_batches_under_way_leave_most_of_the_memory_free(
    seconds: float, nbytes: int, size: int, prefetch: int, cores: int, memory: int
) -> None:
    load = Load(seconds, nbytes)
    workers = choose_workers(load, size, prefetch, cores, memory).workers
    assert 0 <= workers <= cores
    assert load.asked[0] == 1
    assert len(load.asked) <= 2
    assert sum(load.asked[1:]) * seconds <= max(0.1, seconds) * 1.001
    assert max(load.asked) <= size
    assert workers <= 1 or (workers * (prefetch + 1) + 1) * nbytes * size <= memory / 4
    assert (workers == 0) == (seconds * size < 300e-6) or seconds * size == pytest.approx(300e-6)


def test_an_error_in_the_probe_is_no_reason_for_anything() -> None:
    def fails(count: int) -> tuple[float, int]:
        raise agnoload.WorkerTimeout("too long")

    assert choose_workers(fails, 64, 2, 8, 1 << 34) == Choice(8, "a probe failed with WorkerTimeout, 8 usable cores")
