"""From a graph to stages: cuts, regions, what is kept."""

import pytest
import torch
from small import Residual
from steps import graph_of
from torch import nn

from floorplan.errors import FloorplanError
from floorplan.step.program import Builder, branches
from floorplan.step.schedule import Schedule
from floorplan.step.studied import studied, values_of


def test_nothing_upstream_of_the_first_trainable_is_kept() -> None:
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(Residual(), x)
    gm.get_submodule("stem").U.requires_grad_(False)
    program = Builder(studied(gm, (x,))).build()
    assert not program.stages[0].learns and "q_stem" not in program.stages[0].keeps


def test_a_site_without_a_rule_is_a_region() -> None:
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(Residual(), x)
    program = Builder(studied(gm, (x,))).build()
    assert [n.name for r in program.regions for n in r.nodes] == ["pool"]
    assert [n.name for n in program.head.nodes] == ["mean", "drop", "fc", "output"]


def test_cuts_must_be_in_order_and_before_the_head() -> None:
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(Residual(), x)
    for cuts in (("pool", "stem"), ("fc",)):
        with pytest.raises(FloorplanError, match="is no cut in order"):
            Builder(studied(gm, (x,)), Schedule(stages=tuple((c, 1) for c in cuts))).build()
    with pytest.raises(FloorplanError, match="conv: more than one value"):
        Builder(studied(gm, (x,)), Schedule(stages=(("conv", 1),)))


def test_heavy_weights_on_small_maps_branch() -> None:
    wide = nn.Conv2d(32, 32, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), wide, nn.ReLU(), nn.AvgPool2d(4), nn.Conv2d(32, 32, 1))
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(model, x)
    values = values_of(gm, (x,))
    assert branches(gm, values, {"_0": 1, "_2": 1, "_5": 1}) == ("_2", "_5")  # 9216 > 2*32*64, 1024 > 2*32*4
    assert branches(gm, values, {"_0": 4, "_2": 4, "_5": 4}) == ()
    assert branches(gm, values, {"_0": 4, "_2": 4, "_5": 1}) == ("_5",)
