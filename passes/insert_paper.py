"""MemFLoRA as published: every conv-BatchNorm(-activation) becomes one two-branch site.

conv(x, W) -> BatchNorm -> ReLU, ReLU6    ->  PaperSite(x)       adapted where chosen, else frozen
BatchNorm(x)                              ->  PaperSite(x)       scale and shift alone

Paddings stay nodes, so q is kept padded, and residual adds are not drawn in.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

from floorplan.graph.choose import Insertion, as_pass
from floorplan.graph.driver import Site
from floorplan.graph.edit import called, module_calls, set_module
from floorplan.graph.fold import NORMS, bn_reason, call_reason, conv_reason
from floorplan.layers.activations import act_config, ends_site
from floorplan.layers.geometry import CONVS, geometry_of
from floorplan.layers.paper import PaperSite

S = TypeVar("S", bound=PaperSite)


class Insert(Insertion):
    def insert(self, gm: fx.GraphModule, generator: torch.Generator) -> Iterator[Site]:
        """Every BatchNorm whose statistics are fixed becomes a site, with what is its own around it."""
        pairs = {}
        for node, bn in module_calls(gm, *NORMS):
            if why := bn_reason(bn) or call_reason(gm, str(node.target)):
                yield Site(node.name, f"{why}; frozen as it is")
            else:
                pairs[node] = (bn, conv_before(gm, node))
        convs = {str(c.target): gm.get_submodule(str(c.target)) for _, c in pairs.values() if c}
        _, refused = self.choices(gm, convs)
        for node, (bn, source) in pairs.items():
            path = str(source.target) if source else ""
            rank = self.rank if path and not refused[path] and cast(Any, convs[path]).groups == 1 else 0
            make = partial(_site, bn=bn, rank=rank, generator=generator)
            yield Site(put_site(gm, node, source, make), note="" if rank else "frozen: keeps its gate and its scale")

    def nothing(self, gm: fx.GraphModule, found: int) -> str:
        return "memflora-paper: no conv with a BatchNorm behind it was chosen; try --sites all"


def put_site(
    gm: fx.GraphModule, node: fx.Node, source: fx.Node | None, make: Callable[[Any, nn.Module | None], nn.Module]
) -> str:
    """Put make(conv, activation) in the place of a BatchNorm node and what is its own around it.

    source: the conv before it, as `conv_before` finds it; without one the BatchNorm stands alone.
    Returns the path of the site.
    """
    if source is None:
        set_module(gm, str(node.target), make(None, None))
        return str(node.target)
    path, users = str(source.target), list(node.users)
    behind = called(gm, users[0]) if len(users) == 1 and users[0].args == (node,) else None
    act = users[0] if behind is not None and ends_site(behind) else None
    set_module(gm, path, make(gm.get_submodule(path), gm.get_submodule(str(act.target)) if act else None))
    for old in (node, act) if act else (node,):
        old.replace_all_uses_with(source)
        gm.graph.erase_node(old)
    return path


def unfilled(kind: Callable[..., S], conv: Any, bn: Any, act: nn.Module | None, **options: Any) -> S:
    """A site of a class for these layers: weight, scale and statistics are theirs, biases are not."""
    geo, shape = (None, None) if conv is None else (geometry_of(conv).config(), list(conv.weight.shape))
    bias = conv is not None and conv.bias is not None
    site = kind(len(bn.running_mean), geo, shape, bias=bias, eps=bn.eps, act=act_config(act), **options)
    site = site.to(device=bn.running_mean.device, dtype=bn.running_mean.dtype)
    for name, value in {"mean": bn.running_mean, "var": bn.running_var, "gamma": bn.weight}.items():
        if value is not None:
            setattr(site, name, value.detach().clone())
    if conv is not None:
        site.weight = conv.weight.detach().clone(memory_format=torch.preserve_format)
    return site.train(bn.training)


def conv_before(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or len(source.users) > 1:
        return None
    conv, target = called(gm, source), str(source.target)
    if not isinstance(conv, CONVS) or sum(n.target == target for n in gm.graph.nodes) > 1:  # shared
        return None
    return None if conv_reason(conv) or call_reason(gm, target) else source


def _site(conv: Any, act: nn.Module | None, bn: Any, rank: int, generator: torch.Generator) -> PaperSite:
    site = unfilled(PaperSite, conv, bn, act, rank=rank)
    if conv is not None and conv.bias is not None:
        site.bias = conv.bias.detach().clone()
    if bn.bias is not None:
        site.beta = bn.bias.detach().clone()
    if rank:
        site.P.copy_(torch.randn(site.P.shape, generator=generator, dtype=torch.float64) / math.sqrt(rank))
    return site


paper = as_pass("insert_memflora_paper", Insert)
