"""Thread workers: a second pool with the same meaning.

No sample has an `assert` in it: pytest's names its own modules, which the loader would search for generators.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import contextvars
import gc
import logging
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import (
    AgnoloadError,
    DataLoader,
    default_collate,
    get_worker_info,
    register_collate,
    sample_rng,
)
from agnoload.errors import LoaderClosed
from agnoload.monitoring.logs import log_settings
from agnoload.testing import check_resume

PATIENCE = 60.0
"""A bound against hanging, not a measure."""


class Ints:
    def __init__(self, n, act=lambda index: index):
        self.n = n
        self.act = act

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.act(index)


def threaded(dataset, batch_size=1, num_workers=2, **options):
    return DataLoader(dataset, batch_size, num_workers=num_workers, worker_type="thread", **options)


def lists(loader):
    return [batch.tolist() for batch in loader]


# ------------------------------------------------------------------------------------------------ at once, in order


def test_thirty_two_threads_are_in_thirty_two_samples_at_once():
    barrier = threading.Barrier(32)

    def sample(index):
        barrier.wait(PATIENCE)  # broken, with an error, if fewer than 32 ever meet
        return index

    assert lists(threaded(Ints(320, sample), num_workers=32)) == [[index] for index in range(320)]


def test_batches_come_in_order_whoever_is_done_first():
    done = [threading.Event() for _ in range(4)]

    def sample(index):
        if index < 3:
            done[index + 1].wait(PATIENCE)  # 3 is done first, then 2, then 1, then 0
        done[min(index, 3)].set()
        return index

    assert lists(threaded(Ints(8, sample), num_workers=4)) == [[index] for index in range(8)]


# ------------------------------------------------------------------------------------------------ the same batches


class Drawing(Ints):
    def __getitem__(self, index):
        return {"index": index, "own": sample_rng().integers(1 << 62), "noise": sample_rng().random(3, np.float32)}


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 7))
def test_threads_draw_what_no_workers_draw(workers, factor, batch_size):
    options = {"batch_size": batch_size, "shuffle": True, "seed": 5}
    plain = DataLoader(Drawing(26), **options)
    loader = threaded(Drawing(26), num_workers=workers, prefetch_factor=factor, **options)
    drawn = []
    for one, other in zip([*plain, *plain], [*loader, *loader], strict=True):
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])
        drawn += one["own"].tolist()
    assert len(set(drawn)) == 52


def test_a_loader_with_threads_resumes_at_every_batch():
    check_resume(
        lambda num_workers: DataLoader(
            Drawing(11), 3, shuffle=True, seed=3, num_workers=num_workers, worker_type="thread"
        )
    )


# ------------------------------------------------------------------------------------------------ who asks


def test_each_thread_has_facts_of_its_own_and_the_users_own_dataset():
    barrier, ran = threading.Barrier(3), {}

    def begin(worker):
        ran[threading.current_thread().name] = worker, get_worker_info().id

    def sample(index):
        barrier.wait(PATIENCE)  # so that each thread has one
        info = get_worker_info()
        own = info.dataset is dataset
        return np.array([info.id, info.num_workers, info.seed, info.epoch, own, threading.get_ident()])

    dataset = Ints(3, sample)
    loader = threaded(dataset, num_workers=3, seed=9, worker_init_fn=begin)
    for epoch in (0, 1):
        rows = np.concatenate(list(loader))
        assert sorted(rows[:, 0]) == [0, 1, 2]
        assert rows[:, 1:5].tolist() == [[3, 9, epoch, True]] * 3
        assert len(set(rows[:, 5])) == 3
        assert threading.get_ident() not in rows[:, 5]
        assert ran == {f"agnoload-{number}": (number, number) for number in range(3)}
        ran.clear()
    assert get_worker_info() is None


# ------------------------------------------------------------------------------------------------ errors


def bad(index):
    if index in (3, 7):
        raise ValueError(f"bad sample {index}")
    return index


@pytest.mark.parametrize("on_error", ["skip", "replace", lambda error, index: "skip" if index == 3 else "replace"])
def test_bad_samples_in_threads_as_without_workers(on_error):
    options = {"batch_size": 4, "on_error": on_error, "seed": 0}
    plain = DataLoader(Ints(10, bad), **options)
    expected = lists(plain)
    for workers in (1, 2, 3):
        loader = threaded(Ints(10, bad), num_workers=workers, **options)
        assert lists(loader) == expected
        assert [failure.index for failure in loader.stats().failed] == [3, 7]
    if on_error == "skip":
        assert expected == [[0, 1, 2], [4, 5, 6], [8, 9]]
        assert list(threaded(Ints(10, bad), None, on_error="skip", sampler=[3, 7, 0])) == [0]
    else:
        assert list(map(len, expected)) == ([4, 4, 2] if on_error == "replace" else [3, 4, 2])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_reaches_the_loop(kind):
    def sample(index):
        if index == 2:
            raise kind("enough")
        return index

    with pytest.raises(kind, match="enough"):
        lists(threaded(Ints(6, sample)))


# ------------------------------------------------------------------------------------------------ the end


@pytest.fixture
def stuck():
    """A dataset whose sample 1 waits, an event that says that it does, and one that lets it go on."""
    entered, release = threading.Event(), threading.Event()

    def sample(index):
        if index == 1:
            entered.set()
            release.wait(PATIENCE)
        return index

    yield Ints(100, sample), entered, release
    release.set()


def test_closing_does_not_wait_for_a_long_sample(stuck):
    dataset, entered, release = stuck
    loader = threaded(dataset)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0]
    assert entered.wait(PATIENCE)
    loader.close()
    loader.close()
    assert not release.is_set()  # it is still in its sample
    with pytest.raises(AgnoloadError):
        next(iterator)
    release.set()
    assert lists(threaded(dataset, sampler=[5, 6])) == [[5], [6]]


def test_an_iterator_that_is_dropped_takes_its_threads_along(stuck):
    dataset, _, release = stuck
    release.set()
    names = {thread.name for thread in threading.enumerate()}
    for batch in threaded(dataset):
        del batch
        break
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("agnoload-"):
            thread.join(PATIENCE)
    assert {thread.name for thread in threading.enumerate()} == names


def test_a_system_without_threads_left_leaves_none_behind(monkeypatch):
    start, begun = threading.Thread.start, []

    def refuse(thread):
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(threaded(Ints(4), num_workers=4))
    for thread in begun:
        thread.join(PATIENCE)
        assert not thread.is_alive()


PROGRAM = """
import threading, agnoload

