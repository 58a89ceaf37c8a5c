"""Pools that keep offsets inside their windows, or shapes alone; which pools have such a twin.

    y = max over windows of x       keeps the offset inside each window: 1, 2, 4 or 8 bits
    y = mean over windows of x      linear: the gradient needs g and the shape of x

torch's own max pools keep x and an int64 index an output; its average pools keep x, of which their backward
reads nothing but the shape.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.layers.bits import layout_of
from floorplan.layers.functions import CompactFunction, call, learns
from floorplan.layers.layer import Layer
from floorplan.layers.windows import aten, max_pool, max_pool_backward
from floorplan.torch_doors import ADAPTIVE_BACKWARD, transformed

MAX_POOLS: tuple[type[nn.Module], ...] = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVG_POOLS: tuple[type[nn.Module], ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE_AVG_POOLS: tuple[type[nn.Module], ...] = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_PADDING = 2  # its place in a window: kernel, stride, padding, dilation
_UNEQUAL = "its windows differ in size with the input's; use a MaxPool with a fixed kernel"
_RANDOM = "its windows are drawn at random; use a MaxPool with a fixed kernel"
_NOT_MAX = "it is neither a maximum nor a mean; use MaxPool or AvgPool"
REFUSED: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), _UNEQUAL),
    **dict.fromkeys((nn.FractionalMaxPool2d, nn.FractionalMaxPool3d), _RANDOM),
    **dict.fromkeys((nn.LPPool1d, nn.LPPool2d, nn.LPPool3d), _NOT_MAX),
}


def compact_pool(pool: Any) -> Layer | str | None:
    """The compact twin of a pool, or why it has none; None for what is no pool."""
    kind = type(pool)
    twin: Layer | None = None
    if kind in REFUSED:
        return f"{kind.__name__} cannot be packed, {REFUSED[kind]}"
    if kind in MAX_POOLS:
        if pool.return_indices:
            return f"{kind.__name__} returns its indices, which are int64; set return_indices=False"
        kernel, stride, padding, dilation = _each_dim(pool, "kernel_size", "stride", "padding", "dilation")
        if (positions := math.prod(kernel)) > 256:
            return f"{kind.__name__} has {positions} window positions, more than 256; use a smaller kernel"
        twin = PackedMaxPool(kernel, stride, padding, dilation, pool.ceil_mode)
    if kind in AVG_POOLS:
        kernel, stride, padding = _each_dim(pool, "kernel_size", "stride", "padding")
        divisor = getattr(pool, "divisor_override", None)  # the 1-d one has none
        twin = ShapeAvgPool(kernel, stride, padding, pool.ceil_mode, pool.count_include_pad, divisor)
    if kind in ADAPTIVE_AVG_POOLS:
        twin = ShapeAdaptiveAvgPool(*_each_dim(pool, "output_size"))
    return None if twin is None else twin.train(pool.training)


def _each_dim(pool: Any, *names: str) -> list[Any]:
    """Attributes of an nn pool, with one value a spatial dimension."""
    dims, values = int(type(pool).__name__[-2]), (getattr(pool, name) for name in names)
    return [list(v) if isinstance(v, Sequence) else [v] * dims for v in values]


def _pooled(function: type[CompactFunction], x: Tensor, window: Sequence[list[int]], *options: Any) -> Tensor:
    """function(x, *window, *options); a 1-d map, which has no kernels of its own, goes as a 2-d map one row high."""
    if len(window[0]) > 1:
        return call(function, x, *window, *options)
    one_high = [[0 if i == _PADDING else 1, *values] for i, values in enumerate(window)]
    return call(function, x.unsqueeze(-2), *one_high, *options).squeeze(-2)


class _Pool(Layer):
    """Pooling of (B, C, *spatial) or (C, *spatial) by a window, one number a dimension."""

    pillar = "pooling"

    def __init__(self, kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool) -> None:
        super().__init__()
        self.dims = len(kernel)
        self.kernel, self.stride, self.padding = list(kernel), list(stride), list(padding)
        self.ceil_mode = ceil_mode

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, stride={self.stride}, padding={self.padding}"


class PackedMaxPool(_Pool):
    """Max pooling that keeps packed window offsets."""

    stored = "floorplan.compact_pools.PackedMaxPool"

    def __init__(
        self, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool = False
    ) -> None:
        super().__init__(kernel, stride, padding, ceil_mode)
        if math.prod(kernel) > 256:
            raise ValueError(f"PackedMaxPool: {kernel} has over 256 positions; use a smaller kernel")
        self.dilation = list(dilation)

    @property
    def packed_bits(self) -> float:
        return float(_fewest_bits(self.kernel))

    def plain_form(self) -> nn.Module:
        window = (tuple(t) for t in (self.kernel, self.stride, self.padding, self.dilation))
        return cast(Any, MAX_POOLS[self.dims - 1])(*window, False, self.ceil_mode)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """The maximum of each window; torch's choice among equals."""
        if not learns(x):
            pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[self.dims - 1]
            return pool(x, self.kernel, self.stride, self.padding, self.dilation, ceil_mode=self.ceil_mode)
        if x.dim() == self.dims + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        return _pooled(_MaxPool, x, (self.kernel, self.stride, self.padding, self.dilation), self.ceil_mode)


