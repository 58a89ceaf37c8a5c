"""The algebra of an adapter U o P, written for few and small temporaries.

    (U o P)[o, i, k] = sum_r U[o, r, k] P[r, i]        conv(P x, U) = conv(x, U o P)

Shapes as in FusedConv: P (g, r, I/g); U (O, r, *k), transposed (g, r, O/g, *k).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from floorplan.layers.bits import layout_of
from floorplan.layers.geometry import Geometry, conv1x1, conv_weight_grad, input_grad, pad


def scaled(t: Tensor, scale: Tensor | None, geo: Geometry) -> Tensor:
    """t, shaped like U, times the folded BatchNorm's factor of each output channel."""
    if scale is None:
        return t
    channels = [geo.groups, 1, -1] if geo.transposed else [-1, 1]
    return t * scale.to(t.dtype).reshape(*channels, *[1] * len(geo.kernel))


def merge(w: Tensor, u: Tensor, p: Tensor, scale: Tensor | None, geo: Geometry) -> Tensor:
    """w + scale*(U o P): one tensor like w, in the wider dtype of w and U."""
    dtype = torch.promote_types(w.dtype, u.dtype)
    w, u, p = w.to(dtype), scaled(u.to(dtype), scale, geo), p.to(dtype)
    g, r = geo.groups, p.shape[1]
    if geo.transposed:
        rows = w.reshape(g, w.shape[0] // g, -1)
        return torch.baddbmm(rows, p.transpose(1, 2), u.reshape(g, r, -1)).view(w.shape)
    if math.prod(geo.kernel) == 1:
        return torch.baddbmm(w.reshape(g, -1, w.shape[1]), u.reshape(g, -1, r), p).view(w.shape)
    rows = p[:, None].expand(g, w.shape[0] // g, r, w.shape[1]).reshape(w.shape[0], r, w.shape[1])
    if layout_of(w):  # the conv that reads it returns the layout of its weight
        flat = torch.baddbmm(w.movedim(1, -1).flatten(1, -2), u.flatten(2).transpose(1, 2), rows)
        return flat.view(w.shape[0], *geo.kernel, w.shape[1]).movedim(-1, 1)
    return torch.baddbmm(w.flatten(2), rows.transpose(1, 2), u.flatten(2)).view(w.shape)


def times(m: Tensor, x: Tensor) -> Tensor:
    """A 1x1 conv as a matrix product: with so few channels a conv would spend its time on laying x out."""
    y = torch.bmm(m.expand(x.shape[0], *m.shape), x.flatten(2))
    return y.view(x.shape[0], m.shape[0], *x.shape[2:])


def project(x: Tensor, p: Tensor, geo: Geometry) -> Tensor:
    """q = conv1x1(x, P): (B, g*r, *spatial), at the sampled positions only where it can be."""
    p = p.to(x.dtype)
    if geo.groups == 1 and not geo.sampled:
        return times(p[0], x)
    return conv1x1(sampled(x, geo), p.flatten(0, 1), geo.groups)


def sampled(x: Tensor, geo: Geometry) -> Tensor:
    """The positions of x that a strided 1x1 conv reads, a view; x itself for any other conv."""
    if not geo.sampled:
        return x
    return x[(slice(None), slice(None), *(slice(None, None, s) for s in geo.stride))]


def up_geometry(geo: Geometry) -> Geometry:
    """The geometry by which U reads q."""
    return replace(geo, stride=(1,) * len(geo.kernel)) if geo.sampled else geo


def project_grad(x: Tensor, gq: Tensor, p: Tensor, geo: Geometry) -> Tensor:
    """Gradient of P: <gq, x> over batch and positions, in P's shape and dtype (MemFLoRA eq. 12)."""
    x = sampled(x, geo)
    n, (g, r, i) = x.shape[0], p.shape
    rows = gq.reshape(n * g, r, -1)
    each = torch.bmm(rows, x.to(gq.dtype).reshape(n * g, i, -1).transpose(1, 2))
    return each.view(n, g, r, i).sum(0).to(p.dtype)


def q_grad(g: Tensor, q: Tensor, u: Tensor, scale: Tensor | None, geo: Geometry) -> Tensor:
    """dL/dq from the gradient behind the conv: r channels a group, at q's resolution."""
    geo, w = up_geometry(geo), scaled(u.to(g.dtype), scale, geo)
    w = w.flatten(0, 1) if geo.transposed else w
    return input_grad(g, w, q.shape, geo, geo.groups)


def up_grad(g: Tensor, q: Tensor, u: Tensor, scale: Tensor | None, geo: Geometry) -> Tensor:
    """Gradient of U: scale * conv_weight_grad(q, g), in U's shape and dtype."""
    geo, groups = up_geometry(geo), geo.groups
    if geo.pointwise and g.dtype in (torch.float32, torch.float64):
        n, positions = g.shape[0] * groups, math.prod(g.shape[2:])
        gt = g.reshape(n, g.shape[1] // groups, positions).transpose(1, 2)
        each = torch.bmm(q.reshape(n, q.shape[1] // groups, positions), gt)
        gu = each.view(g.shape[0], groups, *each.shape[1:]).sum(0)  # (g, r, O/g)
        gu = gu if geo.transposed else gu.transpose(1, 2).contiguous()
    else:
        w = u.to(g.dtype)
        gu = conv_weight_grad(g, pad(q, geo), w.flatten(0, 1) if geo.transposed else w, geo, groups)
    return scaled(gu.view(u.shape), scale, geo).to(u.dtype)


def _orthonormal(draw: Tensor) -> Tensor:
    """(g, r, I) normal -> rows orthonormal in each group, uniformly so; r at most I."""
    q, r = torch.linalg.qr(draw.transpose(1, 2))
    rows: Tensor = (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).transpose(1, 2)
    return rows


# How P comes from a normal draw (g, r, I/g): N(0, 1/r), orthonormal rows, and these at N's expected length.
PROJECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda t: t / math.sqrt(t.shape[1]),
    "orthogonal": _orthonormal,
    "orthogonal-matched": lambda t: _orthonormal(t) * math.sqrt(t.shape[2] / t.shape[1]),
}
