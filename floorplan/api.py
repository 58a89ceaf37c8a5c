"""The Python API: check, rewrite, load, save. The command line is a thin shell over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.files import ensure_writable, whole
from floorplan.graph.trace import Traced, trace
from floorplan.graph.untouched import in_mode, mode_of
from floorplan.layers.adapter import adapter_rank
from floorplan.ledger.analyze import Analysis, analyze
from floorplan.ledger.figures import Figures, measure
from floorplan.ledger.inputs import make_inputs, of_one, reads_places, smaller_inputs
from floorplan.ledger.report import CheckReport
from floorplan.methods.catalogue import Options, Plan, recorded
from floorplan.methods.catalogue import method as method_named
from floorplan.methods.report import RewriteReport
from floorplan.methods.rewrite import Known, adapted
from floorplan.methods.subject import Shapes, Source, Subject, read_adapted, subject_of
from floorplan.methods.verify import same_outputs
from floorplan.step.schedule import options_in, read_plan, schedule_in
from floorplan.step.studied import crossings, ordered
from floorplan.store import artifact
from floorplan.store.modules import packages_of


def check(
    model: nn.Module | str,
    inputs: Any = None,
    rank: int | None = None,
    *,
    method: str = "memflora",
    sites: str = "auto",
    seed: int = 0,
    train_head: bool = False,
    batch: int | None = None,
    shapes: Shapes | None = None,
    measured: bool = False,
    autocast: torch.dtype | None = None,
    mode: str = "saved",
    run: bool = True,
    weights: str | None = None,
    allow: Sequence[str] = (),
    trust: bool = False,
    keep_head: bool = False,
) -> CheckReport:
    """What will autograd keep, and is it the activation-memory floor?

    model: a module, a file, or a factory's name. inputs: example arguments (values are not read).
    rank: judge the model as `rewrite` would adapt it by `method`; on an adapted model, assert its rank.
    mode: "train" or "eval" sets the model's mode first. measured: count a real step of it as well. run: one real
    forward on the smallest input that it takes must keep what fake tensors say; False: no data is touched.
    """
    source = Source(model, inputs, batch, shapes, weights, allow, trust, keep_head)
    plan = Plan(method, Options(rank or 1, sites, seed, train_head))
    return checked(source, rank, plan, Manner(measured, autocast, mode, run))


@dataclass(frozen=True)
class Manner:
    """How a model is looked at."""

    measured: bool = False  # a real step is counted beside the prediction
    autocast: torch.dtype | None = None
    mode: str = "saved"
    run: bool = True  # one small real forward is held against the fakes


def checked(source: Source, rank: int | None, plan: Plan, manner: Manner = Manner()) -> CheckReport:
    """`check` of a request; rank None: the model as it stands, unless the plan's method has no rank."""
    if rank is not None and (isinstance(rank, bool) or rank < 1):
        raise FloorplanError(f"rank {rank}: an adapter has a whole rank of 1 or more")
    s = subject_of(source)
    with in_mode(s.model, manner.mode):
        has = adapter_rank(s.model)
        if (rank is None and method_named(plan.method).ranked) or has is not None:
            if rank is not None and has != rank:
                way = "leave --rank out to check it as it is"
                raise FloorplanError(f"{s.name}: adapted at rank {has}, not {rank}; {way}")
            return replace(_report(s, trace(s.model, s.inputs), s.model, manner), rank=has)
        traced, log = adapted(s, plan, verified=False, structure=not manner.measured)
        with in_mode(traced.gm, manner.mode):
            report = _report(s, traced, traced.gm, manner)
        return replace(report, subject="rewritten", rank=rank, log=log, method=plan.method)


def _report(s: Subject, traced: Traced, real: nn.Module, manner: Manner, found: Analysis | None = None) -> CheckReport:
    dtype = manner.autocast
    found = found or analyze(traced, s.inputs, autocast=dtype, real=real, really=manner.run)
    shapes = tuple(tuple(t.shape) for t in s.inputs if isinstance(t, Tensor))
    counted = measure(real, s.inputs, autocast=dtype) if manner.measured else None
    notes = (*s.notes, *traced.notes, *found.notes)
    report = CheckReport(s.name, shapes, found.proof, found.figures, counted, notes, traced.opaque, traced.lines)
    return replace(report, mode=mode_of(real))


