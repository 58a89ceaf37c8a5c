"""LoRA on a conv's weight, and beside a conv, in plain autograd: the baselines' own forms.

LoRA-C as the MemFLoRA paper runs it:  W + s * sum_a B[o,h,a] A[a,i,w]     A (r, I, kw), B (O, kh, r)
LoRA-C as published (arXiv 2410.16954), loralib's form:  W + s * view(B A)
                                       A (r*k, I*k), B ((O/g)*k, r*k)      s = alpha/r
LoRA on a conv as peft has it:  y = conv(x, W) + s * conv1x1(conv(x, A), B)
                                       A (r, I, *k), B (O, r/g, 1…)

All keep x; the first two keep the merged weight as well.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from floorplan.layers.adapter import ConvAdapter, as_conv_starts
from floorplan.layers.geometry import Geometry, conv, conv1x1, pad
from floorplan.layers.macs import Macs


class _Lora(ConvAdapter):
    """A frozen conv with two trained factors."""

    starts_at_zero = ("B",)
    pillar = "other"  # x and the merged weight, of which no rank tells

    def make(self, weight: list[int]) -> None:
        a, b = self.shapes(weight, self.rank, self.geo.groups)
        self.A, self.B = nn.Parameter(torch.zeros(a)), nn.Parameter(torch.zeros(b))

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """Shapes of A and B for a weight (O, I/g, *k)."""
        raise NotImplementedError

    def start(self, generator: torch.Generator) -> None:
        """A as nn.Conv2d is initialised, B = 0: the model starts as its source."""
        with torch.no_grad():
            self.A.copy_(as_conv_starts(self.A.shape, generator))
            self.B.zero_()


class LoraC(_Lora):
    """LoRA-C in the MemFLoRA paper's form; 1-D and 2-D ungrouped convs (kh = 1 in 1-D)."""

    stored = "floorplan.reparam.LoraC"

    @classmethod
    def unfit(cls, geo: Geometry) -> str:
        few = geo.groups == 1 and len(geo.kernel) < 3
        return super().unfit(geo) if few or geo.transposed else "is defined for ungrouped 1-D and 2-D convs"

    def axes(self) -> dict[str, str]:
        return {"A": "rC", "B": "C.r"}

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """A (r, I, kw), B (O, kh, r)."""
        kh = w[2] if len(w) == 4 else 1
        return [r, w[1], w[-1]], [w[0], kh, r]

    def delta(self) -> Tensor:
        """scale * sum_a B[o,h,a] A[a,i,w]."""
        (o, kh, r), (_, i, kw) = self.B.shape, self.A.shape
        flat = self.B.reshape(o * kh, r) @ self.A.reshape(r, i * kw)
        return self.scale * flat.view(o, kh, i, kw).transpose(1, 2).reshape(self.weight.shape)


class LoraCOfficial(_Lora):
    """LoRA-C as published: one matrix product, viewed as the kernel; square kernels, any groups."""

    stored = "floorplan.reparam.LoraCOfficial"
    takes_groups = True

    @classmethod
    def unfit(cls, geo: Geometry) -> str:
        return super().unfit(geo) or ("needs a square kernel" if len(set(geo.kernel)) > 1 else "")

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """A (r*k, I*k), B ((O/g)*k^(dims-1), r*k), I all input channels; 1-D: k counts once."""
        k, dims = w[2], len(w) - 2
        return [r * k, w[1] * g * k], [w[0] // g * k ** (dims - 1), r * k]

    def delta(self) -> Tensor:
        """scale * view(B @ A); mixes input channel and kernel row, as loralib does."""
        return self.scale * (self.B @ self.A).view(self.weight.shape)


class SideConv(_Lora):
    """peft's LoRA on a conv: a conv of r channels with the layer's geometry, then a 1x1 conv."""

    stored = "floorplan.reparam.SideConv"
    takes_groups = True
    pillar = "convolution"
    merges_a_step = 0

    def axes(self) -> dict[str, str]:
        # g*r of a grouped A is a width like another
        return {"A": "rC", "B": "Cr"} if self.geo.groups == 1 else {"B": "Cr"}

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """A (g*r, I/g, *k), B (O, r, 1…): grouped as the layer is, so that it merges exactly."""
        return [g * r, *w[1:]], [w[0], r, *[1] * (len(w) - 2)]

    def delta(self) -> Tensor:
        """scale * sum_r B[o,r] A[r], group by group."""
        g, r, w = self.geo.groups, self.rank, self.weight
        down, up = self.A.reshape(g, r, -1), self.B.reshape(g, w.shape[0] // g, r)
        return self.scale * torch.bmm(up, down).view(w.shape)

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs:
        """Both factors beside the conv."""
        beside = (self.A.numel() + self.B.numel()) * math.prod(y[2:])
        return Macs(self.weight.numel() * math.prod(y[2:]), beside, beside)

    def run(self, x: Tensor) -> Tensor:
        """The frozen conv and the two of the branch."""
        x, g = pad(x, self.geo), self.geo.groups
        y = conv(x, self.weight, self.bias, self.geo, g)
        return y + self.scale * conv1x1(conv(x, self.A, None, self.geo, g), self.B, g)
