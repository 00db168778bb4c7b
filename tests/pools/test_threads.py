"""Thread workers: a second pool with the same meaning."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import contextvars
import gc
import itertools
import logging
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

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


def test_c56_thirty_two_threads_are_in_thirty_two_samples_at_once():
    barrier = threading.Barrier(32)

    def sample(index):
        barrier.wait(PATIENCE)  # broken, with an error, if fewer than 32 ever meet
        return index

    assert lists(threaded(Ints(320, sample), num_workers=32)) == [[index] for index in range(320)]


@pytest.mark.slow
def test_c56_batches_come_in_order_whoever_is_done_first():
    done = [threading.Event() for _ in range(4)]

    def sample(index):
        if index < 3:
            assert done[index + 1].wait(PATIENCE)  # 3 is done first, then 2, then 1, then 0
        done[min(index, 3)].set()
        return index

    assert lists(threaded(Ints(8, sample), num_workers=4)) == [[index] for index in range(8)]


# ------------------------------------------------------------------------------------------------ the same batches


class Drawing(Ints):
    def __getitem__(self, index):
        return {"index": index, "own": sample_rng().integers(1 << 62), "noise": sample_rng().random(3, np.float32)}


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])


def test_c07_threads_draw_what_processes_and_no_workers_draw():
    options = {"batch_size": 4, "shuffle": True, "seed": 5}
    epochs = DataLoader(Drawing(26), **options)
    expected = [*epochs, *epochs]
    drawn = np.concatenate([batch["own"] for batch in expected])
    assert len(set(drawn.tolist())) == 52
    for workers, factor in itertools.product((1, 2, 3), (1, 4)):
        loader = threaded(Drawing(26), num_workers=workers, prefetch_factor=factor, **options)
        same([*loader, *loader], expected)
    loader = DataLoader(Drawing(26), num_workers=2, **options)
    same([*loader, *loader], expected)


def test_a_loader_with_threads_resumes_at_every_batch():
    check_resume(
        lambda num_workers: DataLoader(
            Drawing(11), 3, shuffle=True, seed=3, num_workers=num_workers, worker_type="thread"
        )
    )


# ------------------------------------------------------------------------------------------------ who asks


def test_get_worker_info_tells_each_thread_its_own_facts():
    barrier = threading.Barrier(3)

    def sample(index):
        barrier.wait(PATIENCE)  # so that each thread has one
        info = get_worker_info()
        return np.array([info.id, info.num_workers, info.seed, info.epoch, threading.get_ident()])

    dataset = Ints(3, sample)
    loader = threaded(dataset, num_workers=3, seed=9)
    for epoch in (0, 1):
        rows = np.concatenate(list(loader))
        assert sorted(rows[:, 0]) == [0, 1, 2]
        assert rows[:, 1:4].tolist() == [[3, 9, epoch]] * 3
        assert len(set(rows[:, 4])) == 3
        assert threading.get_ident() not in rows[:, 4]
    assert get_worker_info() is None


def test_the_dataset_of_threads_is_the_users_own():
    seen = []
    dataset = Ints(2, lambda index: seen.append(get_worker_info().dataset) or index)
    lists(threaded(dataset))
    assert all(one is dataset for one in seen)


def test_worker_init_fn_runs_in_each_thread_with_its_number():
    ran = {}

    def begin(worker):
        ran[threading.current_thread().name] = worker, get_worker_info().id

    barrier = threading.Barrier(3)
    dataset = Ints(3, lambda index: barrier.wait(PATIENCE) and index)
    lists(threaded(dataset, num_workers=3, worker_init_fn=begin))
    assert ran == {f"agnoload-{number}": (number, number) for number in range(3)}


# ------------------------------------------------------------------------------------------------ errors


def bad(index):
    if index in (3, 7):
        raise ValueError(f"bad sample {index}")
    return index


@pytest.mark.parametrize("on_error", ["skip", "replace", lambda error, index: "skip" if index == 3 else "replace"])
def test_c43_bad_samples_in_threads_as_without_workers(on_error):
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
            assert release.wait(PATIENCE)
        return index

    yield Ints(100, sample), entered, release
    release.set()


@pytest.mark.slow
def test_c41_closing_does_not_wait_for_a_long_sample(stuck):
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


@pytest.mark.slow
def test_c40_an_iterator_that_is_dropped_takes_its_threads_along(stuck):
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
    import sys, threading
    import agnoload

    stuck = threading.Event()

    class Slow:
        def __len__(self): return 8
        def __getitem__(self, index):
            if index == 1:
                print("stuck", flush=True)
                stuck.set()
                threading.Event().wait()
            return index

    loader = agnoload.DataLoader(Slow(), num_workers=2, worker_type="thread")
    for batch in loader:
        if sys.argv[1] == "leave":
            stuck.wait()
            break
    """


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leave", "interrupt"])
def test_c38_a_program_ends_while_a_thread_is_in_a_sample(how):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "stuck\n"
            if how == "interrupt":
                process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()  # or the end of `with` waits for it
    if how == "leave":
        assert (process.returncode, err) == (0, "")
    else:
        assert err.strip().endswith("KeyboardInterrupt")
        assert err.count("Traceback") == 1


