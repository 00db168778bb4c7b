"""Files as streams: real ones, written here."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import itertools
import lzma
import pickle
import sys
import tarfile

import numpy as np
import pytest

from agnoload import DataLoader
from agnoload.datasets import PackedList
from agnoload.errors import AgnoloadWarning, BackendUnavailable, OptionError
from agnoload.inspect import find_large_lists
from agnoload.streams import FileStream, read_lines, read_npy, read_npz, read_parquet, read_tar
from agnoload.testing import check_resume


def values(batches):
    return [value for batch in batches for value in batch]


def write_tar(path, samples, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in samples:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def tars(tmp_path):
    paths = []
    for number, size in enumerate([3, 5, 1]):
        paths.append(tmp_path / f"{number}.tar")
        samples = [
            [(f"a/{number}-{n}.txt", f"{number}.{n}".encode()), (f"a/{number}-{n}.cls", b"%d" % n)] for n in range(size)
        ]
        write_tar(paths[-1], itertools.chain(*samples))
    return paths


@pytest.fixture
def parquets(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = []
    for number, size in enumerate([4, 7]):
        paths.append(tmp_path / f"{number}.parquet")
        table = pyarrow.table(
            {
                "n": pyarrow.array(range(10 * number, 10 * number + size), pyarrow.int32()),
                "x": [0.5 * n for n in range(size)],
                "name": [f"{number}-{n}" for n in range(size)],
                "gaps": pyarrow.array([None if n % 2 else n for n in range(size)], pyarrow.int64()),
                "list": [[n] * n for n in range(size)],
            }
        )
        parquet.write_table(table, paths[-1], row_group_size=2)
    return paths


def text_of(sample):
    return sample["__key__"], sample["txt"].decode(), int(sample["cls"])


def number_of(sample):
    return int(sample["n"])


def check_every_resume(stream, size, expected, worker_type="thread"):
    """Each sample once, and resumed at every batch with 0 to 2 workers."""
    assert sorted(stream) == expected

    def make(num_workers=0):
        return DataLoader(stream, size, seed=1, collate_fn=list, num_workers=num_workers, worker_type=worker_type)

    check_resume(make)
    assert sorted(values(make())) == expected


def test_tar_files_are_streamed_and_resumed_at_every_batch(tars):
    expected = [(f"a/{number}-{n}", f"{number}.{n}", n) for number, size in enumerate([3, 5, 1]) for n in range(size)]
    check_every_resume(FileStream(tars, read_tar).map(text_of), 2, expected)
    check_every_resume(FileStream(tars, read_tar, lanes=1).map(text_of), 2, expected)
    check_resume(lambda: DataLoader(FileStream(tars, read_tar, lanes=1).map(text_of).shuffle(2), 2, seed=1))


@pytest.mark.slow
def test_files_are_resumed_at_every_batch_in_processes(tars, parquets):
    expected = [(f"a/{number}-{n}", f"{number}.{n}", n) for number, size in enumerate([3, 5, 1]) for n in range(size)]
    check_every_resume(FileStream(tars, read_tar).map(text_of), 2, expected, "process")
    check_every_resume(FileStream(parquets, read_parquet).map(number_of), 3, [*range(4), *range(10, 17)], "process")


def test_parquet_files_are_streamed_and_resumed_at_every_batch(parquets):
    check_every_resume(FileStream(parquets, read_parquet).map(number_of), 3, [*range(4), *range(10, 17)])


def test_rows_of_parquet_keep_their_types(parquets):
    rows = list(read_parquet(parquets[0]))
    assert [type(rows[1][name]) for name in rows[1]] == [np.int32, np.float64, str, type(None), list]
    assert rows[2] == {"n": 2, "x": 1.0, "name": "0-2", "gaps": 2, "list": [2, 2]}
    assert list(read_parquet(parquets[0], columns=["name"]))[3] == {"name": "0-3"}
    for start in range(6):
        assert list(read_parquet(parquets[0], start=start)) == rows[start:]


@pytest.fixture
def gaps(tmp_path):
    """A file with a missing value in its first row group only."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "i": pyarrow.array([1, None, 3, 4], pyarrow.int8()),
        "f": pyarrow.array([None, 1.5, 2.5, 3.5], pyarrow.float32()),
        "h": pyarrow.array(np.array([1, 2, 3, 4], np.float16), mask=np.array([0, 1, 0, 0], bool)),
        "b": pyarrow.array([True, None, False, True]),
        "day": pyarrow.array([1, None, 2, 3], pyarrow.int32()).cast(pyarrow.date32()),
        "time": pyarrow.array([1, None, 10**9 + 1, 3], pyarrow.timestamp("ns")),
        "span": pyarrow.array([1, None, 10**9 + 1, 3], pyarrow.duration("ns")),
        "none": pyarrow.array([None] * 4, pyarrow.int16()),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    return tmp_path / "a.parquet"


