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

from agnoload.errors import BackendUnavailable, OptionError
from agnoload.streams import FileStream, read_lines, read_npy, read_npz, read_parquet, read_tar


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


def check_every_resume(kit, stream, size, expected):
    """Each sample once with 0 to 3 workers, and the same rest from every batch on."""
    whole = kit.deliver(stream, size)
    assert sorted(values(whole)) == expected
    for workers in range(4):
        loader = kit.Loader(stream, size, workers=workers, ahead=4)
        for done, batch in enumerate(loader):
            assert batch == whole[done]
            assert kit.deliver(stream, size, workers=3 - workers, state=loader.plan.state()) == whole[done + 1 :]


def test_tar_files_are_streamed_and_resumed_at_every_batch(kit, tars):
    expected = [(f"a/{number}-{n}", f"{number}.{n}", n) for number, size in enumerate([3, 5, 1]) for n in range(size)]
    check_every_resume(kit, FileStream(tars, read_tar).map(text_of), 2, expected)
    check_every_resume(kit, FileStream(tars, read_tar, lanes=1).map(text_of).shuffle(2), 2, expected)


def test_parquet_files_are_streamed_and_resumed_at_every_batch(kit, parquets):
    expected = [*range(4), *range(10, 17)]
    check_every_resume(kit, FileStream(parquets, read_parquet).map(number_of), 3, expected)


def test_rows_of_parquet_keep_their_types(parquets):
    rows = list(read_parquet(parquets[0]))
    assert [type(rows[1][name]) for name in rows[1]] == [np.int32, np.float64, str, type(None), list]
    assert rows[2] == {"n": 2, "x": 1.0, "name": "0-2", "gaps": 2, "list": [2, 2]}
    assert list(read_parquet(parquets[0], columns=["name"]))[3] == {"name": "0-3"}
    for start in range(6):
        assert list(read_parquet(parquets[0], start=start)) == rows[start:]


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
    assert "sample 0 of" in caught.value.__notes__[0]


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_lines_come_without_their_ends(tmp_path, suffix, opener):
    path = tmp_path / f"a.txt{suffix}"
    with opener(path, "wb") as file:
        file.write("one\r\n\ntwo ü\nthree".encode())
    assert list(read_lines(path)) == ["one", "", "two ü", "three"]
    assert list(read_lines(path, start=2)) == ["two ü", "three"]


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


def test_numbers_are_streamed_and_resumed_at_every_batch(kit, tmp_path):
    paths = [tmp_path / f"{number}.npy" for number in range(3)]
    for number, path in enumerate(paths):
        np.save(path, np.arange(10 * number, 10 * number + 4))
    check_every_resume(kit, FileStream(paths, read_npy).map(int), 3, [*range(4), *range(10, 14), *range(20, 24)])


def test_a_reader_with_start_begins_there_and_one_without_is_read_past(kit, tmp_path):
    calls = []

    def plain(path):
        calls.append((path, 0))
        return iter(range(6))

    def anywhere(path, start=0):
        calls.append((path, start))
        return iter(range(start, 6))

    for reader, start in ((plain, 0), (anywhere, 2), (functools.partial(anywhere), 2)):
        stream = FileStream(["a", "b"], reader)
        loader = kit.Loader(stream, 2)
        batches = iter(loader)
        delivered = [next(batches), next(batches)]
        calls.clear()
        assert delivered + kit.deliver(stream, 2, state=loader.plan.state()) == kit.deliver(stream, 2)
        assert calls[:2] == [("a", start), ("b", start)]


def test_files_are_opened_when_they_are_read(kit):
    stream = FileStream(["missing-1", "missing-2"], read_lines)
    assert stream.num_shards == 2
    with pytest.raises(FileNotFoundError) as caught:
        kit.deliver(stream, 2)
    assert caught.value.__notes__ == ["while sample 0 of missing-1 was read"]


def test_ranks_have_files_of_their_own(kit, tars):
    shares = [
        values(kit.deliver(FileStream(tars, read_tar).split_by_rank(rank, 2).map(text_of), 2)) for rank in range(2)
    ]
    assert {text[0] for _, text, _ in shares[0]} == {"0", "2"}
    assert len(values(shares)) == 9


def test_urls_go_through_fsspec(kit):
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
    try:
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


def test_a_file_stream_pickles_and_says_what_it_is(tars):
    stream = FileStream(tars, functools.partial(read_tar))
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)
    assert repr(stream) == "FileStream(3 files, read_tar)"
