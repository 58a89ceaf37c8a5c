"""Fold eval BatchNorm into the conv before it; a standalone one becomes a channel affine.

conv(x, W) -> BatchNorm   ->   FusedConv(x, a*W), bias = b + a*bias, scale = a
BatchNorm(x)              ->   x*a + b               keeps nothing
"""

from collections.abc import Iterator
from typing import cast

from torch import fx, nn

from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import CONV_TYPES, calls_of, module_calls, set_module
from floorplan.graph.fold import NORMS, bn_reason, call_reason, conv_reason, scale_note, to_affine, to_site

# What no pass rewrites, said here so that nothing is left alone in silence.
OUTSIDE: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (
        (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm),
        "per-sample statistics cannot be folded; it keeps its input",
    ),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent: outside the conv rewrite; frozen as it is"),
    ((nn.MultiheadAttention,), "attention: outside the conv rewrite; frozen as it is"),
)


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Fold or replace every BatchNorm whose statistics are fixed."""
    norms = list(module_calls(gm, *NORMS))
    fixed = {str(node.target): _not_affine(gm, node, bn) for node, bn in norms}
    reasons = {node.name: _unfoldable(gm, node) for node, _ in norms}  # before anything moves
    partners = {n.name: str(cast(fx.Node, n.args[0]).target) for n, _ in norms if n.args}
    sites: dict[str, nn.Module] = {}
    affines: dict[str, nn.Module] = {}
    for node, bn in norms:
        if why := fixed[str(node.target)]:
            yield Site(node.name, why)
            continue
        if why := reasons[node.name]:
            _make_affine(gm, node, bn, affines)
            yield Site(node.name, note=f"channel affine: {why}")
            continue
        conv = partners[node.name]
        if conv not in sites:
            sites[conv] = to_site(gm.get_submodule(conv), bn)
            set_module(gm, conv, sites[conv])
        node.replace_all_uses_with(cast(fx.Node, node.args[0]))
        gm.graph.erase_node(node)
        yield Site(node.name, note=scale_note(bn))
    for kinds, why in OUTSIDE:
        for node, m in module_calls(gm, *kinds):
            yield Site(node.name, f"{type(m).__name__}: {why}")


def _not_affine(gm: fx.GraphModule, node: fx.Node, bn: nn.Module) -> str:
    return call_reason(gm, str(node.target)) or bn_reason(bn)


def _unfoldable(gm: fx.GraphModule, node: fx.Node) -> str:
    """Why this BatchNorm is not the only reader of a conv; "" if it is."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_module":
        return "no conv directly before it"
    conv = gm.get_submodule(str(source.target))
    if not isinstance(conv, CONV_TYPES):
        return f"a {type(conv).__name__} stands before it, not a conv"
    if why := conv_reason(conv) or call_reason(gm, str(source.target)):
        return f"{source.target}: {why}"
    for call in calls_of(gm, str(source.target)):
        readers = list(call.users)
        if [r.target for r in readers] != [node.target] or readers[0].op != "call_module":
            return f"{source.target} has other readers"
    return ""


def _make_affine(gm: fx.GraphModule, node: fx.Node, bn: nn.Module, done: dict[str, nn.Module]) -> None:
    path = str(node.target)
    if path not in done:
        done[path] = to_affine(bn)
        set_module(gm, path, done[path])


PASS = Pass("fold_batchnorm", run, tolerance=1e-9)
