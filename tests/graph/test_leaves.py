"""Which modules are called as a whole: torch's own, and what must not be looked into."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

from floorplan.graph.leaves import is_plain_leaf, leaf_reason
from floorplan.layers.plain import Clamp


def hooked(kind: str) -> nn.Module:
    m = nn.Linear(2, 2)
    getattr(m, f"register_{kind}")(lambda *a: None)
    return m


def patched() -> nn.Module:
    m = nn.Linear(2, 2)
    m.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return m


@pytest.mark.parametrize(
    "m,why",
    [
        (nn.Linear(2, 2), ""),
        (torch.jit.script(nn.ReLU()), "it is a TorchScript module"),
        (parametrizations.weight_norm(nn.Linear(2, 2)), "its weight is parametrized (torch.nn.utils.parametrize)"),
        (nn.utils.weight_norm(nn.Linear(2, 2)), "its weight is recomputed by old-style WeightNorm"),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), "its weight is recomputed by old-style SpectralNorm"),
        (hooked("forward_hook"), "it has forward hooks"),
        (hooked("forward_pre_hook"), "it has forward hooks"),
        (hooked("full_backward_hook"), "it has backward hooks"),
        (hooked("full_backward_pre_hook"), "it has backward hooks"),
        (patched(), "its forward is patched on the instance"),
        (fx.symbolic_trace(nn.Sequential(nn.ReLU())), ""),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_reasons(m: nn.Module, why: str) -> None:
    assert leaf_reason(m) == why


class Renamed(nn.Conv2d):
    """Says more of itself, computes the same."""

    def extra_repr(self) -> str:
        return "mine"


class Other(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Inner(nn.Conv2d):
    """What its parent's forward calls is its own."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, bias) * 2


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    "m,leaf",
    [
        (nn.Conv2d(1, 1, 1), True),
        (Renamed(1, 1, 1), True),
        (Clamp(0, 1), True),
        (nn.MultiheadAttention(2, 1), True),
        (Other(1, 1, 1), False),
        (Inner(1, 1, 1), False),
        (Block(), False),
        (nn.Sequential(), False),
        (nn.ModuleList(), False),
    ],
    ids=lambda v: type(v).__name__,
)
def test_leaves(m: nn.Module, leaf: bool) -> None:
    assert is_plain_leaf(m) is leaf
