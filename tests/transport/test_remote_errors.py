"""Exceptions of the user's code cross processes whole: what `except` and a debugger see is what was raised."""

from __future__ import annotations

import dataclasses
import errno
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agnoload import AgnoloadError, DataLoader
from agnoload.transport.remote_errors import RemoteTraceback, describe, restore

LOCK = threading.Lock()


class TwoArguments(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Missing(FileNotFoundError):
    """An OSError with a constructor of its own."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOENT, "no such sample", path)


class NoText(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class Unreducible(Exception):
    def __reduce__(self) -> Any:
        raise self.args[0]


class Unreadable(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (9,)


class Unprintable(Exception):
    """Printing it ends the program."""

    def __str__(self) -> str:
        raise SystemExit(4)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every assignment, also of notes."""

    code: int
    detail: str


class Opaque(Exception):
    """Refuses access to its attributes."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__dict__", "add_note"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


class Unnoted(Exception):
    __notes__ = 5  # type: ignore[assignment]

    def add_note(self, text: str) -> None:
        raise ValueError("no notes")


class Picky(Exception):
    """Its constructor takes what pickle does not pass."""

    def __new__(cls, *, word: str) -> Any:
        return super().__new__(cls, word)

    def __init__(self, *, word: str) -> None:
        self.word = word


class Failed(ExceptionGroup):
    """A group with a constructor of its own."""

    def __new__(cls, errors: Any, label: str) -> Any:
        made = super().__new__(cls, f"{label} failed", errors)
        made.label = label
        return made


def crossed(error: BaseException, where: str = "") -> Any:
    """The exception as the other process raises it."""
    try:
        raise error
    except BaseException as caught:
        return restore(pickle.loads(pickle.dumps(describe(caught, where))), "in worker 0")


# ------------------------------------------------------------------------------------------------ what stays

WHOLE = [
    ValueError("bad"),
    KeyError(("a", 1)),
    TwoArguments(3, "x"),
    OSError(errno.EIO, "read", "a.jpg"),
    OSError(errno.EXDEV, "rename", "a.jpg", None, "b.jpg"),
    OSError("text only"),
    Missing("b.png"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ImportError("no", name="lib", path="/lib"),
    SystemExit(3),
    KeyboardInterrupt(),
    StopAsyncIteration(1),
    AgnoloadError("ours"),
    Picky(word="sesame"),
]


@pytest.mark.parametrize("error", WHOLE, ids=lambda error: f"{type(error).__name__}{error.args}")
def test_type_arguments_attributes_and_text_stay(error: Any) -> None:
    error.add_note("the user's note")
    back = crossed(error)
    assert type(back) is type(error)
    assert repr(back.args) == repr(error.args)
    assert str(back) == str(error)
    names = "errno strerror filename filename2 code detail name path object"
    assert [getattr(back, name, None) for name in names.split()] == [
        getattr(error, name, None) for name in names.split()
    ]
    assert back.__notes__ == ["the user's note", "in worker 0"]
    assert isinstance(back.__cause__, RemoteTraceback)
    assert "test_remote_errors.py" in str(back.__cause__)
    assert type(error).__name__ in str(back.__cause__)


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ERRORS = st.recursive(
    st.builds(
        lambda kind, args: kind(*args), st.sampled_from([ValueError, KeyError, OSError]), st.lists(VALUES, max_size=1)
    ),
    lambda inner: st.builds(ExceptionGroup, st.text(), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=5,
)


@given(error=ERRORS, attributes=st.dictionaries(st.text(min_size=1), VALUES, max_size=3))
@settings(max_examples=50)
def test_any_exception_and_any_group_of_them_comes_back_equal(error: Exception, attributes: dict[str, Any]) -> None:
    vars(error).update(attributes)
    back = crossed(error)
    assert repr(back) == repr(error)
    assert {name: value for name, value in vars(back).items() if name != "__notes__"} == {
        name: value for name, value in attributes.items() if name != "__notes__"
    }


@given(chain=st.lists(st.tuples(st.sampled_from([KeyError, OSError, TwoArguments]), st.booleans()), max_size=5))
def test_causes_and_contexts_are_shown_in_the_trace(chain: list[tuple[Any, bool]]) -> None:
    error: BaseException = ValueError("the first")
    for number, (kind, is_cause) in enumerate(chain):
        above = kind(number, "x")
        setattr(above, "__cause__" if is_cause else "__context__", error)
        error = above
    trace = str(crossed(error).__cause__)
    assert "ValueError: the first" in trace
    assert trace.count("direct cause") == sum(is_cause for _, is_cause in chain)
    assert trace.count("During handling") == sum(not is_cause for _, is_cause in chain)


# ------------------------------------------------------------------------------------------------ odd classes


@given(args=st.lists(VALUES | st.just(LOCK), max_size=4), attribute=VALUES | st.just(LOCK))
@settings(max_examples=50)
def test_a_value_that_cannot_travel_becomes_its_text(args: list[Any], attribute: Any) -> None:
    error = ValueError(*args)
    error.attribute = attribute  # type: ignore[attr-defined]
    back = crossed(error)
    assert type(back) is ValueError
    assert back.args == tuple(repr(LOCK) if arg is LOCK else arg for arg in args)
    assert back.attribute == (repr(LOCK) if attribute is LOCK else attribute)


ODD: list[Callable[[], BaseException]] = [
    lambda: Unprintable(3), lambda: NoText(3), lambda: Frozen(3, "x"), lambda: Unnoted("x"), lambda: Opaque(3),
    lambda: Unreadable("x", 2), lambda: Picky(word="sesame"),
    *(lambda refusal=refusal: Unreducible(refusal, 2)
      for refusal in (TypeError, SystemExit, GeneratorExit, StopIteration, RecursionError)),
]  # fmt: skip


@pytest.mark.parametrize("make", ODD, ids=lambda make: type(make()).__name__)
def test_an_exception_is_itself_whatever_its_own_methods_do(make: Callable[[], BaseException]) -> None:
    back = crossed(make(), "while it was loaded")
    assert (type(back), back.args) == (type(make()), make().args)
    assert back.__notes__ == ["while it was loaded", "in worker 0"]
    assert "test_remote_errors.py" in str(back.__cause__)


def test_a_class_that_cannot_travel_becomes_a_runtime_error_that_names_it() -> None:
    class Local(Exception):
        lock = threading.Lock()

    back = crossed(Local("shut"))
    assert type(back) is RuntimeError
    assert "Local: shut" in str(back)


def test_each_member_of_a_group_comes_back_in_its_own_way() -> None:
    inner = ExceptionGroup("inner", [TwoArguments(3, "x"), ValueError(LOCK), Unreadable(1), Unprintable(2)])
    inner.add_note("note of the inner group")
    back = crossed(ExceptionGroup("outer", [ValueError("bad"), inner]))
    assert (type(back), back.message) == (ExceptionGroup, "outer")
    first, second = back.exceptions
    assert (type(first), first.args) == (ValueError, ("bad",))
    assert second.__notes__ == ["note of the inner group"]
    assert [type(error) for error in second.exceptions] == [TwoArguments, ValueError, Unreadable, Unprintable]
    assert second.exceptions[0].detail == "x"
    assert back.subgroup(TwoArguments) is not None


def test_a_group_with_its_own_constructor_comes_back() -> None:
    back = crossed(Failed([ValueError("bad")], "loading"))
    assert (type(back), back.message, back.label) == (Failed, "loading failed", "loading")


# ------------------------------------------------------------------------------------------------ in loaders


class Raises:
    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error()
        return index


def fails(error: Callable[[], BaseException], **options: Any) -> tuple[list[Any], Any]:
    """The batches before the error, and the error."""
    got = []
    try:
        with DataLoader(Raises(error), 2, **options) as loader:
            for batch in loader:
                got.append(batch.tolist())
    except BaseException as caught:
        return got, caught
    raise AssertionError("no error")


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_error_without_workers() -> None:
    for make in (lambda: Missing("a"), lambda: SystemExit(3), KeyboardInterrupt):
        inline, away = fails(make), fails(make, num_workers=2)
        assert away[0] == inline[0] == [[0, 1], [2, 3]]
        assert type(away[1]) is type(inline[1]) is type(make())
        assert away[1].args == inline[1].args
        assert {**vars(away[1]), "__notes__": None} == {**vars(inline[1]), "__notes__": None}
        *notes, worker = away[1].__notes__
        assert notes == inline[1].__notes__ == ["while index 5 was loaded (item 1 of batch 2, epoch 0)"]
        assert worker.startswith("in worker ")
        assert "__getitem__" in str(away[1].__cause__)


def test_an_odd_exception_is_itself_in_a_loop_and_in_worker_threads() -> None:
    for options in ({}, {"num_workers": 2, "worker_type": "thread"}):
        for make in ODD:
            got, error = fails(make, **options)
            assert got == [[0, 1], [2, 3]]
            assert (type(error), error.args) == (type(make()), make().args)
            assert error.__notes__[0] == "while index 5 was loaded (item 1 of batch 2, epoch 0)"
            assert [note.startswith("in worker ") for note in error.__notes__[1:]] == [True] * bool(options)


def test_samples_with_odd_exceptions_can_be_skipped() -> None:
    class Odd:
        def __len__(self) -> int:
            return 2 * len(ODD)

        def __getitem__(self, index: int) -> int:
            if index % 2:
                raise ODD[index // 2]()
            return index

    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}):
        with DataLoader(Odd(), 4, on_error="skip", **options) as loader:
            assert [batch.tolist() for batch in loader] == [[n, n + 2] for n in range(0, 2 * len(ODD), 4)]
            failed = [failure.error.partition(":")[0] for failure in loader.stats().failed]
        assert failed == [type(make()).__name__ for make in ODD]


class Unopened:
    """Raises when a worker unpickles it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: object) -> None:
        raise Frozen(3, "x")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def frozen_collate(samples: list[int], **_: object) -> list[int]:
    raise Frozen(3, "x")


