"""Draw what surrounds a site into its one op: padding before, residual add and activation behind.

F.pad(x) -> FusedConv          ->  FusedConv(x), pads in its geometry: q is kept unpadded
FusedConv(x) + skip            ->  FusedConv(x, skip)
FusedConv -> ReLU, ReLU6, …    ->  FusedConv with a gate of one bit an element
"""

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch.nn.functional as F
from torch import fx

from floorplan.graph.aliases import Roots, reader_after, roots_of, writer_between
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import PAD, called, calls_of, free_path, module_calls, padded, set_module
from floorplan.graph.fold import hook_reason, tied_twin
from floorplan.layers.activations import ends_site
from floorplan.layers.fused import FusedConv


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Fuse every site with its surroundings."""
    _one_module_a_call(gm)
    for node, m in module_calls(gm, FusedConv):
        yield from _absorb_pad(gm, node, cast(FusedConv, m))
    for add in list(gm.graph.nodes):
        if add.op == "call_function" and add.target in (operator.add, operator.iadd):
            yield from _absorb_add(gm, add)
    for node, m in module_calls(gm, FusedConv):
        yield from _absorb_activation(gm, node, cast(FusedConv, m))


def _one_module_a_call(gm: fx.GraphModule) -> None:
    """Sites that share a conv get a module each, on the same tensors: what follows may differ."""
    for target in dict.fromkeys(str(n.target) for n, _ in module_calls(gm, FusedConv)):
        for node in calls_of(gm, target)[1:]:
            path = free_path(gm, target)
            set_module(gm, path, tied_twin(cast(FusedConv, gm.get_submodule(target))))
            node.target = path


def _absorb_pad(gm: fx.GraphModule, node: fx.Node, site: FusedConv) -> Iterator[Site]:
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not F.pad:
        return
    options: dict[str, Any] = dict(zip(PAD, source.args, strict=False)) | source.kwargs
    x = options["input"]
    geo = padded(site.geo, options)
    if writer := writer_between(gm, source, node, x, roots_of(gm)):
        geo = f"{writer.name} writes into {x.name} before {node.name} reads the padded copy"
    if isinstance(geo, str):
        yield Site(source.name, geo)
        return
    site.geo = geo
    node.replace_input_with(source, x)
    yield Site(source.name)
    if not source.users:
        gm.graph.erase_node(source)


def _absorb_add(gm: fx.GraphModule, add: fx.Node) -> Iterator[Site]:
    """Let one operand, a site, take the add; the later one first: its skip is already there."""
    operands = [a for a in add.args if isinstance(a, fx.Node)]
    sites = [n for n in operands if isinstance(called(gm, n), FusedConv) and len(n.args) == 1]
    if len(operands) != 2 or operands[0] is operands[1] or not sites:
        return
    why = ""
    for node in sorted(sites, reverse=True):
        skip = operands[0] if node is operands[1] else operands[1]
        why = _unhostable(gm, node, skip, add)
        if not why:
            node.args = (node.args[0], skip)
            add.replace_all_uses_with(node)
            gm.graph.erase_node(add)
            break
    yield Site(add.name, why)


def _unhostable(gm: fx.GraphModule, node: fx.Node, skip: fx.Node, add: fx.Node) -> str:
    """Why a site cannot take the add; if it can, "", and the site stands where both can be read."""
    if len(node.users) > 1:
        return f"{node.name} has other readers"
    roots = roots_of(gm)
    if add.target is operator.iadd and add.args[0] is skip and (why := _outlives(gm, skip, add, roots)):
        return why
    if skip < node and writer_between(gm, node, add, skip, roots) is None:
        return ""
    if writer := writer_between(gm, node, add, cast(fx.Node, node.args[0]), roots):
        return f"{writer.name} writes in place into what {node.name} reads, before the add"
    add.prepend(node)
    return ""


def _outlives(gm: fx.GraphModule, skip: fx.Node, add: fx.Node, roots: Roots) -> str:
    """Why += must go on writing into its left operand; "" if nobody would see it."""
    if held := next((r for r in roots[skip] if r.op in ("placeholder", "get_attr")), None):
        return f"+= writes into {held.name}, which is not the graph's own"
    reader = reader_after(gm, add, skip, roots)
    return "" if reader is None else f"+= overwrites {skip.name}, which {reader.name} reads"


def _absorb_activation(gm: fx.GraphModule, node: fx.Node, site: FusedConv) -> Iterator[Site]:
    for act in list(node.users):
        m = called(gm, act)
        if m is None or act.args != (node,) or act.kwargs or not ends_site(m):
            continue
        taken = "" if site.act is None else f"{node.name} ends in a {type(site.act).__name__} already"
        why = taken or (f"{node.name} has other readers" if len(node.users) > 1 else hook_reason(m))
        if not why:
            site.set_activation(m)
            act.replace_all_uses_with(node)
            gm.graph.erase_node(act)
        yield Site(act.name, why)


PASS = Pass("fuse_sites", run, tolerance=1e-9)
