"""Streams that go on where a state was taken, at every batch."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import threading
import warnings

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadWarning, DataLoader, FileStream, Mixture, OptionError, StateError
from agnoload.pools.threads import ThreadPool
from agnoload.streams import read_lines, read_parquet, read_tar


def plain(batch):
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return batch.tolist() if isinstance(batch, np.ndarray) else batch


def through_json(state):
    back = json.loads(json.dumps(state))
    assert back == state
    return back


def text_files(folder):
    """A stream over two text files."""
    for name in "ab":
        (folder / name).write_text("1\n2\n3\n4\n5\n")
    return FileStream([folder / "a", folder / "b"], read_lines)


STATES = {
    "plain": lambda kit: kit.Count(20),
    "resumable": lambda kit: kit.Resumable(20),
    "shards": lambda kit: kit.Shards(20, 4, lanes=2),
    "resumable shards": lambda kit: kit.ResumableShards(20, 4, lanes=2),
    "another library's": lambda kit: kit.Hublike(20, 4),
    "self-splitting": lambda kit: kit.SelfSplitting(20),
    "map and filter": lambda kit: kit.Resumable(40).map(kit.negative).filter(kit.is_even),
    "shuffle": lambda kit: kit.Shards(20, 4).shuffle(5),
    "chain": lambda kit: kit.Resumable(5) + kit.Resumable(30),
    "chain of shards": lambda kit: kit.ResumableShards(5, 2) + kit.ResumableShards(30, 2),
    "ranks": lambda kit: kit.Resumable(40).split_by_rank(0, 2),
    "ranks, padded": lambda kit: kit.Resumable(41).split_by_rank(1, 2, uneven="pad"),
    "ranks, stopped": lambda kit: kit.Shards(41, 4).split_by_rank(0, 2, uneven="stop"),
    "mixture": lambda kit: Mixture([kit.Resumable(20), kit.Resumable(20)], [1, 1]),
    "exact mixture": lambda kit: Mixture([kit.Resumable(20), kit.Rows(20)], [3, 1], per="batch", stop="last"),
    "nested mixture": lambda kit: Mixture([Mixture([kit.Rows(20)], [1]), kit.Resumable(9) + kit.Resumable(9)], [1, 1]),
}


@pytest.mark.parametrize("make", [*STATES, "files"])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_state_is_what_json_makes_of_it(kit, make, workers, tmp_path):
    stream = text_files(tmp_path) if make == "files" else STATES[make](kit)
    loader = DataLoader(stream, 2, seed=1, num_workers=workers, worker_type="thread")
    for _ in loader:
        through_json(loader.state_dict())
    through_json(loader.state_dict())


def check_every_batch(make, others=None, quiet=True):
    """Resume at every batch of an epoch, before and after its end was seen, and compare all that follows.

    That is the rest of the epoch; at the end, and from one place in the middle, also the epoch that comes next.
    """
    loader = make()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(plain(batch))
        states.append(through_json(loader.state_dict()))
    states.append(through_json(loader.state_dict()))
    batches = len(whole)
    whole += [plain(batch) for batch in loader]
    for place, state in enumerate(states):
        resumed = (others or make)()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state, place
        with warnings.catch_warnings():
            warnings.simplefilter("error" if quiet else "ignore")
            if place >= batches:
                assert [plain(batch) for batch in resumed] == whole[batches:], place
                continue
            assert [plain(batch) for batch in resumed] == whole[place:batches], place
            if place == batches // 2:
                assert [plain(batch) for batch in resumed] == whole[batches:]
    return whole


WORKERS = [(0, "process"), (2, "process"), (3, "process"), (2, "thread")]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), WORKERS)
def test_a_stream_without_a_state_is_replayed(kit, workers, kind):
    check_every_batch(
        lambda: (
            DataLoader(kit.Drawing(10), 4, seed=1, num_workers=workers)
            if kind == "process"
            else DataLoader(kit.Count(10).map(kit.with_own_draw), 4, seed=1, num_workers=workers, worker_type=kind)
        ),
        quiet=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), WORKERS)
def test_a_stream_with_a_state_is_not(kit, workers, kind, tmp_path):
    log = tmp_path / "log"

    def make():
        stream = kit.Resumable(11, log).map(kit.with_own_draw)
        return DataLoader(stream, 2, seed=1, num_workers=workers, worker_type=kind)

    check_every_batch(make)
    loader = make()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    loader.close()
    log.write_bytes(b"")
    resumed = make()
    resumed.load_state_dict(state)
    assert [plain(batch)["value"] for batch in resumed] == [[8, 9], [10]]
    assert log.stat().st_size == 3 * max(workers, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), WORKERS)
def test_shards_are_resumed_in_their_lanes(kit, workers, kind):
    options = {"seed": 1, "num_workers": workers, "worker_type": kind}
    check_every_batch(lambda: DataLoader(kit.Shards(17, 5, lanes=3).map(kit.with_own_draw), 2, **options))
    check_every_batch(lambda: DataLoader(kit.ResumableShards(17, 5, lanes=3), 2, **options))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_a_state_goes_on_with_other_workers(kit, workers):
    def make(number):
        return DataLoader(kit.ResumableShards(20, 4).map(kit.with_draws), 3, seed=1, num_workers=number)

    check_every_batch(lambda: make(2), others=lambda: make(workers))
    check_every_batch(
        lambda: DataLoader(kit.Resumable(9), 2, seed=1, num_workers=3),
        others=lambda: DataLoader(kit.Resumable(9), 2, seed=1, num_workers=workers, worker_type="thread"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_edges_of_a_stream(kit, workers):
    """Drop last, without batches, empty, and a length that the batches divide."""
    options = {"seed": 1, "num_workers": workers}
    for size, settings in itertools.product((4, 5), ({}, {"drop_last": True})):
        check_every_batch(lambda s=size, o=settings: DataLoader(kit.Resumable(10), s, **o, **options))
    check_every_batch(lambda: DataLoader(kit.Resumable(4), None, **options))
    check_every_batch(lambda: DataLoader(kit.ResumableShards(9, 3), None, **options))
    check_every_batch(lambda: DataLoader(kit.Resumable(2), 4, drop_last=True, **options))


def test_three_resumes_in_one_epoch(kit):
    def make():
        return DataLoader(kit.Resumable(20).shuffle(1), 3, seed=1, num_workers=2)

    def go_on(state, batches):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        with loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [plain(batch) for batch in itertools.islice(loader, batches)], through_json(loader.state_dict())

    found, state = [], None
    for batches in (1, 2, 1, 99):
        more, state = go_on(state, batches)
        found += more
    assert found == [plain(batch) for batch in make()]


def test_a_resumed_run_saves_the_same_states_as_an_unbroken_one(kit):
    def make():
        return DataLoader(kit.ResumableShards(20, 3), 2, seed=1)

    loader = make()
    states = []
    for _ in loader:
        states.append(through_json(loader.state_dict()))
    resumed = make()
    resumed.load_state_dict(states[2])
    later = []
    for _ in resumed:
        later.append(through_json(resumed.state_dict()))
    assert later == states[3:]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_out_of_order_a_resumed_stream_gives_the_others_exactly_once(kit, workers):
    def make():
        return DataLoader(kit.ResumableShards(30, 3), 2, seed=1, num_workers=workers, in_order=False)

    for place in range(0, 15, 2):
        loader = make()
        before = [plain(batch) for batch in itertools.islice(loader, place)]
        state = through_json(loader.state_dict())
        loader.close()
        resumed = make()
        resumed.load_state_dict(state)
        after = [plain(batch) for batch in resumed]
        assert sorted(value for batch in before + after for value in batch) == list(range(30)), place


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_that_split_themselves_go_on_with_as_many_workers(kit, workers):
    check_every_batch(lambda: DataLoader(kit.SelfSplitting(11), 2, seed=1, num_workers=workers), quiet=False)
    check_every_batch(
        lambda: DataLoader(
            kit.Between(0, 11), 2, seed=1, num_workers=workers, worker_init_fn=kit.split_between if workers else None
        ),
        quiet=False,
    )


def test_a_state_of_a_stream_that_splits_itself_is_refused_with_other_workers(kit):
    loader = DataLoader(kit.SelfSplitting(11), 2, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    other = DataLoader(kit.SelfSplitting(11), 2, num_workers=3)
    with pytest.raises(StateError, match=r"2 workers.*3 workers"):
        other.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_a_stream_go_on_together(kit, workers):
    for rank in (0, 1):
        check_every_batch(
            lambda r=rank: DataLoader(kit.Resumable(13).split_by_rank(r, 2), 2, seed=1, num_workers=workers)
        )
        check_every_batch(
            lambda r=rank: DataLoader(kit.ResumableShards(13, 5).split_by_rank(r, 2), 2, seed=1, num_workers=workers)
        )


def test_a_rank_whose_last_batch_is_full_while_the_last_round_is_not_resumes_behind_it(kit):
    """To read the rank's last sample is to see the end of the stream, which by then stands at its start again."""

    def make():
        return DataLoader(kit.Resumable(7).split_by_rank(0, 2).map(kit.with_own_draw), 2, seed=1)

    whole = check_every_batch(make, quiet=False)
    assert [batch["value"] for batch in whole] == [[0, 2], [4, 6]] * 2


