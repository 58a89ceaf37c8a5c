"""Freeze the model and put a LoRA in the place of the chosen convs; BatchNorms stay as they are.

conv(x, W)  ->  LoraC, LoraCOfficial, SideConv, FactorConv (x)      see floorplan.layers.lora, floorplan.layers.factor
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError
from floorplan.graph.choose import choose, shape_of
from floorplan.graph.driver import Pass, Site
from floorplan.graph.edit import CONV_TYPES, module_calls, set_module
from floorplan.graph.fold import call_reason, conv_reason
from floorplan.layers.adapter import as_conv_starts
from floorplan.layers.factor import FactorConv, tensor_train_suffix
from floorplan.layers.geometry import TRANSPOSED, Geometry, geometry_of
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv

ALPHA = 2.0  # alpha/r, as in the MemFLoRA paper's baselines


def _reparametrized(cls: Any) -> Callable[..., nn.Module]:
    def make(geo: Geometry, w: Tensor, bias: bool, rank: int, g: torch.Generator) -> nn.Module:
        layer = cls(geo.config(), list(w.shape), rank, ALPHA, bias)
        layer.start(g)
        return cast(nn.Module, layer)

    return make


def _edge(geo: Geometry, w: Tensor, bias: bool, rank: int, g: torch.Generator) -> nn.Module:
    suffix = tensor_train_suffix(w, rank)
    layer = FactorConv(geo.config(), list(w.shape), suffix.shape[0], 1.0, bias)
    layer.D = suffix.expand(geo.groups, *suffix.shape).clone()
    return layer


def _fa(geo: Geometry, w: Tensor, bias: bool, rank: int, g: torch.Generator) -> nn.Module:
    layer = FactorConv(geo.config(), list(w.shape), rank, ALPHA, bias)
    rows = (geo.groups * rank, *w.shape[1:])
    layer.D = as_conv_starts(rows, g).view(layer.D.shape).to(w.dtype)
    return layer


KINDS: dict[str, Callable[..., nn.Module]] = {
    "lora-c": _reparametrized(LoraC),
    "lora-c-official": _reparametrized(LoraCOfficial),
    "lora-conv": _reparametrized(SideConv),
    "lora-edge": _edge,
    "lora-fa": _fa,
}


def _unfit(kind: str, conv: Any, geo: Geometry) -> str:
    """Why this form does not exist for a conv; "" if it does."""
    if isinstance(conv, TRANSPOSED):
        return f"{kind} is defined for convs, not for transposed ones"
    if kind == "lora-c" and (conv.groups > 1 or len(geo.kernel) > 2):
        return "lora-c is defined for ungrouped 1-D and 2-D convs"
    if kind == "lora-c-official" and len(set(geo.kernel)) > 1:
        return "lora-c-official needs a square kernel"
    return ""


@dataclass(frozen=True)
class Insert:
    """Options of the pass; calling it runs it."""

    kind: str
    rank: int = 2
    sites: str = "auto"
    seed: int = 0
    train_head: bool = False

    def __call__(self, gm: fx.GraphModule) -> Iterator[Site]:
        if self.rank < 1:
            raise FloorplanError(f"rank {self.rank}: an adapter has a whole rank of 1 or more")
        gm.requires_grad_(False)
        generator = torch.Generator().manual_seed(self.seed)
        convs = {str(n.target): m for n, m in module_calls(gm, *CONV_TYPES)}
        why = {path: conv_reason(m) or call_reason(gm, path) for path, m in convs.items()}
        refused = choose({p: shape_of(m) for p, m in convs.items() if not why[p]}, self.sites, self.rank)
        adapted = 0
        for path, conv in convs.items():
            reason = why[path] or refused[path] or _unfit(self.kind, conv, geometry_of(conv))
            if reason:
                yield Site(path, f"{reason}; frozen as it is")
                continue
            set_module(gm, path, self._layer(conv, generator))
            adapted += 1
            yield Site(path)
        if not adapted:
            raise FloorplanError(
                f"no conv was adapted ({len(convs)} looked at with --sites {self.sites} --rank {self.rank}); "
                "try --sites all or a smaller rank"
            )
        if self.train_head and (heads := [m for m in gm.modules() if isinstance(m, nn.Linear)]):
            heads[-1].requires_grad_(True)

    def _layer(self, conv: Any, generator: torch.Generator) -> nn.Module:
        w: Tensor = conv.weight.detach()
        bias = conv.bias is not None
        layer: Any = KINDS[self.kind](geometry_of(conv), w, bias, self.rank, generator)
        layer = layer.to(device=w.device, dtype=w.dtype)
        layer.weight = w.clone(memory_format=torch.preserve_format)
        if bias:
            layer.bias = conv.bias.detach().clone()
        return cast(nn.Module, layer.train(conv.training))


def lora(kind: str, rank: int = 2, sites: str = "auto", seed: int = 0, train_head: bool = False) -> Pass:
    """The pass with its options set; `kind` is one of KINDS."""
    return Pass(f"insert_{kind}", Insert(kind, rank, sites, seed, train_head), tolerance=1e-9)
