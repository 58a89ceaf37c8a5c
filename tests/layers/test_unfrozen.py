"""A frozen tensor of a layer that its owner lets train: the gradient of the formula, or nothing of it is counted."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import floorplan
from floorplan import Schedule, compile_step
from floorplan.layers.activations import PackedActivation
from floorplan.layers.branch import RankBranch
from floorplan.layers.factor import FactorConv
from floorplan.layers.fused import ChannelAffine, FusedConv
from floorplan.layers.geometry import geometry_of
from floorplan.layers.lite import FrozenConv, TinySite
from floorplan.layers.paper import PaperSite
from floorplan.torch_doors import tensors_of

CONV = nn.Conv2d(4, 6, 3, padding=1)
GEO, WEIGHT = geometry_of(CONV).config(), list(CONV.weight.shape)
RELU6 = {"name": "ReLU6", "options": {}}


def site(conv: Any = CONV, act: dict[str, Any] | None = RELU6) -> FusedConv:
    layer = FusedConv(geometry_of(conv).config(), list(conv.weight.shape), scale=True, act=act)
    layer.adapt(1, torch.Generator().manual_seed(0))
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "site": (site, "weight bias scale P"),
    "grouped site": (lambda: site(nn.Conv2d(4, 6, 3, padding=1, groups=2), None), "weight bias scale P"),
    "transposed site": (lambda: site(nn.ConvTranspose2d(4, 6, 2, stride=2)), "weight bias scale P"),
    "published site": (
        lambda: PaperSite(6, GEO, WEIGHT, bias=True, rank=2, act=RELU6),
        "weight bias gamma beta mean var P",
    ),
    "frozen published site": (
        lambda: PaperSite(6, GEO, WEIGHT, bias=True, act=RELU6),
        "weight bias gamma beta mean var",
    ),
    "norm": (lambda: PaperSite(4, act=RELU6), "gamma beta mean var"),
    "tiny site": (lambda: TinySite(6, GEO, WEIGHT, bias=True, act=RELU6), "weight bias gamma beta mean var"),
    "factors": (lambda: FactorConv(GEO, WEIGHT, 2, 1.5, bias=True), "weight bias D"),
    "frozen conv": (lambda: FrozenConv(GEO, WEIGHT, True), "weight bias"),
    "branch": (lambda: RankBranch(GEO, WEIGHT, 2), "P scale"),
    "affine": (lambda: ChannelAffine(4), "scale bias"),
    "slope": (lambda: PackedActivation("PReLU", {"num_parameters": 4}), "slope"),
}
CASES = [(layer, name) for layer, (_, names) in LAYERS.items() for name in names.split()]


def made(layer: str) -> nn.Module:
    torch.manual_seed(1)
    m = LAYERS[layer][0]().double()
    for t in (*m.parameters(), *m.buffers()):
        if t.is_floating_point():
            t.data.normal_()
    if isinstance(m, PaperSite):
        m.var.data.abs_().add_(0.5)
    return m


def let_train(m: nn.Module, name: str, how: str) -> None:
    t = tensors_of(m)[name]
    assert t is not None
    if how == "flag":
        t.requires_grad_()
    elif name not in dict(m.named_parameters()):
        delattr(m, name)
        m.register_parameter(name, nn.Parameter(t.detach().clone()))


def formula(m: nn.Module, x: Tensor) -> Tensor:
    """The layer in torch's own ops."""
    if isinstance(m, ChannelAffine):
        return x * m.scale.view(1, -1, 1, 1) + m.bias.view(1, -1, 1, 1)
    if isinstance(m, PackedActivation):
        assert m.slope is not None
        return F.prelu(x, m.slope)
    if isinstance(m, FrozenConv):
        return F.conv2d(x, m.weight, m.bias, padding=1)
    m.plain = True
    try:
        return m(x)  # type: ignore[no-any-return]
    finally:
        m.plain = False


