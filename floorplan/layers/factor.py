"""A frozen conv with a frozen spatial down-factor and a trained mixing of its r responses.

    t = conv(x, D)                       kept: r channels a group, at the output's resolution
    y = conv(x, W + s*(U D)) + b         U (O, r) trained; D (g, r, I/g, *k) and W frozen

LoRA-Edge (arXiv 2511.03765): D is the suffix of W's tensor train, U = 0 its output core, s = 1.
LoRA-FA (arXiv 2308.03303), in conv form: D is random, U = 0, s = alpha/r.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from floorplan.layers.adapter import ConvAdapter, as_conv_starts
from floorplan.layers.functions import CompactFunction, call, learns
from floorplan.layers.geometry import bias_grad, conv, input_grad, pad
from floorplan.layers.macs import Macs


def mixed(w: Tensor, u: Tensor, d: Tensor, scale: float) -> Tensor:
    """w + scale*(U D): (O, I/g, *k), in the wider dtype of both."""
    dtype = torch.promote_types(w.dtype, u.dtype)
    g, r = d.shape[:2]
    rows = w.to(dtype).reshape(g, w.shape[0] // g, -1)
    out = torch.baddbmm(rows, u.to(dtype).reshape(g, -1, r), d.to(dtype).flatten(2), alpha=scale)
    return out.view(w.shape)


class FactorConv(ConvAdapter):
    """conv(pad(x), weight + scale*(U D)) + bias that keeps t = conv(x, D) in place of x.

    weight (O, I/g, *k), D (g, r, I/g, *k), U (O, r). x: (B, I, *spatial).
    """

    stored = "floorplan.factor.FactorConv"
    takes_groups = True
    merges_a_step = 0
    D: Tensor
    U: nn.Parameter

    def make(self, weight: list[int]) -> None:
        self.register_buffer("D", torch.zeros(self.geo.groups, self.rank, *weight[1:]))
        self.U = nn.Parameter(torch.zeros(weight[0], self.rank))

    @classmethod
    def edge(cls, conv: nn.Module, rank: int, generator: torch.Generator) -> Self | str:
        """LoRA-Edge's: D from the weight, at most as many rows as its tensor train has."""
        suffix = tensor_train_suffix(conv.get_parameter("weight"), rank)
        layer = cls.of(conv, suffix.shape[0], generator)
        if not isinstance(layer, str):
            layer.D.copy_(suffix.expand(layer.D.shape))
        return layer

    def start(self, generator: torch.Generator) -> None:
        """LoRA-FA's: D as nn.Conv2d is initialised."""
        self.D.copy_(as_conv_starts(self.D.flatten(0, 1).shape, generator).view(self.D.shape))

    def axes(self) -> dict[str, str]:
        return {"D": ".rC", "U": "Cr"}

    def delta(self) -> Tensor:
        return mixed(torch.zeros_like(self.weight), self.U, self.D, self.scale)

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs:
        """t and U counted beside the conv, as published; the op itself merges."""
        points = math.prod(y[2:])
        up = self.U.numel() * points
        return Macs(self.weight.numel() * points, self.D.numel() * points + up, up)

    def run(self, x: Tensor) -> Tensor:
        """One conv by the merged weight, which keeps t; x too if another factor than U trains."""
        if learns(self.weight, self.D):
            return self.by_autograd(x)
        device, args = x.device.type, (self.weight, self.bias, self.U, self.D, self)
        if device == "meta" or not torch.is_autocast_enabled(device):
            return call(_Factor, x, *args)
        x = x.to(torch.get_autocast_dtype(device)) if x.dtype != torch.float64 else x
        with torch.autocast(device, enabled=False):
            return call(_Factor, x, *args)


class _Factor(CompactFunction):
    """FactorConv with its own backward; keeps t."""

    layer = "FactorConv"

    @staticmethod
    def formula(x: Tensor, w: Tensor, b: Tensor | None, u: Tensor, d: Tensor, m: FactorConv) -> Tensor:
        b = None if b is None else b.to(x.dtype)
        return conv(pad(x, m.geo), mixed(w, u, d, m.scale).to(x.dtype), b, m.geo, m.geo.groups)

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, u: Tensor, d: Tensor, m: FactorConv) -> Tensor:
        ctx.geo, ctx.scale, ctx.x_shape, ctx.dtype = m.geo, m.scale, x.shape, x.dtype
        xp, g = pad(x, m.geo), m.geo.groups
        t = conv(xp, d.flatten(0, 1).to(x.dtype), None, m.geo, g) if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(w, u, d, t)
        b = None if b is None else b.to(x.dtype)
        return conv(xp, mixed(w, u, d, m.scale).to(x.dtype), b, m.geo, g)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        w, u, d, t = ctx.saved_tensors
        geo, gy = ctx.geo, gy.to(ctx.dtype)
        gu = gx = None
        gb = bias_grad(gy) if ctx.needs_input_grad[2] else None
        if t is not None:
            n, g, positions = gy.shape[0] * geo.groups, geo.groups, math.prod(gy.shape[2:])
            rows = gy.reshape(n, gy.shape[1] // g, positions)
            each = torch.bmm(rows, t.reshape(n, t.shape[1] // g, positions).transpose(1, 2))
            each = each.view(gy.shape[0], *u.shape).sum(0)
            gu = (each if ctx.scale == 1 else each * ctx.scale).to(u.dtype)
            del t
        if ctx.needs_input_grad[0]:
            wm = mixed(w, u, d, ctx.scale).to(gy.dtype)
            gx = input_grad(gy, wm, ctx.x_shape, geo, geo.groups)
        return gx, None, gb, gu, None, None


def tensor_train_suffix(w: Tensor, rank: int) -> Tensor:
    """Cores 2..4 of w's TT-SVD, contracted: (r1, I/g, *k), singular values included.

    w (O, I/g, *k), axes in this order, left to right, each bond at most `rank`.
    """
    cores: list[Tensor] = []
    rest, bond = w.detach().float(), 1
    for n in w.shape[:-1]:
        left, values, right = torch.linalg.svd(rest.reshape(bond * n, -1), full_matrices=False)
        keep = min(rank, len(values))
        cores.append(left[:, :keep].reshape(bond, n, keep))
        rest, bond = values[:keep, None] * right[:keep], keep
    suffix = rest.reshape(bond, w.shape[-1])
    for core in reversed(cores[1:]):
        suffix = torch.tensordot(core, suffix, dims=1)
    return suffix.to(w.dtype)
