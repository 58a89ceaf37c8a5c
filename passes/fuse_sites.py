"""Draw what surrounds a site into its one op: padding before, residual add and activation behind.

F.pad(x) -> FusedConv          ->  FusedConv(x), pads in its geometry: q is kept unpadded
FusedConv(x) + skip            ->  FusedConv(x, skip)
FusedConv -> ReLU, ReLU6, …    ->  FusedConv with a gate of one bit an element
"""

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch.nn.functional as F
from torch import fx, nn

from floorplan.compact import gate_of
from floorplan.driver import Pass, Site
from floorplan.fused import ACTIVATIONS, FusedConv
from floorplan.geometry import Geometry
from floorplan.sites import calls_of, free_path, module_calls, set_module, tied_twin

MODES = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Fuse every site with its surroundings."""
    _one_module_a_call(gm)
    for node, m in list(module_calls(gm, FusedConv)):
        site = cast(FusedConv, m)
        yield from _absorb_pad(gm, node, site)
    for node, m in list(module_calls(gm, FusedConv)):
        host = _host_of_add(gm, node)
        if host is not None:
            yield Site(host)
    for node, m in list(module_calls(gm, FusedConv)):
        yield from _absorb_activation(gm, node, cast(FusedConv, m))


def _one_module_a_call(gm: fx.GraphModule) -> None:
    """Sites that share a conv get a module each, on the same tensors: their surroundings may differ."""
    for target in dict.fromkeys(str(n.target) for n, _ in module_calls(gm, FusedConv)):
        for node in calls_of(gm, target)[1:]:
            path = free_path(gm, target)
            set_module(gm, path, tied_twin(cast(FusedConv, gm.get_submodule(target))))
            node.target = path


def _absorb_pad(gm: fx.GraphModule, node: fx.Node, site: FusedConv) -> Iterator[Site]:
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not F.pad:
        return
    geo = _padded(site.geo, source)
    if isinstance(geo, str):
        yield Site(source.name, geo)
        return
    site.geo = geo
    node.replace_input_with(source, cast(fx.Node, source.args[0]))
    yield Site(source.name)
    if not source.users:
        gm.graph.erase_node(source)


def _padded(geo: Geometry, pad: fx.Node) -> Geometry | str:
    options: dict[str, Any] = dict(zip(("input", "pad", "mode", "value"), pad.args, strict=False))
    options.update(pad.kwargs)
    pads, mode, value = options.get("pad"), options.get("mode", "constant"), options.get("value")
    if not isinstance(pads, (tuple, list)) or not all(isinstance(p, int) for p in pads):
        return "padding is computed at run time"
    if geo.transposed:
        return "padding before a transposed conv"
    if any(p < 0 for p in pads):
        return "negative padding crops"
    if mode == "constant" and value not in (None, 0, 0.0):
        return f"pads with {value}, which does not commute with the projection"
    nd = len(geo.kernel)
    if len(pads) > 2 * nd and any(pads[2 * nd :]):
        return "pads batch or channels"
    pairs = [(pads[2 * i], pads[2 * i + 1]) for i in range(min(nd, len(pads) // 2))]
    pairs = [*reversed(pairs + [(0, 0)] * (nd - len(pairs)))]
    own = any(p != (0, 0) for p in geo.padding)
    if own and not (MODES[mode] == geo.mode == "zeros"):
        return f"{mode} padding before a conv that pads by itself"
    total = tuple((a + c, b + d) for (a, b), (c, d) in zip(pairs, geo.padding, strict=True))
    return replace(geo, padding=total, mode=MODES[mode])


def _host_of_add(gm: fx.GraphModule, node: fx.Node) -> str | None:
    """Fuse the add that is the only reader of this site, if it may; the add's name if done."""
    add = _only_user(node)
    if add is None or add.target not in (operator.add, operator.iadd) or len(node.args) > 1:
        return None
    other = next((a for a in add.args if a is not node), None)
    if not isinstance(other, fx.Node) or node.kwargs or add.kwargs:
        return None
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    if _is_free_site(gm, other) and order[other] > order[node]:
        return None  # the later site takes the add: its skip is already there
    if add.target is operator.iadd and add.args[0] is other and not _dies_at(other, add, order):
        return None  # somebody still reads the tensor that += overwrites
    if order[other] > order[node] and _written_between(gm, node, add, order):
        return None
    add.prepend(node)
    node.args = (node.args[0], other)
    add.replace_all_uses_with(node)
    gm.graph.erase_node(add)
    return add.name


def _is_free_site(gm: fx.GraphModule, node: fx.Node) -> bool:
    return (
        node.op == "call_module"
        and isinstance(gm.get_submodule(str(node.target)), FusedConv)
        and len(node.args) == 1
        and _only_user(node) is not None
    )


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _dies_at(node: fx.Node, at: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Nobody reads this tensor, or the memory under it, after `at`."""
    views = node.op in ("placeholder", "get_attr") or node.target is operator.getitem
    return not views and all(order[u] <= order[at] for u in node.users)


def _written_between(
    gm: fx.GraphModule, node: fx.Node, until: fx.Node, order: dict[fx.Node, int]
) -> bool:
    """Whether anything writes in place between a site and the add it would move to."""
    between = [n for n in gm.graph.nodes if order[node] < order[n] < order[until]]
    return any(_writes(gm, n) for n in between)


def _writes(gm: fx.GraphModule, n: fx.Node) -> bool:
    if n.op == "call_module":
        return bool(getattr(gm.get_submodule(str(n.target)), "inplace", False)) and not isinstance(
            gm.get_submodule(str(n.target)), nn.Dropout
        )
    if n.op == "call_method":
        return str(n.target).endswith("_") and not str(n.target).endswith("__")
    return getattr(n.target, "__name__", "") in ("iadd", "isub", "imul", "itruediv", "setitem")


def _absorb_activation(gm: fx.GraphModule, node: fx.Node, site: FusedConv) -> Iterator[Site]:
    act = _only_user(node)
    if act is None or act.op != "call_module" or act.args != (node,) or site.act is not None:
        return
    m = gm.get_submodule(str(act.target))
    if type(m).__name__ not in ACTIVATIONS or type(m) is not ACTIVATIONS[type(m).__name__]:
        return
    if isinstance(gate_of(m), str):
        return
    site.set_activation(m)
    act.replace_all_uses_with(node)
    gm.graph.erase_node(act)
    yield Site(act.name)


PASS = Pass("fuse_sites", run, tolerance=1e-9)
