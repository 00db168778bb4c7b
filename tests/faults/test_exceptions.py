"""Exceptions of the user's code cross the processes whole: what `except` and the debugger see is what it was."""

from __future__ import annotations

import dataclasses
import errno
import pickle
import sys
import threading

import pytest

from agnoload import AgnoloadError, DataLoader
from agnoload.transport.remote_errors import RemoteTraceback, describe, restore

METHODS = ("forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork")


class TwoArguments(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class KeywordOnly(ValueError):
    def __init__(self, *, where: str) -> None:
        super().__init__()
        self.where = where

    def __str__(self) -> str:
        return f"at {self.where}"


class Missing(FileNotFoundError):
    """An OSError with a constructor of its own."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOENT, "no such sample", path)


class Exits(SystemExit):
    def __init__(self, reason: str, code: int) -> None:
        super().__init__(code)
        self.reason = reason


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("held", threading.Lock())
        self.lock = threading.Lock()
        self.number = 7


class NoText(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class Unreducible(Exception):
    def __reduce__(self):
        raise self.args[0]


class Unreadable(Exception):
    def __reduce__(self):
        return sys.exit, (9,)


class Unprintable(Exception):
    """Whose words end the program."""

    def __str__(self) -> str:
        raise SystemExit(4)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Lets nobody set anything, not even its notes."""

    code: int
    detail: str


class Unseen(Exception):
    """Lets nobody look at what it holds."""

    def __getattribute__(self, name):
        if name in ("__dict__", "add_note"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


class Unnoted(Exception):
    __notes__ = 5

    def add_note(self, text: str) -> None:
        raise ValueError("no notes")


def crossed(error: BaseException) -> BaseException:
    """As it comes out on the other side."""
    try:
        raise error
    except BaseException as caught:
        return restore(pickle.loads(pickle.dumps(describe(caught))), "in worker 0")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("key"),
        KeyError(("a", 1)),
        TwoArguments(3, "x"),
        KeywordOnly(where="here"),
        OSError(errno.EIO, "read", "a.jpg"),
        OSError(errno.EXDEV, "rename", "a.jpg", None, "b.jpg"),
        OSError("only words"),
        Missing("b.png"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ImportError("no", name="lib", path="/lib"),
        MemoryError("no more"),
        RecursionError("too deep"),
        SystemExit(3),
        KeyboardInterrupt(),
        StopAsyncIteration(1),
        AgnoloadError("ours"),
        ZeroDivisionError(),
    ],
    ids=lambda error: f"{type(error).__name__}{error.args}",
)
def test_type_arguments_attributes_and_text_stay(error) -> None:
    error.add_note("a note of the user's")
    back = crossed(error)
    assert type(back) is type(error)
    assert repr(back.args) == repr(error.args)
    assert str(back) == str(error)
    for name in ("errno", "strerror", "filename", "filename2", "code", "detail", "where", "name", "path", "object"):
        assert getattr(back, name, None) == getattr(error, name, None)
    assert back.__notes__ == ["a note of the user's", "in worker 0"]
    assert isinstance(back.__cause__, RemoteTraceback)
    assert "test_exceptions.py" in str(back.__cause__)
    assert type(error).__name__ in str(back.__cause__)


def test_the_code_of_a_system_exit_with_its_own_constructor_stays() -> None:
    back = crossed(Exits("enough", 4))
    assert (type(back), back.code, back.reason) == (Exits, 4, "enough")


def test_what_cannot_travel_within_an_exception_becomes_its_text() -> None:
    back = crossed(HoldsLock())
    assert type(back) is HoldsLock
    assert back.number == 7
    assert back.args[0] == "held"
    assert "lock" in back.args[1]
    assert "lock" in back.lock


@pytest.mark.parametrize("refusal", [TypeError, SystemExit, GeneratorExit, StopIteration, RecursionError])
def test_an_exception_that_refuses_to_be_pickled_comes_back_all_the_same(refusal) -> None:
    back = crossed(Unreducible(refusal, 2))
    assert (type(back), back.args) == (Unreducible, (refusal, 2))


def test_an_exception_that_refuses_to_be_read_comes_back_all_the_same() -> None:
    back = crossed(Unreadable("words", 2))
    assert (type(back), back.args) == (Unreadable, ("words", 2))
    group = crossed(ExceptionGroup("all", [Unreadable(1), Unreducible(SystemExit), Unprintable(2)]))
    assert [type(error) for error in group.exceptions] == [Unreadable, Unreducible, Unprintable]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [-1, 0, 2])
