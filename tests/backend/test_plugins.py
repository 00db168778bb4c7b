"""Plug-ins: found by entry points, named when broken, looked up for next to nothing."""

from __future__ import annotations

import subprocess
import sys
import warnings
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


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("made_up")
    vars(module).update(Plain=Plain, Framed=Framed, Failing=Failing, number=3)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setattr(registry, "_warned", set())
    return module


def load_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "framed", ModuleType("framed"))


def test_our_three_backends_are_found_by_their_entry_points() -> None:
    assert set(registry.by_name(registry.installed())) >= OURS
    for name in OURS:
        kind = registry.load(registry.by_name(registry.installed())[name])
        assert kind.name == kind.framework == name
        assert kind.requirement == f"agnoload[{name}]"


@pytest.mark.slow
def test_finding_and_loading_our_backends_imports_no_framework() -> None:
    code = (
        "import sys, agnoload.backend.registry as p; p.loaded_backends(); p.worker_environment(); p.plugin_table();"
        "print(sorted({'torch', 'jax', 'cupy', 'ml_dtypes'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout
        == "[]\n"
    )


def test_numpy_does_not_search_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: pytest.fail("looked"))
    assert type(agnoload.get_backend("numpy")) is Backend


def test_a_backend_object_or_class_can_be_given() -> None:
    backend = Plain()
    assert agnoload.get_backend(backend) is backend
    assert isinstance(agnoload.get_backend(Plain), Plain)
    with pytest.raises(OptionError, match=r"a name or an agnoload\.Backend, got 3"):
        agnoload.get_backend(3)  # type: ignore[arg-type]


def test_an_unknown_name_lists_what_is_installed() -> None:
    with pytest.raises(OptionError, match="installed names 'numpy', 'framed', 'plain'; got 'torhc'"):
        registry.make("torhc", [point("plain", "Plain"), point("framed", "Framed")])


def test_a_missing_framework_gives_the_line_that_installs_it() -> None:
    with pytest.raises(BackendUnavailable, match=r"needs framed, which is not installed: pip install framed$"):
        registry.make("framed", [point("framed", "Framed")])


@pytest.mark.parametrize("name", sorted(OURS))
def test_our_missing_frameworks_give_the_line_with_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    message = rf"needs {name}, which is not installed: pip install agnoload\[{name}\]$"
    with pytest.raises(BackendUnavailable, match=message):
        agnoload.get_backend(name)
    with pytest.raises(BackendUnavailable, match=message):
        registry.load(registry.by_name(registry.installed())[name])().check()


def test_a_framework_that_fails_at_import_is_distinguished_from_a_missing_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "framed.py").write_text("import a_part_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    backend = registry.make("framed", [point("framed", "Framed")])
    with pytest.raises(BackendUnavailable, match=r"cannot be imported: ModuleNotFoundError.*a_part_that_is_missing"):
        backend.require()


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("absent", "AttributeError"),
        ("number", "it names 3, which is no subclass of agnoload.Backend"),
        ("Failing", "RuntimeError: no licence"),
    ],
)
def test_a_broken_plugin_is_named_with_its_cause(target: str, cause: str) -> None:
    with pytest.raises(BackendUnavailable, match=rf"'bad' \(made_up:{target}\) is broken: {cause}"):
        registry.make("bad", [point("bad", target)])


def test_a_broken_plugin_gives_one_warning_and_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [point("bad", "absent"), point("framed", "Framed"), point("failing", "Failing"), point("plain", "Plain")]
    load_framework(monkeypatch)
    with pytest.warns(AgnoloadWarning, match="'bad'") as caught:
        table = registry.table_of(points)
    assert len(caught) == 1
    assert [plugin.name for plugin in table] == ["failing", "framed"]
    loaded = Loaded(table)
    with pytest.warns(AgnoloadWarning, match="'failing'.*no licence") as caught:
        assert [backend.name for backend in loaded.backends()] == ["framed"]
    assert len(caught) == 1
    assert registry.table_of(points) == table  # said once
    assert [backend.name for backend in loaded.backends()] == ["framed"]


def test_the_list_says_ready_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [point("plain", "Plain"), point("framed", "Framed"), point("bad", "absent"), point("numpy", "absent")]
    listed = registry.describe(points)
    assert list(listed) == ["numpy", "bad", "framed", "plain"]
    assert listed["numpy"] == listed["plain"] == "ready"
    assert "pip install framed" in listed["framed"]
    assert "is broken" in listed["bad"]
    load_framework(monkeypatch)
    monkeypatch.setattr(Plain, "check", lambda self: 1 / 0)
    assert registry.describe(points)["framed"] == "ready"
    assert registry.describe(points)["plain"] == "its check failed: ZeroDivisionError: division by zero"


def test_of_two_packages_with_one_name_the_first_is_used_and_a_warning_says_so() -> None:
    points = [point("plain", "Plain"), point("plain", "Framed")]
    with pytest.warns(AgnoloadWarning, match="made_up:Plain is used, made_up:Framed is not"):
        assert isinstance(registry.make("plain", points), Plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.by_name([points[0], points[0]])  # one package found twice is no conflict


def test_a_backend_is_created_once_its_framework_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded([Plugin("framed", "made_up:Framed", "framed")])
    array = Framed.Array()
    assert loaded.backends() == ()
    assert loaded.to_numpy(array) is None
    monkeypatch.setitem(sys.modules, "framed", None)  # an import that was blocked is no framework
    assert loaded.backends() == ()
    load_framework(monkeypatch)
    (backend,) = loaded.backends()
    assert loaded.backends()[0] is backend
    for _ in range(2):
        assert np.asarray(loaded.to_numpy(array)).tolist() == [7]
    assert loaded.to_numpy("text") is None


def test_a_worker_uses_the_table_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_loaded", None)
    monkeypatch.setattr(registry, "installed", lambda: (point("framed", "Framed"),))
    table = registry.plugin_table()
    assert [tuple(plugin) for plugin in table] == [("framed", "made_up:Framed", "framed")]
    monkeypatch.setattr(registry, "installed", lambda: pytest.fail("looked"))
    registry.install_table(table)
    load_framework(monkeypatch)
    assert [backend.name for backend in registry.loaded_backends()] == ["framed"]
    assert np.asarray(registry.to_numpy(Framed.Array())).tolist() == [7]
    assert registry.seed_from(Framed.Array()) == 63
    assert registry.seed_from(object()) is None
    assert registry.rank_and_world(Plain()) == (1, 4)
    assert registry.rank_and_world(Backend()) == (1, 4)
    assert registry.worker_environment() == {"FRAMED_DEVICES": "none"}


def test_the_installed_packages_are_read_once_a_process() -> None:
    assert registry.installed() is registry.installed()


def test_without_a_framework_no_backend_answers() -> None:
    code = (
        "import agnoload.backend.registry as p; b = p.get_backend('numpy');"
        "print(p.rank_and_world(b), p.seed_from(object()), p.to_numpy(object()), p.loaded_backends())"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout
    assert out == "None None None ()\n"


def test_the_numpy_backend_rejects_a_device_and_warns_about_pinning() -> None:
    with pytest.raises(OptionError, match="backend 'numpy' has no devices: device must be None, got 'cuda'"):
        Backend().check("cuda")
    with pytest.warns(AgnoloadWarning, match="pin_memory=True does nothing with backend 'numpy'") as caught:
        assert Backend().check(pin_memory=True) is None
    assert len(caught) == 1
