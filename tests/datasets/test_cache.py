"""Decoded samples kept once for all workers, and the shared memory that they lie in."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from agnoload import seeding
from agnoload.datasets import ArrayDataset, CachedDataset, Dataset, find_caches
from agnoload.errors import AgnoloadError, AgnoloadWarning, OptionError
from agnoload.inspect import find_large_lists
from agnoload.transport.memory import Receiving, SharedFile, sending

PAYLOAD = 3000

leaves = st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=9) | st.floats(allow_nan=False)
shapes = arrays_of.array_shapes(max_dims=3, min_side=0, max_side=4)
leaves |= st.builds(np.zeros, shapes, st.sampled_from(["u1", "f4", "M8[s]", "U3", "O"]), st.sampled_from("CF"))
samples = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
"""Anything that pickles, with arrays of any layout among it."""


class Slow(Dataset):
    """Each load appends a byte to a file."""

    def __init__(self, path, n):
        self.path = path
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        with open(self.path, "ab") as file:
            file.write(b".")
        return {"x": np.full(PAYLOAD, index, np.uint8), "name": f"sample {index}", "n": index}

    def loads(self):
        return os.path.getsize(self.path) if os.path.exists(self.path) else 0


def in_worker(function, *arguments):
    """Run a function in a forked process that ends without clean-up; its exit status."""
    pid = os.fork()
    if not pid:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_worker_gets_it(thing):
    """What a worker makes of the payload and of duplicates of the descriptors."""
    with sending() as descriptors:
        payload = pickle.dumps(thing, 5)
    with Receiving([os.dup(fd) for fd in descriptors]):
        return pickle.loads(payload)


def visit(dataset, indices):
    for index in indices:
        assert dataset[index]["n"] == index


@pytest.fixture
def slow(tmp_path):
    return Slow(str(tmp_path / "loads"), 100)


def test_each_sample_is_loaded_once_for_all_workers_and_epochs(slow):
    cached = CachedDataset(slow, 1 << 20)
    workers = [as_worker_gets_it(cached) for _ in range(2)]
    for _ in range(3):
        for number, worker in enumerate(workers):
            assert in_worker(visit, worker, range(number, 100, 2)) == 0
    assert slow.loads() == 100
    for number, worker in enumerate(workers):  # now each reads what the other one has loaded
        assert in_worker(visit, worker, range(1 - number, 100, 2)) == 0
    assert slow.loads() == 100
    assert (cached.hits, cached.misses) == (300, 100)
    assert 100 * PAYLOAD < cached.nbytes < 100 * (PAYLOAD + 400)


def test_the_bound_holds_and_what_fits_is_served(slow):
    cached = CachedDataset(slow, 50 * (PAYLOAD + 400))
    for _ in range(3):
        visit(cached, range(100))
    assert cached.nbytes <= cached.max_bytes
    kept = cached.hits // 2
    assert kept >= 50
    assert slow.loads() == cached.misses == 300 - 2 * kept
    assert os.fstat(cached._shared.fileno()).st_blocks * 512 <= cached._start + cached.max_bytes + 4096


def test_a_random_transform_behind_the_cache_draws_anew(slow):
    noisy = CachedDataset(slow, 1 << 20).map(lambda sample: (sample["n"], seeding.sample_rng().random()))
    context = seeding.SampleContext(seeding.Rewinder())
    epochs = []
    with seeding.use(context):
        for epoch in (0, 1, 0):
            context.at(7, epoch, 0, 1, 0)
            epochs.append([])
            for item in range(5):
                context.item = item
                epochs[-1].append(noisy[item])
    assert epochs[0] == epochs[2]
    assert {draw for _, draw in epochs[0]}.isdisjoint(draw for _, draw in epochs[1])


def test_what_comes_from_the_cache_equals_what_was_loaded_and_belongs_to_the_caller(slow):
    cached = CachedDataset(slow, 1 << 20)
    first = cached[3]
    first["x"][...] = 99
    second = cached[-97]
    np.testing.assert_array_equal(second["x"], np.full(PAYLOAD, 3))
    second["x"][...] = 98
    third = cached[3]
    assert third["x"].dtype == np.uint8
    np.testing.assert_array_equal(third["x"], np.full(PAYLOAD, 3))
    assert third["name"] == "sample 3"
    assert cached.hits == 2


@settings(max_examples=25)
@given(samples)
def test_any_sample_that_pickles_is_kept_whole(sample):
    cached = CachedDataset([sample], 1 << 16)
    assert cached[0] is sample
    again = cached[0]
    assert cached.hits == 1
    assert pickle.dumps(again) == pickle.dumps(pickle.loads(pickle.dumps(sample)))


def test_classes_that_only_travel_by_value_are_kept():
    class Local:
        def __init__(self, value):
            self.value = value

    cached = CachedDataset([Local(4)], 1 << 16)
    assert cached[0].value == cached[0].value == 4
    assert cached.hits == 1


def test_samples_that_do_not_pickle_are_loaded_each_time_and_one_warning_says_so():
    cached = CachedDataset([threading.Lock(), threading.Lock()], 1 << 16)
    with pytest.warns(AgnoloadWarning, match="do not pickle.*lock"):
        cached[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached[0], cached[1]
    assert cached.misses == 3
    assert cached.nbytes == 0


def test_clear_forgets_in_all_workers_and_gives_the_memory_back(slow):
    cached = CachedDataset(slow, 1 << 20)
    worker = as_worker_gets_it(cached)
    visit(cached, range(100))
    worker.clear()
    assert (cached.hits, cached.misses, cached.nbytes) == (0, 0, 0)
    assert os.fstat(cached._shared.fileno()).st_blocks * 512 <= cached._start + 8192
    visit(worker, range(100))
    visit(cached, range(100))
    assert slow.loads() == 200


def test_a_sample_read_while_the_cache_is_cleared_is_thrown_away(slow):
    cached = CachedDataset(slow, 1 << 20)
    visit(cached, range(3))
    shared = cached._shared

    class ClearedBeforeTheCopy:
        @property
        def bytes(self):
            cached._shared = shared
            cached.clear()
            shared.bytes[cached._start :] = 255
            return shared.bytes

    cached._shared = ClearedBeforeTheCopy()
    assert cached[1]["n"] == 1
    assert slow.loads() == 4


def test_a_sample_loaded_before_a_clear_is_not_kept_after_it(slow):
    cached = CachedDataset(slow, 1 << 20)
    inside = slow.__class__.__getitem__

    class Clearing(Slow):
        def __getitem__(self, index):
            sample = inside(self, index)
            cached.clear()
            return sample

    cached.dataset = Clearing(slow.path, 100)
    assert cached[0]["n"] == 0
    assert cached.nbytes == 0


class Mortal:
    """An array that kills its process at the given write to any of its kind."""

    def __init__(self, array, writes):
        self.array = array
        self.writes = writes

    def __getitem__(self, place):
        return self.array[place]

    def __setitem__(self, place, value):
        if next(self.writes) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.array[place] = value


@pytest.mark.parametrize("before_it", [0, 1])
def test_a_worker_that_dies_while_it_publishes_a_record_loses_only_that(slow, before_it):
    cached = CachedDataset(slow, 1 << 20)
    visit(cached, range(5))
    worker = as_worker_gets_it(cached)
    writes = iter(range(before_it, -1, -1))
    worker._table, worker._counters = Mortal(worker._table, writes), Mortal(worker._counters, writes)
    assert in_worker(worker.__getitem__, 5) == -signal.SIGKILL
    visit(cached, range(10))
    visit(cached, range(10))
    assert slow.loads() == 5 + 1 + 5
    assert cached.nbytes < (10 + before_it) * (PAYLOAD + 400)


def test_a_child_forked_while_a_thread_holds_the_lock_can_lock_it_later(slow):
    cached = CachedDataset(slow, 1 << 20)
    held, release = threading.Event(), threading.Event()

    def hold():
        with cached._shared.locked():
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # to fork beside a thread is what is tested
        pid = os.fork()
    if not pid:
        signal.alarm(30)
        visit(cached, range(2))
        os._exit(0)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert cached.misses == 2


def test_threads_count_exactly(slow):
    cached = CachedDataset(slow, 1 << 20)
    visit(cached, range(100))
    threads = [threading.Thread(target=visit, args=(cached, range(100))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cached.hits == 400


def test_a_copy_made_by_pickling_starts_empty(slow):
    cached = CachedDataset(slow, 1 << 20)
    visit(cached, range(3))
    again = pickle.loads(pickle.dumps(cached))
    assert again.nbytes == 0
    visit(again, range(3))
    assert cached.misses == 3


def test_bounds_indices_and_repr():
    for max_bytes in (0, -1, 2.5, True):
        with pytest.raises(OptionError, match="max_bytes"):
            CachedDataset([1], max_bytes)
    cached = CachedDataset([1, 2], 1000)
    with pytest.raises(IndexError, match=r"7 .*length 2"):
        cached[7]
    cached[0], cached[0]
    assert repr(cached) == "CachedDataset([1, 2], 64 of 1000 bytes, 1 hit)"


def test_a_shared_file_is_one_memory_for_all_who_map_it_and_stays_readable_when_it_is_closed():
    file = SharedFile(100)
    other = as_worker_gets_it([file, file, {"again": file}])
    assert other[0] is other[1] is other[2]["again"]
    shown = other[0].bytes
    shown[50:60] = 7
    assert file.bytes.tolist() == [0] * 50 + [7] * 10 + [0] * 40
    other[0].close()
    other[0].close()
    del other
    assert shown[50] == 7


def test_a_shared_file_travels_in_a_payload_only_and_leaves_no_descriptor():
    file = SharedFile(10)
    with pytest.raises(AgnoloadError, match="only while a payload is packed"):
        pickle.dumps(file)
    with sending() as descriptors:
        payloads = [pickle.dumps(file), pickle.dumps([file])]
    with pytest.raises(AgnoloadError, match="only in the worker"):
        pickle.loads(payloads[0])
    assert len(descriptors) == 1
    spare = os.memfd_create("spare")
    with Receiving([os.dup(descriptors[0]), spare]):
        one, (two,) = map(pickle.loads, payloads)  # two parts of a payload: two files over one memory
    one.bytes[0] = 5
    assert two.bytes[0] == 5
    assert one.fileno() != two.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):  # nobody asked for it
        os.fstat(spare)


def test_large_lists_and_caches_are_found_inside_other_datasets():
    class Held:
        def __init__(self):
            self.names, self.few, self.objects = [str(n) for n in range(11)], [1], np.array([None] * 11)

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return index

    cached = CachedDataset(Held(), 1000)
    nested = ArrayDataset(np.zeros(100)) + cached.map(str)
    held = "dataset.datasets[1].dataset.dataset."
    assert find_large_lists(nested, limit=10) == [held + "names", held + "objects"]
    assert find_large_lists(Held()) == []
    assert find_caches(nested) == [cached]
