"""Convolution geometry: one description for 1-D, 2-D, 3-D and transposed convs, and its maps.

    z = conv(pad(x), W) + b          W (O, I/g, *k), transposed: (I, O/g, *k)

Everything here is linear in x, so each map has an exact adjoint written beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.layers.functions import CompactFunction, call, learns

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Geometry:
    """Where a convolution reads; `padding` is (before, after) for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pads
    mode: str  # zeros, reflect, replicate, circular
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def native(self) -> bool:
        """Whether the conv kernel can pad by itself, or need not pad."""
        return not self.pads or self.mode == "zeros" and all(lo == hi for lo, hi in self.padding)

    @property
    def pads(self) -> bool:
        """Whether it pads at all."""
        return any(p != (0, 0) for p in self.padding)

    @property
    def pointwise(self) -> bool:
        """Whether each output position reads the input position of the same number."""
        return {*self.kernel, *self.stride} == {1} and not self.pads and not any(self.output_padding)

    @property
    def sampled(self) -> bool:
        """A strided 1x1 conv reads only every stride-th position: nothing else is worth keeping."""
        return not self.transposed and set(self.kernel) == {1} and not self.pads and set(self.stride) != {1}

    def config(self) -> dict[str, Any]:
        """Plain data from which `Geometry.of` rebuilds this."""
        data = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}
        return data | {"padding": [list(p) for p in self.padding]}

    @staticmethod
    def of(config: dict[str, Any]) -> "Geometry":
        """The inverse of `config`; ValueError for what no convolution has."""
        positive = [*config["kernel"], *config["stride"], *config["dilation"], config["groups"]]
        most = zip(config["output_padding"], config["stride"], config["dilation"], strict=True)
        if any(type(n) is not int or n < 1 for n in positive):
            raise ValueError("kernel, stride, dilation and groups are positive")
        if any(type(n) is not int or not 0 <= n < max(s, d) for n, s, d in most):
            raise ValueError("output_padding is smaller than stride or dilation")
        axes: dict[str, Any] = {k: tuple(config[k]) for k in ("kernel", "stride", "dilation", "output_padding")}
        padding = tuple((int(lo), int(hi)) for lo, hi in config["padding"])
        return Geometry(padding=padding, **axes, **{name: config[name] for name in ("mode", "groups", "transposed")})


