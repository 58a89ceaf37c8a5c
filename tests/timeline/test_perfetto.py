"""Traces keep to the Trace Event Format, and their counter has the timeline's peak."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from timelines import recorded, step, timelines

from floorplan.timeline.bands import lasts
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.perfetto import SMALLEST, perfetto, write_perfetto


def check(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rules of the format; gives the events by kind."""
    assert json.loads(json.dumps(document)) == document
    kinds = defaultdict(list)
    open_: dict[tuple[str, str], list[str]] = defaultdict(list)
    last = -1
    for e in document["traceEvents"]:
        kinds[e["ph"]].append(e)
        assert isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] != "M":
            assert e["ts"] >= last
            last = e["ts"]
        if e["ph"] == "b":
            open_[e["cat"], e["id"]].append(e["name"])
        elif e["ph"] == "e":
            assert open_[e["cat"], e["id"]].pop() == e["name"]
        elif e["ph"] == "X":
            assert e["dur"] >= 0
        elif e["ph"] == "C":
            assert e["args"] and all(isinstance(v, int) and v >= 0 for v in e["args"].values())
    assert not any(open_.values())
    assert set(kinds) <= set("MCXbe")
    return kinds


@settings(deadline=None)
@given(timelines())
def test_the_format_and_the_peak(t: StepTimeline) -> None:
    kinds = check(perfetto(t))
    live = [e["args"]["bytes"] for e in kinds["C"] if e["name"] == "live bytes"]
    assert max(live, default=0) == t.peak
    assert all(x != y for x, y in zip(live, live[1:], strict=False))
    parts = [sum(e["args"].values()) for e in kinds["C"] if e["name"] != "live bytes"]
    assert max(parts, default=0) == t.peak
    assert len(kinds["b"]) == len(kinds["e"]) == sum(lasts(b) and b.nbytes >= SMALLEST for b in t.blocks)


@settings(deadline=None)
@given(timelines())
def test_a_lane_holds_one_tensor_at_a_time(t: StepTimeline) -> None:
    busy: set[str] = set()
    most = 0
    for e in perfetto(t)["traceEvents"]:
        if e["ph"] == "b":
            assert e["id"] not in busy
            busy.add(e["id"])
            most = max(most, len(busy))
        elif e["ph"] == "e":
            busy.remove(e["id"])
    big = [b for b in t.blocks if b.nbytes >= SMALLEST]
    assert most == max((sum(b.born <= e < b.died for b in big) for e in range(t.events)), default=0)


def test_slices_cover_the_step() -> None:
    t = recorded()
    kinds = check(perfetto(t))
    for tid in (1, 2):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in kinds["X"] if e["tid"] == tid]
        assert spans[0][0] == 0 and spans[-1][1] == t.events
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_by_hand(tmp_path: Path) -> None:
    write_perfetto(step(), tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text())
    assert [(e["name"], e["ts"]) for e in found["traceEvents"] if e["ph"] == "b"] == [
        ("conv1 [3, 250000]", 0),
        ("conv1 [250000]", 1),
        ("conv1 [1500000]", 3),
    ]
    counter = [(e["ts"], e["args"]["bytes"]) for e in found["traceEvents"] if e["name"] == "live bytes"]
    assert counter == [(0, 3_000_000), (1, 4_000_000), (2, 3_000_000), (3, 9_000_000), (4, 3_002_000), (5, 2_000)]
    assert found["otherData"]["peak_bytes"] == 9_000_000 and found["otherData"]["model_bytes"] == 4_000
