"""Multiply-adds: layer by layer against hand counts, and the step's own."""

import pytest
import torch
from torch import nn

import floorplan
from floorplan.graph.trace import trace
from floorplan.layers.macs import Macs
from floorplan.ledger.losses import LOSSES
from floorplan.ledger.macs import layers_of, merges_of, own_macs
from floorplan.ledger.run import Step

X = torch.zeros(2, 3, 8, 8)


def test_plain_layers() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(256, 5),
    )
    model[1].requires_grad_(False)
    found = layers_of(trace(model, (X,)).gm, (X,))
    assert found == [Macs(6 * 9 * 16, trained=6 * 9 * 16), Macs(6 * 4 * 4 * 16), Macs(1280, trained=1280)]


@pytest.mark.parametrize("groups", [1, 3])
def test_the_steps_own_count(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, groups=groups), nn.Conv2d(6, 6, 3, padding=1, groups=groups))
    gm = trace(model, (X,)).gm
    one, two = 6 * 3 // groups * 9 * 64, 6 * 6 // groups * 9 * 64
    found = own_macs(Step(gm, (X,), torch.zeros(2, 6, 8, 8), LOSSES["sum"]))
    assert found == {"forward": 2 * (one + two), "backward": 2 * (one + 2 * two)}  # no gradient of the input


def test_memflora_merges_twice_and_projects_once() -> None:
    gm = floorplan.rewrite(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)), X, measured=False).module
    found = layers_of(gm, (X,))
    assert merges_of(gm) == 2
    assert found[0].base == 3 * 6 * 9 * 64 and found[0].adapter == 2 * 3 * 64 and found[0].merge == 2 * 3 * 6 * 9
    assert 2 * found[0].adapter + found[0].trained == (2 * 3 + 6 * 2 * 9) * 64  # q once, the gradient of U