def test_a_missing_value_changes_no_other_nor_its_type(gaps):
    columns = {
        "i": np.array([1, 0, 3, 4], np.int8),
        "f": np.array([0, 1.5, 2.5, 3.5], np.float32),
        "h": np.array([1, 0, 3, 4], np.float16),
        "b": np.array([True, False, False, True]),
        "day": np.array([1, 0, 2, 3], "datetime64[D]"),
        "time": np.array([1, 0, 10**9 + 1, 3], "datetime64[ns]"),
        "span": np.array([1, 0, 10**9 + 1, 3], "timedelta64[ns]"),
        "none": np.zeros(4, np.int16),
    }
    missing = {"f": [0], "none": [0, 1, 2, 3]}
    for start in range(5):  # what is read on after a resume is what it was before
        rows = list(read_parquet(gaps, start))
        assert len(rows) == 4 - start
        for place, row in enumerate(rows, start):
            assert list(row) == list(columns)
            for name, value in row.items():
                wanted = None if place in missing.get(name, [1]) else columns[name][place]
                assert value == wanted
                assert type(value) is type(wanted)
                assert wanted is None or value.dtype == wanted.dtype


def test_parquet_without_rows_gives_none(tmp_path, gaps):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(parquet.read_table(gaps).slice(0, 0), tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({}), tmp_path / "c.parquet")
    assert list(read_parquet(tmp_path / "b.parquet")) == list(read_parquet(tmp_path / "c.parquet")) == []


def test_columns_that_would_be_lost_are_refused(tmp_path, gaps):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with pytest.raises(OptionError, match=r"a.parquet has no columns \['x'\], it has \['i', 'f'"):
        list(read_parquet(gaps, columns=["i", "x"]))
    nested = pyarrow.table({"s": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]})
    parquet.write_table(nested, tmp_path / "b.parquet")
    assert list(read_parquet(tmp_path / "b.parquet", columns=["s.a"])) == [{"s": {"a": 1}}, {"s": {"a": 3}}]
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["x", "x"])
    parquet.write_table(twice, tmp_path / "c.parquet")
    with pytest.raises(OptionError, match=r"must have names of their own to make a dict, got \['x', 'x'\]"):
        list(read_parquet(tmp_path / "c.parquet"))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_tars_may_be_compressed_and_hold_other_things_than_files(tmp_path, mode):
    path = tmp_path / "a.tar"
    with tarfile.open(path, mode) as archive:
        folder = tarfile.TarInfo("x")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in ("x/1.seg.png", "x/1.json", "x/2.json", "3"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"{}"))
    assert list(read_tar(path)) == [
        {"__key__": "x/1", "seg.png": b"{}", "json": b"{}"},
        {"__key__": "x/2", "json": b"{}"},
        {"__key__": "3", "": b"{}"},
    ]
    assert next(iter(read_tar(path, start=1)))["__key__"] == "x/2"


def test_a_tar_with_a_file_twice_is_an_error_that_names_it(tmp_path):
    write_tar(tmp_path / "a.tar", [("1.txt", b"a"), ("1.txt", b"b")])
    with pytest.raises(OptionError, match=r"a.tar holds 1.txt twice") as caught:
        list(FileStream(tmp_path / "a.tar", read_tar))
    assert "record 1 of" in caught.value.__notes__[0]