# ------------------------------------------------------------------------------------------------ memory


class Filled(Ints):
    """Sample i is 64 KiB of i, twice."""

    def __getitem__(self, index):
        return {"a": np.full(1 << 13, index, np.float64), "b": np.full(1 << 16, index % 256, np.uint8)}


def test_c05_batches_that_are_kept_never_change():
    kept = []
    for number, batch in enumerate(threaded(Filled(120), 2, num_workers=3)):
        kept.append((batch["a"], batch["b"][1]) if number % 2 else (batch["a"][:, 3:], memoryview(batch["b"][1])))
        del batch
    for number, (a, b) in enumerate(kept):
        assert (a == np.array([[2 * number], [2 * number + 1]])).all()
        assert (np.asarray(b) == 2 * number + 1).all()


def test_memory_of_batches_that_are_dropped_is_used_again():
    addresses = {"a": set(), "b": set()}
    for batch in threaded(Filled(400), 2, num_workers=2, prefetch_factor=1):
        for name, array in batch.items():
            addresses[name].add(array.__array_interface__["data"][0])
            array[...] = 0  # it is the user's own
    for found in addresses.values():
        assert len(found) <= 2 * (2 + 2 + 1 + 1)  # both fields of a batch have blocks of one size


def test_no_batch_is_held_by_the_loader_after_the_user_has_dropped_it():
    loader = threaded(Filled(6), 1, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    batch = next(iterator)
    watched = weakref.ref(batch["a"])
    del batch
    assert watched() is None
    iterator.close()


# ------------------------------------------------------------------------------------------------ nothing is shared


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_dataset_may_change_its_containers_while_other_threads_begin(hasty):
    class Remembers(Ints):
        def __init__(self, n):
            super().__init__(n)
            self.known, self.last = {}, collections.deque()

        def __getitem__(self, index):
            for place in range(20):
                self.known[index, place] = index
                self.last.append(index)
            if len(self.known) > 200:
                self.known.clear()
                self.last.clear()
            return index

    for _ in range(20):
        assert lists(threaded(Remembers(60), num_workers=16)) == [[n] for n in range(60)]


@pytest.mark.slow
def test_a_dataset_may_get_attributes_while_other_threads_begin(hasty):
    class Lazy(Ints):
        def __getitem__(self, index):
            for place in range(50):
                setattr(self, f"handle{index}_{place}", index)
            return index

    for _ in range(5):
        lazy = Lazy(60)
        vars(lazy).update({f"field{place}": place for place in range(1000)})
        loader = threaded(lazy, num_workers=16, worker_init_fn=lambda worker: None)
        assert lists(loader) == [[n] for n in range(60)]


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
        with pytest.raises(AgnoloadError, match="while a sample is being loaded"):
            sample_rng()
        found.append(worker)

    def outer(index):
        sample_rng()
        assert get_worker_info() is None
        return lists(threaded(Ints(2), worker_init_fn=ask))

    assert list(DataLoader(Ints(1, outer), None)) == [[[0], [1]]]
    assert sorted(found) == [0, 1]


@pytest.mark.slow
def test_a_function_that_is_registered_while_threads_collate_is_used_from_then_on(hasty):
    for n in range(300):
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
    names, begun, stop = [f"agnoload_test_{n}" for n in range(500)], threading.Event(), threading.Event()

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
        for _ in range(300):
            log_settings()
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_a_loader_may_be_closed_while_other_threads_begin_to_iterate_it(hasty):
    loader, stop = threaded(Ints(20), 2), threading.Event()

    def iterate():
        for _ in range(100):
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
