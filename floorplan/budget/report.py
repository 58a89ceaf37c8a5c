"""The report of `plan`: the schedules of a step side by side, the choice, what stands in the way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from floorplan.render import Block, Cell, Report, Table, versions
from floorplan.step.compile import Schedule, Step
from floorplan.step.schedule import SCHEMA
from floorplan.timeline.blocks import StepTimeline


@dataclass(frozen=True)
class PlanRow:
    """One way to run a step of `batch` samples; bytes."""

    program: str  # "full fine-tuning", "adapted, autograd", or a schedule in words
    batch: int
    rank: int | None
    requested_peak: int
    kept: int
    state: int  # model and optimizer
    given: int  # the caller's batch
    time_ratio: float | None  # predicted, to full fine-tuning of the same batch
    macs: int
    schedule: Schedule | None = None
    passes: int = 1  # 2: forward for the outputs of the whole batch first

    @property
    def total(self) -> int:
        """Everything counted."""
        return self.requested_peak + self.state + self.given

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schedule": self.program,
            "batch": self.batch,
            "rank": self.rank,
            "micro_batch": (self.schedule.micro_batch or self.batch) if self.schedule else self.batch,
            "requested_peak": self.requested_peak,
            "kept": self.kept,
            "state": self.state,
            "batch_bytes": self.given,
            "total": self.total,
            "time_ratio": self.time_ratio,
            "macs": self.macs,
            "passes": self.passes,
            "plan": self.schedule.as_dict() if self.schedule else None,
        }


@dataclass(frozen=True)
class PlanReport(Report):
    """What fits a budget. `str()` is the printed table; exit_code 0 if something fits, 1 if nothing does."""

    heading = "{.name}, planned"

    name: str
    budget: int
    options: dict[str, Any]  # method, rank, sites, seed, train_head, loss, input
    references: tuple[PlanRow, ...]
    pareto: tuple[PlanRow, ...]
    choice: PlanRow | None
    one_more: int | None = None  # least total with one more sample in a part, or in the batch
    obstacle: str | None = None
    batches: tuple[PlanRow, ...] = ()  # smaller batches and their fastest schedules, where no batch was asked for
    measured: dict[str, int] | None = None
    time_model: str = ""
    notes: tuple[str, ...] = ()
    module: fx.GraphModule | None = field(default=None, repr=False)  # adapted, as the choice has it
    step: Step | None = field(default=None, repr=False)
    before: StepTimeline | None = field(default=None, repr=False)  # full fine-tuning
    after: StepTimeline | None = field(default=None, repr=False)  # the choice

    @property
    def exit_code(self) -> int:
        """0 if something fits."""
        return 0 if self.choice else 1

    def as_json(self) -> dict[str, Any]:
        """The document of --json, schema floorplan.plan/1."""
        head = {"schema": SCHEMA, "model": self.name, "budget": self.budget, "options": self.options}
        found = {"choice": self.choice.as_json() if self.choice else None, "one_more": self.one_more}
        real = {"measured": self.measured, "difference": self._difference()}
        tables = {"pareto": self.pareto, "references": self.references, "batches": self.batches}
        rows = {name: [r.as_json() for r in table] for name, table in tables.items()}
        words = {"obstacle": self.obstacle, "time_model": self.time_model, "notes": list(self.notes)}
        return {**head, "versions": versions(), **found, **real, **rows, **words}

    def _difference(self) -> dict[str, int] | None:
        if self.measured is None or self.choice is None:
            return None
        return {"requested_peak": self.choice.requested_peak - self.measured["requested_peak"]}

    def parts(self) -> Iterator[str | Table]:
        """The schedules, smaller batches, the choice or what stands in its way."""
        yield from (f"{self.name}: a training step within {self.budget:,} bytes", "")
        yield _table("schedules", [*self.references, *self.pareto], self.choice)
        yield "bytes; kept: waits for the backward; total: peak + model + optimizer (Adam) + the caller's batch"
        if self.time_model:
            yield f"time: predicted, full fine-tuning of the same batch = 1.00; {self.time_model}"
        yield ""
        yield _table("batches", self.batches, None, "smaller batches, each with its fastest schedule that fits")
        yield Block("\n".join(self._chosen()))
        yield from (f"note: {n}" for n in self.notes)

    def _chosen(self) -> list[str]:
        c = self.choice
        if c is None:
            return [f"nothing fits: {self.obstacle}"]
        ranked = f", rank {c.rank}" if c.rank else ""
        lines = [
            f"choice: batch {c.batch}{ranked}, {c.program}",
            f"  state {c.state:,} + batch {c.given:,} + requested peak {c.requested_peak:,} = {c.total:,} "
            f"of {self.budget:,}",
        ]
        if self.one_more is not None:
            lines.append(f"  one more sample would take {self.one_more:,}")
        if self.measured is not None:
            real = self.measured["requested_peak"]
            lines.append(f"  measured requested peak {real:,}, difference {c.requested_peak - real:,}")
            if (grown := self.measured.get("resident_growth")) is not None:
                lines.append(f"  resident growth {grown:,}, {grown / max(real, 1):.2f} of it (apart)")
        return lines + ([f"  {self.obstacle}"] if self.obstacle else [])


def _table(name: str, rows: Sequence[PlanRow], choice: PlanRow | None, title: str = "") -> Table:
    header = ["schedule", "batch", "requested peak", "kept", "total", "time", "MMACs"]
    header += ["rank", "state", "batch bytes", "chosen"]
    return Table(name, header, [_cells(r, choice) for r in rows], range(1, 7), title, columns=7)


def _cells(r: PlanRow, choice: PlanRow | None) -> list[Any]:
    chosen = choice is not None and r.schedule is not None and r.schedule == choice.schedule
    time = None if r.time_ratio is None else Cell(r.time_ratio, f"{r.time_ratio:.2f}")
    macs = Cell(r.macs / 1e6, f"{r.macs / 1e6:,.0f}")
    schedule = Cell(r.program, "> " + r.program if chosen else r.program)
    printed = [schedule, Cell(r.batch, str(r.batch)), r.requested_peak, r.kept, r.total, time, macs]
    return [*printed, r.rank, r.state, r.given, int(chosen)]
