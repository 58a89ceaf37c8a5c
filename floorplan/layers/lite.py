"""TinyTL's layers: the lite residual beside a block, and frozen layers that train their biases alone.

    y = block(x) + up(lite(x))         lite: AvgPool2d(2) -> conv 5x5, 2 groups -> GroupNorm -> ReLU
                                             -> conv 1x1 -> GroupNorm, weight U and bias B start at 0
    y = act(a*conv(x, W) + beta - a*mean)      TinySite: keeps a byte an element and a, never x
    y = conv(x, W) + bias                      FrozenConv: keeps nothing

TinyTL (arXiv 2007.11622) as the MemFLoRA paper runs it. The byte is the published form; one bit would do.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.layers.activations import Gate
from floorplan.layers.adapter import as_conv_starts
from floorplan.layers.bits import between
from floorplan.layers.geometry import Geometry, frozen_conv
from floorplan.layers.layer import Adapter, Layer, PlainConv
from floorplan.layers.macs import Macs
from floorplan.layers.paper import PaperSite

KERNEL = 5
EPS = 1e-5


def divisor(channels: int, most: int) -> int:
    """The largest divisor of `channels` that is at most `most`; at least 1."""
    return next(g for g in range(max(most, 1), 0, -1) if channels % g == 0)


class LiteResidual(Adapter):
    """The lite branch of a block: x (B, I, H, W) -> (B, O, H', W'), the size of the block's output y.

    All of it trains. y is read for its size alone.
    """

    stored = "floorplan.lite.LiteResidual"
    pillar = "other"
    fresh = True
    starts_at_zero = ("U", "B")
    rank = 1  # an adapter, though it has no bottleneck

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.groups = divisor(inputs, 2)
        self.wide = nn.Parameter(torch.zeros(inputs, inputs // self.groups, KERNEL, KERNEL))
        self.weight, self.bias = nn.Parameter(torch.ones(inputs)), nn.Parameter(torch.zeros(inputs))
        self.point = nn.Parameter(torch.zeros(outputs, inputs, 1, 1))
        self.U, self.B = nn.Parameter(torch.zeros(outputs)), nn.Parameter(torch.zeros(outputs))

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs:
        """Its convs at half the positions."""
        beside = (self.wide.numel() + self.point.numel()) * math.prod(-(-n // 2) for n in x[2:])
        return Macs(0, beside, beside)

    def extra_repr(self) -> str:
        return f"{self.inputs}, {self.outputs}"

    def start(self, generator: torch.Generator) -> None:
        """The convs as nn.Conv2d is initialised; the output norm at zero, so that nothing is added."""
        with torch.no_grad():
            for w in (self.wide, self.point):
                w.copy_(as_conv_starts(w.shape, generator))
            self.U.zero_()
            self.B.zero_()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.forward(x[None], y[None])[0]
        halves = [2 if n > 1 else 1 for n in x.shape[2:]]
        z = F.avg_pool2d(x, halves, halves, ceil_mode=True)
        z = F.conv2d(z, self.wide, padding=KERNEL // 2, groups=self.groups)
        z = _group_norm(z, self.weight, self.bias, self.inputs)
        z = F.conv2d(F.relu(z, inplace=True), self.point)
        z = _group_norm(z, self.U, self.B, self.outputs)
        if z.shape[2:] == y.shape[2:]:
            return z
        return F.interpolate(z, size=y.shape[2:], mode="bilinear", align_corners=False)


def _group_norm(z: Tensor, weight: Tensor, bias: Tensor, channels: int) -> Tensor:
    """GroupNorm with eight channels a group, or more where eight do not divide."""
    # F.group_norm asks for more than one value a group, which would be a guard on the sizes.
    return torch.group_norm(z, divisor(channels, channels // 8), weight, bias, EPS)


class FrozenConv(Layer):
    """conv(x, W) + bias, W frozen, the bias trained: keeps nothing of x. x: (B, I, *spatial)."""

    stored = "floorplan.lite.FrozenConv"
    pillar = "convolution"
    fresh = True
    weight: Tensor

    def __init__(self, geometry: dict[str, Any], weight: list[int], bias: bool = False) -> None:
        super().__init__()
        self.geo = Geometry.of(geometry)
        out = weight[1] * self.geo.groups if self.geo.transposed else weight[0]
        self.register_buffer("weight", torch.zeros(weight))
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def plain_form(self) -> PlainConv:
        return PlainConv(self.geo, self.weight, self.bias)

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs:
        return Macs(self.weight.numel() * math.prod(y[2:]))

    def forward(self, x: Tensor) -> Tensor:
        return frozen_conv(x, self.weight, self.bias, self.geo)


class TinySite(PaperSite):
    """act(bn(conv(x, W) + bias)) by the running statistics; beta and bias train, all else is frozen.

    Keeps one byte an element of the result (with an activation) and the scale a. No conv: a BatchNorm.
    """

    stored = "floorplan.lite.TinySite"
    unmergeable = Adapter.unmergeable  # the branches beside it do not merge
    pillar = "other"
    fresh = True
    beta: Tensor
    bias: Tensor | None

    def __init__(
        self,
        channels: int,
        geometry: dict[str, Any] | None = None,
        weight: list[int] | None = None,
        *,
        bias: bool = False,
        eps: float = EPS,
        act: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(channels, geometry, weight, eps=eps, act=act)
        del self.beta, self.bias
        self.beta = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    @staticmethod
    def kept_gate(z: Tensor, gate: Gate) -> Tensor:
        """A byte an element."""
        return between(z, gate.lo, gate.hi, gate.closed)  # type: ignore[no-any-return]

    @staticmethod
    def gated(g: Tensor, kept: Tensor, layout: int, gate: Gate) -> Tensor:
        inside = g if gate.inside == 1 else g * gate.inside
        return torch.where(kept, inside, g * gate.outside if gate.outside else g.new_zeros(()))
