"""Activations: one record for each, which everything else reads, and the layer that keeps one bit of them.

    y = act(z)       keeps 1 bit an element: lo < z < hi
    gz = g*inside where the bit is 1, g*outside where it is 0

To add an activation, add its record to _RECORDS.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.layers import smooth
from floorplan.layers.bits import apply_gate, layout_of, pack_gate
from floorplan.layers.functions import CompactFunction, call, learns
from floorplan.layers.layer import Layer
from floorplan.layers.plain import CLAMP_PASSES, Clamp

SIXTH = 0.1666666716337204  # 1/6 in float32: what torch's Hardsigmoid multiplies by in every dtype


@dataclass(frozen=True)
class Gate:
    """The derivative of a two-valued activation: `inside` for lo < z < hi, `outside` elsewhere."""

    lo: float
    hi: float
    closed: bool  # lo <= z <= hi instead
    inside: float
    outside: float


@dataclass(frozen=True)
class Activation:
    """All that is known of one activation."""

    kind: type[nn.Module]
    word: str  # what names of its family contain: ops, and classes of others
    functions: str = ""  # names in torch and of methods
    kernels: str = ""  # aten ops that make one map, like the first argument
    gate: Callable[[Any], Gate | str] | None = None  # of a module, or why this one has none
    ungated: tuple[str, str] = ("", "")  # why no module has one, and what to train with instead
    derivative: Callable[..., smooth.Known] | None = None  # from the options
    rate: str = "all"  # how fast its kernels run: the kind that a roofline knows
    spelled: bool = True  # a call of a function is rewritten to the module
    moded: bool = False  # its gate follows train() and eval()
    arguments: Mapping[str, str] = field(default_factory=dict)  # of functions that take other ones than the options
    make: Callable[..., nn.Module] | None = None  # from these arguments

    @property
    def name(self) -> str:
        """The class's name."""
        return self.kind.__name__

    @property
    def inplace(self) -> bool:
        """Whether it can overwrite its input."""
        return "inplace" in signature(self.kind).parameters

    @property
    def options(self) -> tuple[str, ...]:
        """Names of constructor arguments, in-place flag apart."""
        found = signature(self.kind).parameters.values()
        return tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in _NO_OPTIONS)

    @property
    def ends_sites(self) -> bool:
        """Whether a fused conv may end in it: one gate for all channels and both modes, in place."""
        return self.gate is not None and self.inplace and not self.moded


_NO_OPTIONS = frozenset("inplace init device dtype min_value max_value".split())


def _above(threshold: float, outside: float = 0.0) -> Gate:
    return Gate(float(threshold), math.inf, False, 1.0, float(outside))


def _inside(lo: float, hi: float, inside: float = 1.0) -> Gate:
    return Gate(float(lo), float(hi), False, inside, 0.0)


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


def _clamp(m: Any) -> Gate:
    lo, hi = -math.inf if m.low is None else m.low, math.inf if m.high is None else m.high
    return Gate(float(lo), float(hi), CLAMP_PASSES, 1.0, 0.0)


def _bounded(min: float | None = None, max: float | None = None, inplace: bool = False) -> Clamp:
    return Clamp(min, max, inplace)


