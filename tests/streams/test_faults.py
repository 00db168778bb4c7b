"""What goes wrong inside a stream: errors that say where, samples left out, workers that die."""

from __future__ import annotations

import os
import threading
import warnings

import numpy as np
import pytest

from agnoload import (
    AgnoloadError,
    AgnoloadWarning,
    DataLoader,
    IterableDataset,
    Mixture,
    OptionError,
    SampleStopped,
    WorkerDied,
)
from agnoload.fetching.error_policy import Retry


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


def test_an_error_in_a_stream_keeps_its_type_and_names_the_batch(kit, everyone):
    for workers in everyone:
        found, error = read(DataLoader(kit.Broken(10, 5), 2, **workers))
        assert found == [[0, 1], [2, 3]], workers
        assert type(error) is OSError
        assert error.args == (5, "the disk is gone")
        assert "batch 2 of epoch 0" in notes(error)
        if workers["num_workers"]:
            assert "in worker " in notes(error)
        if workers["num_workers"] and workers["worker_type"] == "process":
            assert "kit.py" in str(error.__cause__)


def test_an_error_in_a_function_of_a_stream_names_the_batch(kit, everyone):
    for workers in everyone:
        found, error = read(DataLoader(kit.Count(10).map(kit.fails_at_3_and_7), 2, **workers))
        assert found == [[0, 1]], workers
        assert type(error) is ValueError
        assert error.args == ("bad value 3",)
        assert "batch 1 of epoch 0" in notes(error)


def test_an_error_in_a_file_names_it_and_the_sample(kit, tmp_path, everyone):
    from agnoload import FileStream
    from agnoload.streams import read_lines

    for name in "ab":
        (tmp_path / name).write_bytes(b"1\n2\n3\n" if name == "a" else b"4\n\xff\n")
    for workers in everyone:
        if workers["num_workers"] == 3:
            continue
        _, error = read(DataLoader(FileStream([tmp_path / "a", tmp_path / "b"], read_lines), 1, **workers))
        assert type(error) is UnicodeDecodeError, workers
        assert f"record 2 of {tmp_path / 'b'}" in notes(error)
        assert "of epoch 0" in notes(error)


@pytest.mark.slow
def test_c45_a_stopiteration_out_of_user_code_is_not_the_end(kit, everyone):
    for workers in everyone:
        for stream in (kit.Stopping(), kit.Count(8).map(kit.stops_at_5), kit.StoppingNext(8)):
            found, error = read(DataLoader(stream, 2, **workers))
            assert found == [[0, 1], [2, 3]], (workers, stream)
            assert type(error) is SampleStopped
            assert "batch 2 of epoch 0" in notes(error)
        found, error = read(DataLoader(kit.Count(4), 2, collate_fn=lambda samples: next(iter([])), **workers))
        assert (found, type(error)) == ([], SampleStopped)
        assert "batch 0 of epoch 0" in str(error) + notes(error)


def test_c43_skip_leaves_samples_of_a_stream_out_and_lists_them(kit, everyone):
    for workers in everyone:
        loader = DataLoader(kit.Count(10).map(kit.fails_at_3_and_7), 4, on_error="skip", **workers)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [4, 5, 6], [8, 9]], workers
        assert [failure.index for failure in loader.stats().failed] == [3, 7]
        assert "bad value 3" in loader.stats().failed[0].error


def test_a_stopiteration_out_of_anything_that_is_the_users_is_not_the_end(kit, deliver):
    class Closing(IterableDataset):
        def __iter__(self):
            yield 1
            raise GeneratorExit

    class NotEven(IterableDataset):
        def __iter__(self):
            raise StopIteration

    for stream in (
        Closing(),
        NotEven(),
        kit.Count(8).filter(kit.stops_at_5),
        kit.Count(8).map(kit.stops_at_5).filter(bool),
        Mixture([list(range(8))], [1]).map(kit.stops_at_5),
    ):
        with pytest.raises(SampleStopped):
            deliver(stream, 2)


def test_c43_samples_that_are_left_out_change_nothing_for_the_others(kit, deliver):
    stream = kit.Count(10).map(kit.fails_at_3_and_7).map(kit.with_own_draw)
    found = deliver(stream, 4, 2, on_error="skip")
    whole = deliver(kit.Count(10).map(kit.with_own_draw), 4)
    assert found == [[sample for sample in batch if sample["value"] not in (3, 7)] for batch in whole]


def test_c43_a_batch_of_a_stream_that_is_bad_from_end_to_end_is_left_out(kit, everyone):
    for workers in everyone:
        loader = DataLoader(kit.Count(10).map(kit.fails_at_3_and_7), 1, on_error="skip", **workers)
        assert [batch.tolist() for batch in loader] == [[0], [1], [2], [4], [5], [6], [8], [9]], workers
        assert list(DataLoader(kit.Count(5).map(kit.fails), 2, on_error="skip", **workers)) == []


def test_c43_skipped_samples_of_shards_are_left_out_everywhere(kit, same_for_all):
    batches = same_for_all(lambda: kit.Shards(10, 3).map(kit.fails_at_3_and_7), 2, on_error="skip")
    assert sorted(value for batch in batches for value in batch) == [0, 1, 2, 4, 5, 6, 8, 9]


