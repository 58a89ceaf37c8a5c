"""An adapted graph back into plain layers, and its adapters as a state_dict of the source model.

FusedConv(x, skip)   ->  [F.pad] -> ConvNd, ConvTransposeNd [-> add(skip)] [-> activation]
ChannelAffine(x)     ->  F.batch_norm(x, …, training=False)

A scale and shift becomes the function, not nn.BatchNormNd: one layer fits one number of dimensions,
which no module here knows, and train() would let it forget the statistics that were folded.
"""

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.edit import calls_of, free_path, module_calls, set_module
from floorplan.layers.adapter import adapters
from floorplan.layers.layer import Adapter, Layer, PlainCall, PlainConv, PlainNorm
from floorplan.ledger.differ import relative_error
from floorplan.methods.merge_branch import absorb_branches
from floorplan.methods.plain import explicit_padding, like, plain_conv, plain_form
from floorplan.methods.verify import FLOAT64, eval_outputs, runs_in_double, to_double
from floorplan.store.load import unwrapped
from floorplan.torch_doors import buffers_of, tensors_of

_NORM_STATE = ("running_mean", "running_var", "weight", "bias")


def merge(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of an adapted graph in plain torch layers, all parameters trainable; `module` stays.

    Weights are merged in float64 and rounded once; sites on the same tensors stay so. FloorplanError for the rest.
    """
    module = cast(fx.GraphModule, unwrapped(module, "merge")[0])
    refuse_unmergeable(module)
    gm = copy.deepcopy(module)
    absorb_branches(gm)
    known = _Known()
    for path in dict.fromkeys(str(n.target) for n in gm.graph.nodes if n.op == "call_module"):
        layer = gm.get_submodule(path)
        form = plain_form(layer)
        if isinstance(form, PlainConv):
            _to_conv(gm, path, layer, form, known)
        elif isinstance(form, PlainNorm):
            _to_norm(gm, path, layer, form)
        elif isinstance(form, nn.Module):
            set_module(gm, path, form)
    for node, layer in module_calls(gm, Layer):  # those that a plain form holds, too
        if isinstance(form := plain_form(layer), PlainCall):
            node.op, node.target, node.args = "call_function", form.function, (*node.args, *form.args)
    gm.delete_all_unused_submodules()
    gm.graph.lint()
    gm.recompile()
    for p in gm.parameters():
        p.requires_grad_(p.is_floating_point() or p.is_complex())
    plan = module.meta.get("floorplan", {})
    gm.meta["floorplan"] = {"merged": True} | {k: plan[k] for k in ("method", "input") if k in plan}
    return gm


def refuse_unmergeable(module: nn.Module) -> None:
    """Raise FloorplanError, naming method and layer, unless every adapter has a plain form."""
    if not isinstance(module, fx.GraphModule):
        kind = type(module).__name__
        raise FloorplanError(f"merge: {kind} is no adapted graph; give rewrite(...).module or load(...)")
    method = module.meta.get("floorplan", {}).get("method")
    name = f"method {method}" if method else "the model"
    found = [(path, m) for path, m in module.named_modules() if isinstance(m, Layer)]
    for path, m in sorted(found, key=lambda pair: not isinstance(pair[1], Adapter) or pair[1].rank == 0):
        if why := m.unmergeable:
            kind = type(m).__name__
            raise FloorplanError(f"merge: {name}: {path} is a {kind}, which {why}; keep the adapted model as it is")
    if not adapters(module):
        raise FloorplanError(f"merge: {name}: is plain already: nothing to merge")


@dataclass
class _Known:
    """Convs made so far, by the tensors they were made of."""

    tensors: dict[Any, tuple[nn.Parameter, nn.Parameter | None, nn.Module]] = field(default_factory=dict)
    places: dict[Any, str] = field(default_factory=dict)


def _to_conv(gm: fx.GraphModule, path: str, layer: nn.Module, form: PlainConv, known: _Known) -> None:
    geo = form.geo
    made_of = tuple(id(t) for t in tensors_of(layer).values())
    if made_of not in known.tensors:
        bias = None if form.bias is None else nn.Parameter(like(layer, form.bias))
        # The layer too, so that the ids of its tensors do not come twice.
        known.tensors[made_of] = nn.Parameter(like(layer, form.weight)), bias, layer
    place = known.places.setdefault((made_of, geo), path)
    if place == path:
        set_module(gm, path, plain_conv(geo, *known.tensors[made_of][:2]).train(layer.training))
    act_path = _add_activation(gm, path, layer, form)
    for node in calls_of(gm, path):
        skip = node.args[1] if len(node.args) > 1 else node.kwargs.get("skip")
        x = node.args[0]
        if explicit_padding(geo):
            flat = tuple(p for pair in reversed(geo.padding) for p in pair)
            mode = "constant" if geo.mode == "zeros" else geo.mode
            options: dict[str, Any] = {"pad": flat, "mode": mode, "value": None}
            with gm.graph.inserting_before(node):
                x = gm.graph.call_function(F.pad, (x,), options)
        node.target, node.args, node.kwargs = place, (x,), {}
        _follow(gm.graph, node, skip, act_path)


def _add_activation(gm: fx.GraphModule, path: str, layer: nn.Module, form: PlainConv | PlainNorm) -> str:
    """The path of the activation that a layer ends in, "" if it ends in none."""
    if form.act is None:
        return ""
    act_path = free_path(gm, f"{path}_act")
    gm.add_submodule(act_path, form.act.train(layer.training))
    return act_path


def _follow(graph: fx.Graph, node: fx.Node, skip: Any, act: str) -> None:
    """Add `skip` to a node's result and run the module at `act` on it; "" runs none."""
    with graph.inserting_before(node.next):
        added = node if skip is None else graph.call_function(operator.add, (node, skip))
        last = graph.call_module(act, (added,)) if act else added
    if last is not node:
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in (added, last))


