"""Channel streaming: gradients of plain autograd, and maps that never exist."""

import backbones
import pytest
import torch
from small import Inverted
from steps import check, graph_of
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.step.compile import Schedule, compile_step
from floorplan.step.stream import streams
from floorplan.step.timeline import measure, predict


@pytest.mark.parametrize("nd", [1, 2])
@pytest.mark.parametrize("act", [nn.ReLU6, nn.Identity])
@pytest.mark.parametrize("stream", [1, 7, 24])
@pytest.mark.parametrize("micro", [0, 2])
def test_gradients(nd: int, act: type[nn.Module], stream: int, micro: int) -> None:
    x = torch.randn(3, 3, *[8, 6][:nd], dtype=torch.float64)
    gm = graph_of(Inverted(nd, act, bias=stream != 7).double(), x)
    for layout in ("contiguous", "channels_last")[:nd]:
        step = check(gm, (x,), Schedule(micro, layout=layout, stream=stream))
        assert step.source.count("= stream(") == 2 and step.source.count("stream_grad(") == 2


def test_a_frozen_one_keeps_nothing() -> None:
    x = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    gm = graph_of(Inverted().double(), x)
    for name in ("stem", "same.0", "same.4", "down.0"):
        gm.get_submodule(name).U.requires_grad_(False)
    step = check(gm, (x,), Schedule(stream=5))
    assert "= streamed(" in step.source and ", 5, None)" in step.source


def test_a_wide_map_that_others_read_is_not_streamed() -> None:
    class Tapped(Inverted):
        def forward(self, x: Tensor) -> Tensor:
            wide = self.same[:2](torch.relu(self.stem(x)))
            return self.same[2:](wide).mean(2) + wide.mean((1, 2))[:, None]

    x = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    with pytest.raises(FloorplanError, match="has no inverted residual"):
        compile_step(graph_of(Tapped().double(), x), "sum", x, plan=Schedule(stream=4))


def test_kinds() -> None:
    gm = graph_of(Inverted(), torch.randn(2, 3, 8, 6))
    e, d, p = (gm.get_submodule(f"same.{k}") for k in (0, 2, 4))
    assert streams(e, d, p) and not streams(d, e, p) and not streams(e, p, p) and not streams(e, d, nn.ReLU())


def test_less_memory_exactly_as_predicted() -> None:
    x, y = torch.randn(64, 1, 97, 60), torch.zeros(64, dtype=torch.int64)
    gm = graph_of(backbones.mobilenet_v2(), x[:2], sites="auto")
    step = compile_step(gm, "cross_entropy", x, plan=Schedule(stream=32))
    assert predict(step, (x,), y).peak == 26_647_940  # 48,055,172 with whole maps
    assert predict(step, (x[:4],), y[:4]).blocks == measure(step, (x[:4],), y[:4]).blocks
