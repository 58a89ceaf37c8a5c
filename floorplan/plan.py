"""`floorplan plan`: the batch, rank and schedule of a training step that fit a budget of memory.

    profile by few fake runs -> every schedule by closed form -> the fastest that fits -> one exact fake run of it

The budget counts everything: weights, Adam's two moments, the caller's batch and what the step allocates.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.api import Shapes, Subject, adapted, adapter_rank, subject_of
from floorplan.calibrate_time import by_kind
from floorplan.compare import resized as filled
from floorplan.compile_step import Step
from floorplan.cost_models.schedule import Stage
from floorplan.errors import FloorplanError
from floorplan.measure import _bytes, _undisturbed
from floorplan.methods import Options, Plan, recorded
from floorplan.plan_reference import Reference, reference
from floorplan.plan_report import PlanReport, Row
from floorplan.plan_search import Found, Net
from floorplan.plan_time import FITTED, Clock, Machines, anchored, error_of
from floorplan.step import LOSSES, target_for
from floorplan.step_timeline import measure, predict
from floorplan.storage import model_state, tensors_in
from floorplan.timeline import StepTimeline
from floorplan.timeline_batch import resized

CALIBRATION = 1.5  # seconds
ALIKE = 1.01  # times that the model does not tell apart
SHOWN = 12  # rows of the Pareto table
TRIED = 4  # schedules whose exact peak is looked at, should a closed form be off
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


@dataclass(frozen=True)
class _Setting:
    """What does not change from rank to rank."""

    subject: Subject
    budget: int
    batch: int | None
    loss: str
    method: str
    rest: tuple[str, int, bool]  # sites, seed, train_head
    machines: Machines
    anchors: bool  # whether real steps of two samples set what a call costs


@dataclass(frozen=True)
class _Model:
    """The model adapted at one rank, and its constants."""

    gm: fx.GraphModule
    rank: int | None
    target: Tensor
    net: Net
    state: int  # model and optimizer
    sample: int  # bytes of one sample of the caller's batch

    def room(self, budget: int, batch: int) -> int:
        """What is left for the step."""
        return budget - self.state - self.sample * batch


def plan(
    model: nn.Module | str, budget: str | int, inputs: Any = None, *, batch: int | None = None,
    ranks: Sequence[int] = (2,), loss: str = "cross_entropy", method: str = "memflora", sites: str = "auto",
    seed: int = 0, train_head: bool = False, measured: bool = False, machines: Machines | None = None,
    shapes: Shapes | None = None, weights: str | None = None, allow: Sequence[str] = (), trust: bool = False,
) -> PlanReport:  # fmt: skip
    """The fastest schedule of a training step that fits `budget`, by closed forms from few fake runs.

    budget: bytes, or "32MB". batch: samples of a step; None: as many as fit. ranks: the largest that fits is taken.
    machines: what this machine does, as calibrate_time.by_kind measures it. measured: run the chosen step too.
    """
    if loss not in LOSSES:
        raise FloorplanError(f"--loss {loss}: not known; use {', '.join(LOSSES)}")
    if min(ranks, default=0) < 1 or (batch is not None and batch < 1):
        raise FloorplanError("--batch, --rank: whole numbers of 1 or more")
    room = bytes_of(budget)
    s = subject_of(model, inputs, batch=2, shapes=shapes, weights=weights, allow=allow, trust=trust)
    device = next((t.device for t in model_state(s.model)), torch.device("cpu"))
    known = by_kind(device, CALIBRATION) if machines is None else machines
    setting = _Setting(s, room, batch, loss, method, (sites, seed, train_head), known, machines is None)
    found = _first(setting, ranks)
    report = _report(setting, *found)
    return _measured(report, setting) if measured else report


def _first(t: _Setting, ranks: Sequence[int]) -> tuple[_Model, int, list[Found], Found | None]:
    """The largest rank at which something fits, with all schedules and the choice; else the smallest rank."""
    last = None
    for rank in sorted(set(ranks), reverse=True):
        m = _model(t, rank)
        batch = t.batch or _largest(m, t.budget)
        found = list(m.net.schedules(batch or 1))
        choice = _fastest(m.net, found, m.room(t.budget, batch)) if batch else None
        last = (m, batch or 1, found, choice)
        if choice is not None or m.rank != rank:
            break
    assert last is not None
    return last


def _model(t: _Setting, rank: int) -> _Model:
    s = t.subject
    has = adapter_rank(s.model)
    if has is not None and isinstance(s.model, fx.GraphModule):
        gm, own = s.model, has
    else:
        options = Plan(t.method, Options(rank, *t.rest))
        gm, own = adapted(s, options, verified=False)[0].gm, rank
        gm.meta["floorplan"] = recorded(options, s.inputs)
    target = target_for(gm, s.inputs, t.loss)
    net = Net(gm, s.inputs, target, t.loss, Clock(t.machines))
    net.timed(_step_clock(t, net))
    state = model_state(gm)
    if not any(p.requires_grad for p in state):
        raise FloorplanError(f"{s.name}: nothing in it trains; choose other --sites or --train-head")
    trained = _bytes([p for p in state if p.requires_grad])
    one = [resized(v, 1) for v in (*s.inputs, target)]
    sample = sum(_bytes([v]) for v in tensors_in(tuple(one)))
    return _Model(gm, own, target, net, _bytes(state) + 2 * trained, sample)


def _step_clock(t: _Setting, net: Net) -> Clock:
    """How this machine runs the straight-line step."""
    def whole(n: int) -> Found:
        return net.found(n, 0, (Stage(0, len(net.groups) - 1, 0, (0,) * len(net.groups)),))

    step = net.step(net.schedule(whole(FITTED[0])))

    def run(n: int) -> Callable[[], Tensor]:
        given = filled(net.inputs, n)
        target = target_for(net.gm, given, t.loss)
        return lambda: step(*given, target)

    with _undisturbed(net.gm):
        return anchored(t.machines, lambda n: net.work_of(whole(n)), run) if t.anchors else Clock(t.machines)


def _smallest(m: _Model, batch: int) -> Found:
    """The schedule that allocates least: one sample at a time, or the whole batch where samples are coupled."""
    net, micro = m.net, 0 if m.net.coupled or batch == 1 else 1
    n = micro or batch
    stages = [(Stage(0, len(net.groups) - 1, 0, net.forms(policy, n)),) for policy in ("merged", "small")]
    return min((net.found(batch, micro, s) for s in stages), key=lambda f: f.peak)


def _largest(m: _Model, budget: int) -> int:
    """The largest batch that fits; 0 if none does."""
    def fits(b: int) -> bool:
        return _smallest(m, b).peak <= m.room(budget, b)

    if not fits(1):
        return 0
    low, high = 1, max(2, (budget - m.state) // max(m.sample, 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _fastest(net: Net, found: Sequence[Found], room: int) -> Found | None:
    """The fastest that fits, grown to its largest part sizes, the exact run asked in doubt."""
    fits = [f for f in found if f.peak <= room]
    least = min((f.seconds for f in fits), default=0.0) * ALIKE
    for f in sorted(fits, key=lambda f: (max(f.seconds, least), len(f.stages), f.peak))[:TRIED]:
        best = net.grown(f, room)
        if exact(net, best)[1].peak <= room:
            return best
    return None


def exact(net: Net, f: Found) -> tuple[Step, StepTimeline]:
    """The compiled step of a schedule and its exact timeline on fakes; alike micro-batches are run three times."""
    if f in net.exact:
        return net.exact[f]  # type: ignore[no-any-return]
    step = net.step(net.schedule(f))
    n = f.batch
    if f.micro and n > 4 * f.micro:
        n = 3 * f.micro + n % f.micro
    given = tuple(resized(v, n) for v in net.inputs)
    net.exact[f] = found = step, predict(step, given, resized(net.target, n))
    return found


def _row(m: _Model, f: Found, base: float | None) -> Row:
    schedule = m.net.schedule(f)
    kept = m.net.compose.kept(f.batch, f.micro, f.stages)
    name = str(schedule) + {0: ""}.get(len(schedule.branches), f", {len(schedule.branches)} sites as branches")
    ratio = f.seconds / base if base else None
    return Row(name, f.batch, m.rank, f.peak, kept, m.state, m.sample * f.batch, ratio,
               round(m.net.work_of(f).macs), schedule)  # fmt: skip


def _front(found: Sequence[Found]) -> list[Found]:
    """Schedules that no other beats in both bytes and time, smallest first; at most SHOWN, evenly spread."""
    out: list[Found] = []
    for f in sorted(found, key=lambda f: (f.peak, f.seconds)):
        if not out or f.seconds < out[-1].seconds * 0.995:
            out.append(f)
    if len(out) <= SHOWN:
        return out
    return [out[round(i * (len(out) - 1) / (SHOWN - 1))] for i in range(SHOWN)]


def _report(t: _Setting, m: _Model, batch: int, found: list[Found], choice: Found | None) -> PlanReport:
    found_under, references, base = _references(t, m, batch)
    before = found_under[0].timeline if base is not None else None
    clocks = [m.net.time_of, *(r.clock for r in found_under)]
    rows = [_row(m, f, base) for f in _front(found)]
    options = {
        "method": t.method, "rank": m.rank, "sites": t.rest[0], "seed": t.rest[1], "train_head": t.rest[2],
        "loss": t.loss, "input": [list(v.shape[1:]) for v in t.subject.inputs if isinstance(v, Tensor)],
    }  # fmt: skip
    notes = [*t.subject.notes, *([m.net.coupled] if m.net.coupled else [])]
    report = PlanReport(t.subject.name, t.budget, options, references, tuple(rows), None, before=before, module=m.gm,
                        time_model=error_of([c for c in clocks if isinstance(c, Clock)]))  # fmt: skip
    if choice is None:
        return replace(report, obstacle=_obstacle(t, m, batch), notes=tuple(notes))
    step, after = exact(m.net, choice)
    row = _row(m, choice, base)
    if after.peak != choice.peak:
        notes.append(f"the closed form gave {choice.peak:,}; an exact fake run gives {after.peak:,}, which stands here")
        row = replace(row, requested_peak=after.peak)
    m.gm.meta.setdefault("floorplan", {})["schedule"] = row.schedule.as_dict() if row.schedule else {}
    rows = sorted({r.program: r for r in [*rows, row]}.values(), key=lambda r: r.requested_peak)
    name = f"{after.name}, batch {batch}" + (f", rank {m.rank}" if m.rank else "")
    return replace(
        report, choice=row, pareto=tuple(rows), one_more=_one_more(t, m, choice), notes=tuple(notes), step=step,
        after=replace(after, name=name), batches=tuple(_smaller(t, m, batch, base)) if t.batch is None else (),
    )  # fmt: skip


def _one_more(t: _Setting, m: _Model, choice: Found) -> int | None:
    """Least total with one more sample: in a part of the step, or in the batch where it was free."""
    more = [f.peak + m.state + m.sample * f.batch for f in m.net.more(choice)]
    if t.batch is None:
        f = _smallest(m, choice.batch + 1)
        more.append(f.peak + m.state + m.sample * f.batch)
    return min(more, default=None)


def _smaller(t: _Setting, m: _Model, batch: int, base: float | None) -> Iterator[Row]:
    """For batches of 8, 16, 32, …: the fastest schedule without cuts, and its time by a sample."""
    size = 8
    while size < batch and size <= 512:
        room = m.room(t.budget, size)
        fits = [f for f in m.net.uncut(size) if f.peak <= room]
        if fits:
            scale = None if base is None else base * size / batch
            yield _row(m, min(fits, key=lambda f: (f.seconds, f.peak)), scale)
        size *= 2


def _references(t: _Setting, m: _Model, batch: int) -> tuple[list[Reference], tuple[Row, ...], float | None]:
    """Full fine-tuning, where the source is there, and the adapted graph, both under autograd; the first's seconds."""
    found, rows, base = [], list[Row](), None
    try:
        fresh = adapter_rank(t.subject.model) is None
        full = adapted(t.subject, Plan("full", Options()), verified=False)[0].gm if fresh else None
    except FloorplanError:
        full = None
    for name, gm, rank in (("full fine-tuning", full, None), ("adapted, autograd, whole batch", m.gm, m.rank)):
        if gm is None:
            continue
        r = reference(gm, t.subject.inputs, t.loss, batch, t.machines, t.anchors, name)
        found.append(r)
        base = r.seconds if gm is full else base
        state, kept = dict(r.timeline.state), max(r.timeline.kept_live, default=0)
        rows.append(Row(name, batch, rank, r.timeline.peak, kept, state["model"] + state["optimizer"], state["batch"],
                        r.seconds / base if base else None, round(r.work.macs)))  # fmt: skip
    return found, tuple(rows), base


