"""The life of iterators and their workers: what ends them, what does not, and what is left afterwards."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import AgnoloadError, DataLoader, LoaderClosed, SampleStopped, Subset

POOLS = [
    pytest.param({}, id="inline"),
    pytest.param({"num_workers": 2}, id="processes"),
    pytest.param({"num_workers": 2, "worker_type": "thread"}, id="threads"),
]


class Holes:
    """The ints below `n`; those in `bad` raise what they are given with makes."""

    def __init__(self, n: int, bad: dict[int, Any]) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.bad[index]()
        return index


def outcomes(batches: Iterator[Any]) -> list[Any]:
    """All that comes: batches as lists, errors as their types."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))
            if len(found) > 99 or str(error).endswith("make a new one"):
                return found


# ---------------------------------------------------------------------------------------------- after an error


class Stream(agnoload.IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Shards(Stream):
    num_shards = 2

    def shard(self, number: int) -> Iterator[int]:
        return iter(range(number, self.n, 2))


def refuse(value: int) -> int:
    if value in (3, 8):
        raise OSError(f"no file for {value}")
    return value


def collate(values: list[int]) -> Any:
    if 4 in values:
        raise KeyError(4)
    return np.array(values)


INDEXED = {"dataset": Holes(9, {3: OSError, 8: OSError}), "collate_fn": collate}


def first_outcomes(batches: Iterator[Any], count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        try:
            found.append(next(batches).tolist())
        except Exception as error:
            found.append(type(error))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the stream has no state_dict")
@pytest.mark.parametrize("pool", POOLS)
def test_after_a_batch_that_fails_the_next_one_comes_and_a_state_counts_it(pool) -> None:
    stream = {"dataset": Stream(9).map(refuse), "collate_fn": collate}
    shards = {"dataset": Shards(16).map(refuse)}
    for options, wanted in (
        (INDEXED, [[0, 1], OSError, KeyError, [6, 7], OSError]),
        ({**INDEXED, "in_order": False}, [[0, 1], OSError, KeyError, [6, 7], OSError]),
        (stream, [[0, 1], OSError, KeyError, [6, 7], OSError]),
        (shards, [[0, 2], OSError, [4, 6], [5, 7], OSError, [9, 11], [12, 14], [13, 15]]),
    ):
        key = None if options.get("in_order", True) else str
        make = partial(DataLoader, batch_size=2, seed=0, **options, **pool)
        with make() as first, make() as second:
            before = first_outcomes(iter(first), 2)
            second.load_state_dict(first.state_dict())
            found = before + outcomes(iter(second))
            assert (sorted(found, key=key) if key else found) == (sorted(wanted, key=key) if key else wanted)


@settings(max_examples=40)
@given(
    n=st.integers(1, 14),
    size=st.integers(1, 5),
    bad=st.dictionaries(st.integers(0, 13), st.sampled_from([OSError, KeyError]), max_size=4),
    stop=st.integers(0, 14),
)
def test_batches_that_fail_cost_no_other_and_are_counted(n, size, bad, stop) -> None:
    make = partial(DataLoader, Holes(n, bad), size)
    wanted: list[Any] = []
    for start in range(0, n, size):
        indices = range(start, min(start + size, n))
        failed = [bad[index] for index in indices if index in bad]
        wanted.append(failed[0] if failed else [*indices])
    loader, resumed = make(), make()
    batches = iter(loader)
    stop = min(stop, len(wanted) - 1)
    before = first_outcomes(batches, stop)
    resumed.load_state_dict(loader.state_dict())
    assert len(batches) == len(iter(resumed)) == len(wanted) - stop
    resumed.load_state_dict(loader.state_dict())
    assert before + outcomes(iter(resumed)) == before + outcomes(batches) == wanted
    assert first_outcomes(loader.steps(len(wanted) + 1), len(wanted) + 1) == [*wanted, wanted[0]]


@pytest.mark.parametrize("pool", POOLS)
def test_the_end_of_data_raised_by_a_sample_is_an_error_of_its_batch_alone(pool) -> None:
    with DataLoader(Holes(5, {1: StopIteration, 3: GeneratorExit}), **pool) as loader:
        assert outcomes(iter(loader)) == [[0], SampleStopped, [2], SampleStopped, [4]]


def test_kept_workers_live_on_after_a_samples_error() -> None:
    with DataLoader(Holes(4, {1: OSError}), num_workers=2, persistent_workers=True) as loader:
        pids = []
        for _ in range(2):
            assert outcomes(iter(loader)) == [[0], OSError, [2], [3]]
            pids.append(loader._keeper.kept._pools[0].pids())
    assert pids[0] == pids[1]


class Breaks(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise OSError("the line is cut")


class Dies(Holes):
    def __getitem__(self, index: int) -> int:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "wanted"),
    [
        (Breaks(3), {}, [[0], [1], [2], OSError]),
        (Breaks(3), {"num_workers": 2}, [[0], [1], [2], OSError]),
        (Dies(4, {}), {"num_workers": 2}, [[0], agnoload.WorkerDied]),
        (Holes(4, {1: OSError}), {"on_error": "skip", "max_failed": 0}, [[0], agnoload.TooManyFailed]),
    ],
    ids=["stream", "stream in workers", "death", "too many"],
)
def test_what_nothing_can_follow_is_the_end(dataset, options, wanted) -> None:
    with DataLoader(dataset, **options) as loader:
        assert outcomes(iter(loader)) == [*wanted, AgnoloadError]


def test_a_sampler_that_raises_generatorexit_at_once_is_no_end_of_data() -> None:
    class Sampler:
        def __iter__(self) -> Iterator[int]:
            raise GeneratorExit

    with pytest.raises(SampleStopped, match="sampler"):
        iter(DataLoader(range(4), sampler=Sampler()))


# ---------------------------------------------------------------------------------------------- interrupts


class Interrupted(Holes):
    """Ctrl-C comes while sample 1 is loaded for the first time."""

    interrupts = 1

    def __getitem__(self, index: int) -> int:
        if index == 1 and self.interrupts:
            self.interrupts = 0
            raise KeyboardInterrupt
        return index


def test_what_is_interrupted_without_workers_is_loaded_again() -> None:
    batches = iter(DataLoader(Interrupted(4, {})))
    assert next(batches).tolist() == [0]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert outcomes(batches) == [[1], [2], [3]]


class Waits(Holes):
    """Sample 1 comes once the file at `path` is there to be read from."""

    def __init__(self, path: str) -> None:
        super().__init__(4, {})
        self.path = path

    def __getitem__(self, index: int) -> int:
        if index == 1:
            with open(self.path) as gate:
                gate.read()
        return index


@pytest.mark.parametrize("pool", POOLS[1:])
def test_an_exception_out_of_a_signal_handler_ends_a_wait_and_nothing_else(pool, tmp_path) -> None:
    os.mkfifo(path := str(tmp_path / "gate"))
    struck = threading.Event()

    def handler(*_: object) -> None:
        if iterator._supply._receiving and iterator._pool.waiting and not struck.is_set():
            struck.set()
            raise raised("mine")

    def strike() -> None:
        while not struck.wait(0.01):  # one that comes just before the wait in the kernel does not end it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with DataLoader(Waits(path), **{**pool, "num_workers": 1}) as loader:  # so that nothing else arrives
            iterator = iter(loader)
            assert next(iterator).tolist() == [0]
            for raised in (KeyboardInterrupt, TimeoutError, KeyboardInterrupt):
                thread = threading.Thread(target=strike)
                thread.start()
                with pytest.raises(raised, match="mine"):
                    next(iterator)
                thread.join()
                struck.clear()
            with open(path, "w"):
                pass
            assert outcomes(iterator) == [[1], [2], [3]]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("device", [None, "there"])
def test_a_batch_that_is_interrupted_on_its_way_to_the_user_comes_next(device) -> None:
    class Breaking(agnoload.Backend):
        name = "breaking"
        left = 2

        def convert(self, leaf: Any) -> Any:
            if leaf.tolist() == [1] and self.left:
                self.left -= 1
                raise KeyboardInterrupt
            return leaf

        def check(self, device: Any, pin_memory: bool) -> Any:
            return device

        def place(self, batch: Any, device: Any) -> Any:
            return lambda: batch

    batches, found = iter(DataLoader(range(4), backend=Breaking(), device=device)), []
    while len(found) < 6:
        try:
            found.append(next(batches).tolist())
        except KeyboardInterrupt:
            found.append("^C")
    assert found == [[0], "^C", "^C", [1], [2], [3]]
    assert next(batches, None) is None


class Turn(contextlib.nullcontext[None]):
    def __exit__(self, *_: object) -> None:
        raise KeyboardInterrupt


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["while it is counted", "behind that"])
def test_an_interrupt_that_costs_a_counted_batch_is_the_end(where, monkeypatch) -> None:
    batches = iter(DataLoader(range(4)))
    if where == "behind that":
        monkeypatch.setattr(batches, "_turn", Turn())
    else:
        monkeypatch.setattr(batches._account._recorder, "delivered", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    monkeypatch.undo()
    with pytest.raises(AgnoloadError, match="has ended with an error"):
        next(batches)


# ---------------------------------------------------------------------------------------------- nothing stays


def without_license(worker: int) -> None:
    raise RuntimeError("no license")


def test_a_start_that_fails_in_the_workers_is_their_error_and_leaves_nothing() -> None:
    for persistent in (False, True):
        with pytest.raises(RuntimeError, match="no license"):
            list(DataLoader(range(9), num_workers=2, worker_init_fn=without_license, persistent_workers=persistent))


class Trainer:
    """Holds a loader and an iterator in a cycle; with workers it is reached from the dataset, too."""

    def __init__(self, data: Any, **options: Any) -> None:
        self.loader = DataLoader(data, 4, **options)
        self.batches = iter(self.loader)
        self.loader.trainer = self  # type: ignore[attr-defined]
        if options:
            data.trainer = self


class Data(Holes):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None}


