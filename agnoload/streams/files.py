"""Files as streams: a file is a shard, and a reader turns it into samples."""

from __future__ import annotations

import bz2
import functools
import gzip
import importlib
import inspect
import io
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, TypeVar

import numpy as np

from agnoload.errors import BackendUnavailable, OptionError
from agnoload.saved import FARTHEST, whole
from agnoload.streams.base import IterableDataset
from agnoload.streams.cursor import Cursor, CursorStream, ForeignCursor, Opening, guarded
from agnoload.words import name_of

T_co = TypeVar("T_co", covariant=True)

Path = str | os.PathLike[str]
Reader = Callable[..., Iterable[T_co]]


class FileStream(IterableDataset[T_co]):
    """The samples of many files: `reader(path)` gives those of one, as an iterable.

    Each file is a shard: workers and ranks (`split_by_rank`) share the files among them, and `shuffle` shuffles their
    order too. `lanes` files are read at once, by all workers together; the batches depend on it, so it belongs to the
    data and not to the machine. On resume only the files are opened that were open, and a reader with a parameter
    `start` begins at that sample: `reader(path, start=n)` leaves out the first n. Give a reader options by
    `functools.partial`. `read_lines`, `read_npy`, `read_npz`, `read_tar` and `read_parquet` are such readers; they take
    paths, and URLs (`s3://...`) where fsspec is installed.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in "ab":
    ...     _ = (folder / f"{name}.txt").write_text(f"{name}1\\n{name}2\\n")
    >>> list(FileStream(sorted(folder.glob("*.txt")), read_lines))
    ['a1', 'a2', 'b1', 'b2']
    """

    def __init__(self, paths: Path | Iterable[Path], reader: Reader[T_co], *, lanes: int = 16) -> None:
        self.paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        for path in self.paths:
            if not isinstance(path, (str, os.PathLike)):
                raise OptionError(f"the paths of a FileStream must be str or os.PathLike, got {path!r}")
        if not callable(reader):
            raise OptionError(f"the reader of a FileStream must be a function of a path, got {reader!r}")
        if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
            raise OptionError(f"lanes must be a positive int, got {lanes!r}")
        self.reader = reader
        self.lanes = lanes

    @property
    def num_shards(self) -> int:
        """The number of files."""
        return len(self.paths)

    def shard(self, number: int) -> Iterable[T_co]:
        """The samples of one file."""
        return _File(self.paths[number], self.reader)

    def __repr__(self) -> str:
        reader = self.reader.func if isinstance(self.reader, functools.partial) else self.reader
        return f"FileStream({len(self.paths)} files, {name_of(reader)})"


class _File(CursorStream[T_co], IterableDataset[T_co]):
    """One file, opened when it is read."""

    def __init__(self, path: Path, reader: Reader[T_co]) -> None:
        self.path = path
        self.reader = reader

    def cursor(self, opening: Opening) -> Cursor:
        state = 0 if opening.state is None else whole(opening.state, "the place in a file", FARTHEST)
        return _FileCursor(self.path, self.reader, state)


class _FileCursor(Cursor):
    """The state is the number of samples that were taken."""

    def __init__(self, path: Path, reader: Reader[Any], start: int) -> None:
        self._path = path
        self._reader = reader
        self._taken = start
        self._samples: Cursor | None = None

    def take(self) -> Any:
        try:
            if self._samples is None:
                self._samples = ForeignCursor(guarded(_from, self._reader, self._path, self._taken))
            sample = self._samples.take()
        except StopIteration:
            raise
        except Exception as error:
            error.add_note(f"while sample {self._taken} of {os.fspath(self._path)} was read")
            raise
        self._taken += 1
        return sample

    def state(self) -> int:
        return self._taken


def _from(reader: Reader[Any], path: Path, start: int) -> Iterator[Any]:
    """The samples of a file from number `start` on."""
    if not start:
        return iter(reader(path))
    try:
        begins_anywhere = "start" in inspect.signature(reader).parameters
    except (TypeError, ValueError):
        begins_anywhere = False
    return iter(reader(path, start=start)) if begins_anywhere else islice(iter(reader(path)), start, None)


_COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file or URL, to read bytes from; what ends in .gz, .bz2 or .xz is decompressed."""
    name = os.fspath(path)
    with _open(name) as file:
        decompress = _COMPRESSED.get(os.path.splitext(name)[1])
        if decompress is None:
            yield file
        else:
            with decompress(file) as inside:
                yield inside


def _open(name: str) -> IO[bytes]:
    if "://" not in name:
        return open(name, "rb")
    file: IO[bytes] = _module("fsspec", name).open(name, "rb").open()
    return file


def _module(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise BackendUnavailable(f"{package} is needed to read {path}: pip install {package}") from error


def read_lines(path: Path, start: int = 0, encoding: str = "utf-8") -> Iterator[str]:
    """The lines of a text file, without their ends; also of one that is compressed (.gz, .bz2, .xz).

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.txt"
    >>> _ = path.write_text("one\\ntwo\\n")
    >>> list(read_lines(path))
    ['one', 'two']
    """
    with _opened(path) as file:
        for line in islice(file, start, None):
            yield line.rstrip(b"\r\n").decode(encoding)


def read_npy(path: Path, start: int = 0) -> Iterator[Any]:
    """The rows of an array that `np.save` wrote: arrays, or scalars if it has one axis.

    Local files are not loaded whole.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.npy"
    >>> np.save(path, np.arange(6).reshape(3, 2))
    >>> [row.tolist() for row in read_npy(path, start=1)]
    [[2, 3], [4, 5]]
    """
    name = os.fspath(path)
    if "://" in name or os.path.splitext(name)[1] in _COMPRESSED:
        with _opened(path) as file:
            rows = np.load(io.BytesIO(file.read()), allow_pickle=False)
    else:
        rows = np.load(name, mmap_mode="r", allow_pickle=False)
    if not rows.ndim:
        raise OptionError(f"{name} must hold an array with a first axis that counts the samples, got one without axes")
    for place in range(start, len(rows)):
        row = rows[place]
        yield np.array(row) if isinstance(row, np.ndarray) else row


def read_npz(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of the arrays that `np.savez` wrote, as a dict by their names; the arrays must have one length.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.npz"
    >>> np.savez(path, x=np.array([1.5, 2.5]), y=np.array([0, 1]))
    >>> [(float(row["x"]), int(row["y"])) for row in read_npz(path)]
    [(1.5, 0), (2.5, 1)]
    """
    with _opened(path) as file, np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    lengths = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or -1 in lengths.values():
        shapes = {name: array.shape for name, array in arrays.items()}
        raise OptionError(f"the arrays in {os.fspath(path)} must have a first axis of one length, got shapes {shapes}")
    for place in range(start, min(lengths.values(), default=0)):
        rows = {name: array[place] for name, array in arrays.items()}
        yield {name: np.array(row) if isinstance(row, np.ndarray) else row for name, row in rows.items()}


def read_tar(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """The samples of a tar file (also a compressed one): neighbouring files whose names are equal up to the first dot.

    `train/7.jpg` and `train/7.seg.png` are the sample `{"__key__": "train/7", "jpg": b"...", "seg.png": b"..."}`.
    Nothing is written to disk; decode with `stream.map`, which runs only for the samples that a worker delivers.

    >>> import io, pathlib, tarfile, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.tar"
    >>> with tarfile.open(path, "w") as archive:
    ...     for name in ("7.txt", "7.cls"):
    ...         member = tarfile.TarInfo(name)
    ...         member.size = 2
    ...         archive.addfile(member, io.BytesIO(b"ab"))
    >>> list(read_tar(path))
    [{'__key__': '7', 'txt': b'ab', 'cls': b'ab'}]
    """
    name = os.fspath(path)
    with _open(name) as file, tarfile.open(fileobj=file, mode="r:*") as archive:
        yield from islice(_tar_samples(archive, name), start, None)


def _tar_samples(archive: tarfile.TarFile, name: str) -> Iterator[dict[str, Any]]:
    sample: dict[str, Any] = {}
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # else it remembers every file of the archive
        if not member.isfile():
            continue
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if sample and sample["__key__"] != key:
            yield sample
            sample = {}
        if suffix in sample:
            raise OptionError(f"{name} holds {member.name} twice within one sample")
        content = archive.extractfile(member)
        sample |= {"__key__": key, suffix: b"" if content is None else content.read()}
    if sample:
        yield sample


def read_parquet(path: Path, start: int = 0, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file as dicts, through pyarrow.

    Numbers and dates are NumPy scalars, missing values None, all else Python's own. `columns`: only these. Row groups
    before `start` are not read.

    >>> stream = FileStream(["a.parquet", "b.parquet"], read_parquet)
    >>> stream.num_shards
    2
    """
    name = os.fspath(path)
    parquet, types = _module("pyarrow.parquet", name), _module("pyarrow.types", name)
    with _opened(path) as source, parquet.ParquetFile(source) as file:
        group = 0
        while group < file.num_row_groups and start >= file.metadata.row_group(group).num_rows:
            start -= file.metadata.row_group(group).num_rows
            group += 1
        for batch in file.iter_batches(row_groups=list(range(group, file.num_row_groups)), columns=columns):
            if start >= batch.num_rows:
                start -= batch.num_rows
                continue
            values = [_column(batch.column(place), types) for place in range(batch.num_columns)]
            for row in range(start, batch.num_rows):
                yield dict(zip(batch.schema.names, [column[row] for column in values], strict=True))
            start = 0


def _column(column: Any, types: Any) -> Any:
    """A column of a record batch, to be indexed; through NumPy only where that changes no value."""
    kind = column.type
    plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    dated = types.is_date(kind) or (types.is_timestamp(kind) and kind.tz is None)
    if (plain or dated) and not column.null_count:
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()
