"""Each layer of an adapted graph in torch's own terms: weights merged in float64, one table a question.

FusedConv, FactorConv, LoRA  ->  ConvNd, ConvTransposeNd          PackedActivation  ->  ReLU, PReLU, …
PaperSite                    ->  ConvNd, its BatchNorm folded     PackedMaxPool     ->  MaxPoolNd
ChannelAffine                ->  F.batch_norm(training=False)     PackedDropout     ->  Dropout, Dropout2d, …
"""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from floorplan.layers.activations import (
    PackedActivation,
    PackedDropout,
    PackedMaxPool,
    ShapeAdaptiveAvgPool,
    ShapeAvgPool,
)
from floorplan.layers.adapter import Adapter
from floorplan.layers.branch import RankBranch
from floorplan.layers.dropout import DROPOUTS
from floorplan.layers.factor import FactorConv, mixed
from floorplan.layers.fused import ACTIVATIONS, ChannelAffine, FusedConv, activation_options
from floorplan.layers.geometry import CONVS, TRANSPOSED, Geometry
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv
from floorplan.layers.lowrank import merge as low_rank_sum
from floorplan.layers.max_pools import ADAPTIVE_AVG_POOLS, AVG_POOLS, MAX_POOLS
from floorplan.layers.paper import PaperSite
from floorplan.layers.plain import AnyBatchNorm
from floorplan.torch_doors import children_of

Weights = tuple[Tensor, Tensor | None]  # weight and bias


def exact(layer: nn.Module) -> Any:
    """A float64 twin on the CPU, which every device can copy from."""
    return copy.deepcopy(layer).to("cpu", torch.float64)


# What the adapter adds to the source's own weight, before any BatchNorm; `m` is a float64 twin.
_DELTAS: dict[type[Adapter], Callable[[Any], Tensor]] = {
    FusedConv: lambda m: low_rank_sum(torch.zeros_like(m.weight), m.U, m.P, None, m.geo),
    FactorConv: lambda m: mixed(torch.zeros_like(m.weight), m.U, m.D, m.scale),
    LoraC: lambda m: m.delta(),
    LoraCOfficial: lambda m: m.delta(),
    SideConv: lambda m: m.delta(),
    PaperSite: lambda m: torch.einsum("or...,ri->oi...", m.U, m.P.flatten(1)),
    RankBranch: lambda m: _unscaled(m).delta(),
}


def _unscaled(branch: RankBranch) -> RankBranch:
    branch.scale = None
    return branch


def delta_of(layer: nn.Module) -> Tensor:
    """U o P, unscaled, in float64 on the CPU, shaped like the weight of the source's conv."""
    return _DELTAS[cast(Any, type(layer))](exact(layer)).detach()


def _folded(m: Any) -> Weights:
    """conv and BatchNorm of a PaperSite as one conv."""
    a = m.gamma / torch.sqrt(m.var + m.eps)
    w = m.weight + _DELTAS[PaperSite](m) if m.rank else m.weight
    b = m.beta + a * ((0 if m.bias is None else m.bias) - m.mean)
    return a.reshape(-1, *[1] * (w.dim() - 1)) * w, b


_MERGED: dict[type[Adapter], Callable[[Any], Weights]] = {
    FusedConv: lambda m: (m.merged(torch.float64), m.bias),
    FactorConv: lambda m: (m.merged(), m.bias),
    LoraC: lambda m: (m.merged(), m.bias),
    LoraCOfficial: lambda m: (m.merged(), m.bias),
    SideConv: lambda m: (m.merged(), m.bias),
    PaperSite: _folded,
}


def mergeable(layer: nn.Module) -> bool:
    """Whether an adapter merges into a conv (or, beside one, into its weight)."""
    return type(layer) in _MERGED or type(layer) is RankBranch


def is_site(layer: nn.Module) -> bool:
    """Whether the layer becomes a conv."""
    return type(layer) in _MERGED and cast(Any, layer).weight is not None


