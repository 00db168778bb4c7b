"""Streams whose readers do not see one sequence: their samples come once each, or an error says why they cannot."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import (
    AgnoloadError,
    AgnoloadWarning,
    DataLoader,
    IterableDataset,
    OptionError,
    sample_rng,
)
from agnoload.fetching.compare import CheckSum

THREADS: dict[str, Any] = {"num_workers": 2, "worker_type": "thread"}


def flat(batches: Any) -> list[Any]:
    return [sample for batch in batches for sample in (batch.tolist() if hasattr(batch, "tolist") else batch)]


class Unseeded(IterableDataset[Any]):
    """0 to 99 in an order that only the operating system knows, as whatever `make` makes of them."""

    def __init__(self, make: Callable[[int], Any], order: Callable[[], Any]) -> None:
        self.make = make
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return (self.make(number) for number in self.order())


def unseeded() -> list[int]:
    return list(np.random.default_rng().permutation(100).tolist())


@dataclasses.dataclass
class Record:
    number: int


def image(number: int) -> Any:
    array = np.zeros((100, 100), np.uint8)
    array[number] = 1
    return array


def mapped(folder: Path) -> Any:
    path = folder / "rows.bin"
    np.arange(500).tofile(path)
    return np.memmap(path, np.int64, "r", shape=(100, 5))


class Lazy(list[int]):
    """Takes ints alone, as classes that load when they are asked do."""

    def __getitem__(self, index: Any) -> Any:
        return list.__getitem__(self, int(index))


def records(number: int) -> Any:
    """With other bytes between the fields each time, as `np.empty` leaves them."""
    array = np.frombuffer(os.urandom(160), np.dtype([("id", "u1"), ("weight", "f8")], align=True)).copy()
    array["id"], array["weight"] = number, number / 7
    return array


def long_doubles(number: int) -> Any:
    array = np.full(4, number, np.longdouble) / 7
    if np.finfo(np.longdouble).nmant == 63:  # 80 bits, in 96 or 128
        array.view(np.uint8).reshape(4, -1)[:, 10:] = np.frombuffer(os.urandom(4), np.uint8)[:, None]
    return array


MAKES: dict[str, Callable[[int], Any]] = {
    "numbers": int,
    "floats": lambda number: number / 7,
    "text": lambda number: f"{number} {'x' * 5000}",
    "bytes": lambda number: bytes(5000) + bytes([number]) * 2000,
    "byte_arrays": lambda number: bytearray([number]),
    "paths": lambda number: Path(f"/data/{number}"),
    "arrays": image,
    "numpy_scalars": np.int16,
    "dicts": lambda number: {"image": np.zeros(9), "about": {"label": number}},
    "tuples": lambda number: ((("a", (number,)),),),
    "lists": lambda number: [0] * 500 + [number] * 500,
    "dataclasses": Record,
    "records": records,
    "a_record": lambda number: records(number)[0],
    "long_doubles": long_doubles,
    "a_lazy_list": lambda number: Lazy(range(number, 500)),
}


def sum_of(samples: Iterable[Any]) -> int:
    """The check sum that readers compare."""
    check = CheckSum(0)
    for sample in samples:
        check.note(sample)
    check.add_noted(False)
    return check.total


@pytest.mark.parametrize("kind", MAKES)
def test_equal_samples_are_equal_and_others_are_told_apart(kind: str) -> None:
    first, again = ([MAKES[kind](number) for number in range(100)] for _ in range(2))
    assert sum_of(first) == sum_of(again) != sum_of(reversed(again))


@settings(max_examples=15)
@given(size=st.integers(1, 100), workers=st.integers(2, 4))
def test_an_order_that_differs_from_worker_to_worker_is_an_error_in_the_first_round(size: int, workers: int) -> None:
    stream = Unseeded(int, unseeded).map(lambda sample: 0)
    delivered = []
    with (
        pytest.raises(AgnoloadError, match=r"of Unseeded, .* first \d+ workers \d and \d .*shared_source"),
        DataLoader(stream, size, num_workers=workers, worker_type="thread") as loader,
    ):
        delivered += loader
    assert len(delivered) < workers


def test_rows_of_a_mapped_file_are_told_apart_by_their_places(tmp_path: Path) -> None:
    rows = mapped(tmp_path)
    for order in (unseeded, lambda: range(100)):
        stream = Unseeded(lambda number: rows[number], order)
        with DataLoader(stream, 10, **THREADS) as loader:
            if order is unseeded:
                with pytest.raises(AgnoloadError, match="all workers must read the same samples"):
                    list(loader)
            else:
                assert np.array_equal(np.concatenate(list(loader)), rows)


def test_tensors_are_told_apart() -> None:
    torch = pytest.importorskip("torch")
    assert sum_of(map(torch.tensor, range(9))) != sum_of(map(torch.tensor, range(8, -1, -1)))


class Names(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        yield from {f"f{number}" for number in range(100)}


@pytest.mark.slow
def test_a_set_of_strings_is_an_error_where_each_worker_has_a_hash_seed_of_its_own() -> None:
    with (
        pytest.raises(AgnoloadError, match=r"of Names, .*sort sets"),
        DataLoader(Names(), 10, num_workers=2, multiprocessing_context="spawn") as loader,
    ):
        list(loader)


def test_a_set_of_strings_is_read_where_all_workers_have_one_hash_seed() -> None:
    with DataLoader(Names(), 10, num_workers=2) as loader:
        assert sorted(flat(loader)) == sorted(f"f{number}" for number in range(100))


EQUAL = """
import decimal, enum, numpy as np
from pathlib import Path
from agnoload.fetching.compare import CheckSum
class Color(enum.Enum): RED = 1
class Thing: pass
names = [f"{n}" for n in range(20)]
shared = "a" * 3
values = [1, 1.5, float("nan"), -0.0, 2**100, None, True, "x" * 999, b"y" * 999, 1j, Path("/a"), decimal.Decimal("1.1")]
values += [{*names}, frozenset(names), {n: 1 for n in {*names}}, {1: 2, "a": 3}, Thing(), Thing, Color.RED, lambda: 0]
values += [np.float32(1), np.array([{*names}], object), np.arange(12).reshape(3, 4).T, np.array("x"), np.array([])]
values += [[shared, shared], [names, [names]], ("a" + "aa", shared)]
nested = (1,)
for _ in range(5000): nested = (nested, nested)
sums = CheckSum(0)
for value in [*values, nested]: sums.note(value)
sums.add_noted(False)
print(sums.total)
"""


@pytest.mark.slow
def test_equal_values_have_one_check_sum_in_any_process() -> None:
    sums = set()
    for seed in "12":
        around = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", EQUAL], capture_output=True, text=True, env=around, check=True)
        sums.add(done.stdout)
    assert len(sums) == 1


class Ragged(IterableDataset[int]):
    """As many samples as threads have opened it before, and ten."""

    opened: ClassVar[list[int]] = []

    def __iter__(self) -> Iterator[int]:
        self.opened.append(1)
        return iter(range(10 + len(self.opened)))


def test_readers_that_end_at_different_places_are_an_error() -> None:
    for size in (3, 4, 100):
        Ragged.opened.clear()
        with DataLoader(Ragged(), size, **THREADS) as loader, pytest.raises(AgnoloadError, match="among the first"):
            list(loader)


class Drawing(IterableDataset[float]):
    """Numbers that are drawn as they should be, from the middle of a set that is put in order."""

    def __iter__(self) -> Iterator[float]:
        for name in sorted({f"f{number}" for number in range(50)}):
            yield len(name) + sample_rng().random()


@pytest.mark.slow
@settings(max_examples=8)
@given(delivered=st.integers(0, 6), kind=st.sampled_from(["process", "thread"]))
def test_streams_that_are_alike_go_on_with_any_workers_after_a_resume(delivered: int, kind: Any) -> None:
    def make() -> DataLoader[Any, Any]:
        stream = Drawing().filter(lambda x: x % 1 < 0.8).shuffle(5)
        return DataLoader(stream, 4, seed=1, num_workers=2, in_order=False, worker_type=kind)

    expected = sorted(flat(DataLoader(Drawing().filter(lambda x: x % 1 < 0.8).shuffle(5), 4, seed=1)))
    with make() as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(delivered)]
        state = loader.state_dict()
    with make() as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", AgnoloadWarning)  # it is replayed
        loader.load_state_dict(state)
        assert sorted(flat(first + list(loader))) == expected


# ------------------------------------------------------------------------------------------------ shared sources


class Inbox(IterableDataset[int]):
    """Each item goes to whoever takes it first."""

    shared_source = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(100):
            (folder / str(number)).touch()

    def __iter__(self) -> Iterator[int]:
        for path in sorted(self.folder.iterdir()):
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            yield int(path.name)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_item_of_a_shared_source_is_delivered_by_whoever_has_got_it(tmp_path: Path, workers: int) -> None:
    with DataLoader(Inbox(tmp_path).map(abs), 5, num_workers=workers) as loader:
        assert sorted(flat(loader)) == list(range(100))


def test_nothing_of_a_shared_source_is_dropped_by_a_resume(tmp_path: Path) -> None:
    loader = DataLoader(Inbox(tmp_path), 5)
    batches = iter(loader)
    first = [next(batches) for _ in range(4)]
    state = loader.state_dict()
    again = DataLoader(Inbox(tmp_path / "."), 5)
    for number in flat(first):
        (tmp_path / str(number)).unlink()
    again.load_state_dict(state)
    assert sorted(flat(first + list(again))) == list(range(100))


def test_a_shared_source_beside_another_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"shared_source .*Names"):
        DataLoader(Inbox(tmp_path) + Names(), 5, num_workers=2).__iter__()


# ------------------------------------------------------------------------------------------------ frameworks' workers


TORCH = """
import torch
from torch.utils.data import get_worker_info
import agnoload

