"""Layers in the place of a conv: its frozen weight, factors that train, and what follows from both.

y = conv(x, W + delta(U, …)) + b
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from floorplan.layers.geometry import Geometry, conv, geometry_of, pad
from floorplan.layers.layer import Adapter, PlainConv
from floorplan.layers.macs import Macs
from floorplan.torch_doors import parameters_of


def as_conv_starts(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """A weight (O, I, *k) drawn as nn.Conv2d draws it: kaiming_uniform with a = sqrt(5), in float64."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    draw = torch.rand(list(shape), generator=generator, dtype=torch.float64)
    return (2 * draw - 1) * bound


class ConvAdapter(Adapter):
    """A frozen conv, weight (O, I/g, *k), whose factors are scaled by `scale`; x: (B, I, *spatial).

    A subclass makes its factors (`make`, `start`) and says their `axes` and `delta`; all else has a default.
    """

    geo: Geometry
    weight: Tensor
    bias: Tensor | None
    merges_a_step = 3
    unmergeable = ""
    takes_groups: ClassVar[bool] = False  # `make` and `delta` are right for a grouped conv's weight too

    def __init__(
        self, geometry: dict[str, Any], weight: list[int], rank: int, scale: float = 1.0, bias: bool = False
    ) -> None:
        super().__init__()
        self.geo, self.rank, self.scale = Geometry.of(geometry), rank, scale
        self.in_channels = weight[1] * self.geo.groups
        self.register_buffer("weight", torch.zeros(weight))
        self.register_buffer("bias", torch.zeros(weight[0]) if bias else None)
        self.make(weight)

    def make(self, weight: list[int]) -> None:
        """Register the factors for a weight of that shape: parameters train, buffers are frozen."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to make() its factors")

    @classmethod
    def unfit(cls, geo: Geometry) -> str:
        """Why this form does not exist for a conv, read as `it …`; "" if it does."""
        if geo.transposed:
            return "is defined for convs, not for transposed ones"
        return "" if cls.takes_groups or geo.groups == 1 else "is defined for ungrouped convs"

    @classmethod
    def of(cls, conv: nn.Module, rank: int, generator: torch.Generator, scale: float = 1.0) -> Self | str:
        """The layer that starts as an nn.ConvNd, or why there is none."""
        geo, w, bias = geometry_of(conv), conv.get_parameter("weight").detach(), parameters_of(conv)["bias"]
        if why := cls.unfit(geo):
            return why
        layer = cls(geo.config(), list(w.shape), rank, scale, bias is not None).to(device=w.device, dtype=w.dtype)
        layer.weight = w.clone(memory_format=torch.preserve_format)
        layer.bias = None if bias is None else bias.detach().clone()
        with torch.no_grad():
            layer.start(generator)
        return layer.train(conv.training)

    def start(self, generator: torch.Generator) -> None:
        """Set the factors; the weight is the conv's by now."""

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, rank={self.rank}, scale={self.scale}"

    def merged(self) -> Tensor:
        """The plain weight that computes the same."""
        return (self.weight + self.delta()).detach()

    def plain_form(self) -> PlainConv:
        return PlainConv(self.geo, self.merged(), self.bias)

    def macs(self, x: Sequence[int], y: Sequence[int]) -> Macs:
        """A conv on a weight that each call multiplies out."""
        n = self.weight.numel() * math.prod(y[2:])
        return Macs(n, 0, n, self.rank * self.weight.numel())

    def forward(self, x: Tensor) -> Tensor:
        """(B, I, *spatial) -> (B, O, *spatial')."""
        if x.dim() == len(self.geo.kernel) + 1:
            return self.forward(x[None])[0]
        return self.by_autograd(x) if self.plain else self.run(x)

    def by_autograd(self, x: Tensor) -> Tensor:
        """The formula, in torch's own ops."""
        return conv(pad(x, self.geo), self.weight + self.delta(), self.bias, self.geo, self.geo.groups)

    def run(self, x: Tensor) -> Tensor:
        """The same, as the layer really runs it."""
        return self.by_autograd(x)


def adapters(model: nn.Module) -> list[tuple[str, Adapter]]:
    """Path and layer of every adapter in a model."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, Adapter) and m.rank]


def adapter_rank(model: nn.Module) -> int | None:
    """Rank of an adapted model, None of any other."""
    return max((m.rank for _, m in adapters(model)), default=None)


def zero_factors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The factors that start at zero, each once, by its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, m in adapters(model):
        for name in m.starts_at_zero:
            p = m.get_parameter(name)
            found.setdefault(id(p), (f"{path}.{name}".lstrip("."), p))
    return {name: p for name, p in found.values()}
