"""The MemFLoRA site as one op: conv, folded BatchNorm, adapter, residual add and activation.

    q = conv1x1(x, P)                          kept, r channels a group
    y = act(conv(x, W + a*(U o P)) + b + skip)
    gate = lo < z < hi, one bit an element     kept

P (g, r, I/g) is frozen, U trained, W, b and a hold the folded BatchNorm (MemFLoRA eq. 4-9). Because
conv(q, U) = conv(x, U o P) the adapter is merged into the weight on every call, and the branch never
runs at full width. Nothing else survives the forward pass; W, P, U, a are references to model state.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from floorplan.bits import apply_gate, layout_of, pack_gate
from floorplan.compact import Gate, gate_of
from floorplan.geometry import (
    Geometry,
    conv,
    conv_input_grad,
    conv_weight_grad,
    pad,
    unpad,
)

ACTIVATIONS: dict[str, type[nn.Module]] = {
    c.__name__: c
    for c in (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.Threshold, nn.Hardsigmoid)
}


class FusedConv(nn.Module):
    """act(conv(pad(x), weight + scale*(U o P)) + bias [+ skip]) that keeps q and one bit an output.

    weight: (O, I/g, *k), transposed (I, O/g, *k). P: (g, r, I/g). U: (O, r, *k), transposed
    (g, r, O/g, *k). bias, scale: (O,). x: (B, I, *spatial); skip: as the output.
    """

    def __init__(
        self,
        geometry: dict[str, Any],
        weight: list[int],
        *,
        bias: bool = True,
        scale: bool = False,
        rank: int = 0,
        act: dict[str, Any] | None = None,
        form: str = "merged",
    ) -> None:
        super().__init__()
        self.geo = Geometry.of(geometry)
        self.rank, self.form = rank, form
        self.plain = False  # plain autograd on the same formula: the reference of every check
        out = weight[1] * self.geo.groups if self.geo.transposed else weight[0]
        self.out_channels = out
        self.in_channels = weight[0] if self.geo.transposed else weight[1] * self.geo.groups
        self.register_buffer("weight", torch.zeros(weight))
        self.register_buffer("bias", torch.zeros(out) if bias else None)
        self.register_buffer("scale", torch.ones(out) if scale else None)
        self.register_buffer("P", None)
        self.register_parameter("U", None)
        self.act: nn.Module | None = None
        self.gate: Gate | None = None
        if rank:
            self._allocate(rank)
        if act is not None:
            self.set_activation(ACTIVATIONS[act["name"]](**act["options"]))

    def _allocate(self, rank: int) -> None:
        g, k, like = self.geo.groups, list(self.geo.kernel), self.weight
        self.rank = rank
        size = [rank, self.out_channels // g] if self.geo.transposed else [rank]
        size = [g, *size, *k] if self.geo.transposed else [self.out_channels, rank, *k]
        self.register_buffer("P", like.new_zeros(g, rank, self.in_channels // g))
        self.U = nn.Parameter(like.new_zeros(size))

    def adapt(self, rank: int, generator: torch.Generator) -> None:
        """Add an adapter: P ~ N(0, 1/rank), frozen; U = 0, trained (MemFLoRA eq. 5)."""
        self._allocate(rank)
        draw = torch.randn(self.P.shape, generator=generator, dtype=torch.float64)
        self.P.copy_(draw / math.sqrt(rank))

    def set_activation(self, act: nn.Module) -> None:
        """Let this site end in `act`, which must be gateable by one bit an element."""
        gate = gate_of(act)
        if isinstance(gate, str):
            raise ValueError(gate)
        options = activation_options(act)
        self.act, self.gate = ACTIVATIONS[type(act).__name__](**options, inplace=True), gate

    def config(self) -> dict[str, Any]:
        """Constructor arguments as plain data."""
        act = self.act
        return {
            "geometry": self.geo.config(),
            "weight": list(self.weight.shape),
            "bias": self.bias is not None,
            "scale": self.scale is not None,
            "rank": self.rank,
            "act": act and {"name": type(act).__name__, "options": activation_options(act)},
            "form": self.form,
        }

    def extra_repr(self) -> str:
        """What a reader of the graph wants to know."""
        site = f"{self.in_channels}, {self.out_channels}, kernel={self.geo.kernel}"
        return site + f", stride={self.geo.stride}, groups={self.geo.groups}, rank={self.rank}"

    def groups(self, x: Tensor) -> int:
        """Groups; a depthwise conv asks its input, so that a symbolic width stays symbolic."""
        return x.shape[1] if self.geo.groups == self.in_channels > 1 else self.geo.groups

    def delta(self, dtype: torch.dtype) -> Tensor:
        """scale * (U o P), shaped like weight."""
        u, p = self.U.to(dtype), self.P.to(dtype)
        g, r = self.geo.groups, self.P.shape[1]
        if self.geo.transposed:
            if self.scale is not None:
                u = u * self.scale.to(dtype).reshape(g, 1, -1, *[1] * len(self.geo.kernel))
            d = torch.einsum("grok,gri->giok", u.flatten(3), p)
            return d.reshape(self.weight.shape)
        if self.scale is not None:
            u = u * self.scale.to(dtype).reshape(-1, *[1] * (u.dim() - 1))
        d = torch.einsum("gork,gri->goik", u.reshape(g, -1, r, math.prod(self.geo.kernel)), p)
        return d.reshape(self.weight.shape)

    def merged(self, dtype: torch.dtype) -> Tensor:
        """weight + scale * (U o P)."""
        w = self.weight.to(dtype)
        return w if self.U is None else w + self.delta(dtype)

    def down(self, x: Tensor) -> Tensor:
        """q = conv1x1(x, P): (B, g*r, *spatial), at the sampled positions only where it can be."""
        if self.geo.sampled:
            x = x[(slice(None), slice(None), *(slice(None, None, s) for s in self.geo.stride))]
        p = self.P.to(x.dtype).flatten(0, 1)
        p = p.reshape(*p.shape, *[1] * len(self.geo.kernel))
        return torch.convolution(
            x, p, None, [1] * (x.dim() - 2), [0] * (x.dim() - 2), [1] * (x.dim() - 2),
            False, [0] * (x.dim() - 2), self.geo.groups,
        )  # fmt: skip

    def up_geometry(self) -> Geometry:
        """The geometry by which U reads q."""
        return replace(self.geo, stride=(1,) * len(self.geo.kernel)) if self.geo.sampled else self.geo

    def up_weight(self, dtype: torch.dtype) -> Tensor:
        """U as the weight of a convolution of q, without the scale."""
        u = self.U.to(dtype)
        return u.flatten(0, 1) if self.geo.transposed else u

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """x (B, I, *spatial), skip broadcastable with the output -> (B, O, *spatial')."""
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
            with torch.autocast(device, enabled=False):
                return self._run(x, skip)
        return self._run(x, skip)

    def _run(self, x: Tensor, skip: Tensor | None) -> Tensor:
        if self.plain or not torch.is_grad_enabled():
            z = conv(pad(x, self.geo), self.merged(x.dtype), _cast(self.bias, x), self.geo, self.groups(x))
            z = z if skip is None else z + skip
            return z if self.act is None else type(self.act).forward(_outofplace(self.act), z)
        return _Site.apply(x, skip, self.U, self.weight, self.P, self.scale, self)  # type: ignore[no-any-return,no-untyped-call]


def activation_options(act: nn.Module) -> dict[str, Any]:
    """Constructor arguments of a gateable activation, in-place flag apart."""
    names = {
        nn.Hardtanh: ("min_val", "max_val"),
        nn.LeakyReLU: ("negative_slope",),
        nn.Threshold: ("threshold", "value"),
    }
    return {n: getattr(act, n) for n in names.get(type(act), ())}


def _outofplace(act: nn.Module) -> nn.Module:
    return ACTIVATIONS[type(act).__name__](**activation_options(act))


def _cast(t: Tensor | None, like: Tensor) -> Tensor | None:
    return None if t is None else t.to(like.dtype)


class _Site(torch.autograd.Function):
    """FusedConv with its own backward; keeps q and the packed gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor | None, up: Tensor | None,
                weight: Tensor, down: Tensor | None, scale: Tensor | None, site: FusedConv) -> Tensor:  # fmt: skip
        geo, groups = site.geo, site.groups(x)
        xp = pad(x, geo)
        z = conv(xp, site.merged(x.dtype), _cast(site.bias, x), geo, groups)
        ctx.conv_shape = z.shape
        q = site.down(x) if up is not None and ctx.needs_input_grad[2] else None
        if skip is not None:
            same = skip.shape == z.shape and skip.dtype == z.dtype
            z = z.add_(skip) if same else z + skip
        packed = None
        if site.act is not None and site.gate is not None:
            ctx.layout = layout_of(z)
            packed = pack_gate(z, site.gate.lo, site.gate.hi, site.gate.closed)
            z = site.act(z)
        ctx.site, ctx.groups, ctx.size, ctx.dtype = site, groups, xp.shape[2:], x.dtype
        ctx.skip_shape = None if skip is None else skip.shape
        ctx.save_for_backward(weight, down, up, scale, q, packed)
        return z

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _, _, up, scale, q, packed = ctx.saved_tensors
        site: FusedConv = ctx.site
        gate = site.gate
        if packed is not None and gate is not None:
            g = apply_gate(g, packed, ctx.layout, gate.inside, gate.outside)
        gskip = g.sum_to_size(ctx.skip_shape) if ctx.needs_input_grad[1] else None
        if g.shape != ctx.conv_shape:
            g = g.sum_to_size(ctx.conv_shape)
        g = g.to(ctx.dtype)
        gu = None if q is None else _up_grad(site, g, q, scale).to(up.dtype)
        gx = None
        if ctx.needs_input_grad[0]:
            gx = conv_input_grad(g, site.merged(g.dtype), ctx.size, site.geo, ctx.groups)
            gx = unpad(gx, site.geo)
        return gx, gskip, gu, None, None, None, None


def _up_grad(site: FusedConv, g: Tensor, q: Tensor, scale: Tensor | None) -> Tensor:
    geo = site.up_geometry()
    w = site.up_weight(g.dtype)
    gu = conv_weight_grad(g, pad(q, geo), w, geo, geo.groups).reshape(site.U.shape)
    if scale is None:
        return gu
    s = scale.to(gu.dtype)
    if geo.transposed:
        return gu * s.reshape(geo.groups, 1, -1, *[1] * len(geo.kernel))
    return gu * s.reshape(-1, *[1] * (gu.dim() - 1))


class ChannelAffine(nn.Module):
    """y = x*scale + bias per channel: an eval BatchNorm that keeps nothing of its input.

    x: (B, C, *spatial); scale, bias: (C,), frozen.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("scale", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))

    def config(self) -> dict[str, Any]:
        """Constructor arguments as plain data."""
        return {"channels": self.channels}

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift each channel."""
        view = (-1, *[1] * (x.dim() - 2))
        scale, bias = self.scale.to(x.dtype).reshape(view), self.bias.to(x.dtype).reshape(view)
        return (x * scale).add_(bias)
