"""What goes wrong inside a stream: errors that say where, samples left out, workers that die."""

from __future__ import annotations

import threading
import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import (
    AgnoloadError,
    AgnoloadWarning,
    DataLoader,
    FileStream,
    IterableDataset,
    Mixture,
    OptionError,
    SampleStopped,
    WorkerDied,
)
from agnoload.fetching.error_policy import Retry
from agnoload.streams import read_lines
from agnoload.testing import FakePool


def read(loader):
    """The batches up to an error, and the error."""
    found = []
    try:
        for batch in loader:
            found.append(batch.tolist() if isinstance(batch, np.ndarray) else batch)
    except Exception as error:
        return found, error
    pytest.fail("there was no error")


def notes(error):
    return "\n".join(getattr(error, "__notes__", ()))


def test_an_error_in_a_stream_keeps_its_type_and_names_batch_worker_and_line(kit, readers):
    found, error = read(DataLoader(kit.Broken(10, 5), 2, **readers))
    assert found == [[0, 1], [2, 3]]
    assert type(error) is OSError
    assert error.args == (5, "the disk is gone")
    assert "batch 2 of epoch 0" in notes(error)
    assert ("in worker " in notes(error)) == bool(readers)
    assert readers != {"num_workers": 2} or "kit.py" in str(error.__cause__)


@settings(max_examples=20)
@given(
    n=st.integers(1, 12),
    bad=st.integers(0, 11),
    size=st.integers(1, 4),
    where=st.sampled_from(["map", "filter", "stream", "stop in map", "stop in stream"]),
    workers=st.integers(0, 3),
)
def test_an_error_comes_in_the_place_of_its_batch(kit, n, bad, size, where, workers):
    """Also a StopIteration out of user code, which must not be taken for the end."""
    bad %= n
    make = {
        "map": lambda: kit.Count(n).map(kit.FailsAt(bad)),
        "filter": lambda: kit.Count(n).filter(kit.FailsAt(bad, kept=True)),
        "stream": lambda: kit.Broken(n, bad),
        "stop in map": lambda: kit.Count(n).map(kit.FailsAt(bad, stops=True)),
        "stop in stream": lambda: kit.Broken(n, bad, stops=True),
    }[where]
    options = {"num_workers": workers, "worker_type": "thread", "collate_fn": list}
    found, error = read(DataLoader(make(), size, **options))
    assert found == [list(range(start, start + size)) for start in range(0, bad - size + 1, size)]
    assert type(error) is {"map": ValueError, "filter": ValueError, "stream": OSError}.get(where, SampleStopped)
    assert f"batch {bad // size} of epoch 0" in notes(error)


def test_a_stopiteration_out_of_anything_that_is_the_users_is_not_the_end(kit, load, readers):
    class Closing(IterableDataset):
        def __iter__(self):
            yield 1
            raise GeneratorExit

    class NotEven(IterableDataset):
        def __iter__(self):
            raise StopIteration

    class ByNext(kit.Returned):
        def __next__(self):
            if self.at == 5:
                raise GeneratorExit
            return super().__next__()

    stops = kit.FailsAt(5, stops=True)
    for stream in (
        Closing(),
        NotEven(),
        ByNext(8),
        kit.Count(8).filter(stops),
        kit.Count(8).map(stops).filter(bool),
        Mixture([list(range(8))], [1]).map(stops),
    ):
        with pytest.raises(SampleStopped):
            load(stream, 2, num_workers=2, worker_type="thread")
    found, error = read(DataLoader(kit.Count(4), 2, collate_fn=lambda samples: next(iter([])), **readers))
    assert (found, type(error)) == ([], SampleStopped)
    assert "batch 0 of epoch 0" in str(error) + notes(error)


def test_an_error_in_a_file_names_it_and_the_sample(tmp_path, readers):
    for name in "ab":
        (tmp_path / name).write_bytes(b"1\n2\n3\n" if name == "a" else b"4\n\xff\n")
    _, error = read(DataLoader(FileStream([tmp_path / "a", tmp_path / "b"], read_lines), 1, **readers))
    assert type(error) is UnicodeDecodeError
    assert f"record 2 of {tmp_path / 'b'}" in notes(error)
    assert "of epoch 0" in notes(error)


# ------------------------------------------------------------------------------------------------ on_error and retry


@settings(max_examples=15)
@given(
    n=st.integers(0, 12),
    bad=st.sets(st.integers(0, 11)),
    size=st.integers(1, 4),
    shards=st.integers(0, 3),
    workers=st.integers(0, 3),
)
def test_samples_that_are_left_out_change_nothing_for_the_others_and_are_listed(
    kit, deliver, n, bad, size, shards, workers
):
    stream = kit.Shards(n, shards) if shards else kit.Count(n)
    whole = deliver(stream.map(kit.with_own_draw), size)
    failing = stream.map(kit.FailsAt(*bad)).map(kit.with_own_draw)
    options = {"num_workers": min(workers, shards or 3), "worker_type": "thread", "collate_fn": list, "seed": 7}
    loader = DataLoader(failing, size, on_error="skip", **options)
    found = list(loader)
    kept = [sample for batch in whole for sample in batch if sample["value"] not in bad]
    if shards:  # what is left of the lanes is merged without those that are left out
        assert sorted(sample["value"] for batch in found for sample in batch) == sorted(s["value"] for s in kept)
    else:
        batches = [[sample for sample in batch if sample["value"] not in bad] for batch in whole]
        assert found == [batch for batch in batches if batch]
        assert [failure.index for failure in loader.stats().failed] == sorted(bad & set(range(n)))
    assert sorted(failure.error for failure in loader.stats().failed) == sorted(
        f"ValueError: bad value {value}" for value in bad if value < n
    )


