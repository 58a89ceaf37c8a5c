"""Fold eval BatchNorm into the conv before it; a standalone one becomes a channel affine.

conv(x, W) -> BatchNorm   ->   FusedConv(x, a*W), bias = b + a*bias, scale = a
BatchNorm(x)              ->   x*a + b               keeps nothing
"""

from collections.abc import Iterator
from typing import cast

from torch import fx, nn

from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import CONV_TYPES, called, calls_of, module_calls, set_module
from floorplan.graph.fold import NORMS, bn_reason, call_reason, conv_reason, scale_note, to_affine, to_site

# What no pass rewrites, said here so that nothing is left alone in silence.
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_PER_SAMPLE = (nn.GroupNorm, nn.LayerNorm, *_INSTANCE, nn.LocalResponseNorm)
OUTSIDE: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    (_PER_SAMPLE, "per-sample statistics cannot be folded; it keeps its input"),
    ((nn.RNNBase, nn.RNNCellBase), "recurrent: outside the conv rewrite; frozen as it is"),
    ((nn.MultiheadAttention,), "attention: outside the conv rewrite; frozen as it is"),
)


def run(gm: fx.GraphModule) -> Iterator[Site]:
    """Fold or replace every BatchNorm whose statistics are fixed."""
    norms = list(module_calls(gm, *NORMS))
    fixed = {str(node.target): call_reason(gm, str(node.target)) or bn_reason(bn) for node, bn in norms}
    reasons = {node: _unfoldable(gm, node) for node, _ in norms}  # before anything moves
    done: set[str] = set()
    for node, bn in norms:
        if why := fixed[str(node.target)]:
            yield Site(node.name, why)
            continue
        why = reasons[node]
        taker = node if why else cast(fx.Node, node.args[0])
        path = str(taker.target)
        if path not in done:
            set_module(gm, path, to_affine(bn) if why else to_site(gm.get_submodule(path), bn))
            done.add(path)
        if not why:
            node.replace_all_uses_with(taker)
            gm.graph.erase_node(node)
        yield Site(node.name, note=f"channel affine: {why}" if why else scale_note(bn))
    for kinds, why in OUTSIDE:
        for node, m in module_calls(gm, *kinds):
            yield Site(node.name, f"{type(m).__name__}: {why}")


def _unfoldable(gm: fx.GraphModule, node: fx.Node) -> str:
    """Why this BatchNorm is not the only reader of a conv; "" if it is."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or (conv := called(gm, source)) is None:
        return "no conv directly before it"
    if not isinstance(conv, CONV_TYPES):
        return f"a {type(conv).__name__} stands before it, not a conv"
    if why := conv_reason(conv) or call_reason(gm, str(source.target)):
        return f"{source.target}: {why}"
    for call in calls_of(gm, str(source.target)):
        readers = list(call.users)
        if [r.target for r in readers] != [node.target] or readers[0].op != "call_module":
            return f"{source.target} has other readers"
    return ""


PASS = Pass("fold_batchnorm", run, tolerance=1e-9)
