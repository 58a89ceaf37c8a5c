"""Functions that a graph calls as they are, in the model's own code and in torch's, and names that are put back."""

from typing import Any

import pytest
import torch
from torch import nn
from traced_nets import Net, agree, conv

from floorplan.graph import recorded
from floorplan.graph.trace import trace

X = torch.randn(2, 3, 8, 8)


class Boxed(Net):
    def forward(self, x: Any, boxes: Any) -> Any:  # type: ignore[override]
        return self.fn(self, x, boxes)


@pytest.mark.parametrize("make", ["zeros", "ones", "empty", "rand", "randn"])
def test_a_traced_size_may_stand_beside_others(make: Any) -> None:
    t = trace(Net(lambda s, x: s.c(x) + 0 * getattr(torch, make)(x.shape[0], 1, 1, 1), c=conv()), [X])
    assert not t.opaque and not t.notes
    assert all(t.gm(torch.randn(n, 3, 8, 8)).shape[0] == n for n in (1, 5))
    assert any(n.target is getattr(torch, make) for n in t.gm.graph.nodes)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.c(x)[torch.randperm(x.shape[0])],
        lambda s, x: s.c(x) + torch.randint(0, 3, (x.shape[0], 1, 1, 1)),
        lambda s, x: s.c(x).view(len(x), -1),
        lambda s, x: s.c(x) + torch.zeros(len(s.c(x)), 1, 1, 1),
        lambda s, x: s.c(x) * torch.arange(len(x))[:, None, None, None],
        lambda s, x: s.c(x).expand(len(x), -1, -1, -1) / len(x),
        lambda s, x: [s.c(x).sum() / len(x), len([x, x])][0],
    ],
)
def test_len_and_draws_follow_the_batch(forward: Any) -> None:
    t = trace(Net(forward, c=conv()), [X])
    assert not t.opaque and not t.notes
    for n in (1, 5):
        other = torch.randn(n, 3, 8, 8)
        torch.manual_seed(0)
        got = t.gm(other)
        torch.manual_seed(0)
        assert torch.equal(got, Net(forward, c=t.gm.get_submodule("c"))(other))


def test_names_are_put_back() -> None:
    zeros = torch.zeros
    trace(Net(lambda s, x: s.c(x) + torch.zeros(len(x), 1, 1, 1), c=conv()), [X])
    assert torch.zeros is zeros and "len" not in globals()
    model = Net(lambda s, x: 1 / 0, c=conv())
    trace(model, [X])
    assert torch.zeros is zeros and "len" not in globals()


def test_detection_ops_are_nodes() -> None:
    ops = pytest.importorskip("torchvision.ops")
    boxes = torch.tensor([[0.0, 0, 0, 6, 6], [1, 2, 2, 7, 7]])
    offsets = torch.zeros(2, 18, 6, 6)
    cases: dict[str, Any] = {
        "roi_align": lambda s, x, b: ops.roi_align(s.c(x), b, (3, 3), 1.0, 2),
        "roi_pool": lambda s, x, b: ops.roi_pool(s.c(x), b, 2),
        "ps_roi_align": lambda s, x, b: ops.ps_roi_align(s.c(x), b, 1),
        "deform_conv2d": lambda s, x, b: ops.deform_conv2d(s.c(x), offsets, s.k.weight),
        "box_iou": lambda s, x, b: (s.c(x), ops.box_iou(b[:, 1:], b[:, 1:])),
        "box_convert": lambda s, x, b: (s.c(x), ops.box_convert(b[:, 1:], "xyxy", "cxcywh")),
        "sigmoid_focal_loss": lambda s, x, b: ops.sigmoid_focal_loss(s.c(x), torch.zeros_like(s.c(x))),
        "nms": lambda s, x, b: (s.c(x), ops.nms(b[:, 1:], b[:, 0], 0.5)),
    }
    for name, forward in cases.items():
        model = Boxed(forward, c=conv(), k=nn.Conv2d(3, 4, 3))
        t = trace(model, [X, boxes])
        assert [n for n in t.gm.graph.nodes if getattr(n.target, "__name__", "") == name] and not t.opaque, name
        agree(model, t.gm, X, boxes)


def test_names_are_rebound_and_put_back() -> None:
    space = {"a": len, "b": 3, "c": len}
    with recorded._rebound([space], {id(len): sum}):
        assert space == {"a": sum, "b": 3, "c": sum}
    assert space == {"a": len, "b": 3, "c": len}
