"""TinyTL: a trained lite residual beside every block; of the rest, the biases train alone.

y = block(x)                 ->   y = block(x) + LiteResidual(x, block(x))

tinytl           conv -> BatchNorm -> ReLU, ReLU6   ->   TinySite(x)      running statistics, beta trains
                 BatchNorm(x)                       ->   TinySite(x)
tinytl-trainbn   conv(x)                            ->   FrozenConv(x)    BatchNorms stay, their bias trains

A block is a submodule with two or more convs and no smaller such part; where one only wraps another,
the outer one is it.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from floorplan.graph.aliases import Roots, roots_of, writer_between
from floorplan.graph.choose import Insertion, as_pass
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import CONV_TYPES, called, calls_of, free_path, module_calls, set_module
from floorplan.graph.fold import NORMS, bn_reason, call_reason, conv_reason
from floorplan.layers.activations import record_of
from floorplan.layers.adapter import adapters
from floorplan.layers.geometry import geometry_of
from floorplan.layers.lite import FrozenConv, LiteResidual, TinySite
from floorplan.passes.insert_paper import conv_before, put_site, unfilled
from floorplan.torch_doors import AdaptiveAvgPoolNd, AdaptiveMaxPoolNd, AvgPoolNd, DropoutNd, MaxPoolNd

Nodes = dict[fx.Node, None]
_KEEP_WIDTH = (MaxPoolNd, AvgPoolNd, DropoutNd, AdaptiveAvgPoolNd, AdaptiveMaxPoolNd, nn.Upsample)
_IN_PLACE = {operator.iadd, operator.imul, operator.isub}
_JOINS = {operator.add, operator.mul, operator.sub, *_IN_PLACE}


@dataclass(frozen=True)
class Insert(Insertion):
    """It has no use for a rank or sites."""

    train_bn: bool = False

    def insert(self, gm: fx.GraphModule, generator: torch.Generator) -> Iterator[Site]:
        """The branches, and what keeps nothing in the place of the rest."""
        yield from self._branches(gm, generator)
        if not adapters(gm):
            return
        if self.train_bn:
            _train_biases(gm)
        else:
            yield from _tiny_sites(gm)
        yield from _frozen_convs(gm)

    def nothing(self, gm: fx.GraphModule, found: int) -> str:
        beside = "it stands beside submodules of two or more 2-D convs with one input and one output"
        return f"tinytl: no lite residual fits; {beside}"

    def _branches(self, gm: fx.GraphModule, generator: torch.Generator) -> Iterator[Site]:
        widths, made = _widths(gm), dict[str, str]()
        for path, nodes in blocks(gm):
            block = _fit(gm, nodes, widths)
            if isinstance(block, str):
                yield Site(path, block)
                continue
            x, y, inputs, outputs = block
            if path not in made:  # a block that runs twice has one branch
                made[path] = free_path(gm, f"{path}.lite")
                floats = (p for p in (*gm.parameters(), *gm.buffers()) if p.is_floating_point())
                lite = LiteResidual(inputs, outputs)
                lite.to(next(floats, lite.U)).start(generator)
                set_module(gm, made[path], lite)
            widths[_insert(gm, x, y, nodes, made[path])] = outputs
            yield Site(path)


def blocks(gm: fx.GraphModule) -> list[tuple[str, Nodes]]:
    """Path and nodes of every block, a call each."""
    calls: dict[str, tuple[str, Nodes]] = {}
    for node in gm.graph.nodes:
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            calls.setdefault(key, (path, {}))[1][node] = None
    convs = {key: frozenset(n for n in nodes if _conv(gm, n)) for key, (_, nodes) in calls.items()}
    several = {c: key for key, c in reversed(convs.items()) if len(c) > 1}  # the outermost stays
    least = [key for c, key in several.items() if not any(other < c for other in several)]
    return [calls[key] for key in calls if key in least]


def _conv(gm: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return m if isinstance(m := called(gm, node), CONV_TYPES) else None


def _fit(gm: fx.GraphModule, nodes: Nodes, widths: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node, int, int] | str:
    """Where a lite branch reads, what it is added to and how wide both are, or why none can stand beside the block."""
    convs = {n: m for n in nodes if (m := _conv(gm, n)) is not None}
    for node, m in convs.items():
        if not isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
            return f"{node.target} is a {type(m).__name__}: TinyTL's lite residual is defined for 2-D convs"
    read = {a: None for n in nodes for a in n.all_input_nodes if a not in nodes and a.op != "get_attr"}
    out = [n for n in nodes if any(u not in nodes for u in n.users)]
    if len(read) != 1:
        return f"it reads {len(read)} values from outside ({_names(read)}), not one"
    if len(out) != 1:
        return f"{len(out)} of its values are used outside ({_names(out)}), not one"
    x, y = next(iter(read)), out[0]
    direct = [cast(Any, m).in_channels for n, m in convs.items() if n.args[:1] == (x,)]
    inputs, outputs = widths.get(x) or next(iter(direct), None), widths.get(y)
    for node, width in ((x, inputs), (y, outputs)):
        if width is None:
            return f"how many channels {node.name} has cannot be told from the layers around it"
    if (writer := writer_between(gm, x, y.next, x, _roots(gm))) is not None:
        return f"{writer.name} writes in place into {x.name}, which the lite residual would read later"
    return x, y, cast(int, inputs), cast(int, outputs)


def _roots(gm: fx.GraphModule) -> Roots:
    """roots_of, but += returns its left operand alone: `y += x; relu_(y)` leaves x as it is."""
    roots: Roots = {}
    for n, may in roots_of(gm).items():
        sources = n.args[:1] if n.target in _IN_PLACE else n.all_input_nodes if len(may) > 1 else ()
        shared = (roots[a] for a in sources if isinstance(a, fx.Node))
        roots[n] = frozenset({n}).union(*shared)
    return roots


def _names(nodes: Any) -> str:
    names = [n.name for n in nodes]
    return ", ".join(names[:3] + ["…"] * (len(names) > 3)) or "none"


def _widths(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """The channels of every value whose layers tell them."""
    widths: dict[fx.Node, int] = {}
    for n in gm.graph.nodes:
        if n.op == "call_module":
            width = _width_of(gm.get_submodule(str(n.target)), n, widths)
        elif n.target in _JOINS:
            width = max((widths.get(a, 0) for a in n.all_input_nodes), default=0)
        elif n.target is torch.cat and n.args[1:] == (1,):
            parts = [widths.get(a, 0) for a in n.all_input_nodes]
            width = sum(parts) if all(parts) else 0
        else:
            width = widths.get(n.all_input_nodes[0], 0) if n.target is F.pad else 0
        if width:
            widths[n] = width
    return widths


def _width_of(m: nn.Module, n: fx.Node, widths: dict[fx.Node, int]) -> int:
    if isinstance(m, CONV_TYPES):
        return m.out_channels
    if isinstance(m, (*NORMS, nn.InstanceNorm2d)):
        return int(cast(Any, m).num_features)
    if isinstance(m, nn.GroupNorm):
        return m.num_channels
    if (isinstance(m, _KEEP_WIDTH) or record_of(m)) and n.all_input_nodes:
        return widths.get(n.all_input_nodes[0], 0)
    return 0


def _insert(gm: fx.GraphModule, x: fx.Node, y: fx.Node, inside: Nodes, path: str) -> fx.Node:
    """Add the branch of x behind the block's output y, for all that reads it outside."""
    readers = [u for u in y.users if u not in inside]
    with gm.graph.inserting_after(y):
        lite = gm.graph.call_module(path, (x, y))
    with gm.graph.inserting_after(lite):
        total = gm.graph.call_function(operator.add, (y, lite))
    for reader in readers:
        reader.replace_input_with(y, total)
    return total


