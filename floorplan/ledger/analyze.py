"""Predict one graph's step: the symbolic ledger with its proof, and exact figures at the sizes asked for."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy
import torch
from torch import fx, nn

from floorplan.errors import ReadsValues, TraceError
from floorplan.graph.copies import clone_structure
from floorplan.graph.trace import Traced, trace
from floorplan.graph.untouched import no_memory
from floorplan.layers.layer import model_state
from floorplan.ledger.criterion import ABOVE_FLOOR, AT_FLOOR, UNPROVEN, Proof, is_workspace, prove
from floorplan.ledger.examine import Examination, Kept, kept_by
from floorplan.ledger.fakes import Fakes, Sizes, concrete_fakes, symbolic_fakes
from floorplan.ledger.figures import Figures, figures, measure
from floorplan.ledger.points import Axes
from floorplan.ledger.run import Run, Step, Watch, observe, run
from floorplan.ledger.sizes import TOO_LONG
from floorplan.torch_doors import tensors_in

HOOKS = Watch(hooks=True)
Proved = tuple[Proof, tuple[str, ...], Axes | None]  # with notes, and the axes whose sizes are symbols


@dataclass(frozen=True)
class Analysis:
    """What a graph will keep, predicted without running it."""

    proof: Proof
    figures: Figures
    notes: tuple[str, ...]
    follows: bool = False  # the graph was seen to save what the model itself does
    trains: bool = False  # the model's own step was seen to run to its end
    any_batch: bool = False  # the batch is a symbol in all that was proved
    axes: Axes | None = None  # of the inputs, where sizes are symbols
    kept: Kept | None = None  # by the model itself, or by its graph, at the sizes asked for


def analyze(
    traced: Traced | fx.GraphModule,
    inputs: Sequence[Any],
    *,
    autocast: torch.dtype | None = None,
    backward: bool = True,
    real: nn.Module | None = None,
    really: bool = False,
) -> Analysis:
    """Ledger, verdict and figures of a graph on inputs of these sizes, held against the model at other sizes.

    real: the module that was traced, if it is that whose step is to be predicted. really: its forward runs once on
    real tensors too; no values are read else.
    """
    traced = traced if isinstance(traced, Traced) else Traced(traced)
    source = traced.gm if real is None else real
    step = Step(traced.gm, tuple(inputs), backward=backward, autocast=autocast)
    found = _analyzed(step, traced.opaque, source)
    if found.kept is None:  # counted in a real run
        return found
    subject, axes = replace(step.forward, model=source), found.axes or Axes.plain(inputs)
    asks = bool(traced.opaque) or (traced.asks and not isinstance(source, fx.GraphModule))
    seen = Examination(subject, found.proof, axes, asks, source is not traced.gm, found.axes is not None).run()
    if really:
        seen.for_real(found.kept)
    proof = replace(found.proof, verdict=_above(seen) or seen.verdict, assumptions=tuple(seen.assumptions))
    return replace(found, proof=proof, notes=(*found.notes, *seen.notes))


def _above(seen: Examination) -> str:
    """ABOVE_FLOOR if a proof at the sizes at which other tensors are kept says so; "" if none does."""
    if seen.other is None or seen.verdict != UNPROVEN:
        return ""
    inputs = seen.axes.at(seen.step.inputs, seen.other)
    try:
        traced = trace(seen.step.model, inputs)
        step = replace(seen.step, model=traced.gm, inputs=inputs)
        found = _analyzed(step, traced.opaque, traced.gm).proof.verdict
    except TraceError:
        return ""
    return found if found == ABOVE_FLOOR else ""


def _analyzed(step: Step, opaque: Mapping[str, str], source: nn.Module) -> Analysis:
    """The analysis at the sizes asked for."""
    gm, given, tensors = cast(fx.GraphModule, step.model), step.inputs, list(tensors_in(step.inputs))
    own = not isinstance(source, fx.GraphModule)
    gm, state = (_making_constants(gm), source) if own else (gm, gm)
    step = replace(step, model=gm)
    failures: list[str] = []
    kept, plain = _own_runs(source, step) if own else (None, None)
    trains = plain is not None and step.backward
    if kept is not None and plain is not None:  # its own two runs agree, and the symbolic one agrees with them
        exact = figures(state, kept, plain, tensors)
        if exact.saved == exact.saved_census and not any(s.hidden for s in kept.saved):
            if (proved := _proved(step, kept, opaque, failures)) is not None:
                saved = kept_by(kept.saved)
                return Analysis(proved[0], exact, proved[1], True, trains, _any_batch(proved[0]), proved[2], saved)
    fakes = concrete_fakes(gm, given)
    try:
        hooked = run(step.forward, HOOKS, fakes)
    except ReadsValues as e:
        return _counted(step, opaque, source, str(e))
    try:
        plain = plain or run(step, Watch(), fakes)
    except TraceError as e:
        raise TraceError(overwritten(gm, given) or str(e)) from e
    failures = [f for f in failures if TOO_LONG in f]
    proved = None if failures else _proved(step, hooked, opaque, failures)
    got: Proved = proved or (_unproven(step, hooked, opaque, failures), (f"not proved: {failures[-1]}",), None)
    proof, notes, axes = got
    exact = figures(state, hooked, plain, tensors)
    follows = kept is None or ledger_of(kept) == ledger_of(hooked)
    if kept is not None and (not follows or exact.saved_census != exact.saved):
        exact = figures(state, kept, plain, tensors)
        if any(s.hidden for s in kept.saved):
            proof, notes = _with_stored_aside(proof, step, kept), (*notes, ASIDE)
        if not follows:
            proof, notes, axes = _lowered(proof), (*notes, OTHER), None
    saved = kept_by((hooked if kept is None else kept).saved)
    return Analysis(proof, exact, notes, follows, trains, not failures and _any_batch(proof), axes, saved)


def _lowered(proof: Proof, **changes: Any) -> Proof:
    """The proof with these changes, and nothing at the floor any more."""
    return replace(proof, verdict=UNPROVEN if proof.verdict == AT_FLOOR else proof.verdict, **changes)


def _any_batch(proof: Proof) -> bool:
    return not any(a.startswith("B = ") for a in proof.assumptions)


def ledger_of(run: Run) -> list[tuple[str, int]]:
    """What a run was seen to save: dtype and bytes of every tensor kept, in no order."""
    return sorted((str(s.dtype), int(s.tensor_bytes)) for s in run.saved if s.owner == "kept" and not s.hidden)


def follows(gm: fx.GraphModule, inputs: Sequence[Any], real: nn.Module) -> bool:
    """Whether the graph saves what the module itself does; True where the module cannot run on fakes."""
    step = Step(_making_constants(gm), tuple(inputs)).forward
    own = _own(real, step, HOOKS)
    return own is None or ledger_of(own) == ledger_of(observe(step, HOOKS))


OTHER = "the model itself keeps other tensors than its traced graph: a branch of its forward was traced another way"


def _counted(step: Step, opaque: Mapping[str, str], real: nn.Module, why: str) -> Analysis:
    """A real step in place of the prediction: exact at these inputs, and nothing is proved."""
    proof = _unproven(step, observe(step.forward, HOOKS), opaque, [why])
    note = f"{why}: counted in a real run on these inputs (random unless given), nothing is proved"
    return Analysis(proof, measure(real, step.inputs, autocast=step.autocast), (note,))


ASIDE = "the model stores tensors aside (on a module, in a list) that outlive its forward; its graph does not"


def _making_constants(gm: fx.GraphModule) -> fx.GraphModule:
    """A twin that makes the constants that the traced forward makes, where the graph only has them."""
    constants = [n for n in gm.graph.nodes if n.op == "get_attr" and str(n.target).startswith("_tensor_constant")]
    if not constants:
        return gm
    twin = clone_structure(gm)
    for node in list(twin.graph.nodes):
        if node.name in {n.name for n in constants}:
            with twin.graph.inserting_after(node):
                made = twin.graph.call_function(torch.clone, (node,))
            node.replace_all_uses_with(made, lambda user, made=made: user is not made)
    twin.recompile()
    return twin


def _with_stored_aside(proof: Proof, step: Step, own: Run) -> Proof:
    """The proof with what the model's own forward leaves alive beside the saved tensors."""
    hidden = replace(own, saved=tuple(s for s in own.saved if s.hidden))
    first = 1 + max((e.storage for e in proof.entries), default=-1)
    reason, fix = "outlives the forward without being saved", "drop the reference, or detach and clone what must stay"
    found = enumerate(_in_numbers(step, hidden, {}).entries, first)
    more = tuple(replace(e, storage=i, verdict="unproven", reason=reason, fix=fix) for i, e in found)
    return _lowered(proof, entries=proof.entries + more)


