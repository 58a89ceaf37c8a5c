"""Layers of an adapted graph in plain torch terms: the same values, no layer of ours."""

import copy
from typing import Any

import pytest
import torch
from hard_nets import Conv, Norm, same
from merges import X, check, into_source, kinds_in
from torch import nn

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU6(True),
    nn.Hardtanh(-0.5, 1.5),
    nn.LeakyReLU(-0.5),
    nn.Threshold(0.2, -3.0),
    nn.Hardsigmoid(),
    nn.Hardshrink(0.3),
    nn.Softshrink(0.2),
    nn.PReLU(6),
    nn.RReLU(0.1, 0.3),
    nn.SiLU(),
]


@pytest.mark.parametrize("method", ["memflora", "memflora-paper"])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: type(a).__name__)
def test_every_activation_comes_back(act: nn.Module, method: str) -> None:
    if isinstance(act, nn.PReLU):
        act.weight.data.uniform_(0.1, 0.9)
    model = nn.Sequential(same(3, 6), Norm(6), copy.deepcopy(act), Conv(6, 4, 1), Norm(4))
    gm, merged = check(model, X, method=method)
    assert kinds_in(merged) == ["Conv2d", type(act).__name__, "Conv2d"]
    new = next(m for m in merged.modules() if type(m) is type(act))
    want: Any = copy.deepcopy(act)
    if hasattr(want, "inplace"):
        want.inplace = False
    assert repr(new) == repr(want)
    assert into_source(model, gm, X) <= 1e-12


POOLS = [
    (nn.MaxPool1d(3, 2, 1, ceil_mode=True), 1),
    (nn.MaxPool2d((3, 2), dilation=(2, 1)), 2),
    (nn.MaxPool3d(2), 3),
    (nn.AvgPool1d(3, 2, 1, count_include_pad=False), 1),
    (nn.AvgPool2d(3, 2, 1, divisor_override=5), 2),
    (nn.AvgPool3d(2, ceil_mode=True), 3),
    (nn.AdaptiveAvgPool1d(3), 1),
    (nn.AdaptiveAvgPool2d((None, 5)), 2),
    (nn.AdaptiveAvgPool3d(1), 3),
    (nn.Dropout(0.3), 2),
    (nn.Dropout1d(0.3), 1),
    (nn.Dropout2d(0.3), 2),
    (nn.Dropout3d(0.3), 3),
]


@pytest.mark.parametrize("layer,dims", POOLS, ids=str)
def test_every_compact_layer_comes_back(layer: nn.Module, dims: int) -> None:
    conv: Any = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]
    model = nn.Sequential(conv(3, 6, 3, padding=1), layer, conv(6, 4, 1))
    x = torch.randn(2, 3, *[9, 8, 7][:dims])
    merged = check(model, x)[1]
    new = merged.get_submodule("1")
    assert type(new) is type(layer)
    outputs = []
    for m in (layer, new):
        torch.manual_seed(1)
        outputs.append(m.train()(torch.randn(2, 6, *[9, 8, 7][:dims])))
    assert torch.equal(*outputs)