def _obstacle(t: _Setting, m: _Model, batch: int) -> str:
    """What takes the room, by name, and what to do."""
    f = _smallest(m, batch)
    if m.state > t.budget:
        return f"weights and optimizer state alone take {m.state:,} of {t.budget:,} bytes; raise --budget"
    given = m.sample * batch
    total = m.state + given + f.peak
    line = exact(m.net, f)[1]
    at = line.peak_at
    where, way, nbytes = line.by_node(at)[0]
    why = f"; {m.net.coupled}" if m.net.coupled else ""
    lower = _largest(m, t.budget) if batch > 1 else 0
    way_out = f"raise --budget to {total:,}" + (f" or lower --batch to {lower}" if lower else "")
    return (
        f"the smallest step ({m.net.schedule(f)}) takes {total:,}: state {m.state:,}, batch {given:,}, requested peak "
        f"{f.peak:,}, of which {nbytes:,} in {where or '-'} ({way}); {way_out}{why}"
    )


def _measured(report: PlanReport, t: _Setting) -> PlanReport:
    """The chosen step run for real on random inputs."""
    if report.step is None or report.choice is None or report.module is None:
        return report
    given = filled(t.subject.inputs, report.choice.batch)
    found = measure(report.step, given, target_for(report.module, given, t.loss))
    return replace(report, measured={"requested_peak": found.peak, "total": found.total})
