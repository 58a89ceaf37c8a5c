"""Which inverted residuals are streamed: nobody else reads their wide maps."""

from typing import Any

import pytest
import torch
from small import Inverted
from steps import graph_of
from torch import Tensor, nn

from floorplan.step.stream_rules import wide
from floorplan.step.studied import studied

X = torch.randn(2, 3, 8, 8)


class Read(nn.Module):
    """Somebody else reads the first (or second) wide map of an inverted residual."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.net, self.which = Inverted(), which

    def forward(self, x: Tensor) -> Any:
        wide = self.net.down[0](torch.relu(self.net.stem(x)))
        deep = self.net.down[2](self.net.down[1](wide))
        out = self.net.down[4](self.net.down[3](deep))
        return out, (wide, deep)[self.which].mean()


def wide_of(model: nn.Module, sites: str = "pointwise") -> set[str]:
    torch.manual_seed(0)
    return wide(studied(graph_of(model.eval(), X, 2, sites), (X,)))


def test_both_residuals_do_without_their_wide_maps() -> None:
    assert wide_of(Inverted()) == {"same_0", "same_2", "down_0", "down_2"}
    assert wide_of(Inverted(act=nn.Identity)) == {"same_0", "same_2", "down_0", "down_2"}


def test_an_adapted_depthwise_conv_or_a_smooth_activation_is_not_streamed() -> None:
    assert wide_of(Inverted(act=nn.SiLU)) == set()


@pytest.mark.parametrize("which", [0, 1])
def test_a_map_that_somebody_else_reads_is_there(which: int) -> None:
    assert wide_of(Read(which)) == set()
