"""From a model to a module-level graph that says what it had to assume.

    model, example inputs   ->   Traced(gm, notes, opaque, lines)

torch.nn layers are nodes; everything else is traced through. What cannot be is called as a whole
and listed in `opaque`. If that is the root, the graph is one call of the submodule `model`, and
only then do the state_dict keys change (they get the prefix `model.`).
"""

import copy
import inspect
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn

from floorplan.errors import TraceError
from floorplan.graph.decide import ValueBranch
from floorplan.graph.leaves import leaf_reason
from floorplan.graph.tracer import Tracer, reason_of
from floorplan.graph.untouched import complete, in_mode, tidy, untouched
from floorplan.layers.plain import TrainingFlag
from floorplan.torch_doors import forget_tracer, hooks_of

ROOT = "model"  # where a root that cannot be traced is put


@dataclass(frozen=True)
class Traced:
    """A module-level graph on the model's own parameters, and what it leaves out."""

    gm: fx.GraphModule
    notes: tuple[str, ...] = ()  # assumptions and losses, one line each
    opaque: dict[str, str] = field(default_factory=dict)  # module path -> why it is one node
    lines: dict[str, str] = field(default_factory=dict)  # node name -> "file.py:123"
    asks: bool = False  # the forward branches on a size, or makes a number of one
    own: "Traced | None" = None  # with both modes: the graph of the mode that the model is in


def trace(model: nn.Module, inputs: Sequence[Any], *, both_modes: bool = False) -> Traced:
    """Trace a model in the mode it is in; TraceError if its root branches on tensor values.

    `inputs` (real or fake, one a positional argument of forward) give the structure, and the sizes
    where the forward asks for them. With `both_modes` the graph follows .train() and .eval().
    """
    if lazy := [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]:
        raise TraceError(f"forward: {lazy[0]} has no size yet; run one batch through it first")
    if isinstance(model, fx.GraphModule) and (not leaf_reason(model) or _exported(model)):
        gm = fx.GraphModule(model, copy.deepcopy(model.graph), type(model).__name__)
        complete(gm, model)
        return Traced(gm, ("torch.export's checks of the inputs are left out",) * _exported(model))
    with in_mode(model, "saved"):
        flags = {m.training for m in model.modules()}
        traced = _both(model, inputs, flags) if both_modes else _once(model, inputs)
    for found in (traced, traced.own):
        if found is not None and (found.opaque.get(ROOT) is None or found.gm.get_submodule(ROOT) is not model):
            complete(found.gm, model)
    return traced


def _exported(model: nn.Module) -> bool:
    """Whether the only hooks are the input checks that torch.export adds."""
    hooks = [h for kind, hooks in hooks_of(model).items() for h in hooks if kind.startswith("forward")]
    return bool(hooks) and all(h.__module__.startswith("torch.export.") for h in hooks)


def _both(model: nn.Module, inputs: Sequence[Any], flags: set[bool]) -> Traced:
    base = _once(model, inputs) if len(flags) > 1 else None
    runs: dict[bool, Traced] = {}
    mode_now, failed = next(iter(flags), True), ""
    for mode in (True, False):
        model.train(mode)
        try:
            runs[mode] = _once(model, inputs)
        except TraceError as e:
            if not mode:
                raise
            failed = str(e)
    if not failed:
        as_is = base or runs[mode_now]
        runs = {mode: _uncounted(t) for mode, t in runs.items()}
        base = runs[mode_now] if base is None else _uncounted(base)
        places = list(_differences(runs[True].gm.graph, runs[False].gm.graph))
        other = list(_differences(base.gm.graph, runs[False].gm.graph))
        failed = next((p.fact for p in places + other if p.fact), "")
        if not failed:
            if places and as_is is base:  # the same graph on the same modules, to be left as it is
                graph = copy.deepcopy(base.gm.graph)
                as_is = replace(base, gm=fx.GraphModule(base.gm, graph, type(base.gm).__name__))
            nodes = list(base.gm.graph.nodes)
            for p in places:
                _follow(base.gm, nodes[p.index], p)
            notes = dict.fromkeys(n for t in (base, *runs.values()) for n in t.notes)
            opaque = {k: v for t in (*runs.values(), base) for k, v in t.opaque.items()}
            return Traced(base.gm, tuple(notes), opaque, base.lines, base.asks, as_is)
        base = as_is
    note = f"forward differs between train and eval mode (first difference: {failed})"
    said = (*runs[False].notes, f"{note}; {EVAL_ONLY}")
    return replace(runs[False], notes=said, own=base or runs.get(mode_now))


EVAL_ONLY = (
    "the eval-mode graph is used: once adapted, the model computes and returns in train mode too what it does in eval "
    "mode, without what only train mode adds (noise, auxiliary outputs)"
)


def _uncounted(traced: Traced) -> Traced:
    """The trace without numbers that the forward only counts up, which nothing of the graph reads."""
    graph = copy.deepcopy(traced.gm.graph)
    counted = []
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        value = operator.attrgetter(str(node.target))(traced.gm)
        steps = list(node.users)
        if steps and value.dim() == 0 and not isinstance(value, nn.Parameter) and all(map(_counts, steps)):
            counted.append(str(node.target))
            for n in (*steps, node):
                graph.erase_node(n)
    if not counted:
        return traced
    more = f" and {len(counted) - 1} more" if len(counted) > 1 else ""
    note = f"forward counts in {counted[0]}{more}, which the adapted model leaves as they are"
    gm = fx.GraphModule(traced.gm, graph, type(traced.gm).__name__)
    return replace(traced, gm=gm, notes=(*traced.notes, note))


