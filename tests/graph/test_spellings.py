"""Every spelling of an activation or a pool becomes its module."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from canonical_nets import Net, X, canonical
from torch import Tensor

from floorplan.layers.plain import Clamp

ACTIVATIONS: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (F.relu, "ReLU()"),
    (torch.relu, "ReLU()"),
    (lambda x: x.relu(), "ReLU()"),
    (lambda x: x.relu_(), "ReLU(inplace=True)"),
    (torch.relu_, "ReLU(inplace=True)"),
    (lambda x: F.relu(x, inplace=True), "ReLU(inplace=True)"),
    (F.relu6, "ReLU6()"),
    (F.hardtanh, "Hardtanh(min_val=-1.0, max_val=1.0)"),
    (lambda x: F.hardtanh(x, 0, 6), "Hardtanh(min_val=0, max_val=6)"),
    (lambda x: F.hardtanh_(x, -0.5, 0.5), "Hardtanh(min_val=-0.5, max_val=0.5, inplace=True)"),
    (lambda x: F.leaky_relu(x, 0.2), "LeakyReLU(negative_slope=0.2)"),
    (lambda x: F.leaky_relu_(x), "LeakyReLU(negative_slope=0.01, inplace=True)"),
    (lambda x: F.elu(x, alpha=0.5), "ELU(alpha=0.5)"),
    (F.selu, "SELU()"),
    (torch.selu, "SELU()"),
    (F.celu, "CELU(alpha=1.0)"),
    (F.silu, "SiLU()"),
    (F.mish, "Mish()"),
    (F.gelu, "GELU(approximate='none')"),
    (lambda x: F.gelu(x, approximate="tanh"), "GELU(approximate='tanh')"),
    (F.hardswish, "Hardswish()"),
    (F.hardsigmoid, "Hardsigmoid()"),
    (F.sigmoid, "Sigmoid()"),
    (torch.sigmoid, "Sigmoid()"),
    (lambda x: x.sigmoid(), "Sigmoid()"),
    (torch.special.expit, "Sigmoid()"),
    (torch.tanh, "Tanh()"),
    (lambda x: x.tanh(), "Tanh()"),
    (F.softplus, "Softplus(beta=1.0, threshold=20.0)"),
    (F.logsigmoid, "LogSigmoid()"),
    (lambda x: F.threshold(x, 0.1, 0.0), "Threshold(threshold=0.1, value=0.0)"),
    (lambda x: torch.clamp(x, 0, 6), "Clamp(0, 6)"),
    (lambda x: x.clamp(min=0), "Clamp(0, None)"),
    (lambda x: x.clamp_min(0), "Clamp(0, None)"),
    (lambda x: torch.clamp_max(x, max=0.5), "Clamp(None, 0.5)"),
    (lambda x: torch.clip(x, -1, 1), "Clamp(-1, 1)"),
]


@pytest.mark.parametrize(("fn", "module"), ACTIVATIONS)
def test_every_spelling_of_an_activation(fn: Callable[[Tensor], Tensor], module: str) -> None:
    text, log, _ = canonical(Net(lambda s, x: fn(x * 1)))
    node = text.splitlines()[-1]
    assert node.partition(" = ")[2] == f"{module} <- mul"
    assert list(log.values()) == [""]


POOLS: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda x: F.max_pool2d(x, 3, 2, padding=1),
        "MaxPool2d(kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=False)",
    ),
    (
        lambda x: torch.max_pool2d(x, [2, 2]),
        "MaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=0, dilation=1, ceil_mode=False)",
    ),
    (lambda x: F.avg_pool2d(x, 2, count_include_pad=False), "AvgPool2d(kernel_size=2, stride=2, padding=0)"),
    (lambda x: F.adaptive_avg_pool2d(x, 1), "AdaptiveAvgPool2d(output_size=1)"),
    (lambda x: F.adaptive_max_pool2d(x, cast(Any, (2, None))), "AdaptiveMaxPool2d(output_size=(2, None))"),
    (lambda x: F.max_pool1d(x, 2), "MaxPool1d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)"),
    (lambda x: F.avg_pool1d(x, 2), "AvgPool1d(kernel_size=(2,), stride=(2,), padding=(0,))"),
    (lambda x: F.adaptive_avg_pool1d(x, 1), "AdaptiveAvgPool1d(output_size=1)"),
    (lambda x: F.avg_pool3d(x, 2), "AvgPool3d(kernel_size=2, stride=2, padding=0)"),
]


@pytest.mark.parametrize(("fn", "module"), POOLS)
def test_pools(fn: Callable[[Tensor], Tensor], module: str) -> None:
    x = X[:, :, 0] if "1d" in module else X[:, None] if "3d" in module else X
    text, log, _ = canonical(Net(lambda s, x: fn(x)), x)
    assert text.partition(" = ")[2] == f"{module} <- x" and list(log.values()) == [""]


def test_clamp_passes_the_gradient_at_its_bounds() -> None:
    x = torch.tensor([0.0, 0.5, 6.0, 7.0], requires_grad=True)
    Clamp(0, 6)(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1, 0]
    assert Clamp(**Clamp(0, None).config()).config() == {"low": 0, "high": None}
