"""Two branches or merged, by cost."""

import torch
from steps import graph_of
from torch import nn

from floorplan.step.forms import branches
from floorplan.step.graph import values_of


def test_heavy_weights_on_small_maps_branch() -> None:
    wide = nn.Conv2d(32, 32, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), wide, nn.ReLU(), nn.AvgPool2d(4), nn.Conv2d(32, 32, 1))
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(model, x)
    values = values_of(gm, (x,))
    assert branches(gm, values, 1) == ("_2", "_5")  # 9216 > 2*32*64, 1024 > 2*32*4
    assert branches(gm, values, 4) == ()
    assert branches(gm, values, {"_2": 4, "_5": 1}) == ("_5",)
