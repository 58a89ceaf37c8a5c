"""The bands add up to what is alive, and words and figures read as people write them."""

import numpy as np
import pytest
from hypothesis import given, settings
from timelines import recorded, step, timelines

from floorplan.errors import FloorplanError, amount, clean
from floorplan.ledger.pillars import PILLARS
from floorplan.timeline.bands import BANDS, band_of, extent, lasts, live_by_band, moment, phases, used_bands
from floorplan.timeline.blocks import DIRECTIONS, Block, StepTimeline


@settings(deadline=None)
@given(timelines())
def test_bands_add_up(t: StepTimeline) -> None:
    bands = live_by_band(t)
    assert list(bands) == [b.name for b in used_bands([t])]
    total = sum(bands.values(), start=np.zeros(t.events, np.int64))
    assert total.tolist() == list(t.live)
    assert all(v.max(initial=0) > 0 for v in bands.values())


def test_every_role_has_a_band() -> None:
    names = {b.name for b in BANDS}
    roles = [*PILLARS, "gradient", "output", *(f"temporary, {d}" for d in DIRECTIONS)]
    assert names == set(roles) and len(BANDS) == len(roles)
    made = Block(0, 1, 4, "n", "backward", "op", (1,), "float32", "temporary")
    assert band_of(made) == "temporary, backward"
    assert band_of(Block(0, 1, 4, "n", "forward", "op", (1,), "float32", "of tomorrow")) == "other"
    assert not lasts(Block(3, 3, 4, "n", "forward", "op", (1,), "float32", "gate"))


@pytest.mark.parametrize("ground", ["light", "dark"])
def test_neighbours_differ_in_lightness_or_hue_without_red_and_green(ground: str) -> None:
    """In what deuteranopes see (a mix of red and green, and blue), the next band is another colour."""
    seen = []
    for b in BANDS:
        red, green, blue = (int(getattr(b, ground)[i : i + 2], 16) for i in (1, 3, 5))
        seen.append(np.array([0.37 * red + 0.63 * green, blue]))
    assert min(np.abs(a - b).max() for a, b in zip(seen, seen[1:], strict=False)) > 25


def test_phases_and_moments() -> None:
    t = step()
    assert phases(t) == [(0, 3, "forward"), (3, 6, "backward")]
    assert moment(t, 0) == "forward of conv1" and moment(t, t.peak_at) == "backward of conv1"
    assert moment(StepTimeline("empty", (), 0), 0) == "" and phases(StepTimeline("empty", (), 0)) == []
    real = phases(recorded())
    assert real[0][0] == 0 and real[-1][1] == recorded().events
    assert all(a[1] == b[0] for a, b in zip(real, real[1:], strict=False))


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.00 MB"),
        (1_234_567_890, "1,234.57 MB"),
    ],
)
def test_amounts(nbytes: int, words: str) -> None:
    assert amount(nbytes) == words


def test_extent_of_a_layout() -> None:
    t = step()
    assert extent(t, [0, 3_000_000, 3_000_000, 9_000_000]) == 9_002_000
    assert extent(t, None) == 0
    with pytest.raises(FloorplanError, match="by hand: 1 offsets for 4 blocks; give one a block"):
        extent(t, [0])


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert clean("a\x1b[31m\n\u202eb\udc80ü") == "a�[31m��b�ü"
