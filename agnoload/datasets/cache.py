"""Decoded samples kept in memory, once for all workers.

The memory holds a page of counters, a table of one int64 a sample (where its record begins, 0: nowhere) and the records
one behind the other. Records are only ever added, under a lock that the kernel takes from a process that dies; a record
counts from the moment that its place is written into the table, which is the last step, so a death before it loses
nothing but that record. Readers take no lock: a sample that was kept costs one copy, and that copy is thrown away if
the cache was cleared meanwhile.

Nothing is ever pushed out. An epoch visits every sample once, and there to push out the least recently used one would
mean to push out each sample shortly before it is wanted.
"""

from __future__ import annotations

import mmap
import pickle
import warnings
from threading import get_native_id
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt

from agnoload._types import Samples
from agnoload.datasets.base import Dataset, checked_index, length_of
from agnoload.errors import AgnoloadWarning, one_line
from agnoload.inspect import walk_objects
from agnoload.transport.memory import SharedFile, is_sending
from agnoload.validate import brief, number_of, positive

T_co = TypeVar("T_co", covariant=True)

ALIGNMENT = 64
GENERATION, END = range(2)
"""The first words of the page of counters: a number that every clear() changes, odd while one runs (or has died), and
where the next record goes."""
COUNTS = 255
HITS, MISSES = range(2)
"""The other words: how often a sample was there or not, counted by each thread in a place of its own, without a lock.
A thread's place is its number modulo `COUNTS`, so a count is lost only if two that share a place write at once."""