def _train_biases(gm: fx.GraphModule) -> None:
    for m in gm.modules():
        bias = getattr(m, "bias", None) if isinstance(m, (*CONV_TYPES, *NORMS)) else None
        if isinstance(bias, nn.Parameter):
            bias.requires_grad_(True)


def _tiny_sites(gm: fx.GraphModule) -> Iterator[Site]:
    """Every BatchNorm, with the conv before and the activation behind it where they are its own."""
    pairs = {}
    for node, bn in module_calls(gm, *NORMS):
        if why := bn_reason(bn) or call_reason(gm, str(node.target)):
            yield Site(node.name, f"{why}; its bias trains as it is")
        else:
            pairs[node] = (bn, conv_before(gm, node))
    _train_biases(gm)
    for node, (bn, source) in pairs.items():
        if source is None and isinstance(gm.get_submodule(str(node.target)), TinySite):
            continue  # another call of a BatchNorm that is one already
        yield Site(put_site(gm, node, source, partial(_site, bn=bn)))


def _site(conv: Any, act: nn.Module | None, bn: Any) -> TinySite:
    site = unfilled(TinySite, conv, bn, act)
    if bn.bias is None:
        site.beta.requires_grad_(False)
    else:
        site.beta = bn.bias  # the parameter itself: a BatchNorm that is called twice has one
    if conv is not None:
        site.bias = conv.bias
    return site


def _frozen_convs(gm: fx.GraphModule) -> Iterator[Site]:
    """Every conv that is left becomes one that keeps nothing of its input."""
    for path in dict.fromkeys(str(n.target) for n, _ in module_calls(gm, *CONV_TYPES)):
        m: Any = gm.get_submodule(path)
        if why := conv_reason(m) or call_reason(gm, path):
            yield Site(path, f"{why}; frozen as it is")
            continue
        new = FrozenConv(geometry_of(m).config(), list(m.weight.shape), m.bias is not None)
        new.weight, new.bias = m.weight.detach().clone(memory_format=torch.preserve_format), m.bias
        set_module(gm, path, new.train(m.training))
        for node in calls_of(gm, path):
            yield Site(node.name)


def tinytl(train_bn: bool = False, seed: int = 0, train_head: bool = False) -> Pass:
    """The pass with its options set; `train_bn` leaves the BatchNorms in train mode."""
    name = "insert_tinytl_trainbn" if train_bn else "insert_tinytl"
    return as_pass(name, Insert)(seed=seed, train_head=train_head, train_bn=train_bn)
