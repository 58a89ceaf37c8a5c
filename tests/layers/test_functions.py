"""Layers of ours under torch.func and under second derivatives: autograd's own values, or one line."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import floorplan
from floorplan.errors import FloorplanError
from floorplan.layers.activations import PackedActivation
from floorplan.layers.dropout import PackedDropout
from floorplan.layers.factor import FactorConv
from floorplan.layers.functions import CompactFunction, call, learns
from floorplan.layers.fused import FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.layers.lite import FrozenConv, TinySite
from floorplan.layers.lossy import LossyActivation
from floorplan.layers.paper import PaperSite
from floorplan.layers.pools import PackedMaxPool, ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.torch_doors import TorchDispatchMode, storage_key, tree_iter, tree_map

CONV = nn.Conv2d(4, 6, 3, padding=1)
GEO, WEIGHT = geometry_of(CONV).config(), list(CONV.weight.shape)
RELU6, LEAKY = {"name": "ReLU6", "options": {}}, {"name": "LeakyReLU", "options": {"negative_slope": 0.1}}


def site(conv: Any, act: dict[str, Any] | None) -> FusedConv:
    layer = FusedConv(geometry_of(conv).config(), list(conv.weight.shape), scale=True, act=act)
    layer.adapt(1, torch.Generator().manual_seed(0))
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "site": lambda: site(CONV, RELU6),
    "grouped site": lambda: site(nn.Conv2d(4, 6, 3, padding=1, groups=2), LEAKY),
    "reflecting site": lambda: site(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), None),
    "strided site": lambda: site(nn.Conv2d(4, 6, 1, stride=2), RELU6),
    "transposed site": lambda: site(nn.ConvTranspose2d(4, 6, 2, stride=2), LEAKY),
    "published site": lambda: PaperSite(6, GEO, WEIGHT, bias=True, rank=2, act=RELU6),
    "norm": lambda: PaperSite(4, act=LEAKY),
    "tiny site": lambda: TinySite(6, GEO, WEIGHT, bias=True, act=RELU6),
    "factors": lambda: FactorConv(GEO, WEIGHT, 2, 1.5, bias=True),
    "frozen conv": lambda: FrozenConv(GEO, WEIGHT, True),
    "gate": lambda: PackedActivation("Hardtanh", {"min_val": -0.5, "max_val": 0.7}),
    "slope": lambda: PackedActivation("PReLU", {"num_parameters": 4}),
    "maximum": lambda: PackedMaxPool([3, 2], [2, 1], [1, 0], [1, 1]),
    "mean": lambda: ShapeAvgPool([2, 2], [2, 2], [0, 0]),
    "adaptive mean": lambda: ShapeAdaptiveAvgPool([2, None]),
}


def made(name: str) -> nn.Module:
    """The layer in float64, every tensor of it at random."""
    torch.manual_seed(1)
    layer = LAYERS[name]().double()
    for t in (*layer.parameters(), *layer.buffers()):
        if t.is_floating_point():
            t.data.normal_()
    if isinstance(layer, PaperSite):
        layer.var.abs_().add_(0.5)
    return layer


def twin_of(layer: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The layer's formula in torch's own ops."""
    if hasattr(layer, "plain"):
        plain = copy.deepcopy(layer)
        plain.plain = True
        return lambda p, x: functional_call(plain, p, (x,))
    if isinstance(layer, FrozenConv):
        return lambda p, x: F.conv2d(x, layer.weight, p["bias"], padding=1)
    own: Any = layer.plain_form()  # type: ignore[operator]
    return lambda p, x: own(x)