def test_c43_what_cannot_be_skipped_or_replaced_in_a_stream_is_raised(kit, load):
    with pytest.raises(OSError, match="the disk is gone") as caught:  # nobody knows how the stream would go on
        load(kit.Broken(10, 5), 2, on_error="skip")
    assert "on_error cannot leave this out: the stream itself raised" in notes(caught.value)
    with pytest.raises(ValueError, match="bad value 3") as caught:
        load(kit.Count(10).map(kit.fails_at_3_and_7), 2, on_error="replace")
    assert "'skip' for a stream" in notes(caught.value)
    with pytest.raises(OptionError, match="'raise' or 'skip', got 'sing'"):
        load(kit.Count(10).map(kit.fails_at_3_and_7), 2, on_error=lambda error, index: "sing", num_workers=1)


def test_c43_a_callable_decides_for_each_sample_of_a_stream(kit, everyone):
    def decide(error, position):
        return "skip" if position < 5 else "raise"

    for workers in everyone:
        found, error = read(DataLoader(kit.Count(10).map(kit.fails_at_3_and_7), 4, on_error=decide, **workers))
        assert found == [[0, 1, 2]], workers
        assert error.args == ("bad value 7",)


def test_functions_of_a_stream_are_tried_again_with_the_same_numbers(kit, load):
    expected = load(kit.Count(10).map(kit.drawn_for), 4, seed=1)
    for workers in (0, 2):
        options = {"seed": 1, "num_workers": workers, "retry": Retry(OSError, wait=0)}
        assert load(kit.Count(10).map(kit.FailsAtFirst()), 4, **options) == expected
        assert sorted(map(str, load(kit.Shards(9, 3).map(kit.FailsAtFirst()), 4, **options))) == sorted(
            map(str, load(kit.Shards(9, 3).map(kit.drawn_for), 4, seed=1))
        )
    with pytest.raises(OSError, match="0"):
        load(kit.Count(10).map(kit.FailsAtFirst()), 4, retry=Retry(ValueError, wait=0))


# ------------------------------------------------------------------------------------------------ deaths


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("at", [0, 9, 19])
def test_c42_a_stream_whose_worker_dies_once_gives_bit_identical_batches(kit, load, tmp_path, shards, at):
    flag = tmp_path / "flag"
    expected = load(kit.DiesOnce(20, at, flag, shards), 2, epochs=2, seed=1)
    for workers in (1, 2, 3):
        flag.touch()
        options = {"num_workers": workers, "max_worker_restarts": 1, "seed": 1}
        assert load(kit.DiesOnce(20, at, flag, shards), 2, epochs=2, **options) == expected, workers
        assert not flag.exists()


def test_c42_a_death_without_restarts_says_what_and_where(kit, tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    found, error = read(DataLoader(kit.DiesOnce(20, 9, flag), 2, num_workers=2, collate_fn=len))
    assert type(error) is WorkerDied
    assert "SIGKILL" in str(error)
    assert error.batch in (3, 4, 5)  # whoever came to the sample first, to deliver it or to read past it
    assert len(found) <= error.batch


def test_c42_a_death_in_a_later_epoch_of_kept_workers_and_after_a_resume(kit, load, tmp_path):
    flag = tmp_path / "flag"
    expected = load(kit.DiesOnce(20, 13, flag), 2, epochs=3, seed=1)
    loader = DataLoader(
        kit.DiesOnce(20, 13, flag), 2, seed=1, num_workers=2, persistent_workers=True, max_worker_restarts=2
    )
    with loader:
        first = [{name: field.tolist() for name, field in batch.items()} for batch in loader]
        flag.touch()
        second = [{name: field.tolist() for name, field in batch.items()} for batch in loader]
        assert not flag.exists()
        third = []
        for batch in loader:
            third.append({name: field.tolist() for name, field in batch.items()})
            if len(third) == 4:
                break
        state = loader.state_dict()
    assert first + second + third == expected[:24]
    resumed = DataLoader(kit.DiesOnce(20, 13, flag), 2, seed=1, num_workers=2, max_worker_restarts=1)
    resumed.load_state_dict(state)
    flag.touch()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the stream has no state_dict", AgnoloadWarning)
        found = [{name: field.tolist() for name, field in batch.items()} for batch in resumed]
    assert not flag.exists()
    assert found == expected[24:]


def test_c42_a_stream_with_a_state_that_dies_is_read_on(kit, load, tmp_path):
    flag = tmp_path / "flag"

    def dies_at_6(value):
        if value == 6 and kit.die(flag):
            os.kill(os.getpid(), 9)
        return kit.with_draws(value)

    expected = load(kit.Resumable(12).map(dies_at_6), 2, epochs=2, seed=1)
    flag.touch()
    options = {"num_workers": 2, "max_worker_restarts": 1, "seed": 1}
    assert load(kit.Resumable(12).map(dies_at_6), 2, epochs=2, **options) == expected


# ------------------------------------------------------------------------------------------------ who splits, and when


def test_a_stream_that_asks_too_late_whether_to_split_itself_is_told(kit):
    class Late(IterableDataset):
        def __iter__(self):
            yield 0
            kit.facts(1)
            yield 1

    for kind in ("process", "thread"):
        with pytest.raises(AgnoloadError, match=r"get_worker_info\(\) after its first sample"):
            list(DataLoader(Late(), 1, num_workers=2, worker_type=kind))


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