class CachedDataset(Dataset[T_co]):
    """`dataset` with its samples kept in memory once they were loaded: one copy, shared by all workers.

    Put it around what is slow and always the same (reading, decoding) and what is random behind it, with `map`: a
    random number drawn inside is kept like all else. At most `max_bytes` of samples are kept, those that come first;
    the others are loaded each time. A sample that was kept comes as a copy which its caller may write to; it must
    pickle. `hits`, `misses` and `nbytes` count over all workers and can be read in any process, `clear()` forgets all
    samples. A copy made by pickling starts empty, but for the workers of a loader.

    >>> import numpy as np
    >>> loads = []
    >>> class Slow(Dataset[np.ndarray]):
    ...     def __len__(self): return 2
    ...     def __getitem__(self, index):
    ...         loads.append(index)
    ...         return np.full(3, index)
    >>> cached = CachedDataset(Slow(), max_bytes=1 << 20)
    >>> [int(cached[index].sum()) for index in (0, 1, 0, 1)], loads, cached.hits
    ([0, 3, 0, 3], [0, 1], 2)
    """

    def __init__(self, dataset: Samples[T_co], max_bytes: int) -> None:
        self.dataset: Any = dataset
        self.max_bytes = positive("max_bytes of CachedDataset", max_bytes)
        self._length = length_of(dataset, "CachedDataset")
        self._map_memory(None)

    def _map_memory(self, shared: SharedFile | None) -> None:
        self._start = mmap.PAGESIZE * (1 + -(-8 * self._length // mmap.PAGESIZE))
        fresh = shared is None
        self._shared = shared or SharedFile(self._start + self.max_bytes)
        words = self._shared.bytes[: self._start].view(np.int64)
        self._counters = words[:2]
        self._counts = words[2 : 2 + 2 * COUNTS].reshape(2, COUNTS)
        self._table = words[mmap.PAGESIZE // 8 :][: self._length]
        self._warned = False
        if fresh:
            self._counters[END] = self._start

    @property
    def hits(self) -> int:
        """How many samples were found here, by all workers."""
        return int(self._counts[HITS].sum())

    @property
    def misses(self) -> int:
        """How many samples had to be loaded, by all workers."""
        return int(self._counts[MISSES].sum())

    @property
    def nbytes(self) -> int:
        """The bytes of the samples kept; never more than `max_bytes`. The table takes another 8 bytes a sample."""
        return int(self._counters[END]) - self._start

    def clear(self) -> None:
        """Forget all samples, in all workers, give their memory back and count from 0.

        Workers may load meanwhile: a sample whose loading began before is delivered, and not kept.
        """
        with self._shared.locked():
            self._counters[GENERATION] |= 1  # odd: readers throw their copies away, also those made from here on
            self._table[:] = 0
            self._counts[:] = 0
            self._counters[END] = self._start
            self._shared.forget(self._start, self._shared.nbytes)
            self._counters[GENERATION] += 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any, /) -> T_co:
        place = checked_index(index, self._length, "a CachedDataset")
        generation = int(self._counters[GENERATION])
        start = int(self._table[place])
        if start:
            memory = self._shared.bytes
            size = int(memory[start : start + 8].view(np.int64)[0])
            record = memory[start : start + size].copy()
            # A clear() in another process may have replaced what was copied, the size included.
            if generation % 2 == 0 and generation == self._counters[GENERATION]:
                self._counts[HITS, get_native_id() % COUNTS] += 1
                return _decode(record)  # type: ignore[no-any-return]
        self._counts[MISSES, get_native_id() % COUNTS] += 1
        sample = self.dataset[place]
        self._keep(place, sample, generation)
        return sample  # type: ignore[no-any-return]

    def _keep(self, place: int, sample: Any, generation: int) -> None:
        try:
            size, pieces = _encode(sample)
        except Exception as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "CachedDataset cannot keep samples that do not pickle, and loads them each time: "
                    f"{one_line(error)}",
                    AgnoloadWarning,
                    stacklevel=3,
                )
            return
        if self.nbytes + size > self.max_bytes:  # a full cache takes no lock
            return
        with self._shared.locked():
            start = int(self._counters[END])
            fits = start + size <= self._shared.nbytes
            if not fits or self._table[place] or generation != self._counters[GENERATION]:
                return
            for offset, piece in pieces:
                self._shared.bytes[start + offset : start + offset + len(piece)] = piece
            # In this order: if a process dies in between, the record is lost, but nothing is written over it.
            self._counters[END] = start + size
            self._table[place] = start

    def __getstate__(self) -> dict[str, Any]:
        views = {"_counters", "_counts", "_table"} | (set() if is_sending() else {"_shared"})
        return {name: value for name, value in self.__dict__.items() if name not in views}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_memory(state.get("_shared"))

    def __repr__(self) -> str:
        used = f"{self.nbytes} of {self.max_bytes} bytes"
        return f"CachedDataset({brief(self.dataset)}, {used}, {number_of(self.hits, 'hit')})"


def _encode(sample: Any) -> tuple[int, list[tuple[int, Any]]]:
    """The size of a sample's record, and its pieces, each with the place where it begins.

    The first piece lists the size of the record, that of the pickle, the number of arrays, and where each of these
    begins and ends; the pickle follows, and the arrays.
    """
    found: list[pickle.PickleBuffer] = []
    try:
        header = pickle.dumps(sample, 5, buffer_callback=found.append)
    except Exception:  # a class of the user's program or of a notebook, which only travels by value
        found.clear()
        header = cloudpickle.dumps(sample, 5, buffer_callback=found.append)
    words = np.zeros(3 + 2 * len(found), np.int64)
    pieces: list[tuple[int, Any]] = [(0, words.view(np.uint8)), (words.nbytes, np.frombuffer(header, np.uint8))]
    end = words.nbytes + len(header)
    for place, buffer in enumerate(found):
        start = end + -end % ALIGNMENT
        pieces.append((start, buffer.raw()))
        end = start + len(pieces[-1][1])
        words[3 + 2 * place : 5 + 2 * place] = start, end
    words[:3] = end + -end % ALIGNMENT, len(header), len(found)
    return int(words[0]), pieces


def _decode(record: npt.NDArray[np.uint8]) -> Any:
    memory = record.data
    length, count = record[8:24].view(np.int64).tolist()
    start = 24 + 16 * count
    bounds = record[24:start].view(np.int64).reshape(count, 2).tolist()
    return pickle.loads(memory[start : start + length], buffers=[memory[low:high] for low, high in bounds])


def find_caches(dataset: Any) -> list[CachedDataset[Any]]:
    """Every `CachedDataset` within a dataset."""
    return [thing for _, thing, _ in walk_objects({"dataset": dataset}) if issubclass(type(thing), CachedDataset)]
