"""A net whose layers, functions and values may be called anything."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ROLES = ("stem", "act", "pool", "left", "right", "gate", "wide", "deep", "thin", "last")


def get(x: Tensor) -> Tensor:
    """Called as the step's own helper for modules."""
    return x * 0.5


def bottleneck(x: Tensor) -> Tensor:
    """Called as a helper of the step."""
    return x + 0.25


def total(x: Tensor) -> Tensor:
    """Called as another function of the step."""
    return x * x.sigmoid()


class Named(nn.Module):
    """Sites, a pool, a sum, a packed activation, an inverted residual, a head; layers under the given names."""

    def __init__(self, names: Sequence[str] = ROLES) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 1),
            nn.Hardshrink(0.1),
            nn.Conv2d(4, 6, 1),
            nn.Conv2d(6, 6, 3, padding=1, groups=6),
            nn.Conv2d(6, 4, 1),
            nn.Linear(4, 3),
        )
        self.roles = dict(zip(ROLES, names, strict=True))
        for name, layer in zip(names, layers, strict=True):
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        stem, act, pool, left, right, gate, wide, deep, thin, last = (getattr(self, self.roles[r]) for r in ROLES)
        x = pool(act(stem(x)))
        x = gate(left(x) + right(x))
        x = x + thin(deep(wide(x)))
        x = x.masked_fill(x > math.inf, -math.inf).to(torch.device("cpu"))
        return last(x.mean((2, 3)))  # type: ignore[no-any-return]