class Items(Stream):
    __getstate__ = Data.__getstate__


@pytest.mark.parametrize("data", [Data(40, {}), Items(40)], ids=["indexed", "stream"])
@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, False),
        ({"num_workers": 1}, False),
        ({"num_workers": 1, "persistent_workers": True}, False),
        ({"num_workers": 1, "persistent_workers": True}, True),
    ],
    ids=["inline", "process", "kept process", "idle process"],
)
def test_a_loader_its_iterator_and_its_workers_die_in_one_cycle(data, whole, options) -> None:
    data = copy.copy(data)
    trainer = Trainer(data, **options)
    next(trainer.batches)
    if whole:
        list(trainer.batches)
    workers = psutil.Process().children(recursive=True) if options else []
    gone = weakref.ref(trainer.loader)
    del trainer, data
    gc.collect()
    assert gone() is None
    for worker in workers:
        assert not worker.is_running() or worker.ppid() == os.getpid()  # the fork server stays


def test_a_loader_with_threads_dies_though_its_iterator_is_reached_from_it() -> None:
    loader = DataLoader(range(40), 4, num_workers=2, worker_type="thread")
    loader.batches = iter(loader)  # type: ignore[attr-defined]
    next(loader.batches)  # type: ignore[attr-defined]
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("pool", POOLS[1:])
def test_an_iterator_that_is_dropped_after_an_error_ends_at_once(pool) -> None:
    gc.collect()
    gc.disable()
    try:
        batches = iter(DataLoader(Holes(99, {1: partial(OSError, "no file")}), **pool))
        assert next(batches).tolist() == [0]
        with pytest.raises(OSError, match="no file"):
            next(batches)
        gone = weakref.ref(batches)
        del batches
        assert gone() is None
    finally:
        gc.enable()


