"""What a stream has open is closed when its iterator is, and not when the garbage collector comes by."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from agnoload import DataLoader, FileStream, IterableDataset, Mixture, seeding
from agnoload.fetching.stream_reader import StreamReader
from agnoload.streams import read_lines

KINDS = [{}, {"num_workers": 2, "worker_type": "thread"}]
ENDS = ["close", "with", "drop", "error", "steps"]


class Open(IterableDataset):
    """0, 1, ... 999 and `name` in `open` while it is read."""

    def __init__(self, name, opened):
        self.name = name
        self.opened = opened

    def __iter__(self):
        self.opened.add(self.name)
        try:
            yield from range(1000)
        finally:
            self.opened.discard(self.name)

    def __deepcopy__(self, memo):  # a thread's copy tells the same set
        return type(self)(self.name, self.opened)


class OpenShards(IterableDataset):
    num_shards = 5

    def __init__(self, opened):
        self.opened = opened

    def shard(self, number):
        return map(int, iter(Open(number, self.opened)))  # what is within a map has no close() to be reached by


def fails_at_20(value):
    if value == 20:
        raise ValueError(value)
    return value


MAKE = {
    "plain": lambda opened: Open("a", opened),
    "shards": lambda opened: OpenShards(opened).map(fails_at_20),
    "map": lambda opened: Open("a", opened).map(fails_at_20),
    "filter": lambda opened: Open("a", opened).filter(fails_at_20),
    "shuffle": lambda opened: OpenShards(opened).shuffle(7).map(fails_at_20),
    "chain": lambda opened: Open("a", opened) + Open("b", opened),
    "mixture": lambda opened: Mixture([Open("a", opened), Open("b", opened)], [1, 1]).map(fails_at_20),
    "ranks": lambda opened: Open("a", opened).split_by_rank(0, 2).map(fails_at_20),
    "take": lambda opened: Open("a", opened).take(900).map(fails_at_20),
    "batch": lambda opened: OpenShards(opened).map(fails_at_20).batch(2),
    "pack": lambda opened: Open("a", opened).map(fails_at_20).map(lambda value: [value]).pack(2),
}


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def whole_lines(path):
    """A reader that cannot begin in the middle."""
    return read_lines(path)


def held(folder):
    """The descriptors of files in a folder."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sum(name.startswith(f"{folder}/") for name in names)


def end(loader, how):
    """Begin to read, and leave off in one way or another; what was raised is kept."""
    if how == "with":
        with loader:
            next(iter(loader))
        return None
    iterator = loader.steps(300) if how == "steps" else iter(loader)
    next(iterator)
    if how in ("close", "steps"):
        iterator.close()
    elif how == "error":
        try:
            for _ in iterator:
                pass
        except ValueError as error:
            return error.with_traceback(None)  # which knows the iterator, and that could go on
    return None


@pytest.mark.parametrize("options", KINDS, ids=["inline", "thread"])
@pytest.mark.parametrize("how", ENDS)
def test_generators_of_a_stream_end_with_the_iterator(how, options):
    for name, make in MAKE.items():
        opened = set()
        loader = DataLoader(make(opened), 3, seed=1, **options)
        kept = end(loader, how)
        assert opened == set(), name
        assert kept is None or kept.args == (20,)
        loader.close()


@pytest.mark.parametrize("options", KINDS, ids=["inline", "thread"])
@pytest.mark.parametrize("reader", [read_lines, whole_lines])
def test_files_are_closed_with_the_iterator(tmp_path, options, reader):
    paths = [tmp_path / str(number) for number in range(16)]
    for path in paths:
        path.write_text("1\n" * 50)
    loader = DataLoader(FileStream(paths, reader), 2, **options)
    for _ in range(3):
        iterator = iter(loader)
        for _ in range(20):
            next(iterator)
        assert held(tmp_path)
        state = loader.state_dict()
        iterator.close()
        assert held(tmp_path) == 0
        loader = DataLoader(FileStream(paths, reader), 2, **options)
        loader.load_state_dict(state)
    del iterator


def test_what_has_ended_holds_nothing_though_its_reader_stays():
    opened = set()
    with seeding.use(seeding.SampleContext(seeding.Rewinder())):
        reader = StreamReader(Mixture([Open("a", opened), range(3)], [1, 1]), begin=lambda *key: None)
        assert len(reader.read(0, size=2)[0]) == 2
        assert opened == {"a"}
        assert reader.read(1, size=100)[2].end
    assert opened == set()


@pytest.mark.parametrize("options", KINDS, ids=["inline", "thread"])
def test_an_error_in_a_finally_does_not_break_close(options, monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: said.append(unraisable.exc_value.args))

    class Bad(IterableDataset):
        def __iter__(self):
            try:
                yield from range(100)
            finally:
                raise ValueError("cannot close")

    loader = DataLoader(Bad(), 2, **options)
    next(iter(loader))
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    loader.close()
    assert len(said) >= 2  # not every worker needs to have begun
    assert set(said) == {("cannot close",)}


def test_a_generator_that_the_stream_keeps_goes_on_in_the_next_epoch():
    class Continued(IterableDataset):
        def __init__(self):
            self.numbers = (number for number in range(100))

        def __iter__(self):
            return self.numbers

    loader = DataLoader(Continued(), 2)
    assert next(iter(loader)).tolist() == [0, 1]
    assert next(iter(loader)).tolist() == [2, 3]


def test_a_stream_may_close_the_loader_that_reads_it():
    opened = set()

    class Closes(Open):
        def __iter__(self):
            for value in super().__iter__():
                if value == 4:
                    loader.close()
                yield value

    loader = DataLoader(Closes("a", opened), 2)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    next(iterator, None)
    del iterator
    assert opened == set()