def _own(real: nn.Module, step: Step, watch: Watch, fakes: Fakes | None = None) -> Run | None:
    """The step of a module itself: its Python frames hold tensors that the graph lets go earlier."""
    try:
        with no_memory(real):
            return run(replace(step, model=real), watch, fakes or True)
    except Exception:  # it reads values, or cannot be copied: its graph stands for it
        return None


def _own_runs(real: nn.Module, step: Step) -> tuple[Run | None, Run | None]:
    """The module's own forward under hooks and, if that ran, its whole step, on two copies that share their fakes."""
    try:
        fakes = concrete_fakes(real, step.inputs)
        first = replace(fakes, gm=clone_structure(fakes.gm))
    except Exception:  # it cannot be copied
        return None, None
    kept = _own(real, step.forward, HOOKS, first)
    # A buffer that the forward adds a result to has become part of the first run's autograd graph.
    again = fakes.on(step.inputs) if all(t.is_leaf for t in model_state(fakes.gm)) else None
    return kept, _own(real, step, Watch(), again) if kept is not None else None


def _proved(step: Step, exact: Run, opaque: Mapping[str, str], failures: list[str]) -> Proved | None:
    """The first symbolic run whose ledger agrees with the exact one; sizes get less symbolic in turn.

    The batch of the symbolic run is first one for which kernels may be chosen otherwise: formulas that agree
    there with the exact run hold on both sides of such a guard.
    """
    for positions, across in itertools.product(("primes", "exact", "fixed"), (True, False)):
        fakes = symbolic_fakes(step.model, step.inputs, Sizes(positions, across))
        axes = Axes.of(fakes, step.inputs)
        try:
            seen = run(step.forward, HOOKS, fakes)
        except TraceError as e:
            failures.append(str(e))
            if TOO_LONG in failures[-1]:
                break
            continue
        proof = _with_exact_sizes(prove(cast(fx.GraphModule, step.model), fakes, seen, opaque), exact)
        if across and not _any_batch(proof):
            continue
        if (where := _first_difference(proof, exact)) is None:
            notes = ("positions are fixed to the given input size: the formulas hold for no other",)
            return proof, notes if positions == "fixed" else (), axes
        failures.append(f"the symbolic ledger differs from the exact one at {where}")
    return None


