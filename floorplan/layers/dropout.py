"""Dropout that keeps one bit a decision.

    y = x * noise,  noise = bit / (1 - p)     keeps the bits: one an element or (sample, channel)

The noise is drawn by torch's own op, so one seed gives one mask whichever of the two is used.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.layers.bits import apply_gate, layout_of, pack_gate
from floorplan.layers.functions import CompactFunction, call, learns
from floorplan.layers.layer import Layer

# dims of an input that torch reads as one sample without a batch dimension; 0 = it never does
DROPOUTS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 2, nn.Dropout2d: 0, nn.Dropout3d: 4}
_KINDS = {k.__name__: k for k in DROPOUTS}
_SHIFTS = "it shifts and scales by its input's statistics, and torch keeps the noise; use Dropout"
REFUSED: dict[type[nn.Module], str] = {nn.AlphaDropout: _SHIFTS, nn.FeatureAlphaDropout: _SHIFTS}


class PackedDropout(Layer):
    """nn.`name` with probability p that keeps one bit a decision; same values, seed for seed."""

    stored = "floorplan.compact_dropout.PackedDropout"

    def __init__(self, name: str, p: float) -> None:
        super().__init__()
        if name not in _KINDS:
            raise ValueError(f"PackedDropout: {name} is unknown; use one of {', '.join(_KINDS)}")
        self.name, self.p = name, float(p)
        self.sample_dims = DROPOUTS[_KINDS[name]]

    @classmethod
    def of(cls, module: Any) -> "PackedDropout | str | None":
        """The packed twin of a dropout, or why it has none; None for what is no dropout."""
        kind = type(module)
        if kind in REFUSED:
            return f"{kind.__name__} cannot be packed, {REFUSED[kind]}"
        return cls(kind.__name__, module.p).train(module.training) if kind in DROPOUTS else None

    def plain_form(self) -> nn.Module:
        return _KINDS[self.name](self.p)

    def extra_repr(self) -> str:
        return f"{self.name}, p={self.p}"

    def forward(self, x: Tensor) -> Tensor:
        """x with a share p set to 0 and the rest divided by 1 - p; x itself in eval mode."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1 or not learns(x):
            return getattr(F, self.name.lower())(x, self.p, True)  # type: ignore[no-any-return]
        if self.name == "Dropout":
            return call(_Elements, x, self.p)
        batch = () if x.dim() == self.sample_dims else x.shape[:1]
        decided = (*batch, x.shape[len(batch)], *[1] * (x.dim() - len(batch) - 1))
        return call(_Channels, x, self.p, decided)


def _drawn(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """A factor for each channel; the draws depend on the number of channels only."""
    ones = torch.ones(1, math.prod(shape), dtype=x.dtype, device=x.device)
    return torch.feature_dropout(ones, p, True).view(shape)


def _scale(p: float, like: Tensor) -> Tensor:
    """1 / (1 - p), rounded as torch rounds it."""
    return torch.ones((), dtype=like.dtype, device=like.device).div_(1 - p)


class _Elements(CompactFunction):
    """Dropout of single elements that keeps a bit each."""

    layer = "PackedDropout"
    formula = staticmethod(F.dropout)

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.p, ctx.fused = p, x.device.type not in ("cpu", "meta")
        if ctx.fused:  # accelerators draw a boolean mask and scale in the accumulation type
            y, noise = torch.native_dropout(x, p, True)
        else:
            noise = F.dropout(torch.ones_like(x), p, True)
            y = x * noise
        ctx.layout = layout_of(noise)
        ctx.save_for_backward(pack_gate(noise, 0.0, math.inf, False))
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        if ctx.fused:
            return apply_gate(g, packed, ctx.layout, 1 / (1 - ctx.p), 0.0), None
        return apply_gate(g, packed, ctx.layout, 1.0, 0.0).mul_(_scale(ctx.p, g)), None


class _Channels(CompactFunction):
    """Dropout of whole channels that keeps a bit each."""

    layer = "PackedDropout"

    @staticmethod
    def formula(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
        return x * _drawn(x, p, shape)

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
        ctx.p, ctx.shape = p, shape
        noise = _drawn(x, p, shape)
        ctx.save_for_backward(pack_gate(noise, 0.0, math.inf, False))
        return x * noise

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        ones = torch.ones(ctx.shape, dtype=g.dtype, device=g.device)
        return g * apply_gate(ones, packed, 0, 1.0, 0.0).mul_(_scale(ctx.p, g)), None, None