@pytest.mark.parametrize(
    "make", [lambda: Unprintable(3), lambda: NoText(3), lambda: Frozen(3, "x"), lambda: Unnoted("x"),
             lambda: Unreducible(SystemExit), lambda: Unreadable("x"), lambda: Unseen(3)],
)  # fmt: skip
def test_an_exception_is_itself_whatever_its_own_methods_do(make, workers) -> None:
    kind = {"worker_type": "thread"} if workers < 0 else {}
    got, error = fails(abs(workers), make, **kind)
    assert got == [[0, 1], [2, 3]]
    assert type(error) is type(make())
    assert error.args == make().args
    assert error.__notes__[0] == "while index 5 was loaded (item 1 of batch 2, epoch 0)"
    assert len(error.__notes__) == 1 + (workers != 0)
    with DataLoader(Raises(make), 2, num_workers=abs(workers), on_error="skip", **kind) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4], [6, 7]]
        (failure,) = loader.stats().failed
    assert failure.error.startswith(f"{type(error).__name__}: ")


class Unopened:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: object) -> None:
        raise Frozen(3, "x")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def test_a_frozen_exception_while_the_dataset_is_read_is_itself() -> None:
    with DataLoader(Unopened(), num_workers=1) as loader, pytest.raises(Frozen) as caught:
        next(iter(loader))
    assert (caught.value.code, caught.value.detail) == (3, "x")
    assert "before its first batch" in caught.value.__notes__[-1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_frozen_exception_of_collate_or_a_registered_function_is_itself(workers) -> None:
    def collate(samples: list[int], **_: object) -> list[int]:
        raise Frozen(3, "x")

    with DataLoader(range(4), 2, num_workers=workers, collate_fn=collate) as loader, pytest.raises(Frozen) as caught:
        next(iter(loader))
    assert (caught.value.code, caught.value.detail) == (3, "x")


def test_an_exception_without_a_text_comes_back_all_the_same() -> None:
    back = crossed(NoText(1))
    assert (type(back), back.args) == (NoText, (1,))
    assert "str() failed" in str(back.__cause__)


def test_a_class_that_cannot_travel_is_told_in_words() -> None:
    class Local(Exception):
        lock = threading.Lock()

    back = crossed(Local("shut"))
    assert type(back) is RuntimeError
    assert "Local: shut" in str(back)


def test_a_constructor_that_takes_what_pickle_does_not_give_is_gone_around() -> None:
    class Picky(Exception):
        def __new__(cls, *, word):
            return super().__new__(cls, word)

        def __init__(self, *, word):
            self.word = word

    back = crossed(Picky(word="sesame"))
    assert (type(back), back.args, back.word) == (Picky, ("sesame",), "sesame")


def test_members_of_a_group_stay_whole_each_by_itself() -> None:
    inner = ExceptionGroup("inner", [TwoArguments(3, "x"), HoldsLock()])
    inner.add_note("of the inner one")
    back = crossed(ExceptionGroup("outer", [ValueError("bad"), inner]))
    assert type(back) is ExceptionGroup
    assert back.message == "outer"
    first, second = back.exceptions
    assert (type(first), first.args) == (ValueError, ("bad",))
    assert second.__notes__ == ["of the inner one"]
    assert [type(error) for error in second.exceptions] == [TwoArguments, HoldsLock]
    assert second.exceptions[0].detail == "x"
    assert back.subgroup(TwoArguments) is not None


class Failed(ExceptionGroup):
    """A group with a constructor of its own."""

    def __new__(cls, errors, label):
        made = super().__new__(cls, f"{label} failed", errors)
        made.label = label
        return made


def test_a_group_with_a_constructor_of_its_own_comes_back() -> None:
    back = crossed(Failed([ValueError("bad")], "loading"))
    assert (type(back), back.message, back.label) == (Failed, "loading failed", "loading")


def test_cause_and_context_are_told_in_the_trace() -> None:
    try:
        try:
            raise KeyError("the context")
        except KeyError:
            try:
                raise OSError("the cause")
            except OSError as cause:
                raise ValueError("bad") from cause
    except ValueError as error:
        back = crossed(error)
    trace = str(back.__cause__)
    assert "KeyError: 'the context'" in trace
    assert "OSError: the cause" in trace
    assert "direct cause" in trace


class Raises:
    def __init__(self, error) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error()
        return index


def fails(workers: int, error, **options) -> tuple[list, BaseException]:
    got = []
    try:
        with DataLoader(Raises(error), 2, num_workers=workers, **options) as loader:
            for batch in loader:
                got.append(batch.tolist())
    except BaseException as caught:
        return got, caught
    raise AssertionError("no error")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "make",
    [lambda: TwoArguments(3, "x"), lambda: Missing("a"), lambda: SystemExit(3), KeyboardInterrupt, lambda: KeyError(1)],
)
def test_an_error_in_a_worker_is_the_error_without_workers(make, method) -> None:
    inline, away = fails(0, make), fails(2, make, multiprocessing_context=method)
    assert away[0] == inline[0] == [[0, 1], [2, 3]]
    assert type(away[1]) is type(inline[1]) is type(make())
    assert away[1].args == inline[1].args
    assert {**vars(away[1]), "__notes__": None} == {**vars(inline[1]), "__notes__": None}
    notes, (worker,) = away[1].__notes__[:-1], away[1].__notes__[-1:]
    assert notes == inline[1].__notes__ == ["while index 5 was loaded (item 1 of batch 2, epoch 0)"]
    assert worker.startswith("in worker ")
    assert "__getitem__" in str(away[1].__cause__)


