"""Programs that read files and tables: each gives its samples, or says what to write instead."""

from __future__ import annotations

import collections
import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agnoload
from agnoload import CollateError, DataLoader, FileStream, OptionError, read_jsonl, read_lines, read_parquet
from agnoload.testing import check_resume


class Count(agnoload.IterableDataset):
    """Without shards, and without a state."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))

    def __len__(self):
        return self.n


class Documents(agnoload.IterableDataset):
    """Five shards in three lanes."""

    num_shards = 5
    lanes = 3

    def shard(self, number):
        return [np.arange(length, dtype=np.int32) + 100 * number for length in range(1, 6)]


class Drawn(Documents):
    """Each shard draws its order before its first sample."""

    def shard(self, number):
        for place in agnoload.sample_rng().permutation(4).tolist():
            yield [10 * number + place] * 3


GOOD = Count(2).map('{{"x": {}}}'.format)


@pytest.fixture
def lines(tmp_path: Path) -> FileStream[str]:
    """Two files of records; the second record of the second file is bad."""
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 3}\n{"x"\n{"x": 5}\n')
    return FileStream(sorted(tmp_path.glob("*.jsonl")), read_lines)


def notes_of(stream: Any, **options: Any) -> str:
    with pytest.raises((ValueError, EOFError)) as caught, DataLoader(stream, 2, **options) as loader:
        list(loader)
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}], ids=str)
def test_an_error_of_a_function_or_a_reader_names_the_file_and_the_record(lines, workers, tmp_path):
    where = f"at record 2 of {tmp_path / 'b.jsonl'} (the first is record 1)"
    assert notes_of(lines.map(json.loads), **workers).count(where) == 1
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n")[:-9])
    cut = FileStream([tmp_path / "a.jsonl", tmp_path / "cut.txt.gz"], read_lines)
    assert f"of {tmp_path / 'cut.txt.gz'} (the first is record 1)" in notes_of(cut, **workers)


def test_it_does_so_whatever_the_stream_is_made_into(lines, tmp_path):
    where = f"at record 2 of {tmp_path / 'b.jsonl'} (the first is record 1)"
    rows = lines.map(lambda line: line.replace(": ", ": [").replace("}", "]}"))
    for stream in (
        lines.filter(json.loads),
        lines.filter(len).shuffle(2).map(str.strip).map(json.loads),
        (lines + GOOD).map(json.loads),
        agnoload.Mixture([lines, GOOD], [1, 1], stop="last").map(json.loads),
        lines.split_by_rank(0, 1).take(5).map(json.loads),
        lines.map(json.loads).batch(2),
        rows.map(json.loads).pack(2, key="x"),
    ):
        assert notes_of(stream).count(where) == 1, stream
        with pytest.raises(json.JSONDecodeError) as caught:
            list(stream)
        assert caught.value.__notes__ == [where]


def test_what_was_left_out_is_listed_with_its_file_and_record(lines, tmp_path):
    with DataLoader(lines.map(json.loads), 10, on_error="skip") as loader:
        assert [batch["x"].tolist() for batch in loader] == [[1, 2, 3, 5]]
        (failure,) = loader.stats().failed
    assert failure.error.endswith(f"; at record 2 of {tmp_path / 'b.jsonl'} (the first is record 1)")


def test_records_of_json_are_read_and_an_error_names_the_line(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"x": 1}\n\n  \n{"x": 2}\n{\n'))
    assert list(zip(range(2), read_jsonl(path), strict=False)) == [(0, {"x": 1}), (1, {"x": 2})]
    assert next(iter(read_jsonl(path, start=1))) == {"x": 2}
    assert f"in line 5 of {path}\nat record 3 of {path}" in notes_of(FileStream(path, read_jsonl))


@pytest.mark.parametrize(("paths", "text"), [([], "at least one path"), ("data/*.txt", r"pattern 'data/\*.txt'.*glob")])
def test_no_files_and_patterns_are_refused(paths, text):
    with pytest.raises(OptionError, match=text):
        FileStream(paths, read_lines)


def test_a_file_whose_name_holds_a_star_is_a_file(tmp_path):
    path = tmp_path / "a*.txt"
    path.write_text("one\n")
    assert list(FileStream(path, read_lines)) == ["one"]


def test_text_as_a_dataset_is_refused():
    for text in ("data.txt", b"data.txt"):
        with pytest.raises(OptionError, match=r"must hold samples, got the (str|bytes) b?'data.txt'.*FileStream"):
            DataLoader(text)


def test_the_warning_of_a_replay_names_the_part_without_a_state():
    for stream, part in (
        (Count(9).map(str), r"Count\(9 items\)"),
        (agnoload.Mixture([Count(9).shuffle(3)], [1]), r"Count\(9 items\).shuffle\(3\)"),
    ):
        loader, again = DataLoader(stream, 2), DataLoader(stream, 2)
        next(iter(loader))
        again.load_state_dict(loader.state_dict())
        with pytest.warns(agnoload.AgnoloadWarning, match=rf"no state_dict of its own \({part} has none\)"):
            list(again)


# -- take, batch and pack


NUMBERS = {"numbers": Count(20), "shards": Documents().map(len), "drawn shards": Drawn().map(sum)}
SEQUENCES = {
    "numbers": Count(20).map(lambda number: list(range(10 * number, 10 * number + number % 5))),
    "shards": Documents(),
    "drawn shards": Drawn(),
}
CUTS = st.lists(st.sampled_from(["shuffle", "take", "split"]), max_size=3, unique=True)


def derived(stream: Any, cuts: list[str]) -> Any:
    for cut in cuts:
        stream = stream.split_by_rank(1, 2) if cut == "split" else getattr(stream, cut)(3 if cut == "shuffle" else 11)
    return stream


@pytest.mark.slow
@settings(max_examples=15)
@given(source=st.sampled_from([*NUMBERS]), pack=st.booleans(), before=CUTS, after=CUTS, size=st.sampled_from([None, 2]))
def test_streams_that_are_taken_from_batched_and_packed_resume_exactly(source, pack, before, after, size):
    made = derived((SEQUENCES if pack else NUMBERS)[source], before)
    made = derived(made.pack(5, value=-1) if pack else made.batch(3), [cut for cut in after if cut not in before])

    def make(num_workers: int) -> DataLoader:
        return DataLoader(made, size, num_workers=num_workers, worker_type="thread", seed=3, collate_fn=list)

    check_resume(make)


def test_packed_files_resume_exactly_in_processes(tmp_path):
    for number in range(4):
        records = [json.dumps({"tokens": list(range(length))}) for length in range(number, 2 * number + 2)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(records))
    rows = FileStream(sorted(tmp_path.glob("*.jsonl")), read_jsonl, lanes=3).pack(6, key="tokens")
    check_resume(lambda num_workers: DataLoader(rows, 3, num_workers=num_workers))


def test_batches_are_lists_that_can_be_collated_in_the_stream():
    stream = Count(5).map(float).batch(2)
    assert list(stream) == [[0.0, 1.0], [2.0, 3.0], [4.0]]
    assert len(stream) == 3
    with DataLoader(stream.map(agnoload.default_collate), batch_size=None) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


# -- Parquet


def test_time_stamps_of_parquet_with_a_zone_are_batched_in_utc(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    noon = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    column = pyarrow.array([noon, None], pyarrow.timestamp("us", "Europe/Paris"))
    parquet.write_table(pyarrow.table({"t": column, "u": [noon, noon]}), tmp_path / "a.parquet")
    rows = list(read_parquet(tmp_path / "a.parquet"))
    assert [row["t"] for row in rows] == [np.datetime64("2024-01-01T10:00:00.000000"), None]
    (batch,) = DataLoader(FileStream(tmp_path / "a.parquet", read_parquet).map(lambda row: row["u"]), 2)
    assert batch.dtype == "datetime64[us]"


# -- tables


COLUMNS = {"a": [1, 2], "b": [3, 4]}


def table(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    library = pytest.importorskip(module)
    return library.table(COLUMNS) if kind == "table" else getattr(library, kind)(COLUMNS)


@pytest.mark.parametrize("name", ["pandas.DataFrame", "polars.DataFrame", "pyarrow.table"])
@pytest.mark.parametrize("take", [DataLoader, lambda table: agnoload.Subset(table, [0])], ids=["loader", "subset"])
def test_a_table_is_refused_and_what_the_error_says_works(name, take):
    made = table(name)
    with pytest.raises(OptionError, match="indexed by its columns") as caught:
        take(made)
    remedy = str(caught.value).partition("give ")[2]
    (batch,) = DataLoader(eval(remedy, {"agnoload": agnoload, "table": made}), 2)
    assert {key: values.tolist() for key, values in batch.items()} == COLUMNS


def test_a_series_is_a_dataset_only_if_its_labels_are_its_places():
    pandas = pytest.importorskip("pandas")
    (batch,) = DataLoader(pandas.Series([5, 6]), 2)
    assert batch.tolist() == [5, 6]
    for labels in ([7, 8], ["a", "b"]):
        with pytest.raises(OptionError, match=r"whose labels are others: give agnoload.ArrayDataset\(series\)"):
            DataLoader(pandas.Series([5, 6], index=labels))


@pytest.mark.slow
def test_a_table_that_has_rows_by_index_is_a_dataset():
    datasets = pytest.importorskip("datasets")
    (batch,) = DataLoader(datasets.Dataset.from_dict(COLUMNS), 2)
    assert {key: values.tolist() for key, values in batch.items()} == COLUMNS


def test_several_rows_are_taken_at_once():
    rows = agnoload.TensorDataset(np.arange(6).reshape(3, 2), [7, 8, 9])
    assert [part.tolist() for part in rows[1:3]] == [[[2, 3], [4, 5]], [8, 9]]
    assert [part.tolist() for part in agnoload.Subset(rows, [2, 0, 1])[[0, 2]]] == [[[4, 5], [2, 3]], [9, 8]]
    assert [part.tolist() for part in agnoload.Subset(rows, [2, 0, 1])[:1]] == [[[4, 5]], [9]]
    rows[1:3][0][:] = 0  # rows of the caller's own
    assert [part.tolist() for part in rows.tensors] == [[[0, 1], [2, 3], [4, 5]], [7, 8, 9]]
    with pytest.raises(IndexError, match=r"index \[3\] is out of range"):
        rows[[3]]


# -- samples of many kinds


def test_named_tuples_that_are_made_for_each_row_are_batched():
    rows = [collections.namedtuple("Row", "x y")(place, -place) for place in range(2)]
    (batch,) = DataLoader(rows, 2)
    assert (type(batch).__name__, batch.x.tolist(), batch.y.tolist()) == ("Row", [0, 1], [0, -1])
    kinds = [collections.namedtuple("Row", fields) for fields in ("x y", "x z")]
    with pytest.raises(CollateError, match="make the class once"):
        agnoload.default_collate([kind(1, 2) for kind in kinds])


def test_any_sequence_is_batched_place_by_place():
    for values in (range(1, 3), collections.UserList([1, 2]), collections.deque([1, 2]), memoryview(b"\1\2")):
        batch = agnoload.default_collate([values, [3, 4]])
        assert [part.tolist() for part in batch] == [[1, 3], [2, 4]]


class Encoded(collections.UserDict):
    def __init__(self, data=None, words=None):
        super().__init__(data)
        self.words = words


class Rows(collections.abc.Mapping):
    """Iterates its rows, and has keys() of its own."""

    def __init__(self, columns):
        self.columns = columns

    def __getitem__(self, key):
        return self.columns[key]

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __iter__(self):
        return iter(zip(*self.columns.values(), strict=True))

    def keys(self):
        return self.columns.keys()


class Moving(Rows):
    def to(self, device):
        return self

    def pin_memory(self):
        return self


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_mappings_of_the_users_are_put_together_again(backend):
    if backend == "torch":
        pytest.importorskip("torch")
    (batch,) = DataLoader([1, 2], 2, collate_fn=lambda n: Encoded({"n": np.array(n)}, words=["a"]), backend=backend)
    assert (type(batch), batch.words, batch["n"].tolist()) == (Encoded, ["a"], [1, 2])
    (batch,) = DataLoader([1, 2], 2, collate_fn=lambda n: Rows({"n": np.array(n)}), backend=backend)
    assert (type(batch), batch["n"].tolist()) == (Rows, [1, 2])
    held = Moving({"n": np.arange(2)})
    (batch,) = DataLoader([1, 2], 2, collate_fn=lambda _: held, backend=backend)
    assert batch is held
    held = Rows({"n": "text"})
    assert agnoload.map_leaves(lambda leaf: leaf, held) is held


def test_a_picture_is_refused_as_it_may_hold_codes_and_not_colors():
    image = pytest.importorskip("PIL.Image")
    red = image.new("RGB", (1, 1), (255, 0, 0)).quantize(2)
    with pytest.raises(CollateError, match=r'item 0 is PIL.Image.Image, .*image.convert\("RGB"\)'):
        agnoload.default_collate([red, red])


def test_packed_sequences_of_another_library_need_a_collate_fn():
    torch = pytest.importorskip("torch")
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3)])
    with pytest.raises(CollateError, match=r"PackedSequence, which agnoload cannot batch.*give a collate_fn"):
        agnoload.default_collate([packed, packed])
    (batch,) = DataLoader([packed, packed], 2, collate_fn=lambda samples: samples[0], backend="torch")
    assert batch.data.tolist() == [0, 1, 2]