def test_more_ranks_go_on_where_fewer_stood(kit):
    def make(rank, world, size):
        stream = kit.Count(48).split_by_rank(rank, world).map(kit.with_own_draw)
        return DataLoader(stream, size, seed=0, num_workers=2)

    loader = make(0, 2, 4)
    next(iter(loader))
    state = through_json(loader.state_dict())
    loader.close()
    unbroken = [[plain(batch) for batch in make(rank, 2, 4)][1:] for rank in (0, 1)]
    resumed = []
    for rank in range(4):
        part = make(rank, 4, 2)
        part.load_state_dict(state)
        with pytest.warns(AgnoloadWarning, match="reads the stream again"):
            resumed.append([plain(batch) for batch in part])
    for step in range(5):
        expected = {pair for part in unbroken for pair in zip(*part[step].values(), strict=True)}
        found = {pair for part in resumed for pair in zip(*part[step].values(), strict=True)}
        assert found == expected


def test_c15_a_stream_with_a_state_is_not_replayed_and_one_without_says_so(kit, tmp_path):
    log = tmp_path / "log"
    loader = DataLoader(kit.Resumable(1000, log), 2)
    for _ in itertools.islice(loader, 465):
        pass
    state = through_json(loader.state_dict())
    assert log.stat().st_size == 930
    resumed = DataLoader(kit.Resumable(1000, log), 2)
    resumed.load_state_dict(state)
    assert sum(len(batch) for batch in resumed) == 70
    assert log.stat().st_size == 1000
    assert sum(len(batch) for batch in resumed) == 1000
    loader = DataLoader(kit.Count(20), 2)
    next(iter(loader))
    resumed = DataLoader(kit.Count(20), 2)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(AgnoloadWarning, match="no state_dict of its own"):
        assert next(iter(resumed)).tolist() == [2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_over_a_stream_cross_epochs_and_resume(kit, workers):
    def make():
        return DataLoader(kit.Resumable(10), 4, seed=1, num_workers=workers)

    loader = make()
    found, states = [], []
    for batch in loader.steps(8):
        found.append(batch.tolist())
        states.append((loader.epoch, through_json(loader.state_dict())))
    loader.close()
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert found == [*epoch, *epoch, *epoch[:2]]
    assert [epoch for epoch, _ in states] == [0, 0, 1, 1, 1, 2, 2, 2]
    for place, (_, state) in enumerate(states):
        resumed = make()
        resumed.load_state_dict(state)
        with resumed:
            assert [batch.tolist() for batch in resumed.steps(7 - place)] == found[place + 1 :], place


@pytest.mark.parametrize("shards", [0, 2])
def test_c57_the_next_epoch_of_a_stream_is_asked_for_while_the_last_batches_are_used(kit, monkeypatch, shards):
    """A loader that is always ahead of its user: whatever was asked for is there when the user asks again."""
    begun = [threading.Event() for _ in range(3)]

    def sample(value):
        begun[agnoload.get_worker_info().epoch].set()
        return value

    monkeypatch.setattr(ThreadPool, "ready", lambda pool: bool(pool._open))
    stream = (kit.Shards(8, shards) if shards else kit.Count(8)).map(sample)
    steps = DataLoader(stream, 2, num_workers=2, worker_type="thread").steps(8)
    assert [len(next(steps)) for _ in range(4)] == [2, 2, 2, 2]
    assert begun[1].wait(60)  # nobody has asked for its first batch yet
    assert sum(len(batch) for batch in steps) == 8


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_steps_over_a_stream_that_gives_nothing_are_an_error(kit, workers, kind):
    for stream in (kit.Count(0), kit.Shards(0, 3), kit.Count(3).map(kit.fails)):
        loader = DataLoader(stream, 2, num_workers=workers, worker_type=kind, on_error="skip")
        with loader, pytest.raises(OptionError, match=r"steps\(5\) .* epoch 0 has none after 0"):
            next(loader.steps(5))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_steps_end_at_an_epoch_without_a_batch_however_far_the_next_ones_were_asked_for(kit, workers):
    def make():
        return DataLoader(kit.Varying([3, 5, 0, 4]), 2, num_workers=workers, worker_type="thread")

    def all_of(loader, words):
        found = []
        with pytest.raises(OptionError, match=words):
            found += ((batch.tolist(), through_json(loader.state_dict())) for batch in loader.steps(11))
        return found

    found = all_of(make(), r"steps\(11\) .* epoch 2 has none after 5 steps")
    assert [batch for batch, _ in found] == [[0, 1], [2], [0, 1], [2, 3], [4]]
    for place, (_, state) in enumerate(found[:-1]):
        resumed = make()
        resumed.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AgnoloadWarning)  # it is read again
            rest = all_of(resumed, f"epoch 2 has none after {4 - place} steps")
        assert rest == found[place + 1 :]


