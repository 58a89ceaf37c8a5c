"""What becomes a site, what does not, and with which numbers."""

from typing import Any

from torch import Tensor, fx, nn

from floorplan.graph.edit import calls_of, free_path, is_depthwise, module_calls, set_module
from floorplan.graph.fold import call_reason, to_site
from floorplan.layers.fused import FusedConv


def test_depthwise() -> None:
    layers = [nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(1, 8, 3), nn.Conv2d(4, 8, 3, groups=2)]
    assert [is_depthwise(m) for m in layers] == [True, False, False]
    assert [is_depthwise(to_site(m)) for m in layers] == [True, False, False]
    assert not is_depthwise(nn.Linear(1, 1))


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = nn.Module()
        self.body.up = nn.ConvTranspose2d(3, 3, 2, 2)
        self.body.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body.conv(input=self.body.conv(x))
        return self.body.up(y, output_size=[9, 9])  # type: ignore[no-any-return]


def test_calls() -> None:
    gm = fx.symbolic_trace(Calls())
    assert call_reason(gm, "body.conv") == ""
    assert [len(n.args) for n in calls_of(gm, "body.conv")] == [1, 1]
    reason = "it is called with output_size, which a site does not take"
    assert call_reason(gm, "body.up") == reason
    assert [n.name for n, _ in module_calls(gm, nn.Conv2d)] == ["body_conv", "body_conv_1"]


def test_paths() -> None:
    gm = fx.symbolic_trace(Calls())
    assert free_path(gm, "body.new") == "body.new" and free_path(gm, "other") == "other"
    assert free_path(gm, "body.conv") == "body.conv_1"
    set_module(gm, "body.conv_1", nn.Identity())
    assert free_path(gm, "body.conv") == "body.conv_2"
    set_module(gm, "body.conv", to_site(nn.Conv2d(3, 3, 1)))
    assert isinstance(gm.get_submodule("body.conv"), FusedConv)
