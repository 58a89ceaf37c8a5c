"""A model traced and rewritten by a method, each pass verified."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from floorplan.errors import FloorplanError, PassError
from floorplan.graph.copies import filled_in, hollow
from floorplan.graph.driver import Pass, Site
from floorplan.graph.driver import rewrite as run_passes
from floorplan.graph.edit import tied_convs
from floorplan.graph.trace import Traced, trace
from floorplan.layers.adapter import adapter_rank
from floorplan.ledger.analyze import Analysis, follows, trainable
from floorplan.ledger.inputs import shrunk, smaller_inputs
from floorplan.methods.any_batch import any_batch
from floorplan.methods.catalogue import Plan
from floorplan.methods.catalogue import method as method_named
from floorplan.methods.subject import Subject
from floorplan.methods.verify import Verifier, runs_in_double, same_start
from floorplan.torch_doors import wants_values


@dataclass(frozen=True)
class Known:
    """A model traced, and what an analysis of it in the mode that it is in has shown."""

    traced: Traced
    source: Analysis


def traced_source(s: Subject, known: Known | None = None) -> Traced:
    """The graph that methods rewrite; FloorplanError where it does not stand for the model, or cannot be trained."""
    traced = known.traced if known else trace(s.model, s.inputs, both_modes=True)
    shown = known is not None and known.source.follows and traced.own is not None
    if not shown and not follows(traced.gm, s.inputs, s.model):
        way = "decide by isinstance, hasattr or try outside the forward"
        raise FloorplanError(f"{s.name}: forward takes another branch when it is traced than when it runs; {way}")
    if not (shown and known is not None and known.source.trains):
        trainable(traced.gm, s.inputs)  # a model that cannot be trained is diagnosed, not repaired
    return traced


def adapted(
    s: Subject, plan: Plan, verified: bool, source: Traced | Known | None = None, structure: bool = False
) -> tuple[Traced, dict[str, list[Site]]]:
    """Run the method's passes on the traced source, and put the graph in train mode; `source`: if it is there.

    structure: sizes alone are asked for; the weights of the result may be without values, and take no memory.
    """
    if adapter_rank(s.model) is not None:
        raise FloorplanError(f"{s.name}: already adapted; rewrite its source model instead")
    floats = ((n, p) for n, p in s.model.named_parameters() if verified and p.is_floating_point())
    if bad := next((n for n, p in floats if not torch.isfinite(p).all()), ""):
        raise FloorplanError(f"{s.name}: {bad} holds NaN or infinity, so nothing can be verified; repair it first")
    known = source if isinstance(source, Known) else None
    traced = source if isinstance(source, Traced) else traced_source(s, known)
    line = method_named(plan.method).passes(plan.options)
    notes = (*traced.notes, *tied_convs(traced.gm))
    try:
        if verified:
            some = shrunk(traced.gm, s.inputs) if known is not None and known.source.any_batch else None
            small, why = some or (), "untried" if some is None else runs_in_double(traced.gm, some)
            if why:
                small = smaller_inputs(traced.gm, s.inputs)
                why = runs_in_double(traced.gm, small)
            if why:
                notes += (f"outputs verified in the model's own precision only, not in float64: {why}",)
            else:  # in float64, where a fold's rounding cannot hide (or be taken for) a fault of a pass
                run_passes(copy.deepcopy(traced.gm).double(), line, Verifier(small))
        gm, log = _hollow_passes(traced.gm, line) if structure else run_passes(traced.gm, line, _no_check)
        if verified:
            before = _source(s.model, traced.gm)
            same_start(gm, before, small)
            if why := any_batch(gm, before, small):
                fixed = [n for n in traced.notes if "input sizes" in n or "constant" in n]
                todo = "; ".join([*fixed[:1], "compute with tensors and x.shape instead of numbers, or loop outside"])
                raise FloorplanError(f"its graph stands for one batch size alone: {why}; {todo}")
    except FloorplanError as e:
        hint = "".join(f"; {path} was not traced: {why}" for path, why in list(traced.opaque.items())[:1])
        raise type(e)(f"{s.name}: {e}{hint}") from e
    gm.train()
    return replace(traced, gm=gm, notes=notes), log


def _hollow_passes(gm: fx.GraphModule, line: Sequence[Pass]) -> tuple[fx.GraphModule, dict[str, list[Site]]]:
    """The passes on a copy without weights; on the graph itself where one reads their values."""
    try:
        found, log = run_passes(hollow(gm), line, _no_check, copied=False)
    except PassError as e:
        if not (isinstance(e.__cause__, Exception) and wants_values(e.__cause__)):
            raise
        return run_passes(gm, line, _no_check)
    return filled_in(found), log


def _source(model: nn.Module, graph: fx.GraphModule) -> nn.Module:
    """The model itself, which the adapted graph must start as; its graph where it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception:  # a computed tensor on it, a lock, a file
        return graph


def _no_check(p: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
    """`check` judges structure alone: lint has run, and no number of the model is trusted to it."""
