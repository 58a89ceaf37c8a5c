"""The terminal's picture: its height follows the live bytes, its table names what the peak is made of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import recorded, step, timelines

from floorplan.errors import FloorplanError
from floorplan.timeline.blocks import StepTimeline
from floorplan.timeline.sparkline import columns, text


@settings(deadline=None)
@given(timelines(), st.integers(48, 200))
def test_fits_the_terminal_and_shows_the_peak(t: StepTimeline, width: int) -> None:
    shown = text(t, width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "\x1b" not in shown and all(c.isprintable() for line in shown.splitlines() for c in line)
    if t.peak:
        assert "█" in shown


@given(st.lists(st.integers(0, 10**9), min_size=1), st.integers(1, 100))
def test_no_spike_is_lost(live: list[int], width: int) -> None:
    found = columns(live, width)
    assert len(found) == width and max(found) <= max(live) and set(found) <= set(live)
    if width <= len(live):
        assert max(found) == max(live)
    else:
        assert found[0] == live[0] and found[-1] == live[-1]


def test_by_hand() -> None:
    assert text(step(), 48).splitlines() == [
        "by hand: peak 9.00 MB at event 3 of 6 (backward",
        "  of conv1)",
        "9.00 MB ┤                   ███████",
        "        │                   ███████",
        "        │▃▃▃▃▃▃▃▇▇▇▇▇▇▃▃▃▃▃▃███████▃▃▃▃▃▃",
        "        │████████████████████████████████▁▁▁▁▁▁",
        "      0 └─ forward ─────────┴ backward ────────",
        "",
        "  bytes   share  role         node",
        "6.00 MB  66.7 %  temporary    conv1",
        "3.00 MB  33.3 %  convolution  conv1",
    ]


def test_contributors() -> None:
    lines = text(step(), 80, top=1).splitlines()
    assert lines[0] == "by hand: peak 9.00 MB at event 3 of 6 (backward of conv1)"
    assert lines[-2].split() == ["6.00", "MB", "66.7", "%", "temporary,", "backward", "conv1", "1500000"]
    assert lines[-1] == "and 1 more, 3.00 MB"
    real = recorded()
    most = real.alive(real.peak_at)[0]
    assert f"{100 * most.nbytes / real.peak:.1f} %" in text(real, 100)


def test_too_narrow() -> None:
    with pytest.raises(FloorplanError, match="width 20: too narrow for a chart; give 48 columns or more"):
        text(step(), 20)
