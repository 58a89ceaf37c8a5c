"""What a straight-line training step is made of: few ops on buffers that the step owns.

    conv_site        z = conv(pad(x), W + a*(U o P)) + b        merged, or as two branches added in place
    gate_            z = act(z) in place, one bit an element     ungate_: g = g*bit in place
    input_grad       gx = conv^T(g, W')                          add_input_grad_: the same, added into a buffer
    up_gradient      gU = a*<g, q>

A name ending in _ overwrites its first argument. 1x1 convs are matrix products wherever that saves a
temporary; other sums into a buffer go a few samples at a time.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from floorplan.layers import geometry
from floorplan.layers.activations import Gate, gate_of
from floorplan.layers.bits import apply_gate, apply_gate_, as_layout, dense_in, empty_like_map, layout_of, pack_gate
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import Geometry
from floorplan.layers.lowrank import merge, project, q_grad, sampled, scaled, up_geometry, up_grad
from floorplan.torch_doors import kernel_of

PARTS = 8  # a temporary of a sum into a buffer is an eighth of the map
MORE = 16  # parts of a padded conv, which makes two temporaries


def parts(n: int, most: int = PARTS) -> list[slice]:
    """0..n in at most `most` nearly equal slices: their number must not depend on a large n."""
    k = min(n, most)
    edges = [n * i // k for i in range(k + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def weight(s: FusedConv, branch: bool) -> Tensor:
    """The weight that the frozen conv of a site runs with: merged, or the frozen one alone."""
    if branch or s.U is None or s.P is None:
        return s.weight
    return merge(s.weight, s.U, s.P, s.scale, s.geo)


def trains(s: FusedConv) -> bool:
    """Whether a site has a U that gets a gradient."""
    return s.U is not None and s.U.requires_grad


def is_matrix(s: FusedConv) -> bool:
    """Whether the conv is a matrix product over channels."""
    return s.geo.pointwise and s.geo.groups == 1


def rows(t: Tensor) -> Tensor:
    """A channels_last map (B, C, *spatial) as a matrix (B*positions, C), a view."""
    return t.movedim(1, -1).reshape(-1, t.shape[1])


def bottleneck(x: Tensor, s: FusedConv) -> Tensor:
    """q = conv1x1(x, P) in x's layout."""
    p = cast(Tensor, s.P)
    if layout_of(x) and s.geo.groups == 1 and not s.geo.sampled:
        q = torch.mm(rows(x), p[0].t())
        return q.view(x.shape[0], *x.shape[2:], -1).movedim(-1, 1)
    if layout_of(x) and s.geo.sampled and s.geo.groups == 1:
        n = len(s.geo.kernel)
        return torch.convolution(
            x, p[0].reshape(*p.shape[1:], *[1] * n), None, list(s.geo.stride), [0] * n, [1] * n, False, [0] * n, 1
        )
    return project(x, p, s.geo)


def conv_site(x: Tensor, s: FusedConv, q: Tensor | None, branch: bool) -> Tensor:
    """conv(pad(x), W') + b of a site; as two branches, conv(q, a*U) is added in place."""
    w = weight(s, branch)
    if s.geo.native:
        z = geometry.conv(x, w, s.bias, s.geo, s.geo.groups)
    else:  # the padded copy of a few samples at a time
        z = empty_like_map(x, (x.shape[0], s.out_channels, *geometry.out_size(x.shape, s.geo)))
        for i in parts(x.shape[0], MORE):
            z[i].copy_(geometry.conv(geometry.pad(x[i], s.geo), w, s.bias, s.geo, s.geo.groups))
    del w
    if branch and q is not None:
        _add_branch_(z, q, s)
    return z


def _add_branch_(z: Tensor, q: Tensor, s: FusedConv) -> None:
    """z += conv(q, a*U)."""
    up, geo = scaled(cast(Tensor, s.U), s.scale, s.geo), up_geometry(s.geo)
    if is_matrix(s) and add_product_(z, q, up.flatten(1)):
        return
    up = up.flatten(0, 1) if geo.transposed else up
    for i in parts(z.shape[0]):
        z[i].add_(geometry.conv(geometry.pad(q[i], geo), up, None, geo, geo.groups))


