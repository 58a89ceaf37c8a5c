"""Layers that keep packed bits instead of a map for their backward pass.

    y = act(z)       keeps 1 bit an element: lo < z < hi
    gz = g*inside where the bit is 1, g*outside where it is 0

`gate_of` is the table of what can be gated. Pools and dropouts have their own files and are
re-exported here: this is the one place to import compact layers from.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from floorplan.layers.average_pools import ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.layers.bits import apply_gate, layout_of, pack_gate
from floorplan.layers.dropout import PackedDropout, dropout_refusal
from floorplan.layers.layer import Layer
from floorplan.layers.max_pools import PackedMaxPool, pool_refusal
from floorplan.torch_doors import applied

__all__ = [
    "Gate",
    "PackedActivation",
    "PackedDropout",
    "PackedMaxPool",
    "ShapeAdaptiveAvgPool",
    "ShapeAvgPool",
    "activation_refusal",
    "dropout_refusal",
    "gate_of",
    "pool_refusal",
]

SIXTH = 0.1666666716337204  # 1/6 in float32: what torch's Hardsigmoid multiplies by in every dtype


@dataclass(frozen=True)
class Gate:
    """The derivative of a two-valued activation: `inside` for lo < z < hi, `outside` elsewhere."""

    lo: float
    hi: float
    closed: bool  # lo <= z <= hi instead
    inside: float
    outside: float


def _above(threshold: float, outside: float) -> Gate:
    return Gate(float(threshold), math.inf, False, 1.0, float(outside))


def _shrink(m: Any) -> Gate:
    return Gate(-float(m.lambd), float(m.lambd), True, 0.0, 1.0)


def _rrelu(m: Any) -> Gate | str:
    if m.training:
        return "RReLU in train mode draws one slope an element; use LeakyReLU or eval mode"
    return _above(0.0, (m.lower + m.upper) / 2)


def _prelu(m: Any) -> str:
    if m.weight.requires_grad:
        return "PReLU with a trainable slope needs its input for the gradient; freeze the slope"
    return "PReLU has a slope for each channel; kept packed as a layer of its own, not inside a site"


GATES: dict[type[nn.Module], Callable[[Any], Gate | str]] = {
    nn.ReLU: lambda m: _above(0.0, 0.0),
    nn.ReLU6: lambda m: Gate(0.0, 6.0, False, 1.0, 0.0),
    nn.Hardtanh: lambda m: Gate(float(m.min_val), float(m.max_val), False, 1.0, 0.0),
    nn.LeakyReLU: lambda m: _above(0.0, m.negative_slope),
    nn.Threshold: lambda m: _above(m.threshold, 0.0),
    nn.Hardsigmoid: lambda m: Gate(-3.0, 3.0, False, SIXTH, 0.0),
    nn.Hardshrink: _shrink,
    nn.Softshrink: _shrink,
    nn.RReLU: _rrelu,
    nn.PReLU: _prelu,
}

_CURVED = "its derivative is a curve, not two values"
_OF_OUTPUT = "its derivative is a curve of its output"
_OPTIONS = "recompute it exactly, keep a few-bit derivative (lossy), or train with {}"
UNGATEABLE: dict[type[nn.Module], tuple[str, str]] = {
    nn.SiLU: (_CURVED, "ReLU6"),
    nn.Hardswish: ("its derivative is a line between -3 and 3", "ReLU6"),
    nn.GELU: (_CURVED, "ReLU"),
    nn.Mish: (_CURVED, "ReLU6"),
    nn.ELU: ("its derivative is a curve below 0", "LeakyReLU"),
    nn.CELU: ("its derivative is a curve below 0", "LeakyReLU"),
    nn.SELU: ("its derivative is a curve below 0", "LeakyReLU"),
    nn.Sigmoid: (_OF_OUTPUT, "Hardsigmoid"),
    nn.LogSigmoid: (_CURVED, "Hardsigmoid"),
    nn.Tanh: (_OF_OUTPUT, "Hardtanh"),
    nn.Softplus: (_CURVED, "ReLU"),
    nn.Softsign: (_CURVED, "Hardtanh"),
    nn.Tanhshrink: (_CURVED, "Softshrink"),
    nn.GLU: ("it is a product and needs both factors", "ReLU"),
    nn.Softmax: (_OF_OUTPUT, "no softmax inside the network"),
    nn.Softmax2d: (_OF_OUTPUT, "no softmax inside the network"),
    nn.LogSoftmax: (_OF_OUTPUT, "a loss that takes logits"),
}


def gate_of(module: nn.Module) -> Gate | str:
    """The gate of a two-valued activation, or why it has none and what can be done instead."""
    kind = type(module)  # exact: a subclass may compute something else
    if kind in GATES:
        return GATES[kind](module)
    if kind in UNGATEABLE:
        why, other = UNGATEABLE[kind]
        return f"{kind.__name__} cannot be gated, {why}; {_OPTIONS.format(other)}"
    return f"{kind.__name__} is not known to have a two-valued derivative; use one of {_known()}"


def _known() -> str:
    return ", ".join(k.__name__ for k in GATES)


def is_activation(module: nn.Module) -> bool:
    """Whether the tables know this class as an activation."""
    return type(module) in GATES or type(module) in UNGATEABLE


def activation_refusal(module: nn.Module) -> str:
    """Why PackedActivation cannot stand for `module`; "" if it can."""
    if type(module) is nn.PReLU and not module.weight.requires_grad:
        return ""
    gate = gate_of(module)
    return gate if isinstance(gate, str) else ""


_OPTION_NAMES: dict[str, tuple[str, ...]] = {
    "Hardtanh": ("min_val", "max_val"),
    "LeakyReLU": ("negative_slope",),
    "Threshold": ("threshold", "value"),
    "Hardshrink": ("lambd",),
    "Softshrink": ("lambd",),
    "RReLU": ("lower", "upper"),
    "PReLU": ("num_parameters",),
}


class PackedActivation(Layer):
    """A two-valued activation that keeps one bit an element. Any shape; same values as nn.`name`.

    PReLU's frozen slope (C,) or (1,) is the buffer `slope`.
    """

    stored = "floorplan.compact.PackedActivation"
    pillar = "activation"
    slope: Tensor | None

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        kinds = {k.__name__: k for k in GATES}
        if name not in kinds:
            raise ValueError(f"PackedActivation: {name} has no gate; use one of {_known()}")
        self.name, self.options = name, dict(options or {})
        prelu = name == "PReLU"
        self.act = None if prelu else kinds[name](**self.options)
        slope = torch.full((self.options.get("num_parameters", 1),), 0.25) if prelu else None
        self.register_buffer("slope", slope)

    @classmethod
    def of(cls, module: nn.Module) -> "PackedActivation":
        """The packed twin of an activation; ValueError with the reason if it has none."""
        if why := activation_refusal(module):
            raise ValueError(why)
        name = type(module).__name__
        new = cls(name, {n: getattr(module, n) for n in _OPTION_NAMES.get(name, ())})
        if isinstance(module, nn.PReLU):
            new.slope = module.weight.detach().clone()
        return new.train(module.training)

    def config(self) -> dict[str, Any]:
        """Constructor arguments as plain data."""
        return {"name": self.name, "options": dict(self.options)}

    def plain_form(self) -> nn.Module:
        """torch's own."""
        if self.act is not None:
            return self.act
        assert self.slope is not None
        act = nn.PReLU(self.slope.numel())
        act.weight = nn.Parameter(self.slope.detach().clone())
        return act

    def extra_repr(self) -> str:
        """The activation's name and options."""
        return ", ".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    def forward(self, z: Tensor) -> Tensor:
        """act(z), out of place."""
        keeps = torch.is_grad_enabled() and z.requires_grad
        if self.act is None:
            assert self.slope is not None
            slope = self.slope.to(z.dtype)
            y = applied(_GatedPReLU, z, slope) if keeps else F.prelu(z, slope)
            return y
        gate = gate_of(self.act) if keeps else ""
        if isinstance(gate, str):
            return self.act(z)  # type: ignore[no-any-return]
        return applied(_Gated, z, self.act, gate)


class _Gated(torch.autograd.Function):
    """act(z) that keeps the packed gate of z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, act: nn.Module, gate: Gate) -> Tensor:
        ctx.layout, ctx.gate = layout_of(z), gate
        ctx.save_for_backward(pack_gate(z, gate.lo, gate.hi, gate.closed))
        return act(z)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return apply_gate(g, packed, ctx.layout, ctx.gate.inside, ctx.gate.outside), None, None


class _GatedPReLU(torch.autograd.Function):
    """prelu(z, slope) that keeps the sign of z; slope is frozen."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, slope: Tensor) -> Tensor:
        ctx.layout = layout_of(z)
        ctx.save_for_backward(pack_gate(z, 0.0, math.inf, False), slope)
        return F.prelu(z, slope)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        packed, slope = ctx.saved_tensors
        if g.dim() > 1:
            slope = slope.view(1, -1, *[1] * (g.dim() - 2))
        below = apply_gate(g * slope, packed, ctx.layout, 0.0, 1.0)
        return apply_gate(g, packed, ctx.layout, 1.0, 0.0).add_(below), None
