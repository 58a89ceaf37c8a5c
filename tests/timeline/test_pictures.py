"""Pictures of timelines are written, with every band and block in its place, whatever the names are."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from timelines import first_fit, step, timelines

from floorplan.errors import FloorplanError
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.pictures import _box, _fullest, _outline, draw_timeline

pytest.importorskip("matplotlib")


@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(timelines())
def test_any_timeline_can_be_drawn(tmp_path: Path, t: StepTimeline) -> None:
    for offsets in (None, [first_fit(t.blocks), None]):
        draw_timeline([t, step()], tmp_path / "t.svg", offsets)
        root = ElementTree.parse(tmp_path / "t.svg").getroot()
        assert root.tag.endswith("svg") and len(list(root.iter())) > 20


def test_a_png_and_the_same_svg_twice(tmp_path: Path) -> None:
    t, offsets = step(), [0, 3_000_000, 3_000_000, 9_000_000]
    draw_timeline([t], tmp_path / "t.png", [offsets], title="a title")
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for name in ("a.svg", "b.svg"):
        draw_timeline([t], tmp_path / name, [offsets])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_boxes_and_outlines() -> None:
    assert _box(1_000_000, step().blocks[2]) == [(3, 1), (4, 1), (4, 7), (3, 7)]
    corners = _outline([0.0, 1, 2, 3], [0.0, 0, 0], [2.0, 5, 5.001], 0.01)
    assert corners == [(0, 2), (1, 2), (1, 5), (3, 5), (3, 0), (0, 0)]


@given(timelines())
@settings(deadline=None)
def test_the_chosen_events_hold_the_peak(t: StepTimeline) -> None:
    assert max((t.live[e] for e in _fullest(t)), default=0) == t.peak
    long = StepTimeline(t.name, t.blocks, 5000)
    assert len(_fullest(long)) == 600 and max(long.live[e] for e in _fullest(long)) == long.peak


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(FloorplanError, match="no timeline to show"):
        draw_timeline([], tmp_path / "t.png")
    with pytest.raises(FloorplanError, match="1 layouts for 2 timelines"):
        draw_timeline([step(), step()], tmp_path / "t.png", [None])
    with pytest.raises(FloorplanError, match="name a .png, .svg or .pdf file"):
        draw_timeline([step()], tmp_path / "t.gif")
    with pytest.raises(FloorplanError, match="2 offsets for 4 blocks"):
        draw_timeline([step()], tmp_path / "t.png", [[0, 1]])
    assert not list(tmp_path.iterdir())
