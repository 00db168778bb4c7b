"""What a loader and its workers take: memory, descriptors, copies."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import DataLoader
from agnoload.errors import AgnoloadWarning

MIB = 1 << 20


class Filled:
    """Sample k is filled with k."""

    def __init__(self, length: int, shape: tuple[int, ...] = (50, 100), dtype: Any = np.int32) -> None:
        self.length, self.shape, self.dtype = length, shape, dtype

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return np.full(self.shape, index, self.dtype)


def run(code: str, *prefix: str, timeout: float = 120) -> str:
    """A program of its own, warnings as errors; gives what it prints."""
    program = textwrap.dedent(code)
    command = [*prefix, sys.executable, "-W", "error", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------ kept batches


def test_kept_batches_never_change_and_their_slots_come_free() -> None:
    """C5: what frameworks keep is with their tests."""
    with DataLoader(Filled(60), num_workers=2) as loader:
        iterator = iter(loader)
        kept: list[Any] = []
        for batch in iterator:
            kept.append((batch, batch[:, 10:20], memoryview(batch))[len(kept) % 3])
        arena: Any = iterator._pool.arena  # type: ignore[attr-defined]
        assert all((np.asarray(value) == number).all() for number, value in enumerate(kept))
        assert arena.lent == 60
        del batch
        kept.clear()
        gc.collect()
        assert arena.lent == 0


def test_a_batch_may_be_written_to_and_stays_as_it_was_written() -> None:
    with DataLoader(Filled(60), num_workers=2) as loader:
        kept = []
        for batch in loader:
            kept.append(batch)
            kept[-1] += 1000
    assert all((batch == 1000 + number).all() for number, batch in enumerate(kept))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_program_may_drop_its_copies_of_batches() -> None:
    """The slots are the parent's: a forked child that drops what it inherited frees nothing of it."""
    with DataLoader(Filled(30), num_workers=2) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(5)]
        pid = os.fork()
        if pid == 0:
            kept.clear()
            os._exit(0)
        os.waitpid(pid, 0)
        kept += list(iterator)
    assert all((batch == number).all() for number, batch in enumerate(kept))


KEPT = """
import os, resource
import numpy as np
import agnoload

class Data:
    def __len__(self): return 5_000
    def __getitem__(self, index): return np.full(4, index, np.int32)

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
before = len(os.listdir("/proc/self/fd"))
with agnoload.DataLoader(Data(), 1, num_workers=2) as loader:
    kept, most = [], 0
    for batch in loader:
        kept.append(batch)
        if len(kept) % 500 == 1:
            most = max(most, len(os.listdir("/proc/self/fd")))
    with open("/proc/self/maps") as lines:  # the system allows 65,530, however many batches are kept
        maps = len(list(lines))
    print(all((batch == number).all() for number, batch in enumerate(kept)), most - before <= 20, maps < 3000)
"""


@pytest.mark.slow
def test_any_number_of_batches_can_be_kept_with_few_descriptors() -> None:
    """C28."""
    assert run(KEPT) == "True True True"


# ------------------------------------------------------------------------------------------------ /dev/shm

SHM = """
import os
import numpy as np
import agnoload

class Data:
    def __len__(self): return 4
    def __getitem__(self, index): return np.full({mebibytes} << 17, index, np.float64)

assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == {size} << 20
with agnoload.DataLoader(Data(), 1, num_workers=2) as loader:
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        assert (batch == number).all()
        assert os.listdir("/dev/shm") == []
        if number == 2:
            print(iterator._pool.arena.nbytes() <= 7 * ({mebibytes} << 20))
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize(("size", "mebibytes"), [(1, 8), (64, 100)], ids=str)
def test_a_small_shared_memory_file_system_does_not_matter(size: int, mebibytes: int) -> None:
    """C27."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("mount namespaces are not allowed here")
    mount = f'mount -t tmpfs -o size={size}m tmpfs /dev/shm && exec "$@"'
    assert run(SHM.format(size=size, mebibytes=mebibytes), "unshare", "-m", "sh", "-c", mount, "-") == "True"


# ------------------------------------------------------------------------------------------------ workers


def private(pid: int | str = "self") -> int:
    """Bytes that nobody else maps: what would come free if the process ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


def look() -> Any:
    """A dataset whose samples tell about the process that loads them; its class travels, this module does not."""
    smaps = Path("/proc/self/smaps_rollup")

    class Look:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            lines = smaps.read_text().splitlines()
            private = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))
            return {name.partition(".")[0] for name in sys.modules}, private

    return Look()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_carries_no_framework_and_takes_little_memory(method: str) -> None:
    """C29."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    with DataLoader(look(), batch_size=None, num_workers=2, multiprocessing_context=method) as loader:
        for found, private in loader:
            assert not {"torch", "jax", "jaxlib", "cupy", "hypothesis", "pytest"} & found
            assert "numpy" in found
            assert private <= 25 * MIB


