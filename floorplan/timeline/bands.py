"""The bands that every picture of a timeline is stacked from, their colours, and the words for an instant.

    kept for the backward, by pillar | gradients | outputs | temporaries, by direction

What is kept has a hue, what comes and goes is grey. The hues are Okabe and Ito's, told apart without
red-green vision; neighbours in the stack differ in lightness as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from floorplan.errors import FloorplanError
from floorplan.timeline.blocks import DIRECTIONS, Block, StepTimeline

Layouts = Sequence[Sequence[int] | None]  # one offset a block for each timeline


@dataclass(frozen=True)
class Band:
    """One layer of the stack, with its colour on a light and on a dark ground."""

    name: str
    light: str
    dark: str


BANDS = (
    Band("convolution", "#0072b2", "#3d9bd6"),
    Band("normalization", "#56b4e9", "#8fd0f5"),
    Band("activation", "#d55e00", "#e8743b"),
    Band("pooling", "#f0e442", "#f0e442"),
    Band("adapter", "#009e73", "#2fbf95"),
    Band("gate", "#e69f00", "#f5b83d"),
    Band("other", "#882255", "#f9b9dc"),
    Band("gradient", "#332288", "#7e6ee0"),
    Band("output", "#8c510a", "#8f6234"),
    Band("temporary, forward", "#b0b9c4", "#6d7683"),
    Band("temporary, loss", "#4b5563", "#d3d8df"),
    Band("temporary, backward", "#7f8a99", "#99a3b0"),
    Band("temporary, optimizer", "#d3d9e0", "#4d5561"),
    Band("temporary, replay", "#5f6875", "#b6bec9"),
)
_NAMES = {b.name for b in BANDS}


def band_of(block: Block) -> str:
    """The name of the band that a block belongs to."""
    if block.role == "temporary":
        direction = block.direction if block.direction in DIRECTIONS else "forward"
        return f"temporary, {direction}"
    return block.role if block.role in _NAMES else "other"


def is_kept(block: Block) -> bool:
    """Whether the forward left it for the backward."""
    return block.role not in ("temporary", "gradient", "output")


def used_bands(timelines: Sequence[StepTimeline]) -> list[Band]:
    """The bands that occur, bottom of the stack first."""
    found = {band_of(b) for t in timelines for b in t.blocks if lasts(b)}
    return [b for b in BANDS if b.name in found]


def lasts(block: Block) -> bool:
    """Whether a block takes any memory at any event."""
    return block.nbytes > 0 and block.died > block.born


def live_by_band(timeline: StepTimeline) -> dict[str, NDArray[np.int64]]:
    """Bytes alive during each event, [events], for each band that occurs, bottom of the stack first."""
    change = {b.name: np.zeros(timeline.events + 1, np.int64) for b in used_bands([timeline])}
    for b in filter(lasts, timeline.blocks):
        change[band_of(b)][b.born] += b.nbytes
        change[band_of(b)][b.died] -= b.nbytes
    return {name: np.cumsum(c)[: timeline.events] for name, c in change.items()}


def stretches(timeline: StepTimeline, key: Callable[[Block], Any]) -> list[tuple[Block, int, int]]:
    """(first block, its event, event after the last) of each run of blocks of one key, in order of birth."""
    heads = [next(run) for _, run in groupby(sorted(timeline.blocks, key=lambda b: b.born), key)]
    ends = [b.born for b in heads[1:]] + [timeline.events]
    return [(b, b.born, end) for b, end in zip(heads, ends, strict=False)]


def phases(timeline: StepTimeline) -> list[tuple[int, int, str]]:
    """(first event, event after the last, direction) of each stretch of the step, in order."""
    found = [(s, e, b.direction) for b, s, e in stretches(timeline, lambda b: b.direction)]
    return [(s, e, d) for s, e, d in [*((0, e, d) for _, e, d in found[:1]), *found[1:]] if e > s]


def moment(timeline: StepTimeline, event: int) -> str:
    """An event in words, by what was allocated last: "backward of features_2_conv_1"."""
    b = max((b for b in timeline.blocks if b.born <= event), key=lambda b: b.born, default=None)
    return "" if b is None else f"{b.direction} of {b.node}" if b.node not in ("", b.direction) else b.direction


def layouts_of(what: str, timelines: Sequence[StepTimeline], offsets: Layouts | None) -> Layouts:
    """A layout or None for each timeline of a picture; FloorplanError where their numbers differ, or are 0."""
    if not timelines:
        raise FloorplanError(f"{what}: no timeline to show; give at least one")
    layouts: Layouts = [None] * len(timelines) if offsets is None else offsets
    if len(layouts) != len(timelines):
        raise FloorplanError(f"{what}: {len(layouts)} layouts for {len(timelines)} timelines; give one each")
    return layouts


def extent(timeline: StepTimeline, offsets: Sequence[int] | None) -> int:
    """Bytes of the smallest arena that holds the layout; FloorplanError if it is not one offset a block."""
    if offsets is None:
        return 0
    if len(offsets) != len(timeline.blocks):
        counts = f"{len(offsets)} offsets for {len(timeline.blocks)} blocks"
        raise FloorplanError(f"layout of {timeline.name}: {counts}; give one a block")
    ends = [o + b.nbytes for o, b in zip(offsets, timeline.blocks, strict=True) if lasts(b)]
    return max(ends, default=0)
