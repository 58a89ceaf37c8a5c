"""The Python API: check, rewrite, load, save. The command line is a thin shell over it."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_iter

from floorplan import artifact
from floorplan.adapter import adapters
from floorplan.analyze import Analysis, analyze, follows, trainable
from floorplan.driver import Pass, Site
from floorplan.driver import rewrite as run_passes
from floorplan.errors import FloorplanError
from floorplan.files import ensure_writable, whole
from floorplan.infer import infer_shape, make_inputs, smaller_inputs
from floorplan.load import load_model
from floorplan.measure import Figures, measure
from floorplan.methods import Options, Plan, recorded
from floorplan.methods import method as method_named
from floorplan.plan_file import plan_of, read_plan, schedule_in
from floorplan.report import CheckReport
from floorplan.rewrite_report import RewriteReport
from floorplan.sites import tied_convs
from floorplan.step_graph import crossings, ordered
from floorplan.storage import arguments
from floorplan.trace import Traced, trace
from floorplan.verify import Verifier, double_copy, runs_in_double, same_outputs, same_start

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Subject:
    """A model with inputs to run it on, and what had to be said on the way."""

    model: nn.Module
    name: str
    inputs: tuple[Any, ...]
    notes: tuple[str, ...]


def subject_of(
    model: nn.Module | str, inputs: Any = None, *, batch: int | None = None,
    shapes: Shapes | None = None, weights: str | None = None, allow: Sequence[str] = (),
    trust: bool = False,
) -> Subject:  # fmt: skip
    """Load what a user named, and find inputs for it."""
    notes: list[str] = []
    sizes = [1 if batch is None else batch, *(n for d in shapes or () for n in d)]
    if min(sizes) < 1:
        raise FloorplanError(f"input: {min(sizes)} is no size; batch and shapes are positive")
    if isinstance(model, str | Path):
        loaded = load_model(str(model), weights=weights, allow=allow, trust=trust)
        model, name = loaded.module, loaded.source
        notes += loaded.notes
    elif isinstance(model, torch.jit.ScriptModule):
        raise FloorplanError("model: a TorchScript module has no Python forward to trace; give the eager model")
    elif isinstance(model, nn.Module):
        name = type(model).__name__
    else:
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise FloorplanError(f"model: {what} is no model; give an nn.Module instance, a file or a factory's name")
    if inputs is not None:
        args = arguments(inputs)
        bad = next((a for a in tree_iter(args) if not isinstance(a, _INPUTS)), None)
        if bad is not None:
            raise FloorplanError(
                f"inputs: a {type(bad).__name__} among them; give tensors, or containers of tensors"
            )
        return Subject(model, name, args, tuple(notes))
    if shapes is None and (recorded := getattr(model, "meta", {}).get("floorplan", {}).get("input")):
        shapes = [tuple(s[1:]) for s in recorded]
        notes.append(f"input {[list(s) for s in shapes]} as recorded when it was adapted; --input sets it")
    if shapes is None:
        shape, how = infer_shape(model)
        shapes = [shape]
        notes.append(f"input {list(shape)} inferred from {how}; --input sets it")
    return Subject(model, name, make_inputs(model, shapes, batch or DEFAULT_BATCH), tuple(notes))


DEFAULT_BATCH = 8
_INPUTS = (Tensor, int, float, bool, str, torch.dtype, torch.device, type(None))


def check(
    model: nn.Module | str, inputs: Any = None, rank: int | None = None, *,
    method: str = "memflora", sites: str = "auto", seed: int = 0, train_head: bool = False,
    batch: int | None = None, shapes: Shapes | None = None, measured: bool = False,
    autocast: torch.dtype | None = None, mode: str = "saved",
    weights: str | None = None, allow: Sequence[str] = (), trust: bool = False,
) -> CheckReport:  # fmt: skip
    """What will autograd keep, and is it the activation-memory floor?

    model: a module, a file, or a factory's name. inputs: example arguments (values are not read).
    rank: judge the model as `rewrite` would adapt it by `method`; on an adapted model, assert its rank.
    mode: "train" or "eval" sets the model's mode first. measured: run it for real as well.
    """
    if rank is not None and (isinstance(rank, bool) or rank < 1):
        raise FloorplanError(f"rank {rank}: an adapter has a whole rank of 1 or more")
    s = subject_of(
        model, inputs, batch=batch, shapes=shapes, weights=weights, allow=allow, trust=trust
    )
    with in_mode(s.model, mode):
        plan = Plan(method, Options(rank or 1, sites, seed, train_head))
        return _checked(s, rank, plan, measured, autocast)


MODES = ("saved", "train", "eval")


@contextmanager
def in_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """The model in train or eval mode for a while; "saved" leaves it as it is."""
    if mode not in MODES:
        raise FloorplanError(f"mode {mode}: not known; use {', '.join(MODES)}")
    flags = {m: m.training for m in model.modules()}
    if mode != "saved":
        model.train(mode == "train")
    try:
        yield
    finally:
        for m, flag in flags.items():
            m.training = flag


def _checked(
    s: Subject, rank: int | None, plan: Plan, measured: bool, autocast: torch.dtype | None
) -> CheckReport:
    has = adapter_rank(s.model)
    if (rank is None and method_named(plan.method).ranked) or has is not None:
        if rank is not None and has != rank:
            raise FloorplanError(
                f"{s.name}: adapted at rank {has}, not {rank}; leave --rank out to check it as it is"
            )
        traced = trace(s.model, s.inputs)
        return _report(s, traced, s.model, "as-is", has, {}, measured, autocast)
    traced, log = adapted(s, plan, verified=False)
    return replace(
        _report(s, traced, traced.gm, "rewritten", rank, log, measured, autocast), method=plan.method
    )


def adapter_rank(model: nn.Module) -> int | None:
    """Rank of an adapted model, None of any other."""
    ranks = {m.rank for _, m in adapters(model)}
    return max(ranks) if ranks else None


def _report(
    s: Subject, traced: Traced, real: nn.Module, subject: str, rank: int | None,
    log: dict[str, list[Site]], measured: bool, autocast: torch.dtype | None,
) -> CheckReport:  # fmt: skip
    found = analyze(traced.gm, s.inputs, opaque=traced.opaque, autocast=autocast, real=real)
    real_figures = measure(real, s.inputs, autocast=autocast) if measured else None
    return CheckReport(
        name=s.name,
        subject=subject,
        rank=rank,
        inputs=tuple(tuple(t.shape) for t in s.inputs if isinstance(t, Tensor)),
        proof=found.proof,
        predicted=found.figures,
        measured=real_figures,
        notes=(*s.notes, *traced.notes, *found.notes),
        opaque=traced.opaque,
        lines=traced.lines,
        log=log,
    )


def adapted(s: Subject, plan: Plan, verified: bool) -> tuple[Traced, dict[str, list[Site]]]:
    """Trace, run the method's passes, and put the graph in train mode."""
    if adapter_rank(s.model) is not None:
        raise FloorplanError(f"{s.name}: already adapted; rewrite its source model instead")
    bad = next((n for n, p in s.model.named_parameters() if _not_finite(p)), "")
    if bad and verified:
        raise FloorplanError(
            f"{s.name}: {bad} holds NaN or infinity, so nothing can be verified; repair it first"
        )
    traced = trace(s.model, s.inputs, both_modes=True)
    if not follows(traced.gm, s.inputs, s.model):
        raise FloorplanError(
            f"{s.name}: forward takes another branch when it is traced than when it runs; "
            "decide by isinstance, hasattr or try outside the forward"
        )
    trainable(traced.gm, s.inputs)  # a model that cannot be trained is diagnosed, not repaired
    line = method_named(plan.method).passes(plan.options)
    notes = (*traced.notes, *tied_convs(traced.gm))
    try:
        if verified:
            small = smaller_inputs(traced.gm, s.inputs)
            # In float64, where a fold's rounding cannot hide (or be taken for) a fault of a pass.
            if (why := runs_in_double(traced.gm, small)) == "":
                run_passes(double_copy(traced.gm), line, Verifier(small))
            else:
                notes += (f"outputs verified in the model's own precision only, not in float64: {why}",)
        gm, log = run_passes(traced.gm, line, _no_check)
        if verified:
            same_start(gm, _source(s.model, traced.gm), small)
    except FloorplanError as e:
        hint = "".join(
            f"; {path} was not traced: {why}" for path, why in list(traced.opaque.items())[:1]
        )
        raise type(e)(f"{s.name}: {e}{hint}") from e
    gm.train()
    return replace(traced, gm=gm, notes=notes), log


