"""Whether a loader goes on from every place as if it had never stopped."""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agnoload.backend import registry
from agnoload.batching.tree import map_leaves, path_text, walk
from agnoload.errors import AgnoloadWarning, StateError
from agnoload.pools.launcher import kept_server
from agnoload.testing._require import require
from agnoload.validate import number_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agnoload.loader import DataLoader

WORKERS = (0, 2, 1)
"""Loaders are stopped and resumed with these numbers of workers in turn."""


def check_resume(make_loader: Callable[..., DataLoader[Any]]) -> None:
    """Check that a loader resumes exactly, at every batch; `make_loader()` makes a fresh, equal loader at each call.

    If it takes `num_workers`, loaders with 0, 1 and 2 workers go on from each other's states. After each of 0, 1, ...
    batches of an epoch a state is taken, sent through JSON, restored, taken again (it must be equal), and everything
    that follows up to the end of the next epoch is compared with an unbroken run, bit by bit. Three stops in one epoch
    are as none. Loaders must end by themselves; out of order, batches are compared as a set. `AssertionError` says
    what differs, and where. It runs through some n * n / 2 batches: use a small dataset.

    >>> import agnoload
    >>> check_resume(lambda: agnoload.DataLoader(range(10), 4, shuffle=True))
    """
    make, varied = _maker(make_loader)
    with make(0) as one, make(0) as other:
        require(one is not other, "make_loader must make a fresh loader at each call, but it gave the same one twice")
    with kept_server(), warnings.catch_warnings():
        warnings.simplefilter("ignore", AgnoloadWarning)  # that a stream is read again, say
        whole, states = _unbroken(make, WORKERS[0], None)
        runs = [(whole, states)]
        if varied:
            runs.append(_stop_with_workers(make, whole, states))
        for k in range(len(states)):
            run, found = runs[k % len(runs)]
            _resume_at(make, WORKERS[k % 3] if varied else 0, run, k, found[k])
        _chain(make, varied, whole, states)


class _Run(NamedTuple):
    """What an unbroken loader gave in two epochs: batches as comparable values."""

    epochs: list[list[Any]]
    in_order: bool

    def after(self, k: int) -> dict[str, list[Any]]:
        """What follows when `k` batches of epoch 0 have been delivered: of each epoch that is not over.

        One without a batch is not over before it was gone through.
        """
        left = {} if k and k >= len(self.epochs[0]) else {"what is left of the epoch": self.epochs[0][k:]}
        return left | {"the next epoch": self.epochs[1]}