stuck = threading.Event()

class Slow:
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 1:
            print("stuck", flush=True)
            stuck.set()
            threading.Event().wait()
        return index

for batch in agnoload.DataLoader(Slow(), num_workers=2, worker_type="thread"):
    if {leaves}:
        stuck.wait()
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [True, False])
def test_a_program_ends_while_a_thread_is_in_a_sample(leaves, program):
    one = program(PROGRAM.format(leaves=leaves))
    assert one.line() == "stuck"
    if not leaves:
        one.process.send_signal(signal.SIGINT)
    code, _, err = one.end()
    assert (code, err.count("Traceback")) == ((0, 0) if leaves else (-signal.SIGINT, 1))
    assert err.strip().endswith("" if leaves else "KeyboardInterrupt")


# ------------------------------------------------------------------------------------------------ memory


class Filled(Ints):
    """Sample i is 64 KiB of i, twice."""

    def __getitem__(self, index):
        return {"a": np.full(1 << 13, index, np.float64), "b": np.full(1 << 16, index % 256, np.uint8)}


@settings(max_examples=5)
@given(st.integers(1, 3), st.integers(1, 3), st.sets(st.integers(0, 59)))
def test_batches_that_are_kept_never_change(workers, factor, wanted):
    kept = {}
    for number, batch in enumerate(threaded(Filled(120), 2, num_workers=workers, prefetch_factor=factor)):
        if number in wanted:  # a view, or a view of a view, keeps the memory of its batch
            kept[number] = (batch["a"], batch["b"][1]) if number % 2 else (batch["a"][:, 3:], memoryview(batch["b"][1]))
        del batch
    for number, (a, b) in kept.items():
        assert (a == np.array([[2 * number], [2 * number + 1]])).all()
        assert (np.asarray(b) == 2 * number + 1).all()


