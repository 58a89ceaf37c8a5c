"""`floorplan compare`: what every method keeps, holds and multiplies in one step, side by side."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx, nn

from floorplan.errors import FloorplanError, describe
from floorplan.graph.trace import Traced
from floorplan.layers import macs as formulas
from floorplan.ledger.inputs import filled
from floorplan.ledger.losses import LOSSES, loss_named, target_for
from floorplan.ledger.macs import layers_of, merges_of, own_macs
from floorplan.ledger.run import Step
from floorplan.ledger.step_figures import StepFigures, step_figures
from floorplan.ledger.storage import bytes_of_tensors
from floorplan.methods.catalogue import METHODS, Options, Plan, method, plans_of
from floorplan.methods.rewrite import adapted, traced_source
from floorplan.methods.subject import Shapes, Source, Subject, subject_of
from floorplan.render import Report, Table, difference, versions

COLUMNS = {
    "saved": "saved",
    "saved_refcount": "saved, once per op",
    "training_state_peak": "training-state peak",
    "requested_peak": "requested peak",
    "optimizer": "optimizer",
    "trainable_parameters": "trainable",
}


@dataclass(frozen=True)
class Row:
    """One method at one rank and batch; bytes, and multiply-adds of one step."""

    method: str
    rank: int | None
    batch: int
    predicted: StepFigures | None = None
    measured: StepFigures | None = None
    model: int = 0  # bytes of parameters and buffers
    macs_paper: int = 0
    macs: dict[str, int] | None = None  # the step's own, forward and backward
    refused: str = ""

    @property
    def difference(self) -> dict[str, int] | None:
        """Predicted less measured."""
        return difference(self.predicted, self.measured)

    def cells(self) -> list[Any]:
        """The row of the table; the last cell is the largest difference."""
        found = self.predicted.as_dict() if self.predicted else {}
        own, far = sum((self.macs or {}).values()), max((self.difference or {}).values(), key=abs, default=None)
        return [self.method, self.rank, self.batch, *(found[k] for k in COLUMNS), self.macs_paper, own, far]


@dataclass(frozen=True)
class Comparison(Report):
    """All rows; `str()` is the printed table."""

    heading = "{.name}: methods compared"

    name: str
    loss: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The document of --json, schema floorplan.compare/1."""
        rows = [asdict(r) | {"difference": r.difference} for r in self.rows]
        head = {"schema": "floorplan.compare/1", "model": self.name, "loss": self.loss}
        return {**head, "versions": versions(), "notes": list(self.notes), "rows": rows}

    def parts(self) -> Iterator[str | Table]:
        """The table, what its figures are, and what was not run."""
        some = any(r.measured for r in self.rows)
        header = ["method", "rank", "batch", *COLUMNS.values(), "MACs (paper)", "MACs (own)"]
        header += ["predicted - measured"] if some else []
        rows = [r.cells()[: len(header)] for r in self.rows if r.predicted]
        yield Table("methods", header, rows, range(1, len(header)))
        yield f"bytes; one step, loss {self.loss}; multiply-adds of one step"
        once = {(r.method, r.rank): r.refused for r in self.rows if r.refused}
        yield from (f"not run: {m}{f' at rank {k}' if k else ''}: {why}" for (m, k), why in once.items())
        yield from (f"note: {n}" for n in self.notes)


def compare(
    model: nn.Module | str,
    inputs: Any = None,
    *,
    methods: Sequence[str] = ("full", "memflora"),
    ranks: Sequence[int] = (2,),
    batches: Sequence[int] = (8,),
    loss: str = "cross_entropy",
    sites: str = "auto",
    seed: int = 0,
    train_head: bool = False,
    measured: bool = False,
    shapes: Shapes | None = None,
    weights: str | None = None,
    allow: Sequence[str] = (),
    trust: bool = False,
    keep_head: bool = False,
) -> Comparison:
    """Every method at every rank and batch: predicted on fake tensors, measured too if asked.

    The model is not changed. Methods that the model has no place for are listed with the reason.
    """
    source = Source(model, inputs, None, shapes, weights, allow, trust, keep_head)
    plans = plans_of(methods, ranks, Options(sites=sites, seed=seed, train_head=train_head))
    return compared(source, plans, batches, loss, measured)


def compared(source: Source, plans: Sequence[Plan], batches: Sequence[int], loss: str, measured: bool) -> Comparison:
    """`compare` of a request: a row for each plan and batch."""
    loss_named(loss)
    if not plans or not batches:
        raise FloorplanError("--methods, --rank, --batch: none is named; `floorplan compare --help` lists them")
    if (least := min([*batches, *(p.options.rank for p in plans)])) < 1:
        raise FloorplanError(f"--batch, --rank: {least} is not a positive number")
    s = subject_of(replace(source, batch=2))
    graph = None
    with suppress(FloorplanError):  # each method says why
        graph = traced_source(s)
    rows = [row for p in plans for row in _of(s, graph, p, list(dict.fromkeys(batches)), loss, measured)]
    if not any(r.predicted for r in rows):
        raise FloorplanError(f"{s.name}: no method could be run: {rows[0].refused}")
    return Comparison(s.name, loss, tuple(rows), s.notes)


def _of(
    s: Subject, graph: Traced | None, plan: Plan, batches: Sequence[int], loss: str, measured: bool
) -> Iterator[Row]:
    m = method(plan.method)
    rows = [Row(m.name, plan.options.rank if m.ranked else None, b) for b in batches]
    try:
        traced, _ = adapted(s, plan, False, graph)
    except FloorplanError as e:
        yield from (replace(row, refused=str(e)) for row in rows)
        return
    gm = traced.gm.train(m.name != "zero-shot")
    for row in rows:
        try:
            yield _figures(row, gm, s.inputs, loss, measured)
        except Exception as e:  # one method that this batch does not suit must not cost the others
            yield replace(row, refused=f"at batch {row.batch}: {describe(e)}")


def _figures(row: Row, gm: fx.GraphModule, like: Sequence[Any], loss: str, measured: bool) -> Row:
    inputs, replays = filled(like, row.batch), method(row.method).replays
    step = Step(gm, inputs, target_for(gm, inputs, loss), LOSSES[loss], replays=replays)
    row = replace(row, predicted=step_figures(step), measured=step_figures(step, fake=False) if measured else None)
    paper = formulas.step(layers_of(gm, inputs), row.batch, merges_of(gm), replays)
    model = bytes_of_tensors([*gm.parameters(), *gm.buffers()])
    return replace(row, model=model, macs_paper=paper, macs=own_macs(step))


__all__ = ["METHODS", "Comparison", "Row", "compare"]
