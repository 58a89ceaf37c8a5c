"""PaperSite against the layers it stands for, in plain autograd, and what it keeps."""

import copy
import math
from typing import Any

import pytest
import torch
from graphs import randomize
from saves import close, drawn, kinds
from torch import Tensor, nn
from torch.func import functional_call

from floorplan.layers.geometry import geometry_of
from floorplan.layers.paper import PaperSite

RANK = 2
GEOMETRIES = [
    (nn.Conv1d(6, 8, 5, padding=2), (6, 17)),
    (nn.Conv1d(6, 8, 4, padding="same", dilation=3, bias=False), (6, 17)),
    (nn.Conv2d(4, 6, 1, bias=False), (4, 5, 7)),
    (nn.Conv2d(4, 6, 1, stride=2, padding=1), (4, 5, 8)),
    (nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 4), (1, 2), padding_mode="circular"), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, padding_mode="reflect"), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=(2, 0), padding_mode="replicate"), (4, 9, 9)),
    (nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"), (4, 7, 8)),
    (nn.Conv2d(4, 6, 3, stride=3, padding="valid"), (4, 8, 7)),
    (nn.Conv3d(4, 6, 3, stride=(1, 2, 1), padding=1), (4, 4, 5, 6)),
]
GROUPED = [
    (nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3), (6, 8, 9)),
    (nn.Conv2d(6, 6, (3, 2), padding="same", groups=6), (6, 8, 9)),
]
ACTS = [None, {"name": "ReLU", "options": {}}, {"name": "ReLU6", "options": {}}]
MODULES: dict[str, type[nn.Module]] = {"ReLU": nn.ReLU, "ReLU6": nn.ReLU6}


def norm_for(channels: int, dims: int) -> Any:
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    return randomize(kinds[dims - 1](channels, eps=1e-3)).double().eval()


def site_of(conv: Any, bn: Any, rank: int = RANK, act: Any = None) -> PaperSite:
    """A site of a float64 conv (or None) and BatchNorm, its factors drawn."""
    geo = None if conv is None else geometry_of(conv).config()
    shape = None if conv is None else list(conv.weight.shape)
    bias = conv is not None and conv.bias is not None
    site = PaperSite(bn.num_features, geo, shape, bias=bias, rank=rank, eps=bn.eps, act=act).double()
    if conv is not None:
        site.weight = conv.weight.detach().clone()
        site.bias = conv.bias.detach().clone() if bias else None
    site.gamma, site.beta = bn.weight.detach().clone(), bn.bias.detach().clone()
    site.mean, site.var = bn.running_mean.clone(), bn.running_var.clone()
    if rank:
        site.P, site.U.data = drawn(*site.P.shape), drawn(*site.U.shape)
    return site


def reference(conv: Any, bn: nn.Module, act: Any, x: Tensor, *factors: Tensor) -> Tensor:
    """act(bn(conv(x, W) + conv(conv1x1(x, P), U))) of torch's own layers."""
    z = x if conv is None else conv(x)
    if factors:
        up, down = factors
        options = {n: getattr(conv, n) for n in ("stride", "padding", "dilation", "padding_mode")}
        branch = type(conv)(RANK, conv.out_channels, conv.kernel_size, bias=False, **options)
        one = type(conv)(conv.in_channels, RANK, 1, bias=False)
        z = z + functional_call(branch, {"weight": up}, (functional_call(one, {"weight": down}, (x,)),))
    z = bn(z)
    y: Tensor = z if act is None else MODULES[act["name"]]()(z)
    return y


def check(conv: Any, shape: tuple[int, ...], rank: int, act: Any) -> None:
    """Output and gradients equal plain autograd's; a, q and the gate are all that is kept."""
    torch.manual_seed(0)
    conv = None if conv is None else copy.deepcopy(conv).double().requires_grad_(False)
    x = drawn(2, *shape).requires_grad_()
    bn = norm_for(shape[0] if conv is None else conv.out_channels, len(shape) - 1)
    site = site_of(conv, bn, rank, act)
    factors = [site.U.detach().clone().requires_grad_(), site.P] if rank else []
    want = reference(conv, bn.requires_grad_(False), act, x, *factors)
    g = drawn(*want.shape)
    leaves, mine = [x, *factors[:1]], [x, *site.parameters()]
    wanted = torch.autograd.grad(want, leaves, g)
    for plain in (False, True):
        site.plain = plain
        y = site(x)
        close(y, want)
        for a, b in zip(torch.autograd.grad(y, mine, g), wanted, strict=True):
            close(a, b)
    site.plain, bits = False, math.ceil(math.prod(want.shape) / 8)
    kept: list[Any] = [((bn.num_features,), torch.float64)]
    kept += [((2, RANK, *shape[1:]), torch.float64)] if rank else []
    kept += [((bits,), torch.uint8)] if act else []
    assert kinds(site, x) == kept