def test_memory_of_batches_that_are_dropped_is_used_again_and_none_is_held():
    addresses = {"a": set(), "b": set()}
    for batch in threaded(Filled(400), 2, num_workers=2, prefetch_factor=1):
        for name, array in batch.items():
            addresses[name].add(array.__array_interface__["data"][0])
            array[...] = 0  # it is the user's own
        watched = weakref.ref(array)
        del batch, array
    gone = time.monotonic() + PATIENCE
    while watched() is not None:  # its thread may still be on the way from its reply to the next request
        assert time.monotonic() < gone
    for found in addresses.values():
        assert len(found) <= 2 * (2 + 2 + 1 + 1)  # both fields of a batch have blocks of one size


# ------------------------------------------------------------------------------------------------ nothing is shared


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_dataset_may_change_its_containers_and_attributes_while_other_threads_begin(hasty):
    class Remembers(Ints):
        def __init__(self, n):
            super().__init__(n)
            self.known, self.last = {}, collections.deque()
            vars(self).update({f"field{place}": place for place in range(200)})

        def __getitem__(self, index):
            for place in range(20):
                self.known[index, place] = index
                self.last.append(index)
                setattr(self, f"handle{index}_{place}", index)
            if len(self.known) > 200:
                self.known.clear()
                self.last.clear()
            return index

    for _ in range(5):
        assert lists(threaded(Remembers(60), num_workers=16)) == [[n] for n in range(60)]


class Inheriting(threading.Thread):
    """A thread as free-threaded Python makes it: it begins in a copy of its maker's context."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self._around = contextvars.copy_context()

    def run(self):
        self._around.run(super().run)


def test_threads_know_nothing_of_the_sample_that_iterates_their_loader(monkeypatch):
    monkeypatch.setattr(threading, "Thread", Inheriting)
    found = []

    def ask(worker):
        try:
            sample_rng()
        except AgnoloadError as error:
            found.append((worker, str(error)))

    def outer(index):
        sample_rng()
        return lists(threaded(Ints(2), worker_init_fn=ask))

    assert list(DataLoader(Ints(1, outer), None)) == [[[0], [1]]]
    assert [worker for worker, _ in sorted(found)] == [0, 1]
    assert all("while a sample is being loaded" in text for _, text in found)


def test_a_function_that_is_registered_while_threads_collate_is_used_from_then_on(hasty):
    for n in range(60):
        kinds = [type(f"Odd{n}_{k}", (int,), {}) for k in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            under_way = [pool.submit(default_collate, [kind(1)] * 2) for kind in kinds * 4]
            for kind in kinds:
                register_collate(kind, lambda batch, **_: "registered")
            for future in under_way:
                future.result()
        assert [default_collate([kind(1)] * 2) for kind in kinds] == ["registered"] * 4
        register_collate(tuple(kinds), None)


def test_log_settings_can_be_read_while_other_threads_make_loggers(hasty):
    names, begun, stop = [f"agnoload_test_{n}" for n in range(200)], threading.Event(), threading.Event()

    def make():
        while not stop.is_set():
            for name in names:
                logging.getLogger(name)
            for name in names:
                del logging.root.manager.loggerDict[name]
            begun.set()

    thread = threading.Thread(target=make)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        for _ in range(60):
            log_settings()
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_loader_may_be_closed_while_other_threads_begin_to_iterate_it(hasty):
    loader, stop = threaded(Ints(20), 2), threading.Event()

    def iterate():
        for _ in range(25):
            with contextlib.suppress(LoaderClosed):
                assert lists(loader) == [[n, n + 1] for n in range(0, 20, 2)]

    def close():
        while not stop.is_set():
            loader.close()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        closing = [pool.submit(close) for _ in range(2)]
        iterating = [pool.submit(iterate) for _ in range(4)]
        for future in iterating:
            future.exception()
        stop.set()
        for future in [*iterating, *closing]:
            future.result()
    loader.close()
