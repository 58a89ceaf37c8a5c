"""Plain modules that a graph calls in place of functions and flags of a forward."""

from typing import Any

import torch
from torch import Tensor, nn

from floorplan.layers.layer import Layer, PlainCall, PlainNorm


class Clamp(Layer):
    """min(max(x, low), high); unlike Hardtanh its gradient passes at the bounds too."""

    stored = "floorplan.canonical.Clamp"
    pillar = "activation"

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        """Clamp elementwise, any shape."""
        return torch.clamp(x, self.low, self.high)

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {"low": self.low, "high": self.high}

    def plain_form(self) -> PlainCall:
        """torch.clamp."""
        return PlainCall(torch.clamp, (self.low, self.high))

    def extra_repr(self) -> str:
        """The bounds."""
        return f"{self.low}, {self.high}"


class AnyBatchNorm(nn.BatchNorm2d, Layer):
    """A BatchNorm of any number of dimensions; a fixed one ignores train()."""

    stored = "floorplan.canonical.AnyBatchNorm"
    pillar = "normalization"

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True, fixed: bool = False
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.fixed = fixed
        self.train(not fixed)

    def train(self, mode: bool = True) -> "AnyBatchNorm":
        """Follow the model's mode, unless fixed."""
        super().train(mode and not self.fixed)
        return self

    def _check_input_dim(self, input: Tensor) -> None:
        """Any shape that F.batch_norm takes."""

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        names = ("num_features", "eps", "momentum", "affine", "fixed")
        return {n: getattr(self, n) for n in names}

    def plain_form(self) -> PlainNorm | None:
        """F.batch_norm of a fixed one."""
        if not self.fixed or self.running_mean is None or self.running_var is None:
            return None
        return PlainNorm(self.running_mean, self.running_var, self.weight, self.bias, self.eps)


class TrainingFlag(Layer):
    """Gives the graph the training flag of the module it stands in."""

    stored = "floorplan.trace.TrainingFlag"

    def forward(self) -> bool:
        """Whether the module is in training mode."""
        return self.training