def _to_norm(gm: fx.GraphModule, path: str, layer: nn.Module, form: PlainNorm) -> None:
    """A fixed scale and shift as F.batch_norm on buffers at the layer's own path."""
    holder = nn.Module().train(layer.training)
    for name, t in zip(_NORM_STATE, (form.mean, form.var, form.weight, form.bias), strict=True):
        holder.register_buffer(name, None if t is None else like(layer, t))
    calls = calls_of(gm, path)
    set_module(gm, path, holder)
    act_path = _add_activation(gm, path, layer, form)
    for node in calls:
        with gm.graph.inserting_before(node):
            reads = [None if buffers_of(holder)[n] is None else gm.graph.get_attr(f"{path}.{n}") for n in _NORM_STATE]
        node.op, node.target = "call_function", F.batch_norm
        node.args = (node.args[0], *reads, False, 0.0, form.eps)
        _follow(gm.graph, node, None, act_path)


@dataclass(frozen=True)
class Merged:
    """A plain graph and how far its outputs are from the adapted model's, relative, in eval mode."""

    module: fx.GraphModule
    convs: int  # adapters that were merged
    exact: float | None  # in float64; None if the model does not run in it
    rounded: float  # in the model's own precision


def merge_verified(module: fx.GraphModule, inputs: Sequence[Any]) -> Merged:
    """Merge, and compare outputs on `inputs` in eval mode before anything is returned.

    In float64, both sides merged there, at most 1e-12 relative; in the model's own precision 1e-5
    (float32 on a CPU; elsewhere as many roundings). FloorplanError otherwise.
    """
    merged = merge(module)
    found = None
    if not runs_in_double(module, inputs):
        twin = copy.deepcopy(module).double()
        found = difference(twin, merge(twin), to_double(inputs))
        _within(found, FLOAT64, "float64")
    rounded = difference(copy.deepcopy(module), copy.deepcopy(merged), inputs)
    floats = [p for p in merged.parameters() if p.is_floating_point()]
    eps = max((torch.finfo(p.dtype).eps for p in floats), default=0.0)
    # An accelerator may multiply float32 with 10 bits of mantissa: a last bit then counts for more.
    least = 1e-5 if all(p.device.type == "cpu" for p in floats) else 1e-3
    _within(rounded, max(least, 84 * eps), "the model's own precision")
    return Merged(merged, len(adapters(module)), found, rounded)


def _within(error: float, allowed: float, where: str) -> None:
    if not error <= allowed:
        far = f"outputs differ by {error:.1e} in {where} (allowed {allowed:.0e})"
        raise FloorplanError(f"merge: {far}; nothing was merged; please report this model")


def difference(a: nn.Module, b: nn.Module, inputs: Sequence[Any]) -> float:
    """Largest relative difference of two models' floats in eval mode; infinite if their number, shape or NaN differ."""
    both = (eval_outputs(m, copy.deepcopy(tuple(inputs))) for m in (a, b))
    results = [[t for t in out if t.is_floating_point() or t.is_complex()] for out in both]
    worst = 0.0 if len(results[0]) == len(results[1]) else float("inf")
    for want, got in zip(*results, strict=False):
        finite = torch.isfinite(want)
        if got.shape != want.shape or not torch.equal(finite, torch.isfinite(got)):
            return float("inf")
        worst = max(worst, relative_error(got[finite], want[finite]))
    return worst
