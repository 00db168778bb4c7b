"""Files as streams: a file is a shard, and a reader turns it into samples."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from agnoload.datasets.packed import PackedList
from agnoload.errors import OptionError
from agnoload.streams.base import IterableDataset
from agnoload.streams.iterators import OpenedBy, OpenOptions, Record, UserIterator, guarded, note_place
from agnoload.streams.readers import Path
from agnoload.validate import FARTHEST, members, name_of, number_of, positive, whole

T_co = TypeVar("T_co", covariant=True)

Reader = Callable[..., Iterable[T_co]]


class FileStream(IterableDataset[T_co]):
    """The samples of many files: `reader(path)` gives those of one, as an iterable.

    Each file is a shard: workers and ranks (`split_by_rank`) share the files among them, and `shuffle` shuffles their
    order too. `lanes` files are read at once, by all workers together; the batches depend on it, so it belongs to the
    data and not to the machine. On resume only the files are opened that were open, and a reader with a parameter
    `start` begins at that sample: `reader(path, start=n)` leaves out the first n. Give a reader options by
    `functools.partial`. `read_lines`, `read_jsonl`, `read_npy`, `read_npz`, `read_tar` and `read_parquet` are such
    readers; they take paths, and URLs (`s3://...`) where fsspec is installed. Give very many paths as a `PackedList`.

    >>> import tempfile, pathlib
    >>> from agnoload import read_lines
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in "ab":
    ...     _ = (folder / f"{name}.txt").write_text(f"{name}1\\n{name}2\\n")
    >>> list(FileStream(sorted(folder.glob("*.txt")), read_lines))
    ['a1', 'a2', 'b1', 'b2']
    """

    def __init__(self, paths: Path | Iterable[Path], reader: Reader[T_co], *, lanes: int = 16) -> None:
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        self.paths: Sequence[Path] = (
            paths  # very many of them reach the workers as they are
            if isinstance(paths, PackedList)
            else list(members("the paths of a FileStream", paths, "one path, or an iterable of them"))
        )
        for path in self.paths:
            if not isinstance(path, (str, os.PathLike)):
                raise OptionError(f"the paths of a FileStream must be str or os.PathLike, got {path!r}")
            if "*" in os.fsdecode(path) and not os.path.exists(path):
                raise OptionError(
                    f"the paths of a FileStream must be those of files, got the pattern {os.fspath(path)!r}: give "
                    "sorted(glob.glob(pattern))"
                )
        if not self.paths:
            raise OptionError("FileStream needs at least one path, got none: is the pattern, or the folder, right?")
        if not callable(reader):
            raise OptionError(f"the reader of a FileStream must be a function of a path, got {reader!r}")
        self.reader = reader
        self.lanes = positive("lanes", lanes)

    @property
    def num_shards(self) -> int:
        """The number of files."""
        return len(self.paths)

    def shard(self, number: int) -> Iterable[T_co]:
        """The samples of one file."""
        return OpenedBy(partial(_FileIterator, self.paths[number], self.reader))

    def __repr__(self) -> str:
        reader = self.reader.func if isinstance(self.reader, partial) else self.reader
        return f"FileStream({number_of(len(self.paths), 'file')}, {name_of(reader)})"


class _FileIterator(UserIterator):
    """A pass through one file, opened when it is read; the state is the number of samples that were taken."""

    def __init__(self, path: Path, reader: Reader[Any], options: OpenOptions) -> None:
        super().__init__(reader)
        self._path = path
        self._taken = 0 if options.state is None else whole(options.state, "the place in a file", FARTHEST)

    def _begin(self) -> Iterator[Any]:
        path, reader, start = self._path, self._stream, self._taken
        if not start:
            return iter(guarded(reader, path))
        try:
            begins_anywhere = "start" in inspect.signature(reader).parameters
        except (TypeError, ValueError):
            begins_anywhere = False
        if begins_anywhere:
            return iter(guarded(partial(reader, path, start=start)))
        return islice(iter(guarded(reader, path)), start, None)

    def next_raw(self) -> Record:
        try:
            sample = super().next_raw()
        except StopIteration:
            raise
        except Exception as error:
            note_place(error, self._path, self._taken)
            raise
        self._taken += 1
        return Record((self._path, sample, self._taken - 1))

    def state(self) -> int:
        return self._taken
