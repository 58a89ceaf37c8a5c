"""The fused site against plain autograd of the layers it stands for, in float64."""

import copy
import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convs import GEOMETRIES
from graphs import kept_bytes, randomize
from graphs import last as last_format
from saves import drawn
from torch import Tensor, nn
from torch.func import functional_call

from floorplan.errors import FloorplanError
from floorplan.graph.fold import to_affine, to_site
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.layers.lowrank import PROJECTIONS, merge, project
from floorplan.layers.macs import Macs
from floorplan.ledger.fakes import concrete_fakes

RANK = 2
Z = "zeros"


def adapted(conv: nn.Module, bn: nn.Module | None, act: nn.Module | None, seed: int = 0) -> FusedConv:
    """A site whose U is drawn, not zero."""
    site = to_site(conv, bn)
    site.adapt(RANK, torch.Generator().manual_seed(seed))
    assert site.U is not None
    g = torch.Generator().manual_seed(seed + 1)
    site.U.data.copy_(torch.randn(site.U.shape, generator=g, dtype=torch.float64) * 0.3)
    if act is not None:
        site.set_activation(act)
    return site


def u_of(site: FusedConv) -> nn.Parameter:
    assert site.U is not None
    return site.U


def grad_of(t: Tensor) -> Tensor:
    assert t.grad is not None
    return t.grad


def delta(conv: Any, u: Tensor, p: Tensor) -> Tensor:
    """U o P with plain loops over groups and ranks, in the layout of the conv's weight."""
    d = torch.zeros_like(conv.weight)
    g = conv.groups
    out = conv.out_channels // g
    for i in range(g):
        for r in range(p.shape[1]):
            if isinstance(conv, nn.modules.conv._ConvTransposeNd):
                rows = slice(i * (conv.in_channels // g), (i + 1) * (conv.in_channels // g))
                d[rows] += p[i, r].view(-1, 1, *[1] * (d.dim() - 2)) * u[i, r][None]
            else:
                rows = slice(i * out, (i + 1) * out)
                d[rows] += u[rows, r][:, None] * p[i, r].view(1, -1, *[1] * (d.dim() - 2))
    return d


def reference(
    conv: Any, bn: nn.Module | None, act: nn.Module | None, x: Tensor, u: Tensor, p: Tensor, skip: Tensor | None = None
) -> Tensor:
    """act(bn(conv(x) with weight W + U o P) + skip) by torch's own layers."""
    weights = {"weight": conv.weight.detach() + delta(conv, u, p)}
    z = functional_call(conv, weights, (x,))
    z = z if bn is None else bn.eval()(z)
    z = z if skip is None else z + skip
    y: Tensor = z if act is None else copy.deepcopy(act)(z)
    return y


def close(got: Tensor | None, want: Tensor, tolerance: float = 1e-10) -> None:
    assert got is not None
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape and got.dtype == want.dtype
    scale = float(want.abs().max()) if want.numel() else 0.0
    assert scale > 0 or not want.numel(), "a vacuous comparison"
    assert float((got - want).abs().max() if want.numel() else 0.0) <= tolerance * scale


def check(conv: Any, x: Tensor, bn: Any = None, act: Any = None, skip: str = "") -> None:
    """Outputs and gradients of U, x and skip equal plain autograd's; bytes are exact."""
    conv, x = conv.double(), x.double()
    bn = bn if bn is None else randomize(bn).double().eval()
    site = adapted(conv, bn, act)
    assert site.U is not None and site.P is not None
    with torch.no_grad():
        shape = conv(x).shape
    size = {"": None, "full": shape, "channel": (1, shape[1], *[1] * (len(shape) - 2))}[skip]
    torch.manual_seed(3)
    s = None if size is None else torch.randn(*size, dtype=torch.float64)
    g = torch.randn(shape, dtype=torch.float64)
    results = []
    for fused in (True, False):
        xi, ui = x.clone().requires_grad_(), site.U.detach().clone().requires_grad_()
        si = None if s is None else s.clone().requires_grad_()
        if fused:
            y = functional_call(site, {"U": ui}, (xi, si))
        else:
            y = reference(conv, bn, act, xi, ui, site.P, si)
        leaves = [t for t in (xi, ui, si) if t is not None]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, g)])
    for got, want in zip(*results, strict=True):
        close(got, want)
    with torch.no_grad():
        close(site(x, s), results[1][0])
        site.plain = True
        close(site(x, s), results[1][0])
        site.plain = False
    x = x.clone().requires_grad_()
    sampled = [math.ceil(n / t) if site.geo.sampled else n for n, t in zip(x.shape[2:], site.geo.stride, strict=True)]
    q = 8 * x.shape[0] * site.geo.groups * RANK * math.prod(sampled)
    gate = math.ceil(math.prod(shape) / 8) if act is not None else 0
    assert kept_bytes(site, x, s) == q + gate


