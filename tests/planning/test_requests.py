"""How requests are made and answered: whole batches in a call, slow samples, steps, a cache for all workers."""

from __future__ import annotations

import json
import os
import threading
from itertools import islice

import numpy as np
import pytest

from agnoload import ArrayDataset, CachedDataset, DataLoader, OptionError

# ------------------------------------------------------------------------------------------------ C46: whole batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_c46_getitems_is_called_once_a_batch(kit, tmp_path, workers, kind):
    log = tmp_path / "log"
    loader = DataLoader(kit.Whole(10, log), 4, num_workers=workers, worker_type=kind)
    assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert log.stat().st_size == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_c46_a_batch_comes_out_as_it_went_in(kit, tmp_path, workers, kind):
    loader = DataLoader(kit.Whole(5, tmp_path / "log", together=True), 3, num_workers=workers, worker_type=kind)
    first, second = list(loader)
    assert list(first) == ["twice", "words", "none"]
    assert first["twice"].tolist() == [0, 2, 4]
    assert (first["words"], first["none"]) == (["0", "1", "2"], None)
    assert second["words"] == ["3", "4"]


def test_c46_workers_that_do_not_help_are_told_so():
    data = ArrayDataset(x=np.random.default_rng(0).random((100_000, 20), np.float32))
    loader = DataLoader(data, 1024, shuffle=True, seed=0, num_workers=2)
    indices = DataLoader(data, 1024, shuffle=True, seed=0)
    for batch, expected in zip(loader, indices, strict=True):
        np.testing.assert_array_equal(batch["x"], expected["x"])
    verdict = loader.stats().verdict
    assert "workers do not help" in verdict or "nothing to gain here" in verdict


# ------------------------------------------------------------------------------------------------ C47: a slow sample


@pytest.fixture
def gate(tmp_path):
    """A named pipe: sample 0 waits until somebody opens it to write; opened at the end in any case."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    yield path
    opened = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    os.close(opened)


def open_gate(path):
    with open(path, "wb"):
        pass


def load_with_gate(kit, gate, **options):
    return DataLoader(kit.Waiting(8, gate), 1, num_workers=2, prefetch_factor=2, **options)


def test_c47_out_of_order_the_others_come_while_one_sample_is_slow(kit, gate):
    loader = load_with_gate(kit, gate, in_order=False)
    iterator = iter(loader)
    early = [next(iterator)[0].item() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    early += [next(iterator)[0].item() for _ in range(4)]
    assert early == [1, 2, 3, 4, 5, 6, 7]  # sample 0 is still waiting
    open_gate(gate)
    assert [batch[0].item() for batch in iterator] == [0]
    resumed = load_with_gate(kit, gate, in_order=False)
    resumed.load_state_dict(state)
    opener = threading.Thread(target=open_gate, args=(gate,))
    opener.start()
    assert sorted(batch[0].item() for batch in resumed) == [0, 4, 5, 6, 7]
    opener.join()


def test_c47_in_order_they_come_in_order_and_the_other_worker_went_on_meanwhile(kit, gate):
    loader = load_with_gate(kit, gate)
    opener = threading.Thread(target=open_gate, args=(gate,))
    iterator = iter(loader)
    opener.start()
    found = [(batch[0].item(), batch[1].item()) for batch in iterator]
    opener.join()
    assert [index for index, _ in found] == list(range(8))


# ------------------------------------------------------------------------------------------------ C57: steps


@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "process"), (2, "thread")])
def test_c57_steps_cross_epochs_and_no_batch_spans_two(workers, kind):
    def make():
        return DataLoader(range(10), 4, shuffle=True, seed=1, num_workers=workers, worker_type=kind)

    epochs = make()
    expected = [batch.tolist() for _ in range(3) for batch in epochs]
    loader = make()
    found, states = [], []
    for batch in loader.steps(8):
        found.append(batch.tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert [len(batch) for batch in found] == [4, 4, 2, 4, 4, 2, 4, 4]
    assert found == expected[:8]
    for place, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(state)
        with resumed:
            assert [batch.tolist() for batch in resumed.steps(8 - place)] == expected[place + 1 : place + 9], place
    loader.close()


def test_c57_a_state_after_the_fourth_gives_the_same_fifth():
    loader = DataLoader(range(10), 4, shuffle=True, num_workers=2)
    steps = loader.steps(5)
    list(islice(steps, 4))
    state = loader.state_dict()
    assert state["epoch"] == 1
    fifth = next(steps).tolist()
    assert list(steps) == []
    resumed = DataLoader(range(10), 4, shuffle=True, num_workers=2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed.steps(1)] == [fifth]


def test_c57_the_next_epochs_first_batches_are_loaded_while_the_last_ones_are_used():
    loaded = [threading.Event() for _ in range(2)]

    class Counted:
        calls = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 0:
                loaded[Counted.calls].set()
                Counted.calls += 1
            return index

    steps = DataLoader(Counted(), 1, num_workers=1, worker_type="thread", prefetch_factor=3).steps(8)
    for _ in range(2):  # [0], [1]: out are then [2], [3] and the first of the next epoch
        next(steps)
    assert loaded[1].wait(60)
    assert [batch.tolist() for batch in steps] == [[2], [3], [0], [1], [2], [3]]


def test_steps_over_data_that_gives_nothing_are_an_error(kit):
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}):
        with DataLoader(kit.Unreadable(5), 2, on_error="skip", **options) as loader:
            assert list(loader) == []
            assert loader.stats().verdict == "nothing could be loaded: 5 samples failed"
            with pytest.raises(OptionError, match=r"steps\(4\) .* epoch 1 has none after 0"):
                next(loader.steps(4))


# ------------------------------------------------------------------------------------------------ C60: a cache


@pytest.mark.parametrize(("workers", "kind"), [(2, "process"), (2, "thread"), (0, "process")])
def test_c60_slow_samples_are_decoded_once_for_all_workers_and_epochs(kit, tmp_path, workers, kind):
    log = tmp_path / "log"
    data = CachedDataset(kit.Slow(100, log), max_bytes=10 << 20).map(kit.noisy)
    loader = DataLoader(data, 10, shuffle=True, seed=0, num_workers=workers, worker_type=kind)
    noise = []
    for _ in range(3):
        epoch = list(loader)
        values = np.concatenate([batch["value"] for batch in epoch])
        assert sorted(values.tolist()) == list(range(100))
        np.testing.assert_array_equal(np.concatenate([batch["sum"] for batch in epoch]), values * 1000)
        noise += np.concatenate([batch["noise"] for batch in epoch]).tolist()
    assert log.stat().st_size == 100
    assert len(set(noise)) == 300
    stats = loader.stats()
    assert (stats.cache_hits, stats.cache_misses) == (200, 100)


def test_c60_the_bound_holds_and_the_hit_rate_is_in_the_stats(kit, tmp_path):
    log = tmp_path / "log"
    cached = CachedDataset(kit.Slow(100, log), max_bytes=100 * 8000 // 2)
    loader = DataLoader(cached, 10, num_workers=2)
    for _ in range(3):
        assert sum(int(batch[:, 0].sum()) for batch in loader) == 4950
    stats = loader.stats()
    assert stats.cache_hits + stats.cache_misses == 300
    assert stats.cache_misses == log.stat().st_size
    assert 80 <= stats.cache_hits <= 100  # each of some 49 that fit, in two epochs
    assert cached.nbytes <= 100 * 8000 // 2
