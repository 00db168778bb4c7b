"""The options of a loader: what is legal, and the error for what is not. Checked once, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import numpy as np

from agnoload.backend.registry import get_backend
from agnoload.batching.ragged_collate import ragged_collate
from agnoload.datasets import refuse_table
from agnoload.errors import OptionError, warn
from agnoload.fetching.error_policy import Retry, check_max_failed, check_retry
from agnoload.seeding import check_seed
from agnoload.streams import is_stream
from agnoload.system import method_of
from agnoload.validate import brief, flag, integer, name_of, number, positive, word


@dataclass(frozen=True, slots=True)
class Options:
    """What `DataLoader` was given, under the same names; `OptionError` for the first option that cannot work.

    Values have plain types afterwards (a NumPy bool is a bool), and the options are still those that a loader can be
    built from. `dataclasses.replace` makes a twin, which is checked as well.
    """

    dataset: Any
    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    num_workers: int | str = 0
    collate_fn: Callable[[Any], Any] | None = None
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], object] | None = None
    multiprocessing_context: Any = None
    generator: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True
    backend: Any = "numpy"
    """A `Backend`, whatever was given."""
    device: Any = None
    seed: int | None = None
    worker_type: str = "process"
    on_error: Any = "raise"
    max_worker_restarts: int = 0
    retry: Retry | None = None
    max_failed: int | float | None = None
    stream: bool = field(init=False)
    """Whether the dataset is iterated rather than indexed."""

    def __post_init__(self) -> None:
        sampled = self.sampler is not None or self.batch_sampler is not None
        object.__setattr__(self, "stream", _is_stream(self.dataset, sampled))
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        method_of(self.multiprocessing_context)
        if not isinstance(self.pin_memory_device, str):
            raise OptionError(f"pin_memory_device must be a str, got {self.pin_memory_device!r}")
        if self.collate_fn is ragged_collate:
            raise OptionError("collate_fn must be what ragged_collate returns, got ragged_collate itself: call it")
        if self.seed is not None and self.generator is not None:
            raise OptionError("seed and generator exclude each other: a generator gives the seed")
        self._check_order()

    def _check_order(self) -> None:
        """Sampler, shuffle, batch size: torch's rules of exclusion, and what a stream rules out."""
        if self.stream:
            if self.shuffle:
                raise OptionError(
                    "shuffle=True needs a dataset with indices: shuffle a stream through a buffer with "
                    "dataset.shuffle(buffer_size) (agnoload.IterableDataset has it)"
                )
            for name in ("sampler", "batch_sampler"):
                if (value := getattr(self, name)) is not None:
                    raise OptionError(
                        f"{name} needs a dataset with indices, but a stream has an order of its own: got {value!r}"
                    )
        if self.sampler is not None and self.shuffle:
            raise OptionError("sampler and shuffle=True exclude each other: the sampler decides the order")
        if getattr(self.sampler, "yields_batches", False):
            raise OptionError(
                f"sampler must yield indices, got {self.sampler!r}, which yields batches: pass it as batch_sampler"
            )
        if self.batch_sampler is not None:
            options = (
                ("batch_size", self.batch_size, self.batch_size != 1),
                ("shuffle", self.shuffle, self.shuffle),
                ("sampler", self.sampler, self.sampler is not None),
                ("drop_last", self.drop_last, self.drop_last),
            )
            if given := [f"{name}={value!r}" for name, value, is_given in options if is_given]:
                raise OptionError(
                    f"batch_sampler excludes batch_size, shuffle, sampler and drop_last, got {', '.join(given)}"
                )
        elif self.batch_size is None and self.drop_last:
            raise OptionError(
                "batch_size=None and drop_last=True exclude each other: without batches none can be incomplete"
            )

    @property
    def prefetch(self) -> int:
        """Batches under way for each worker."""
        return 2 if self.prefetch_factor is None else self.prefetch_factor

    @property
    def batched(self) -> bool:
        """Whether samples are collated into batches."""
        return self.batch_size is not None

    @property
    def cut_size(self) -> int | None:
        """Samples in each batch that the loader cuts; None with a batch sampler or without batches."""
        return self.batch_size if self.batch_sampler is None else None

    def arguments(self) -> dict[str, Any]:
        """What a loader with the same options is built from."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def describe(self, workers: str) -> list[str]:
        """The options that matter to a reader, for a repr."""
        words = [brief(self.dataset), f"batch_size={self.batch_size}"]
        if self.batch_sampler is not None:
            words[1] = f"batch_sampler={brief(self.batch_sampler)}"
        if self.shuffle:
            words.append("shuffle=True")
        if self.sampler is not None:
            words.append(f"sampler={brief(self.sampler)}")
        words.append(workers)
        if self.collate_fn is not None:
            words.append(f"collate_fn={name_of(self.collate_fn)}")
        usual = {"worker_type": "process", "drop_last": False, "on_error": "raise"}
        words += [f"{name}={getattr(self, name)!r}" for name in usual if getattr(self, name) != usual[name]]
        if self.backend.name != "numpy":
            words.append(f"backend={self.backend.name!r}")
        return words if self.device is None else [*words, f"device={self.device!r}"]

    def warn(self) -> None:
        """One warning for each option that works, but probably not as the user expects."""
        if self.pin_memory_device and self.device is None:
            warn("pin_memory_device does nothing: pinned memory serves every device. Use device= to have batches there")
        arrays = self.dataset
        if type(arrays) is not tuple or not all(isinstance(array, np.ndarray) and array.ndim for array in arrays):
            return
        if len({len(array) for array in arrays}) == 1 < len({array.shape for array in arrays}):  # fields of samples
            warn(
                f"the dataset is a tuple of {len(self.dataset)} arrays, so each whole array is one sample: for one "
                "sample a row, make it agnoload.ArrayDataset(*arrays)"
            )


V = TypeVar("V")


class Option(Generic[V]):
    """An attribute of a loader that shows the option, or the attribute of `Options`, of that name."""

    def __init__(self, text: str, name: str = "") -> None:
        self.__doc__ = text
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._public, self._name = name, self._name or name

    def __get__(self, loader: Any, owner: Any = None) -> V:
        value: Any = self if loader is None else getattr(loader._options, self._name)
        return value  # type: ignore[no-any-return]

    def __set__(self, loader: Any, value: Any) -> None:
        raise AttributeError(f"{self._public} cannot be changed: make a new DataLoader")


def callable_or_none(name: str, value: Any) -> Any:
    """A function, or None."""
    if value is not None and not callable(value):
        raise OptionError(f"{name} must be callable or None, got {value!r}")
    return value


def _sampler(name: str, value: Any) -> Any:
    if value is not None and (isinstance(value, type) or not hasattr(value, "__iter__")):
        raise OptionError(f"{name} must be iterable, got {type(value).__name__}: {value!r}")
    if isinstance(value, np.ndarray) and value.dtype == bool:
        raise OptionError(f"{name} must give indices, got a mask: use agnoload.Subset(dataset, mask)")
    return value


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "batch_size": _or_none(lambda name, value: integer(name, value, 1, "a positive int or None")),
    "shuffle": _or_none(flag),
    "sampler": _sampler,
    "batch_sampler": _sampler,
    "num_workers": lambda name, value: (
        value if isinstance(value, str) and value == "auto" else integer(name, value, 0, "a non-negative int or 'auto'")
    ),
    "collate_fn": callable_or_none,
    "pin_memory": flag,
    "drop_last": flag,
    "timeout": lambda name, value: number(name, value, 0, "a number of seconds, not negative (0: no limit)"),
    "worker_init_fn": callable_or_none,
    "prefetch_factor": _or_none(positive),
    "persistent_workers": flag,
    "in_order": flag,
    "backend": lambda name, value: get_backend(value),
    "seed": _or_none(lambda name, value: check_seed(value)),
    "worker_type": lambda name, value: word(name, value, ("process", "thread")),
    "on_error": lambda name, value: (
        value if callable(value) else word(name, value, ("raise", "skip", "replace"), "a callable")
    ),
    "max_worker_restarts": lambda name, value: integer(name, value, 0, "a non-negative int"),
    "retry": check_retry,
    "max_failed": check_max_failed,
}
"""For each option that can be checked by itself: what normalises it, or raises."""


def _is_stream(dataset: Any, sampled: bool) -> bool:
    """Whether a dataset is iterated rather than indexed; `sampled`: a sampler gives its keys."""
    kind = type(dataset).__name__
    if isinstance(dataset, type):
        raise OptionError(f"dataset must be an object, got a class: create one, {dataset.__name__}(...)")
    if isinstance(dataset, (str, bytes)):
        raise OptionError(
            f"dataset must hold samples, got the {kind} {dataset!r:.80}: for the lines of a file "
            "use agnoload.FileStream([path], agnoload.read_lines)"
        )
    if is_stream(dataset):
        return True
    if not hasattr(dataset, "__getitem__"):
        raise OptionError(f"dataset must have __getitem__ and __len__, or __iter__, got {kind}: {dataset!r}")
    refuse_table(dataset, "DataLoader")
    if sampled:
        return False
    if not hasattr(dataset, "__len__"):
        raise OptionError(f"a dataset with __getitem__ needs __len__ too, or a sampler: {kind} has neither")
    try:
        length = len(dataset)
    except TypeError as error:
        raise OptionError(f"len(dataset) must give the number of samples, but {kind} raises: {error}") from None
    if type(dataset) is dict and (missing := [key for key in range(length) if key not in dataset]):
        raise OptionError(
            f"a dict as dataset needs the keys 0 to {length - 1}, or a sampler of its keys; it has no {missing[0]}. "
            "For arrays by name use agnoload.ArrayDataset(**arrays)"
        )
    return False
