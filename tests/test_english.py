"""Phrases that a reader has to read twice are not used in code, messages and documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PHRASES = re.compile(
    r"\b(told|anew|borne|shall|strangers?|none such|in peace|without a word|so it comes)\b", re.IGNORECASE
)
WIDTH = 100
"""Characters of a line of documentation; tables, code and what a program writes may be longer."""

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
FILES = [path for folder in ("agnoload", "backends", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_phrases_that_are_read_twice_are_not_used() -> None:
    for path in [*FILES, *PAGES]:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        assert [(number, line.strip()) for number, line in lines if PHRASES.search(line)] == [], path


def test_documentation_is_wrapped() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^```.*?^```|<!-- figures.*?<!-- end -->", "", text, flags=re.MULTILINE | re.DOTALL)
        lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "$", "!["))]
        assert [line for line in lines if len(line) > WIDTH] == [], path
