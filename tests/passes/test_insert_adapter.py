"""insert_adapter: one layer a chosen conv, by whatever makes it, and what is said where there is none."""

from typing import Any

import pytest
import torch
from graphs import run_passes, show
from torch import Tensor, nn

import floorplan
from floorplan.errors import FloorplanError
from floorplan.layers.adapter import ConvAdapter
from floorplan.methods import catalogue
from floorplan.passes import fold_batchnorm
from floorplan.passes.insert_adapter import adapter

X = torch.randn(2, 4, 6, 6)


class Least(ConvAdapter):
    """The least that a layer must say: one factor, and what it adds."""

    def make(self, weight: list[int]) -> None:
        self.U = nn.Parameter(torch.zeros(weight[0], weight[1]))

    def delta(self) -> Tensor:
        return self.U.view(*self.U.shape, *[1] * (self.weight.dim() - 2)) * torch.ones_like(self.weight)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding="same"), nn.ReLU(), nn.ConvTranspose2d(6, 6, 2), nn.Conv2d(6, 6, 3, groups=6)
    )


def test_the_least_layer_is_verified_and_says_where_it_does_not_fit() -> None:
    gm, log = run_passes(net(), [adapter("least", Least.of, sites="all")], X)
    assert (
        show(gm, log)
        == """\
input_1 = input()
_0 = Least(input_1)
_1 = ReLU(_0)
_2 = ConvTranspose2d(_1)
_3 = Conv2d(_2)
output = output(_3)
# 2: least is defined for convs, not for transposed ones; frozen as it is
# 3: depthwise: one input channel a group, so q would be as wide as the input; frozen as it is"""
    )
    assert [n for n, p in gm.named_parameters() if p.requires_grad] == ["0.U"]


def test_a_folded_site_is_no_conv() -> None:
    source = nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1))
    gm, log = run_passes(source, [fold_batchnorm.PASS, adapter("least", Least.of, sites="all")], X)
    assert [type(m).__name__ for m in gm.children()] == ["FusedConv", "ReLU", "Least"]
    assert [s.node for s in log] == ["3"]


def test_what_makes_the_layer_may_refuse_each_conv() -> None:
    def make(conv: Any, rank: int, generator: torch.Generator) -> ConvAdapter | str:
        return "wants three inputs"

    why = (
        r"^no conv was adapted \(3 looked at with --sites all --rank 2\).*; 0: odd wants three inputs; frozen as it is"
    )
    with pytest.raises(FloorplanError, match=why):
        run_passes(net(), [adapter("odd", make, sites="all")], X)


class NoDelta(Least):
    delta = ConvAdapter.delta


class NoFactors(Least):
    make = ConvAdapter.make


class OddAxes(Least):
    def axes(self) -> dict[str, str]:
        return {"V": "rC"}


@pytest.mark.parametrize(
    "layer,why",
    [
        (NoDelta, "NoDelta does not say its delta"),
        (NoFactors, "insert_odd: NoFactors does not say how to make"),
        (OddAxes, r"0: axes\(\) of OddAxes names V, which the layer does not have"),
    ],
)
def test_what_a_layer_does_not_say_is_named(layer: type[ConvAdapter], why: str) -> None:
    def passes(o: floorplan.Options) -> tuple[floorplan.Pass, ...]:
        return (adapter("odd", layer.of, o.rank, o.sites),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "_REGISTERED", {"odd": floorplan.Method("odd", "", passes)})
        with pytest.raises(FloorplanError, match=why):
            floorplan.rewrite(net(), X, rank=2, method="odd", measured=False)


def test_a_graph_without_convs_is_told_so() -> None:
    with pytest.raises(FloorplanError, match="its graph has no conv layer"):
        run_passes(nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), [adapter("least", Least.of)], X)


def test_the_head_trains_if_asked_and_if_there_is_one() -> None:
    source = nn.Sequential(nn.Conv2d(4, 6, 1), nn.Flatten(), nn.Linear(216, 3))
    gm, _ = run_passes(source, [adapter("least", Least.of, train_head=True)], X)
    assert {n for n, p in gm.named_parameters() if p.requires_grad} == {"0.U", "2.weight", "2.bias"}
    with pytest.raises(FloorplanError, match="^--train-head: the model has no Linear layer"):
        run_passes(net(), [adapter("least", Least.of, sites="all", train_head=True)], X)
