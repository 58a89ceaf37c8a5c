"""The verifier: it passes what is right and names what is wrong."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn

import floorplan
from floorplan.errors import FloorplanError, PassError
from floorplan.graph.driver import Pass, rewrite
from floorplan.graph.fold import to_site
from floorplan.graph.trace import trace
from floorplan.layers.fused import FusedConv
from floorplan.ledger.differ import relative_error
from floorplan.methods.verify import (
    Mismatch,
    Values,
    Verifier,
    compare,
    randomize_adapters,
    same_outputs,
    same_start,
    values,
)
from floorplan.passes import canonicalize, fold_batchnorm

X = torch.randn(2, 4, 6, 5)
ANY = Pass("any", lambda gm: iter(()), tolerance=1e-9)


def net() -> fx.GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return fx.symbolic_trace(model).double()


def with_adapter(gm: fx.GraphModule) -> fx.GraphModule:
    after = copy.deepcopy(gm)
    site = to_site(cast(Any, after.get_submodule("3")))
    site.adapt(2, torch.Generator())
    setattr(after, "3", site)
    return after


def test_relative_error() -> None:
    a = torch.tensor([1.0, -4.0])
    assert relative_error(a, a) == 0 and relative_error(a + 0.4, a) == pytest.approx(0.1)
    assert relative_error(a, a[:1]) == float("inf")
    assert relative_error(a[:0], a[:0]) == 0 and relative_error(a, torch.zeros(2)) == 4


def test_equal_graphs_pass() -> None:
    check, gm = Verifier([X]), net()
    check(ANY, gm, copy.deepcopy(gm))
    check(ANY, gm, with_adapter(gm))


class KeepsTwice(nn.Module):
    """The identity, at the price of a map kept in full."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone().pow(2).sqrt().mul(x.sign())


def test_more_kept_bytes_are_named() -> None:
    gm = net()
    after = copy.deepcopy(gm)
    after.add_module("2", nn.Sequential(after.get_submodule("2"), KeepsTwice()))
    with pytest.raises(Mismatch, match=r"^autograd keeps [\d,]+ bytes where it kept [\d,]+$"):
        Verifier([X])(ANY, gm, after)
    Verifier([X])(ANY, after, gm)


def test_a_changed_output_is_named() -> None:
    gm = net()
    after = copy.deepcopy(gm)
    cast(Any, after.get_submodule("3")).bias.data += 1e-3
    with pytest.raises(Mismatch, match=r"^before and after: output 0 differs by .*allowed 1e-09"):
        Verifier([X])(ANY, gm, after)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 1.001


class Layer(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(x)


class Leafy(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, Layer) or super().is_leaf_module(m, name)


def leafy(layer: nn.Module) -> fx.GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), layer).double()
    return fx.GraphModule(model, Leafy().trace(model))


@pytest.mark.parametrize(
    "call,match",
    [
        (WrongGradient.apply, "gradient of input 0 differs by 1.0e-03"),
        (lambda x: x.detach(), "no gradient reaches input 0 any more"),
        (lambda x: x[:1], "output 0 differs by inf"),
        (lambda x: (x, x), "2 outputs instead of 1"),
        (lambda x: x + float("nan"), "output 0 differs"),
    ],
)
def test_faults_are_named(call: Any, match: str) -> None:
    gm, after = leafy(Layer(lambda x: x * 1)), leafy(Layer(call))
    with pytest.raises(Mismatch, match=match):
        Verifier([X])(ANY, gm, after)


def test_nan_in_the_same_places_is_equal() -> None:
    a = Values([torch.tensor([1.0, float("nan")])], {})
    compare(a, a, 0.0, "same")
    with pytest.raises(Mismatch):
        compare(a, Values([torch.tensor([float("nan"), 1.0])], {}), 1.0, "moved")


def test_an_adapter_whose_own_backward_is_wrong_is_caught(monkeypatch: Any) -> None:
    from floorplan.layers import fused, lowrank

    right = lowrank.up_grad
    monkeypatch.setattr(fused, "up_grad", lambda *a: right(*a) * 1.01)
    gm = net()
    match = r"^against plain autograd: gradient of parameter 3\.U differs by"
    with pytest.raises(Mismatch, match=match):
        Verifier([X])(ANY, gm, with_adapter(gm))


def test_an_adapter_that_moves_the_start_is_caught() -> None:
    gm = net()
    after = with_adapter(gm)
    cast(Any, after.get_submodule("3")).weight.mul_(1.01)
    with pytest.raises(Mismatch, match="^at U = 0: output 0"):
        Verifier([X])(ANY, gm, after)


def test_checking_changes_nothing() -> None:
    gm = net().train()
    after = with_adapter(gm)
    states = [copy.deepcopy(m.state_dict()) for m in (gm, after)]
    rng = torch.get_rng_state()
    Verifier([X])(ANY, gm, after)
    assert torch.equal(rng, torch.get_rng_state()) and gm.training
    for m, old in zip((gm, after), states, strict=True):
        assert all(torch.equal(old[k], v) for k, v in m.state_dict().items())
    assert all(p.grad is None for p in gm.parameters())


