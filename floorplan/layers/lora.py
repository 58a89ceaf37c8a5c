"""LoRA on a conv's weight, and beside a conv, in plain autograd: the baselines' own forms.

LoRA-C as the MemFLoRA paper runs it:  W + s * sum_a B[o,h,a] A[a,i,w]     A (r, I, kw), B (O, kh, r)
LoRA-C as published (arXiv 2410.16954), loralib's form:  W + s * view(B A)
                                       A (r*k, I*k), B ((O/g)*k, r*k)      s = alpha/r
LoRA on a conv as peft has it:  y = conv(x, W) + s * conv1x1(conv(x, A), B)
                                       A (r, I, *k), B (O, r/g, 1…)

All keep x; the first two keep the merged weight as well.
"""

from typing import Any

import torch
from torch import Tensor, nn

from floorplan.layers.adapter import ConvAdapter, as_conv_starts
from floorplan.layers.geometry import conv, pad


class _Frozen(ConvAdapter):
    """A frozen conv with two trained factors."""

    def __init__(self, geometry: dict[str, Any], weight: list[int], rank: int, scale: float, bias: bool) -> None:
        super().__init__(geometry, weight, rank, scale, bias)
        a, b = self.shapes(weight, rank, self.geo.groups)
        self.A, self.B = nn.Parameter(torch.zeros(a)), nn.Parameter(torch.zeros(b))

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """Shapes of A and B for a weight (O, I/g, *k)."""
        raise NotImplementedError

    def axes(self) -> dict[str, tuple[int, set[int]]]:
        """Tensor -> its rank axis and its width axes."""
        return {}

    def start(self, generator: torch.Generator) -> None:
        """A as nn.Conv2d is initialised, B = 0: the model starts as its source."""
        with torch.no_grad():
            self.A.copy_(as_conv_starts(self.A.shape, generator))
            self.B.zero_()

    def delta(self) -> Tensor:
        """What the factors add to the weight, (O, I/g, *k)."""
        raise NotImplementedError

    def merged(self) -> Tensor:
        """The plain weight that computes the same."""
        return (self.weight + self.delta()).detach()

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, *spatial) -> (B, O, *spatial')."""
        if x.dim() == len(self.geo.kernel) + 1:
            return self.forward(x[None])[0]
        w = self.weight + self.delta()
        return conv(pad(x, self.geo), w, self.bias, self.geo, self.geo.groups)


class LoraC(_Frozen):
    """LoRA-C in the MemFLoRA paper's form; 1-D and 2-D ungrouped convs (kh = 1 in 1-D)."""

    def axes(self) -> dict[str, tuple[int, set[int]]]:
        """Tensor -> its rank axis and its width axes."""
        return {"A": (0, {1}), "B": (2, {0})}

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """A (r, I, kw), B (O, kh, r)."""
        kh = w[2] if len(w) == 4 else 1
        return [r, w[1], w[-1]], [w[0], kh, r]

    def delta(self) -> Tensor:
        """scale * sum_a B[o,h,a] A[a,i,w]."""
        o, kh, r = self.B.shape
        _, i, kw = self.A.shape
        flat = self.B.reshape(o * kh, r) @ self.A.reshape(r, i * kw)
        return self.scale * flat.view(o, kh, i, kw).transpose(1, 2).reshape(self.weight.shape)


class LoraCOfficial(_Frozen):
    """LoRA-C as published: one matrix product, viewed as the kernel; square kernels, any groups."""

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """A (r*k, I*k), B ((O/g)*k^(dims-1), r*k), I all input channels; 1-D: k counts once."""
        k, dims = w[2], len(w) - 2
        inputs = w[1] * g
        return [r * k, inputs * k], [w[0] // g * k ** (dims - 1), r * k]

    def delta(self) -> Tensor:
        """scale * view(B @ A); mixes input channel and kernel row, as loralib does."""
        return self.scale * (self.B @ self.A).view(self.weight.shape)


class SideConv(_Frozen):
    """peft's LoRA on a conv: a conv of r channels with the layer's geometry, then a 1x1 conv."""

    def axes(self) -> dict[str, tuple[int, set[int]]]:
        """Tensor -> its rank axis and its width axes."""
        return {"A": (0, {1}), "B": (1, {0})} if self.geo.groups == 1 else {"B": (1, {0})}

    @staticmethod
    def shapes(w: list[int], r: int, g: int) -> tuple[list[int], list[int]]:
        """A (g*r, I/g, *k), B (O, r, 1…): grouped as the layer is, so that it merges exactly."""
        return [g * r, *w[1:]], [w[0], r, *[1] * (len(w) - 2)]

    def delta(self) -> Tensor:
        """scale * sum_r B[o,r] A[r], group by group."""
        g, r, w = self.geo.groups, self.rank, self.weight
        down, up = self.A.reshape(g, r, -1), self.B.reshape(g, w.shape[0] // g, r)
        return self.scale * torch.bmm(up, down).view(w.shape)

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, *spatial) -> (B, O, *spatial')."""
        if x.dim() == len(self.geo.kernel) + 1:
            return self.forward(x[None])[0]
        x, g, n = pad(x, self.geo), self.geo.groups, len(self.geo.kernel)
        one, none = [1] * n, [0] * n
        y = conv(x, self.weight, self.bias, self.geo, g)
        z = conv(x, self.A, None, self.geo, g)
        return y + self.scale * torch.convolution(z, self.B, None, one, none, one, False, none, g)