@pytest.mark.parametrize("conv,shape", GEOMETRIES, ids=lambda v: str(v))
def test_every_geometry(conv: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, *shape)
    nd = len(shape) - 1
    bn = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][nd - 1](conv.out_channels)
    check(copy.deepcopy(conv), x)
    check(copy.deepcopy(conv), x, bn, nn.ReLU6(), "full")
    check(copy.deepcopy(conv), x[:1], bn, nn.LeakyReLU(0.2), "channel")


@pytest.mark.parametrize(
    "act",
    [
        nn.ReLU(),
        nn.ReLU6(),
        nn.Hardtanh(-0.5, 1.5),
        nn.LeakyReLU(0.1),
        nn.LeakyReLU(-0.5),
        nn.Threshold(0.2, -3.0),
        nn.Hardsigmoid(),
    ],
)
def test_every_activation(act: nn.Module) -> None:
    torch.manual_seed(0)
    check(nn.Conv2d(5, 6, 3, padding=1), torch.randn(2, 5, 7, 6), None, act, "full")


@pytest.mark.parametrize(
    "bn",
    [nn.BatchNorm2d(6, affine=False), nn.SyncBatchNorm(6), nn.BatchNorm2d(6, eps=0.1)],
    ids=["plain", "sync", "eps"],
)
def test_every_batchnorm(bn: nn.Module) -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        check(nn.Conv2d(5, 6, 3, bias=bias), torch.randn(2, 5, 7, 6), bn, nn.ReLU())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel,stride", [(3, 1), (1, 1), (1, 2)])
def test_channels_last_stays_and_is_exact(kernel: int, stride: int, groups: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, kernel, stride, kernel // 2, groups=groups).double()
    bn = randomize(nn.BatchNorm2d(6)).double().eval()
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    plain = adapted(conv, bn, nn.ReLU())
    last = last_format(copy.deepcopy(plain))
    results = []
    for site, fmt in ((plain, torch.contiguous_format), (last, torch.channels_last)):
        xi = x.clone(memory_format=fmt).requires_grad_()
        y = site(xi, None)
        assert y.is_contiguous(memory_format=fmt)
        w = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
        results.append([y.detach(), *torch.autograd.grad((y * w).sum(), [xi, u_of(site)])])
    for got, want in zip(results[1], results[0], strict=True):
        close(got, want)


def test_channels_last_weights_turn_a_contiguous_input_around() -> None:
    conv = last_format(nn.Conv2d(4, 6, 3))
    x = torch.randn(2, 4, 7, 8)
    fmt = torch.channels_last
    assert conv(x).is_contiguous(memory_format=fmt)
    assert adapted(conv, None, None)(x).is_contiguous(memory_format=fmt)


def test_gradient_in_another_layout_than_the_output() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, padding=1).double()
    site = adapted(conv, None, nn.ReLU())
    x = torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 6, 7, 8, dtype=torch.float64)
    want = torch.autograd.grad(site(x), [x, u_of(site)], g)
    got = torch.autograd.grad(site(x), [x, u_of(site)], g.contiguous(memory_format=torch.channels_last))
    for a, b in zip(got, want, strict=True):
        close(a, b)