def test_steps_over_a_sampler_that_gives_nothing_in_one_epoch_say_so():
    epochs = [[[0, 1], [2]], [], [[3]]]

    class Batches:
        def __iter__(self):
            return iter(epochs.pop(0))

    found = []
    with pytest.raises(OptionError, match=r"steps\(4\) .* epoch 1 has none after 2 steps"):
        found += (batch.tolist() for batch in DataLoader(range(4), batch_sampler=Batches()).steps(4))
    assert found == [[0, 1], [2]]


def test_a_stream_that_can_be_read_only_once_is_one_warning(kit):
    class Once(agnoload.IterableDataset):
        def __init__(self):
            self.left = iter(range(3))

        def __iter__(self):
            return self.left

    loader = DataLoader(Once(), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    with pytest.warns(AgnoloadWarning, match="gives nothing any more") as told:
        assert list(loader) == list(loader) == []
    assert len(told) == 1
    empty = DataLoader(kit.Count(0), 2)
    assert list(empty) == list(empty) == []


# ------------------------------------------------------------------------------------------------ files


def write_tar(path, numbers):
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            for suffix, content in (("txt", f"sample {number}".encode()), ("cls", str(number % 10).encode())):
                info = tarfile.TarInfo(f"part/{number:04}.{suffix}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (1, "process"), *WORKERS[1:]])
def test_a_tar_file_is_streamed_and_resumed_at_every_batch(kit, tmp_path, workers, kind):
    write_tar(tmp_path / "all.tar", range(11))

    def make():
        stream = FileStream(tmp_path / "all.tar", read_tar).map(kit.as_text)
        return DataLoader(stream, 4, num_workers=workers, worker_type=kind)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the stream has 1 lane", AgnoloadWarning)
        whole = check_every_batch(make, quiet=workers < 2)
    assert [text for batch in whole[:3] for text in batch["text"]] == [f"sample {number}" for number in range(11)]
    assert [label for batch in whole[:3] for label in batch["label"]] == [number % 10 for number in range(11)]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), WORKERS)
