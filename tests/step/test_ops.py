"""Ops of a straight-line step against plain ones, in both layouts, every geometry, float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from floorplan.graph.fold import to_site
from floorplan.layers.activations import PackedActivation, gate_of
from floorplan.layers.bits import as_layout, dense_in, layout_of
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import conv, out_size, pad
from floorplan.layers.lowrank import merge
from floorplan.step import ops

CONVS: dict[str, Any] = {
    "pointwise": lambda: nn.Conv2d(6, 4, 1),
    "square": lambda: nn.Conv2d(6, 6, 1),
    "strided pointwise": lambda: nn.Conv2d(6, 4, 1, stride=2),
    "3x3": lambda: nn.Conv2d(6, 6, 3, padding=1),
    "strided 3x3": lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1),
    "dilated": lambda: nn.Conv2d(6, 4, 3, padding=2, dilation=2),
    "same, uneven": lambda: nn.Conv2d(6, 4, (4, 1), padding="same"),
    "reflect": lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
    "grouped": lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2),
    "grouped pointwise": lambda: nn.Conv2d(6, 4, 1, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
    "transposed, grouped": lambda: nn.ConvTranspose2d(6, 4, 3, groups=2),
    "1-d": lambda: nn.Conv1d(6, 4, 3, padding=1),
    "3-d": lambda: nn.Conv3d(6, 4, 3, padding=1),
    "3-d pointwise": lambda: nn.Conv3d(6, 4, 1),
}


def site_of(name: str) -> tuple[FusedConv, Tensor]:
    torch.manual_seed(0)
    conv_module = CONVS[name]().double()
    s = to_site(conv_module)
    s.scale = torch.rand(s.out_channels, dtype=torch.float64) + 0.5
    s.adapt(2, torch.Generator().manual_seed(1))
    nn.init.normal_(s.U)
    x = torch.randn(9, 6, *[5, 4, 3][: len(s.geo.kernel)], dtype=torch.float64)
    return s, x


def reference(s: FusedConv, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, a gradient of it, gx and gU of plain autograd on the merged weight."""
    x, u = x.detach().requires_grad_(), s.U.detach().requires_grad_()
    z = conv(pad(x, s.geo), merge(s.weight, u, s.P, s.scale, s.geo), s.bias, s.geo, s.geo.groups)
    g = torch.randn(z.shape, generator=torch.Generator().manual_seed(2), dtype=z.dtype)
    gx, gu = torch.autograd.grad(z, (x, u), g)
    return z.detach(), g, gx, gu


def near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))


FLAT = [n for n in CONVS if "-d" not in n]
CASES = [(n, lay, b) for n in CONVS for lay in ((0, 1) if n in FLAT else (0,)) for b in (0, 1)]


