"""A forward that puts other memory behind its own tensors: what is kept is counted right, each time."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import floorplan
from floorplan.api import measure


class _Net(nn.Module):
    """Convs about a layer whose forward changes what memory its tensors have."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(torch.randn(8))
        self.register_buffer("mask", torch.ones(8, 8, 3, 3))
        self.after = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(self.norm(self.before(x)))
        return self.after(F.elu(self.middle(y)))

    def middle(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class NewWeight(_Net):
    def middle(self, y: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return F.conv2d(y, self.weight, self.bias)


class NewScale(_Net):
    def middle(self, y: Tensor) -> Tensor:
        self.norm.weight.data = self.norm.weight.data / 2
        return F.conv2d(self.norm(y), self.weight, self.bias)


class NewMask(_Net):
    mask: Tensor

    def middle(self, y: Tensor) -> Tensor:
        self.mask.data = (self.mask.data * 0.5).contiguous()
        return F.conv2d(y, self.weight * self.mask, self.bias)


class NewMaskObject(_Net):
    mask: Tensor

    def middle(self, y: Tensor) -> Tensor:
        self.mask = self.mask * 0.5
        return F.conv2d(y, self.weight * self.mask, self.bias)


class NewWeightTwice(_Net):
    def middle(self, y: Tensor) -> Tensor:
        for _ in range(2):
            self.weight.data = self.weight.data - self.weight.data.mean()
            y = F.conv2d(y, self.weight, self.bias, padding=1)
        return y


class SetWeight(_Net):
    def middle(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.set_(self.weight.detach().clone())  # type: ignore[call-overload]
        return F.conv2d(y, self.weight, self.bias)


class NewInput(_Net):
    def forward(self, x: Tensor) -> Tensor:
        x.data = x.data - x.data.mean()
        return super().forward(x)

    def middle(self, y: Tensor) -> Tensor:
        return F.conv2d(y, self.weight, self.bias)


NETS = [NewWeight, NewScale, NewMask, NewMaskObject, NewWeightTwice, SetWeight, NewInput]


def kept(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps, by hooks on a real forward, the memory that was there before apart."""
    apart = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), x)]
    before, hold, found = {s.data_ptr() for s in apart}, [], {}

    def pack(t: Tensor) -> Tensor:
        hold.append(s := t.untyped_storage())
        if s.data_ptr() not in before and s.nbytes():
            found[s.data_ptr()] = s.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(found.values())


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (4, 3, 6, 12)], ids=str)
def test_predicted_is_what_hooks_see(net: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = net(), torch.randn(shape)
    true = kept(copy.deepcopy(model), x.clone())
    first, second = floorplan.check(model, x), floorplan.check(model, x)
    assert first.predicted.saved == second.predicted.saved == true
    assert first.verdict == second.verdict and first.verdict != "AT_FLOOR"
    assert measure(copy.deepcopy(model), x.clone()).saved == true
