"""Timelines as a picture for a README: live bytes over the step, stacked by band, above the floorplan.

The same stack and colours as the page, on a light ground, one column a timeline.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from floorplan.errors import amount, clean
from floorplan.files import ensure_drawable, save_figure
from floorplan.timeline.bands import Band, Layouts, band_of, extent, lasts, layouts_of, live_by_band, phases, used_bands
from floorplan.timeline.blocks import Block, StepTimeline

MB = 1e6
COLUMNS = 600  # stretches of the step that a picture tells apart
PER_PICTURE = 4000  # rectangles of a floorplan that stay vectors in an SVG
INK, MUTED, SHADE = "#1b1f24", "#57606a", "#f6f8fa"


def draw_timeline(
    timelines: Sequence[StepTimeline], path: str | Path, offsets: Layouts | None = None, *, title: str = ""
) -> None:
    """Write PNG, SVG or PDF by the name; without offsets only the live bytes are drawn.

    FloorplanError: no timeline, a layout that does not fit, matplotlib missing, or a path that takes no file.
    """
    layouts = layouts_of("plot", timelines, offsets)
    sizes = [extent(t, o) for t, o in zip(timelines, layouts, strict=True)]
    save_figure(_figure(ensure_drawable(path), timelines, layouts, sizes, title), path)


def _figure(pyplot: Any, timelines: Sequence[StepTimeline], layouts: Layouts, sizes: Sequence[int], title: str) -> Any:
    rows = 2 if any(o is not None for o in layouts) else 1
    size = (max(6.0, 5.2 * len(timelines)), 0.9 + 2.9 * rows)
    grid = {"squeeze": False, "layout": "constrained", "height_ratios": [1, 1.25][:rows]}
    figure, axes = pyplot.subplots(rows, len(timelines), figsize=size, **grid)
    tallest, largest = max(t.peak for t in timelines), max(sizes)
    for i, (t, offsets) in enumerate(zip(timelines, layouts, strict=True)):
        _stack(axes[0][i], t, tallest or 1)
        if rows == 2:
            _floorplan(axes[1][i], t, offsets, largest or 1)
    axes[0][0].set_ylabel("bytes alive (MB)")
    if rows == 2:
        axes[1][0].set_ylabel("address (MB)")
    _legend(figure, [b for b in used_bands(timelines) if any(_visible(b, t) for t in timelines)])
    if title:
        figure.suptitle(clean(title), parse_math=False)
    return figure


def _frame(axes: Any, t: StepTimeline, most: float) -> None:
    """A ground, a scale, and the directions of the step in the place of ticks."""
    axes.set_facecolor(SHADE)
    axes.set_xlim(0, max(t.events, 1))
    axes.set_ylim(0, most / MB)
    axes.grid(axis="y", color="#e1e5ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    stretches = phases(t)
    axes.set_xticks([s for s, _, _ in stretches], labels=[""] * len(stretches))
    style = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 9, "color": MUTED}
    for start, end, direction in stretches:
        if (end - start) * 90 > len(direction) * 1.6 * t.events:  # the word fits into its stretch
            middle = (start + end) / 2
            axes.annotate(direction, (middle, 0), (0, -5), xycoords=axes.get_xaxis_transform(), **style)


def _stack(axes: Any, t: StepTimeline, most: float) -> None:
    _frame(axes, t, most * 1.14)
    axes.set_title(fill(clean(t.name), 44), fontsize=11, parse_math=False)
    chosen = _fullest(t)
    base = np.zeros(len(chosen))
    colours = {b.name: b.light for b in used_bands([t])}
    edges = np.append(chosen, t.events).astype(float)
    edges[:1] = 0
    for name, values in live_by_band(t).items():
        top = base + values[chosen] / MB
        _fill(axes, [_outline(edges, base, top, most / MB / 1500)], colours[name])
        base = top
    if not t.blocks:
        return
    at = t.peak_at + 0.5
    axes.axhline(t.peak / MB, color=INK, linewidth=0.9, linestyle=(0, (5, 4)))
    axes.plot([at], [t.peak / MB], "o", color=INK, markersize=4)
    apart, side = (-6, "right") if at > 0.6 * t.events else (6, "left")
    style = {"textcoords": "offset points", "ha": side, "va": "bottom", "fontsize": 10, "color": INK}
    axes.annotate(f"peak {amount(t.peak)}", (at, t.peak / MB), (apart, 3), **style)


def _floorplan(axes: Any, t: StepTimeline, offsets: Sequence[int] | None, most: float) -> None:
    _frame(axes, t, most * 1.02)
    if offsets is None:
        axes.text(0.5, 0.5, "no layout", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        return
    placed = [(o, b) for o, b in zip(offsets, t.blocks, strict=True) if lasts(b)]
    colours = {b.name: b.light for b in used_bands([t])}
    vague = len(placed) > PER_PICTURE
    for name, colour in colours.items():
        mine = [(o, b) for o, b in placed if band_of(b) == name]
        thick = [_box(o, b) for o, b in mine if b.nbytes * 200 >= most]
        _fill(axes, thick, colour, edgecolor="white", linewidth=0.25, rasterized=vague)
        # An edge of its own colour keeps a thin one visible.
        thin = [_box(o, b) for o, b in mine if b.nbytes * 200 < most]
        _fill(axes, thin, colour, edgecolor=colour, linewidth=0.4, rasterized=vague)


def _box(offset: int, b: Block) -> list[tuple[float, float]]:
    low, high = offset / MB, (offset + b.nbytes) / MB
    return [(b.born, low), (b.died, low), (b.died, high), (b.born, high)]


def _fullest(t: StepTimeline) -> NDArray[np.int64]:
    """The event at which each of at most COLUMNS stretches is fullest: no spike is lost, no file grows huge."""
    total = np.array(t.live)
    edges = sorted({i * t.events // COLUMNS for i in range(COLUMNS + 1)})
    return np.array([a + int(total[a:b].argmax()) for a, b in pairwise(edges)], np.int64)


def _outline(edges: Any, base: Any, top: Any, least: float) -> list[tuple[float, float]]:
    """The corners of a band, left to right above and back below; steps smaller than `least` are left out."""
    return [*_steps(edges, top, least), *reversed(_steps(edges, base, least))]


def _steps(edges: Any, values: Any, least: float) -> list[tuple[float, float]]:
    corners = [(float(edges[0]), float(values[0]))] if len(values) else []
    for x, v in zip(edges, values, strict=False):
        last = corners[-1][1]
        if abs(v - last) > least:
            corners += [(float(x), last), (float(x), float(v))]
    return [*corners, (float(edges[-1]), corners[-1][1])] if corners else []


def _fill(axes: Any, polygons: Sequence[Sequence[tuple[float, float]]], colour: str, **style: Any) -> None:
    """All polygons as one path: a file of one element instead of thousands."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    closed = [Outline([*p, p[0]], closed=True) for p in polygons if p]
    if closed:
        axes.add_patch(PathPatch(Outline.make_compound_path(*closed), **{"facecolor": colour, "linewidth": 0} | style))


def _visible(band: Band, t: StepTimeline) -> bool:
    values = live_by_band(t).get(band.name)
    return values is not None and int(values.max()) * 300 >= t.peak


def _legend(figure: Any, bands: Sequence[Band]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=b.light, label=b.name) for b in bands]
    columns = max(2, int(figure.get_figwidth() // 1.7))
    sizes = {"fontsize": 9, "handlelength": 1.1, "handleheight": 1.0, "columnspacing": 1.4}
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, **sizes)
