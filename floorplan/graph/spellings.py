"""The spellings of an op in PyTorch, as a table, and the modules they become.

F.relu6(x)  torch.clamp(x, 0, 1)  F.avg_pool2d(x, 2)   ->   ReLU6  Clamp(0, 1)  AvgPool2d(2)
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.layers.plain import AnyBatchNorm, Clamp


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


def _clamp(min: float | None = None, max: float | None = None) -> nn.Module:
    return Clamp(min, max)


_INPLACE = "input{} inplace=False"
_ACTIVATIONS: tuple[tuple[str, str, Callable[..., nn.Module]], ...] = (
    ("relu", "", nn.ReLU),
    ("relu6", "", nn.ReLU6),
    ("hardtanh", " min_val=-1.0 max_val=1.0", nn.Hardtanh),
    ("leaky_relu", " negative_slope=0.01", nn.LeakyReLU),
    ("elu", " alpha=1.0", nn.ELU),
    ("selu", "", nn.SELU),
    ("celu", " alpha=1.0", nn.CELU),
    ("silu", "", nn.SiLU),
    ("mish", "", nn.Mish),
    ("hardswish", "", nn.Hardswish),
    ("hardsigmoid", "", nn.Hardsigmoid),
    ("threshold", " threshold value", nn.Threshold),
)
_PLAIN: tuple[tuple[str, str, Callable[..., nn.Module]], ...] = (
    ("gelu", "input approximate='none'", nn.GELU),
    ("softplus", "input beta=1.0 threshold=20.0", nn.Softplus),
    ("sigmoid", "input", nn.Sigmoid),
    ("tanh", "input", nn.Tanh),
    ("logsigmoid", "input", nn.LogSigmoid),
    ("softsign", "input", nn.Softsign),
    ("clamp", "input min=None max=None", _clamp),
    ("clip", "input min=None max=None", _clamp),
    ("clamp_min", "input min", _clamp),
    ("clamp_max", "input max", _clamp),
    ("relu", "input", nn.ReLU),
    ("selu", "input", nn.SELU),
    ("celu", "input alpha=1.0", nn.CELU),
)
_MAX = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_AVG1 = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True"
_AVG = f"{_AVG1} divisor_override=None"


def _functional(table: dict[Any, Spelling], methods: dict[str, Spelling]) -> None:
    for name, extra, cls in _ACTIVATIONS:
        spelling = Spelling(parameters(_INPLACE.format(extra)), cls)
        inplace = Spelling(parameters(f"input{extra}"), cls, (("inplace", True),))
        for space in (torch, F):
            if (f := getattr(space, name, None)) is not None and space is F:
                table[f] = spelling
            if (f := getattr(space, f"{name}_", None)) is not None:
                table[f] = inplace
        if hasattr(Tensor, f"{name}_"):
            methods[f"{name}_"] = inplace
    for name, text, cls in _PLAIN:
        spelling = Spelling(parameters(text), cls)
        for space in (torch, F, torch.special):
            if (f := getattr(space, name, None)) is not None:
                table.setdefault(f, spelling)
        if hasattr(Tensor, name):
            methods[name] = spelling
    table[torch.special.expit] = table[torch.sigmoid]


def _pools(table: dict[Any, Spelling]) -> None:
    for d in (1, 2, 3):
        avg = parameters(_AVG1 if d == 1 else _AVG)
        top, size = parameters(_MAX), parameters("input output_size")
        both = parameters("input output_size return_indices=False")
        rows = (
            (f"max_pool{d}d", top, f"MaxPool{d}d"),
            (f"avg_pool{d}d", avg, f"AvgPool{d}d"),
            (f"adaptive_avg_pool{d}d", size, f"AdaptiveAvgPool{d}d"),
            (f"adaptive_max_pool{d}d", both, f"AdaptiveMaxPool{d}d"),
        )
        for name, takes, cls in rows:
            table[getattr(F, name)] = Spelling(takes, getattr(nn, cls))
        table[getattr(torch, f"max_pool{d}d")] = Spelling(top[:-1], getattr(nn, f"MaxPool{d}d"))
        table.pop(getattr(F, f"max_pool{d}d_with_indices"), None)


def _tables() -> tuple[dict[Any, Spelling], dict[str, Spelling]]:
    functions: dict[Any, Spelling] = {}
    methods: dict[str, Spelling] = {}
    _functional(functions, methods)
    _pools(functions)
    return functions, methods


FUNCTIONS, METHODS = _tables()

_DROP = "input p=0.5 training=True inplace=False"
_ALPHA = "input p=0.5 training=False inplace=False"
DROPOUTS: dict[Any, Spelling] = {
    F.dropout: Spelling(parameters(_DROP), nn.Dropout),
    F.dropout1d: Spelling(parameters(_DROP), nn.Dropout1d),
    F.dropout2d: Spelling(parameters(_DROP), nn.Dropout2d),
    F.dropout3d: Spelling(parameters(_DROP), nn.Dropout3d),
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
    F.conv1d: Spelling(parameters(_CONV), nn.Conv1d),
    F.conv2d: Spelling(parameters(_CONV), nn.Conv2d),
    F.conv3d: Spelling(parameters(_CONV), nn.Conv3d),
    F.conv_transpose1d: Spelling(parameters(_DECONV), nn.ConvTranspose1d),
    F.conv_transpose2d: Spelling(parameters(_DECONV), nn.ConvTranspose2d),
    F.conv_transpose3d: Spelling(parameters(_DECONV), nn.ConvTranspose3d),
}

PAD = parameters("input pad mode='constant' value=None")
_PADS = (
    ("Zero", "constant"),
    ("Constant", "constant"),
    ("Reflection", "reflect"),
    ("Replication", "replicate"),
    ("Circular", "circular"),
)
PAD_MODULES: dict[type[nn.Module], str] = {
    getattr(nn, f"{kind}Pad{d}d"): mode for kind, mode in _PADS for d in (1, 2, 3)
}