def _fewest_bits(kernel: Sequence[int]) -> int:
    return next(b for b in (1, 2, 4, 8) if math.prod(kernel) <= 1 << b)


class _MaxPool(CompactFunction):
    """Max pooling that keeps packed offsets and the input's shape."""

    layer = "PackedMaxPool"

    @staticmethod
    def formula(x: Tensor, *window: Any) -> Tensor:
        y: Tensor = (F.max_pool2d if len(window[0]) == 2 else F.max_pool3d)(x, *window)
        return y

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        ctx.window = (*window, _fewest_bits(window[0]))
        ctx.shape, ctx.layout = x.shape, layout_of(x)
        y: Tensor
        y, packed = max_pool(x, *ctx.window)
        ctx.save_for_backward(packed)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        gx = max_pool_backward(g, packed, ctx.shape, ctx.layout, *ctx.window)
        return gx, *[None] * len(ctx.window[:-1])


class ShapeAvgPool(_Pool):
    """Average pooling that keeps nothing but shapes."""

    stored = "floorplan.compact_means.ShapeAvgPool"

    def __init__(
        self,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__(kernel, stride, padding, ceil_mode)
        self.count_include_pad, self.divisor_override = count_include_pad, divisor_override

    def plain_form(self) -> nn.Module:
        options = {} if self.dims == 1 else {"divisor_override": self.divisor_override}
        window = (tuple(t) for t in (self.kernel, self.stride, self.padding))
        kind: Any = AVG_POOLS[self.dims - 1]
        return kind(*window, self.ceil_mode, self.count_include_pad, **options)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """The mean of each window."""
        options = (self.ceil_mode, self.count_include_pad, self.divisor_override)
        return _pooled(_AvgPool, x, (self.kernel, self.stride, self.padding), *options)


class _AvgPool(CompactFunction):
    """Average pooling that keeps the input's shape."""

    layer = "ShapeAvgPool"

    @staticmethod
    def formula(x: Tensor, *window: Any) -> Tensor:
        return (F.avg_pool2d if len(window[0]) == 2 else F.avg_pool3d)(x, *window)

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        ctx.shape, ctx.layout, ctx.window = x.shape, layout_of(x), window
        return _AvgPool.formula(x, *window)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dims = len(ctx.window[0])
        op = aten.avg_pool2d_backward if dims == 2 else aten.avg_pool3d_backward
        layout = 0 if dims == 3 or transformed() else ctx.layout  # torch pools volumes contiguously
        like = _stand_in(g, ctx.shape, layout)
        # The op reads no more of it than the shape: let it write there.
        gx = op.grad_input(g, like, *ctx.window, grad_input=like) if layout else op(g, like, *ctx.window)
        return gx, *[None] * len(ctx.window)


def _stand_in(g: Tensor, shape: Sequence[int], layout: int) -> Tensor:
    """A tensor of `shape` for an op that reads only its shape and memory format.

    One element if it can be: zero strides cannot tell a channels_last format.
    """
    if not layout:
        return g.new_empty(1).expand(shape)
    return torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)


class ShapeAdaptiveAvgPool(Layer):
    """Adaptive average pooling of (B, C, *spatial) to `output`, keeping nothing but shapes."""

    stored = "floorplan.compact_means.ShapeAdaptiveAvgPool"
    pillar = "pooling"

    def __init__(self, output: list[int | None]) -> None:
        super().__init__()
        self.output, self.dims = list(output), len(output)

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
        return _pooled(_AdaptiveAvgPool, x, [size])


class _AdaptiveAvgPool(CompactFunction):
    """Adaptive average pooling that keeps the input's shape."""

    layer = "ShapeAdaptiveAvgPool"

    @staticmethod
    def formula(x: Tensor, size: list[int]) -> Tensor:
        return (F.adaptive_avg_pool2d if len(size) == 2 else F.adaptive_avg_pool3d)(x, size)  # type: ignore[arg-type]

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: list[int]) -> Tensor:
        ctx.shape, ctx.layout, ctx.dims = x.shape, layout_of(x), len(size)
        return _AdaptiveAvgPool.formula(x, size)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        like = _stand_in(g, ctx.shape, ctx.layout if ctx.dims == 2 else 0)
        return ADAPTIVE_BACKWARD[ctx.dims](g, like), None
