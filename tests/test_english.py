"""Phrases that a reader has to read twice are not used in code, messages and documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PHRASES = re.compile(
    r"\b(told|anew|borne|shall|strangers?|none such|in peace|without a word|so it comes)\b", re.IGNORECASE
)
WIDTH = 100
"""Characters of a line of documentation; tables, code and what a program writes may be longer."""

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
FILES = [path for folder in ("agnoload", "backends", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_phrases_that_are_read_twice_are_not_used(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert [(number, line.strip()) for number, line in lines if PHRASES.search(line)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documentation_is_wrapped(path: Path) -> None:
    text = re.sub(r"^```.*?^```|<!-- figures.*?<!-- end -->", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    long = [line for line in text.splitlines() if len(line) > WIDTH and not line.lstrip().startswith(("|", "$", "!["))]
    assert long == []
