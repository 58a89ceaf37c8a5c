"""The MemFLoRA site as one op: conv, folded BatchNorm, adapter, residual add and activation.

    q = conv1x1(x, P)                          kept, r channels a group
    y = act(conv(x, W + a*(U o P)) + b + skip)
    gate = lo < z < hi, one bit an element     kept

P (g, r, I/g) is frozen, U trained, W, b and a hold the folded BatchNorm (MemFLoRA eq. 4-9).
Because conv(q, U) = conv(x, U o P) the adapter is merged into the weight on every call, and the branch never
runs at full width. Nothing else survives the forward pass; W, P, U, a are references to model state.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from floorplan.layers.activations import Gate, act_config, act_of, gate_of, gated
from floorplan.layers.bits import apply_gate, layout_of, pack_gate
from floorplan.layers.functions import CompactFunction, add_, call, learns
from floorplan.layers.geometry import Geometry, bias_grad, conv, input_grad, pad
from floorplan.layers.layer import Adapter, Layer, PlainConv, PlainNorm
from floorplan.layers.lowrank import PROJECTIONS, merge, project, q_grad, up_grad
from floorplan.layers.macs import Macs


class FusedConv(Adapter):
    """act(conv(pad(x), weight + scale*(U o P)) + bias [+ skip]) that keeps q and one bit an output.

    weight: (O, I/g, *k), transposed (I, O/g, *k). P: (g, r, I/g). U: (O, r, *k), transposed
    (g, r, O/g, *k). bias, scale: (O,). x: (B, I, *spatial); skip: as the output.
    """

    stored = "floorplan.fused.FusedConv"
    unmergeable = ""
    merges_a_step = 2
    replays = True
    fresh = True
    geo: Geometry
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    P: Tensor | None
    U: nn.Parameter | None

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
        self.geo, self.rank, self.form = Geometry.of(geometry), rank, form
        self.captures = False  # keep dL/dq in `gq` for a replay (MemFLoRA-SG)
        self.gq: Tensor | None = None
        sides = (weight[0], weight[1] * self.geo.groups)
        self.out_channels, self.in_channels = reversed(sides) if self.geo.transposed else sides
        out = self.out_channels
        self.register_buffer("weight", torch.zeros(weight))
        self.register_buffer("bias", torch.zeros(out) if bias else None)
        self.register_buffer("scale", torch.ones(out) if scale else None)
        self.register_buffer("P", None)
        self.register_parameter("U", None)
        self.act: nn.Module | None = None
        self.gate: Gate | None = None
        if rank:
            self._allocate(rank)
        if (ends := act_of(act)) is not None:
            self.set_activation(ends)

    def _allocate(self, rank: int) -> Tensor:
        g, o, like = self.geo.groups, self.out_channels, self.weight
        self.rank = rank
        size = (g, rank, o // g) if self.geo.transposed else (o, rank)
        p = like.new_zeros(g, rank, self.in_channels // g)
        self.register_buffer("P", p)
        self.U = nn.Parameter(like.new_zeros(*size, *self.geo.kernel))
        return p

    def adapt(self, rank: int, generator: torch.Generator, projection: str = "normal") -> None:
        """Add an adapter: P by PROJECTIONS, frozen; U = 0, trained (MemFLoRA eq. 5)."""
        p = self._allocate(rank)
        draw = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.copy_(PROJECTIONS[projection](draw))

    def set_activation(self, act: nn.Module) -> None:
        """Let this site end in `act`, which must be gateable by one bit an element; ValueError if it is not."""
        self.act = act_of(act_config(act))
        self.gate = cast(Gate, gate_of(act))

    def config(self) -> dict[str, Any]:
        return super().config() | {"act": act_config(self.act)}

    def axes(self) -> dict[str, str]:
        return {"P": ".rC", "U": ".rC" if self.geo.transposed else "Cr"}

    def extra_repr(self) -> str:
        site = f"{self.in_channels}, {self.out_channels}, kernel={self.geo.kernel}"
        return site + f", stride={self.geo.stride}, groups={self.geo.groups}, rank={self.rank}"

    def groups(self, x: Tensor) -> int:
        """Groups; a depthwise conv asks its input, so that a symbolic width stays symbolic."""
        return x.shape[1] if self.geo.groups == self.in_channels > 1 else self.geo.groups

    def merged(self, dtype: torch.dtype) -> Tensor:
        """weight + scale*(U o P), the weight that the site computes with."""
        return _merged(self.weight, self.U, self.P, self.scale, self.geo).to(dtype)

    def source_delta(self) -> Tensor:
        """U o P: the weight here has the BatchNorm's factor in it, the source's has not."""
        return _merged(torch.zeros_like(self.weight), self.U, self.P, None, self.geo)

    def plain_form(self) -> PlainConv:
        weight, act = self.merged(self.weight.dtype).detach(), act_of(act_config(self.act), inplace=False)
        return PlainConv(self.geo, weight, self.bias, act)

    def bottleneck(self, x: Tensor) -> Tensor | None:
        return None if self.P is None else project(x, self.P, self.geo)

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs:
        """One conv by the merged weight; only the projection runs beside it, its adjoint is part of the conv's."""
        points, inputs = math.prod(y[2:]), math.prod(x[2:])
        taken = inputs if self.geo.transposed else points
        base = self.weight.numel() * taken
        if self.U is None or self.P is None:
            return Macs(base)
        down = self.P.numel() * (points if self.geo.sampled else inputs)
        return Macs(base, down, self.U.numel() * taken - down, self.rank * self.weight.numel())

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """x (B, I, *spatial), skip broadcastable with the output -> (B, O, *spatial')."""
        if x.dim() == len(self.geo.kernel) + 1:
            skip = skip[None] if skip is not None and skip.dim() == x.dim() else skip
            return self.forward(x[None], skip)[0]
        device = x.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._run(x, skip)
        if x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return self._run(x, skip)

    def _run(self, x: Tensor, skip: Tensor | None) -> Tensor:
        args = x, skip, self.U, self.weight, self.P, self.scale, self.bias, self
        if self.plain:
            return _Site.formula(*args)
        if not torch.is_grad_enabled():
            z = _Site.sum(*args)
            return z if self.act is None else self.act(z)
        if learns(self.weight, self.P, self.scale):  # their gradients need x
            z = _Site.sum(*args)
            return z if self.act is None or self.gate is None else gated(z, self.act, self.gate)
        return call(_Site, *args)

    def value(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """conv(pad(x), w) + bias."""
        bias = None if bias is None else bias.to(x.dtype)
        return conv(pad(x, self.geo), w, bias, self.geo, self.groups(x))


def _add(z: Tensor, skip: Tensor | None) -> Tensor:
    """z + skip, into z where it fits."""
    if isinstance(skip, Tensor):
        return add_(z, skip) if skip.shape == z.shape and skip.dtype == z.dtype else z + skip
    return z if skip is None else z + skip


def _merged(w: Tensor, u: Tensor | None, p: Tensor | None, scale: Tensor | None, geo: Geometry) -> Tensor:
    return w if u is None or p is None else merge(w, u, p, scale, geo)


class _Site(CompactFunction):
    """FusedConv with its own backward; keeps q and the packed gate.

    All tensors come by argument, none from the module: autograd sees what was written since; functional_call works.
    """

    layer = "FusedConv"

    @staticmethod
    def conv(x: Tensor, *args: Any) -> Tensor:
        """The conv and its bias."""
        up, weight, down, scale, bias, site = args
        y: Tensor = site.value(x, _merged(weight, up, down, scale, site.geo).to(x.dtype), bias)
        return y

    @staticmethod
    def sum(x: Tensor, skip: Tensor | None, *args: Any) -> Tensor:
        """What the activation gets."""
        return _add(_Site.conv(x, *args), skip)

    @staticmethod
    def formula(x: Tensor, skip: Tensor | None, *args: Any) -> Tensor:
        z, act = _Site.conv(x, *args), act_of(act_config(args[-1].act), inplace=False)
        z = z if skip is None else z + skip
        return z if act is None else act(z)

    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor | None, *args: Any) -> Tensor:
        up, weight, down, scale, _, site = args
        ctx.geo, ctx.gate, ctx.groups = site.geo, site.gate, site.groups(x)
        ctx.site = site if site.captures else None
        z = _Site.conv(x, *args)
        ctx.conv_shape, ctx.x_shape, ctx.dtype = z.shape, x.shape, x.dtype
        q = project(x, down, site.geo) if down is not None and ctx.needs_input_grad[2] else None
        z = _add(z, skip)
        packed = None
        if site.gate is not None and any(ctx.needs_input_grad):
            ctx.layout = layout_of(z)
            packed = pack_gate(z, site.gate.lo, site.gate.hi, site.gate.closed)
        if site.act is not None:
            z = site.act(z)
        ctx.skip_shape = skip.shape if isinstance(skip, Tensor) else None
        ctx.save_for_backward(weight, down, up, scale, q, packed)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, down, up, scale, q, packed = ctx.saved_tensors
        if packed is not None:
            g = apply_gate(g, packed, ctx.layout, ctx.gate.inside, ctx.gate.outside)
        gskip = g.sum_to_size(ctx.skip_shape) if ctx.needs_input_grad[1] else None
        g = g if g.shape == ctx.conv_shape else g.sum_to_size(ctx.conv_shape)
        g, geo = g.to(ctx.dtype), ctx.geo
        gb = bias_grad(g) if ctx.needs_input_grad[6] else None
        device = g.device.type  # gradients in the dtypes of the forward, even if backward() is called under autocast
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            gu = None if q is None else up_grad(g, q, up, scale, geo)
            if q is not None and ctx.site is not None:
                ctx.site.gq = q_grad(g, q, up, scale, geo)
            del q, packed
            if not ctx.needs_input_grad[0]:
                return None, gskip, gu, None, None, None, gb, None
            w = _merged(weight, up, down, scale, geo).to(g.dtype)
            gx = input_grad(g, w, ctx.x_shape, geo, ctx.groups)
        return gx, gskip, gu, None, None, None, gb, None


class ChannelAffine(Layer):
    """y = x*scale + bias per channel: an eval BatchNorm that keeps nothing of its input.

    x: (B, C, *spatial); scale, bias: (C,), frozen.
    """

    stored = "floorplan.fused.ChannelAffine"
    pillar = "normalization"
    fresh = True
    scale: Tensor
    bias: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("scale", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))

    def plain_form(self) -> PlainNorm:
        """A BatchNorm of mean 0 and variance 1."""
        return PlainNorm(torch.zeros_like(self.scale), torch.ones_like(self.scale), self.scale, self.bias, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        scale, bias = (t.to(x.dtype).reshape(-1, *[1] * (x.dim() - 2)) for t in (self.scale, self.bias))
        return (x * scale).add_(bias)