@pytest.mark.slow
def test_large_batches_of_a_numpy_collate_fn_come_unchanged_and_without_a_framework() -> None:
    """C4."""
    code = """
        import sys
        import numpy as np, agnoload
        FRAMEWORKS = {"torch", "jax", "jaxlib", "cupy"}
        base = np.arange(3 * 128 * 128, dtype=np.float32).reshape(3, 128, 128)

        def stacked(samples):
            assert not FRAMEWORKS & set(sys.modules)
            return np.stack(samples)

        class Images:
            def __len__(self): return 3200
            def __getitem__(self, index): return base + np.float32(index)

        with agnoload.DataLoader(Images(), 32, num_workers=2, collate_fn=stacked) as loader:
            for number, batch in enumerate(loader):
                assert type(batch) is np.ndarray and batch.dtype == np.float32 and batch.nbytes == 6_291_456
                numbers = np.arange(32 * number, 32 * number + 32, dtype=np.float32)
                assert (batch == base + numbers[:, None, None, None]).all()
        print(number, FRAMEWORKS & set(sys.modules))
    """
    assert run(code) == "99 set()"


def growth(texts: Any, method: str) -> int:
    """How much the private memory of the worst worker grows over a shuffled epoch."""
    with DataLoader(texts, 1000, shuffle=True, num_workers=2, multiprocessing_context=method) as loader:
        iterator = iter(loader)
        count = len(next(iterator))
        pids = iterator._pool.pids().values()  # type: ignore[attr-defined]
        before = {pid: private(pid) for pid in pids}
        gains = [0]
        for number, batch in enumerate(iterator):
            count += len(batch)
            if number == len(loader) - 8:
                gains = [private(pid) - before[pid] for pid in pids]
    assert count == len(texts)
    return max(gains)


@pytest.mark.slow
def test_a_packed_list_does_not_grow_in_workers() -> None:
    """C26."""
    texts = agnoload.PackedList(f"sentence number {number:09} of a corpus" for number in range(1_000_000))
    for method in ("forkserver", "spawn", "fork"):
        assert growth(texts, method) <= 5 * MIB, method


@pytest.mark.slow
def test_a_million_strings_in_a_list_reach_two_workers_with_one_warning() -> None:
    """C26."""

    class Texts:
        def __init__(self) -> None:
            self.lines = [f"line {number}" for number in range(1_000_000)]

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> str:
            return self.lines[-1 - index]

    with DataLoader(Texts(), 2, num_workers=2) as loader:
        with pytest.warns(AgnoloadWarning, match=r"dataset\.lines .*PackedList") as caught:
            assert next(iter(loader)) == ["line 999999", "line 999998"]
        assert len(caught) == 1
        assert len(list(loader)) == 2


# ------------------------------------------------------------------------------------------------ payload


class Heavy:
    """A large array, and a count of how often it was asked to pack itself."""

    packed = 0

    def __init__(self, nbytes: int) -> None:
        self.array = np.ones(nbytes, np.uint8)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return [int(self.array.sum()), os.getpid(), private()]

    def __getstate__(self) -> Any:
        Heavy.packed += 1
        return self.__dict__


@pytest.mark.slow
def test_an_array_is_packed_once_and_shared_by_all_workers() -> None:
    """C39."""
    workers, mebibytes = 8, 100
    Heavy.packed = 0
    with DataLoader(Heavy(mebibytes * MIB), batch_size=None, num_workers=workers) as loader:
        found = list(loader)
    assert Heavy.packed == 1
    assert {total for total, _, _ in found} == {mebibytes * MIB}
    # A page that only one process has read so far counts as its own. Before the last samples were asked for, the first
    # ones had been loaded, so the pages were read by all that took part in that.
    readers = {process for _, process, _ in found[:32]}
    own = 25 * MIB + (mebibytes * MIB if len(readers) == 1 else 0)
    assert max(memory for _, process, memory in found[56:] if process in readers) < own


def test_a_worker_s_write_to_the_dataset_is_its_own() -> None:
    class Written:
        def __init__(self) -> None:
            self.array = np.zeros(MIB, np.uint8)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            self.array[index] += 1
            return self.array[index]

    data = Written()
    with DataLoader(data, 1, num_workers=2) as loader:
        assert [int(batch[0]) for _ in range(2) for batch in loader] == [1] * 12
    assert not data.array.any()


# ------------------------------------------------------------------------------------------------ many small arrays


class Many:
    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> Any:
        return {f"field{number}": np.float32(index) for number in range(100)}


def test_many_small_fields_cost_no_descriptors() -> None:
    """C48."""
    with DataLoader(Many(), 32, num_workers=2) as loader:
        seen = set()
        kept = []
        for batch in loader:
            kept.append(batch)
            seen.add(len(os.listdir("/proc/self/fd")))
    assert len(seen) == 1
    assert all(
        (column == np.arange(32 * number, 32 * number + 32)).all()
        for number, batch in enumerate(kept)
        for column in batch.values()
    )
    assert len(kept[0]) == 100


# ------------------------------------------------------------------------------------------------ large batches


def test_the_first_batch_may_be_large_and_the_next_larger() -> None:
    class Growing:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return np.full((1 + 8 * index) * MIB, index, np.uint8)

    with DataLoader(Growing(), 1, num_workers=2) as loader:
        kept = list(loader)
    assert [batch.nbytes for batch in kept] == [(1 + 8 * index) * MIB for index in range(5)]
    assert all((batch == index).all() for index, batch in enumerate(kept))
