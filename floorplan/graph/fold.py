"""What can be folded into a site, why not, and the folding."""

from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from floorplan.graph.edit import CONV_TYPES, calls_of
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.torch_doors import FORWARDS, hooks_of

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
PARAMETRIZED = "its weight is parametrized; remove the parametrization first (leave_parametrized=True)"
LARGE_SCALE = 100.0  # a folded BatchNorm scaling a channel by more than this is worth a word


def hook_reason(m: nn.Module) -> str:
    """Why a module must stay a module of its own; "" if it need not."""
    return "it has hooks, which a fused site would drop" if hooks_of(m) else ""


def _own_forward(m: nn.Module, bases: tuple[type[nn.Module], ...]) -> str:
    """The refusal of a subclass that computes something else than torch's layer; "" for others."""
    base = next((b for b in bases if isinstance(m, b)), None)
    for name in FORWARDS:
        if "forward" in vars(m) or getattr(type(m), name, None) is not getattr(base, name, None):
            return f"{type(m).__name__} has a forward of its own"
    return ""


def conv_reason(conv: nn.Module) -> str:
    """Why a conv cannot become a site; "" if it can."""
    if parametrize.is_parametrized(conv):
        return PARAMETRIZED
    weight = cast(Any, conv).weight
    if isinstance(weight, nn.UninitializedParameter):
        return "it is lazy; run one batch through the model first"
    if why := hook_reason(conv) or _own_forward(conv, CONV_TYPES):
        return why
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    return ""


def call_reason(gm: fx.GraphModule, target: str) -> str:
    """Why the calls of a layer are not layer(x); "" if they are, with `input=x` respelled."""
    for node in calls_of(gm, target):
        if not node.args and list(node.kwargs) == ["input"]:
            node.args, node.kwargs = (node.kwargs["input"],), {}
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            extra = ", ".join(node.kwargs) or "output_size"
            return f"it is called with {extra}, which a site does not take"
    return ""


def bn_reason(bn: nn.Module) -> str:
    """Why an eval BatchNorm is not a fixed affine map; "" if it is."""
    b = cast(Any, bn)
    if parametrize.is_parametrized(bn):
        return PARAMETRIZED
    if why := hook_reason(bn) or _own_forward(bn, NORMS):
        return why
    if b.running_mean is None or b.running_var is None:
        return "no running statistics: it normalises by the batch in eval mode too"
    # In float32, where it is used: in float64 a variance of -eps leaves a rest above zero.
    variance = b.running_var.float() + b.eps
    faults = (
        ("running_var + eps <= 0", variance <= 0),
        ("running_var is not finite", ~torch.isfinite(variance)),
        ("running_mean is not finite", ~torch.isfinite(b.running_mean)),
    )
    return next((f"{why} at channel {int(bad.nonzero()[0])}" for why, bad in faults if bad.any()), "")


def bn_affine(bn: nn.Module) -> tuple[Tensor, Tensor]:
    """a = gamma/sqrt(var+eps) and b = beta - a*mean, in float64 (MemFLoRA eq. 4)."""
    b = cast(Any, bn)
    a = torch.rsqrt(b.running_var.double() + b.eps)
    a = a if b.weight is None else a * b.weight.detach().double()
    shift = -b.running_mean.double() * a
    return a, shift if b.bias is None else shift + b.bias.detach().double()


def scale_note(bn: nn.Module) -> str:
    """A word about a channel that the folded BatchNorm blows up."""
    a = bn_affine(bn)[0].abs()
    worst = int(a.argmax())
    return f"channel {worst} is scaled by {float(a[worst]):.0f}" if a[worst] > LARGE_SCALE else ""


def to_site(conv: nn.Module, bn: nn.Module | None = None) -> FusedConv:
    """A frozen site equal to bn(conv(x)) in eval mode."""
    c = cast(Any, conv)
    geo, weight = geometry_of(conv), c.weight.detach()
    bias = None if c.bias is None else c.bias.detach()
    folded = bn is not None
    site = FusedConv(geo.config(), list(weight.shape), bias=bias is not None or folded, scale=folded).to(weight)
    if bn is None:
        site.weight = weight.clone(memory_format=torch.preserve_format)
        if bias is not None:
            site.bias = bias.clone()
        return site.train(conv.training)
    a, shift = bn_affine(bn)
    per_channel = a.reshape(-1, *[1] * (weight.dim() - 1))
    if geo.transposed:  # (I, O/g, *k): output channel = group*(O/g) + j
        g = geo.groups
        rows = a.reshape(g, 1, -1).expand(g, weight.shape[0] // g, -1).reshape(weight.shape[:2])
        per_channel = rows.reshape(*rows.shape, *[1] * (weight.dim() - 2))
    site.weight = (weight.double() * per_channel).to(weight.dtype)
    site.scale = a.to(weight.dtype)
    site.bias = (shift if bias is None else shift + a * bias.double()).to(weight.dtype)
    return site.train(conv.training)


def to_affine(bn: nn.Module) -> ChannelAffine:
    """The channel affine equal to an eval BatchNorm."""
    a, shift = bn_affine(bn)
    like = cast(Any, bn).running_mean
    affine = ChannelAffine(len(a)).to(like.device)
    affine.scale, affine.bias = a.to(like.dtype), shift.to(like.dtype)
    return affine.train(bn.training)


def tied_twin(site: FusedConv) -> FusedConv:
    """A second site on the same tensors, for another call of a shared conv."""
    twin = FusedConv(**site.config())
    for name in ("weight", "bias", "scale", "P", "U"):
        setattr(twin, name, getattr(site, name))
    return twin.train(site.training)
