"""MemFLoRA as published: every conv-BatchNorm(-activation) becomes one two-branch site.

conv(x, W) -> BatchNorm -> ReLU, ReLU6    ->  PaperSite(x)       adapted where chosen, else frozen
BatchNorm(x)                              ->  PaperSite(x)       scale and shift alone

Paddings stay nodes, so q is kept padded, and residual adds are not drawn in.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from floorplan.choose import choose, shape_of
from floorplan.compact import gate_of
from floorplan.driver import Pass, Site
from floorplan.errors import FloorplanError
from floorplan.fused import ACTIVATIONS, activation_options
from floorplan.geometry import CONVS, geometry_of
from floorplan.paper_site import PaperSite
from floorplan.sites import NORMS, bn_reason, call_reason, conv_reason, module_calls, set_module


@dataclass(frozen=True)
class Insert:
    """Options of the pass; calling it runs it."""

    rank: int = 2
    sites: str = "auto"
    seed: int = 0
    train_head: bool = False

    def __call__(self, gm: fx.GraphModule) -> Iterator[Site]:
        gm.requires_grad_(False)
        generator = torch.Generator().manual_seed(self.seed)
        pairs = {}
        for node, bn in module_calls(gm, *NORMS):
            if why := bn_reason(bn) or call_reason(gm, str(node.target)):
                yield Site(node.name, f"{why}; frozen as it is")
            else:
                pairs[node] = (bn, _conv_before(gm, node))
        convs = {str(c.target): gm.get_submodule(str(c.target)) for _, c in pairs.values() if c}
        refused = choose({p: shape_of(m) for p, m in convs.items()}, self.sites, self.rank)
        adapted = 0
        for node, (bn, source) in pairs.items():
            rank = self.rank if source and not self._unfit(str(source.target), convs, refused) else 0
            adapted += bool(rank)
            yield self._rewrite(gm, node, bn, source, rank, generator)
        if not adapted:
            raise FloorplanError(
                "memflora-paper: no conv with a BatchNorm behind it was chosen; try --sites all"
            )
        if self.train_head and (heads := [m for m in gm.modules() if isinstance(m, nn.Linear)]):
            heads[-1].requires_grad_(True)

    @staticmethod
    def _unfit(path: str, convs: dict[str, nn.Module], refused: dict[str, str]) -> bool:
        return bool(refused[path]) or cast(Any, convs[path]).groups > 1

    def _rewrite(
        self, gm: fx.GraphModule, node: fx.Node, bn: nn.Module, source: fx.Node | None, rank: int,
        generator: torch.Generator,
    ) -> Site:  # fmt: skip
        act = _activation_after(gm, node) if source is not None else None
        conv = None if source is None else gm.get_submodule(str(source.target))
        module = None if act is None else gm.get_submodule(str(act.target))
        path = str(node.target if source is None else source.target)
        set_module(gm, path, _site(conv, cast(Any, bn), module, rank, generator))
        last = node if act is None else act
        if source is not None:
            last.replace_all_uses_with(source)
            for old in (act, node):
                if old is not None:
                    gm.graph.erase_node(old)
        return Site(path, note="" if rank else "frozen: keeps its gate and its scale")


def _conv_before(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) > 1:
        return None
    target = str(source.target)
    conv = gm.get_submodule(target)
    shared = sum(n.target == target for n in gm.graph.nodes) > 1
    plain = isinstance(conv, CONVS) and not shared
    return source if plain and not (conv_reason(conv) or call_reason(gm, target)) else None


def _activation_after(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    if len(users) != 1 or users[0].op != "call_module" or users[0].args != (node,):
        return None
    m = gm.get_submodule(str(users[0].target))
    known = type(m) is ACTIVATIONS.get(type(m).__name__) and not isinstance(gate_of(m), str)
    return users[0] if known else None


def _site(
    conv: Any, bn: Any, act: nn.Module | None, rank: int, generator: torch.Generator
) -> PaperSite:
    config = None
    if act is not None:
        config = {"name": type(act).__name__, "options": activation_options(act)}
    shape = None if conv is None else list(conv.weight.shape)
    geo = None if conv is None else geometry_of(conv).config()
    bias = conv is not None and conv.bias is not None
    site = PaperSite(
        len(bn.running_mean), geo, shape, bias=bias, rank=rank, eps=bn.eps, act=config
    ).to(device=bn.running_mean.device, dtype=bn.running_mean.dtype)
    if conv is not None:
        site.weight = conv.weight.detach().clone(memory_format=torch.preserve_format)
        site.bias = conv.bias.detach().clone() if bias else None
    values = {"mean": bn.running_mean, "var": bn.running_var, "gamma": bn.weight, "beta": bn.bias}
    for name, value in values.items():
        if value is not None:
            setattr(site, name, value.detach().clone())
    if rank:
        draw = torch.randn(site.P.shape, generator=generator, dtype=torch.float64)
        site.P.copy_(draw / math.sqrt(rank))
    return site.train(bn.training)


def paper(rank: int = 2, sites: str = "auto", seed: int = 0, train_head: bool = False) -> Pass:
    """The pass with its options set."""
    return Pass("insert_memflora_paper", Insert(rank, sites, seed, train_head), tolerance=1e-9)