def _counts(n: fx.Node) -> bool:
    """Whether a node only adds to its first argument, for nobody to read."""
    adds = n.target in (operator.iadd, operator.add, "add_", "add")
    return adds and not n.users and n.args[0] is n.all_input_nodes[0] and len(n.all_input_nodes) == 1


@dataclass(frozen=True)
class _Place:
    """An argument that differs between two graphs; with a `fact` the graphs do not match."""

    index: int
    path: tuple[Any, ...] = ()
    train: bool = True
    fact: str = ""


def _differences(a: fx.Graph, b: fx.Graph) -> Iterator[_Place]:
    """Where graph b differs from a; the first structural difference ends it."""
    left, right = list(a.nodes), list(b.nodes)
    same: dict[fx.Node, fx.Node] = {}
    for i, (m, n) in enumerate(zip(left, right, strict=False)):
        where = f"{m.meta.get('line', 'forward')} {m.name}"
        same[m] = n
        if (m.op, m.target) != (n.op, n.target):
            yield _Place(i, fact=f"{where} in one, {n.name} in the other")
            return
        if m.op == "get_attr" and not _same_attribute(m, n):
            yield _Place(i, fact=f"{where} holds different values")
            return
        for path, x, y in _unequal((m.args, dict(m.kwargs)), (n.args, dict(n.kwargs)), same):
            if type(x) is not bool or type(y) is not bool:
                yield _Place(i, fact=f"{where} has {x} in one, {y} in the other")
                return
            yield _Place(i, path, x)
    if len(left) != len(right):
        longer = max(left, right, key=len)[min(len(left), len(right)) - 1]
        yield _Place(0, fact=f"{longer.name} in one mode only")


def _same_attribute(m: fx.Node, n: fx.Node) -> bool:
    x, y = (cast(Any, k.graph.owning_module) for k in (m, n))
    x, y = (operator.attrgetter(str(m.target))(owner) for owner in (x, y))
    return x is y or (isinstance(x, torch.Tensor) and x.shape == y.shape and torch.equal(x, y))


def _unequal(
    a: Any, b: Any, same: dict[fx.Node, fx.Node], path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        if same.get(a) is not b:
            yield path, a, b
    elif isinstance(a, slice) and isinstance(b, slice):
        if any(_unequal((a.start, a.stop, a.step), (b.start, b.stop, b.step), same)):
            yield path, a, b
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _unequal(x, y, same, (*path, i))
    elif isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        for k in a:
            yield from _unequal(a[k], b[k], same, (*path, k))
    elif type(a) is not type(b) or a != b:
        yield path, a, b


def _follow(gm: fx.GraphModule, node: fx.Node, p: _Place) -> None:
    """Replace one boolean argument by the training flag of the module that it was read in."""
    owner = list(node.meta.get("nn_module_stack", {"": ("", None)}).values())[-1][0]
    path = f"{owner}.training_flag" if owner else "training_flag"
    value = call = (node.args, dict(node.kwargs))
    for key in p.path:
        value = cast(Any, value)[key]
    flag = TrainingFlag().train(bool(value) is p.train)
    if not gm.add_submodule(path, flag):
        raise TraceError(f"forward: {path} is not a free name for the training flag; rename it")
    with gm.graph.inserting_before(node):
        now = gm.graph.call_module(path)
        if not p.train:
            now = gm.graph.call_function(operator.not_, (now,))
    node.args, node.kwargs = _put(call, p.path, now)
    gm.recompile()


def _put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {k: _put(v, path[1:], new) if k == path[0] else v for k, v in value.items()}
    items = [_put(v, path[1:], new) if i == path[0] else v for i, v in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


def _once(model: nn.Module, inputs: Sequence[Any]) -> Traced:
    names = _arguments(model, len(inputs))
    tracer = Tracer(inputs, names)
    rng = torch.get_rng_state()
    reason = leaf_reason(model)
    try:
        if reason:
            return _whole(model, names, reason)
        with untouched(model) as changed, warnings.catch_warnings():
            # What checkpointing says of inputs that are none: a proxy has no gradient.
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            graph = tracer.trace(model)
            forget_tracer(graph)
            tidy(graph, tracer.lines)
            gm = fx.GraphModule(model, graph, type(model).__name__)
            tracer.quiet.frozen(gm)
    except ValueBranch as e:
        todo = "give that part a module of its own, or decide it when the model is built"
        raise TraceError(f"forward: {e}; {todo}") from e
    except Exception as e:
        return _whole(model, names, reason_of(e))
    finally:
        torch.set_rng_state(rng)
    return Traced(gm, tuple(dict.fromkeys([*tracer.notes, *changed])), tracer.opaque, tracer.lines, tracer.asks)


def _whole(model: nn.Module, names: Sequence[str], reason: str) -> Traced:
    """The graph that only calls the model."""
    graph = fx.Graph()
    graph.output(graph.call_module(ROOT, tuple(graph.placeholder(n) for n in names)))
    return Traced(fx.GraphModule({ROOT: model}, graph, type(model).__name__), (), {ROOT: reason})


def _arguments(model: nn.Module, count: int) -> list[str]:
    """Names of the forward's first `count` positional arguments; TraceError if it takes others."""
    names: list[str] = []
    for p in inspect.signature(model.forward).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and len(names) < count:
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}_{i}" for i in range(count - len(names))]
        elif p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            raise TraceError(f"forward: needs `{p.name}`, but {count} inputs are given; add it")
    if len(names) < count:
        raise TraceError(f"forward: takes {len(names)} inputs, {count} are given; leave some out")
    return names
