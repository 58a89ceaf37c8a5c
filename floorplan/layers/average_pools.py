"""Average pools that keep shapes only.

    y = mean over windows of x      linear: the gradient needs g and the shape of x

torch's own average pools keep x, of which their backward reads nothing but the shape.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from floorplan.layers.bits import layout_of
from floorplan.layers.layer import Layer
from floorplan.torch_doors import ADAPTIVE_BACKWARD, applied

aten = torch.ops.aten
AVG_POOLS: tuple[type[nn.Module], ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_AVG_POOLS: tuple[type[nn.Module], ...] = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


def each_dim(pool: Any, *names: str) -> list[list[Any]]:
    """Attributes of an nn pool, with one value a spatial dimension."""
    dims, values = int(type(pool).__name__[-2]), (getattr(pool, name) for name in names)
    return [list(v) if isinstance(v, Sequence) else [v] * dims for v in values]


def one_high(x: Tensor, dims: int) -> Tensor:
    """A 1-d map as a 2-d map one row high; others as they are."""
    return x.unsqueeze(-2) if dims == 1 else x


def _stand_in(g: Tensor, shape: Sequence[int], layout: int) -> Tensor:
    """A tensor of `shape` for an op that reads only its shape and memory format.

    One element if it can be: zero strides cannot tell a channels_last format.
    """
    if not layout:
        return g.new_empty(1).expand(shape)
    return torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)


class ShapeAvgPool(Layer):
    """Average pooling of (B, C, *spatial) or (C, *spatial) that keeps nothing but shapes."""

    stored = "floorplan.compact_means.ShapeAvgPool"
    pillar = "pooling"

    def __init__(
        self,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__()
        self.dims = len(kernel)
        self.kernel, self.stride, self.padding = list(kernel), list(stride), list(padding)
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad
        self.divisor_override = divisor_override

    @classmethod
    def of(cls, m: Any) -> "ShapeAvgPool":
        """The compact twin of an nn.AvgPool."""
        kernel, stride, padding = each_dim(m, "kernel_size", "stride", "padding")
        divisor = getattr(m, "divisor_override", None)
        return cls(kernel, stride, padding, m.ceil_mode, m.count_include_pad, divisor).train(m.training)

    def plain_form(self) -> nn.Module:
        options = {} if self.dims == 1 else {"divisor_override": self.divisor_override}
        window = (tuple(t) for t in (self.kernel, self.stride, self.padding))
        kind: Any = AVG_POOLS[self.dims - 1]
        return kind(*window, self.ceil_mode, self.count_include_pad, **options)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}, padding={self.padding}"

    def forward(self, x: Tensor) -> Tensor:
        """The mean of each window."""
        one, zero = ([1], [0]) if self.dims == 1 else ([], [])
        window = (one + self.kernel, one + self.stride, zero + self.padding)
        options = (self.ceil_mode, self.count_include_pad, self.divisor_override)
        y = applied(_AvgPool, one_high(x, self.dims), *window, *options)
        return y.squeeze(-2) if self.dims == 1 else y


class _AvgPool(torch.autograd.Function):
    """Average pooling that keeps the input's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        ctx.shape, ctx.layout, ctx.window = x.shape, layout_of(x), window
        return (F.avg_pool2d if len(window[0]) == 2 else F.avg_pool3d)(x, *window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dims = len(ctx.window[0])
        op = aten.avg_pool2d_backward if dims == 2 else aten.avg_pool3d_backward
        layout = ctx.layout if dims == 2 else 0  # torch pools volumes contiguously
        like = _stand_in(g, ctx.shape, layout)
        if layout:  # the op reads no more of it than the shape: let it write there
            gx = op.grad_input(g, like, *ctx.window, grad_input=like)
        else:
            gx = op(g, like, *ctx.window)
        return gx, *[None] * len(ctx.window)


class ShapeAdaptiveAvgPool(Layer):
    """Adaptive average pooling of (B, C, *spatial) to `output`, keeping nothing but shapes."""

    stored = "floorplan.compact_means.ShapeAdaptiveAvgPool"
    pillar = "pooling"

    def __init__(self, output: list[int | None]) -> None:
        super().__init__()
        self.output, self.dims = list(output), len(output)

    @classmethod
    def of(cls, m: Any) -> "ShapeAdaptiveAvgPool":
        """The compact twin of an nn.AdaptiveAvgPool."""
        (output,) = each_dim(m, "output_size")
        return cls(output).train(m.training)

    def plain_form(self) -> nn.Module:
        return cast(Any, ADAPTIVE_AVG_POOLS[self.dims - 1])(tuple(self.output))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"output={self.output}"

    def forward(self, x: Tensor) -> Tensor:
        """The means of output[0] x output[1] x ... windows."""
        if all(n == 1 for n in self.output):  # torch takes a mean, which keeps only shapes
            pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
            return pool[self.dims - 1](x, self.output)  # type: ignore[arg-type]
        size = [x.shape[i - self.dims] if n is None else n for i, n in enumerate(self.output)]
        size = [1, *size] if self.dims == 1 else size
        y = applied(_AdaptiveAvgPool, one_high(x, self.dims), size)
        return y.squeeze(-2) if self.dims == 1 else y


class _AdaptiveAvgPool(torch.autograd.Function):
    """Adaptive average pooling that keeps the input's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: list[int]) -> Tensor:
        ctx.shape, ctx.layout, ctx.dims = x.shape, layout_of(x), len(size)
        return (F.adaptive_avg_pool2d if len(size) == 2 else F.adaptive_avg_pool3d)(x, size)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        like = _stand_in(g, ctx.shape, ctx.layout if ctx.dims == 2 else 0)
        return ADAPTIVE_BACKWARD[ctx.dims](g, like), None
