"""Where no rule knows whether samples touch, gradients of few of them together and alone tell."""

from typing import Any

import pytest
import torch
from steps import graph_of
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.step.samples import refuse_coupled
from floorplan.step.trial import refuse_unlike

X = torch.randn(4, 3, 8, 8)


class Opaque(nn.Module):
    """Branches on values, so that it runs as a whole."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.couples, self.scale = couples, nn.Parameter(torch.zeros(8))

    def forward(self, y: Tensor) -> Tensor:
        if float(y.detach().abs().max()) > 1e9:
            return y
        return y + self.scale * (y.mean(0) if self.couples else y.square())


class Centring(torch.autograd.Function):
    """Its forward knows no other samples, its backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class Centred(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return Centring.apply(y)  # type: ignore[no-any-return,no-untyped-call]


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv, self.inner, self.head = nn.Conv2d(3, 8, 3), inner, nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inner(torch.relu(self.conv(x)).mean((2, 3))))


def test_untraced_modules_are_tried_on_gradients() -> None:
    for inner in (Opaque(True), Centred()):
        gm = graph_of(Around(inner), X)
        with pytest.raises(FloorplanError, match="depends on the other samples of its batch"):
            refuse_coupled(gm, (X,))
    gm = graph_of(Around(Opaque(False)), X)
    before = {k: v.clone() for k, v in gm.state_dict().items()}
    drawn = torch.get_rng_state()
    refuse_coupled(gm, (X,))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(v, before[k]) for k, v in gm.state_dict().items())
    assert all(p.grad is None for p in gm.parameters())


class Infinite(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        if float(y.detach().abs().max()) > 1e9:
            return y
        return (y - y.detach()).log().clamp(-1e30, 1e30) * 0 + y / (y - y)


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(FloorplanError, match="not finite"):
        refuse_coupled(graph_of(Around(Infinite()), X), (X,))


class DropPath(nn.Module):
    """Drops samples at random, and waits behind a scale of zero for another sample."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.couples, self.scale = couples, nn.Parameter(torch.zeros(8))

    def forward(self, y: Tensor) -> Tensor:
        kept = y.new_empty((y.shape[0], 1)).bernoulli_(0.5)
        return y + self.scale * kept * (y.flip(0) if self.couples else y)


def test_draws_are_constants_and_closed_branches_open() -> None:
    unknown = {"inner": "is not known"}
    refuse_unlike(Around(DropPath(False)), (X,), [True], unknown)
    with pytest.raises(FloorplanError, match="^schedule: inner: is not known, and output of a sample depends on") as e:
        refuse_unlike(Around(DropPath(True)), (X,), [True], unknown)
    assert str(e.value).endswith("use the whole batch")
    with pytest.raises(FloorplanError, match="schedule: is not known, and 3 random samples give RuntimeError"):
        refuse_unlike(Around(nn.Linear(9, 8)), (X,), [True], {"": "is not known"})


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, y: Tensor) -> Tensor:
        self.mean.copy_(y.detach().mean(0))
        return y


def test_what_the_forward_writes_every_part_would() -> None:
    model = Around(Writing())
    with pytest.raises(FloorplanError, match="writes to inner.mean, which every part would do"):
        refuse_unlike(model, (X,), [True], {"": "is not known"})
    assert not model.inner.mean.any()
