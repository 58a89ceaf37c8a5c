"""A timeline as a PyTorch memory snapshot, the file that pytorch.org/memory_viz opens.

    arena -> one segment          block -> alloc … free_requested, free_completed          event -> 1 µs

The viewer reads pickle protocols 2 to 4 of plain values. It shows the node as a file and the op as a
function, in place of the stack trace of a recorded snapshot.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from floorplan.files import write_bytes
from floorplan.timeline.bands import band_of, extent, lasts
from floorplan.timeline.blocks import Block, StepTimeline

BASE = 1 << 40  # an address that no one takes for a small number; exact in JavaScript
PROTOCOL = 4

_Placed = tuple[int, Block]


def snapshot(timeline: StepTimeline, offsets: Sequence[int] | None = None) -> dict[str, Any]:
    """Plain data for the memory viewer; without offsets every storage has addresses of its own."""
    placed = _placed(timeline, offsets)
    size = max((a + b.nbytes - BASE for a, b in placed), default=0)
    ends = sorted(((a, b) for a, b in placed if b.died >= timeline.events), key=lambda p: p[0])
    held = dict.fromkeys(("allocated_size", "active_size", "requested_size"), sum(b.nbytes for _, b in ends))
    kind = {"stream": 0, "segment_type": "large", "segment_pool_id": [0, 0], "is_expandable": False, "frames": []}
    segment = {"device": 0, "address": BASE, "total_size": size, **held, **kind, "blocks": _tiles(ends, size)}
    return {"segments": [segment] if size else [], "device_traces": [_trace(placed, size, timeline.events)]}


def write_snapshot(timeline: StepTimeline, offsets: Sequence[int] | None, path: str | Path) -> None:
    """Pickle the snapshot; FloorplanError if the file cannot be written."""
    write_bytes(path, pickle.dumps(snapshot(timeline, offsets), protocol=PROTOCOL))


def _placed(timeline: StepTimeline, offsets: Sequence[int] | None) -> list[_Placed]:
    """(address, block) of every block that takes memory; the viewer tells apart by address alone."""
    extent(timeline, offsets)
    found, end = [], BASE
    for i, b in enumerate(timeline.blocks):
        if lasts(b):
            found.append((end if offsets is None else BASE + offsets[i], b))
            end += b.nbytes
    return found


def _frames(block: Block) -> list[dict[str, Any]]:
    kind = f"{block.dtype}{list(block.shape)}"
    return [
        {"filename": block.node or "outside the graph", "name": f"{block.op} {kind}", "line": block.born},
        {"filename": block.direction, "name": band_of(block), "line": block.born},
    ]


def _trace(placed: Sequence[_Placed], size: int, events: int) -> list[dict[str, Any]]:
    """Events in order of time; at one event what dies goes before what is born, for it may take its place."""
    moments = [(b.born, 1, a, b) for a, b in placed] + [(b.died, 0, a, b) for a, b in placed if b.died < events]
    out = [_event("segment_alloc", BASE, size, 0, [])] if size else []
    for time, born, a, b in sorted(moments, key=lambda m: m[:3]):
        for action in ("alloc",) if born else ("free_requested", "free_completed"):
            out.append(_event(action, a, b.nbytes, time, _frames(b)))
    return out


def _event(action: str, address: int, size: int, time: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time, "frames": frames}


def _tiles(ends: Sequence[_Placed], size: int) -> list[dict[str, Any]]:
    """What is alive at the end of the step, and the gaps between, as blocks that tile the segment."""
    tiles, at = [], BASE
    for a, b in ends:
        if a > at:
            tiles.append(_tile(at, a - at, "inactive", []))
        tiles.append(_tile(a, b.nbytes, "active_allocated", _frames(b)))
        at = a + b.nbytes
    if at < BASE + size:
        tiles.append(_tile(at, BASE + size - at, "inactive", []))
    return tiles


def _tile(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