def geometry_of(conv: nn.Module) -> Geometry:
    """The geometry of a layer that has one, or of an nn.ConvNd or nn.ConvTransposeNd, string paddings resolved."""
    c: Any = conv
    if isinstance(geo := vars(c).get("geo"), Geometry):
        return geo
    kernel, dilation = tuple(c.kernel_size), tuple(c.dilation)
    if c.padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((t // 2, t - t // 2) for t in total)
    elif c.padding == "valid":
        padding = ((0, 0),) * len(kernel)
    else:
        padding = tuple((p, p) for p in c.padding)
    transposed = isinstance(conv, TRANSPOSED)
    more = tuple(c.output_padding) if transposed else (0,) * len(kernel)
    return Geometry(kernel, tuple(c.stride), padding, c.padding_mode, dilation, c.groups, transposed, more)


def pad(x: Tensor, geo: Geometry) -> Tensor:
    """x with the padding that the conv kernel cannot do by itself."""
    if geo.native:
        return x
    last_first = [p for pair in reversed(geo.padding) for p in pair]
    return F.pad(x, last_first, "constant" if geo.mode == "zeros" else geo.mode)


def conv1x1(x: Tensor, w: Tensor, groups: int = 1) -> Tensor:
    """A conv of kernel 1 by w (O, I/g) or (O, I/g, 1…)."""
    n = x.dim() - 2
    w = w.reshape(*w.shape[:2], *[1] * n)
    return torch.convolution(x, w, None, [1] * n, [0] * n, [1] * n, False, [0] * n, groups)


def padded_size(shape: Sequence[int], geo: Geometry) -> list[int]:
    """Spatial sizes of pad(x, geo) for an x of this shape."""
    if geo.native:
        return list(shape[2:])
    return [n + lo + hi for n, (lo, hi) in zip(shape[2:], geo.padding, strict=True)]


def out_size(shape: Sequence[int], geo: Geometry) -> list[int]:
    """Spatial sizes of the convolution of an x of this shape."""
    sizes = []
    for i, n in enumerate(shape[2:]):
        (lo, hi), k, s, d = geo.padding[i], geo.kernel[i], geo.stride[i], geo.dilation[i]
        if geo.transposed:
            sizes.append((n - 1) * s - lo - hi + d * (k - 1) + 1 + geo.output_padding[i])
        else:
            sizes.append((n + lo + hi - d * (k - 1) - 1) // s + 1)
    return sizes


def unpad(g: Tensor, geo: Geometry) -> Tensor:
    """Adjoint of `pad`: the gradient of the padded map, folded back onto the map."""
    if geo.native:
        return g
    for i, (lo, hi) in enumerate(geo.padding):
        g = _fold_axis(g, g.dim() - len(geo.padding) + i, lo, hi, geo.mode)
    return g


def _fold_axis(g: Tensor, axis: int, lo: int, hi: int, mode: str) -> Tensor:
    if lo == 0 and hi == 0:
        return g
    n = g.shape[axis] - lo - hi
    core = g.narrow(axis, lo, n)
    if mode == "zeros":
        return core
    core = core.clone()
    head, tail = g.narrow(axis, 0, lo), g.narrow(axis, lo + n, hi)
    if mode == "circular":
        core.narrow(axis, n - lo, lo).add_(head)
        core.narrow(axis, 0, hi).add_(tail)
    elif mode == "replicate":
        core.narrow(axis, 0, 1).add_(head.sum(axis, keepdim=True))
        core.narrow(axis, n - 1, 1).add_(tail.sum(axis, keepdim=True))
    else:  # reflect: the edge itself is not repeated
        core.narrow(axis, 1, lo).add_(head.flip(axis))
        core.narrow(axis, n - 1 - hi, hi).add_(tail.flip(axis))
    return core


def _window(geo: Geometry) -> tuple[list[int], list[int], list[int], bool, list[int]]:
    """What torch's kernels take: stride, padding, dilation, transposed, output_padding."""
    padding = [lo for lo, _ in geo.padding] if geo.native else [0] * len(geo.kernel)
    return list(geo.stride), padding, list(geo.dilation), geo.transposed, list(geo.output_padding)


def conv(x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry, groups: int) -> Tensor:
    """The convolution of an already padded x."""
    return torch.convolution(x, w, b, *_window(geo), groups)


def conv_input_grad(g: Tensor, w: Tensor, size: Sequence[int], geo: Geometry, groups: int) -> Tensor:
    """Gradient of the padded input of spatial `size`.

    Taken as a convolution of its own: `convolution_backward` would materialise a stand-in for x.
    """
    stride, padding, dilation, transposed, _ = _window(geo)
    if transposed:
        gx = torch.convolution(g, w, None, stride, padding, dilation, False, [0] * len(size), groups)
        for axis, n in enumerate(size):
            gx = gx if gx.shape[2 + axis] == n else gx.narrow(2 + axis, 0, n)
        return gx
    out = [
        n - ((g.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (k - 1) + 1)
        for i, (n, k) in enumerate(zip(size, geo.kernel, strict=True))
    ]
    return torch.convolution(g, w, None, stride, padding, dilation, True, out, groups)


def conv_weight_grad(g: Tensor, x: Tensor, w: Tensor, geo: Geometry, groups: int) -> Tensor:
    """Gradient of a weight shaped like w, for an already padded x."""
    grads = torch.ops.aten.convolution_backward(g, x, w, None, *_window(geo), groups, [False, True, False])
    return grads[1]  # type: ignore[no-any-return]


def input_grad(g: Tensor, w: Tensor, shape: Sequence[int], geo: Geometry, groups: int) -> Tensor:
    """Gradient of an x of this shape, through the convolution and the padding."""
    return unpad(conv_input_grad(g, w, padded_size(shape, geo), geo, groups), geo)


def bias_grad(g: Tensor) -> Tensor:
    """Gradient of a bias (O,), from that of the result."""
    return g.sum((0, *range(2, g.dim())))


def frozen_conv(x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry) -> Tensor:
    """conv(pad(x), w) + b: keeps nothing of x unless w trains, where torch's conv keeps it."""
    return _Frozen.formula(x, w, b, geo) if learns(w) else call(_Frozen, x, w, b, geo)


class _Frozen(CompactFunction):
    """conv(pad(x), w) + b with gradients of x and b alone."""

    layer = "a frozen conv"

    @staticmethod
    def formula(x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry) -> Tensor:
        return conv(pad(x, geo), w, b, geo, geo.groups)

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geo: Geometry) -> Tensor:
        ctx.geo, ctx.x_shape = geo, x.shape
        ctx.save_for_backward(w)
        return _Frozen.formula(x, w, b, geo)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (w,), geo, gx = ctx.saved_tensors, ctx.geo, None
        gb = bias_grad(g) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            gx = input_grad(g, w, ctx.x_shape, geo, geo.groups)
        return gx, None, gb, None