def strided_steps() -> None:
    for rank in (2, 4):
        conv = nn.Conv2d(256, 512, 1, stride=2, bias=False).to(memory_format=torch.channels_last)
        site = to_site(conv)
        site.adapt(rank, torch.Generator())
        x = torch.randn(8, 256, 56, 56).contiguous(memory_format=torch.channels_last)
        y = site(x.requires_grad_())
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.sum().backward()
        want = torch.einsum("gri,bihw->r", site.P, x.detach()[:, :, ::2, ::2])
        got = site.U.grad[0, :, 0, 0]
        assert (got - want).abs().max() < 1e-3 * want.abs().max() + 1e-1, (got, want)


def test_strided_pointwise_channels_last_does_not_crash_torch() -> None:
    """The weight gradient of such a conv, with 2 or 4 input channels, is a segmentation fault: it would end a fork."""
    pid = os.fork()
    if not pid:
        try:
            strided_steps()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def leaf_site(act: nn.Module | None = None) -> tuple[FusedConv, Tensor]:
    torch.manual_seed(0)
    site = adapted(nn.Conv2d(4, 6, 3, padding=1), None, act or nn.ReLU())
    return site, torch.randn(2, 4, 5, 5)


def test_frozen_u_keeps_only_the_gate() -> None:
    site, x = leaf_site()
    u_of(site).requires_grad_(False)
    assert kept_bytes(site, x) == 0
    x.requires_grad_()
    assert kept_bytes(site, x) == math.ceil(2 * 6 * 25 / 8)
    site(x).sum().backward()
    assert x.grad is not None and u_of(site).grad is None


def test_input_without_gradient() -> None:
    site, x = leaf_site()
    assert kept_bytes(site, x) == 4 * 2 * RANK * 25 + math.ceil(2 * 6 * 25 / 8)
    site(x).sum().backward()
    assert u_of(site).grad is not None and x.grad is None


def test_skip_alone_requires_grad() -> None:
    site, x = leaf_site()
    u_of(site).requires_grad_(False)
    skip = torch.randn(2, 6, 5, 5, requires_grad=True)
    assert kept_bytes(site, x, skip) == math.ceil(2 * 6 * 25 / 8)
    y = site(x, skip)
    y.sum().backward()
    assert torch.equal(grad_of(skip), (y > 0).float())


def test_nothing_requires_grad_packs_nothing() -> None:
    site, x = leaf_site()
    u_of(site).requires_grad_(False)
    y = site(x)
    assert not y.requires_grad and y.grad_fn is None


def test_inputs_are_never_overwritten() -> None:
    site, x = leaf_site()
    skip = torch.randn(2, 6, 5, 5)
    before = x.clone(), skip.clone()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            site(x, skip)
    assert torch.equal(x, before[0]) and torch.equal(skip, before[1])


def test_empty_batch() -> None:
    for conv in (nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 3)):
        site = adapted(conv, None, nn.ReLU())
        x = torch.randn(0, 4, 5, 5, requires_grad=True)
        site(x).sum().backward()
        assert torch.equal(grad_of(u_of(site)), torch.zeros_like(u_of(site)))
        assert x.grad is not None and x.grad.shape == x.shape


def test_input_without_batch() -> None:
    site, x = leaf_site()
    skip = torch.randn(6, 5, 5)
    close(site(x[0], skip), site(x[:1], skip[None])[0], 1e-6)


def test_bfloat16_and_mixed_dtypes() -> None:
    site, x = leaf_site()
    low = copy.deepcopy(site).bfloat16()
    y = low(x.bfloat16().requires_grad_())
    y.sum().backward()
    assert y.dtype == grad_of(u_of(low)).dtype == torch.bfloat16
    want = site(x)
    assert float((y - want).detach().abs().max()) < 0.05 * float(want.detach().abs().max())