def test_samples_that_are_left_out_count_whatever_the_order_of_answers(kit, monkeypatch):
    """A warning that the stream is shorter than it says would be an error here."""
    for order in ([2, 1], [1, 1], [2, 0], []):
        stream = kit.Shards(3, 3).map(kit.FailsAt(0, 1, 2))
        loader = DataLoader(stream, 3, on_error="skip", num_workers=3, worker_type="thread", collate_fn=list)
        pool = partial(FakePool, order)
        monkeypatch.setattr(loader._keeper, "open", lambda fetch, workers, pool=pool: (pool(fetch), None))
        assert list(loader) == []
        assert loader.stats().num_failed == 3


def test_what_cannot_be_skipped_or_replaced_in_a_stream_is_raised(kit, load):
    with pytest.raises(OSError, match="the disk is gone") as caught:  # nobody knows how the stream would go on
        load(kit.Broken(10, 5), 2, on_error="skip")
    assert "on_error cannot leave this out: the stream itself raised" in notes(caught.value)
    with pytest.raises(ValueError, match="bad value 3") as caught:
        load(kit.Count(10).map(kit.FailsAt(3, 7)), 2, on_error="replace")
    assert "'skip' for a stream" in notes(caught.value)
    with pytest.raises(OptionError, match="'raise' or 'skip', got 'sing'"):
        load(kit.Count(10).map(kit.FailsAt(3, 7)), 2, on_error=lambda error, index: "sing")


def test_a_callable_decides_for_each_sample_of_a_stream(kit, readers):
    def decide(error, position):
        return "skip" if position < 5 else "raise"

    found, error = read(DataLoader(kit.Count(10).map(kit.FailsAt(3, 7)), 4, on_error=decide, **readers))
    assert found == [[0, 1, 2]]
    assert error.args == ("bad value 7",)


def test_functions_of_a_stream_are_tried_again_with_the_same_numbers(kit, load):
    for make in (lambda: kit.Count(10), lambda: kit.Shards(9, 3)):
        expected = load(make().map(kit.with_own_draw), 4)
        for workers in (0, 2):
            options = {"num_workers": workers, "worker_type": "thread", "retry": Retry(OSError, wait=0)}
            assert load(make().map(kit.FailsAtFirst()), 4, **options) == expected
    with pytest.raises(OSError, match="0"):
        load(kit.Count(10).map(kit.FailsAtFirst()), 4, retry=Retry(ValueError, wait=0))


# ------------------------------------------------------------------------------------------------ deaths


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "at", "workers"), [(None, 0, 1), (None, 9, 2), (3, 19, 2), (3, 9, 3)])
def test_a_stream_whose_worker_dies_once_gives_bit_identical_batches(kit, load, tmp_path, shards, at, workers):
    flag = tmp_path / "flag"
    expected = load(kit.DiesOnce(20, at, flag, shards), 2, epochs=2)
    flag.touch()
    options = {"num_workers": workers, "max_worker_restarts": 1}
    assert load(kit.DiesOnce(20, at, flag, shards), 2, epochs=2, **options) == expected
    assert not flag.exists()


def test_a_death_without_restarts_says_what_and_where(kit, tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    found, error = read(DataLoader(kit.DiesOnce(20, 9, flag), 2, num_workers=2, collate_fn=len))
    assert type(error) is WorkerDied
    assert "SIGKILL" in str(error)
    assert error.batch in (3, 4, 5)  # whoever came to the sample first, to deliver it or to read past it
    assert len(found) <= error.batch


@pytest.mark.slow
def test_a_death_in_a_later_epoch_of_kept_workers_and_after_a_resume(kit, load, tmp_path):
    flag = tmp_path / "flag"
    expected = load(kit.DiesOnce(20, 13, flag), 2, epochs=3)
    options = {"seed": 7, "num_workers": 2, "max_worker_restarts": 2}

    def lists(batches):
        return [{name: field.tolist() for name, field in batch.items()} for batch in batches]

    with DataLoader(kit.DiesOnce(20, 13, flag), 2, persistent_workers=True, **options) as loader:
        found = lists(loader)
        flag.touch()
        found += lists(loader)
        assert not flag.exists()
        found += lists(batch for _, batch in zip(range(4), loader, strict=False))
        state = loader.state_dict()
    assert found == expected[:24]
    resumed = DataLoader(kit.DiesOnce(20, 13, flag), 2, **options)
    resumed.load_state_dict(state)
    flag.touch()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the stream has no state_dict", AgnoloadWarning)
        assert lists(resumed) == expected[24:]
    assert not flag.exists()


def test_a_stream_with_a_state_is_read_on_after_a_death(kit, load, tmp_path):
    flag = tmp_path / "flag"

    def dies_at_6(value):
        if value == 6:
            kit.die(flag)
        return kit.with_draws(value)

    expected = load(kit.Resumable(12).map(dies_at_6), 2, epochs=2)
    flag.touch()
    options = {"num_workers": 2, "max_worker_restarts": 1}
    assert load(kit.Resumable(12).map(dies_at_6), 2, epochs=2, **options) == expected


@pytest.mark.slow
def test_closing_a_loader_in_the_middle_of_a_stream_ends_it_at_once(kit):
    release, entered = threading.Event(), threading.Event()

    def stuck(value):
        if value == 4:
            entered.set()
            assert release.wait(60)
        return value

    loader = DataLoader(kit.Count(100).map(stuck), 2, num_workers=2, worker_type="thread")
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    assert entered.wait(60)
    loader.close()
    release.set()
    with pytest.raises(AgnoloadError):
        next(iterator)
