"""Every spelling of an activation or a pool becomes its module."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from canonical_nets import Net, X, canonical
from torch import Tensor

from floorplan.layers.activations import ACTIVATIONS as RECORDS
from floorplan.layers.activations import Activation, options_of
from floorplan.layers.plain import Clamp

ACTIVATIONS: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (F.relu, "ReLU()"),
    (torch.relu, "ReLU()"),
    (lambda x: x.relu(), "ReLU()"),
    (lambda x: x.relu_(), "ReLU(inplace=True)"),
    (torch.relu_, "ReLU(inplace=True)"),
    (lambda x: F.relu(x, inplace=True), "ReLU(inplace=True)"),
    (F.relu6, "ReLU6()"),
    (F.hardtanh, "Hardtanh(min_val=-1.0, max_val=1.0)"),
    (lambda x: F.hardtanh(x, 0, 6), "Hardtanh(min_val=0, max_val=6)"),
    (lambda x: F.hardtanh_(x, -0.5, 0.5), "Hardtanh(min_val=-0.5, max_val=0.5, inplace=True)"),
    (lambda x: F.leaky_relu(x, 0.2), "LeakyReLU(negative_slope=0.2)"),
    (lambda x: F.leaky_relu_(x), "LeakyReLU(negative_slope=0.01, inplace=True)"),
    (lambda x: F.elu(x, alpha=0.5), "ELU(alpha=0.5)"),
    (F.selu, "SELU()"),
    (torch.selu, "SELU()"),
    (F.celu, "CELU(alpha=1.0)"),
    (F.silu, "SiLU()"),
    (F.mish, "Mish()"),
    (F.gelu, "GELU(approximate='none')"),
    (lambda x: F.gelu(x, approximate="tanh"), "GELU(approximate='tanh')"),
    (F.hardswish, "Hardswish()"),
    (F.hardsigmoid, "Hardsigmoid()"),
    (F.sigmoid, "Sigmoid()"),
    (torch.sigmoid, "Sigmoid()"),
    (lambda x: x.sigmoid(), "Sigmoid()"),
    (torch.special.expit, "Sigmoid()"),
    (torch.tanh, "Tanh()"),
    (lambda x: x.tanh(), "Tanh()"),
    (F.softplus, "Softplus(beta=1.0, threshold=20.0)"),
    (F.logsigmoid, "LogSigmoid()"),
    (lambda x: F.threshold(x, 0.1, 0.0), "Threshold(threshold=0.1, value=0.0)"),
    (lambda x: torch.clamp(x, 0, 6), "Clamp(0, 6)"),
    (lambda x: x.clamp(min=0), "Clamp(0, None)"),
    (lambda x: x.clamp_min(0), "Clamp(0, None)"),
    (lambda x: torch.clamp_max(x, max=0.5), "Clamp(None, 0.5)"),
    (lambda x: torch.clip(x, -1, 1), "Clamp(-1, 1)"),
]


@pytest.mark.parametrize(("fn", "module"), ACTIVATIONS)
def test_every_spelling_of_an_activation(fn: Callable[[Tensor], Tensor], module: str) -> None:
    text, log, _ = canonical(Net(lambda s, x: fn(x * 1)))
    node = text.splitlines()[-1]
    assert node.partition(" = ")[2] == f"{module} <- mul"
    assert list(log.values()) == [""]


POOLS: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda x: F.max_pool2d(x, 3, 2, padding=1),
        "MaxPool2d(kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=False)",
    ),
    (
        lambda x: torch.max_pool2d(x, [2, 2]),
        "MaxPool2d(kernel_size=(2, 2), stride=(2, 2), padding=0, dilation=1, ceil_mode=False)",
    ),
    (lambda x: F.avg_pool2d(x, 2, count_include_pad=False), "AvgPool2d(kernel_size=2, stride=2, padding=0)"),
    (lambda x: F.adaptive_avg_pool2d(x, 1), "AdaptiveAvgPool2d(output_size=1)"),
    (lambda x: F.adaptive_max_pool2d(x, cast(Any, (2, None))), "AdaptiveMaxPool2d(output_size=(2, None))"),
    (lambda x: F.max_pool1d(x, 2), "MaxPool1d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)"),
    (lambda x: F.avg_pool1d(x, 2), "AvgPool1d(kernel_size=(2,), stride=(2,), padding=(0,))"),
    (lambda x: F.adaptive_avg_pool1d(x, 1), "AdaptiveAvgPool1d(output_size=1)"),
    (lambda x: F.avg_pool3d(x, 2), "AvgPool3d(kernel_size=2, stride=2, padding=0)"),
]


@pytest.mark.parametrize(("fn", "module"), POOLS)
def test_pools(fn: Callable[[Tensor], Tensor], module: str) -> None:
    x = X[:, :, 0] if "1d" in module else X[:, None] if "3d" in module else X
    text, log, _ = canonical(Net(lambda s, x: fn(x)), x)
    assert text.partition(" = ")[2] == f"{module} <- x" and list(log.values()) == [""]


GIVEN = {"threshold": 0.1, "value": -0.5, "min": -0.25, "max": 0.5}
ATTRIBUTES = {"min": "low", "max": "high"}


def spellings(a: Activation) -> Iterator[tuple[Callable[..., Tensor], dict[str, Any], bool]]:
    """(a function of x, the arguments it is given, whether it works in place) for all that torch has."""
    for name in a.functions.split():
        own = a.arguments.get(name)
        takes = [word.partition("=")[0] for word in own.split()] if own else a.options
        given = {n: v for n, v in GIVEN.items() if n in takes}
        for called in (name, f"{name}_") if a.inplace else (name,):
            for space in (F, torch, torch.special):
                if hasattr(space, called):
                    yield partial(getattr(space, called), **given), given, called != name
            if hasattr(Tensor, called):
                yield lambda x, c=called, g=given: getattr(x, c)(**g), given, called != name
        if a.inplace and not own:
            yield partial(getattr(F, name), **given, inplace=True), given, True


@pytest.mark.parametrize("a", [a for a in RECORDS.values() if a.spelled], ids=lambda a: a.name)
def test_every_spelling_in_a_record_becomes_its_module(a: Activation) -> None:
    found = list(spellings(a))
    assert len(found) >= len(a.functions.split())
    for f, given, inplace in found:
        text, log, gm = canonical(Net(lambda s, x, f=f: f(x * 1)))
        (m,) = [m for m in gm.modules() if type(m) is a.kind]
        asked = {ATTRIBUTES.get(k, k): v for k, v in given.items()}
        assert options_of(m) | asked == options_of(m), text
        assert getattr(m, "inplace", False) is inplace and set(log.values()) == {""}, text


def test_clamp_reads_back_from_its_arguments() -> None:
    for m in (Clamp(0, None), Clamp(None, 6.0, True)):
        assert repr(Clamp(**m.config())) == repr(m)
    assert Clamp(0, 6).config() == {"low": 0, "high": 6}, "as files written before it worked in place"
