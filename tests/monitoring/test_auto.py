"""`num_workers="auto"`: what this process may use, and what a probe says."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agnoload
import agnoload.loader
import agnoload.monitoring.auto
from agnoload import system
from agnoload.monitoring.auto import Choice, choose_for_stream, choose_workers
from agnoload.system import local_world_size

MIB = 1 << 20


class Squares(agnoload.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index * index


class Lazy(Squares):
    """Opens something on first use that cannot be sent to a worker, as many datasets do with their files."""

    def __init__(self) -> None:
        self.handle: Any = None

    def __getitem__(self, index: int) -> int:
        self.handle = self.handle or threading.Lock()
        return index * index


# ---------------------------------------------------------------------------------------------- what may be used


def groups(root: Path, lines: str, files: dict[str, str]) -> Path:
    """A machine's `/proc` and `/sys`, as far as control groups go."""
    files = {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/box\n"


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/box\n", {"box/cpu.max": "200000 100000\n"}, 2),
        ("0::/box\n", {"box/cpu.max": "150000 100000\n"}, 2),
        ("0::/box\n", {"box/cpu.max": "10000 100000\n"}, 1),
        ("0::/box\n", {"box/cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, 2),
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "500000 100000\n"}, 2),
        ("0::/box\n", {"other/cpu.max": "100000 100000\n"}, 16),
        ("0::/box\n", {"box/cpu.max": "nonsense\n"}, 16),
        (V1, {"cpu/box/cpu.cfs_quota_us": "200000", "cpu/box/cpu.cfs_period_us": "100000"}, 2),
        (V1, {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, 16),
        # In a container the group's own folder is the root of what is mounted.
        (V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"memory/box/cpu.cfs_quota_us": "100000", "memory/box/cpu.cfs_period_us": "100000"}, 16),
        ("nonsense\n", {}, 16),
    ],
)
def test_c55_the_quota_of_a_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(system, "affine_cores", lambda: 16)
    monkeypatch.setattr(system, "machine_cores", lambda: 16)
    assert system.usable_cores(root=groups(tmp_path, lines, files)) == expected


def test_affinity_counts_where_it_allows_less_than_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "affine_cores", lambda: 3)
    monkeypatch.setattr(system, "machine_cores", lambda: 16)
    assert system.usable_cores(root=groups(tmp_path, "0::/box\n", {"box/cpu.max": "800000 100000"})) == 3


@pytest.mark.parametrize(
    ("affine", "quota", "sharing", "expected"),
    [(64, None, 8, 8), (64, 16, 8, 2), (64, 4, 8, 1), (8, None, 8, 8), (4, None, 8, 4), (64, None, 100, 1)],
)
def test_processes_that_train_together_divide_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affine: int, quota: int | None, sharing: int, expected: int
) -> None:
    monkeypatch.setattr(system, "affine_cores", lambda: affine)
    monkeypatch.setattr(system, "machine_cores", lambda: 64)
    files = {} if quota is None else {"box/cpu.max": f"{quota}00000 100000"}
    assert system.usable_cores(sharing, groups(tmp_path, "0::/box\n", files)) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
    ],
)
def test_the_environment_says_how_many_processes_train_together_on_a_machine(
    variables: dict[str, str], expected: int
) -> None:
    assert local_world_size(variables) == expected


def test_a_loader_takes_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(system.machine_cores()))
    loader = agnoload.DataLoader(Endless().map(str), 4, num_workers="auto")
    assert loader.num_workers == 1
    loader.close()


