"""The verdict is sound: what reaches the floor is at it, and no trick makes a model look as if it were."""

from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from hard_nets import Lambda, block2, pair, same
from kinds import ABOVE, FLOOR, Remember, images
from torch import Tensor, nn

import floorplan
from floorplan.ledger.criterion import AT_FLOOR, UNPROVEN, evaluate


@pytest.mark.parametrize("name", FLOOR)
def test_reaches_the_floor(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = FLOOR[name]()
    report = floorplan.check(model, inputs, rank=2, sites="all", measured=True)
    assert report.predicted == report.measured
    assert report.predicted.saved == report.predicted.saved_census
    assert report.verdict == AT_FLOOR, [(e.node, e.reason) for e in report.proof.guilty]


@pytest.mark.parametrize("name", ABOVE)
def test_never_at_the_floor(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ABOVE[name]()
    report = floorplan.check(model, inputs, rank=2, sites="all", measured=True)
    assert report.predicted == report.measured
    assert report.predicted.saved == report.predicted.saved_census
    assert report.verdict != AT_FLOOR
    assert report.proof.guilty and all(e.reason and e.fix for e in report.proof.guilty)


def test_the_rank_of_a_map_as_wide_as_the_rank_is_no_bottleneck() -> None:
    model, inputs = ABOVE["as-wide-as-the-rank"]()
    report = floorplan.check(model, inputs, rank=1, sites="all")
    assert {e.node for e in report.proof.guilty} == {"sigmoid"}


def test_a_hidden_tensor_is_found_by_the_census() -> None:
    report = floorplan.check(*ABOVE["hidden-on-ctx"](), rank=2, sites="all")
    (guilty,) = report.proof.guilty
    assert guilty.hidden and "census" in guilty.reason


class Aside(nn.Module):
    """Puts every input on a list that outlives the step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[Tensor]] = [[]]

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].append(x.detach())
        return x * 2


@pytest.mark.parametrize("layer", [Remember, Aside])
def test_a_model_that_stores_tensors_aside_is_not_proved(layer: type[nn.Module]) -> None:
    model = Lambda(lambda m, x: m.aside(m.c1(x)), c1=same(3, 8), aside=layer())
    report = floorplan.check(model, images())
    assert report.verdict == UNPROVEN
    assert report.predicted.saved == report.predicted.saved_census == 4 * 4 * 8 * 144
    assert "outlives the forward" in report.proof.guilty[0].reason


def test_a_measured_figure_that_disagrees_disproves_the_floor() -> None:
    model = Lambda(block2, **pair(8))
    report = floorplan.check(model, images(), rank=2, sites="all", measured=True)
    assert report.verdict == AT_FLOOR and report.measured is not None
    other = replace(report.measured, saved=report.measured.saved + 4)
    assert replace(report, measured=other).verdict == UNPROVEN
    assert "measured differs" in str(replace(report, measured=other))


def test_frozen_models_keep_nothing() -> None:
    model = Lambda(lambda m, x: F.silu(m.c1(x)), c1=same(3, 8)).requires_grad_(False)
    report = floorplan.check(model, images(), measured=True)
    assert report.predicted == report.measured and report.predicted.saved == 0
    assert report.verdict == AT_FLOOR and report.tensors == ()


def test_a_bias_alone_keeps_no_map_before_it() -> None:
    model = Lambda(lambda m, x: m.c2(F.relu(m.c1(x))), c1=same(3, 8), c2=same(8, 4)).requires_grad_(False)
    model.c1.bias.requires_grad_(True)
    report = floorplan.check(model, images(), measured=True)
    assert report.predicted == report.measured and report.predicted.saved == 4 * 4 * 8 * 144


def test_formulas_hold_at_other_sizes() -> None:
    small, large = images(3, 3, 10, 9), images(5, 3, 16, 14)
    model = Lambda(lambda m, x: m.c2(F.silu(m.c1(x))), c1=same(3, 8, stride=2), c2=same(8, 4))
    entries = floorplan.check(model, small).proof.kept
    sizes = {"B": 5, "H0": 16, "W0": 14, "C1": 8, "C2": 3, "C3": 4}
    assert evaluate(entries, sizes) == floorplan.check(model, large).predicted.saved
    assert all(isinstance(e.size, sympy.Expr) for e in entries)


def test_state_and_inputs_stand_apart() -> None:
    report = floorplan.check(Lambda(lambda m, x: m.c1(x), c1=same(3, 8)), images())
    assert {(e.owner, e.verdict) for e in report.tensors} == {("state", "apart"), ("input", "apart")}
    assert report.predicted.saved == 0 and report.predicted.saved_refcount == 4 * 4 * 3 * 144
