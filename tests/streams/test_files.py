"""Files as streams, and the readers: real files, written here."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import itertools
import json
import lzma
import pickle
import sys
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from agnoload import DataLoader, FileStream, read_jsonl, read_lines, read_npy, read_npz, read_parquet, read_tar
from agnoload.datasets import PackedList
from agnoload.errors import AgnoloadWarning, BackendUnavailable, OptionError
from agnoload.inspect import find_large_lists
from agnoload.testing import check_resume

OPENERS = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
START = st.integers(0, 7)


def flat(batches):
    return [value for batch in batches for value in batch]


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all examples of a property, each of which writes its file again."""
    return tmp_path_factory.mktemp("files")


# ------------------------------------------------------------------------------------------------ a stream of files


@pytest.fixture
def files(tmp_path):
    """Three of each kind, and what their samples become: pairs of file and place."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = {suffix: [tmp_path / f"{n}.{suffix}" for n in range(3)] for suffix in ("tar", "npy", "parquet", "jsonl")}
    for number, size in enumerate([3, 4, 1]):
        pairs = [[number, place] for place in range(size)]
        members = [
            (f"a/{place}.{suffix}", b"%d" % n)
            for number, place in pairs
            for suffix, n in zip("xy", (number, place), strict=True)
        ]
        write_tar(paths["tar"][number], members)
        np.save(paths["npy"][number], np.array(pairs))
        table = pyarrow.table({"x": [x for x, _ in pairs], "y": [y for _, y in pairs]})
        parquet.write_table(table, paths["parquet"][number], row_group_size=2)
        paths["jsonl"][number].write_text("".join(json.dumps({"x": x, "y": y}) + "\n" for x, y in pairs))
    return paths


READ = {
    "tar": (read_tar, lambda sample: (int(sample["x"]), int(sample["y"]))),
    "npy": (read_npy, lambda row: tuple(row.tolist())),
    "parquet": (read_parquet, lambda row: (int(row["x"]), int(row["y"]))),
    "jsonl": (read_jsonl, lambda row: (row["x"], row["y"])),
}
PAIRS = [(number, place) for number, size in enumerate([3, 4, 1]) for place in range(size)]


@pytest.mark.parametrize("kind", READ)
def test_files_are_streamed_and_resumed_at_every_batch(files, kind):
    reader, function = READ[kind]
    assert list(FileStream(files[kind], reader).map(function)) == PAIRS
    options = {"batch_size": 2, "seed": 1, "collate_fn": list, "worker_type": "thread"}
    stream = FileStream(files[kind], reader, lanes=1 if kind == "npy" else 2).map(function)
    made = stream.shuffle(2) if kind == "npy" else stream
    check_resume(lambda num_workers=0: DataLoader(made, num_workers=num_workers, **options))
    assert sorted(flat(DataLoader(made, **options))) == PAIRS


def test_a_reader_with_start_begins_there_and_one_without_is_read_past(deliver):
    calls = []

    def plain(path):
        calls.append((path, 0))
        return iter(range(6))

    def anywhere(path, start=0):
        calls.append((path, start))
        return iter(range(start, 6))

    for reader, start in ((plain, 0), (anywhere, 2), (functools.partial(anywhere), 2)):
        stream = FileStream(["a", "b"], reader)
        loader = DataLoader(stream, 2, seed=7, collate_fn=list)
        delivered = list(itertools.islice(loader, 2))
        calls.clear()
        assert delivered + deliver(stream, 2, state=loader.state_dict()) == deliver(stream, 2)
        assert calls[:2] == [("a", start), ("b", start)]


def test_files_are_opened_when_they_are_read(deliver):
    stream = FileStream(["missing-1", "missing-2"], read_lines)
    assert stream.num_shards == 2
    with pytest.raises(FileNotFoundError) as caught:
        deliver(stream, 2)
    assert caught.value.__notes__[:1] == ["at record 1 of missing-1 (the first is record 1)"]


def test_what_is_no_file_stream_is_rejected():
    for paths, reader, lanes, words in (
        ([3], read_lines, 1, "str or os.PathLike, got 3"),
        (["a"], "lines", 1, "function of a path"),
        (["a"], read_lines, 0, "lanes"),
        (3, read_lines, 1, "one path, or an iterable of them"),
    ):
        with pytest.raises(OptionError, match=words):
            FileStream(paths, reader, lanes=lanes)


def test_very_many_paths_may_stay_packed(files):
    names = list(map(str, files["npy"])) * 34_000
    paths = PackedList(names)
    stream = FileStream(paths, read_npy)
    assert stream.paths is paths
    assert stream.num_shards == 102_000
    assert find_large_lists(stream) == []
    assert find_large_lists(FileStream(names, read_npy)) == ["dataset.paths"]
    assert [row.tolist() for row in stream.shard(101_999)] == [[2, 0]]


def test_a_file_stream_pickles_and_says_what_it_is(files):
    stream = FileStream(files["tar"], functools.partial(read_tar))
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)
    assert repr(stream) == "FileStream(3 files, read_tar)"


def test_urls_go_through_fsspec(files):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for kind, paths in files.items():
        memory.pipe(f"/agnoload/a.{kind}", paths[1].read_bytes())
    packed = io.BytesIO()
    np.savez(packed, x=np.arange(3))
    memory.pipe("/agnoload/a.npz", packed.getvalue())
    memory.pipe("/agnoload/a.txt.gz", gzip.compress(b"one\ntwo\n"))
    try:
        for kind, (reader, function) in READ.items():
            assert list(map(function, reader(f"memory://agnoload/a.{kind}", start=1))) == PAIRS[4:7]
        assert [int(row["x"]) for row in read_npz("memory://agnoload/a.npz", start=1)] == [1, 2]
        assert list(FileStream("memory://agnoload/a.txt.gz", read_lines)) == ["one", "two"]
        with pytest.raises(FileNotFoundError) as caught:
            list(FileStream("memory://agnoload/b.txt", read_lines))
        assert caught.value.__notes__ == ["at record 1 of memory://agnoload/b.txt (the first is record 1)"]
    finally:
        memory.rm("/agnoload", recursive=True)


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    for module, reader, path in (("fsspec", read_lines, "s3://a.txt"), ("pyarrow", read_parquet, "a.parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(BackendUnavailable, match=f"{module} is needed to read {path}: pip install {module}"):
            next(reader(path))


# ------------------------------------------------------------------------------------------------ lines and JSON


@settings(max_examples=40)
@given(
    lines=st.lists(st.text("aü\u0a0a\u0d0d\x85 ", max_size=5), max_size=6),
    encoding=st.sampled_from(["utf-8", "utf-8", "utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"]),
    line_end=st.sampled_from(["\n", "\r\n"]),
    ended=st.booleans(),
    suffix=st.sampled_from(list(OPENERS)),
    start=START,
)
def test_lines_come_without_their_ends_in_any_encoding(folder, lines, encoding, line_end, ended, suffix, start):
    text = line_end.join(lines) + line_end * (ended and bool(lines))
    path = folder / f"a.txt{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        file.write(text.encode(encoding))
    wanted = lines if ended or not lines or lines[-1] else lines[:-1]  # an empty line that is not ended is none
    assert list(read_lines(path, start, encoding)) == wanted[start:]


def test_only_one_line_end_is_taken_away(tmp_path):
    (tmp_path / "a").write_bytes(b"one\r\r\n\xe4\rb\x0a\x85")
    assert list(read_lines(tmp_path / "a", encoding="latin-1")) == ["one\r", "ä\rb", "\x85"]
    assert list(FileStream(tmp_path / "a", functools.partial(read_lines, encoding="latin-1"))) == [
        "one\r",
        "ä\rb",
        "\x85",
    ]


TEXT = st.text('aé\n"', max_size=3)
RECORDS = st.lists(st.dictionaries(TEXT, st.integers() | TEXT, max_size=2), max_size=5)


@settings(max_examples=20)
@given(records=RECORDS, blank=st.sets(st.integers(0, 5)), start=START)
def test_json_lines_are_records_but_for_blank_ones(folder, records, blank, start):
    lines = [" \t\n" * (number in blank) + json.dumps(record) for number, record in enumerate(records)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    assert list(read_jsonl(folder / "a.jsonl", start)) == records[start:]


# ------------------------------------------------------------------------------------------------ arrays


@settings(max_examples=30)
@given(
    array=arrays.arrays(
        st.sampled_from(["i2", "f4", "?", "U3", "i4, f8"]),
        st.tuples(st.integers(0, 4)) | st.tuples(st.integers(0, 4), st.integers(0, 3)),
    ),
    start=START,
    suffix=st.sampled_from(["", ".gz"]),
)
def test_rows_of_npy_are_values_of_their_own(folder, array, start, suffix):
    path = folder / f"a.npy{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        np.save(file, array)
    rows = list(read_npy(path, start))
    assert [(type(row), row.dtype, row.tobytes()) for row in rows] == [
        (type(row), row.dtype, row.tobytes()) for row in array[start:]
    ]
    assert all(row.base is None for row in rows if isinstance(row, np.ndarray)), "no row keeps the file"
    for row in rows:  # they may be written to
        if isinstance(row, np.void):
            row[0] = 0
        elif isinstance(row, np.ndarray):
            row[...] = 0


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=3), start=START)
def test_rows_of_npz_are_dicts_if_all_arrays_are_as_long(folder, lengths, start):
    columns = {
        f"c{k}": np.arange(length * 2, dtype=f"i{2 ** (k + 1)}").reshape(length, 2) for k, length in enumerate(lengths)
    }
    np.savez(folder / "a.npz", **columns)
    if len(set(lengths)) > 1:
        with pytest.raises(OptionError, match=r"first axis of one length, got shapes"):
            list(read_npz(folder / "a.npz", start))
        return
    rows = list(read_npz(folder / "a.npz", start))
    assert len(rows) == max(0, lengths[0] - start)
    for place, row in enumerate(rows, start):
        assert {name: (value.dtype, value.tolist()) for name, value in row.items()} == {
            name: (column.dtype, column[place].tolist()) for name, column in columns.items()
        }


def test_arrays_without_a_first_axis_or_with_pickles_are_rejected(tmp_path):
    np.save(tmp_path / "a.npy", np.array(3))
    np.savez(tmp_path / "a.npz", x=np.array(3))
    for reader, suffix in ((read_npy, "npy"), (read_npz, "npz")):
        with pytest.raises(OptionError, match="first axis"):
            list(reader(tmp_path / f"a.{suffix}"))
    np.save(tmp_path / "b.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "b.npz", a=np.array([{}], object), allow_pickle=True)
    for reader, suffix in ((read_npy, "npy"), (read_npz, "npz")):
        with pytest.raises(ValueError, match=r"Python objects|allow_pickle"):
            list(reader(tmp_path / f"b.{suffix}"))


# ------------------------------------------------------------------------------------------------ tar

NAMES = st.sampled_from(["a", "b.c", "x/a", "./y.z/d"])
SUFFIXES = st.lists(st.sampled_from(["txt", "cls", "png"]), min_size=1, max_size=3, unique=True)


@settings(max_examples=25)
@given(
    samples=st.lists(st.tuples(NAMES, SUFFIXES), max_size=4, unique_by=lambda sample: sample[0]),
    extra=st.sampled_from([None, ".hidden", "._a.txt", "folder"]),
    mode=st.sampled_from(["w", "w:gz", "w:xz"]),
    start=START,
)
def test_neighbours_in_a_tar_are_one_sample_cut_at_the_first_dot_or_the_last(folder, samples, extra, mode, start):
    """Hidden files and folders part no sample."""
    path = folder / "a.tar"
    with tarfile.open(path, mode) as archive:
        for name, suffixes in samples:
            for suffix in suffixes:
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(member.name)
                archive.addfile(member, io.BytesIO(member.name.encode()))
                if extra is not None:
                    other = tarfile.TarInfo(f"{name.rpartition('/')[0] or '.'}/{extra}")
                    other.type = tarfile.DIRTYPE if extra == "folder" else tarfile.REGTYPE
                    archive.addfile(other, io.BytesIO())
    wanted = [
        {"__key__": name} | {suffix: f"{name}.{suffix}".encode() for suffix in suffixes} for name, suffixes in samples
    ]
    assert list(read_tar(path, start, dot="last")) == wanted[start:]
    for sample, (name, suffixes) in zip(wanted, samples, strict=True):
        if name == "b.c":
            sample.clear()
            sample.update({"__key__": "b"}, **{f"c.{suffix}": f"{name}.{suffix}".encode() for suffix in suffixes})
    assert list(read_tar(path, start)) == wanted[start:]


def test_files_of_a_tar_without_a_suffix_have_an_empty_one(tmp_path):
    write_tar(tmp_path / "a.tar", [("3", b"{}")])
    assert list(read_tar(tmp_path / "a.tar")) == [{"__key__": "3", "": b"{}"}]
    with pytest.raises(OptionError, match="dot must be"):
        list(read_tar(tmp_path / "a.tar", dot="middle"))


def test_a_tar_whose_samples_cannot_be_told_apart_is_an_error_that_names_the_file(tmp_path):
    for members, record, words in (
        (["1.txt", "1.txt"], 1, "a.tar holds 1.txt twice"),
        (["1.__key__"], 1, "a.tar holds 1.__key__, but __key__ is"),
        (["0.x", "1.x", "0.y", "1.y"], 3, r"0.y is at byte 1024, away from the others of '0' at byte 0.*--sort"),
    ):
        write_tar(tmp_path / "a.tar", [(name, b"") for name in members])
        with pytest.raises(OptionError, match=words) as caught:
            list(FileStream(tmp_path / "a.tar", read_tar))
        assert f"record {record} of" in caught.value.__notes__[0]
        with pytest.raises(OptionError, match=words):
            list(read_tar(tmp_path / "a.tar", start=1))  # also in what is passed by


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_a_tar_are_left_out_and_one_warning_says_so(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("1.txt"), io.BytesIO())
        for name in ("2.txt", "3.txt"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "1.txt"
            archive.addfile(member)
    with pytest.warns(AgnoloadWarning, match=r"a.tar holds links, which are left out: 2.txt to 1.txt is") as caught:
        assert list(read_tar(tmp_path / "a.tar")) == [{"__key__": "1", "txt": b""}]
    assert len(caught) == 1


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_header_in_a_tar_is_an_error_and_not_the_end(tmp_path, mode, cut):
    """`tarfile` by itself gives what comes before and ends."""
    path = tmp_path / "a.tar"
    write_tar(path, [(f"{n}.txt", b"%d" % n) for n in range(4)])
    data = bytearray(path.read_bytes())
    data[2 * 1024 + 5] ^= 1
    del data[2 * 1024 + 100 if cut else len(data) :]
    path.write_bytes(gzip.compress(data) if mode == "w:gz" else data)
    samples = iter(FileStream(path, read_tar))
    assert next(samples)["txt"] == b"0"
    with pytest.raises(tarfile.ReadError, match="at byte 2048 of the archive") as caught:
        list(samples)
    assert caught.value.__notes__ == [f"at record 2 of {path} (the first is record 1)"]


def test_of_a_tar_nothing_is_read_that_was_delivered_before(tmp_path, monkeypatch):
    write_tar(tmp_path / "a.tar", [(f"{n}.{suffix}", b"%d" % n) for n in range(5) for suffix in ("txt", "cls")])
    read, extract = [], tarfile.TarFile.extractfile
    monkeypatch.setattr(tarfile.TarFile, "extractfile", lambda tar, m: read.append(m.name) or extract(tar, m))
    for start in range(7):
        read.clear()
        assert len(list(read_tar(tmp_path / "a.tar", start=start))) == max(0, 5 - start)
        assert read == [f"{n}.{suffix}" for n in range(start, 5) for suffix in ("txt", "cls")]


# ------------------------------------------------------------------------------------------------ Parquet

KINDS = ["i1", "u4", "f4", "f2", "?", "M8[D]", "M8[ns]", "m8[ns]"]


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    values=st.lists(st.none() | st.integers(0, 100), max_size=7),
    group=st.integers(1, 4),
    start=START,
)
def test_a_missing_value_changes_no_other_nor_its_type_wherever_reading_begins(folder, kind, values, group, start):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    array = np.array([value or 0 for value in values]).astype(kind)
    column = pyarrow.array(array, mask=np.array([value is None for value in values], bool))
    table = pyarrow.table({"x": column, "n": range(len(values))})
    parquet.write_table(table, folder / "a.parquet", row_group_size=group)
    wanted = [None if missing is None else value for missing, value in zip(values, array, strict=True)][start:]
    rows = list(read_parquet(folder / "a.parquet", start))
    assert [row["n"] for row in rows] == list(range(len(values)))[start:]
    assert [row["x"] for row in rows] == wanted
    for row, value in zip(rows, wanted, strict=True):
        assert type(row["x"]) is type(value)
        assert value is None or row["x"].dtype == value.dtype


def test_rows_of_a_large_parquet_file_come_once_wherever_reading_begins(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"n": range(2100)}), tmp_path / "a.parquet", row_group_size=1500)
    for start in (0, 5, 1030, 2099):  # more rows than are decoded at a time
        rows = read_parquet(tmp_path / "a.parquet", start)
        assert [int(row["n"]) for row in rows] == list(range(start, 2100))


def test_columns_of_parquet_that_hold_no_numbers_are_pythons_own_and_can_be_chosen(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"name": ["a", None], "list": [[1], []], "s": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    wanted = [{name: column[place] for name, column in columns.items()} for place in range(2)]
    assert list(read_parquet(tmp_path / "a.parquet")) == wanted
    assert list(read_parquet(tmp_path / "a.parquet", columns=["name"])) == [{"name": "a"}, {"name": None}]
    assert list(read_parquet(tmp_path / "a.parquet", columns=["s.a"])) == [{"s": {"a": 1}}, {"s": {"a": 3}}]
    with pytest.raises(OptionError, match=r"a.parquet has no columns \['x'\], it has \['name', 'list', 's'\]"):
        list(read_parquet(tmp_path / "a.parquet", columns=["name", "x"]))
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["x", "x"])
    parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(OptionError, match=r"must have names of their own to make a dict, got \['x', 'x'\]"):
        list(read_parquet(tmp_path / "b.parquet"))
    parquet.write_table(pyarrow.table({}), tmp_path / "c.parquet")
    assert list(read_parquet(tmp_path / "c.parquet")) == []