@pytest.mark.parametrize("method", METHODS[:2])
def test_a_class_made_within_a_function_is_still_caught_by_itself(method) -> None:
    class Local(Exception):
        pass

    def make() -> Exception:
        return Local("here")

    class Data(Raises):
        pass

    loader = DataLoader(Data(make), 2, num_workers=2, multiprocessing_context=method)
    with loader, pytest.raises(Local, match="here"):
        list(loader)


def test_under_fork_a_class_made_within_a_function_comes_as_a_copy() -> None:
    class Local(Exception):
        pass

    _, error = fails(2, lambda: Local("here"), multiprocessing_context="fork")
    assert (type(error).__name__, error.args) == ("Local", ("here",))


@pytest.mark.parametrize("method", METHODS[:2])
def test_a_class_made_within_a_function_is_itself_in_a_batch(method) -> None:
    class Item:
        def __init__(self, index: int) -> None:
            self.index = index

    class Items:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Item:
            return Item(index)

    with DataLoader(Items(), 2, num_workers=2, collate_fn=list, multiprocessing_context=method) as loader:
        items = [item for batch in loader for item in batch]
    assert [type(item) for item in items] == [Item] * 4
    assert [item.index for item in items] == [0, 1, 2, 3]


def test_an_error_in_worker_init_fn_comes_whole_before_the_first_batch() -> None:
    def init(worker: int) -> None:
        raise TwoArguments(worker, "no scratch space")

    with DataLoader(range(8), num_workers=1, worker_init_fn=init) as loader, pytest.raises(TwoArguments) as caught:
        next(iter(loader))
    assert caught.value.code == 0
    assert "before its first batch" in caught.value.__notes__[-1]
    assert "in init" in str(caught.value.__cause__)


def test_threads_give_the_error_itself_with_the_worker_as_a_note() -> None:
    _, error = fails(2, lambda: TwoArguments(3, "x"), worker_type="thread")
    assert type(error) is TwoArguments
    assert error.__notes__[0] == "while index 5 was loaded (item 1 of batch 2, epoch 0)"
    assert error.__notes__[1].startswith("in worker ")
