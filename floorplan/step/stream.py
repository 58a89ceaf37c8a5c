"""Channel streaming: an inverted residual in groups of hidden channels, whose wide maps never exist.

    for hidden channels j, c at a time           e: 1x1 conv    d: depthwise conv    p: 1x1 conv
        h = act(conv_d(act(conv_e(x))[j]))       one bit an element of both kept
        y += W_p[:, j] h                         q_p += P_p[:, j] h

A depthwise conv needs no other channel, so nothing is computed twice.
"""

from typing import Any, cast

import torch
from torch import Tensor

from floorplan.layers.bits import empty_like_map, layout_of
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import conv, conv_input_grad, conv_weight_grad, pad, padded_size, unpad
from floorplan.layers.lowrank import scaled
from floorplan.step.ops import accumulate, add_product_, bottleneck, gate_, rows, trains, ungate_, up_gradient, weight

Maybe = Tensor | None
Kept = tuple[Maybe, Maybe, list[Any]]
Shape = tuple[int, ...]


def _groups(channels: int, c: int) -> list[slice]:
    return [slice(i, min(i + c, channels)) for i in range(0, channels, c)]


def _product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The 1x1 conv of x by the matrix w (O, I), in x's layout."""
    if layout_of(x):
        flat = torch.mm(rows(x), w.t()) if b is None else torch.addmm(b, rows(x), w.t())
        return flat.view(x.shape[0], *x.shape[2:], -1).movedim(-1, 1)
    n = x.dim() - 2
    one, none = [1] * n, [0] * n
    return torch.convolution(x, w.reshape(*w.shape, *one), b, one, none, one, False, none, 1)


def _filled(like: Tensor, channels: int, b: Tensor | None) -> Tensor:
    """A map of like's positions and layout with b, or 0, in every channel."""
    y = empty_like_map(like, (like.shape[0], channels, *like.shape[2:]))
    return y.zero_() if b is None else y.copy_(b.reshape(-1, *[1] * (y.dim() - 2)).expand(y.shape))


def _closed(h: Tensor, s: FusedConv) -> Any:
    """h through a site's activation in place, and its gate."""
    return None if s.act is None else gate_(h, s)


def _part(t: Tensor | None, j: slice) -> Tensor | None:
    return None if t is None else t[j]


def stream(x: Tensor, e: FusedConv, d: FusedConv, p: FusedConv, c: int) -> tuple[Tensor, Kept]:
    """The three convs of an inverted residual, p's skip and activation apart, and what their backward needs."""
    we, wp = weight(e, False).flatten(1), weight(p, False).flatten(1)
    q1 = bottleneck(x, e) if trains(e) else None
    y: Maybe = None
    q3: Maybe = None
    bits = []
    for j in _groups(we.shape[0], c):
        h = _product(x, we[j], _part(e.bias, j))
        first = _closed(h, e)
        h = conv(pad(h, d.geo), d.weight[j], _part(d.bias, j), d.geo, j.stop - j.start)
        bits.append((first, _closed(h, d)))
        if y is None:
            y = _filled(h, wp.shape[0], p.bias)
            q3 = _filled(h, p.rank, None) if trains(p) else None
        if q3 is not None:
            add_product_(q3, h, cast(Tensor, p.P)[0][:, j])
        add_product_(y, h, wp[:, j])
    return cast(Tensor, y), (q1, q3, bits)


def streamed(x: Tensor, e: FusedConv, d: FusedConv, p: FusedConv, c: int) -> Tensor:
    """The same where nothing has to be kept."""
    return stream(x, e, d, p, c)[0]


def stream_grad(
    g: Tensor, kept: Kept, e: FusedConv, d: FusedConv, p: FusedConv, c: int, shape: Shape | None, into: Maybe = None
) -> Maybe:
    """Gradients of both U, and gx added into `into` or into zeros; no gx where shape is None."""
    q1, q3, bits = kept
    we, wp = weight(e, False).flatten(1), weight(p, False).flatten(1)
    if q3 is not None:
        accumulate(cast(Tensor, p.U), up_gradient(g, q3, p))
    gx = into
    if gx is None and shape is not None:
        gx = empty_like_map(g, shape).zero_()
    gu = None if q1 is None else torch.empty_like(cast(Tensor, e.U))
    if gu is None and gx is None:
        return None
    groups = _groups(we.shape[0], c)
    x_shape = (q1 if q1 is not None else cast(Tensor, gx)).shape
    while bits:
        j, (first, second) = groups.pop(), bits.pop()
        gd = _product(g, wp[:, j].t(), None)
        gd = gd if second is None else ungate_(gd, second, d.gate)
        n = j.stop - j.start
        size = padded_size((x_shape[0], n, *x_shape[2:]), d.geo)
        gh = unpad(conv_input_grad(gd, d.weight[j], size, d.geo, n), d.geo)
        del gd
        gh = gh if first is None else ungate_(gh, first, e.gate)
        if gu is not None and q1 is not None:
            gu[j] = conv_weight_grad(gh, q1, gu[j], e.geo, 1)
        if gx is not None:
            add_product_(gx, gh, we[j].t())
        del gh
    if gu is not None:
        accumulate(cast(Tensor, e.U), scaled(gu, e.scale, e.geo))
    return gx


def streams(e: Any, d: Any, p: Any) -> bool:
    """Whether three modules are an inverted residual that can be streamed."""
    if not all(type(m) is FusedConv for m in (e, d, p)):
        return False
    narrow = all(m.geo.pointwise and m.geo.groups == 1 and not m.geo.transposed for m in (e, p))
    deep = d.geo.groups == d.in_channels == d.out_channels > 1 and not d.geo.transposed and not d.rank
    return bool(narrow and deep)


__all__ = ["stream", "stream_grad", "streamed", "streams"]
