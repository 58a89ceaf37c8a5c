"""The command `floorplan plan`."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from floorplan.budget.model import objective
from floorplan.budget.plan import bytes_of, planned
from floorplan.budget.report import PlanReport
from floorplan.cli.options import Batch, Loss, Measure, MethodOptions, ModelOptions, Outputs, busy, numbers
from floorplan.cost_models.arena import Placement, place
from floorplan.errors import FloorplanError
from floorplan.files import write_text
from floorplan.methods.catalogue import plans_of
from floorplan.timeline import arena as arena_export
from floorplan.timeline import perfetto, sparkline
from floorplan.timeline.blocks import StepTimeline, intervals
from floorplan.timeline.page import page
from floorplan.timeline.pictures import draw_timeline
from floorplan.timeline.snapshot import write_snapshot

BUDGET = "Memory for all of the training: 32MB (1e6), 32MiB, or bytes."
Ranks = Annotated[str, typer.Option("--rank", help="Ranks, comma-separated; the largest that fits is taken.")]
Pictures = Annotated[list[str] | None, typer.Option("--svg", "--png", help="Draw both: .svg, .png or .pdf.")]


@dataclass(frozen=True)
class ExportOptions:
    """What is written beside the report, and where."""

    emit: Annotated[str | None, typer.Option(help="Write the chosen step as Python source.")] = None
    html: Annotated[str | None, typer.Option(help="Write a page: the step before and after.")] = None
    arena: Annotated[str | None, typer.Option(help="Write a static memory layout: a .json or .h file.")] = None
    snapshot: Annotated[str | None, typer.Option(help="Write a snapshot for PyTorch's memory viewer.")] = None
    trace: Annotated[str | None, typer.Option("--perfetto", help="Write a trace for Perfetto.")] = None
    pictures: Pictures = None

    @property
    def files(self) -> list[str | None]:
        """All of them; FloorplanError if a layout has no known form."""
        if self.arena and Path(self.arena).suffix not in (".json", ".h"):
            raise FloorplanError(f"--arena {self.arena}: neither JSON nor a C header; name a .json or .h file")
        return [self.emit, self.html, self.arena, self.snapshot, self.trace, *(self.pictures or ())]

    def write(self, found: PlanReport) -> None:
        """Everything that was asked for; layouts are searched for once."""
        lines = [t for t in (found.before, found.after) if t is not None]
        layout = cache(lambda i: place(intervals(lines[i].blocks)))
        every, after = range(len(lines)), lines[-1]
        if self.emit and found.step is not None:
            found.step.save(self.emit, force=True)
        if self.html:
            notes = [line for line in str(found).splitlines() if line.startswith(("choice", "  ", "note"))][-8:]
            title = f"{found.name} within {found.budget:,} bytes"
            write_text(self.html, page(lines, [layout(i).offsets for i in every], title, notes))
        for path in self.pictures or ():
            draw_timeline(lines, path, [layout(i).offsets for i in every], title=found.name)
        if self.trace:
            perfetto.write_perfetto(after, self.trace)
        if self.snapshot:
            write_snapshot(after, layout(every[-1]).offsets, self.snapshot)
        if self.arena:
            write_text(self.arena, _arena(after, layout(every[-1]), Path(self.arena)))


def _arena(after: StepTimeline, placed: Placement, path: Path) -> str:
    if path.suffix == ".json":
        return json.dumps(arena_export.as_json(after, placed), indent=1)
    name = re.sub(r"[^A-Za-z0-9_]+", "_", path.stem)  # as a C identifier
    return arena_export.as_c_header(after, placed, name if name[:1].isalpha() else f"arena_{name}")


def plan(
    given: ModelOptions,
    budget: Annotated[str, typer.Option(help=BUDGET)],
    how: MethodOptions,
    to: Outputs,
    exports: ExportOptions,
    batch: Batch = None,
    rank: Ranks = "2",
    loss: Loss = "cross_entropy",
    measure: Measure = False,
) -> None:
    """The batch, rank and schedule of a training step that fit a budget of memory.

    Exit code 0: something fits. 1: nothing does, and what stands in the way is said. 2: the input cannot be used.
    """
    to.ready(given.model, given.weights, files=exports.files)
    plans = plans_of((how.method,), numbers("--rank", rank), how.options())
    with busy(f"planning {given.model}"):
        found = planned(given.source(batch), bytes_of(budget), plans, objective(loss), measure)
        if found.choice is not None:
            exports.write(found)
    if to.write(found) and found.after is not None:
        print(f"\n{sparkline.text(found.after)}")
    raise typer.Exit(found.exit_code)