@pytest.mark.parametrize("how", ["parameter", "flag"])
@pytest.mark.parametrize(("layer", "name"), CASES)
def test_its_gradient_is_that_of_the_formula(layer: str, name: str, how: str) -> None:
    m = made(layer)
    let_train(m, name, how)
    x = torch.randn(2, 4, 6, 6).double().requires_grad_()
    learned = {n: t for n, t in tensors_of(m).items() if t is not None and t.requires_grad}
    assert name in learned
    g = torch.randn_like(m(x))
    got = torch.autograd.grad(m(x), [x, *learned.values()], g)
    want = torch.autograd.grad(formula(m, x), [x, *learned.values()], g)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.h = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.n(self.a(x)))
        return self.h((torch.relu(self.b(y)) + y).mean((2, 3)))


X, T = torch.randn(4, 3, 12, 12), torch.arange(4)


def rewritten(method: str = "memflora") -> Any:
    torch.manual_seed(0)
    gm = floorplan.rewrite(Net(), X, rank=1, method=method, sites="all", measured=False).module
    for p in gm.parameters():
        p.data.add_(torch.randn_like(p), alpha=0.05)
    return gm


def second(gm: Any) -> Any:
    """The last layer with a weight of a conv."""
    return [m for m in gm.modules() if isinstance(m, FusedConv | PaperSite | FactorConv)][-1]


@pytest.mark.parametrize("method", ["memflora"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_is_counted_trains_and_what_it_costs_is_said(method: str, name: str) -> None:
    gm = rewritten(method)
    site = second(gm)
    if getattr(site, name, None) is None:
        pytest.skip("it has none")
    before = floorplan.check(gm, X)
    let_train(site, name, "parameter")
    after = floorplan.check(gm, X)
    real = floorplan.measure(gm, X)
    assert after.predicted == real
    own = getattr(site, name)
    assert after.predicted.trainable_parameters == before.predicted.trainable_parameters + own.numel()
    x = X.new_zeros(4, 8, 12, 12)
    if name == "bias":
        assert (before.verdict, after.verdict) == ("AT_FLOOR", "AT_FLOOR")
        assert after.predicted.saved <= before.predicted.saved + 4 * own.numel()
    else:
        assert after.verdict == "ABOVE_FLOOR" and after.predicted.saved >= before.predicted.saved + x.nbytes // 2
    F.cross_entropy(gm(X), T).backward()
    assert own.grad is not None and own.grad.abs().max() > 0


@pytest.mark.parametrize("how", ["parameter"])
@pytest.mark.parametrize("schedule", [Schedule()], ids=["whole"])
@pytest.mark.parametrize("name", ["bias"])
def test_a_compiled_step_trains_it_or_says_what_changed(name: str, schedule: Schedule, how: str) -> None:
    gm = rewritten()
    early = compile_step(gm, "cross_entropy", X, plan=schedule)
    let_train(second(gm), name, how)
    with pytest.raises(floorplan.FloorplanError, match=f"{name} was frozen or unfrozen since it was compiled"):
        early(X, T)
    step = compile_step(gm, "cross_entropy", X, plan=schedule)
    F.cross_entropy(gm(X), T).backward()
    learned = [t for t in (*gm.parameters(), *gm.buffers()) if t.requires_grad]
    want = [t.grad for t in learned]
    assert len(want) == 3 and all(g is not None for g in want)
    for t in learned:
        t.grad = None
    step(X, T)
    for t, w in zip(learned, want, strict=True):
        torch.testing.assert_close(t.grad, w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["parameter"])
@pytest.mark.parametrize("name", ["bias"])
def test_it_goes_through_a_file(tmp_path: Path, name: str, how: str) -> None:
    gm = rewritten()
    let_train(second(gm), name, how)
    floorplan.save(gm, tmp_path / "a.pt")
    again = floorplan.load(tmp_path / "a.pt")
    want = {n for n, t in (*gm.named_parameters(), *gm.named_buffers()) if t.requires_grad}
    assert {n for n, t in (*again.named_parameters(), *again.named_buffers()) if t.requires_grad} == want
    assert dict(again.named_parameters()).keys() == dict(gm.named_parameters()).keys()
    assert torch.equal(copy.deepcopy(gm).eval()(X), again.eval()(X))
    merged = floorplan.merge(gm)
    torch.testing.assert_close(merged.eval()(X), gm.eval()(X), rtol=1e-4, atol=1e-5)
