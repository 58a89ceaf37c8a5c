"""Multiply-adds, bytes and calls counted by kind."""

import torch
import torch.nn.functional as F
from steps import graph_of
from torch import nn

from floorplan.budget.work import Work, Worked, step_work
from floorplan.ledger.run import Step


def test_convolutions_by_kind_and_layout() -> None:
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad(), Work() as work:
        F.conv2d(x, torch.randn(8, 4, 1, 1))
        F.conv2d(x.contiguous(memory_format=torch.channels_last), torch.randn(8, 4, 3, 3), padding=1)
        F.conv2d(x, torch.randn(4, 1, 3, 3), padding=1, groups=4)
    found = work.take()
    pixels = 2 * 36
    assert found.by_kind["pointwise, contiguous"][0] == 2 * pixels * 8 * 4
    assert found.by_kind["dense, channels_last"][0] == 2 * pixels * 8 * 4 * 9
    assert found.by_kind["depthwise, contiguous"][0] == 2 * pixels * 4 * 9
    assert found.macs == pixels * (8 * 4 + 8 * 4 * 9 + 4 * 9)
    assert found.by_kind["pointwise, contiguous"][1:] == (4 * (x.numel() + 8 * 4 + pixels * 8), 1)
    assert work.take() == Worked()


def test_views_are_free() -> None:
    x = torch.randn(4, 4)
    with Work() as work:
        x.t().reshape(2, 8).detach()[0].unsqueeze(0)
    assert "pointwise, contiguous" not in work.take().by_kind
    with Work() as work:
        x.view(2, 8).unsqueeze(0)
    assert work.take() == Worked()


def test_amounts_add_up() -> None:
    one, two = Worked({"a": (1.0, 2.0, 3.0)}), Worked({"a": (3.0, 6.0, 3.0), "b": (2.0, 0.0, 0.0)})
    assert one.plus(two, 2).by_kind == {"a": (7.0, 14.0, 9.0), "b": (4.0, 0.0, 0.0)}
    assert one.slope(two, 2).by_kind == {"a": (1.0, 2.0, 0.0), "b": (1.0, 0.0, 0.0)}
    assert one.seconds(lambda kind, amount: sum(amount)) == 6


def test_a_step_under_autograd() -> None:
    x = torch.randn(2, 3, 8, 8)
    gm = graph_of(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)), x)
    found = step_work(Step(gm, (x,), torch.zeros(2, 8, 8, 8), lambda out, target: F.mse_loss(out, target)))
    forward = 2 * 64 * 9 * (3 * 8 + 8 * 8)
    assert found.macs > forward + 2 * 64 * 9 * 8 * 8  # and the second conv's input gradient, adapters beside
