"""Copies of a structure: other modules, the same tensors."""

from typing import Any

import torch
from torch import nn

from floorplan.graph.copies import clone_structure


def test_a_copy_shares_parameters_buffers_and_computed_weights() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=None), nn.Linear(2, 2))
    model[2].computed = model[2].weight * 2  # no leaf: deepcopy alone refuses it
    twin: Any = clone_structure(model)
    assert twin is not model and twin[0] is not model[0]
    for (name, a), (_, b) in zip(
        model.state_dict(keep_vars=True).items(), twin.state_dict(keep_vars=True).items(), strict=True
    ):
        assert a is b, name
    assert twin[2].computed is model[2].computed
    twin[0].weight = nn.Parameter(torch.zeros(4, 3, 1, 1))
    assert model[0].weight.any()


def test_a_momentum_that_reads_a_counter_becomes_a_number() -> None:
    model: Any = nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(4, momentum=0.3))
    twin: Any = clone_structure(model)
    assert (twin[0].momentum, twin[1].momentum) == (0.1, 0.3) and model[0].momentum is None
