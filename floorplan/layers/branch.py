"""A rank-r branch beside a frozen site, in parts: for the ablations of MemFLoRA's Table 4.

    kernel in U:  q = conv1x1(x, P), d = conv(q, U)          kernel in P:  q = conv(x, P), d = conv1x1(q, U)
    d = a*d (scale "a"), d (scale "none"), or with q = BatchNorm(q), trained, before U (scale "bn")

Keeps q, never x; the sum with the frozen conv and the activation are nodes of their own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from floorplan.layers.adapter import Adapter
from floorplan.layers.geometry import Geometry, conv, conv_input_grad, pad, padded_size, unpad


class _Down(torch.autograd.Function):
    """conv(pad(x), P) by a frozen P: keeps nothing of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, geo: Geometry) -> Tensor:
        ctx.geo, ctx.shape = geo, x.shape
        ctx.save_for_backward(p)
        return conv(pad(x, geo), p, None, geo, geo.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (p,) = ctx.saved_tensors
        geo = ctx.geo
        return unpad(conv_input_grad(g, p, padded_size(ctx.shape, geo), geo, geo.groups), geo), None, None


class RankBranch(Adapter):
    """conv(x, U o P) by its two factors; ungrouped. P frozen, U (and BatchNorm of q) trained."""

    P: Tensor
    scale: Tensor | None

    def __init__(
        self, geometry: dict[str, Any], weight: list[int], rank: int, kernel: str = "up", scale: str = "a"
    ) -> None:
        super().__init__()
        self.geo, self.rank, self.kernel, self.form = Geometry.of(geometry), rank, kernel, scale
        self.shape = list(weight)
        o, i, *k = weight
        one = [1] * len(k)
        point = Geometry.of(
            self.geo.config() | {"kernel": one, "stride": one, "dilation": one, "padding": [[0, 0]] * len(k)}
        )
        self.down_geo, self.up_geo = (self.geo, point) if kernel == "down" else (point, self.geo)
        self.register_buffer("P", torch.zeros(rank, i, *(k if kernel == "down" else one)))
        self.U = nn.Parameter(torch.zeros(o, rank, *(one if kernel == "down" else k)))
        self.register_buffer("scale", torch.ones(o) if scale == "a" else None)
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        self.norm = norms[len(k) - 1](rank) if scale == "bn" else None

    def config(self) -> dict[str, Any]:
        """Constructor arguments as plain data."""
        return {
            "geometry": self.geo.config(),
            "weight": self.shape,
            "rank": self.rank,
            "kernel": self.kernel,
            "scale": self.form,
        }

    def axes(self) -> dict[str, tuple[int, set[int]]]:
        """Tensor -> its rank axis and its width axes."""
        return {"P": (0, {1}), "U": (1, {0})}

    def delta(self) -> Tensor:
        """What the branch adds to the weight, (O, I, *k); a BatchNorm of q does not merge in train mode."""
        p, u = self.P, self.U.detach()
        if self.kernel == "down":
            d: Tensor = torch.tensordot(u.flatten(1), p, dims=1)
        else:
            d = torch.einsum("or...,ri->oi...", u, p.flatten(1))
        return d if self.scale is None else d * self.scale.reshape(-1, *[1] * (d.dim() - 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, *spatial) -> (B, O, *spatial')."""
        q: Tensor = _Down.apply(x, self.P, self.down_geo)  # type: ignore[no-untyped-call]
        q = q if self.norm is None else self.norm(q)
        u: Tensor = self.U
        if self.scale is not None:
            u = u * self.scale.reshape(-1, *[1] * (u.dim() - 1))
        return conv(pad(q, self.up_geo), u, None, self.up_geo, 1)