def test_hidden_files_of_a_tar_are_left_out_and_do_not_part_a_sample(tmp_path):
    names = ["a/._7.jpg", "a/7.jpg", "a/._7.cls", "a/7.cls", ".DS_Store", "./b.c/8.cls"]
    write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    assert list(read_tar(tmp_path / "a.tar")) == [
        {"__key__": "a/7", "jpg": b"a/7.jpg", "cls": b"a/7.cls"},
        {"__key__": "./b.c/8", "cls": b"./b.c/8.cls"},
    ]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_a_tar_are_left_out_and_one_warning_says_so(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("1.txt"), io.BytesIO())
        for name in ("2.txt", "3.txt"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "1.txt"
            archive.addfile(member)
    with pytest.warns(AgnoloadWarning, match=r"a.tar holds links, which are left out: 2.txt to 1.txt is") as told:
        assert list(read_tar(tmp_path / "a.tar")) == [{"__key__": "1", "txt": b""}]
    assert len(told) == 1


def test_a_tar_with_a_file_by_the_name_of_the_key_is_an_error(tmp_path):
    write_tar(tmp_path / "a.tar", [("1.__key__", b"a")])
    with pytest.raises(OptionError, match=r"a.tar holds 1.__key__, but __key__ is"):
        list(read_tar(tmp_path / "a.tar"))


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
    assert [next(samples)["txt"] for _ in range(1)] == [b"0"]
    with pytest.raises(tarfile.ReadError, match="at byte 2048 of the archive") as caught:
        list(samples)
    assert caught.value.__notes__ == [f"at record 2 of {path} (the first is record 1)"]


def test_of_a_tar_nothing_is_read_that_was_delivered_before(tmp_path, monkeypatch):
    write_tar(tmp_path / "a.tar", [(f"{n}.{suffix}", b"%d" % n) for n in range(5) for suffix in ("txt", "cls")])
    read, extract = [], tarfile.TarFile.extractfile
    monkeypatch.setattr(tarfile.TarFile, "extractfile", lambda tar, m: read.append(m.name) or extract(tar, m))
    for start in range(7):
        read.clear()
        samples = list(read_tar(tmp_path / "a.tar", start=start))
        assert samples == [{"__key__": str(n), "txt": b"%d" % n, "cls": b"%d" % n} for n in range(start, 5)]
        assert read == [f"{n}.{suffix}" for n in range(start, 5) for suffix in ("txt", "cls")]


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_lines_come_without_their_ends(tmp_path, suffix, opener):
    path = tmp_path / f"a.txt{suffix}"
    with opener(path, "wb") as file:
        file.write("one\r\n\ntwo\r ü\r\r\nthree".encode())
    assert list(read_lines(path)) == ["one", "", "two\r ü\r", "three"]
    assert list(read_lines(path, start=2)) == ["two\r ü\r", "three"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig", "cp037"])
@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open)])
def test_lines_take_encodings_whose_line_ends_are_not_one_byte(tmp_path, encoding, suffix, opener):
    lines = ["one", "", "ਊ\r", "three"] if encoding != "cp037" else ["one", "", "two\r", "three"]
    path = tmp_path / f"a{suffix}"
    with opener(path, "wb") as file:
        file.write(f"one\n\n{lines[2]}\r\nthree".encode(encoding))
    for start in range(6):
        assert list(read_lines(path, start, encoding)) == lines[start:]


def test_lines_take_another_encoding(tmp_path):
    (tmp_path / "a").write_bytes("ü\nä".encode("latin-1"))
    assert list(FileStream([tmp_path / "a"], functools.partial(read_lines, encoding="latin-1"))) == ["ü", "ä"]


def test_rows_of_npy_are_arrays_of_their_own(tmp_path):
    array = np.arange(12, dtype=np.int16).reshape(4, 3)
    np.save(tmp_path / "a.npy", array)
    rows = list(read_npy(tmp_path / "a.npy", start=1))
    np.testing.assert_array_equal(rows, array[1:])
    assert type(rows[0]) is np.ndarray
    rows[0][:] = 0
    np.save(tmp_path / "d.npy", np.array([(1, 2.5), (3, 4.5)], "i4, f8"))
    records = list(read_npy(tmp_path / "d.npy"))
    records[0]["f0"] = 5
    assert [record.item() for record in records] == [(5, 2.5), (3, 4.5)]
    np.save(tmp_path / "b.npy", np.array([1.5, 2.5], np.float32))
    assert [type(row) for row in read_npy(tmp_path / "b.npy")] == [np.float32] * 2
    np.save(tmp_path / "c.npy", np.array(3))
    with pytest.raises(OptionError, match="first axis"):
        list(read_npy(tmp_path / "c.npy"))


def test_rows_of_npz_are_dicts(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6).reshape(3, 2), y=np.array([5, 6, 7], np.uint8))
    rows = list(read_npz(tmp_path / "a.npz"))
    assert [row["y"] for row in rows] == [5, 6, 7]
    assert rows[1]["x"].tolist() == [2, 3]
    assert rows[0]["y"].dtype == np.uint8
    assert len(list(read_npz(tmp_path / "a.npz", start=2))) == 1
    np.savez(tmp_path / "b.npz", x=np.arange(3), y=np.arange(2))
    with pytest.raises(OptionError, match="first axis of one length"):
        list(read_npz(tmp_path / "b.npz"))


