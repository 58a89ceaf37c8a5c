"""MemFLoRA's site as published: two branches and the BatchNorm's scale, kept as the paper counts.

    q = conv1x1(x, P)                                   kept, at the resolution of the (padded) input
    y = act( a*conv(x, W) + b + a*conv(q, U) )          a = gamma/sqrt(var+eps), b = beta - a*mean
    gate                                                kept, one bit an element; a kept, 4 bytes a channel

MemFLoRA eq. 4-9. `FusedConv` computes the same with one conv and keeps less; this form is there to be
compared with, and for the paper's tables.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.layers.activations import Gate, act_config, act_of, gate_of, gated
from floorplan.layers.bits import apply_gate, layout_of, pack_gate
from floorplan.layers.functions import CompactFunction, add_, call, learns, mul_
from floorplan.layers.geometry import Geometry, bias_grad, conv, conv1x1, conv_weight_grad, input_grad, pad
from floorplan.layers.layer import Adapter, PlainConv, PlainNorm
from floorplan.layers.lowrank import times
from floorplan.layers.macs import Macs


def per_channel(t: Tensor, dims: int) -> Tensor:
    """(C,) as (1, C, 1…) for a map of `dims` dimensions."""
    return t.reshape(1, -1, *[1] * (dims - 2))


class PaperSite(Adapter):
    """act(bn(conv(x, W) + conv(conv1x1(x, P), U))), eval-mode BatchNorm, ungrouped adapters.

    rank 0: a frozen site, which keeps its gate and scale alone. No conv (`weight` None): a
    standalone BatchNorm. x: (B, I, *spatial).
    """

    stored = "floorplan.paper_site.PaperSite"
    unmergeable = ""
    weight: Tensor | None
    bias: Tensor | None
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    P: Tensor

    def __init__(
        self,
        channels: int,
        geometry: dict[str, Any] | None = None,
        weight: list[int] | None = None,
        *,
        bias: bool = False,
        rank: int = 0,
        eps: float = 1e-5,
        act: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.rank, self.eps = channels, rank, eps
        self.geo = Geometry.of(geometry) if geometry is not None else None
        self.register_buffer("weight", None if weight is None else torch.zeros(weight))
        self.register_buffer("bias", torch.zeros(channels) if bias else None)
        for name, value in (("gamma", 1.0), ("beta", 0.0), ("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        if rank and weight is not None:
            self.register_buffer("P", torch.zeros(rank, weight[1], *[1] * (len(weight) - 2)))
            self.U = nn.Parameter(torch.zeros(weight[0], rank, *weight[2:]))
            # The published layer carries a BatchNorm and a shift of q that this form never reads.
            self.register_buffer("unread", torch.zeros(5, rank))
            self.register_buffer("unread_batches", torch.zeros((), dtype=torch.int64))
        self.act = act_of(act)
        self.gate = None if self.act is None else gate_of(self.act)

    def config(self) -> dict[str, Any]:
        return super().config() | {"act": act_config(self.act)}

    def axes(self) -> dict[str, str]:
        return {"P": "rC", "U": "Cr"}

    def source_delta(self) -> Tensor:
        """U o P: the BatchNorm is not folded into the weight here."""
        return torch.einsum("or...,ri->oi...", self.U, self.P.flatten(1))

    def plain_form(self) -> PlainConv | PlainNorm | None:
        """One conv with the BatchNorm folded in, or the BatchNorm alone; and the activation."""
        act = act_of(act_config(self.act), inplace=False)
        if self.weight is None or self.geo is None:
            return PlainNorm(self.mean, self.var, self.gamma, self.beta, self.eps, act)
        a = self.gamma / torch.sqrt(self.var + self.eps)
        w = (self.weight + self.source_delta()).detach() if self.rank else self.weight
        b = self.beta + a * ((0 if self.bias is None else self.bias) - self.mean)
        return PlainConv(self.geo, a.reshape(-1, *[1] * (w.dim() - 1)) * w, b, act)

    def bottleneck(self, x: Tensor) -> Tensor | None:
        return times(self.P.flatten(1), x) if self.rank else None

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs | None:
        """The conv and, beside it, both factors."""
        if self.weight is None:
            return None
        base = self.weight.numel() * math.prod(y[2:])
        if not self.rank:
            return Macs(base)
        up = self.U.numel() * math.prod(y[2:])
        return Macs(base, self.P.numel() * math.prod(x[2:]) + up, up)

    def forward(self, x: Tensor) -> Tensor:
        a = self.gamma * torch.rsqrt(self.var + self.eps)
        b, bias = self.beta - a * self.mean, self.bias
        if bias is not None and not self.plain and learns(bias):  # whose gradient is then that of b
            b, bias = b + a * bias, None
        up, down = (self.U, self.P) if self.rank else (None, None)
        args = x, up, down, self.weight, a, b, bias, self
        if self.plain:
            return Published.formula(*args)
        if learns(a, self.weight, down):  # their gradients need x
            z = Published.sum(*args)
            return z if self.act is None or not isinstance(self.gate, Gate) else gated(z, self.act, self.gate)
        return call(Published, *args)

    @staticmethod
    def kept_gate(z: Tensor, gate: Gate) -> Tensor:
        """What is kept of z for the activation's backward: one bit an element."""
        return pack_gate(z, gate.lo, gate.hi, gate.closed)  # type: ignore[no-any-return]

    @staticmethod
    def gated(g: Tensor, kept: Tensor, layout: int, gate: Gate) -> Tensor:
        """The gradient before the activation, from the one behind it and what was kept."""
        return apply_gate(g, kept, layout, gate.inside, gate.outside)  # type: ignore[no-any-return]


