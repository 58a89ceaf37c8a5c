"""What every layer with an adapter has in common."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from floorplan.layers.geometry import Geometry


def as_conv_starts(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """A weight (O, I, *k) drawn as nn.Conv2d draws it: kaiming_uniform with a = sqrt(5), in float64."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    draw = torch.rand(list(shape), generator=generator, dtype=torch.float64)
    return (2 * draw - 1) * bound


class Adapter(nn.Module):
    """A frozen layer with trained factors of rank `rank` (0: none)."""

    rank: int

    def axes(self) -> dict[str, tuple[int, set[int]]]:
        """Tensor -> its rank axis and its width axes; what is not named has widths in axes 0 and 1."""
        raise NotImplementedError


class ConvAdapter(Adapter):
    """A frozen conv, weight (O, I/g, *k), whose factors are scaled by `scale`."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, geometry: dict[str, Any], weight: list[int], rank: int, scale: float = 1.0, bias: bool = False
    ) -> None:
        super().__init__()
        self.geo, self.rank, self.scale = Geometry.of(geometry), rank, scale
        self.register_buffer("weight", torch.zeros(weight))
        self.register_buffer("bias", torch.zeros(weight[0]) if bias else None)

    def config(self) -> dict[str, Any]:
        """Constructor arguments as plain data."""
        return {
            "geometry": self.geo.config(),
            "weight": list(self.weight.shape),
            "rank": self.rank,
            "scale": self.scale,
            "bias": self.bias is not None,
        }

    def extra_repr(self) -> str:
        """What a reader of the graph wants to know."""
        return f"{list(self.weight.shape)}, rank={self.rank}, scale={self.scale}"


def adapters(model: nn.Module) -> list[tuple[str, Adapter]]:
    """Path and layer of every adapter in a model."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, Adapter) and m.rank]


def adapter_rank(model: nn.Module) -> int | None:
    """Rank of an adapted model, None of any other."""
    ranks = {m.rank for _, m in adapters(model)}
    return max(ranks) if ranks else None