def test_several_tar_files_are_read_in_lanes_and_resumed_at_every_batch(kit, tmp_path, workers, kind):
    for number in range(4):
        write_tar(tmp_path / f"{number}.tar", range(number * 5, number * 5 + 5))
    paths = sorted(tmp_path.glob("*.tar"))
    whole = check_every_batch(
        lambda: DataLoader(
            FileStream(paths, read_tar, lanes=3).map(kit.as_text), 2, num_workers=workers, worker_type=kind
        )
    )
    texts = [text for batch in whole[:10] for text in batch["text"]]
    assert sorted(texts) == sorted(f"sample {number}" for number in range(20))


def check_parquet(tmp_path, files, rows, workers, kind):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    for number in range(files):
        values = np.arange(number * rows, (number + 1) * rows)
        table = arrow.table({"x": values.astype(np.float32), "name": [f"row {value}" for value in values]})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
    paths = sorted(tmp_path.glob("*.parquet"))
    whole = check_every_batch(
        lambda: DataLoader(FileStream(paths, read_parquet), 2, num_workers=workers, worker_type=kind)
    )
    total = files * rows
    found = [row for batch in whole[: -(-total // 2)] for row in zip(batch["x"], batch["name"], strict=True)]
    assert sorted(found) == sorted((float(value), f"row {value}") for value in range(total))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "process"), (3, "thread")])
def test_parquet_files_are_streamed_and_resumed_at_every_batch(tmp_path, workers, kind):
    files, rows = (2, 4) if kind == "process" and workers else (3, 7)
    check_parquet(tmp_path, files, rows, workers, kind)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_more_parquet_files_in_processes(tmp_path, workers):
    check_parquet(tmp_path, 4, 7, workers, "process")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_lines_are_shuffled_filtered_and_resumed(tmp_path, workers):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{number}\n" for number in range(9)))
    paths = sorted(tmp_path.glob("*.txt"))
    whole = check_every_batch(
        lambda: DataLoader(
            FileStream(paths, read_lines).filter(lambda line: not line.endswith("5")).shuffle(4),
            4,
            seed=1,
            num_workers=workers,
        )
    )
    lines = [line for batch in whole[:6] for line in batch]
    assert sorted(lines) == sorted(f"{name}{number}" for name in "abc" for number in range(9) if number != 5)
