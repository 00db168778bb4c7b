"""Imports run one way, and the core knows no framework: read from the syntax trees, so no import hides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "agnoload"
BACKENDS = ROOT / "backends"

LAYERS = [
    {"errors", "messages", "protocols", "worker_info"},
    {"validate", "system", "inspect"},
    {"backend"},
    {"seeding", "batching", "_types"},
    {"transport"},
    {"datasets", "streams", "samplers"},
    {"global_rng", "planning", "fetching", "monitoring", "options"},
    {"pools"},
    {"iterator"},
    {"loader"},
    {"__init__", "__main__", "testing"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

FRAMEWORKS = re.compile(r"\b(torch|jax|jaxlib|flax|cupy|tensorflow|mlx)\b")


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def dotted(path: Path) -> str:
    """`agnoload/pools/worker.py` as `agnoload.pools.worker`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {dotted(path): path for path in sources(CORE)}


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Every import, wherever in the file it stands: the module, and the name taken from it."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """The modules of the core that a file imports; `from agnoload import seeding` counts as `agnoload.seeding`."""
    found = set()
    for module, name in imports(path):
        if module.split(".")[0] == "agnoload":
            whole = f"{module}.{name}"
            found.add(whole if whole in MODULES else "agnoload.__init__" if module == "agnoload" else module)
    return found


def place(module: str) -> str:
    """The part of the core that a module belongs to: what the layers are made of."""
    return module.split(".")[1]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_layer(module: str) -> None:
    assert place(module) in LEVEL, f"say in LAYERS where {module} stands"


def wanted(module: str) -> set[str]:
    return imported_modules(MODULES[module]) - {module}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_one_above_it(module: str) -> None:
    assert [m for m in wanted(module) if LEVEL[place(m)] > LEVEL[place(module)]] == []


def test_planning_and_fetching_do_not_know_each_other() -> None:
    rooms = {"planning", "fetching"}
    assert [(m, w) for m in MODULES for w in wanted(m) if {place(m), place(w)} == rooms] == []


def test_the_design_page_lists_the_layers_as_they_are() -> None:
    listed: list[set[str]] = []
    for row in re.findall(r"^\| (\d*) ?\| (.+?) \| .*$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE):
        listed += [set()] if row[0] else []
        listed[-1] |= set(re.findall(r"`(\w+)`", row[1]))
    listed[-1] |= {"__init__", "__main__"}
    assert listed == LAYERS


def test_no_imports_go_round_in_a_circle() -> None:
    left = {module: wanted(module) for module in MODULES}
    while left:
        ready = {name for name, needs in left.items() if not needs & set(left)}
        assert ready, f"a circle among {sorted(left)}"
        left = {name: needs for name, needs in left.items() if name not in ready}


def code_words(path: Path) -> Iterator[tuple[int, str]]:
    """Names and strings of the code; not comments, not docstrings, which may say what torch does."""
    tree = ast.parse(path.read_text(), str(path))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node.lineno, " ".join([getattr(node, "module", None) or "", *[alias.name for alias in node.names]])


@pytest.mark.parametrize("path", MODULES.values(), ids=list(MODULES))
def test_the_core_names_no_framework(path: Path) -> None:
    assert [(line, word) for line, word in code_words(path) if FRAMEWORKS.search(word)] == []


@pytest.mark.parametrize("path", sources(BACKENDS), ids=lambda path: str(path.relative_to(BACKENDS)))
def test_a_backend_imports_public_names_only(path: Path) -> None:
    import agnoload

    public = set(agnoload.__all__) | {"testing"}
    taken = [(module, name) for module, name in imports(path) if module.split(".")[0] == "agnoload"]
    assert [t for t in taken if not (t[0] == "agnoload" and (t[1] is None or t[1] in public))] == []
    tree = ast.parse(path.read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "agnoload"
    }
    assert used <= public


@pytest.mark.parametrize("path", [*sources(CORE), *sources(BACKENDS)], ids=dotted)
def test_no_finaliser_method_is_defined(path: Path) -> None:
    defined = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert "__del__" not in defined
