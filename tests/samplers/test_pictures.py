"""The pictures of the documentation are what the samplers give."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def script():
    spec = importlib.util.spec_from_file_location("pictures_of_samplers", DOCS / "pictures" / "samplers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", script().PICTURES)
def test_a_picture_is_what_the_sampler_gives(name):
    drawn = script().PICTURES[name]()
    assert (DOCS / "images" / f"sampler-{name}.svg").read_text() == drawn, "run python docs/pictures/samplers.py"


def test_the_page_shows_every_picture():
    shown = re.findall(r"images/sampler-([\w-]+)\.svg", (DOCS / "samplers.md").read_text())
    assert sorted(shown) == sorted(script().PICTURES)
