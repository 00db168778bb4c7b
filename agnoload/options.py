"""The options of a loader: what is legal, and what each illegal one is told. Decided once, in the constructor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agnoload.batching.ragged_collate import ragged_collate
from agnoload.datasets import refuse_table
from agnoload.errors import AgnoloadWarning, OptionError
from agnoload.fetching.error_policy import Retry, check_max_failed, check_retry
from agnoload.pools.launcher import method_of
from agnoload.seeding import check_seed
from agnoload.streams import is_stream
from agnoload.validate import flag, integer, number, word


@dataclass(frozen=True, slots=True)
class Options:
    """The options after their check, with defaults filled in."""

    dataset: Any
    stream: bool
    batch_size: int | None
    shuffle: bool
    sampler: Any
    batch_sampler: Any
    num_workers: int | None
    """None: to be chosen."""
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    drop_last: bool
    timeout: float | None
    worker_init_fn: Callable[[int], object] | None
    context: Any
    generator: Any
    prefetch_factor: int
    persistent_workers: bool
    in_order: bool
    device: Any
    seed: int | None
    worker_type: str
    on_error: Any
    max_worker_restarts: int
    retry: Retry | None
    max_failed: int | float | None


def check_options(
    *,
    dataset: Any,
    batch_size: Any,
    shuffle: Any,
    sampler: Any,
    batch_sampler: Any,
    num_workers: Any,
    collate_fn: Any,
    pin_memory: Any,
    drop_last: Any,
    timeout: Any,
    worker_init_fn: Any,
    multiprocessing_context: Any,
    generator: Any,
    prefetch_factor: Any,
    persistent_workers: Any,
    pin_memory_device: Any,
    in_order: Any,
    device: Any,
    seed: Any,
    worker_type: Any,
    on_error: Any,
    max_worker_restarts: Any,
    retry: Any,
    max_failed: Any,
) -> Options:
    """Check every option by itself and against the others; `OptionError` for the first that cannot work."""
    stream = _is_stream(dataset, sampler is not None or batch_sampler is not None)
    if batch_size is not None:
        batch_size = integer("batch_size", batch_size, 1, "a positive int or None")
    if shuffle is not None:
        shuffle = flag("shuffle", shuffle)
    drop_last = flag("drop_last", drop_last)
    check_callable("collate_fn", collate_fn)
    check_callable("worker_init_fn", worker_init_fn)
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None and (isinstance(value, type) or not hasattr(value, "__iter__")):
            raise OptionError(f"{name} must be iterable, got {type(value).__name__}: {value!r}")
        if isinstance(value, np.ndarray) and value.dtype == bool:
            raise OptionError(f"{name} must give indices, got a mask: use agnoload.Subset(dataset, mask)")
    if collate_fn is ragged_collate:
        raise OptionError("collate_fn must be what ragged_collate makes, got it itself: call it, ragged_collate()")
    if stream:
        _check_stream(shuffle, sampler, batch_sampler)
    if sampler is not None and shuffle:
        raise OptionError("sampler and shuffle=True exclude each other: the sampler says the order")
    if batch_sampler is not None:
        _check_batch_sampler(batch_size, shuffle, sampler, drop_last)
        batch_size = None
    elif batch_size is None and drop_last:
        raise OptionError(
            "batch_size=None and drop_last=True exclude each other: there are no batches to be incomplete"
        )
    if getattr(sampler, "yields_batches", False):
        raise OptionError(
            f"sampler must yield indices, got {sampler!r}, which yields batches: pass it as batch_sampler"
        )
    if not callable(on_error):
        word("on_error", on_error, ("raise", "skip", "replace"), "a callable")
    word("worker_type", worker_type, ("process", "thread"))
    if seed is not None:
        seed = check_seed(seed)
        if generator is not None:
            raise OptionError("seed and generator exclude each other: a generator gives the seed")
    method_of(multiprocessing_context)
    if not isinstance(pin_memory_device, str):
        raise OptionError(f"pin_memory_device must be a str, got {pin_memory_device!r}")
    if pin_memory_device and device is None:
        _warn("pin_memory_device does nothing: pinned memory serves every device. Use device= to have batches there")
    return Options(
        dataset=dataset,
        stream=stream,
        batch_size=batch_size,
        shuffle=bool(shuffle),
        sampler=sampler,
        batch_sampler=batch_sampler,
        num_workers=_workers(num_workers),
        collate_fn=collate_fn,
        pin_memory=flag("pin_memory", pin_memory),
        drop_last=drop_last,
        timeout=number("timeout", timeout, 0, "a number of seconds, not negative (0: no limit)") or None,
        worker_init_fn=worker_init_fn,
        context=multiprocessing_context,
        generator=generator,
        prefetch_factor=2
        if prefetch_factor is None
        else integer("prefetch_factor", prefetch_factor, 1, "a positive int"),
        persistent_workers=flag("persistent_workers", persistent_workers),
        in_order=flag("in_order", in_order),
        device=device,
        seed=seed,
        worker_type=worker_type,
        on_error=on_error,
        max_worker_restarts=integer("max_worker_restarts", max_worker_restarts, 0, "a non-negative int"),
        retry=check_retry(retry),
        max_failed=check_max_failed(max_failed),
    )


def check_callable(name: str, value: Any) -> None:
    """`OptionError` for what cannot be called, unless it is None."""
    if value is not None and not callable(value):
        raise OptionError(f"{name} must be callable or None, got {value!r}")


def _is_stream(dataset: Any, sampled: bool) -> bool:
    """Whether a dataset is iterated rather than indexed."""
    if isinstance(dataset, type):
        raise OptionError(f"dataset must be an object, got a class: make one of it, {dataset.__name__}(...)")
    if isinstance(dataset, (str, bytes)):
        raise OptionError(
            f"dataset must hold samples, got the {type(dataset).__name__} {dataset!r:.80}: for the lines of a file "
            "give agnoload.FileStream([path], agnoload.read_lines)"
        )
    if is_stream(dataset):
        return True
    if hasattr(dataset, "__getitem__"):
        refuse_table(dataset, "DataLoader")
        if not hasattr(dataset, "__len__") and not sampled:
            raise OptionError(
                f"a dataset with __getitem__ must have __len__ too, or come with a sampler: {type(dataset).__name__} "
                "does neither"
            )
        if not sampled:
            _check_length(dataset)
        if type(dataset) is dict and not sampled:
            _check_keys(dataset)
        elif type(dataset) is tuple and _are_columns(dataset):
            _warn(
                f"the dataset is a tuple of {len(dataset)} arrays, so each whole array is one sample: for one sample a "
                "row, make it agnoload.ArrayDataset(*arrays)"
            )
        return False
    raise OptionError(
        f"dataset must have __getitem__ and __len__, or __iter__, got {type(dataset).__name__}: {dataset!r}"
    )


def _check_length(dataset: Any) -> None:
    try:
        len(dataset)
    except TypeError as error:
        raise OptionError(
            f"len(dataset) must give the number of samples, but that of {type(dataset).__name__} fails: {error}"
        ) from None


def _check_keys(dataset: dict[Any, Any]) -> None:
    if missing := [key for key in range(len(dataset)) if key not in dataset]:
        raise OptionError(
            f"a dict as dataset must have the keys 0 to {len(dataset) - 1}, or come with a sampler of its keys; it has "
            f"no {missing[0]}. Arrays by name are agnoload.ArrayDataset(**arrays)"
        )


def _are_columns(arrays: tuple[Any, ...]) -> bool:
    """Whether they look like the fields of samples: as many rows, but not of one shape."""
    if not all(isinstance(array, np.ndarray) and array.ndim for array in arrays):
        return False
    return len({len(array) for array in arrays}) == 1 < len({array.shape for array in arrays})


def _check_stream(shuffle: Any, sampler: Any, batch_sampler: Any) -> None:
    if shuffle:
        raise OptionError(
            "shuffle=True needs a dataset with indices: shuffle a stream through a buffer with "
            "dataset.shuffle(buffer_size) (agnoload.IterableDataset has it)"
        )
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None:
            raise OptionError(f"{name} needs a dataset with indices, a stream comes in its own order: got {value!r}")


def _check_batch_sampler(batch_size: Any, shuffle: Any, sampler: Any, drop_last: bool) -> None:
    given = [
        f"{name}={value!r}"
        for name, value, default in (
            ("batch_size", batch_size, (1,)),
            ("shuffle", shuffle, (None, False)),
            ("sampler", sampler, (None,)),
            ("drop_last", drop_last, (False,)),
        )
        if not any(value is d or (isinstance(value, (int, bool)) and value == d) for d in default)
    ]
    if given:
        raise OptionError(f"batch_sampler excludes batch_size, shuffle, sampler and drop_last, got {', '.join(given)}")


def _workers(value: Any) -> int | None:
    if isinstance(value, str) and value == "auto":
        return None
    return integer("num_workers", value, 0, "a non-negative int or 'auto'")


def _warn(text: str) -> None:
    warnings.warn(text, AgnoloadWarning, stacklevel=4)