class Published(CompactFunction):
    """A site by its branches, (x, up, down, weight, a, b, bias, site), with its own backward; keeps q, the gate and a.

    Gradients of x, up and b; what else trains in a site is part of b.
    """

    layer = "a published site"

    @staticmethod
    def sum(x: Tensor, up: Tensor | None, down: Tensor | None, *args: Any) -> Tensor:
        """What the activation gets, in torch's own ops."""
        w, a, b, bias, site = args
        z = x
        if w is not None:
            z = conv(pad(x, site.geo), w, bias, site.geo, site.geo.groups)
            if up is not None and down is not None:
                z = z + conv(pad(conv1x1(x, down), site.geo), up, None, site.geo, 1)
        return z * per_channel(a, z.dim()) + per_channel(b, z.dim())

    @staticmethod
    def formula(*args: Any) -> Tensor:
        z, act = Published.sum(*args), args[-1].act
        return z if act is None else act(z)

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, down: Tensor | None, *args: Any) -> Tensor:
        w, a, b, bias, site = args
        ctx.geo, ctx.gate, ctx.gated, ctx.x_shape = site.geo, site.gate, site.gated, x.shape
        q = None
        if w is None:
            z = x * per_channel(a, x.dim())
        else:
            z = mul_(conv(pad(x, site.geo), w, bias, site.geo, site.geo.groups), per_channel(a, x.dim()))
            if up is not None and down is not None:
                q = times(down.flatten(1), x)
                z = add_(z, mul_(conv(pad(q, site.geo), up, None, site.geo, 1), per_channel(a, z.dim())))
        z, kept = add_(z, per_channel(b, z.dim())), None
        if site.gate is not None and any(ctx.needs_input_grad):
            ctx.layout = layout_of(z)
            kept = site.kept_gate(z, site.gate)
        z = z if site.act is None else site.act(z)
        ctx.save_for_backward(w, up, down, a, q if ctx.needs_input_grad[1] else None, kept)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        w, up, down, a, q, kept = ctx.saved_tensors
        geo, gx, gu, gb = ctx.geo, None, None, None
        if kept is not None:
            g = ctx.gated(g, kept, ctx.layout, ctx.gate)
        del kept
        if ctx.needs_input_grad[5]:
            gb = bias_grad(g)
        if q is None and not ctx.needs_input_grad[0]:
            return None, None, None, None, None, gb, None, None
        g = g * per_channel(a, g.dim())
        if w is None:
            return g, None, None, None, None, gb, None, None
        if q is not None and up is not None:
            gu = conv_weight_grad(g, pad(q, geo), up, geo, 1)
        if ctx.needs_input_grad[0]:
            gx = input_grad(g, w, ctx.x_shape, geo, geo.groups)
            if up is not None and down is not None:
                gx = gx.add_(times(down.flatten(1).t(), input_grad(g, up, ctx.x_shape, geo, 1)))
        return gx, gu, None, None, None, gb, None, None
