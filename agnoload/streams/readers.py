"""Readers: generators of the samples of one file, from number `start` on. They know nothing of streams."""

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, Literal

import numpy as np

from agnoload.errors import BackendUnavailable, OptionError, add_note
from agnoload.validate import word

Path = str | os.PathLike[str]

ROWS = 1 << 10
"""Rows of a Parquet file that are decoded at a time: a row may be an image."""

_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file or URL, to read bytes from; what ends in .gz, .bz2 or .xz is decompressed."""
    name = os.fspath(path)
    with _module("fsspec", name).open(name, "rb") if "://" in name else open(name, "rb") as file:
        module = _COMPRESSED.get(os.path.splitext(name)[1])
        if module is None:
            yield file
        else:
            with importlib.import_module(module).open(file) as inside:
                yield inside


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
        if "\n".encode(encoding) == b"\n":
            for line in islice(file, start, None):
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode(encoding)
        else:  # UTF-16, say: the bytes of a line do not end with that of its end
            with io.TextIOWrapper(file, encoding, newline="\n") as text:
                for words in islice(text, start, None):
                    yield words.removesuffix("\n").removesuffix("\r")


def read_jsonl(path: Path, start: int = 0, encoding: str = "utf-8") -> Iterator[Any]:
    """The records of a file with JSON in each line, a dict as a rule; also of one that is compressed, as `read_lines`.

    Blank lines are no records. An error names the file and the line; to leave bad lines out, decode them in a map:
    `FileStream(paths, read_lines).map(json.loads)`, in a loader with `on_error="skip"`.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> _ = path.write_text('{"x": 1}\\n\\n{"x": 2}\\n')
    >>> list(read_jsonl(path))
    [{'x': 1}, {'x': 2}]
    """
    for number, line in enumerate(read_lines(path, encoding=encoding), 1):
        if line.isspace() or not line:
            continue
        if start:
            start -= 1
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            add_note(error, f"in line {number} of {os.fspath(path)}")
            raise
        yield record


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
        yield _own(rows[place])


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
        yield {name: _own(array[place]) for name, array in arrays.items()}


def _own(row: Any) -> Any:
    """A row that shows no more of its array: a copy, but for scalars, which are copies already."""
    if isinstance(row, np.void):
        return row.copy()
    return np.array(row) if isinstance(row, np.ndarray) else row


def read_tar(path: Path, start: int = 0, dot: Literal["first", "last"] = "first") -> Iterator[dict[str, Any]]:
    """The samples of a tar file (also a compressed one): neighbouring files whose names are equal up to the first dot.

    `train/7.jpg` and `train/7.seg.png` are the sample `{"__key__": "train/7", "jpg": b"...", "seg.png": b"..."}`.
    Where names hold other dots, as `img_0.10.png` and `img_0.11.png` do, cut them at the last one: `dot="last"`.
    `OptionError` if the files of a sample are not neighbours, which `tar --sort=name` makes them.
    Hidden files, those whose names begin with a dot, are left out; so are links, with one warning, since what they
    point to may have gone by. Nothing is written to disk; decode with `stream.map`, which runs only for the samples
    that a worker delivers.

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
    from agnoload.streams.tar import samples  # half a MiB that workers which read no tar do without

    with _opened(path) as file:
        yield from samples(file, name, start, word("dot", dot, ("first", "last")) == "first")


def read_parquet(path: Path, start: int = 0, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file as dicts, through pyarrow.

    Numbers, dates, time stamps and durations are NumPy scalars of the column's type, time stamps with a zone in UTC
    (`datetime64` knows no zones). Missing values are None. All else is Python's own: str, bytes, lists, dicts, and
    `decimal.Decimal`, `datetime.time` and `uuid.UUID`, which `stream.map` must make numbers of before they are batched.
    `columns`: only these. Row groups before `start` are not read.

    >>> from agnoload import FileStream
    >>> stream = FileStream(["a.parquet", "b.parquet"], read_parquet)
    >>> stream.num_shards
    2
    """
    name = os.fspath(path)
    pyarrow, parquet = _module("pyarrow", name), _module("pyarrow.parquet", name)
    with _opened(path) as source, parquet.ParquetFile(source) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise OptionError(f"the columns of {name} must have names of their own to make a dict, got {names}")
        paths = [f"{file.schema.column(place).path}." for place in range(len(file.schema))]
        missing = [column for column in columns or () if not any(p.startswith(f"{column}.") for p in paths)]
        if missing:
            raise OptionError(f"{name} has no columns {missing}, it has {names}")
        group = 0
        while group < file.num_row_groups and start >= file.metadata.row_group(group).num_rows:
            start -= file.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, file.num_row_groups))
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=columns):
            if start >= batch.num_rows:
                start -= batch.num_rows
                continue
            values = [_column(batch.column(place).slice(start), pyarrow) for place in range(batch.num_columns)]
            for row in range(batch.num_rows - start):
                yield dict(zip(batch.schema.names, [column[row] for column in values], strict=True))
            start = 0


def _column(column: Any, pyarrow: Any) -> Any:
    """A column of a record batch, to be indexed: of one type whether or not a value is missing in this batch."""
    kind, types = column.type, pyarrow.types
    plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    dated = types.is_date(kind) or types.is_duration(kind) or types.is_timestamp(kind)
    if not (plain or dated):
        return column.to_pylist()
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False)
    held = pyarrow.Array.from_buffers(kind, len(column), [None, column.buffers()[1]], offset=column.offset)
    values, valid = held.to_numpy(zero_copy_only=False), column.is_valid().to_numpy(zero_copy_only=False)
    return [value if there else None for value, there in zip(values, valid, strict=True)]
