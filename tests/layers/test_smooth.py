"""Derivatives by formula against torch's own, at kinks too."""

import numpy as np
import pytest
import torch
from torch import nn

from floorplan.layers.activations import ACTIVATIONS, options_of

ACTS = [
    nn.SiLU(),
    nn.Hardswish(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Mish(),
    nn.ELU(),
    nn.ELU(0.3),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.Softplus(),
    nn.Softplus(3.0, 5.0),
]


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_as_torch(act: nn.Module) -> None:
    known = ACTIVATIONS[type(act)].derivative
    assert known is not None
    derivative, reach, jumps = known(**options_of(act))
    z = np.concatenate([np.linspace(-reach, reach, 4001), jumps, [1e3, -1e3]])
    t = torch.tensor(z, requires_grad=True)
    want = torch.autograd.grad(act(t).sum(), t)[0].numpy()
    assert np.abs(derivative(z) - want).max() < 1e-12
    assert np.abs(derivative(np.array([reach, -reach])) - derivative(np.array([9 * reach, -9 * reach]))).max() < 1e-6


def test_every_known_activation_is_tested() -> None:
    assert {type(a) for a in ACTS} == {a.kind for a in ACTIVATIONS.values() if a.derivative}