def two(layer: nn.Module) -> tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Tensor], Tensor]:
    """A loss of one sample by the layer and by its formula, parameters, and samples (5, 4, 6, 6)."""
    plain = twin_of(layer)
    learned = {n: p.detach() for n, p in layer.named_parameters()}
    x = torch.randn(5, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss_of(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda p, x: run(p, x[None]).mul(2).sin().sum()

    return loss_of(lambda p, x: functional_call(layer, p, (x,))), loss_of(plain), learned, x


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_every_transform_gives_the_formulas_derivatives(name: str) -> None:
    ours, plain, p, x = two(made(name))
    for both in (0, 1):
        same(vmap(grad(ours, both), (None, 0))(p, x), vmap(grad(plain, both), (None, 0))(p, x))
        by_loop = [grad(plain, both)(p, s) for s in x]
        same(vmap(grad(ours, both), (None, 0))(p, x), tree_map(lambda *t: torch.stack(t), *by_loop))
    same(grad(ours, 1)(p, x[0]), grad(plain, 1)(p, x[0]))

    def summed(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda p, x: vmap(loss, (None, 0))(p, x).square().sum()

    same(grad(summed(ours), (0, 1))(p, x), grad(summed(plain), (0, 1))(p, x))
    t = torch.randn_like(x[0])
    same(jvp(lambda x: ours(p, x), (x[0],), (t,)), jvp(lambda x: plain(p, x), (x[0],), (t,)))

    def penalty(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda p, x: grad(loss, 1)(p, x).square().sum()

    same(grad(penalty(ours), (0, 1))(p, x[0]), grad(penalty(plain), (0, 1))(p, x[0]))
    same(vmap(grad(penalty(ours)), (None, 0))(p, x), vmap(grad(penalty(plain)), (None, 0))(p, x))


@pytest.mark.parametrize("name", LAYERS)
def test_jacobians_and_hessians(name: str) -> None:
    layer = made(name)
    ours, plain, p, x = two(layer)
    x = x[0, :, :4, :4].contiguous()
    run = twin_of(layer)
    got = jacrev(lambda p, x: functional_call(layer, p, (x[None],)), (0, 1))(p, x)
    same(got, jacrev(lambda p, x: run(p, x[None]), (0, 1))(p, x))
    same(jacfwd(ours, 1)(p, x), jacfwd(plain, 1)(p, x))
    same(hessian(ours, 1)(p, x), hessian(plain, 1)(p, x))
    same(jacrev(jacrev(ours, 1), 1)(p, x), jacrev(jacrev(plain, 1), 1)(p, x))


@pytest.mark.parametrize("name", ["site", "published site", "tiny site", "factors", "frozen conv"])
def test_an_ensemble_of_parameters(name: str) -> None:
    """vmap over the parameters, the input shared or not: their own gradients in each member."""
    ours, plain, p, x = two(made(name))
    many = {n: torch.stack([t, 2 * t, -t]) for n, t in p.items()}
    for where, given in ((None, x[0]), (0, x[:3])):
        same(vmap(grad(ours), (0, where))(many, given), vmap(grad(plain), (0, where))(many, given))


def test_a_skip_that_alone_is_a_batch() -> None:
    layer, x = made("site"), torch.randn(1, 4, 6, 6).double()
    skips = torch.randn(3, 1, 6, 6, 6).double()

    def gradient(skip: Tensor) -> Tensor:
        return grad(lambda u, s: functional_call(layer, {"U": u}, (x, s)).sin().sum(), 1)(layer.U.detach(), skip)

    same(vmap(gradient)(skips), torch.stack([gradient(s) for s in skips]))


def test_plain_autograd_around_a_vmap() -> None:
    ours, plain, p, x = two(made("site"))
    for q in p.values():
        q.requires_grad_()
    values = (vmap(ours, (None, 0))(p, x), vmap(plain, (None, 0))(p, x))
    same(*(torch.autograd.grad(v.sum(), list(p.values())) for v in values))


def test_parameters_that_need_gradients_outside_lose_none_inside() -> None:
    """A Jacobian by the input, itself differentiated by the parameters: two levels, one of them autograd's own."""
    ours, plain, p, x = two(made("site"))
    for q in p.values():
        q.requires_grad_()
    sizes = (grad(ours, 1)(p, x[0]).square().sum(), grad(plain, 1)(p, x[0]).square().sum())
    same(*(torch.autograd.grad(v, list(p.values())) for v in sizes))


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Most bytes alive at once, of what is made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if isinstance(t, Tensor) and (key := storage_key(t)) not in self.seen:
                s = t.untyped_storage()
                self.seen.add(key)
                self.now += s.nbytes()
                weakref.finalize(s, self.gone, key, s.nbytes())
        self.most = max(self.most, self.now)
        return out

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def test_a_gradient_under_a_transform_keeps_the_same() -> None:
    """The adapted form is why one comes here: a transform must not bring the maps back."""
    chain = nn.Sequential(*(site(nn.Conv2d(8, 8, 3, padding=1), RELU6) for _ in range(8))).requires_grad_(False)
    u = {n: p.detach() for n, p in chain.named_parameters()}
    peaks = {}
    for name in ("whole", "each", "plain"):
        for m in chain:
            m.plain = name == "plain"  # type: ignore[assignment]
        one = grad(lambda u, x: functional_call(chain, u, (x[None],)).sum())
        with Peak() as watch:
            if name == "whole":
                grad(lambda u: functional_call(chain, u, (torch.zeros(8, 8, 16, 16),)).sum())(u)
            else:
                vmap(one, (None, 0))(u, torch.zeros(8, 8, 16, 16))
        peaks[name] = watch.most
    assert peaks["whole"] < peaks["each"] < peaks["plain"] / 2


def test_a_cotangent_that_is_differentiated() -> None:
    layer, x = made("site"), torch.randn(1, 4, 6, 6).double()
    y, pull, *_ = vjp(lambda u: functional_call(layer, {"U": u}, (x,)), layer.U.detach())
    with pytest.raises(FloorplanError, match="FusedConv: its gradient cannot be differentiated again"):
        grad(lambda g: pull(g)[0].sum())(torch.ones_like(y))
    with pytest.raises(FloorplanError, match="FusedConv: its gradient cannot be differentiated again"):
        jvp(lambda g: pull(g)[0], (torch.ones_like(y),), (torch.ones_like(y),))


def test_per_sample_gradients_of_a_whole_net() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 1), nn.LeakyReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 6, 3), nn.PReLU(), nn.Flatten()),
        nn.Linear(24, 4),
    ).double()
    x, t = torch.randn(6, 3, 16, 16).double(), torch.arange(6) % 4
    gm = floorplan.rewrite(net, x, rank=2, sites="all", measured=False, train_head=True).module.eval()
    for p in gm.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.1)
    learned = {n: p.detach() for n, p in gm.named_parameters() if p.requires_grad}
    for layout in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=layout)

        def loss(u: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(gm, u, (x[None],)), t[None])

        got = vmap(grad(loss), (None, 0, 0))(learned, x, t)
        for i in range(len(x)):
            gm.zero_grad()
            F.cross_entropy(gm(x[i : i + 1]), t[i : i + 1]).backward()
            for n, p in gm.named_parameters():
                if p.requires_grad:
                    same(got[n][i], p.grad)