_BOUNDS = {"clamp": "min=None max=None", "clip": "min=None max=None", "clamp_min": "min", "clamp_max": "max"}
_CLAMPS = "clamp clamp_min clamp_max"
_CURVED = "its derivative is a curve, not two values"
_OF_OUTPUT = "its derivative is a curve of its output"
_BELOW = ("its derivative is a curve below 0", "LeakyReLU")
_LINE = ("its derivative is a line between -3 and 3", "ReLU6")
_NO_SOFTMAX = (_OF_OUTPUT, "no softmax inside the network")
_RECORDS = (
    Activation(nn.ReLU, "relu", "relu", "relu", lambda m: _above(0.0), rate="clamp"),
    Activation(nn.ReLU6, "relu", "relu6", "hardtanh", lambda m: _inside(0.0, 6.0), rate="clamp"),
    Activation(nn.Hardtanh, "tanh", "hardtanh", "hardtanh", lambda m: _inside(m.min_val, m.max_val), rate="clamp"),
    Activation(nn.LeakyReLU, "relu", "leaky_relu", "leaky_relu", lambda m: _above(0.0, m.negative_slope)),
    Activation(nn.Threshold, "threshold", "threshold", "threshold", lambda m: _above(m.threshold), rate="clamp"),
    Activation(nn.Hardsigmoid, "sigmoid", "hardsigmoid", "hardsigmoid", lambda m: _inside(-3.0, 3.0, SIXTH)),
    Activation(nn.Hardshrink, "shrink", "hardshrink", "hardshrink", _shrink),
    Activation(nn.Softshrink, "shrink", "softshrink", "softshrink", _shrink),
    Activation(nn.RReLU, "relu", "rrelu", "", _rrelu, spelled=False, moded=True),
    Activation(nn.PReLU, "relu", "prelu", "", _prelu, spelled=False),
    Activation(Clamp, "clamp", " ".join(_BOUNDS), _CLAMPS, _clamp, rate="clamp", arguments=_BOUNDS, make=_bounded),
    Activation(nn.SiLU, "silu", "silu", "silu", None, (_CURVED, "ReLU6"), smooth.silu),
    Activation(nn.Hardswish, "swish", "hardswish", "hardswish", None, _LINE, smooth.hardswish),
    Activation(nn.GELU, "gelu", "gelu", "gelu", None, (_CURVED, "ReLU"), smooth.gelu),
    Activation(nn.Mish, "mish", "mish", "mish", None, (_CURVED, "ReLU6"), smooth.mish),
    Activation(nn.ELU, "elu", "elu", "elu", None, _BELOW, smooth.elu),
    Activation(nn.CELU, "elu", "celu", "celu", None, _BELOW),
    Activation(nn.SELU, "elu", "selu", "elu", None, _BELOW),
    Activation(nn.Tanh, "tanh", "tanh", "tanh", None, (_OF_OUTPUT, "Hardtanh"), smooth.tanh),
    Activation(nn.Sigmoid, "sigmoid", "sigmoid expit", "sigmoid", None, (_OF_OUTPUT, "Hardsigmoid"), smooth.sigmoid),
    Activation(nn.LogSigmoid, "sigmoid", "logsigmoid", "", None, (_CURVED, "Hardsigmoid")),
    Activation(nn.Softplus, "soft", "softplus", "softplus", None, (_CURVED, "ReLU"), smooth.softplus),
    Activation(nn.Softsign, "soft", "softsign", "", None, (_CURVED, "Hardtanh")),
    Activation(nn.Tanhshrink, "shrink", "tanhshrink", "", None, (_CURVED, "Softshrink")),
    Activation(nn.GLU, "glu", "glu", "", None, ("it is a product and needs both factors", "ReLU"), spelled=False),
    Activation(nn.Softmax, "soft", "softmax", "", None, _NO_SOFTMAX, spelled=False),
    Activation(nn.Softmax2d, "soft", "", "", None, _NO_SOFTMAX),
    Activation(nn.LogSoftmax, "soft", "log_softmax", "", None, (_OF_OUTPUT, "a loss that takes logits"), spelled=False),
)
ACTIVATIONS: dict[type[nn.Module], Activation] = {a.kind: a for a in _RECORDS}
NAMED: dict[str, Activation] = {a.name: a for a in _RECORDS}
_GATED = ", ".join(a.name for a in _RECORDS if a.gate)


def record_of(module: nn.Module) -> Activation | None:
    """What is known of an activation; a subclass may compute something else."""
    return ACTIVATIONS.get(type(module))


def gate_of(module: nn.Module) -> Gate | str:
    """The gate of a two-valued activation, or why it has none and what can be done instead."""
    a, name = record_of(module), type(module).__name__
    if a is None:
        return f"{name} is not known to have a two-valued derivative; use one of {_GATED}"
    if a.gate is not None:
        return a.gate(module)
    why, other = a.ungated
    todo = f"recompute it exactly, keep a few-bit derivative (lossy), or train with {other}"
    return f"{name} cannot be gated, {why}; {todo}"


def options_of(module: nn.Module) -> dict[str, Any]:
    """Constructor arguments of an activation, in-place flag apart."""
    a = record_of(module)
    return {n: getattr(module, n) for n in a.options} if a is not None else {}


def ends_site(module: nn.Module) -> bool:
    """Whether a fused conv may end in this activation."""
    return (a := record_of(module)) is not None and a.ends_sites