@pytest.mark.parametrize("kernel", [1, 3])
def test_autocast(kernel: int) -> None:
    torch.manual_seed(0)
    site = adapted(nn.Conv2d(16, 6, kernel, padding=kernel // 2), None, nn.ReLU())
    x = torch.randn(2, 16, 5, 5, requires_grad=True)
    skip = torch.randn(2, 6, 5, 5, requires_grad=True)
    want = torch.autograd.grad(site(x, skip).sum(), [x, skip, u_of(site)])
    for inside in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            y = site(x, skip)
            assert y.dtype == torch.float32  # bf16 + float32 skip, as torch promotes
            assert site(x).dtype == torch.bfloat16
            if inside:
                got = torch.autograd.grad(y.sum(), [x, skip, u_of(site)])
        if not inside:
            got = torch.autograd.grad(y.sum(), [x, skip, u_of(site)])
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype == torch.float32
            assert float((a - b).abs().max()) < 0.15 * float(b.abs().max())
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_bytes(site, x) == 2 * 2 * RANK * 25 + math.ceil(2 * 6 * 25 / 8)


def test_adapter_is_drawn_as_the_paper_says() -> None:
    draws = []
    for rank in (4, 4, 16):
        site = to_site(nn.Conv2d(4096, 64, 1))
        site.adapt(rank, torch.Generator().manual_seed(7))
        assert site.P is not None and site.U is not None and not u_of(site).any()
        assert abs(float(site.P.std()) * math.sqrt(rank) - 1) < 0.02
        assert abs(float(site.P.mean())) < 0.02 and not site.P.requires_grad
        draws.append(site.P)
    assert torch.equal(draws[0], draws[1])
    double = to_site(nn.Conv2d(4096, 64, 1).double())
    double.adapt(4, torch.Generator().manual_seed(7))
    assert double.P is not None and torch.equal(double.P.float(), draws[0])


def test_starts_as_the_source_model() -> None:
    torch.manual_seed(0)
    conv, bn = nn.Conv2d(5, 6, 3), randomize(nn.BatchNorm2d(6)).eval()
    x = torch.randn(3, 5, 8, 8)
    site = to_site(conv, bn)
    site.adapt(RANK, torch.Generator())
    site.set_activation(nn.ReLU())
    close(site.train()(x).detach(), F.relu(bn(conv(x))).detach(), 1e-5)


def test_weight_written_between_forward_and_backward_is_noticed() -> None:
    site, x = leaf_site()
    y = site(x)
    with torch.no_grad():
        u_of(site).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivative_is_refused_not_wrong() -> None:
    site, x = leaf_site()
    x.requires_grad_()
    (gx,) = torch.autograd.grad(site(x).sum(), x, create_graph=True)
    with pytest.raises(FloorplanError, match="FusedConv: its gradient cannot be differentiated again"):
        torch.autograd.grad(gx.sum(), x)


def test_config_builds_the_same_site() -> None:
    site, x = leaf_site(nn.Threshold(0.2, -1.0))
    twin = FusedConv(**site.config())
    twin.load_state_dict(site.state_dict())
    assert torch.equal(twin(x), site(x)) and twin.config() == site.config()
    assert "rank=2" in repr(twin)


def test_fakes_allocate_what_a_real_run_does() -> None:
    from floorplan.ledger.run import Step, Watch, run

    for conv, fmt in [
        (nn.Conv2d(8, 6, 1), torch.contiguous_format),
        (nn.Conv2d(8, 6, 1, stride=2), torch.channels_last),
        (nn.Conv2d(8, 6, 3, padding=1, groups=2, padding_mode="reflect"), torch.contiguous_format),
        (nn.Conv2d(8, 6, 3), torch.channels_last),
        (nn.ConvTranspose2d(8, 6, 3, 2), torch.contiguous_format),
    ]:
        model: Any = nn.Sequential(adapted(conv, None, nn.ReLU()))
        model.to(memory_format=fmt)
        x = torch.randn(2, 8, 9, 9).contiguous(memory_format=fmt).requires_grad_()
        gm = torch.fx.GraphModule(model, _call_graph())
        fakes = concrete_fakes(gm, (x,))
        fake = run(Step(fakes.gm, fakes.inputs), Watch(), fakes)
        real = run(Step(gm, (x,)), fake=False)
        assert fake.timeline.peak() == real.timeline.peak() > 0


def _call_graph() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    graph.output(graph.call_module("0", (graph.placeholder("x"),)))
    return graph


def test_affine_is_the_batchnorm_and_keeps_nothing() -> None:
    torch.manual_seed(0)
    for bn, shape in [
        (nn.BatchNorm1d(5), (4, 5)),
        (nn.BatchNorm1d(5), (4, 5, 6)),
        (nn.BatchNorm2d(5, affine=False), (4, 5, 6, 3)),
        (nn.BatchNorm3d(5), (4, 5, 6, 3, 2)),
    ]:
        norm = randomize(bn).double().eval()
        affine = to_affine(norm)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        g = torch.randn(shape, dtype=torch.float64)
        close(affine(x).detach(), norm(x).detach())
        close(torch.autograd.grad(affine(x), x, g)[0], torch.autograd.grad(norm(x), x, g)[0])
        assert kept_bytes(affine, x) == 0
        assert ChannelAffine(**affine.config()).scale.shape == (5,)


def test_projections_of_a_draw() -> None:
    draw = torch.randn(2, 3, 5, dtype=torch.float64)
    rows = PROJECTIONS["orthogonal"](draw)
    torch.testing.assert_close(rows @ rows.mT, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    triangle = rows @ draw.mT  # R of the draw's QR: the signs make the rows uniform
    assert triangle.tril(-1).abs().max() < 1e-12 and (triangle.diagonal(dim1=1, dim2=2) > 0).all()
    assert torch.equal(PROJECTIONS["orthogonal-matched"](draw), rows * math.sqrt(5 / 3))
    assert torch.equal(PROJECTIONS["normal"](draw), draw / math.sqrt(3))


def test_an_adapter_is_drawn_in_float64_and_starts_at_zero() -> None:
    site = to_site(nn.Conv2d(4, 6, 3, groups=2))
    site.adapt(2, torch.Generator().manual_seed(3), "orthogonal")
    draw = torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.equal(site.P, PROJECTIONS["orthogonal"](draw).float()) and not u_of(site).any()


def test_what_a_site_is_without_options() -> None:
    bare = FusedConv(geometry_of(nn.Conv2d(4, 6, 3)).config(), [6, 4, 3, 3], bias=False)
    assert bare.captures is False and bare.plain is False and bare.gq is bare.bias is bare.scale is None
    scaled = FusedConv(bare.config()["geometry"], [6, 4, 3, 3], scale=True)
    assert scaled.scale.tolist() == [1.0] * 6 and scaled.bias.tolist() == [0.0] * 6
    scaled.set_activation(nn.ReLU())
    assert scaled.act.inplace is True
    assert ChannelAffine(3).state_dict().keys() == {"scale", "bias"}


def test_a_depthwise_site_asks_its_input_for_its_groups() -> None:
    x = SimpleNamespace(shape=(2, "channels", 5, 5))
    sizes = [(1, 1), (2, 2), (3, 3), (4, 2)]
    sites = [to_site(nn.Conv2d(n, 2 * g, 3, groups=g)) for n, g in sizes]
    assert [s.groups(x) for s in sites] == [1, "channels", "channels", 2]


def test_one_sample_without_a_batch_and_its_skip() -> None:
    site, x = leaf_site()
    skip = torch.randn(1, 6, 5, 5)
    for s, t in ((None, None), (skip, skip[0]), (skip, skip), (skip[:, :1], skip[0, :1])):
        assert torch.equal(site(x[0], t), site(x[:1], s)[0])


def test_a_number_is_added_as_a_skip() -> None:
    site, x = leaf_site(nn.Hardtanh(-99, 99))
    want = site(x) + 1.5
    assert torch.equal(site(x, 1.5), want)
    with torch.no_grad():
        assert torch.equal(site(x, 1.5), want)


def test_a_skip_wider_than_the_site() -> None:
    torch.manual_seed(0)
    site = adapted(nn.Conv2d(4, 1, 3, padding=1).double(), None, nn.ReLU())
    x, skip = drawn(2, 4, 5, 5).requires_grad_(), drawn(2, 6, 5, 5).requires_grad_()
    got = torch.autograd.grad(site(x, skip).square().sum(), [x, skip, u_of(site)])
    site.plain = True
    want = torch.autograd.grad(site(x, skip).square().sum(), [x, skip, u_of(site)])
    for a, b in zip(got, want, strict=True):
        close(a, b)


def test_autocast_runs_the_site_in_16_bits_and_its_adapter_in_its_own() -> None:
    site, x = leaf_site()
    site.plain = True
    low = site(x.bfloat16()).to(torch.bfloat16)
    site.plain = False
    with torch.autocast("cpu"):
        y = site(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, low)
    (want,) = torch.autograd.grad(site(x).sum(), u_of(site))
    loss = site(x).sum()
    with torch.autocast("cpu"):  # of the backward: it knows the dtypes of its forward
        (got,) = torch.autograd.grad(loss, u_of(site))
    assert torch.equal(got, want)


def test_a_site_on_meta() -> None:
    site, x = leaf_site()
    site, x = site.to("meta"), x.to("meta").requires_grad_()
    (gx,) = torch.autograd.grad(site(x).sum(), x)
    assert gx.shape == x.shape and gx.device.type == "meta"


@pytest.mark.parametrize("captures", [False, True])
def test_the_gradient_of_q_is_kept_for_a_replay_if_asked_for(captures: bool) -> None:
    site, x = leaf_site()
    site.captures = captures
    site(x).square().sum().backward()
    if not captures:
        assert site.gq is None
        return
    p = site.P.clone().requires_grad_()
    q = F.conv2d(x, p[0, :, :, None, None])
    merged = F.conv2d(x, site.weight, site.bias, padding=1) + F.conv2d(q, u_of(site), padding=1)
    (want,) = torch.autograd.grad(merged.relu().square().sum(), q)
    torch.testing.assert_close(site.gq, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 6, 3, groups=2)], ids=str)
def test_what_a_site_says_of_its_factors(conv: Any) -> None:
    site = adapted(conv.double(), randomize(nn.BatchNorm2d(6)).double().eval(), nn.ReLU6())
    x = drawn(2, 4, 5, 5)
    assert site.axes() == {"P": ".rC", "U": ".rC" if site.geo.transposed else "Cr"}
    assert torch.equal(site.bottleneck(x), project(x, site.P, site.geo)) and to_site(conv).bottleneck(x) is None
    close(site.source_delta(), merge(torch.zeros_like(site.weight), site.U, site.P, None, site.geo))
    act = site.plain_form().act
    assert type(act) is nn.ReLU6 and act.inplace is False
    site.plain = True
    z = site(x)
    assert z.requires_grad and float(z.min()) >= 0


@pytest.mark.parametrize(
    "conv,x,y,want",
    [
        (nn.Conv2d(4, 6, 3), (1, 4, 5, 7), (1, 6, 3, 5), (216 * 15, 8 * 35, 108 * 15 - 8 * 35, 2 * 216)),
        (nn.Conv2d(4, 6, 1, 2), (1, 4, 5, 7), (1, 6, 3, 4), (24 * 12, 8 * 12, 12 * 12 - 8 * 12, 2 * 24)),
        (nn.ConvTranspose2d(4, 6, 2, 2), (1, 4, 5, 7), (1, 6, 10, 14), (96 * 35, 8 * 35, 48 * 35 - 8 * 35, 2 * 96)),
    ],
    ids=str,
)
def test_what_a_site_multiplies(conv: nn.Module, x: Any, y: Any, want: tuple[int, ...]) -> None:
    assert to_site(conv).macs(x, y) == Macs(want[0])
    assert adapted(conv, None, None).macs(x, y) == Macs(*want)


def test_a_pointwise_backward_under_autocast_is_in_the_dtypes_of_its_forward() -> None:
    torch.manual_seed(0)
    site, x = adapted(nn.Conv2d(4, 6, 1), None, nn.ReLU()), torch.randn(2, 4, 5, 5, requires_grad=True)
    want = torch.autograd.grad(site(x).square().sum(), [x, u_of(site)])
    loss = site(x).square().sum()
    with torch.autocast("cpu"):
        got = torch.autograd.grad(loss, [x, u_of(site)])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