class Split(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from range(12) if info is None else range(info.id, 12, info.num_workers)

class Rows:
    def __len__(self): return 4
    def __getitem__(self, index):
        info = get_worker_info()
        return info.num_workers, info.dataset is not None, info.seed - 7 - info.id

class Sharded(torch.utils.data.IterableDataset):
    num_shards = 4
    def __iter__(self): raise AssertionError
    def shard(self, number): return Shard(number)

class Shard(torch.utils.data.IterableDataset):
    def __init__(self, number): self.number = number
    def __iter__(self):
        info = get_worker_info()
        yield from [self.number] * 3 if info is None or info.id == self.number % info.num_workers + 1 else []

def init(worker):
    assert get_worker_info().id == worker

class Plain(agnoload.IterableDataset):
    def __iter__(self): return iter(range(100, 104))

alive = []  # so that one process imports torch for all of them
for kind in ("process", "thread"):
    options = {"num_workers": 2, "worker_type": kind, "seed": 7}
    def load(data, **more):
        alive.append(agnoload.DataLoader(data, 2, **options, **more))
        return alive[-1]
    print([batch.tolist() for batch in load(Split())])
    print(sorted(x for batch in load(agnoload.ChainDataset([Split(), Plain()])) for x in batch.tolist()))
    print(sorted(x for batch in load(Sharded()) for x in batch.tolist()))
    print([[part.tolist() for part in batch] for batch in load(Rows(), worker_init_fn=init)])
    print(get_worker_info(), [batch.tolist() for batch in agnoload.DataLoader(Split(), 12)])
"""


@pytest.mark.slow
def test_torchs_worker_info_is_true_in_workers_and_none_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    exec(TORCH, {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    for shown in (lines[:5], lines[5:]):
        assert shown == [
            "[[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]",
            str([*range(12), *range(100, 104)]),  # a part that does not ask would come once for each worker
            str(sorted([0, 1, 2, 3] * 3)),  # the shards are dealt out already
            "[[[2, 2], [True, True], [0, 0]], [[2, 2], [True, True], [0, 0]]]",
            f"None [{list(range(12))}]",
        ]


# ------------------------------------------------------------------------------------------------ states


class Restored(IterableDataset[int]):
    """Its state holds a generator, in the way of torchdata's examples."""

    at = 0

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        while self.at < 20:
            self.at += 1
            yield int(np.random.randint(1000) + 1000 * self.rng.integers(1000))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "global": np.random.get_state(), "own": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        np.random.set_state(state["global"])
        self.rng.bit_generator.state = state["own"]


class Afresh(IterableDataset[int]):
    """Its own iterator, which begins in `__iter__`."""

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == 20:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def check_goes_on(make: Callable[[], DataLoader[Any, Any]], stop: int) -> list[Any]:
    """What a loader gives in two epochs, whether or not it is stopped in between."""
    with make() as loader:
        unbroken = [flat(loader) for _ in range(2)]
    with make() as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(stop)]
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        assert [flat(first) + flat(loader), flat(loader)] == unbroken
    return unbroken


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Restored, Afresh])
def test_a_stream_goes_on_as_if_nothing_had_been_between(kind: type[Any], workers: int) -> None:
    check_goes_on(lambda: DataLoader(kind(), 3, seed=1, num_workers=workers), 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:multiprocessing_context='fork' copies")
def test_a_shuffle_buffer_of_hugging_faces_is_filled_again(workers: int) -> None:
    datasets = pytest.importorskip("datasets")

    def make() -> DataLoader[Any, Any]:
        rows = datasets.Dataset.from_dict({"x": range(400)}).to_iterable_dataset(num_shards=8)
        shuffled = rows.shuffle(seed=3, buffer_size=64).map(lambda row: {"x": row["x"] * 2})
        options: Any = {"num_workers": workers, "multiprocessing_context": "fork"}  # no worker needs to import it
        return DataLoader(shuffled, 8, seed=1, collate_fn=lambda rows: [row["x"] for row in rows], **options)

    for epoch in check_goes_on(make, 13):
        assert Counter(epoch) == Counter(range(0, 800, 2))