class Closes(Holes):
    """Closes a loader while it is packed for the workers."""

    close: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        close, self.close = self.close, None
        if close is not None:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(close).result()
        return Holes, (8, {})


def test_closing_a_loader_while_its_workers_start_is_heeded() -> None:
    data = Closes(8, {})
    loader = DataLoader(data, num_workers=2, multiprocessing_context="forkserver")
    data.close = loader.close
    with pytest.raises(LoaderClosed, match="while its workers were started"):
        iter(loader)
    assert loader.epoch == 0
    with loader:
        assert len(list(loader)) == 8


def test_threads_that_begin_at_once_begin_one_epoch_each() -> None:
    loader = DataLoader(range(8), 4, shuffle=True, seed=0)
    reference = sorted(outcomes(iter(loader)) for _ in range(6))
    loader = DataLoader(range(8), 4, shuffle=True, seed=0)
    gate = threading.Barrier(6)
    with ThreadPoolExecutor(6) as threads:
        found = [*threads.map(lambda _: (gate.wait(), outcomes(iter(loader)))[1], range(6))]
    assert sorted(found) == reference
    assert loader.epoch == 6


# ---------------------------------------------------------------------------------------------- memory


def as_they_are(samples: list[Any]) -> Any:
    """The small array first, and neither of them in the batch's memory."""
    return {name: np.array([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize("collate_fn", [None, as_they_are])
def test_a_small_array_that_is_kept_does_not_keep_its_batch(collate_fn) -> None:
    images = Subset(range(6), range(6)).map(lambda index: {"label": index, "image": np.full(1 << 20, index, np.uint8)})
    labels = []
    with DataLoader(images, num_workers=1, collate_fn=collate_fn) as loader:
        batches = iter(loader)
        for batch in batches:
            labels.append(batch["label"])
            assert batch["image"].flags.writeable
            assert batch["label"].flags.writeable
            del batch
            assert batches._pool.arena.lent <= 2  # what has arrived
    assert np.concatenate(labels).tolist() == list(range(6))


def test_large_batches_that_are_kept_are_copied_out_beyond_a_size(monkeypatch) -> None:
    monkeypatch.setattr("agnoload.transport.arena.LENT_BYTES", 1 << 18)
    with DataLoader(Holes(24, {}), num_workers=1, collate_fn=lambda values: np.full(1 << 15, values[0])) as loader:
        batches = iter(loader)
        kept = []
        for batch in batches:
            kept.append(batch)
            assert batches._pool.arena.lent <= 8
    assert [int(batch[-1]) for batch in kept] == list(range(24))


class Unsized:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("not for sparse ones")


def test_a_batch_whose_size_cannot_be_asked_counts_as_nothing() -> None:
    for wrap in (lambda it: it, lambda it: [it], lambda it: {"x": it}):
        loader = DataLoader(range(2), collate_fn=lambda _, wrap=wrap: wrap(Unsized()))
        assert len(list(loader)) == 2
        assert loader.stats().bytes == 0


# ---------------------------------------------------------------------------------------------- how much is left


@pytest.mark.parametrize("pool", POOLS)
def test_an_iterator_says_how_many_batches_are_to_come(pool) -> None:
    with DataLoader(Holes(5, {3: OSError}), 2, seed=0, **pool) as loader:
        batches = iter(loader)
        left = [len(batches)]
        for _ in range(3):
            with contextlib.suppress(OSError):
                next(batches)
            left.append(len(batches))
        assert left == [3, 2, 1, 0]
        assert next(batches, None) is None
        assert (len(batches), bool(batches)) == (0, True)
        steps = loader.steps(7)
        next(steps)
        assert len(steps) == 6


@pytest.mark.filterwarnings("ignore:the stream has no state_dict")
def test_a_stream_that_knows_its_length_says_how_much_is_left_and_others_do_not() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.n

    loader = DataLoader(Sized(9), 2, seed=0)
    batches = iter(loader)
    next(batches)
    assert len(batches) == 4
    resumed = DataLoader(Sized(9), 2, seed=0)
    resumed.load_state_dict(loader.state_dict())
    assert len(iter(resumed)) == 4
    unknown = iter(DataLoader(Stream(9), 2))
    with pytest.raises(TypeError, match="not known"):
        len(unknown)
    assert len(list(unknown)) == 5


def test_an_iterator_and_a_mixture_are_shown_in_one_line() -> None:
    loader = DataLoader(range(9), 2, seed=0)
    batches = iter(loader)
    next(batches)
    assert repr(batches) == f"<iterator in epoch 0, 1 batch delivered, of {loader!r}>"
    mixture = agnoload.Mixture([range(3), Stream(4)], [0.5, 2], per="batch", batch_size=4, shuffle=True, seed=3)
    assert repr(mixture) == (
        "Mixture([range(0, 3), Stream()], [0.5, 2.0], stop='first', per='batch', batch_size=4, shuffle=True, seed=3)"
    )
    many = agnoload.Mixture([range(3)] * 40, [1] * 40)
    assert len(repr(many)) < 200
