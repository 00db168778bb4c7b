"""What a worker needs reaches it, or the error says what does not, and where it lies."""

from __future__ import annotations

import functools
import pickle
import threading
import time

import psutil
import pytest

import agnoload
from agnoload import DataLoader, DatasetNotPicklable

METHODS = ("forkserver", pytest.param("spawn", marks=pytest.mark.slow))


@pytest.mark.parametrize("method", [*METHODS, "fork"])
def test_c33_lambdas_local_classes_and_closures_reach_workers(method) -> None:
    offset = 10

    class Local:
        def __init__(self, transform) -> None:
            self.transform = transform

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return self.transform(index)

    loader = DataLoader(
        Local(lambda index: index + offset),
        2,
        num_workers=2,
        collate_fn=lambda samples: (*samples,),
        multiprocessing_context=method,
    )
    with loader:
        assert list(loader) == [(10, 11), (12, 13)]


class Plain:
    def __init__(self, **attributes) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __call__(self, value):
        return value


LOCK = threading.Lock()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
def test_c33_a_lock_is_named_by_its_path_before_any_process_starts(method, persistent) -> None:
    dataset = Plain(transform=Plain(fns=[len, Plain(), threading.Lock()]))
    before = set(psutil.Process().children(recursive=True))
    with DataLoader(dataset, num_workers=2, multiprocessing_context=method, persistent_workers=persistent) as loader:
        began = time.monotonic()
        with pytest.raises(DatasetNotPicklable) as caught:
            iter(loader)
        assert time.monotonic() - began < 10  # a bound against hanging
        assert set(psutil.Process().children(recursive=True)) <= before
    text = str(caught.value)
    assert text.startswith("dataset.transform.fns[2] (_thread.lock) cannot be sent to a worker process")
    assert repr(method) in text
    assert "worker_init_fn" in text


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"dataset": Plain(table={"a": {"b": LOCK}})}, "dataset.table['a']['b']"),
        ({"dataset": Plain(fn=functools.partial(len, LOCK))}, "dataset.fn.args[0]"),
        ({"dataset": Plain(fn=functools.partial(len, key=LOCK))}, "dataset.fn.keywords['key']"),
        ({"collate_fn": Plain(lock=LOCK)}, "collate_fn.lock"),
        ({"worker_init_fn": Plain(lock=LOCK)}, "worker_init_fn.lock"),
        ({"on_error": Plain(lock=LOCK)}, "on_error.lock"),
        ({"collate_fn": lambda samples, lock=LOCK: samples}, "collate_fn"),
    ],
)
def test_c33_whatever_holds_it(options, path) -> None:
    loader = DataLoader(**{"dataset": Plain(), **options}, num_workers=1)
    with loader, pytest.raises(DatasetNotPicklable, match="cannot be sent") as caught:
        iter(loader)
    assert str(caught.value).startswith(path)


def test_c33_a_closure_over_a_lock_is_named_by_its_variable() -> None:
    mutex = threading.Lock()

    def collate(samples):
        with mutex:
            return samples

    loader = DataLoader(Plain(), num_workers=1, collate_fn=collate)
    with loader, pytest.raises(DatasetNotPicklable) as caught:
        iter(loader)
    assert str(caught.value).startswith("collate_fn.mutex (_thread.lock)")


@pytest.mark.parametrize("persistent", [False, True])
def test_c33_fork_needs_no_pickle(persistent) -> None:
    dataset = Plain(lock=threading.Lock())
    with DataLoader(dataset, 2, num_workers=1, multiprocessing_context="fork", persistent_workers=persistent) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "value",
    [
        agnoload.ArrayDataset([1, 2]),
        agnoload.StackDataset([1], [2]),
        agnoload.ConcatDataset([[1], [2]]),
        agnoload.Subset([1, 2], [0]),
        agnoload.PackedList(["a", "b"]),
        agnoload.RandomSampler(range(3)),
        agnoload.WeightedRandomSampler([1, 2], 2),
        agnoload.BatchSampler(agnoload.SequentialSampler(range(3)), 2, False),
        agnoload.DistributedSampler(range(3), 2, 0),
        agnoload.BalancedBatchSampler([0, 1, 0], 2),
        agnoload.IterableDataset(),
        agnoload.Backend(),
        agnoload.OptionError("x"),
        agnoload.CollateError("x", "a.b", (1, 2)),
        agnoload.WorkerDied("x", 1, 2, 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_c33_our_own_classes_pickle(value) -> None:
    back = pickle.loads(pickle.dumps(value))
    assert type(back) is type(value)
    if isinstance(value, Exception):
        assert (str(back), vars(back)) == (str(value), vars(value))
