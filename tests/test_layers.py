"""Imports run one way, and the core knows no framework: read from the syntax trees, so no import hides."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Every import, wherever in the file it stands: the module, and the name taken from it."""
    for node in ast.walk(tree_of(path)):
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


IMPORTED = {module: imported_modules(path) - {module} for module, path in MODULES.items()}


def test_every_module_has_a_layer() -> None:
    assert [module for module in MODULES if place(module) not in LEVEL] == []


def test_no_module_imports_one_above_it() -> None:
    assert [(m, w) for m in MODULES for w in IMPORTED[m] if LEVEL[place(w)] > LEVEL[place(m)]] == []


def test_planning_and_fetching_do_not_know_each_other() -> None:
    rooms = {"planning", "fetching"}
    assert [(m, w) for m in MODULES for w in IMPORTED[m] if {place(m), place(w)} == rooms] == []


def test_the_design_page_lists_the_layers_as_they_are() -> None:
    listed: list[set[str]] = []
    for row in re.findall(r"^\| (\d*) ?\| (.+?) \| .*$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE):
        listed += [set()] if row[0] else []
        listed[-1] |= set(re.findall(r"`(\w+)`", row[1]))
    listed[-1] |= {"__init__", "__main__"}
    assert listed == LAYERS


def test_no_imports_go_round_in_a_circle() -> None:
    left = dict(IMPORTED)
    while left:
        ready = {name for name, needs in left.items() if not needs & set(left)}
        assert ready, f"a circle among {sorted(left)}"
        left = {name: needs for name, needs in left.items() if name not in ready}


def code_words(path: Path) -> Iterator[str]:
    """Names and strings of the code; not comments, not docstrings, which may say what torch does."""
    prose = {id(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield " ".join([getattr(node, "module", None) or "", *[alias.name for alias in node.names]])


def test_the_core_names_no_framework() -> None:
    words = ((module, word) for module, path in MODULES.items() for word in code_words(path))
    assert [(module, word) for module, word in words if FRAMEWORKS.search(word)] == []


def test_a_backend_imports_public_names_only() -> None:
    import agnoload

    public = set(agnoload.__all__) | {"testing"}
    for path in sources(BACKENDS):
        taken = [(module, name) for module, name in imports(path) if module.split(".")[0] == "agnoload"]
        assert [t for t in taken if not (t[0] == "agnoload" and (t[1] is None or t[1] in public))] == [], path
        attributes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]
        used = {a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id == "agnoload"}
        assert used <= public, path


def test_no_finaliser_method_is_defined() -> None:
    for path in [*MODULES.values(), *sources(BACKENDS)]:
        names = [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
        assert "__del__" not in names, path
