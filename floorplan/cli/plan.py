"""The command `floorplan plan`."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from floorplan.budget.plan import plan as plan_step
from floorplan.budget.report import PlanReport
from floorplan.cli.options import (
    Allow,
    Batch,
    Head,
    Input,
    Json,
    Measure,
    Method,
    Model,
    Seed,
    Sites,
    Trust,
    Weights,
    busy,
    numbers,
    put,
    shapes_of,
)
from floorplan.cost_models.arena import Placement, place
from floorplan.errors import FloorplanError
from floorplan.files import ensure_writable, write_text
from floorplan.timeline import arena as arena_export
from floorplan.timeline import perfetto, sparkline
from floorplan.timeline.blocks import StepTimeline, intervals
from floorplan.timeline.page import page
from floorplan.timeline.pictures import draw_timeline
from floorplan.timeline.snapshot import write_snapshot

Budget = Annotated[str, typer.Option(help="Memory for all of the training: 32MB (1e6), 32MiB, or bytes.")]
Ranks = Annotated[str, typer.Option("--rank", help="Ranks, comma-separated; the largest that fits is taken.")]


def plan(
    model: Model,
    budget: Budget,
    batch: Batch = None,
    rank: Ranks = "2",
    method: Method = "memflora",
    loss: Annotated[str, typer.Option(help="cross_entropy, mse or sum.")] = "cross_entropy",
    sites: Sites = "auto",
    seed: Seed = 0,
    train_head: Head = False,
    input: Input = None,
    measure: Measure = False,
    json_file: Json = None,
    emit: Annotated[str | None, typer.Option(help="Write the chosen step as Python source.")] = None,
    html: Annotated[str | None, typer.Option(help="Write a page: the step before and after.")] = None,
    arena: Annotated[str | None, typer.Option(help="Write a static memory layout: a .json or .h file.")] = None,
    snapshot: Annotated[str | None, typer.Option(help="Write a snapshot for PyTorch's memory viewer.")] = None,
    trace: Annotated[str | None, typer.Option("--perfetto", help="Write a trace for Perfetto.")] = None,
    picture: Annotated[list[str] | None, typer.Option("--svg", "--png", help="Draw both: .svg, .png or .pdf.")] = None,
    weights: Weights = None,
    allow: Allow = None,
    trust: Trust = False,
) -> None:
    """The batch, rank and schedule of a training step that fit a budget of memory.

    Exit code 0: something fits. 1: nothing does, and what stands in the way is said. 2: the input cannot be used.
    """
    files = _Files(emit, html, arena, snapshot, trace, tuple(picture or ()))
    files.check(model, json_file)
    with busy(f"planning {model}"):
        found = plan_step(
            model,
            budget,
            batch=batch,
            ranks=numbers("--rank", rank),
            loss=loss,
            method=method,
            sites=sites,
            seed=seed,
            train_head=train_head,
            measured=measure,
            shapes=shapes_of(input),
            weights=weights,
            allow=allow or (),
            trust=trust,
        )
        if found.choice is not None:
            files.write(found)
    if json_file:
        put(json_file, json.dumps(found.as_json(), indent=1))
    if json_file != "-":
        print(found)
        if found.after is not None:
            print(f"\n{sparkline.text(found.after)}")
    raise typer.Exit(found.exit_code)


class _Files:
    """What is written beside the table, and where."""

    def __init__(
        self,
        emit: str | None,
        html: str | None,
        arena: str | None,
        snapshot: str | None,
        trace: str | None,
        pictures: tuple[str, ...],
    ) -> None:
        self.emit, self.html, self.arena, self.snapshot, self.trace = emit, html, arena, snapshot, trace
        self.pictures = pictures

    def check(self, model: str, json_file: str | None) -> None:
        """FloorplanError before anything runs if a file could not be written, or is written twice."""
        plain = (self.emit, self.html, self.arena, self.snapshot, self.trace, *self.pictures)
        paths = [p for p in (*plain, None if json_file == "-" else json_file) if p]
        taken = {Path(model.rpartition(":")[0] or model).resolve()}
        for path in paths:
            if path == "-":
                raise FloorplanError("-: only --json can go to stdout; name a file")
            target = ensure_writable(path, force=True).resolve()
            if target in taken:
                raise FloorplanError(f"{path}: is the model or another output; name a file of its own")
            taken.add(target)
        if self.arena and Path(self.arena).suffix not in (".json", ".h"):
            raise FloorplanError(f"--arena {self.arena}: neither JSON nor a C header; name a .json or .h file")

    def write(self, found: PlanReport) -> None:
        """Everything that was asked for."""
        if self.emit and found.step is not None:
            found.step.save(self.emit, force=True)
        lines = [t for t in (found.before, found.after) if t is not None]
        placed = [place(intervals(t.blocks)) for t in lines] if self.html or self.pictures else []
        if self.html:
            notes = [line for line in str(found).splitlines() if line.startswith(("choice", "  ", "note"))][-8:]
            title = f"{found.name} within {found.budget:,} bytes"
            write_text(self.html, page(lines, [p.offsets for p in placed], title, notes))
        for path in self.pictures:
            draw_timeline(lines, path, [p.offsets for p in placed], title=found.name)
        if found.after is not None:
            self._exports(found.after, placed[-1] if placed else None)

    def _exports(self, after: StepTimeline, placed: Placement | None) -> None:
        if self.trace:
            perfetto.write_perfetto(after, self.trace)
        if not (self.arena or self.snapshot):
            return
        found = placed or place(intervals(after.blocks))
        if self.snapshot:
            write_snapshot(after, found.offsets, self.snapshot)
        if self.arena and self.arena.endswith(".h"):
            write_text(self.arena, arena_export.as_c_header(after, found, _identifier(self.arena)))
        elif self.arena:
            write_text(self.arena, json.dumps(arena_export.as_json(after, found), indent=1))


def _identifier(path: str) -> str:
    """The file's name as a C identifier."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", Path(path).stem)
    return name if name[:1].isalpha() else f"arena_{name}"
