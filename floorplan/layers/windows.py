"""Max pooling whose index map is packed: custom ops, a few samples at a time.

    max_pool            x -> y, offsets of the maxima inside their windows
    max_pool_backward   g, offsets -> gradient of x

The offset of window position (k0, k1, ...) is k0*K1*K2... + k1*K2... + ..., in the output's logical
order. torch's own kernels choose the maxima and accumulate the gradients, so ties, NaN and padding
are theirs.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from floorplan.layers.bits import bytes_for, empty_like_map, pack_fields, unpack_fields
from floorplan.layers.functions import by_sample

aten = torch.ops.aten
CHUNK = 1 << 16  # outputs at a time, one sample at least: 2 MB of temporaries


def _chunks(samples: int, each: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(each, 1))
    for i in range(0, samples, step):
        yield slice(i, min(i + step, samples))


def _window(i: int, size: int, window: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """First input coordinate of every window along spatial axis i, shaped to broadcast."""
    _, stride, padding, _ = window
    start = torch.arange(size, device=like.device, dtype=like.dtype) * stride[i] - padding[i]
    return start.view(-1, *[1] * (len(stride) - 1 - i))


def _offsets(index: Tensor, space: Sequence[int], window: Sequence[Sequence[int]]) -> Tensor:
    """Flat input indices (n, C, *out) -> uint8 offsets inside the windows."""
    kernel, _, _, dilation = window
    index = index.int() if math.prod(space) < 1 << 31 else index
    offset, scale = torch.zeros_like(index), 1
    for i in reversed(range(len(space))):
        rest = torch.div(index, space[i], rounding_mode="floor")
        at = (index - rest * space[i]).sub_(_window(i, index.shape[2 + i], window, index))
        at = at if dilation[i] == 1 else at.div_(dilation[i], rounding_mode="floor")
        offset.add_(at, alpha=scale)
        index, scale = rest, scale * kernel[i]
    return offset.to(torch.uint8)


def _indices(offset: Tensor, space: Sequence[int], window: Sequence[Sequence[int]]) -> Tensor:
    """The inverse of _offsets: uint8 (n, C, *out) -> flat input indices, int64."""
    kernel, _, _, dilation = window
    table = torch.zeros(1, dtype=torch.int64, device=offset.device)
    base, scale = table, 1
    for i in reversed(range(len(space))):
        steps = torch.arange(kernel[i], device=offset.device) * dilation[i] * scale
        table = (steps[:, None] + table).view(-1)
        base = base + _window(i, offset.shape[2 + i], window, table) * scale
        scale = scale * space[i]
    return table.index_select(0, offset.reshape(-1).int()).view(offset.shape).add_(base)


@torch.library.custom_op("floorplan::max_pool", mutates_args=())
def max_pool(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool, bits: int
) -> tuple[Tensor, Tensor]:
    """x (B, C, [D,] H, W) -> y, packed offsets of `bits` bits (ceil(y.numel()*bits/8),)."""
    x, window = x.detach(), (kernel, stride, padding, dilation)
    pool = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    shape = pool(x[:1].to("meta"), *window, ceil_mode)[0].shape
    y = empty_like_map(x, (x.shape[0], *shape[1:]))
    packed = bytes_for(y.numel(), bits, x.device)
    left, at = packed[:0], 0
    for part in _chunks(x.shape[0], math.prod(shape)):
        y[part], index = pool(x[part], *window, ceil_mode)
        left = torch.cat([left, _offsets(index, x.shape[2:], window).reshape(-1)])
        last = part.stop == x.shape[0]
        whole = left.numel() if last else left.numel() // 8 * 8  # the rest would straddle a byte
        piece = pack_fields(left[:whole], bits)
        packed[at : at + piece.numel()] = piece
        left, at = left[whole:], at + piece.numel()
    return y, packed


@max_pool.register_fake
def _(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    pool = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    y = empty_like_map(x, pool(x, *window[:-1])[0].shape)
    return y, bytes_for(y.numel(), window[-1], x.device)


@torch.library.custom_op("floorplan::max_pool_backward", mutates_args=())
def max_pool_backward(
    g: Tensor,
    packed: Tensor,
    shape: list[int],
    layout: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    bits: int,
) -> Tensor:
    """g like y of max_pool, its packed offsets -> gradient of x (shape, memory format `layout`)."""
    g, window = g.detach(), (kernel, stride, padding, dilation)
    op = aten.max_pool2d_with_indices_backward if g.dim() == 4 else aten.max_pool3d_with_indices_backward
    gx = empty_like_map(g, shape, layout)
    each = math.prod(g.shape[1:])
    for part in _chunks(g.shape[0], each):
        here = g[part]
        first = part.start * each * bits
        piece = packed[first // 8 : (first + here.numel() * bits + 7) // 8]
        skip = first % 8 // bits
        offset = unpack_fields(piece, skip + here.numel(), bits)[skip:].view(here.shape)
        index = _indices(offset, shape[2:], window)
        # the op reads no more of its input than the shape: its output can stand for it
        op.grad_input(here, gx[part], *window, ceil_mode, index, grad_input=gx[part])
    return gx


@max_pool_backward.register_fake
def _(g: Tensor, packed: Tensor, shape: list[int], layout: int, *window: Any) -> Tensor:
    return empty_like_map(g, shape, layout)


by_sample(max_pool, max_pool_backward)