def _maker(make_loader: Callable[..., DataLoader[Any]]) -> tuple[Callable[[int], DataLoader[Any]], bool]:
    """A function of the number of workers, and whether that number is taken up."""
    parameters = inspect.signature(make_loader).parameters.values()
    if any(p.name == "num_workers" or p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda workers: make_loader(num_workers=workers), True
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        return make_loader, True
    return lambda workers: make_loader(), False


def _plain(state: Any) -> Any:
    """A state as it comes out of a file."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"a state must be what json.dumps takes, but {error}: {state!r:.400}") from error


@contextmanager
def _refused(where: str) -> Iterator[None]:
    """A state that the loader itself, its sampler or its stream does not take."""
    try:
        yield
    except StateError as error:
        raise AssertionError(f"{where}: {error}") from error


@contextmanager
def _open(make: Callable[[int], DataLoader[Any]], workers: int, state: Any) -> Iterator[DataLoader[Any]]:
    """A fresh loader that goes on from a state, and has it."""
    with make(workers) as loader:
        if state is not None:
            loader.load_state_dict(_plain(state))
            again = _plain(loader.state_dict())
            require(again == state, f"a state that is restored and taken again must be equal: {state} became {again}")
        yield loader


def _unbroken(make: Callable[[int], DataLoader[Any]], workers: int, state: Any) -> tuple[_Run, list[Any]]:
    """Two epochs without a stop, and a state after each number of batches of the first, and after its end."""
    with _open(make, workers, state) as loader:
        states = [_plain(loader.state_dict())]
        epochs: list[list[Any]] = [[], []]
        for batch in loader:
            epochs[0].append(comparable(batch))
            states.append(_plain(loader.state_dict()))
        states.append(_plain(loader.state_dict()))
        if _is_map(states[0]):  # the end of a stream is not known before
            require(
                states[-1] == states[-2], "the state after the last batch must not change when the loop sees the end"
            )
        require(states[-1]["epoch"] == states[0]["epoch"] + 1, "the state after the end must be that of the next epoch")
        epochs[1] += [comparable(batch) for batch in loader]
        return _Run(epochs, loader.in_order), states


def _is_map(state: Any) -> bool:
    return bool(state["facts"]["kind"] == "map")


def _stop_with_workers(
    make: Callable[[int], DataLoader[Any]], whole: _Run, states: list[Any]
) -> tuple[_Run, list[Any]]:
    """An unbroken run with workers and its states: what was prefetched must not show."""
    run, found = _unbroken(make, WORKERS[1], states[0])
    where = f"with {WORKERS[1]} workers instead of {WORKERS[0]}"
    for name, batches, wanted in zip(("the first epoch", "the next epoch"), run.epochs, whole.epochs, strict=True):
        _compare(batches, wanted, whole.in_order, f"{where}, {name}")
    if whole.in_order and _is_map(states[0]):
        for k, (one, other) in enumerate(zip(found, states, strict=True)):
            require(
                one == other,
                f"the state after {number_of(k, 'batch')} must not depend on the workers: {one}, and {other}",
            )
    return run, found


def _resume_at(make: Callable[[int], DataLoader[Any]], workers: int, run: _Run, k: int, state: Any) -> None:
    """Compare with what followed in the run that the state is of: out of order, others had other batches left."""
    where = f"after a stop at batch {k} of {len(run.epochs[0])}, with {workers} workers"
    with _refused(where), _open(make, workers, state) as loader:
        for name, wanted in run.after(k).items():
            _compare([comparable(batch) for batch in loader], wanted, run.in_order, f"{where}, {name}")


def _chain(make: Callable[[int], DataLoader[Any]], varied: bool, whole: _Run, states: list[Any]) -> None:
    """Three stops in one epoch."""
    n = len(whole.epochs[0])
    stops = sorted({n // 4, n // 2, 3 * n // 4})
    state, found = states[0], []
    for number, (start, stop) in enumerate(zip([0, *stops], [*stops, n], strict=True)):
        workers = WORKERS[number % 3] if varied else 0
        with _refused(f"with stops at {stops}, batches {start} to {stop}"), _open(make, workers, state) as loader:
            batches = iter(loader)
            found += [comparable(next(batches)) for _ in range(stop - start)]
            state = _plain(loader.state_dict())
            reached = {name: state[name] for name in ("epoch", "position")}
            wanted = {name: states[stop][name] for name in ("epoch", "position")}
            # Out of order it depends on which batches were ready first, and whether a stream is known to be at its end
            # on whether its end has come; what follows is compared all the same.
            require(
                reached == wanted or not whole.in_order or (stop == n and not _is_map(state)),
                f"after {number_of(stop, 'batch')} in {number_of(number + 1, 'part')} "
                f"the state has {reached}, not {wanted}",
            )
            if stop == n:
                _compare(found, whole.epochs[0], whole.in_order, f"with stops at {stops}")
    where = f"after stops at {stops}"
    with _refused(where), _open(make, WORKERS[0], state) as loader:
        for name, expected in whole.after(n).items():
            _compare([comparable(batch) for batch in loader], expected, whole.in_order, f"{where}, {name}")


class _Leaf(NamedTuple):
    """One leaf of a batch, copied, in a form that compares bit by bit."""

    path: str
    kind: str
    shape: tuple[int, ...]
    content: Any
    shown: str

    def __str__(self) -> str:
        return f"{self.kind} {self.shape} {self.shown:.80}"


def comparable(batch: Any) -> tuple[str, list[_Leaf]]:
    """The structure of a batch and its leaves."""
    structure = repr(map_leaves(lambda _: ..., batch))
    return structure, [_leaf(path_text(path), leaf) for path, leaf in walk(batch)]


def _leaf(path: str, leaf: Any) -> _Leaf:
    array = leaf if isinstance(leaf, (np.ndarray, np.generic)) else registry.to_numpy(leaf)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if array is not None and not array.dtype.hasobject:
        return _Leaf(
            path, f"{kind} of {array.dtype}", array.shape, array.tobytes(), str(array.reshape(-1)[:8].tolist())
        )
    text = repr(leaf)
    try:
        return _Leaf(path, kind, (), pickle.dumps(leaf), text)
    except Exception:
        return _Leaf(path, kind, (), text, text)


def _compare(some: list[Any], others: list[Any], in_order: bool, where: str) -> None:
    require(len(some) == len(others), f"{where}: {number_of(len(some), 'batch')} came, not {len(others)}")
    sides = (some, others) if in_order else (sorted(some, key=repr), sorted(others, key=repr))
    for number, (one, other) in enumerate(zip(*sides, strict=True)):
        require(one[0] == other[0], f"{where}: batch {number} is {one[0]}, not {other[0]}")
        for leaf, right in zip(one[1], other[1], strict=True):
            name = repr(leaf.path) if leaf.path else "the content"
            require(leaf == right, f"{where}: {name} of batch {number} must be {right}, but it is {leaf}")
