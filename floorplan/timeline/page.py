"""One HTML page of timelines: live bytes over the step, the floorplan, and what is alive at any instant.

    timelines, offsets -> JSON in the page -> two canvases, a table and a tip a timeline

The page fetches nothing and its policy forbids it to. Names in a model are whatever its author wrote:
they travel as JSON and are shown as text, never as markup.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from floorplan.errors import amount
from floorplan.timeline import bands
from floorplan.timeline.bands import Band, Layouts
from floorplan.timeline.blocks import StepTimeline

SCRIPTS = ("model.js", "draw.js", "panel.js", "tell.js", "page.js")


def page(timelines: Sequence[StepTimeline], offsets: Layouts | None, title: str, notes: Sequence[str] = ()) -> str:
    """A self-contained page; offsets: one a block for each timeline, or None for a page without floorplans.

    FloorplanError where there is no timeline, or a layout does not fit its timeline.
    """
    layouts = bands.layouts_of("page", timelines, offsets)
    style, script = _asset("page.css"), "'use strict';\n" + "\n".join(map(_asset, SCRIPTS))
    return Template(_asset("page.html")).substitute(
        title=_text(title),
        notes="\n".join(f'<p class="note">{_text(n)}</p>' for n in notes),
        summary=_summary(timelines, layouts),
        policy=f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        style=style,
        script=script,
        data=_json(timelines, layouts),
    )


def _asset(name: str) -> str:
    return files("floorplan.timeline").joinpath("web", name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _sound(text: str) -> str:
    """Text that UTF-8 can hold: lone surrogates are replaced."""
    return text.encode("utf-8", "replace").decode()


def _amount(nbytes: int) -> str:
    """Bytes that a narrow cell does not part from their unit."""
    return amount(nbytes).replace(" ", "\N{NO-BREAK SPACE}")


def _text(text: str) -> str:
    return escape(_sound(text))


def _json(timelines: Sequence[StepTimeline], layouts: Layouts) -> str:
    """The data of the page; nothing in it can end the script element that holds it."""
    strings: dict[str, int] = {}
    used = bands.used_bands(timelines)
    lines = [_line(t, o, used, strings) for t, o in zip(timelines, layouts, strict=True)]
    shown = [{"name": b.name, "light": b.light, "dark": b.dark} for b in used]
    document = {"bands": shown, "lines": lines, "strings": list(strings)}
    raw = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return raw.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _line(
    t: StepTimeline, offsets: Sequence[int] | None, used: Sequence[Band], strings: dict[str, int]
) -> dict[str, Any]:
    """Columns of numbers, one entry a block; words are numbers into `strings`."""
    number: Callable[[str], int] = lambda word: strings.setdefault(_sound(word), len(strings))  # noqa: E731
    places = {b.name: i for i, b in enumerate(used)}
    chosen = [i for i, b in enumerate(t.blocks) if bands.lasts(b)]
    blocks = [t.blocks[i] for i in chosen]
    return {
        "name": _sound(t.name),
        "events": t.events,
        "peak": t.peak,
        "peakAt": t.peak_at,
        "arena": bands.extent(t, offsets),
        "phases": bands.phases(t),
        "born": [b.born for b in blocks],
        "died": [b.died for b in blocks],
        "bytes": [b.nbytes for b in blocks],
        "band": [places[bands.band_of(b)] for b in blocks],
        "offset": None if offsets is None else [offsets[i] for i in chosen],
        "node": [number(b.node) for b in blocks],
        "op": [number(b.op) for b in blocks],
        "shape": [number(f"{b.dtype} {'×'.join(map(str, b.shape))}".strip()) for b in blocks],
        "direction": [number(b.direction) for b in blocks],
    }


def _summary(timelines: Sequence[StepTimeline], layouts: Layouts) -> str:
    """The figures, readable without JavaScript: one row a timeline, turned on its side in a narrow window."""
    both = list(zip(timelines, layouts, strict=True))
    columns = [("requested peak", [_peak(t, timelines[0]) for t in timelines])]
    columns.append(("kept for the backward then", [_kept(t) for t in timelines]))
    if any(o is not None for o in layouts):
        columns.append(("arena (static layout)", [_arena(t, o) for t, o in both]))
    if any(t.state for t in timelines):
        columns.append(("standing apart", [_apart(t) for t in timelines]))
        columns.append(("total", [f"<b>{_amount(t.total)}</b>" for t in timelines]))
    head = "".join(f'<th role="columnheader">{name}</th>' for name in ("", *(name for name, _ in columns)))
    rows = [f'<tr role="row">{head}</tr>']
    for i, t in enumerate(timelines):
        cells = "".join(f'<td role="cell">{values[i]}</td>' for _, values in columns)
        rows.append(f'<tr role="row"><th role="rowheader"><bdi>{_text(t.name)}</bdi></th>{cells}</tr>')
    return f'<table role="table" class="summary c{len(columns) + 1}">{"".join(rows)}</table>'


def _peak(t: StepTimeline, first: StepTimeline) -> str:
    less = f" ({first.peak / t.peak:.1f}× less)" if t is not first and 0 < t.peak < first.peak else ""
    return f"<b>{_amount(t.peak)}</b>{less}<small>{_text(bands.moment(t, t.peak_at))}</small>"


def _kept(t: StepTimeline) -> str:
    nbytes = sum(b.nbytes for b in t.alive(t.peak_at) if bands.is_kept(b))
    share = f"<small>{100 * nbytes / t.peak:.1f} % of the peak</small>" if t.peak else ""
    return _amount(nbytes) + share


def _arena(t: StepTimeline, offsets: Sequence[int] | None) -> str:
    if offsets is None:
        return "—"
    size = bands.extent(t, offsets)
    return f"{_amount(size)}<small>{size / t.peak:.4f} × the peak</small>" if t.peak else _amount(size)


def _apart(t: StepTimeline) -> str:
    parts = ", ".join(f"{_text(name)} {_amount(n)}" for name, n in t.state)
    return f"{_amount(sum(n for _, n in t.state))}<small>{parts}</small>"
