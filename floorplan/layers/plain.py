"""Plain modules that a graph calls in place of functions and flags of a forward."""

from typing import Any

import torch
from torch import Tensor, nn

from floorplan.layers.layer import Layer, PlainCall, PlainNorm


class Clamp(Layer):
    """torch.clamp(x, low, high), its gradient at the bounds as this torch has it: 1 in 2.13, 0 since 2.14."""

    stored = "floorplan.canonical.Clamp"
    pillar = "activation"

    def __init__(self, low: float | None = None, high: float | None = None, inplace: bool = False) -> None:
        super().__init__()
        self.low, self.high, self.inplace = low, high, inplace

    def forward(self, x: Tensor) -> Tensor:
        return (torch.clamp_ if self.inplace else torch.clamp)(x, self.low, self.high)

    def config(self) -> dict[str, Any]:
        """Constructor arguments; files written before it could work in place have the bounds alone."""
        return {"low": self.low, "high": self.high} | ({"inplace": True} if self.inplace else {})

    def plain_form(self) -> PlainCall:
        return PlainCall(torch.clamp_ if self.inplace else torch.clamp, (self.low, self.high))

    def extra_repr(self) -> str:
        return f"{self.low}, {self.high}" + (", inplace=True" if self.inplace else "")


def _passes_at_bounds() -> bool:
    """Whether the gradient of torch.clamp passes where its input is a bound."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(torch.clamp(x, min=0.0), x)[0])


CLAMP_PASSES = _passes_at_bounds()


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
        super().train(mode and not self.fixed)
        return self

    def _check_input_dim(self, input: Tensor) -> None:
        """Any shape that F.batch_norm takes."""

    def plain_form(self) -> PlainNorm | None:
        if not self.fixed or self.running_mean is None or self.running_var is None:
            return None
        return PlainNorm(self.running_mean, self.running_var, self.weight, self.bias, self.eps)


class TrainingFlag(Layer):
    """Gives the graph the training flag of the module it stands in."""

    stored = "floorplan.trace.TrainingFlag"

    def forward(self) -> bool:
        return self.training
