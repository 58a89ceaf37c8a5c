"""The spellings of an op in PyTorch, as a table, and the modules they become.

F.relu6(x)  torch.clamp(x, 0, 1)  F.avg_pool2d(x, 2)   ->   ReLU6  Clamp(0, 1)  AvgPool2d(2)
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.layers.activations import ACTIVATIONS, Activation
from floorplan.layers.plain import AnyBatchNorm


@dataclass(frozen=True)
class Spelling:
    """One callable that computes an op: its parameters, in order, and the module it becomes."""

    parameters: tuple[tuple[str, Any], ...]  # name and default; `...` for none
    make: Callable[..., nn.Module]
    fixed: tuple[tuple[str, Any], ...] = ()  # arguments that this spelling implies

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in; TypeError for one the op does not have."""
        names = [n for n, _ in self.parameters]
        if len(args) > len(names):
            raise TypeError(f"{len(args)} arguments")
        given = dict(zip(names, args, strict=False)) | {_ALIAS.get(k, k): v for k, v in kwargs.items()}
        if unknown := [k for k in given if k not in names]:
            raise TypeError(f"the argument {unknown[0]}")
        bound = dict(self.parameters) | given
        if missing := [k for k, v in bound.items() if v is ...]:
            raise TypeError(f"no {missing[0]}")
        return bound


_ALIAS = {"self": "input"}


def parameters(text: str) -> tuple[tuple[str, Any], ...]:
    """`input p=0.5` as names and defaults."""
    pairs = (word.partition("=") for word in text.split())
    return tuple((n, ast.literal_eval(v) if eq else ...) for n, eq, v in pairs)


_DIMS = ("1d", "2d", "3d")
_MAX = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_AVG = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True"


def _activations(table: dict[Any, Spelling], methods: dict[str, Spelling]) -> None:
    for a in (a for a in ACTIVATIONS.values() if a.spelled):
        make, inplace = a.make or a.kind, (("inplace", True),)
        for name in a.functions.split():
            own = a.arguments.get(name)
            takes = (("input", ...), *(parameters(own) if own else _options(a)))
            flagged = Spelling((*takes, ("inplace", False)) if a.inplace and not own else takes, make)
            plain, within = Spelling(takes, make), Spelling(takes, make, inplace)
            for space in (F, torch, torch.special):
                if hasattr(space, name):
                    table.setdefault(getattr(space, name), flagged if space is F else plain)
                if a.inplace and hasattr(space, f"{name}_"):
                    table[getattr(space, f"{name}_")] = within
            if hasattr(Tensor, name):
                methods[name] = plain
            if a.inplace and hasattr(Tensor, f"{name}_"):
                methods[f"{name}_"] = within


def _options(a: Activation) -> tuple[tuple[str, Any], ...]:
    """What a function takes beside its input: the options of the module, and their defaults."""
    of = signature(a.kind).parameters
    return tuple((n, ... if of[n].default is Parameter.empty else of[n].default) for n in a.options)


def _each(function: str, module: str, takes: str, dims: tuple[str, ...] = _DIMS, space: Any = F) -> dict[Any, Spelling]:
    """`function`1d, 2d and 3d, which become `module`1d, 2d and 3d."""
    return {getattr(space, function + d): Spelling(parameters(takes), getattr(nn, module + d)) for d in dims}


FUNCTIONS: dict[Any, Spelling] = {}
METHODS: dict[str, Spelling] = {}
_activations(FUNCTIONS, METHODS)
FUNCTIONS |= {
    **_each("max_pool", "MaxPool", _MAX),
    **_each("max_pool", "MaxPool", _MAX.removesuffix(" return_indices=False"), space=torch),
    **_each("avg_pool", "AvgPool", _AVG, _DIMS[:1]),
    **_each("avg_pool", "AvgPool", f"{_AVG} divisor_override=None", _DIMS[1:]),
    **_each("adaptive_avg_pool", "AdaptiveAvgPool", "input output_size"),
    **_each("adaptive_max_pool", "AdaptiveMaxPool", "input output_size return_indices=False"),
}
# In place where no module is.
NO_MODULE = {f"{f}_" for a in ACTIVATIONS.values() if a.spelled and not a.inplace for f in a.functions.split()}

_DROP = "input p=0.5 training=True inplace=False"
_ALPHA = "input p=0.5 training=False inplace=False"
DROPOUTS: dict[Any, Spelling] = {
    **_each("dropout", "Dropout", _DROP, ("", *_DIMS)),
    F.alpha_dropout: Spelling(parameters(_ALPHA), nn.AlphaDropout),
    F.feature_alpha_dropout: Spelling(parameters(_ALPHA), nn.FeatureAlphaDropout),
    torch.dropout: Spelling(parameters("input p training"), nn.Dropout),
}

_CONV = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
_DECONV = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"
_BN = "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-05"
WEIGHTED: dict[Any, Spelling] = {
    F.linear: Spelling(parameters("input weight bias=None"), nn.Linear),
    F.prelu: Spelling(parameters("input weight"), nn.PReLU),
    F.batch_norm: Spelling(parameters(_BN), AnyBatchNorm),
    **_each("conv", "Conv", _CONV),
    **_each("conv_transpose", "ConvTranspose", _DECONV),
}

PAD = parameters("input pad mode='constant' value=None")
_PADS = {"Zero": "constant", "Constant": "constant"}
_PADS |= {"Reflection": "reflect", "Replication": "replicate", "Circular": "circular"}
PAD_MODULES: dict[type[nn.Module], str] = {getattr(nn, f"{k}Pad{d}"): m for k, m in _PADS.items() for d in _DIMS}