def test_draws_depend_on_the_name_alone() -> None:
    a, b = with_adapter(net()), with_adapter(net())
    for gm in (a, b):
        randomize_adapters(gm)
    sites = [gm.get_submodule("3") for gm in (a, b)]
    assert all(isinstance(s, FusedConv) and s.U is not None and s.U.any() for s in sites)
    assert torch.equal(sites[0].U, sites[1].U)  # type: ignore[arg-type]


def test_values_of_several_inputs() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, pair: Any, n: Tensor) -> Any:
            return {"y": x * pair[0], "n": n + 1}

    x, n = torch.ones(3, dtype=torch.float64), torch.arange(3)
    got = values(Two(), (x, (x * 2, 5), n))
    assert sorted(got.gradients) == ["input 0", "input 1"] and len(got.outputs) == 2


def test_in_place_on_the_input_is_allowed() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    x = torch.ones(3)
    got = values(InPlace(), (x,))
    assert torch.equal(x, torch.ones(3)) and "input 0" in got.gradients


def test_same_start() -> None:
    gm = net().float().eval()
    same_start(with_adapter(gm), gm, [X])
    after = with_adapter(gm)
    cast(Any, after.get_submodule("3")).weight.mul_(1.01)
    with pytest.raises(Mismatch, match="^adapted against source: output 0"):
        same_start(after, gm, [X])


def test_same_outputs_is_bitwise_and_leaves_modes_alone() -> None:
    gm = net().float().train()
    gm.get_submodule("1").eval()
    same_outputs(gm, copy.deepcopy(gm), [X], "file")
    assert gm.training and not gm.get_submodule("1").training
    after = copy.deepcopy(gm)
    cast(Any, after.get_submodule("3")).bias.data[0] += 1e-6
    with pytest.raises(FloorplanError, match="^file: what was written does not load back"):
        same_outputs(gm, after, [X], "file")


class Amplifies(nn.Module):
    """A conv and a BatchNorm, and then a map that makes much of little."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.c, self.n, self.d = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.d(self.after(self.n(self.c(x)))))


def _iterated(step: Any, times: int) -> Any:
    def run(y: Tensor) -> Tensor:
        y = torch.sigmoid(y)
        for _ in range(times):
            y = step(y)
        return y

    return run


SENSITIVE = {
    "logistic maps": _iterated(lambda y: 3.95 * y * (1 - y), 35),
    "sine maps": _iterated(lambda y: 0.98 * torch.sin(torch.pi * y), 35),
    "cubic maps": _iterated(lambda y: (4 * (2 * y - 1) ** 3 - 3 * (2 * y - 1) + 1) / 2, 20),
    "a fast sine": lambda y: torch.sin(1e7 * y),
    "a difference of large numbers": lambda y: (y + 1e7) - 1e7,
    "a spread divided by": lambda y: (y + 1e6 - (y + 1e6).mean()) / (1e-3 + (y + 1e6).std()),
    "a power": lambda y: torch.exp(3e5 * (torch.sigmoid(y) - 1)),
}


@pytest.mark.parametrize("name", SENSITIVE)
def test_rounding_that_the_model_itself_amplifies_is_no_fault_of_a_pass(name: str) -> None:
    model = Amplifies(SENSITIVE[name]).eval()
    cast(Any, model.n).running_var.uniform_(0.5, 2.0)
    floorplan.rewrite(model, X, sites="all", measured=False)


def _folded(index: int, name: str, wrong: Any) -> Pass:
    """The fold of BatchNorms, and then a fault in one tensor of one conv."""

    def run(gm: fx.GraphModule) -> Any:
        yield from fold_batchnorm.PASS.run(gm)
        m = [m for m in gm.modules() if isinstance(m, FusedConv | nn.Conv2d)][index]
        old = getattr(m, name).detach()
        setattr(m, name, nn.Parameter(wrong(old)) if isinstance(m, nn.Conv2d) else wrong(old))

    return Pass("wrong", run, fold_batchnorm.PASS.tolerance)


FAULTS = {
    "scaled by a millionth": (0, "weight", lambda w: w * (1 + 1e-6)),
    "the last layer scaled": (-1, "weight", lambda w: w * (1 + 1e-6)),
    "a bias moved": (0, "bias", lambda b: b + 1e-6),
    "a bias lost": (1, "bias", lambda b: b * 0),
    "channels swapped": (0, "weight", lambda w: w[[1, 0, *range(2, len(w))]]),
    "eps left out": (1, "weight", lambda w: w * (1 + 1e-5) ** 0.5),
    "a tap shifted": (0, "weight", lambda w: w.roll(1, -1)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_pass_is_found_on_well_conditioned_nets(name: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.Tanh()]
    source = trace(nn.Sequential(*layers, nn.Conv2d(6, 2, 1)).eval(), [X]).gm.double()
    rewrite(source, (canonicalize.PASS, fold_batchnorm.PASS), Verifier([X]))
    with pytest.raises(PassError, match="^wrong: before and after: output 0 differs by"):
        rewrite(source, (canonicalize.PASS, _folded(*FAULTS[name])), Verifier([X]))