def test_a_machine_without_control_groups_has_the_cores_of_its_affinity(tmp_path: Path) -> None:
    assert system.usable_cores(root=tmp_path) == len(os.sched_getaffinity(0))
    assert system.quota_cores(tmp_path) is None
    assert system.memory_limit(tmp_path) is None
    assert system.usable_memory(tmp_path) == system.physical_memory()


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/box\n", {"box/memory.max": f"{64 * MIB}\n"}, 64 * MIB),
        ("0::/box\n", {"box/memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/memory.max": f"{64 * MIB}\n", "a/b/memory.max": f"{99 * MIB}\n"}, 64 * MIB),
        (V1, {"memory/box/memory.limit_in_bytes": f"{64 * MIB}\n"}, 64 * MIB),
        (V1, {"memory/box/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_the_memory_limit_of_a_control_group_counts(
    tmp_path: Path, lines: str, files: dict[str, str], expected: int | None
) -> None:
    root = groups(tmp_path, lines, files)
    assert system.memory_limit(root) == expected
    assert system.usable_memory(root) == (expected or system.physical_memory())


PROGRAM = """
import json, os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))} if sys.argv[1] == "one" else os.sched_getaffinity(0))
import time, agnoload
from agnoload.system import usable_cores

class Slow(agnoload.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        time.sleep(0.002)
        return index

loader = agnoload.DataLoader(Slow(), 8, num_workers="auto")
batches = [batch.tolist() for batch in loader]
print(json.dumps([usable_cores(), loader.num_workers, batches]))
"""


def run(argument: str, **environment: str) -> tuple[int, int, list[list[int]]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, argument],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    usable, workers, batches = json.loads(done.stdout)
    return usable, workers, batches


def test_c55_one_core_by_affinity_means_one_worker_at_most() -> None:
    usable, workers, batches = run("one")
    assert usable == 1
    assert workers <= 1
    assert batches == [list(range(8)), list(range(8, 16))]


def test_c55_the_number_of_openmp_threads_changes_nothing() -> None:
    cores_here = system.usable_cores()
    assert run("all", OMP_NUM_THREADS="1")[:2] == (cores_here, cores_here)


@pytest.mark.slow
def test_c55_a_number_is_taken_as_it_is() -> None:
    with agnoload.DataLoader(Squares(), 5, num_workers=8) as loader:  # a warning would be an error
        assert loader.num_workers == 8
        assert np.concatenate(list(loader)).tolist() == [k * k for k in range(40)]
        assert loader.stats().choice == "as asked for"


# ---------------------------------------------------------------------------------------------- which datasets


@pytest.mark.parametrize(
    "dataset",
    [
        agnoload.ArrayDataset(np.zeros((100, 4))),
        agnoload.ArrayDataset(x=np.zeros((100, 4)), y=np.zeros(100)),
        agnoload.Subset(agnoload.ArrayDataset(np.zeros((100, 4))), range(50)),
    ],
    ids=repr,
)
def test_c55_no_workers_where_whole_batches_are_gathered(dataset: Any) -> None:
    loader = agnoload.DataLoader(dataset, 10, shuffle=True, num_workers="auto")
    for _ in range(3):
        list(loader)
    assert loader.num_workers == 0
    assert "gathered in one step" in loader.stats().choice
    assert "gathered in one step" in repr(loader)


def test_an_empty_dataset_needs_no_workers() -> None:
    loader = agnoload.DataLoader([], num_workers="auto")
    assert list(loader) == []
    assert loader.num_workers == 0


def test_the_probe_runs_in_a_worker_and_leaves_the_dataset_alone() -> None:
    dataset = Lazy()
    with agnoload.DataLoader(dataset, 4, num_workers="auto") as loader:
        assert "a probe" not in repr(loader)
        assert dataset.handle is None  # with its handle it could not be sent any more
        assert np.concatenate(list(loader)).tolist() == [k * k for k in range(40)]


def test_what_cannot_be_sent_to_workers_is_loaded_here() -> None:
    dataset = Squares()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    loader = agnoload.DataLoader(dataset, 4, num_workers="auto")
    assert len(list(loader)) == 10
    assert loader.num_workers == 0
    assert "dataset.lock" in loader.stats().choice


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_probe_that_fails_is_left_to_the_loop(kind: Any) -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> int:
            raise ValueError("never")

    with agnoload.DataLoader(Broken(), 4, num_workers="auto", worker_type=kind) as loader:
        assert loader.num_workers == system.usable_cores()
        assert "a probe failed with ValueError" in repr(loader)
        with pytest.raises(ValueError, match="never"):
            next(iter(loader))


def test_nothing_is_probed_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("the constructor must not load samples")

    monkeypatch.setattr(agnoload.loader, "choose_for_dataset", forbidden)
    loader = agnoload.DataLoader(Squares(), 4, num_workers="auto")
    assert len(loader) == 10
    with pytest.raises(AssertionError, match="must not load"):
        _ = loader.num_workers


def test_choosing_leaves_the_users_random_numbers_alone() -> None:
    state, arrays = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with agnoload.DataLoader(Squares(), 4, num_workers="auto", worker_type="thread") as loader:
        assert loader.num_workers >= 0
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == arrays  # type: ignore[index]


def test_samples_without_batches_are_probed_one_by_one() -> None:
    with agnoload.DataLoader(Squares(), None, num_workers="auto") as loader:
        assert sorted(map(int, loader)) == [k * k for k in range(40)]
        assert "fail" not in loader.stats().choice


class Shards(agnoload.IterableDataset[int]):
    num_shards = 6
    lanes = 3

    def shard(self, number: int) -> list[int]:
        return [number]


class Endless(agnoload.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


def test_a_stream_has_as_many_workers_as_can_share_it() -> None:
    assert choose_for_stream(Shards(), 8).workers == 3
    assert choose_for_stream(Shards(), 2).workers == 2
    assert choose_for_stream(Endless(), 8).workers == 1
    assert choose_for_stream(Endless().map(str), 8).workers == 8


def test_a_stream_is_not_read_to_choose() -> None:
    loader = agnoload.DataLoader(Endless(), 4, num_workers="auto")
    assert loader.num_workers == 1
    assert "without shards" in loader.stats().choice
    loader.close()


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


def test_none_where_a_batch_costs_less_than_its_transport() -> None:
    choice = choose_workers(Load(1e-6, first=0.05), 64, 2, 8, 1 << 34)
    assert choice == Choice(0, "a batch takes 64 microseconds, less than its way through a worker")


def test_all_cores_where_it_costs_more() -> None:
    assert choose_workers(Load(0.01), 64, 2, 8, 1 << 34) == Choice(8, "a sample takes 10 ms, 8 usable cores")


def test_a_probe_is_short() -> None:
    slow, quick, slowest = Load(0.01), Load(1e-6), Load(1.0)
    for load in (slow, quick, slowest):
        choose_workers(load, 64, 2, 8, 1 << 34)
    assert (slow.asked, quick.asked, slowest.asked) == ([1, 10], [1, 64], [1])


def test_batches_under_way_leave_most_of_the_memory_free() -> None:
    choice = choose_workers(Load(0.01, nbytes=MIB), 64, 2, 32, 4 * 64 * MIB * 22)  # a quarter is 22 batches
    assert choice == Choice(7, "a sample takes 10 ms, 32 usable cores, memory for the batches of 7")
    assert choose_workers(Load(0.01, nbytes=MIB), 64, 2, 32, MIB).workers == 1


def test_an_error_in_the_probe_is_no_reason_for_anything() -> None:
    def fails(count: int) -> tuple[float, int]:
        raise agnoload.WorkerTimeout("too long")

    assert choose_workers(fails, 64, 2, 8, 1 << 34) == Choice(8, "a probe failed with WorkerTimeout, 8 usable cores")
