"""Docstrings as Markdown: examples become code blocks, and lists of `name: what it is` become lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"(\w+): (.+)")


def as_markdown(text: str) -> str:
    """The same docstring, in what Markdown reads it as."""
    blocks = []
    for block in re.split(r"\n{2,}", text):
        lines = block.splitlines()
        if lines and lines[0].startswith(">>>"):
            lines = ["```pycon", *lines, "```"]
        elif lines and is_list(lines):
            lines = [line if line.startswith(" ") else ENTRY.sub(r"- `\1`: \2", line) for line in lines]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def is_list(lines: list[str]) -> bool:
    """Whether every line is an entry, or goes on with the one above; and it is more than a sentence with a colon."""
    entries = [line for line in lines if not line.startswith(" ")]
    return all(ENTRY.match(line) for line in entries) and (len(entries) > 1 or len(lines) > len(entries))


class Markdown(griffe.Extension):
    """Called for each object that the reference shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
