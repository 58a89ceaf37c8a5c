"""Pictures of a comparison: what the peak is made of, and how the saved bytes grow with the batch."""

from pathlib import Path
from typing import Any

from floorplan.files import ensure_drawable, save_figure
from floorplan.methods.compare import Comparison, Row

MB = 1e6
PARTS = ("model", "optimizer", "saved", "gradients and the rest")
COLOURS = ("#9aa5b1", "#5b8def", "#e4572e", "#f3a712")


def parts(row: Row) -> tuple[int, int, int, int]:
    """The training-state peak of a row, split: model, optimizer, saved, what is left."""
    assert row.predicted is not None
    p = row.predicted
    return row.model, p.optimizer, p.saved, p.training_state_peak - row.model - p.optimizer - p.saved


def draw(found: Comparison, path: str | Path) -> None:
    """Stacked bars at the largest batch and saved-against-batch curves, as PNG, SVG or PDF by the name."""
    pyplot = ensure_drawable(path)
    rows = [r for r in found.rows if r.predicted is not None]
    labels = len({_label(r) for r in rows})
    size = (14, max(4.8, 0.32 * labels + 1))
    figure, (bars, curves) = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    _bars(bars, [r for r in rows if r.batch == max(x.batch for x in rows)])
    _curves(curves, rows)
    figure.suptitle(found.name)
    save_figure(figure, path)


def _label(row: Row) -> str:
    return f"{row.method}, r={row.rank}" if row.rank else row.method


def _bars(axes: Any, rows: list[Row]) -> None:
    labels, base = [_label(r) for r in rows], [0.0] * len(rows)
    for i, (name, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        heights = [parts(r)[i] / MB for r in rows]
        axes.barh(labels, heights, left=base, label=name, color=colour)
        base = [b + h for b, h in zip(base, heights, strict=True)]
    for y, total in enumerate(base):
        axes.text(total, y, f" {total:.2f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"training-state peak at batch {rows[0].batch} (MB)")
    axes.legend(fontsize=8, loc="lower right")


def _curves(axes: Any, rows: list[Row]) -> None:
    marks = "osv^D*Px"
    for i, label in enumerate(dict.fromkeys(_label(r) for r in rows)):
        mine = [r for r in rows if _label(r) == label and r.predicted and r.predicted.saved]
        if mine:
            saved = [r.predicted.saved / MB for r in mine if r.predicted]
            axes.plot([r.batch for r in mine], saved, marker=marks[i // 10 % len(marks)], label=label)
    axes.set_yscale("log")
    axes.set_xlabel("batch")
    axes.set_ylabel("saved (MB, log scale)")
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