@pytest.mark.parametrize(("name", "layout", "branch"), CASES)
@torch.no_grad()
def test_site(name: str, layout: int, branch: int) -> None:
    s, x = site_of(name)
    with torch.enable_grad():
        z, g, gx, gu = reference(s, x)
    assert list(z.shape[2:]) == out_size(x.shape, s.geo)
    for t in (s.weight, s.U):
        t.data = as_layout(t.data, layout) if t.dim() == 4 else t.data
    x, g = as_layout(x, layout), as_layout(g, layout)
    q = ops.bottleneck(x, s)
    assert layout_of(q) == layout
    assert near(ops.conv_site(x, s, q, bool(branch)), z)
    assert near(ops.up_gradient(g, q, s), gu)
    shape = tuple(x.shape)
    assert near(ops.input_grad(g, s, shape, bool(branch)), gx)
    into = as_layout(torch.randn(shape, dtype=torch.float64), layout)
    want, held = into + gx, into.data_ptr()
    got = ops.add_input_grad_(into, g, s, bool(branch))
    assert near(got, want) and got.data_ptr() == held
    if z.shape == x.shape:
        mine = g.clone(memory_format=torch.preserve_format)
        got = ops.input_grad_(mine, s, bool(branch))
        assert near(got, gx) and got.data_ptr() == mine.data_ptr()


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.Hardtanh(-0.5, 0.5), nn.Hardsigmoid()])
@pytest.mark.parametrize("layout", [0, 1])
def test_gates(act: nn.Module, layout: int) -> None:
    z = as_layout(torch.randn(3, 5, 7, 2, dtype=torch.float64) * 4, layout)
    site = PackedActivation.of(act)
    leaf = z.clone(memory_format=torch.preserve_format).requires_grad_()
    y = act(leaf)
    g = as_layout(torch.randn(3, 5, 7, 2, dtype=torch.float64), layout)
    (want,) = torch.autograd.grad(y, leaf, g)
    bits = ops.bits_of(z, site.act)
    assert bits[1] == layout and bits[0].numel() == -(-z.numel() // 8)
    made, held = ops.act_(z, site.act), z.data_ptr()
    assert torch.equal(made, y) and made.data_ptr() == held and site.act.inplace is False
    gate = gate_of(act)
    assert torch.equal(ops.ungate(g, bits, gate), want)
    other = as_layout(g, 1 - layout)  # a gradient that lies otherwise must not be gated in its own order
    assert torch.equal(ops.ungate_(other.clone(memory_format=torch.preserve_format), bits, gate), want)
    assert dense_in(g, layout)
    got = ops.ungate_(g, bits, gate)
    assert got.data_ptr() == g.data_ptr() and torch.equal(got, want)


def test_affine_and_sums() -> None:
    s = ChannelAffine(4)
    s.scale.uniform_(0.5, 2)
    s.bias.normal_()
    x, g = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    want, gwant = s(x), g * s.scale[:, None]
    assert torch.equal(ops.affine_(x, s), want)
    assert torch.equal(ops.affine_grad(g, s), gwant)
    held = g.data_ptr()
    got = ops.affine_grad_(g, s)
    assert torch.equal(got, gwant) and got.data_ptr() == held
    a, b = torch.randn(3), torch.randn(3)
    both = ops.total(a, b)
    assert torch.equal(ops.total_(a, b), both) and torch.equal(a, both)


def test_parts_are_few_and_cover_all() -> None:
    for n in range(1, 40):
        found = ops.parts(n)
        assert len(found) == min(n, ops.PARTS)
        assert [i for p in found for i in range(p.start, p.stop)] == list(range(n))


def test_accumulate() -> None:
    p, g = nn.Parameter(torch.zeros(3)), torch.ones(3)
    ops.accumulate(p, g)
    assert p.grad is g
    ops.accumulate(p, torch.ones(3))
    assert p.grad.tolist() == [2, 2, 2]


def test_layouts() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert layout_of(ops.as_map(x, 1)) == 1 and ops.as_map(x, 0) is x
    flat = torch.randn(2, 3)
    assert ops.as_map(flat, 1) is flat


def test_what_trains() -> None:
    s, _ = site_of("pointwise")
    assert ops.trains(s)
    s.U.requires_grad_(False)
    assert not ops.trains(s) and not ops.trains(to_site(nn.Conv2d(3, 4, 1)))


def test_gate_in_place() -> None:
    site = PackedActivation.of(nn.ReLU6())
    s, z = SimpleNamespace(act=site.act, gate=gate_of(site.act)), torch.randn(3, 5, 7, 2) * 4
    want, bits = z.clamp(0, 6), ops.bits_of(z, site.act)
    got = ops.gate_(z, s)
    assert torch.equal(z, want) and torch.equal(got[0], bits[0]) and got[1] == bits[1] == 0


@pytest.mark.parametrize("name", ["reflect", "same, uneven"])
@torch.no_grad()
def test_a_padded_conv_of_more_samples_than_parts(name: str) -> None:
    s, _ = site_of(name)
    x = torch.randn(ops.MORE + 5, 6, 5, 4, dtype=torch.float64)
    with torch.enable_grad():
        z, g, gx, _ = reference(s, x)
    assert near(ops.conv_site(x, s, None, False), z)
    assert near(ops.input_grad(g, s, tuple(x.shape), False), gx)


class Seen(TorchDispatchMode):
    """Writes down every op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_watches_sees_the_gates_as_ops() -> None:
    z, act = torch.randn(2, 3, 4, 4), nn.ReLU()
    with Seen() as seen:
        bits = ops.bits_of(z, act)
        ops.ungate_(ops.ungate(z, bits, gate_of(act)), bits, gate_of(act))
    assert {f"floorplan.{n}.default" for n in ("pack_gate", "apply_gate", "apply_gate_")} <= set(seen.ops)


def test_volumes_are_laid_out_too() -> None:
    assert layout_of(ops.as_map(torch.randn(2, 3, 4, 5, 6), 1)) == 1
