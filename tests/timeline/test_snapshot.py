"""Snapshots are accepted by torch's own tools, and give the timeline's peak under the viewer's rules."""

import copy
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from timelines import first_fit, recorded, step, timelines
from torch.cuda import _memory_viz

from floorplan.errors import FloorplanError
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.snapshot import BASE, PROTOCOL, snapshot, write_snapshot

# What the viewer's unpickler knows; anything else ends in "UNKNOWN OPCODE".
OPCODES = set(
    "APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE PROTO SETITEMS "
    "SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1 "
    "TUPLE3 LONG_BINPUT LIST DICT SETITEM".split()
)


def elided(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The viewer shows a request and its completion as one `free`; a request alone would stay pending."""
    out: list[dict[str, Any]] = []
    for e in trace:
        last = out[-1] if out else {"action": ""}
        if e["action"] == "free_completed" and last["action"] == "free_requested" and last["addr"] == e["addr"]:
            last["action"] = "free"
        else:
            out.append(dict(e))
    assert not [e for e in out if e["action"] in ("free_requested", "free_completed")]
    return out


def viewer_check(data: dict[str, Any]) -> int:
    """Replay the viewer: the timeline forwards, the allocator's state backwards. Gives the peak it draws."""
    (trace,) = map(elided, data["device_traces"])
    assert all("category" not in e and isinstance(e["frames"], list) for e in trace)
    alive: dict[int, int] = {}
    peak = 0
    for e in trace:
        if e["action"] == "alloc":
            assert e["size"] > 0 and e["addr"] not in alive
            alive[e["addr"]] = e["size"]
        elif e["action"] == "free":
            assert alive.pop(e["addr"]) == e["size"]
        peak = max(peak, sum(alive.values()))
    blocks = {}
    for s in data["segments"]:
        at = s["address"]
        for b in s["blocks"]:
            assert b["address"] == at and b["size"] > 0
            at += b["size"]
            if b["state"] == "active_allocated":
                blocks[b["address"]] = b["requested_size"]
        assert at == s["address"] + s["total_size"]
        assert s["allocated_size"] == sum(b["size"] for b in s["blocks"] if b["state"] == "active_allocated")
    assert blocks == alive  # what it starts from in drawing the state at the end
    segments = [(s["address"], s["address"] + s["total_size"]) for s in data["segments"]]
    for e in reversed(trace):
        if e["action"] == "free":
            blocks[e["addr"]] = e["size"]
        elif e["action"] == "alloc":
            del blocks[e["addr"]]
        elif e["action"] == "segment_alloc":
            assert (e["addr"], e["addr"] + e["size"]) in segments and not blocks
            continue
        spans = sorted((a, a + n) for a, n in blocks.items())
        assert all(x[1] <= y[0] for x, y in zip(spans, spans[1:], strict=False))
        assert all(any(s <= a and b <= t for s, t in segments) for a, b in spans)
    assert not blocks
    return peak


@settings(deadline=None)
@given(timelines())
def test_the_viewer_draws_the_peak(t: StepTimeline) -> None:
    for offsets in (None, first_fit(t.blocks)):
        data = snapshot(t, offsets)
        assert viewer_check(data) == t.peak
        raw = pickle.dumps(data, protocol=PROTOCOL)
        assert {op.name for op, _, _ in pickletools.genops(raw)} <= OPCODES


def test_a_real_step_in_torchs_tools() -> None:
    t = recorded()
    data = snapshot(t, first_fit(t.blocks))
    assert viewer_check(data) == t.peak > 0
    assert "alloc" not in _memory_viz.segsum(copy.deepcopy(data)).lower()[:5]
    assert f"{len(data['device_traces'][0])} entries" in _memory_viz.trace(copy.deepcopy(data))
    for draw in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in draw(copy.deepcopy(data))
    assert "snapshot.pickle" in _memory_viz.trace_plot(copy.deepcopy(data), plot_segments=True, filter_freed=True)
    kept: list[str] = []
    _memory_viz.memory(data, lambda text: kept.append(text))
    assert "active_allocated" in kept[0]


def test_frames_name_the_node_and_say_what_it_is() -> None:
    data = snapshot(step(), [0, 3_000_000, 3_000_000, 9_000_000])
    first = data["device_traces"][0][1]
    assert first["action"] == "alloc" and first["addr"] == BASE
    assert first["frames"][0] == {"filename": "conv1", "name": "aten.convolution.default float32[3, 250000]", "line": 0}
    assert data["segments"][0]["total_size"] == 9_002_000


def test_memory_is_handed_over_at_one_event() -> None:
    trace = snapshot(step(), [0, 3_000_000, 3_000_000, 3_000_000])["device_traces"][0]
    at = [(e["action"], e["size"]) for e in trace if e["time_us"] == 4]
    assert at == [("free_requested", 6_000_000), ("free_completed", 6_000_000), ("alloc", 2_000)]


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    t = step()
    write_snapshot(t, None, tmp_path / "s.pickle")
    raw = (tmp_path / "s.pickle").read_bytes()
    assert raw[:2] == bytes([0x80, PROTOCOL]) and viewer_check(pickle.loads(raw)) == t.peak
    with pytest.raises(FloorplanError, match="its folder does not exist"):
        write_snapshot(t, None, tmp_path / "no" / "s.pickle")
    with pytest.raises(FloorplanError, match="offsets for 4 blocks"):
        write_snapshot(t, [1], tmp_path / "t.pickle")
    assert [p.name for p in tmp_path.iterdir()] == ["s.pickle"]
