"""A timeline as text: the live bytes over the step, and what the peak is made of.

640 MB ┤    ▂▄▇█▆▃
       └ forward ─┴ backward
"""

from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap

from tabulate import tabulate

from floorplan.errors import FloorplanError, amount, clean
from floorplan.timeline.bands import band_of, moment, phases
from floorplan.timeline.blocks import StepTimeline

BLOCKS = " ▁▂▃▄▅▆▇█"
HEIGHT = 4
NARROWEST = 48  # columns


def text(timeline: StepTimeline, width: int = 80, top: int = 6) -> str:
    """A chart `width` columns wide and the `top` contributors at the peak.

    FloorplanError if fewer than 48 columns are given.
    """
    if width < NARROWEST:
        raise FloorplanError(f"width {width}: too narrow for a chart; give {NARROWEST} columns or more")
    at = timeline.peak_at
    when = f" ({clean(moment(timeline, at))})" if timeline.blocks else ""
    head = f"{clean(timeline.name)}: peak {amount(timeline.peak)} at event {at:,} of {timeline.events:,}{when}"
    lines = wrap(head, width, subsequent_indent="  ")
    lines += [*_chart(timeline, width), *_contributors(timeline, width, top)]
    return "\n".join(lines)


def columns(live: Sequence[int], width: int) -> list[int]:
    """The largest of each of `width` stretches of a curve; a short curve is stretched."""
    edges = [i * len(live) // width for i in range(width + 1)] if live else []
    return [max(live[a : max(a + 1, b)]) for a, b in pairwise(edges)]


def _chart(timeline: StepTimeline, width: int) -> list[str]:
    """HEIGHT rows of blocks, in eighths of a row, over a line that names the directions."""
    label = amount(timeline.peak)
    inner, peak, full = width - len(label) - 3, max(timeline.peak, 1), len(BLOCKS) - 1
    # A column that holds anything shows at least the smallest mark, and only the peak fills the chart.
    heights = [-(-v * HEIGHT * full // peak) for v in columns(timeline.live, inner)]
    rows = []
    for row in reversed(range(HEIGHT)):
        name = label if row == HEIGHT - 1 else ""
        bar = "".join(BLOCKS[min(max(h - row * full, 0), full)] for h in heights)
        rows.append(f"{name:>{len(label)}} {'┤' if name else '│'}{bar}".rstrip())
    return [*rows, f"{0:>{len(label)}} {_axis(timeline, inner)}"]


def _axis(timeline: StepTimeline, inner: int) -> str:
    cells = ["─"] * inner
    for start, end, direction in phases(timeline):
        first, last = start * inner // timeline.events, end * inner // timeline.events
        if start and first < inner:
            cells[first] = "┴"
        word = f" {direction} "
        if len(word) < last - first:
            cells[first + 1 : first + 1 + len(word)] = word
    return "└" + "".join(cells)


def _contributors(timeline: StepTimeline, width: int, top: int) -> list[str]:
    alive = [b for b in timeline.alive(timeline.peak_at) if b.nbytes]
    if not alive:
        return []
    columns = [["bytes"], ["share"], ["role"], ["node"], ["shape"]][: 5 if width >= 72 else 4]
    for b in alive[:top]:
        role = band_of(b) if width >= 60 else band_of(b).partition(",")[0]
        share, shape = f"{100 * b.nbytes / timeline.peak:.1f} %", "x".join(map(str, b.shape)) or "scalar"
        cells = (amount(b.nbytes), share, role, clean(b.node or "-"), _short(shape, 18))
        for column, cell in zip(columns, cells, strict=False):
            column.append(cell)
    room = width - sum(max(map(len, c)) + 2 for c in columns if c[0] != "node")
    columns[3] = [_short(cell, room) for cell in columns[3]]
    # The header is a row like the others: tabulate would set headers wider than their words.
    align = ["right", "right", *["left"] * (len(columns) - 2)]
    shown = tabulate(list(zip(*columns, strict=True)), tablefmt="plain", colalign=align, disable_numparse=True)
    rest = alive[top:]
    more = [f"and {len(rest)} more, {amount(sum(b.nbytes for b in rest))}"] if rest else []
    return ["", *shown.splitlines(), *more]


def _short(word: str, room: int) -> str:
    """The word, its middle left out where it is too long: both ends of a node's name tell something."""
    room = max(room, 4)
    if len(word) <= room:
        return word
    left = (room - 1) // 2
    return f"{word[:left]}…{word[len(word) - (room - 1 - left) :]}"
