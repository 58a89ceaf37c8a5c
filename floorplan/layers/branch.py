"""A rank-r branch beside a frozen site, in parts: for the ablations of MemFLoRA's Table 4.

    kernel in U:  q = conv1x1(x, P), d = conv(q, U)          kernel in P:  q = conv(x, P), d = conv1x1(q, U)
    d = a*d (scale "a"), d (scale "none"), or with q = BatchNorm(q), trained, before U (scale "bn")

Keeps q, never x; the sum with the frozen conv and the activation are nodes of their own.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.layers.geometry import Geometry, conv, frozen_conv, pad
from floorplan.layers.layer import Adapter
from floorplan.layers.macs import Macs


class RankBranch(Adapter):
    """conv(x, U o P) by its two factors; ungrouped. P frozen, U (and BatchNorm of q) trained."""

    stored = "floorplan.branch.RankBranch"
    beside = True
    geo: Geometry
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
        ones = {"kernel": one, "stride": one, "dilation": one, "padding": [[0, 0]] * len(k)}
        point = Geometry.of(self.geo.config() | ones)
        self.down_geo, self.up_geo = (self.geo, point) if kernel == "down" else (point, self.geo)
        self.register_buffer("P", torch.zeros(rank, i, *(k if kernel == "down" else one)))
        self.U = nn.Parameter(torch.zeros(o, rank, *(one if kernel == "down" else k)))
        self.register_buffer("scale", torch.ones(o) if scale == "a" else None)
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        self.norm = norms[len(k) - 1](rank) if scale == "bn" else None
        self.unmergeable = "has a BatchNorm of q that does not merge" if scale == "bn" else ""

    def config(self) -> dict[str, Any]:
        own = {"rank": self.rank, "kernel": self.kernel, "scale": self.form}
        return {"geometry": self.geo.config(), "weight": self.shape, **own}

    def axes(self) -> dict[str, str]:
        norm = ("weight", "bias", "running_mean", "running_var") if self.norm is not None else ()
        return {"P": "rC", "U": "Cr", **{f"norm.{n}": "r" for n in norm}}

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs:
        """Two convs beside the frozen one."""
        points, down = math.prod(y[2:]), math.prod((y if self.kernel == "down" else x)[2:])
        return Macs(0, self.P.numel() * down + self.U.numel() * points, self.U.numel() * points)

    def delta(self) -> Tensor:
        """What the branch adds to the weight, (O, I, *k)."""
        return self._scaled(self.source_delta())

    def _scaled(self, t: Tensor) -> Tensor:
        """t (O, …) times the scale of each output channel."""
        return t if self.scale is None else t * self.scale.reshape(-1, *[1] * (t.dim() - 1))

    def source_delta(self) -> Tensor:
        u, p = self.U, self.P
        if self.kernel == "down":
            return torch.einsum("or,ri...->oi...", u.flatten(1), p)
        return torch.einsum("or...,ri->oi...", u, p.flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        geo = self.down_geo
        q = conv(pad(x, geo), self.P, None, geo, 1) if self.plain else frozen_conv(x, self.P, None, geo)
        q = q if self.norm is None else self.norm(q)
        return conv(pad(q, self.up_geo), self._scaled(self.U), None, self.up_geo, 1)