def _source(model: nn.Module, graph: fx.GraphModule) -> nn.Module:
    """The model itself, which the adapted graph must start as; its graph where it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception:  # a computed tensor on it, a lock, a file
        return graph


def _not_finite(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and not bool(torch.isfinite(t).all())


def _no_check(p: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
    """`check` judges structure alone: lint has run, and no number of the model is trusted to it."""


@dataclass(frozen=True)
class Rewritten:
    """An adapted, trainable graph and the report on it."""

    module: fx.GraphModule
    report: RewriteReport


def rewrite(
    model: nn.Module | str, inputs: Any = None, rank: int = 2, *, method: str = "memflora",
    sites: str = "auto", seed: int = 0, train_head: bool = False, batch: int | None = None,
    shapes: Shapes | None = None, measured: bool = True, weights: str | None = None,
    allow: Sequence[str] = (), trust: bool = False, plan: str | Path | Mapping[str, Any] | None = None,
) -> Rewritten:  # fmt: skip
    """Adapt a model, by default with MemFLoRA: fused sites, folded BatchNorms, packed gates.

    Every pass is verified. `method` is one of floorplan.methods.METHODS. plan: a plan.json, whose rank, method,
    sites and seed are taken; its schedule stays with the model, for compile_step.

    Returns a trainable GraphModule in train mode, equal to the source model in eval mode while U = 0,
    and predicted beside measured figures for the model before and after.
    """
    s = subject_of(
        model, inputs, batch=batch, shapes=shapes, weights=weights, allow=allow, trust=trust
    )
    source = trace(s.model, s.inputs)
    before = _report(s, source, s.model, "as-is", None, {}, measured, None)
    chosen, schedule = Plan(method, Options(rank, sites, seed, train_head)), None
    if plan is not None:
        document = read_plan(plan)
        chosen, schedule = plan_of(document), schedule_in(document)
    traced, log = adapted(s, chosen, verified=True)
    for name in [n for n, _ in (schedule or {}).get("stages", ())]:
        if name not in {n.name for n, _ in crossings(ordered(traced.gm))}:
            raise FloorplanError(f"--plan: {name} is no place to cut {s.name}; the plan is of another model")
    after = _report(s, traced, traced.gm, "rewritten", chosen.options.rank, log, measured, None)
    after = replace(after, method=chosen.method)
    traced.gm.meta["floorplan"] = recorded(chosen, s.inputs) | ({"schedule": schedule} if schedule else {})
    return Rewritten(traced.gm, RewriteReport(before, after, chosen.as_dict()))


def save(module: fx.GraphModule, path: str | Path, *, force: bool = False) -> None:
    """Write an adapted model as data; FloorplanError if the file exists and `force` is not set."""
    if not isinstance(module, fx.GraphModule):
        raise FloorplanError(
            f"save: {type(module).__name__} is no adapted graph; save rewrite(...).module"
        )
    artifact.save_artifact(module, path, module.meta.get("floorplan", {}), force=force)


def save_verified(result: Rewritten, path: str | Path, *, force: bool = False) -> None:
    """Save, load back, and compare outputs bit by bit before the file gets its name."""
    target = ensure_writable(path, force)
    with whole(target) as draft:
        save(result.module, draft, force=True)
        shapes = [shape[1:] for shape in result.report.after.inputs]
        inputs = smaller_inputs(result.module, make_inputs(result.module, shapes, 2))
        same_outputs(result.module, load(draft), inputs, str(target))


def load(path: str | Path) -> fx.GraphModule:
    """Read an adapted model back: a trainable GraphModule. No code of the file runs."""
    return artifact.load_artifact(path)


__all__ = ["Analysis", "Figures", "check", "load", "measure", "rewrite", "save"]