def merged_parameters(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight and bias of the conv that computes the same, in the layer's dtype, on its device."""
    like = cast(Any, layer).weight
    weight, bias = _MERGED[cast(Any, type(layer))](exact(layer))

    def own(t: Tensor) -> nn.Parameter:
        return nn.Parameter(t.detach().to(device=like.device, dtype=like.dtype))

    return own(weight), None if bias is None else own(bias)


def explicit_padding(geo: Geometry) -> bool:
    """Whether no layer of torch pads so: both sides of an axis differ."""
    return any(lo != hi for lo, hi in geo.padding)


def plain_conv(geo: Geometry, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Module:
    """The conv of that geometry on these very tensors; unpadded if it needs explicit padding."""
    kind: Any = (TRANSPOSED if geo.transposed else CONVS)[len(geo.kernel) - 1]
    inputs, outputs = weight.shape[1] * geo.groups, weight.shape[0]
    options: dict[str, Any] = {"stride": geo.stride, "dilation": geo.dilation, "groups": geo.groups}
    if geo.transposed:
        inputs, outputs = outputs, inputs
        options["output_padding"] = geo.output_padding
    if not explicit_padding(geo):
        options["padding"] = tuple(lo for lo, _ in geo.padding)
        options["padding_mode"] = geo.mode if any(options["padding"]) else "zeros"
    with torch.device("meta"):
        conv = kind(inputs, outputs, geo.kernel, bias=bias is not None, **options)
    conv.weight, conv.bias = weight, bias
    return cast(nn.Module, conv)


def plain_activation(layer: nn.Module) -> nn.Module | None:
    """The activation that a site ends in, out of place; None if it ends in none."""
    act = children_of(layer).get("act")
    return None if act is None else ACTIVATIONS[type(act).__name__](**activation_options(act))


def _activation(m: Any) -> nn.Module:
    if m.act is not None:
        return cast(nn.Module, m.act)
    act = nn.PReLU(m.slope.numel(), device=m.slope.device, dtype=m.slope.dtype)
    act.weight = nn.Parameter(m.slope.detach().clone())
    return act


def _max_pool(m: Any) -> nn.Module:
    window = (tuple(t) for t in (m.kernel, m.stride, m.padding, m.dilation))
    return cast(Any, MAX_POOLS[m.dims - 1])(*window, False, m.ceil_mode)  # type: ignore[no-any-return]


def _avg_pool(m: Any) -> nn.Module:
    options = {} if m.dims == 1 else {"divisor_override": m.divisor_override}
    window = (tuple(t) for t in (m.kernel, m.stride, m.padding))
    kind = cast(Any, AVG_POOLS[m.dims - 1])
    return kind(*window, m.ceil_mode, m.count_include_pad, **options)  # type: ignore[no-any-return]


_TWINS: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    PackedActivation: _activation,
    PackedMaxPool: _max_pool,
    ShapeAvgPool: _avg_pool,
    ShapeAdaptiveAvgPool: lambda m: cast(Any, ADAPTIVE_AVG_POOLS[m.dims - 1])(tuple(m.output)),
    PackedDropout: lambda m: {k.__name__: cast(Any, k) for k in DROPOUTS}[m.name](m.p),
}


def plain_twin(layer: nn.Module) -> nn.Module | None:
    """torch's layer for a compact one, in its mode; None for any other layer."""
    make = _TWINS.get(type(layer))
    return None if make is None else make(layer).train(layer.training)


Norm = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]  # mean, var, weight, bias, eps

# Layers that scale and shift each channel, of a map of any number of dimensions.
_NORMS: dict[type[nn.Module], Callable[[Any], Norm | None]] = {
    ChannelAffine: lambda m: (torch.zeros_like(m.scale), torch.ones_like(m.scale), m.scale, m.bias, 0.0),
    PaperSite: lambda m: (m.mean, m.var, m.gamma, m.beta, m.eps) if m.weight is None else None,
    AnyBatchNorm: lambda m: (m.running_mean, m.running_var, m.weight, m.bias, m.eps) if m.fixed else None,
}


def fixed_norm(layer: nn.Module) -> Norm | None:
    """The arguments of an eval F.batch_norm that computes the same; None for any other layer."""
    read = _NORMS.get(type(layer))
    return None if read is None else read(layer)
