"""Whether a loader resumes from every place as if it had never stopped."""

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
from agnoload.pools.preload import kept_server
from agnoload.testing._require import require
from agnoload.validate import number_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agnoload.loader import DataLoader

    _Make = Callable[[int], DataLoader[Any]]

WORKERS = (0, 2, 1)
"""Loaders are stopped and resumed with these numbers of workers in turn."""


def check_resume(make_loader: Callable[..., DataLoader[Any]]) -> None:
    """Check that a loader resumes exactly, at every batch; `make_loader()` makes a fresh, equal loader at each call.

    If it takes `num_workers`, loaders with 0, 1 and 2 workers resume from each other's states. After each of 0, 1, ...
    batches of an epoch a state is taken, sent through JSON, restored and taken again (it must be equal), and everything
    that follows up to the end of the next epoch is compared with an unbroken run, bit by bit. Three stops in one epoch
    must change nothing. Loaders must end by themselves; out of order, batches are compared as a set. `AssertionError`
    says what differs, and where. It loads some n * n / 2 batches: use a small dataset.

    >>> import agnoload
    >>> check_resume(lambda: agnoload.DataLoader(range(10), 4, shuffle=True))
    """
    make, workers = _maker(make_loader)
    with make(0) as one, make(0) as other:
        require(one is not other, "make_loader must make a fresh loader at each call, but it gave the same one twice")
    with kept_server(), warnings.catch_warnings():
        warnings.simplefilter("ignore", AgnoloadWarning)  # such as that a stream is read again
        whole = _unbroken(make, workers[0], None)
        runs = [whole]
        if len(workers) > 1:
            runs.append(_unbroken(make, workers[1], whole.states[0]))
            where = f"with {workers[1]} workers instead of {workers[0]}"
            for name, batches, wanted in zip(
                ("the first epoch", "the next epoch"), runs[1].epochs, whole.epochs, strict=True
            ):
                whole.same(batches, wanted, f"{where}, {name}")
            if whole.in_order and whole.is_map:  # what was prefetched must not show in a state
                text = "the states after each batch must not depend on the workers"
                require(runs[1].states == whole.states, f"{text}: {runs[1].states}, and {whole.states}")
        for k in range(len(whole.states)):
            # What follows is that of the run that the state is of: out of order, others had other batches left.
            number, run = workers[k % len(workers)], runs[k % len(runs)]
            where = f"after a stop at batch {k} of {len(run.epochs[0])}, with {number} workers"
            with _open(make, number, run.states[k], where) as loader:
                run.compare(loader, k, where)
        _chain(make, workers, whole)


class _Run(NamedTuple):
    """What an unbroken loader gave in two epochs, as comparable values, and its states.

    There is a state before each batch of the first epoch, one after the last, and one after the end of the loop.
    """

    epochs: list[list[Any]]
    states: list[Any]
    in_order: bool

    @property
    def is_map(self) -> bool:
        return bool(self.states[0]["facts"]["kind"] == "map")

    def compare(self, loader: DataLoader[Any], k: int, where: str) -> None:
        """Load what follows `k` batches of the first epoch, to the end of the second; an empty epoch is loaded, too."""
        if k == 0 or k < len(self.epochs[0]):
            self.same(
                [comparable(batch) for batch in loader], self.epochs[0][k:], f"{where}, what is left of the epoch"
            )
        self.same([comparable(batch) for batch in loader], self.epochs[1], f"{where}, the next epoch")

    def same(self, some: list[Any], others: list[Any], where: str) -> None:
        require(len(some) == len(others), f"{where}: {number_of(len(some), 'batch')} came, not {len(others)}")
        sides = (some, others) if self.in_order else (sorted(some, key=repr), sorted(others, key=repr))
        for number, (one, other) in enumerate(zip(*sides, strict=True)):
            require(one[0] == other[0], f"{where}: batch {number} is {one[0]}, not {other[0]}")
            for leaf, right in zip(one[1], other[1], strict=True):
                name = repr(leaf.path) if leaf.path else "the content"
                require(leaf == right, f"{where}: {name} of batch {number} must be {right}, but it is {leaf}")


def _maker(make_loader: Callable[..., DataLoader[Any]]) -> tuple[_Make, tuple[int, ...]]:
    """A function of the number of workers, and the numbers to call it with."""
    parameters = inspect.signature(make_loader).parameters.values()
    if any(p.name == "num_workers" or p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda workers: make_loader(num_workers=workers), WORKERS
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        return make_loader, WORKERS
    return lambda workers: make_loader(), (0,)


def _plain(state: Any) -> Any:
    """A state as it comes out of a file."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"a state must be what json.dumps takes, but {error}: {state!r:.400}") from error


@contextmanager
def _open(make: _Make, workers: int, state: Any, where: str = "") -> Iterator[DataLoader[Any]]:
    """A fresh loader that resumes from a state; an error of the loader, its sampler or its stream fails the check."""
    try:
        with make(workers) as loader:
            if state is not None:
                loader.load_state_dict(_plain(state))
                again = _plain(loader.state_dict())
                require(
                    again == state, f"a state that is restored and taken again must be equal: {state} became {again}"
                )
            yield loader
    except StateError as error:
        if not where:
            raise
        raise AssertionError(f"{where}: {error}") from error


def _unbroken(make: _Make, workers: int, state: Any) -> _Run:
    with _open(make, workers, state) as loader:
        run = _Run([[], []], [_plain(loader.state_dict())], loader.in_order)
        states = run.states
        for batch in loader:
            run.epochs[0].append(comparable(batch))
            states.append(_plain(loader.state_dict()))
        states.append(_plain(loader.state_dict()))
        if run.is_map:  # the end of a stream is not known before
            require(states[-1] == states[-2], "the state must not change when the loop sees the end")
        require(states[-1]["epoch"] == states[0]["epoch"] + 1, "the state after the end must be that of the next epoch")
        run.epochs[1].extend(comparable(batch) for batch in loader)
        return run


def _chain(make: _Make, workers: tuple[int, ...], whole: _Run) -> None:
    """Three stops in one epoch."""
    n = len(whole.epochs[0])
    stops = sorted({n // 4, n // 2, 3 * n // 4})
    state, found = whole.states[0], []
    for part, (start, stop) in enumerate(zip([0, *stops], [*stops, n], strict=True)):
        where = f"with stops at {stops}, batches {start} to {stop}"
        with _open(make, workers[part % len(workers)], state, where) as loader:
            batches = iter(loader)
            found += [comparable(next(batches)) for _ in range(stop - start)]
            state = _plain(loader.state_dict())
        reached, wanted = ({name: one[name] for name in ("epoch", "position")} for one in (state, whole.states[stop]))
        # Out of order it depends on which batches were ready first, and whether a stream is known to be at its end on
        # whether its end has come; what follows is compared all the same.
        if whole.in_order and (stop < n or whole.is_map):
            parts = f"{number_of(stop, 'batch')} in {number_of(part + 1, 'part')}"
            require(reached == wanted, f"after {parts} the state has {reached}, not {wanted}")
    whole.same(found, whole.epochs[0], f"with stops at {stops}")
    where = f"after stops at {stops}"
    with _open(make, workers[0], state, where) as loader:
        whole.compare(loader, n, where)


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
