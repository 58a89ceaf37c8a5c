"""Nets that the planner's tests share, profiled once."""

from functools import cache

import backbones
import small
import smooth_nets
import torch
from steps import graph_of
from torch import Tensor, nn

from floorplan.budget.clock import Clock
from floorplan.budget.net import Net
from floorplan.cost_models.roofline import Fitted, Machine
from floorplan.ledger.losses import target_for
from floorplan.step.studied import studied

MACHINES = {"all": Fitted(Machine(5e10, 5e9, 2e-5), 0.1, 0.2, 3)}


def _model(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "mobile":
        return backbones.mobilenet_v2(), torch.randn(2, 1, 24, 16)
    if name == "t_resnet":
        return backbones.t_resnet(), torch.randn(2, 97, 12)
    if name == "residual":
        return small.Residual(), torch.randn(2, 3, 16, 16)
    return smooth_nets.dense(), torch.randn(2, 3, 16, 16)


NETS = ("mobile", "t_resnet", "residual", "dense")
"""Two backbones, a residual net with a pool, and one of concatenations."""


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """The source model in eval mode, and an input."""
    model, x = _model(name)
    return model.eval(), x


@cache
def net_of(name: str) -> Net:
    """The adapted net, profiled."""
    model, x = model_of(name)
    gm = graph_of(model, x, 2, "auto")
    return Net(studied(gm, (x,)), target_for(gm, (x,), "cross_entropy"), "cross_entropy", Clock(MACHINES))