@dataclass(frozen=True)
class Rewritten:
    """An adapted, trainable graph and the report on it."""

    module: fx.GraphModule
    report: RewriteReport


def rewrite(
    model: nn.Module | str,
    inputs: Any = None,
    rank: int = 2,
    *,
    method: str = "memflora",
    sites: str = "auto",
    seed: int = 0,
    train_head: bool = False,
    batch: int | None = None,
    shapes: Shapes | None = None,
    measured: bool = True,
    weights: str | None = None,
    allow: Sequence[str] = (),
    trust: bool = False,
    keep_head: bool = False,
    plan: str | Path | Mapping[str, Any] | None = None,
) -> Rewritten:
    """Adapt a model, by default with MemFLoRA: fused sites, folded BatchNorms, packed gates.

    Every pass is verified. `method` is one of floorplan.methods.catalogue.METHODS, or registered. plan: a
    plan.json, whose rank, method, sites and seed are taken; its schedule stays with the model, for compile_step.

    Returns a trainable GraphModule in train mode, equal to the source model in eval mode while U = 0,
    and predicted beside measured figures for the model before and after.
    """
    source = Source(model, inputs, batch, shapes, weights, allow, trust, keep_head)
    return rewritten(source, Plan(method, Options(rank, sites, seed, train_head)), plan, measured)


def rewritten(
    source: Source, chosen: Plan, plan: str | Path | Mapping[str, Any] | None = None, measured: bool = True
) -> Rewritten:
    """`rewrite` of a request; a plan.json goes before what is chosen here."""
    s, manner = subject_of(source), Manner(measured, run=measured)
    both = trace(s.model, s.inputs, both_modes=True)
    own = both.own or trace(s.model, s.inputs)
    found = analyze(own, s.inputs, real=s.model, really=measured)
    before, schedule = _report(s, own, s.model, manner, found), None
    if plan is not None:
        document = read_plan(plan)
        chosen, schedule = Plan.of(options_in(document)), schedule_in(document)
    traced, log = adapted(s, chosen, True, Known(both, found))
    for name in [n for n, _ in (schedule or {}).get("stages", ())]:
        if name not in {n.name for n, _ in crossings(ordered(traced.gm))}:
            raise FloorplanError(f"--plan: {name} is no place to cut {s.name}; the plan is of another model")
    after = _report(s, traced, traced.gm, manner)
    untold = tuple(n for n in found.notes if n.startswith("its code asks"))
    after = replace(
        after,
        notes=(*after.notes, *untold),
        subject="rewritten",
        rank=chosen.options.rank,
        log=log,
        method=chosen.method,
    )
    traced.gm.meta["floorplan"] = recorded(chosen, s.inputs) | ({"schedule": schedule} if schedule else {})
    return Rewritten(traced.gm, RewriteReport(before, after, chosen.as_dict()))


def save(module: fx.GraphModule, path: str | Path, *, force: bool = False, allow: Sequence[str] = ()) -> None:
    """Write an adapted model as data; FloorplanError if the file exists and `force` is not set.

    allow: packages whose own nn.Modules it may name; those of a method from outside it always may.
    """
    if not isinstance(module, fx.GraphModule):
        raise FloorplanError(f"save: {type(module).__name__} is no adapted graph; save rewrite(...).module")
    artifact.save_artifact(module, path, module.meta.get("floorplan", {}), force=force, allow=allow)


def save_verified(result: Rewritten, path: str | Path, *, force: bool = False, allow: Sequence[str] = ()) -> None:
    """Save, load back, and compare outputs bit by bit before the file gets its name."""
    target = ensure_writable(path, force)
    with whole(target) as draft:
        save(result.module, draft, force=True, allow=allow)
        shapes = of_one(result.module.meta["floorplan"]["input"])
        inputs = smaller_inputs(result.module, make_inputs(result.module, shapes, 2))
        if reads_places(result.module):
            inputs = tuple(torch.zeros_like(t) for t in inputs)
        again = load(draft, allow=(*allow, *packages_of(result.module)))
        same_outputs(result.module, again, inputs, str(target))


def load(path: str | Path, *, allow: Sequence[str] = ()) -> fx.GraphModule:
    """Read an adapted model back: a trainable GraphModule. No code of the file runs.

    allow: installed packages whose nn.Module classes the file may name; they are imported, which runs their code.
    """
    return read_adapted(path, allow)


__all__ = ["Analysis", "Figures", "check", "load", "measure", "rewrite", "save"]