@pytest.mark.parametrize("name", ["Dropout", "Dropout2d"])
def test_dropout_draws_for_each_sample(name: str) -> None:
    layer, x = PackedDropout(name, 0.5), torch.ones(4, 3, 8, 8)
    gx = vmap(grad(lambda x: layer(x).sum()), randomness="different")(x)
    assert set(gx.unique().tolist()) == {0.0, 2.0} and not torch.equal(gx[0], gx[1])


def test_what_is_approximate_has_one_derivative() -> None:
    layer, x = LossyActivation("SiLU", 4), torch.randn(3, 5)
    y = x.clone().requires_grad_()
    layer(y).sum().backward()
    same(vmap(grad(lambda x: layer(x).sum()))(x), y.grad)
    with pytest.raises(FloorplanError, match="LossyActivation: an approximate gradient has no further derivative"):
        jvp(layer, (x,), (x,))


@pytest.mark.parametrize("name", LAYERS)
def test_a_second_derivative_of_plain_autograd_is_refused_by_name(name: str) -> None:
    """Even where the incoming gradient needs none itself: the weights and the gate may depend on what is asked."""
    layer = made(name)
    x = torch.randn(2, 4, 6, 6).double().requires_grad_()
    (gx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(FloorplanError, match="^.+: its gradient cannot be differentiated again.*the rewrite$"):
        gx.square().sum().backward()


def test_every_function_says_its_layer_and_its_formula() -> None:
    functions = CompactFunction.__subclasses__()
    assert len(functions) >= 12
    for f in functions:
        assert f.layer and f.formula is not CompactFunction.formula


def test_who_learns() -> None:
    x = torch.zeros(2, requires_grad=True)
    assert learns(None, x) and not learns(None, x.detach()) and not learns()
    with torch.no_grad():
        assert not learns(x)
    assert vmap(grad(lambda t: t.sum() * learns(t)))(torch.ones(2, 3)).all()
    assert grad(lambda t: vmap(lambda s: s.sum() * learns(s))(t).sum())(torch.ones(2, 3)).all()
    assert not vmap(lambda t: t * learns(t))(torch.ones(3)).any()


def test_a_function_of_ones_own() -> None:
    class Double(CompactFunction):
        layer = "Double"

        @staticmethod
        def formula(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor]:
            return (g * 2,)

    same(vmap(grad(lambda x: call(Double, x).sum()))(torch.ones(2, 3)), torch.full((2, 3), 2.0))