def add_product_(y: Tensor, x: Tensor, w: Tensor) -> bool:
    """y += the 1x1 conv of x by the matrix w (O, I), if y is dense; whether it is."""
    if layout_of(y):
        rows(y).addmm_(rows(x), w.t())
    elif y.is_contiguous():
        y.flatten(2).baddbmm_(w.expand(x.shape[0], -1, -1), x.flatten(2))
    else:
        return False
    return True


def gate_(z: Tensor, s: Any) -> tuple[Tensor, int]:
    """Packed gate of z and its layout; z becomes act(z) in place."""
    bits = bits_of(z, s.act)
    act_(z, s.act)
    return bits


def act_(z: Tensor, act: nn.Module) -> Tensor:
    """act(z) in place."""
    was, act.inplace = act.inplace, True  # type: ignore[assignment]
    try:
        return cast(Tensor, act(z))
    finally:
        act.inplace = was


def bits_of(z: Tensor, act: nn.Module) -> tuple[Tensor, int]:
    """Packed gate of z under an activation, and its layout."""
    gate = cast(Gate, gate_of(act))
    return kernel_of(pack_gate)(z, gate.lo, gate.hi, gate.closed), layout_of(z)


def ungate(g: Tensor, bits: tuple[Tensor, int], gate: Any) -> Tensor:
    """The gradient behind a gate, in a new buffer."""
    return cast(Tensor, kernel_of(apply_gate)(g, bits[0], bits[1], gate.inside, gate.outside))


def ungate_(g: Tensor, bits: tuple[Tensor, int], gate: Any) -> Tensor:
    """The gradient behind a gate, in g's buffer if g lies as z did."""
    if not dense_in(g, bits[1]):
        return ungate(g, bits, gate)
    kernel_of(apply_gate_)(g, bits[0], bits[1], gate.inside, gate.outside)
    return g


def up_gradient(g: Tensor, q: Tensor, s: FusedConv) -> Tensor:
    """gU of a site from the gated gradient and its bottleneck."""
    up, geo = cast(Tensor, s.U), up_geometry(s.geo)
    if layout_of(g) and geo.groups == 1 and not geo.transposed:
        # As a matrix product with so few columns it takes ten times as long.
        return scaled(geometry.conv_weight_grad(g, geometry.pad(q, geo), up, geo, 1), s.scale, s.geo)
    return up_grad(g, q, up, s.scale, s.geo)


def accumulate(p: Tensor, g: Tensor) -> None:
    """p.grad += g."""
    if p.grad is None:
        p.grad = g
    else:
        p.grad += g


def input_grad(g: Tensor, s: FusedConv, shape: tuple[int, ...], branch: bool) -> Tensor:
    """gx of a site, for an x of this shape."""
    geo, w = s.geo, weight(s, branch)
    if geo.native:
        gx = geometry.conv_input_grad(g, w, geometry.padded_size(shape, geo), geo, geo.groups)
    else:  # without the margins, which would be held with it
        gx = empty_like_map(g, shape)
        for i in parts(g.shape[0], MORE):
            size = geometry.padded_size(gx[i].shape, geo)
            gx[i].copy_(geometry.unpad(geometry.conv_input_grad(g[i], w, size, geo, geo.groups), geo))
    del w
    if branch and s.P is not None:
        _add_down_(gx, g, s)
    return gx


