"""Max pools that keep offsets inside their windows; which pools have a compact twin.

    y = max over windows of x      keeps the offset inside each window: 1, 2, 4 or 8 bits

torch's own max pools keep x and an int64 index an output.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from floorplan.layers import average_pools
from floorplan.layers.average_pools import each_dim, one_high
from floorplan.layers.bits import layout_of
from floorplan.layers.layer import Layer
from floorplan.layers.windows import max_pool, max_pool_backward
from floorplan.torch_doors import applied

MAX_POOLS: tuple[type[nn.Module], ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_UNEQUAL = "its windows differ in size with the input's; use a MaxPool with a fixed kernel"
_RANDOM = "its windows are drawn at random; use a MaxPool with a fixed kernel"
_NOT_MAX = "it is neither a maximum nor a mean; use MaxPool or AvgPool"
REFUSED: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), _UNEQUAL),
    **dict.fromkeys((nn.FractionalMaxPool2d, nn.FractionalMaxPool3d), _RANDOM),
    **dict.fromkeys((nn.LPPool1d, nn.LPPool2d, nn.LPPool3d), _NOT_MAX),
}


def is_pool(module: nn.Module) -> bool:
    """Whether the tables know this class as a pool."""
    return type(module) in (*MAX_POOLS, *average_pools.AVG_POOLS, *average_pools.ADAPTIVE_AVG_POOLS, *REFUSED)


def pool_refusal(module: nn.Module) -> str:
    """Why there is no compact twin of `module`; "" if there is."""
    kind = type(module)
    if kind in REFUSED:
        return f"{kind.__name__} cannot be packed, {REFUSED[kind]}"
    if kind in MAX_POOLS:
        if getattr(module, "return_indices", False):
            return f"{kind.__name__} returns its indices, which are int64; set return_indices=False"
        positions = math.prod(*each_dim(module, "kernel_size"))
        if positions > 256:
            return f"{kind.__name__} has {positions} window positions, more than 256; use a smaller kernel"
    return "" if is_pool(module) else f"{kind.__name__} is not a pool; nothing to do"


def compact_pool(module: nn.Module) -> nn.Module:
    """The compact twin of a pool; ValueError with the reason if it has none."""
    if why := pool_refusal(module):
        raise ValueError(why)
    if type(module) in MAX_POOLS:
        return PackedMaxPool.of(module)
    if type(module) in average_pools.AVG_POOLS:
        return average_pools.ShapeAvgPool.of(module)
    return average_pools.ShapeAdaptiveAvgPool.of(module)


def fewest_bits(positions: int) -> int:
    return next(b for b in (1, 2, 4, 8) if positions <= 1 << b)


class PackedMaxPool(Layer):
    """Max pooling of (B, C, *spatial) or (C, *spatial) that keeps packed window offsets."""

    stored = "floorplan.compact_pools.PackedMaxPool"
    pillar = "pooling"

    def __init__(
        self, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool = False
    ) -> None:
        super().__init__()
        self.dims = len(kernel)
        if math.prod(kernel) > 256:
            raise ValueError(f"PackedMaxPool: {kernel} has over 256 positions; use a smaller kernel")
        self.kernel, self.stride, self.padding = list(kernel), list(stride), list(padding)
        self.dilation, self.ceil_mode = list(dilation), ceil_mode

    @classmethod
    def of(cls, m: Any) -> "PackedMaxPool":
        """The packed twin of an nn.MaxPool."""
        kernel, stride, padding, dilation = each_dim(m, "kernel_size", "stride", "padding", "dilation")
        return cls(kernel, stride, padding, dilation, m.ceil_mode).train(m.training)

    @property
    def packed_bits(self) -> float:
        return float(fewest_bits(math.prod(self.kernel)))

    def plain_form(self) -> nn.Module:
        window = (tuple(t) for t in (self.kernel, self.stride, self.padding, self.dilation))
        return cast(Any, MAX_POOLS[self.dims - 1])(*window, False, self.ceil_mode)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}, padding={self.padding}"

    def forward(self, x: Tensor) -> Tensor:
        """The maximum of each window; torch's choice among equals."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[self.dims - 1]
            return pool(x, self.kernel, self.stride, self.padding, self.dilation, ceil_mode=self.ceil_mode)
        if x.dim() == self.dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        one, zero = ([1], [0]) if self.dims == 1 else ([], [])
        window = (one + self.kernel, one + self.stride, zero + self.padding, one + self.dilation)
        y = applied(_MaxPool, one_high(x, self.dims), *window, self.ceil_mode)
        return y.squeeze(-2) if self.dims == 1 else y


class _MaxPool(torch.autograd.Function):
    """Max pooling that keeps packed offsets and the input's shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        ctx.window = (*window, fewest_bits(math.prod(window[0])))
        ctx.shape, ctx.layout = x.shape, layout_of(x)
        y: Tensor
        y, packed = max_pool(x, *ctx.window)
        ctx.save_for_backward(packed)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        gx = max_pool_backward(g, packed, ctx.shape, ctx.layout, *ctx.window)
        return gx, *[None] * len(ctx.window[:-1])