@pytest.mark.parametrize("conv,shape", GEOMETRIES, ids=str)
def test_an_adapted_site(conv: Any, shape: tuple[int, ...]) -> None:
    for act in ACTS:
        check(conv, shape, RANK, act)


@pytest.mark.parametrize("conv,shape", GEOMETRIES[::3] + GROUPED, ids=str)
def test_a_frozen_site(conv: Any, shape: tuple[int, ...]) -> None:
    check(conv, shape, 0, ACTS[1])


@pytest.mark.parametrize("shape", [(5,), (5, 6), (5, 6, 3), (5, 6, 3, 2)], ids=str)
def test_a_batchnorm_alone(shape: tuple[int, ...]) -> None:
    if len(shape) > 1:
        check(None, shape, 0, ACTS[2])
        check(None, shape, 0, None)
    bn, x = norm_for(5, max(len(shape) - 1, 1)), drawn(2, *shape)
    close(site_of(None, bn, 0)(x), bn(x), 1e-12)


def two() -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    return nn.Conv2d(4, 6, 3, padding=1).double(), norm_for(6, 2), drawn(2, 4, 5, 5)


def test_an_input_without_gradient() -> None:
    conv, bn, x = two()
    site = site_of(conv, bn, RANK, ACTS[1])
    u = site.U.detach().clone().requires_grad_()
    site(x).square().sum().backward()
    reference(conv, bn, ACTS[1], x, u, site.P).square().sum().backward()
    assert site.U.grad is not None and u.grad is not None
    close(site.U.grad, u.grad)
    assert kinds(site_of(conv, bn, 0, ACTS[1]), x) == []


def test_a_frozen_u_keeps_no_q() -> None:
    conv, bn, x = two()
    site = site_of(conv, bn, RANK, ACTS[1])
    u = site.U.requires_grad_(False)
    x.requires_grad_()
    assert kinds(site, x) == [((6,), torch.float64), ((38,), torch.uint8)]
    (got,) = torch.autograd.grad(site(x).square().sum(), x)
    want = reference(conv, bn, ACTS[1], x, u, site.P)
    close(got, torch.autograd.grad(want.square().sum(), x)[0])


def test_starts_as_the_source() -> None:
    conv, bn, x = two()
    site = site_of(conv, bn, RANK, ACTS[1])
    site.U.data.zero_()
    close(site(x), torch.relu(bn(conv(x))), 1e-12)
    assert torch.equal(site(x), site_of(conv, bn, 0, ACTS[1])(x))  # the branch adds nothing


def test_train_mode_and_statistics_change_nothing() -> None:
    conv, bn, x = two()
    site = site_of(conv, bn)
    before = {n: t.clone() for n, t in site.state_dict().items()}
    assert torch.equal(site.train()(x), site.eval()(x))
    assert all(torch.equal(t, before[n]) for n, t in site.state_dict().items())
    assert [n for n, _ in site.named_parameters()] == ["U"]


def test_channels_last_is_exact_too() -> None:
    conv, bn, x = two()
    site, g = site_of(conv, bn, RANK, ACTS[1]), drawn(2, 6, 5, 5)
    results = []
    for fmt in (torch.contiguous_format, torch.channels_last):
        xi = x.clone(memory_format=fmt).requires_grad_()
        y = site(xi)
        results.append([y, *torch.autograd.grad(y, [xi, site.U], g)])
    for got, want in zip(*results, strict=True):
        close(got, want)


def test_empty_batch() -> None:
    conv, bn, x = two()
    site, x = site_of(conv, bn, RANK, ACTS[1]), x[:0].requires_grad_()
    site(x).sum().backward()
    assert site.U.grad is not None and not site.U.grad.any() and x.grad is not None


def test_config_builds_the_same_site() -> None:
    conv, bn, x = two()
    for site in (site_of(conv, bn, RANK, ACTS[2]), site_of(conv, bn, 0)):
        twin = PaperSite(**site.config()).double()
        twin.load_state_dict(site.state_dict())
        assert torch.equal(twin(x), site(x)) and twin.config() == site.config()
    alone = site_of(None, norm_for(4, 2), 0)
    twin = PaperSite(**alone.config()).double()
    twin.load_state_dict(alone.state_dict())
    assert torch.equal(twin(x), alone(x)) and alone.axes() == {"P": "rC", "U": "Cr"}