def _bottleneck_grad(g: Tensor, s: FusedConv, shape: tuple[int, ...]) -> Tensor:
    """dL/dq, r channels."""
    p, geo = cast(Tensor, s.P), s.geo
    sizes = [-(-n // k) for n, k in zip(shape[2:], geo.stride, strict=True)] if geo.sampled else shape[2:]
    q = g.new_empty(1).expand(shape[0], p.shape[0] * p.shape[1], *sizes)
    return q_grad(g, q, cast(Tensor, s.U), s.scale, geo)


def _add_down_(gx: Tensor, g: Tensor, s: FusedConv) -> None:
    """gx += P^T dL/dq in place."""
    gq, p, n = _bottleneck_grad(g, s, tuple(gx.shape)), cast(Tensor, s.P), len(s.geo.kernel)
    at, one, none = sampled(gx, s.geo), [1] * n, [0] * n
    if s.geo.groups == 1 and add_product_(at, gq, p[0].t()):
        return
    down = p.flatten(0, 1).reshape(-1, p.shape[2], *one)
    for i in parts(gx.shape[0]):
        at[i].add_(torch.convolution(gq[i], down, None, one, none, one, True, none, s.geo.groups))


def add_input_grad_(into: Tensor, g: Tensor, s: FusedConv, branch: bool) -> Tensor:
    """into += gx of a site, in place."""
    w, geo = weight(s, branch), s.geo
    if geo.sampled:  # nothing arrives at the other positions
        narrow = replace(geo, stride=(1,) * len(geo.stride))
        _add_input_grad_(sampled(into, geo), g, w, narrow)
    elif not is_matrix(s) or not add_product_(into, g, w.flatten(1).t()):
        _add_input_grad_(into, g, w, geo)
    del w
    if branch and s.P is not None:
        _add_down_(into, g, s)
    return into


def _add_input_grad_(into: Tensor, g: Tensor, w: Tensor, geo: Geometry) -> None:
    """into += gx, a few samples at a time."""
    for i in parts(g.shape[0]):
        size = geometry.padded_size(into[i].shape, geo)
        into[i].add_(geometry.unpad(geometry.conv_input_grad(g[i], w, size, geo, geo.groups), geo))


def input_grad_(g: Tensor, s: FusedConv, branch: bool) -> Tensor:
    """gx of a site whose input and output have one shape, in g's buffer, a few samples at a time."""
    w, geo = weight(s, branch), s.geo
    for i in parts(g.shape[0]):
        part, size = g[i], geometry.padded_size(g[i].shape, geo)
        gx = geometry.unpad(geometry.conv_input_grad(part, w, size, geo, geo.groups), geo)
        if branch and s.P is not None:
            _add_down_(gx, part, s)
        part.copy_(gx)
        del gx
    return g


def affine_(x: Tensor, s: Any) -> Tensor:
    """A folded BatchNorm in place."""
    return x.mul_(_channels(s.scale, x)).add_(_channels(s.bias, x))


def _channels(t: Tensor, x: Tensor) -> Tensor:
    """One number a channel, to broadcast with a map."""
    return t.to(x.dtype).reshape(-1, *[1] * (x.dim() - 2))


def affine_grad(g: Tensor, s: Any) -> Tensor:
    """The gradient behind a folded BatchNorm."""
    return g * _channels(s.scale, g)


def affine_grad_(g: Tensor, s: Any) -> Tensor:
    """The same in place."""
    return g.mul_(_channels(s.scale, g))


def total(a: Tensor, b: Tensor) -> Tensor:
    """a + b of two gradients of one value."""
    return a + b


def total_(a: Tensor, b: Tensor) -> Tensor:
    """a += b."""
    return a.add_(b)


def as_map(x: Tensor, layout: int) -> Tensor:
    """x laid out as the step works: itself where it is."""
    return as_layout(x, layout) if x.dim() in (4, 5) else x


__all__ = ["accumulate", "act_", "affine_", "affine_grad", "affine_grad_", "as_map", "bits_of", "bottleneck", "gate_"]
__all__ += ["add_input_grad_", "add_product_", "conv_site", "input_grad", "input_grad_", "parts", "rows"]
__all__ += ["total", "total_", "trains", "ungate", "ungate_", "up_gradient", "weight"]
