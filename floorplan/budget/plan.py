"""`floorplan plan`: the batch, rank and schedule of a training step that fit a budget of memory.

    profile by few fake runs -> every schedule by closed form -> the fastest that fits -> one exact fake run of it

The budget counts everything: weights, Adam's two moments, the caller's batch and what the step allocates.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.budget import resident
from floorplan.budget.clock import Clock, Machines, error_of
from floorplan.budget.machine import by_kind
from floorplan.budget.model import Model, Objective, Reference, Setting, model_at, objective, reference, streamed
from floorplan.budget.net import Costed
from floorplan.budget.report import PlanReport, PlanRow
from floorplan.budget.search import exact, fastest, largest, one_more_than, schedules, smallest, uncut
from floorplan.errors import FloorplanError
from floorplan.layers.adapter import adapter_rank
from floorplan.layers.layer import model_state
from floorplan.ledger.inputs import filled
from floorplan.ledger.losses import LOSSES, Loss
from floorplan.methods.catalogue import Options, Plan, plans_of
from floorplan.methods.rewrite import adapted, traced_source
from floorplan.methods.subject import Shapes, Source, subject_of
from floorplan.step.timeline import measure

CALIBRATION = 1.5  # seconds
SHOWN = 12  # rows of the Pareto table


def plan(
    model: nn.Module | str,
    budget: str | int,
    inputs: Any = None,
    *,
    batch: int | None = None,
    ranks: Sequence[int] = (2,),
    loss: str | Loss = "cross_entropy",
    target: Any = None,
    method: str = "memflora",
    sites: str = "auto",
    seed: int = 0,
    train_head: bool = False,
    measured: bool = False,
    machines: Machines | None = None,
    shapes: Shapes | None = None,
    weights: str | None = None,
    allow: Sequence[str] = (),
    trust: bool = False,
) -> PlanReport:
    """The fastest schedule of a training step that fits `budget`, by closed forms from few fake runs.

    budget: bytes, or "32MB". batch: samples of a step; None: as many as fit. ranks: the largest that fits is taken.
    loss: as `compile_step` takes it; one that is not torch's needs an example of its `target`, with a row a sample.
    machines: what this machine does, as budget.machine.by_kind measures it. measured: run the chosen step too.
    """
    plans = plans_of((method,), ranks, Options(sites=sites, seed=seed, train_head=train_head))
    source = Source(model, inputs, batch, shapes, weights, allow, trust)
    return planned(source, bytes_of(budget), plans, objective(loss, target), measured, machines)


def planned(
    source: Source, budget: int, plans: Sequence[Plan], by: Objective, measured: bool, machines: Machines | None = None
) -> PlanReport:
    """`plan` of a request; the plans differ in their ranks, and the largest that fits is taken."""
    if min((p.options.rank for p in plans), default=0) < 1 or (source.batch is not None and source.batch < 1):
        raise FloorplanError("--batch, --rank: whole numbers of 1 or more")
    s = subject_of(replace(source, batch=by.rows or 2))
    device = next((t.device for t in model_state(s.model)), torch.device("cpu"))
    known = by_kind(device, CALIBRATION) if machines is None else machines
    graph = traced_source(s) if adapter_rank(s.model) is None else None
    setting = Setting(s, graph, budget, source.batch, by, known, machines is None)
    tried = _first(setting, plans)
    report = _report(setting, tried)
    if not measured:
        return report
    report, plan = _measured(report, tried.model), tried.model.plan
    plain = not (source.weights or source.allow or source.trust or plan.options.train_head)
    grows = isinstance(source.model, str) and plain and plan.method == "memflora" and LOSSES.get(by.name) is by.loss
    return _grown(report, str(source.model), setting) if grows else report


@dataclass(frozen=True)
class Tried:
    """All schedules of a model that were considered, and the fastest that fits."""

    model: Model
    batch: int
    found: list[Costed]
    choice: Costed | None


def _first(t: Setting, plans: Sequence[Plan]) -> Tried:
    """At the largest rank at which something fits; else at the smallest."""
    last, refused = None, None
    for plan in sorted(plans, key=lambda p: -p.options.rank):
        try:
            m = model_at(t, plan)
        except FloorplanError as e:  # too high a rank for every conv
            refused = e
            continue
        last = _tried(t, m)
        if last.choice is None and (narrow := streamed(m, t)) is not None:
            other = _tried(t, narrow)
            least = smallest(narrow, other.batch).peak < smallest(m, last.batch).peak
            last = other if other.choice is not None or least else last
        if last.choice is not None or m.plan != plan:
            break
    if last is None:
        assert refused is not None
        raise refused
    return last


def _tried(t: Setting, m: Model) -> Tried:
    batch = t.batch or largest(m, t.budget)
    found = list(schedules(m.net, batch or 1))
    return Tried(m, batch or 1, found, fastest(m.net, found, m.room(t.budget, batch)) if batch else None)


def _row(m: Model, f: Costed, base: float | None) -> PlanRow:
    schedule = m.net.schedule(f)
    kept = m.net.compose.kept(f.batch, f.micro, f.stages)
    branched = len(schedule.branches or ())
    name = str(schedule) + (f", {branched} site{'s' * (branched > 1)} as branches" if branched else "")
    ratio, macs = f.seconds / base if base else None, round(m.net.work_of(f).macs)
    passes = 1 + m.net.twice(f)
    row = PlanRow(name, f.batch, m.rank, f.peak, kept, m.state, m.sample * f.batch, ratio, macs, schedule, passes)
    return replace(row, program=f"{name}, two passes") if passes == 2 else row


def _front(found: Sequence[Costed]) -> list[Costed]:
    """Schedules that no other beats in both bytes and time, smallest first; at most SHOWN, evenly spread."""
    out: list[Costed] = []
    for f in sorted(found, key=lambda f: (f.peak, f.seconds)):
        if not out or f.seconds < out[-1].seconds * 0.995:
            out.append(f)
    if len(out) <= SHOWN:
        return out
    return [out[round(i * (len(out) - 1) / (SHOWN - 1))] for i in range(SHOWN)]


def _report(t: Setting, tried: Tried) -> PlanReport:
    m, batch = tried.model, tried.batch
    references = _references(t, m, batch)
    full = references[0] if len(references) > 1 else None
    base = full.seconds if full else None
    options = {**m.plan.as_dict(), "loss": t.by.name, "input": _shapes(t)}
    clocks = [c for c in (m.net.time_of, *(r.clock for r in references)) if isinstance(c, Clock)]
    rows, front = tuple(r.row(base) for r in references), tuple(_row(m, f, base) for f in _front(tried.found))
    notes = (*t.subject.notes, *([m.net.coupled] if m.net.coupled else []), *_why_twice(t, m))
    report = PlanReport(t.subject.name, t.budget, options, rows, front, None, notes=notes, time_model=error_of(clocks))
    report = replace(report, before=full.timeline if full else None, module=m.gm)
    if tried.choice is None:
        return replace(report, obstacle=_obstacle(t, m, batch))
    report = _chosen(report, m, tried.choice, base)
    one_more = one_more_than(m, tried.choice, t.batch is None)
    return replace(report, one_more=one_more, batches=tuple(_smaller(t, m, batch, base)) if t.batch is None else ())


def _why_twice(t: Setting, m: Model) -> Iterator[str]:
    if m.net.whole is not None and not m.net.coupled:
        why = f"the loss is not known to add up over samples: {t.by.name}"
        yield f"{why} sees the outputs of the whole batch, for which a schedule with parts before it takes two passes"


def _shapes(t: Setting) -> list[list[int]]:
    """Of one sample of each input."""
    return [list(v.shape[1:]) for v in t.subject.inputs if isinstance(v, Tensor)]


def _chosen(report: PlanReport, m: Model, choice: Costed, base: float | None) -> PlanReport:
    """With the choice, as an exact fake run has it."""
    (step, after), row, notes = exact(m.net, choice), _row(m, choice, base), report.notes
    if after.peak != choice.peak:
        note = f"the closed form gave {choice.peak:,}; an exact fake run gives {after.peak:,}, which stands here"
        row, notes = replace(row, requested_peak=after.peak), (*notes, note)
    m.gm.meta.setdefault("floorplan", {})["schedule"] = step.schedule.as_dict()
    rows = sorted({r.program: r for r in [*report.pareto, row]}.values(), key=lambda r: r.requested_peak)
    name = f"{after.name}, batch {choice.batch}" + (f", rank {m.rank}" if m.rank else "")
    return replace(report, choice=row, pareto=tuple(rows), notes=notes, step=step, after=replace(after, name=name))


def _smaller(t: Setting, m: Model, batch: int, base: float | None) -> Iterator[PlanRow]:
    """For batches of 8, 16, 32, …: the fastest schedule without cuts, and its time by a sample."""
    size = 8
    while size < batch and size <= 512:
        room = m.room(t.budget, size)
        fits = [f for f in uncut(m.net, size) if f.peak <= room]
        if fits:
            scale = None if base is None else base * size / batch
            yield _row(m, min(fits, key=lambda f: (f.seconds, f.peak)), scale)
        size *= 2


def _references(t: Setting, m: Model, batch: int) -> list[Reference]:
    """Full fine-tuning, where the source is there, and the adapted graph, both under autograd."""
    graphs: list[tuple[str, fx.GraphModule, int | None]] = [("adapted, autograd, whole batch", m.gm, m.rank)]
    with suppress(FloorplanError):
        if t.traced is not None:
            full = adapted(t.subject, Plan("full", Options()), False, t.traced)[0].gm
            graphs.insert(0, ("full fine-tuning", full, None))
    return [reference(t, gm, batch, name, rank) for name, gm, rank in graphs]


def _obstacle(t: Setting, m: Model, batch: int) -> str:
    """What takes the room, by name, and what to do."""
    f = smallest(m, batch)
    if m.state > t.budget:
        return f"weights and optimizer state alone take {m.state:,} of {t.budget:,} bytes; raise --budget"
    given, line = m.sample * batch, exact(m.net, f)[1]
    total, at = m.state + given + line.peak, line.peak_at
    where, way, nbytes = line.by_node(at)[0]
    why = f"; {m.net.coupled}" if m.net.coupled else ""
    lower = largest(m, t.budget) if batch > 1 else 0
    lower *= lower < batch
    way_out = f"raise --budget to {total:,}" + (f" or lower --batch to {lower}" if lower else "")
    return (
        f"the smallest step ({m.net.schedule(f)}) takes {total:,}: state {m.state:,}, batch {given:,}, requested peak "
        f"{line.peak:,}, of which {nbytes:,} in {where or '-'} ({way}); {way_out}{why}"
    )


def _measured(report: PlanReport, m: Model) -> PlanReport:
    """The chosen step run for real on random inputs."""
    if report.step is None or report.choice is None:
        return report
    *given, target = filled((*m.net.inputs, m.target), report.choice.batch)
    found = measure(report.step, given, target)
    return replace(report, measured={"requested_peak": found.peak, "total": found.total})


def _grown(report: PlanReport, model: str, t: Setting) -> PlanReport:
    """How much a process grows by the chosen step: kernels take memory that no dispatcher sees."""
    c = report.choice
    if c is None or c.schedule is None or report.measured is None:
        return report
    plan = {k: report.options[k] for k in ("method", "rank", "sites", "seed", "train_head")}
    options = {"model": model, "batch": c.batch, "schedule": c.schedule.as_dict(), "loss": t.by.name, "plan": plan}
    spec, threads = f"{resident.__name__}:compiled_step", torch.get_num_threads()
    try:
        grown = resident.resident_growth(spec, {**options, "shapes": _shapes(t)}, threads=threads).growth
    except FloorplanError as e:
        return replace(report, notes=(*report.notes, str(e)))
    return replace(report, measured={**report.measured, "resident_growth": grown})


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(budget: str | int) -> int:
    """32MB (1e6), 32MiB (2^20), 33554432."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(budget))
    if isinstance(budget, bool) or not found or found[2].lower() not in _UNITS:
        raise FloorplanError(f"--budget {budget}: not an amount of memory; write 32MB, 32MiB or 33554432")
    n = int(float(found[1]) * _UNITS[found[2].lower()]) if found[2] or "." in found[1] else int(found[1])
    if n < 1:
        raise FloorplanError(f"--budget {budget}: a budget is a positive number of bytes")
    return n
