"""The timeline that `loader.trace(path)` writes: the Chrome trace format, a row for whoever does something."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import agnoload

Event = dict[str, Any]


class Pairs(agnoload.Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"n": index, "square": index * index}


def events_of(path: Path) -> list[Event]:
    """The events of a file, after a look at what viewers need."""
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] > 0
            assert event["dur"] > 0
    return trace["traceEvents"]  # type: ignore[no-any-return]


def rows_of(events: Iterable[Event]) -> dict[str, list[Event]]:
    """What happened on each row, by the row's name, in the order of time."""
    events = list(events)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    boxes = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    assert {box["tid"] for box in boxes} <= set(names)
    return {name: [box for box in boxes if box["tid"] == row] for row, name in names.items()}


def assert_one_after_the_other(boxes: list[Event]) -> None:
    for before, after in pairwise(boxes):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01  # microseconds, as floats


def requests_of(boxes: Iterable[Event], name: str) -> list[int]:
    return [box["args"]["request"] for box in boxes if box["name"] == name]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_trace_has_a_row_for_the_consumer_and_one_for_each_worker(tmp_path: Path, kind: Any) -> None:
    loader = agnoload.DataLoader(Pairs(), 2, num_workers=2, worker_type=kind)
    with loader, loader.trace(tmp_path / "trace.json"):
        batches = len(list(loader)) + len(list(loader))
    rows = rows_of(events_of(tmp_path / "trace.json"))
    consumer = rows.pop("consumer")
    assert set(rows) <= {"worker 0", "worker 1"}
    assert {box["name"] for box in consumer} == {"wait", "work"}
    assert sum(box["name"] == "wait" for box in consumer) == batches == 40
    assert_one_after_the_other(consumer)
    for row in rows.values():
        assert_one_after_the_other(row)
        steps = [box["name"] for box in row if box["name"] != "wait"]
        assert steps == ["fetch", "collate", "encode"] * (len(steps) // 3)
    loaded = [box for row in rows.values() for box in row]
    assert {box["name"] for box in loaded} == {"wait", "fetch", "collate", "encode"}
    for name in ("fetch", "collate", "encode"):
        numbers = requests_of(loaded, name)
        assert len(numbers) == len(set(numbers)) == batches
    assert all(box["args"]["samples"] == 2 for box in loaded if box["name"] == "fetch")


def test_loading_without_workers_lies_within_the_waiting(tmp_path: Path) -> None:
    loader = agnoload.DataLoader(Pairs(), 2)
    with loader.trace(tmp_path / "trace.json"):
        list(loader)
    rows = rows_of(events_of(tmp_path / "trace.json"))
    assert set(rows) == {"consumer"}
    waits = [box for box in rows["consumer"] if box["name"] == "wait"]
    fetches = [box for box in rows["consumer"] if box["name"] == "fetch"]
    assert len(waits) == len(fetches) == 20
    for wait, fetch in zip(waits, fetches, strict=True):
        assert wait["ts"] <= fetch["ts"]
        assert fetch["ts"] + fetch["dur"] <= wait["ts"] + wait["dur"] + 0.01


def test_what_happens_inside_of_a_context_is_kept_also_where_another_is_open(tmp_path: Path) -> None:
    loader = agnoload.DataLoader(Pairs(), 10)
    list(loader)
    with loader.trace(tmp_path / "outer.json"):
        list(loader)
        with loader.trace(tmp_path / "inner.json"):
            next(iter(loader))
        list(loader)
    list(loader)
    counts = [sum(e["name"] == "wait" for e in events_of(tmp_path / f"{name}.json")) for name in ("outer", "inner")]
    assert counts == [9, 1]


def test_an_error_in_the_loop_still_leaves_its_trace(tmp_path: Path) -> None:
    loader = agnoload.DataLoader(Pairs(), 10)
    with pytest.raises(KeyError), loader.trace(tmp_path / "trace.json"):
        next(iter(loader))["typo"]
    assert any(event["name"] == "fetch" for event in events_of(tmp_path / "trace.json"))
    assert loader._recorder._timelines == ()


def test_a_trace_of_nothing_opens_and_a_path_that_cannot_be_written_is_an_error_before_the_loop(tmp_path: Path) -> None:
    loader = agnoload.DataLoader(Pairs(), 10)
    with loader.trace(str(tmp_path / "trace.json")):
        pass
    assert [event["args"]["name"] for event in events_of(tmp_path / "trace.json")] == ["consumer"]
    with pytest.raises(FileNotFoundError), loader.trace(tmp_path / "nowhere" / "trace.json"):
        pytest.fail("the loop ran")