def test_pickles_in_arrays_are_never_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="Python objects"):
        list(read_npy(tmp_path / "a.npy"))
    np.savez(tmp_path / "a.npz", a=np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        list(read_npz(tmp_path / "a.npz"))


def test_numbers_are_streamed_and_resumed_at_every_batch(tmp_path):
    paths = [tmp_path / f"{number}.npy" for number in range(3)]
    for number, path in enumerate(paths):
        np.save(path, np.arange(10 * number, 10 * number + 4))
    check_every_resume(FileStream(paths, read_npy).map(int), 3, [*range(4), *range(10, 14), *range(20, 24)])


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


def test_ranks_have_files_of_their_own(deliver, tars):
    shares = [values(deliver(FileStream(tars, read_tar).split_by_rank(rank, 2).map(text_of), 2)) for rank in range(2)]
    assert {text[0] for _, text, _ in shares[0]} == {"0", "2"}
    assert len(values(shares)) == 9


def test_urls_go_through_fsspec(gaps):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/agnoload/a.txt", b"one\ntwo\n")
    packed = io.BytesIO()
    np.save(packed, np.arange(3))
    memory.pipe("/agnoload/a.npy", packed.getvalue())
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("1.txt"), io.BytesIO())
    memory.pipe("/agnoload/a.tar", archive.getvalue())
    memory.pipe("/agnoload/a.txt.gz", gzip.compress(b"one\ntwo\n"))
    memory.pipe("/agnoload/a.parquet", gaps.read_bytes())
    arrays = io.BytesIO()
    np.savez(arrays, x=np.arange(3))
    memory.pipe("/agnoload/a.npz", arrays.getvalue())
    try:
        assert list(read_lines("memory://agnoload/a.txt.gz", start=1)) == ["two"]
        assert [int(row["x"]) for row in read_npz("memory://agnoload/a.npz", start=1)] == [1, 2]
        assert [row["i"] for row in read_parquet("memory://agnoload/a.parquet", start=1)] == [None, 3, 4]
        with pytest.raises(FileNotFoundError) as caught:
            list(FileStream("memory://agnoload/b.txt", read_lines))
        assert caught.value.__notes__ == ["at record 1 of memory://agnoload/b.txt (the first is record 1)"]
        assert list(FileStream("memory://agnoload/a.txt", read_lines)) == ["one", "two"]
        assert [int(row) for row in read_npy("memory://agnoload/a.npy")] == [0, 1, 2]
        assert list(read_tar("memory://agnoload/a.tar")) == [{"__key__": "1", "txt": b""}]
    finally:
        memory.rm("/agnoload", recursive=True)


@pytest.mark.parametrize(
    ("module", "read", "words"),
    [
        (
            "fsspec",
            lambda: read_lines("s3://bucket/a.txt"),
            "fsspec is needed to read s3://bucket/a.txt: pip install fsspec",
        ),
        (
            "pyarrow.parquet",
            lambda: read_parquet("a.parquet"),
            "pyarrow is needed to read a.parquet: pip install pyarrow",
        ),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, module, read, words):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailable, match=words):
        next(read())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([3], read_lines), "str or os.PathLike, got 3"),
        ((["a"], "lines"), "function of a path"),
        ((["a"], read_lines, 0), "lanes"),
    ],
)
def test_what_is_no_file_stream_is_refused(arguments, words):
    paths, reader, *lanes = arguments
    with pytest.raises(OptionError, match=words):
        FileStream(paths, reader, **({"lanes": lanes[0]} if lanes else {}))


def test_very_many_paths_may_stay_packed(tars):
    paths = PackedList(map(str, tars * 50_000))
    stream = FileStream(paths, read_tar)
    assert stream.paths is paths
    assert stream.num_shards == 150_000
    assert find_large_lists(stream) == []
    assert find_large_lists(FileStream(list(paths), read_tar)) == ["dataset.paths"]
    assert list(stream.shard(149_999)) == list(read_tar(tars[2]))


def test_a_file_stream_pickles_and_says_what_it_is(tars):
    stream = FileStream(tars, functools.partial(read_tar))
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)
    assert repr(stream) == "FileStream(3 files, read_tar)"
