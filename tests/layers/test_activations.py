"""Compact layers against plain autograd: values, gradients, bytes kept, fakes."""

from copy import deepcopy

import pytest
import torch
from saves import formats, kept, kept_bytes, same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from floorplan.layers.activations import (
    PackedActivation,
    PackedDropout,
    PackedMaxPool,
    ShapeAdaptiveAvgPool,
    ShapeAvgPool,
    activation_refusal,
    gate_of,
)


def frozen_prelu(channels: int) -> nn.PReLU:
    m = nn.PReLU(channels).requires_grad_(False)
    m.weight.copy_(torch.linspace(-0.3, 0.9, channels))
    return m


ACTS = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.Hardtanh(-0.5, 2.0),
    nn.LeakyReLU(0.1),
    nn.LeakyReLU(-0.2),
    nn.Threshold(0.5, 9.0),
    nn.Hardsigmoid(),
    nn.Hardshrink(),
    nn.Softshrink(0.7),
    nn.RReLU().eval(),
    frozen_prelu(5),
    frozen_prelu(1),
]
EDGES = [0.0, -0.0, 6.0, -0.5, 0.5, 2.0, 3.0, -3.0, 0.7, -0.7, -1e-30, 5.999]


@pytest.mark.parametrize("act", ACTS, ids=lambda m: str(m))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_activation_equals_autograd(act: nn.Module, dtype: torch.dtype) -> None:
    act = act.to(dtype)
    packed = PackedActivation.of(act)
    for x in formats((torch.randn(3, 5, 7, 3, dtype=torch.float64) * 4).to(dtype)):
        same(act, packed, x)
        n = x.numel()
        assert kept_bytes(packed, x.clone().requires_grad_()) == (n + 7) // 8
    edges = torch.tensor(EDGES, dtype=dtype)
    same(act, packed, edges[None, None].expand(2, 5, -1) if isinstance(act, nn.PReLU) else edges)


def test_activation_in_place_flag_is_not_kept() -> None:
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    y = PackedActivation.of(nn.ReLU(inplace=True))(x * 1)
    assert y.tolist() == [0.0, 1.0] and x.tolist() == [-1.0, 1.0]


def test_no_gradient_no_bits() -> None:
    y = PackedActivation.of(nn.ReLU())(torch.randn(4))
    assert y.grad_fn is None


@pytest.mark.parametrize(
    "act,word",
    [
        (nn.SiLU(), "recompute"),
        (nn.Hardswish(), "lossy"),
        (nn.GELU(), "lossy"),
        (nn.Mish(), "ReLU6"),
        (nn.ELU(), "LeakyReLU"),
        (nn.Sigmoid(), "Hardsigmoid"),
        (nn.Tanh(), "Hardtanh"),
        (nn.Softplus(), "recompute"),
        (nn.RReLU(), "eval mode"),
        (nn.PReLU(), "freeze"),
        (nn.Linear(1, 1), "not known"),
        (nn.Identity(), "not known"),
    ],
)
def test_refusals_name_a_way_out(act: nn.Module, word: str) -> None:
    why = gate_of(act)
    assert isinstance(why, str) and word in why and "; " in why and "\n" not in why
    assert activation_refusal(act) == why
    with pytest.raises(ValueError, match=type(act).__name__):
        PackedActivation.of(act)


FAKES: list[nn.Module] = [
    PackedActivation.of(nn.ReLU6()),
    PackedActivation.of(frozen_prelu(5)),
    PackedMaxPool([3, 3], [2, 2], [1, 1], [1, 1]),
    PackedMaxPool([2, 2], [2, 2], [0, 0], [1, 1], True),
    ShapeAvgPool([3, 3], [2, 2], [1, 1]),
    ShapeAdaptiveAvgPool([3, 3]),
    ShapeAdaptiveAvgPool([1, 1]),
    PackedDropout("Dropout", 0.3),
    PackedDropout("Dropout2d", 0.3),
]


@pytest.mark.parametrize("module", FAKES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("last", [False, True])
def test_symbolic_run(module: nn.Module, device: str, last: bool) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    real = torch.empty(7, 5, 11, 13, device=device)
    real = real.to(memory_format=torch.channels_last) if last else real
    slope = isinstance(module, PackedActivation) and module.slope is not None
    sizes = [DimDynamic.STATIC if slope and i == 1 else DimDynamic.DYNAMIC for i in range(4)]
    x = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    copy = deepcopy(module).to(device)
    with mode:
        y, saved = kept(copy, x.requires_grad_())
        (gx,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert gx.shape == x.shape
    assert all(not isinstance(n, int) for i, n in enumerate(gx.shape) if sizes[i] != DimDynamic.STATIC)
    real = torch.randn(7, 5, 11, 13).to(memory_format=torch.channels_last if last else torch.preserve_format)
    want, real_saved = kept(module, real.requires_grad_())
    assert sum(int(t.numel()) * t.element_size() for t in saved if t.dtype == torch.uint8) == sum(
        t.nbytes for t in real_saved
    )
    assert tuple(int(n) for n in y.shape) == tuple(want.shape)
    assert tuple(int(n) for n in y.stride()) == want.stride()
