"""A small net, its images, and the net under a method in train mode."""

import torch
from graphs import randomize
from torch import Tensor, fx, nn

from floorplan.graph import driver
from floorplan.graph.trace import trace
from floorplan.methods.catalogue import Options, method


def source() -> nn.Module:
    torch.manual_seed(0)
    return randomize(
        nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
            nn.Conv2d(8, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )
    )


def images(batch: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 4, 8, 8)


def adapted(name: str) -> fx.GraphModule:
    """The net under a method, in train mode; other tests verify the passes."""
    traced = trace(source(), (images(),), both_modes=True)
    gm, _ = driver.rewrite(traced.gm, method(name).passes(Options()), lambda *_: None)
    return gm.train()
