"""The page on ragged batches: what it shows is what comes out."""

from __future__ import annotations

import doctest
import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_examples_of_the_page_run() -> None:
    result = doctest.testfile(str(DOCS / "ragged.md"), module_relative=False)
    assert result.attempted > 15
    assert result.failed == 0


def test_the_drawing_is_the_one_that_its_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("ragged_picture", DOCS / "pictures" / "ragged.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (DOCS / "images" / "ragged.svg").read_text() == script.picture()