def test_a_frozen_exception_outside_of_a_sample_is_itself() -> None:
    for dataset, options in (
        (Unopened(), {"num_workers": 1}),
        (range(4), {"collate_fn": frozen_collate}),
        (range(4), {"collate_fn": frozen_collate, "num_workers": 1}),
    ):
        with DataLoader(dataset, 2, **options) as loader, pytest.raises(Frozen) as caught:
            next(iter(loader))
        assert (caught.value.code, caught.value.detail) == (3, "x")


def test_a_class_defined_in_a_function_is_itself_in_batches_and_errors_and_stays_as_it_is_here() -> None:
    class Local(Exception):
        changed = False

    def made() -> Exception:
        Local.changed = True  # in the worker
        return Local("here")

    options: Any = {"num_workers": 2, "collate_fn": lambda samples: list(map(Local, samples))}
    with DataLoader(Raises(made), 4, **options) as loader:
        batches = iter(loader)
        assert [(type(item), item.args) for item in next(batches)] == [(Local, (n,)) for n in range(4)]
        with pytest.raises(Local, match="here"):
            next(batches)
    assert not Local.changed


def test_under_fork_a_class_defined_in_a_function_comes_as_a_copy() -> None:
    class Local(Exception):
        pass

    _, error = fails(lambda: Local("here"), num_workers=2, multiprocessing_context="fork")
    assert (type(error).__name__, error.args) == ("Local", ("here",))