def _with_exact_sizes(proof: Proof, hooked: Run) -> Proof:
    """Sizes that only a kernel or the caller knows are those of the exact run: numbers, no formula."""
    exact = [s for s in hooked.saved if int(s.nbytes)]
    if len(exact) != len(proof.entries):
        return proof
    entries = []
    for e, s in zip(proof.entries, exact, strict=True):
        n = int(s.nbytes)
        if is_workspace(s) and s.node in (e.node, ""):
            e = replace(e, shape=(str(n),), nbytes=n, tensor_bytes=n, expr=str(n), size=sympy.Integer(n))
        elif e.owner != "kept" and e.nbytes != n:  # a caller's view of a larger storage
            e = replace(e, nbytes=n, expr=str(n), size=sympy.Integer(n))
        entries.append(e)
    return replace(proof, entries=tuple(entries))


def trainable(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """TraceError naming the node that overwrites a saved tensor, if one does."""
    try:
        observe(Step(gm, tuple(inputs)), Watch())
    except TraceError as e:
        raise TraceError(overwritten(gm, inputs) or str(e)) from e


def overwritten(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """One line on the in-place node that spoils a saved tensor; "" if there is none."""
    try:
        seen = run(Step(gm, tuple(inputs)).forward, Watch(hooks=True, writes=True))
    except ReadsValues:
        return ""
    if seen.spoiled is None:
        return ""
    saver, writer = seen.spoiled
    line = next((n.meta.get("line") for n in gm.graph.nodes if n.name == writer), None)
    where = f"{writer} ({line})" if line else writer
    lost = "so the model cannot be trained as it stands; write it out of place"
    return f"{where}: overwrites in place what {saver} keeps for its backward, {lost}"


def _first_difference(proof: Proof, exact: Run) -> str | None:
    """The first tensor at which the evaluated symbolic ledger and an exact one disagree; a module names no nodes."""
    found = [s for s in exact.saved if int(s.nbytes)]
    numbers: dict[int, int] = {}
    for e, s in zip(proof.entries, found, strict=False):
        same = e.owner == s.owner and s.node in (e.node, "") and numbers.setdefault(e.storage, s.storage) == s.storage
        if not same or (e.owner == "kept" and e.nbytes != int(s.nbytes)):
            return f"{s.node} ({e.node}: {e.nbytes} bytes for {int(s.nbytes)})"
    if len(proof.entries) != len(found):
        return f"the end: {len(proof.entries)} tensors for {len(found)}"
    return None


def _in_numbers(step: Step, seen: Run, opaque: Mapping[str, str]) -> Proof:
    """The ledger of an exact run: sizes are plain numbers, not formulas."""
    gm = cast(fx.GraphModule, step.model)
    return prove(gm, concrete_fakes(gm, step.inputs), seen, opaque)


def _unproven(step: Step, hooked: Run, opaque: Mapping[str, str], why: list[str]) -> Proof:
    """The exact ledger with no proof: never at the floor."""
    proof = _in_numbers(step, hooked, opaque)
    reason, fix = "the symbolic run failed, sizes are plain numbers", "see the note on what was not proved"
    entries = tuple(
        replace(e, verdict="unproven", reason=reason, fix=fix) if e.owner == "kept" and e.pillar != "gate" else e
        for e in proof.entries
    )
    return _lowered(proof, entries=entries, assumptions=(*proof.assumptions, *why[-1:]))
