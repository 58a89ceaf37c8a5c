"""TinyTL's layers against torch's own, in plain autograd, and what they keep."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import randomize
from saves import close, drawn, kinds
from torch import Tensor, nn

from floorplan.layers.geometry import geometry_of
from floorplan.layers.lite import FrozenConv, LiteResidual, TinySite, divisor

CONV_CASES: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv1d(6, 8, 5, padding=2, bias=False), (6, 17)),
    (nn.Conv2d(4, 6, 1), (4, 5, 7)),
    (nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 4), (1, 2), padding_mode="circular"), (4, 9, 9)),
    (nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"), (4, 7, 8)),
    (nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3, bias=False), (6, 8, 9)),
    (nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), (6, 5, 4)),
    (nn.Conv3d(4, 6, 3, stride=(1, 2, 1), padding=1), (4, 4, 5, 6)),
]
TRANSPOSED: list[tuple[Any, tuple[int, ...]]] = [
    (nn.ConvTranspose1d(4, 6, 3, stride=2, bias=False), (4, 5)),
    (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2), (6, 4, 5)),
]
ACTS = [None, nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.Hardsigmoid(), nn.Hardtanh(-1.0, 0.5)]


class Published(nn.Module):
    """The lite residual spelled out in torch's layers."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(i, i, 5, padding=2, groups=2 - i % 2, bias=False)
        self.norm = nn.GroupNorm(divisor(i, i // 8), i)
        self.point = nn.Conv2d(i, o, 1, bias=False)
        self.out = nn.GroupNorm(divisor(o, o // 8), o)

    def forward(self, x: Tensor, size: tuple[int, ...]) -> Tensor:
        k = tuple(2 if n > 1 else 1 for n in x.shape[2:])
        z = F.avg_pool2d(x, k, k, ceil_mode=True)
        z = self.out(self.point(torch.relu(self.norm(self.wide(z)))))
        if z.shape[2:] != size:
            z = F.interpolate(z, size=size, mode="bilinear", align_corners=False)
        out: Tensor = z
        return out


def pair(i: int, o: int) -> tuple[LiteResidual, Published]:
    torch.manual_seed(0)
    lite, twin = LiteResidual(i, o).double(), Published(i, o).double()
    with torch.no_grad():
        for mine, theirs in zip(lite.parameters(), twin.parameters(), strict=True):
            theirs.copy_(torch.randn_like(theirs))
            mine.copy_(theirs)
    return lite, twin


@pytest.mark.parametrize(
    "i,o,size,out",
    [
        (16, 24, (7, 6), (7, 6)),  # resized back
        (24, 20, (8, 5), (4, 3)),  # a block of stride 2: the pool has done it
        (3, 5, (9, 1), (5, 1)),  # no two groups, one column
        (8, 8, (1, 1), (1, 1)),
        (12, 4, (3, 4), (6, 8)),  # a block that widens the map
    ],
)
def test_lite_residual(i: int, o: int, size: tuple[int, ...], out: tuple[int, ...]) -> None:
    lite, twin = pair(i, o)
    x, y = drawn(2, i, *size).requires_grad_(), drawn(2, o, *out)
    got, want = lite(x, y), twin(x, out)
    close(got, want)
    g = drawn(*want.shape)
    mine = torch.autograd.grad(got, [x, *lite.parameters()], g)
    theirs = torch.autograd.grad(want, [x, *twin.parameters()], g)
    scale = max(float(b.abs().max()) for b in theirs)
    for a, b in zip(mine, theirs, strict=True):  # one value a group has no gradient but rounding
        assert float((a - b).abs().max()) <= 1e-10 * scale
    close(lite(x[0], y[0]), want[0])


def test_what_a_lite_residual_keeps() -> None:
    lite, _ = pair(16, 24)
    x = drawn(2, 16, 7, 6).requires_grad_()
    kept = [shape for shape, _ in kinds(lite, x, drawn(2, 24, 7, 6)) if len(shape) == 4]
    half = (2, 16, 4, 3)
    assert kept == [tuple(x.shape), half, half, half, half, (2, 24, 4, 3)]


def test_a_lite_residual_starts_at_zero() -> None:
    lite = LiteResidual(16, 24)
    lite.start(torch.Generator().manual_seed(3))
    x = torch.randn(2, 16, 6, 6)
    assert not lite(x, torch.empty(2, 24, 6, 6)).any()
    for w, fan in ((lite.wide, 8 * 25), (lite.point, 16)):
        top = float(w.detach().abs().max())
        assert 0.9 / math.sqrt(fan) < top <= 1 / math.sqrt(fan)
    again = LiteResidual(**lite.config())
    again.start(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(lite.parameters(), again.parameters(), strict=True))
    assert lite.axes() == {} and repr(lite) == "LiteResidual(16, 24)"


@pytest.mark.parametrize("channels,most,want", [(24, 3, 3), (20, 2, 2), (28, 3, 2), (7, 0, 1), (9, 2, 1)])
def test_divisor(channels: int, most: int, want: int) -> None:
    assert divisor(channels, most) == want


def site_of(conv: Any, bn: Any, act: Any) -> TinySite:
    geo = None if conv is None else geometry_of(conv).config()
    shape = None if conv is None else list(conv.weight.shape)
    bias = conv is not None and conv.bias is not None
    options = None
    if act is not None:
        names = {"LeakyReLU": ["negative_slope"], "Hardtanh": ["min_val", "max_val"]}
        name = type(act).__name__
        options = {"name": name, "options": {n: getattr(act, n) for n in names.get(name, [])}}
    site = TinySite(bn.num_features, geo, shape, bias=bias, eps=bn.eps, act=options).double()
    if conv is not None:
        site.weight = conv.weight.detach().clone()
        if site.bias is not None:
            site.bias.data.copy_(conv.bias.detach())
    site.gamma, site.mean, site.var = bn.weight.detach(), bn.running_mean, bn.running_var
    site.beta.data.copy_(bn.bias.detach())
    return site


def norm_for(channels: int, dims: int) -> Any:
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    return randomize(kinds[max(dims, 1) - 1](channels, eps=1e-3)).double().eval()


def check_site(conv: Any, bn: Any, act: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    conv = None if conv is None else conv.double()
    x, site = drawn(3, *shape).requires_grad_(), site_of(conv, bn, act)
    want = bn(x if conv is None else conv(x))
    want = want if act is None else act(want)
    g = drawn(*want.shape)
    leaves = [x, bn.bias] + ([conv.bias] if conv is not None and conv.bias is not None else [])
    wanted = torch.autograd.grad(want, leaves, g)
    mine = [x, site.beta] + ([site.bias] if site.bias is not None else [])
    for plain in (False, True):
        site.plain = plain
        y = site(x)
        close(y, want)
        for a, b in zip(torch.autograd.grad(y, mine, g), wanted, strict=True):
            close(a, b)
    site.plain, channels = False, (bn.num_features,)
    kept = [(channels, torch.float64)] * (2 if site.bias is not None else 1)  # a, for bias's gradient too
    kept += [(tuple(want.shape), torch.bool)] if act is not None else []
    assert kinds(site, x) == kept


@pytest.mark.parametrize("conv,shape", CONV_CASES, ids=str)
def test_tiny_site(conv: Any, shape: tuple[int, ...]) -> None:
    for act in ACTS[:3]:
        check_site(conv, norm_for(conv.out_channels, len(shape) - 1), act, shape)


@pytest.mark.parametrize("act", ACTS[3:], ids=str)
def test_tiny_site_of_every_gate(act: Any) -> None:
    check_site(nn.Conv2d(4, 6, 3), norm_for(6, 2), act, (4, 6, 5))


@pytest.mark.parametrize("shape", [(5,), (5, 6), (5, 6, 3), (5, 6, 3, 2)], ids=str)
def test_a_batchnorm_alone(shape: tuple[int, ...]) -> None:
    check_site(None, norm_for(5, len(shape) - 1), None, shape)


def test_a_tiny_site_reads_no_batch_statistics() -> None:
    bn = norm_for(6, 2)
    site = site_of(nn.Conv2d(4, 6, 3).double(), bn, nn.ReLU())
    x = drawn(2, 4, 6, 5)
    state = {n: t.clone() for n, t in site.state_dict().items()}
    assert torch.equal(site.train()(x), site.eval()(x))
    assert all(torch.equal(t, state[n]) for n, t in site.state_dict().items())
    assert [n for n, _ in site.named_parameters()] == ["beta", "bias"]


def test_a_gradient_that_is_not_finite_stays_behind_the_gate() -> None:
    site = site_of(None, norm_for(2, 2), nn.ReLU())
    x = drawn(2, 2, 3, 3).requires_grad_()
    y = site(x)
    (gx,) = torch.autograd.grad(y, x, torch.where(y > 0, 1.0, math.inf))
    assert bool(torch.isfinite(gx).all())


@pytest.mark.parametrize("conv,shape", CONV_CASES + TRANSPOSED, ids=str)
def test_frozen_conv(conv: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    conv = conv.double()
    frozen = FrozenConv(geometry_of(conv).config(), list(conv.weight.shape), conv.bias is not None).double()
    frozen.load_state_dict(conv.state_dict())
    x = drawn(2, *shape).requires_grad_()
    got, want = frozen(x), conv(x)
    close(got, want)
    g = drawn(*want.shape)
    wanted = torch.autograd.grad(want, [x] + ([] if conv.bias is None else [conv.bias]), g)
    for a, b in zip(torch.autograd.grad(got, [x, *frozen.parameters()], g), wanted, strict=True):
        close(a, b)
    assert kinds(frozen, x) == []


def test_configs_build_the_same_layers() -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1).double()
    x = drawn(2, 4, 5, 5)
    frozen = FrozenConv(geometry_of(conv).config(), [6, 4, 3, 3], True).double()
    for m in (site_of(conv, norm_for(6, 2), nn.ReLU6()), site_of(None, norm_for(4, 2), None), frozen):
        config: dict[str, Any] = m.config()
        twin: Any = type(m)(**config).double()
        twin.load_state_dict(m.state_dict())
        assert torch.equal(twin(x), m(x)) and twin.config() == m.config()
