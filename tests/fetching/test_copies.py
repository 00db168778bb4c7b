"""Copies of a stream for threads: what each has for itself, and what is one in all."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np

from agnoload.fetching.copies import Copies


def copied(value: Any) -> Any:
    return Copies("dataset", value, lambda _: False).make()


def test_a_bound_method_goes_with_the_copy() -> None:
    held: list[int] = []
    rng = random.Random(1)
    copy, push, rngs, draw = copied([held, held.append, rng, rng.random])
    push(3)
    assert (held, copy) == ([], [3])
    assert draw.__self__ is rngs is not rng


def test_builtin_functions_are_one_in_all() -> None:
    assert copied([len, np.frombuffer, dict.fromkeys]) == [len, np.frombuffer, dict.fromkeys]


def test_the_processs_own_generators_are_one_in_all() -> None:
    held = [random.random, random.Random.gauss, np.random.standard_normal.__self__]  # type: ignore[attr-defined]
    assert copied(held) == held
    assert copied(functools.partial(np.random.uniform, 0, 1)).func.__self__ is held[2]