def act_config(act: nn.Module | None) -> dict[str, Any] | None:
    """A site's activation as plain data."""
    return None if act is None else {"name": type(act).__name__, "options": options_of(act)}


def act_of(data: dict[str, Any] | None, inplace: bool = True) -> nn.Module | None:
    """A site's activation from plain data; ValueError for one that ends no site."""
    if data is None:
        return None
    if (a := NAMED.get(data["name"])) is None or not a.ends_sites:
        raise ValueError(f"{data['name']} ends no site")
    return a.kind(**data["options"], inplace=inplace)


class PackedActivation(Layer):
    """A two-valued activation that keeps one bit an element. Any shape; same values as nn.`name`.

    PReLU's frozen slope (C,) or (1,) is the buffer `slope`.
    """

    stored = "floorplan.compact.PackedActivation"
    pillar = "activation"
    slope: Tensor | None

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        if (known := NAMED.get(name)) is None or known.gate is None:
            raise ValueError(f"PackedActivation: {name} has no gate; use one of {_GATED}")
        self.name, self.options = name, dict(options or {})
        self.act = None if known.kind is nn.PReLU else known.kind(**self.options)
        slope = torch.full((self.options.get("num_parameters", 1),), 0.25) if self.act is None else None
        self.register_buffer("slope", slope)

    @classmethod
    def of(cls, module: nn.Module) -> "PackedActivation | str":
        """The packed twin of an activation, or why it has none."""
        frozen = type(module) is nn.PReLU and not module.weight.requires_grad
        if not frozen and isinstance(why := gate_of(module), str):
            return why
        new = cls(type(module).__name__, options_of(module))
        if isinstance(module, nn.PReLU):
            new.slope = module.weight.detach().clone()
        return new.train(module.training)

    def plain_form(self) -> nn.Module:
        if self.act is not None:
            return self.act
        assert self.slope is not None
        act = nn.PReLU(self.slope.numel())
        act.weight = nn.Parameter(self.slope.detach().clone())
        return act

    def extra_repr(self) -> str:
        return ", ".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

    def forward(self, z: Tensor) -> Tensor:
        """act(z), out of place."""
        keeps = learns(z)
        if self.act is None:
            assert self.slope is not None
            slope = self.slope.to(z.dtype)
            return call(_GatedPReLU, z, slope) if keeps and not learns(slope) else F.prelu(z, slope)
        gate = gate_of(self.act) if keeps else ""
        if isinstance(gate, str):
            return self.act(z)  # type: ignore[no-any-return]
        return gated(z, self.act, gate)


def gated(z: Tensor, act: nn.Module, gate: Gate) -> Tensor:
    """act(z), which keeps the packed gate of z."""
    return call(_Gated, z, act, gate)


class _Gated(CompactFunction):
    """act(z) that keeps the packed gate of z."""

    layer = "PackedActivation"

    @staticmethod
    def formula(z: Tensor, act: nn.Module, gate: Gate) -> Tensor:
        return act(z)  # type: ignore[no-any-return]

    @staticmethod
    def forward(ctx: Any, z: Tensor, act: nn.Module, gate: Gate) -> Tensor:
        ctx.layout, ctx.gate = layout_of(z), gate
        ctx.save_for_backward(pack_gate(z, gate.lo, gate.hi, gate.closed))
        return act(z)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return apply_gate(g, packed, ctx.layout, ctx.gate.inside, ctx.gate.outside), None, None


class _GatedPReLU(CompactFunction):
    """prelu(z, slope) that keeps the sign of z; slope is frozen."""

    layer = "PackedActivation"
    formula = staticmethod(F.prelu)

    @staticmethod
    def forward(ctx: Any, z: Tensor, slope: Tensor) -> Tensor:
        ctx.layout = layout_of(z)
        ctx.save_for_backward(pack_gate(z, 0.0, math.inf, False), slope)
        return F.prelu(z, slope)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        packed, slope = ctx.saved_tensors
        if g.dim() > 1:
            slope = slope.view(1, -1, *[1] * (g.dim() - 2))
        below = apply_gate(g * slope, packed, ctx.layout, 0.0, 1.0)
        return apply_gate(g, packed, ctx.layout, 1.0, 0.0).add_(below), None
