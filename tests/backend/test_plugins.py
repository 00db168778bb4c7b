"""Plug-ins: found by entry points, named when broken, looked up for next to nothing."""

from __future__ import annotations

import importlib.metadata
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import agnoload
from agnoload import AgnoloadWarning, Backend, BackendUnavailable, OptionError
from agnoload.backend import registry
from agnoload.backend.registry import GROUP, Loaded, Plugin

OURS = {"torch", "jax", "cupy"}


class Plain(Backend):
    name = "plain"


class Framed(Backend):
    """A backend of the framework `framed`, which owns the type `Array`."""

    name = "framed"
    framework = "framed"

    class Array:
        pass

    def to_numpy(self, leaf: Any) -> Any:
        return np.array([7]) if isinstance(leaf, self.Array) else None

    def seed_from(self, generator: Any) -> int | None:
        return 63 if isinstance(generator, self.Array) else None

    def world(self) -> tuple[int, int]:
        return 1, 4

    def worker_environment(self) -> dict[str, str]:
        return {"FRAMED_DEVICES": "none"}


class Failing(Backend):
    name = "failing"
    framework = "framed"

    def __init__(self) -> None:
        raise RuntimeError("no licence")


def point(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, f"made_up:{target}", GROUP)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install(plain="Plain")`: as if only these plug-ins were installed, in a process that has used none of them."""
    module = ModuleType("made_up")
    vars(module).update(Plain=Plain, Framed=Framed, Failing=Failing, number=3)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setattr(registry, "_loaded", None)

    def points(*pairs: tuple[str, str], **named: str) -> None:
        found = [point(name, target) for name, target in (*pairs, *named.items())]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
        registry.installed.cache_clear()

    yield points
    monkeypatch.undo()
    registry.installed.cache_clear()


def load_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "framed", ModuleType("framed"))


def test_our_three_backends_are_found_and_say_what_installs_their_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(registry.installed()) >= OURS
    for name in OURS:
        backend = registry.create(registry.installed()[name])
        assert backend.name == backend.framework == name
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        for ask in (lambda name=name: agnoload.get_backend(name), backend.check):
            message = rf"needs {name}, which is not installed: pip install agnoload\[{name}\]$"
            with pytest.raises(BackendUnavailable, match=message):
                ask()


@pytest.mark.slow
def test_our_backends_import_no_framework_and_without_one_none_of_them_answers() -> None:
    code = """
        import sys, agnoload.backend.registry as registry
        numpy = registry.get_backend("numpy")
        print(registry.rank_and_world(numpy), registry.seed_from(object()), registry.to_numpy(object()))
        print(registry.loaded_backends(), sorted(registry.worker_environment()), len(registry.loaded().table))
        print(sorted({"torch", "jax", "cupy", "ml_dtypes"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert out.splitlines() == ["None None None", "() ['JAX_PLATFORMS'] 3", "[]"]


def test_numpy_does_not_search_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: pytest.fail("looked"))
    assert type(agnoload.get_backend("numpy")) is Backend


def test_a_backend_object_or_class_can_be_given() -> None:
    backend = Plain()
    assert agnoload.get_backend(backend) is backend
    assert isinstance(agnoload.get_backend(Plain), Plain)
    with pytest.raises(OptionError, match=r"a name or an agnoload\.Backend, got 3"):
        agnoload.get_backend(3)  # type: ignore[arg-type]


def test_an_unknown_name_lists_what_is_installed(install: Callable[..., None]) -> None:
    install(plain="Plain", framed="Framed")
    with pytest.raises(OptionError, match="installed names 'numpy', 'framed', 'plain'; got 'plian': did you mean"):
        agnoload.get_backend("plian")


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("absent", "AttributeError"),
        ("number", "it names 3, which is no subclass of agnoload.Backend"),
        ("Failing", "RuntimeError: no licence"),
    ],
)
def test_a_broken_plugin_is_named_with_its_cause(install: Callable[..., None], target: str, cause: str) -> None:
    install(bad=target)
    with pytest.raises(BackendUnavailable, match=rf"'bad' \(made_up:{target}\) is broken: {cause}"):
        agnoload.get_backend("bad")


def test_a_broken_plugin_gives_a_warning_and_does_not_affect_the_others(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(bad="absent", framed="Framed", failing="Failing", plain="Plain")
    load_framework(monkeypatch)
    with pytest.warns(AgnoloadWarning, match="'bad'|'failing'.*no licence") as caught:
        assert [backend.name for backend in registry.loaded_backends()] == ["framed"]
    assert len(caught) == 2
    assert [backend.name for backend in registry.loaded_backends()] == ["framed"]  # said once


def test_the_list_says_ready_or_why_not(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(plain="Plain", framed="Framed", bad="absent", numpy="absent")
    listed = agnoload.list_backends()
    assert list(listed) == ["numpy", "bad", "framed", "plain"]
    assert listed["numpy"] == listed["plain"] == "ready"
    assert "needs framed, which is not installed: pip install framed" in listed["framed"]
    assert "is broken" in listed["bad"]
    load_framework(monkeypatch)
    monkeypatch.setattr(Plain, "check", lambda self: 1 / 0)
    listed = agnoload.list_backends()
    assert (listed["framed"], listed["plain"]) == ("ready", "its check failed: ZeroDivisionError: division by zero")


def test_a_framework_that_fails_at_import_is_distinguished_from_a_missing_one(
    install: Callable[..., None], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(framed="Framed")
    (tmp_path / "framed.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    backend = agnoload.get_backend("framed")
    with pytest.raises(BackendUnavailable, match=r"cannot be imported: ModuleNotFoundError.*a_part_that_is_missing"):
        backend.require()


def test_of_two_packages_with_one_name_the_first_is_used_and_a_warning_says_so(install: Callable[..., None]) -> None:
    install(("plain", "Plain"), ("plain", "Framed"))
    with pytest.warns(AgnoloadWarning, match="made_up:Plain is used, made_up:Framed is not"):
        assert isinstance(agnoload.get_backend("plain"), Plain)
    install(("plain", "Plain"), ("plain", "Plain"))  # one package found twice is no conflict
    assert isinstance(agnoload.get_backend("plain"), Plain)


def test_a_backend_is_created_once_its_framework_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    vars(sys.modules["made_up"]).update(Framed=Framed)
    loaded = Loaded([Plugin("made_up", "Framed", "framed", {})])
    entered: list[Any] = []
    monkeypatch.setattr(Framed, "enter_worker", lambda self, look: entered.append(look()))
    array = Framed.Array()
    loaded.enter_worker()
    assert loaded.backends() == ()
    assert loaded.to_numpy(array) is None
    monkeypatch.setitem(sys.modules, "framed", None)  # an import that was blocked is no framework
    assert loaded.backends() == ()
    load_framework(monkeypatch)
    (backend,) = loaded.backends()
    assert loaded.backends()[0] is backend
    assert entered == [None]  # in no worker at the moment
    for _ in range(2):
        assert np.asarray(loaded.to_numpy(array)).tolist() == [7]
    assert loaded.to_numpy("text") is None


def test_a_worker_uses_the_table_of_its_parent(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(framed="Framed")
    table = pickle.loads(pickle.dumps(registry.loaded().table))
    assert registry.worker_environment() == {"FRAMED_DEVICES": "none"}
    monkeypatch.setattr(registry, "installed", lambda: pytest.fail("looked"))
    registry.install_table(table)
    load_framework(monkeypatch)
    assert [backend.name for backend in registry.loaded_backends()] == ["framed"]
    assert np.asarray(registry.to_numpy(Framed.Array())).tolist() == [7]
    assert registry.seed_from(Framed.Array()) == 63
    assert registry.seed_from(object()) is None
    assert registry.rank_and_world(Plain()) == registry.rank_and_world(Backend()) == (1, 4)
    assert registry.worker_environment() == {"FRAMED_DEVICES": "none"}


def test_the_numpy_backend_rejects_a_device_and_warns_about_pinning() -> None:
    with pytest.raises(OptionError, match="backend 'numpy' has no devices: device must be None, got 'cuda'"):
        Backend().check("cuda")
    with pytest.warns(AgnoloadWarning, match="pin_memory=True does nothing with backend 'numpy'") as caught:
        assert Backend().check(pin_memory=True) is None
    assert len(caught) == 1
