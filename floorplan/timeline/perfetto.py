"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    C    bytes alive; the same split by band
    X    directions of the step; the node whose op allocated last
    b e  every tensor of 64 KB or more, in as few lanes as its neighbours leave room for

One event of the timeline is drawn as one microsecond: the axis is order, not time.
"""

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from floorplan.files import write_text
from floorplan.timeline.bands import band_of, lasts, live_by_band, phases, stretches
from floorplan.timeline.blocks import StepTimeline

SMALLEST = 65_536  # bytes of a tensor that gets a bar of its own
PID = 1


def perfetto(timeline: StepTimeline) -> dict[str, Any]:
    """Trace Event Format (JSON object form), plain data; the counter's maximum is the timeline's peak."""
    events = [_event("M", "process_name", 0, 0, args={"name": timeline.name})]
    events += [_event("M", "thread_name", 0, tid, args={"name": name}) for tid, name in ((1, "step"), (2, "node"))]
    events += [*_counters(timeline), *_slices(timeline), *_tensors(timeline)]
    events.sort(key=lambda e: (e.get("ts", -1), e["ph"] != "e"))
    about = {"name": timeline.name, "peak_bytes": timeline.peak, "unit": "1 us = 1 allocation or free, in order"}
    state = {f"{k}_bytes": v for k, v in timeline.state}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about | state}


def write_perfetto(timeline: StepTimeline, path: str | Path) -> None:
    """Write the trace as JSON; FloorplanError if the file cannot be written."""
    write_text(path, json.dumps(perfetto(timeline), separators=(",", ":")))


def _event(ph: str, name: str, ts: int, tid: int, **more: Any) -> dict[str, Any]:
    return {"ph": ph, "name": name, "pid": PID, "tid": tid, "ts": ts, **more}


def _counters(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    bands, last, parts = live_by_band(timeline), -1, dict[str, int]()
    for e, total in enumerate(timeline.live):
        if total != last:
            yield _event("C", "live bytes", e, 0, args={"bytes": total})
        now = {name: int(v[e]) for name, v in bands.items()}
        if now != parts:
            yield _event("C", "live bytes by band", e, 0, args=now)
        last, parts = total, now


def _slices(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for start, end, direction in phases(timeline):
        yield _event("X", direction, start, 1, dur=end - start, cat="step")
    for b, start, end in stretches(timeline, lambda b: (b.node, b.direction)):
        yield _event("X", b.node or b.direction, start, 2, dur=end - start, cat=b.direction)


def _tensors(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    """Pairs with one id a lane: a lane is free again from the event at which its tensor died."""
    free, busy, lanes = list[int](), list[tuple[int, int]](), 0
    big = [b for b in timeline.blocks if lasts(b) and b.nbytes >= SMALLEST]
    for b in sorted(big, key=lambda b: (b.born, -b.nbytes)):
        while busy and busy[0][0] <= b.born:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
        heapq.heappush(busy, (b.died, lane))
        name = f"{b.node or b.direction} {list(b.shape)}"
        about = {"bytes": b.nbytes, "op": b.op, "dtype": b.dtype, "role": band_of(b)}
        yield _event("b", name, b.born, 0, cat="tensor", id=f"0x{lane:x}", args=about)
        yield _event("e", name, b.died, 0, cat="tensor", id=f"0x{lane:x}")
