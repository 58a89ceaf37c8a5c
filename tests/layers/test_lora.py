"""The LoRA layers against their formulas: gradients, what they keep, how they start."""

import copy
import math
from typing import Any

import pytest
import torch
from saves import close, drawn, handed
from torch import Tensor, nn
from torch.func import functional_call

from floorplan.layers.geometry import geometry_of
from floorplan.layers.lora import LoraC, LoraCOfficial, SideConv

RANK, SCALE = 2, 1.5
LINES = [
    (nn.Conv1d(6, 8, 5, padding=2), (6, 17)),
    (nn.Conv1d(6, 8, 4, padding="same", dilation=3, bias=False), (6, 17)),
    (nn.Conv2d(4, 6, 1, stride=2, bias=False), (4, 5, 7)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, padding_mode="reflect"), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, stride=(1, 3), padding=(2, 0), padding_mode="replicate"), (4, 9, 9)),
]
OBLONG = [
    (nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 4), (1, 2), padding_mode="circular"), (4, 9, 9)),
    (nn.Conv2d(4, 6, (2, 4), padding="same"), (4, 7, 8)),
    (nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"), (4, 7, 8)),
]
GROUPED = [
    (nn.Conv1d(6, 9, 3, groups=3), (6, 9)),
    (nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3), (6, 8, 9)),
    (nn.Conv3d(4, 6, 3, stride=(1, 2, 1), padding=1, groups=2), (4, 4, 5, 6)),
    (nn.Conv3d(4, 5, 2, padding=(0, 1, 1), padding_mode="replicate"), (4, 4, 5, 6)),
]
CASES = [
    *((LoraC, *c) for c in LINES + OBLONG),
    *((LoraCOfficial, *c) for c in LINES + GROUPED),
    *((SideConv, *c) for c in LINES + OBLONG + GROUPED),
]


def layer_of(kind: Any, conv: Any) -> Any:
    """A layer of one kind in the place of a float64 conv, both factors drawn."""
    bias = None if conv.bias is None else conv.bias.detach().clone()
    layer = kind(geometry_of(conv).config(), list(conv.weight.shape), RANK, SCALE, bias is not None)
    layer = layer.double()
    layer.weight, layer.bias = conv.weight.detach().clone(), bias
    layer.A.data, layer.B.data = drawn(*layer.A.shape), drawn(*layer.B.shape)
    return layer


def reweighted(conv: Any, x: Tensor, change: Tensor) -> Tensor:
    y: Tensor = functional_call(conv, {"weight": conv.weight.detach() + SCALE * change}, (x,))
    return y


def lora_c(conv: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """dW[o,i,h,w] = sum_a B[o,h,a] A[a,i,w]"""
    change = torch.einsum("oha,aiw->oihw", b, a)
    return reweighted(conv, x, change if conv.weight.dim() == 4 else change.squeeze(2))


def official(conv: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Entry n of dW, in memory order, is row n // (I*k) of B times column n % (I*k) of A."""
    n = torch.arange(conv.weight.numel())
    columns = conv.in_channels * conv.kernel_size[0]
    flat = (b[n // columns] * a.T[n % columns]).sum(1)
    return reweighted(conv, x, flat.view(conv.weight.shape))


def side(conv: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """conv(x, W) + s * conv1x1(conv(x, A), B), of torch's own layers."""
    kind, g = type(conv), conv.groups
    options = {n: getattr(conv, n) for n in ("stride", "padding", "dilation", "padding_mode")}
    down = kind(conv.in_channels, RANK * g, conv.kernel_size, groups=g, bias=False, **options)
    up = kind(RANK * g, conv.out_channels, 1, groups=g, bias=False)
    z = functional_call(down, {"weight": a}, (x,))
    y: Tensor = conv(x) + SCALE * functional_call(up, {"weight": b}, (z,))
    return y


REFERENCES: dict[Any, Any] = {LoraC: lora_c, LoraCOfficial: official, SideConv: side}


def named(case: Any) -> str:
    return f"{case[0].__name__}-{case[1]}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_gradients_and_merge(case: tuple[Any, Any, tuple[int, ...]]) -> None:
    kind, conv, shape = case
    torch.manual_seed(0)
    conv = copy.deepcopy(conv).double().requires_grad_(False)
    layer, x = layer_of(kind, conv), drawn(2, *shape).requires_grad_()
    a, b = (t.detach().clone().requires_grad_() for t in (layer.A, layer.B))
    want, y = REFERENCES[kind](conv, x, a, b), layer(x)
    close(y, want)
    g = drawn(*want.shape)
    got = torch.autograd.grad(y, [x, layer.A, layer.B], g)
    for found, wanted in zip(got, torch.autograd.grad(want, [x, a, b], g), strict=True):
        close(found, wanted)
    assert not layer.merged().requires_grad
    close(functional_call(conv, {"weight": layer.merged()}, (x,)), y, 1e-12)


@pytest.mark.parametrize("kind", [LoraC, LoraCOfficial])
def test_a_merged_lora_keeps_its_input_and_the_merged_weight(kind: Any) -> None:
    layer, x = layer_of(kind, nn.Conv2d(4, 6, 3, padding=1).double()), drawn(2, 4, 5, 5)
    kept = handed(layer, x)
    assert [tuple(t.shape) for t in kept] == [(2, 4, 5, 5), (6, 4, 3, 3)]
    assert kept[0].data_ptr() == x.data_ptr() and torch.equal(kept[1], layer.merged())


def test_a_lora_beside_the_conv_keeps_its_input_for_each_conv_and_r_channels() -> None:
    layer = layer_of(SideConv, nn.Conv2d(4, 6, 3, stride=2, groups=2).double())
    x = drawn(2, 4, 7, 7).requires_grad_()
    kept = handed(layer, x)
    assert [tuple(t.shape) for t in kept] == [(2, 4, 7, 7)] * 2 + [(2, 2 * RANK, 3, 3)]
    assert kept[0].data_ptr() == kept[1].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_starts_as_the_source_to_the_bit(case: tuple[Any, Any, tuple[int, ...]]) -> None:
    kind, conv, shape = case
    conv, x = copy.deepcopy(conv).double(), drawn(2, *shape)
    layer = layer_of(kind, conv)
    layer.start(torch.Generator().manual_seed(3))
    assert layer.A.any() and not layer.B.any()
    assert torch.equal(layer(x), conv(x)) and torch.equal(layer.merged(), conv.weight)


@pytest.mark.parametrize(
    "kind,want",
    [
        (LoraC, [(2, 64, 3), (48, 3, 2)]),
        (LoraCOfficial, [(6, 192), (144, 6)]),
        (SideConv, [(2, 64, 3, 3), (48, 2, 1, 1)]),
    ],
)
def test_shapes_and_the_draw_of_a(kind: Any, want: list[tuple[int, ...]]) -> None:
    conv = nn.Conv2d(64, 48, 3)
    layers = [layer_of(kind, conv) for _ in range(3)]
    for layer, seed in zip(layers, (5, 5, 6), strict=True):
        layer.float().start(torch.Generator().manual_seed(seed))
    a, b = layers[0].A.detach(), layers[0].B.detach()
    assert [tuple(a.shape), tuple(b.shape)] == want
    bound = 1 / math.sqrt(math.prod(a.shape[1:]))
    assert 0.9 * bound < float(a.abs().max()) <= bound
    assert abs(float(a.std()) * math.sqrt(3) / bound - 1) < 0.1
    assert torch.equal(a, layers[1].A) and not torch.equal(a, layers[2].A)


def test_shapes_where_groups_and_dimensions_matter() -> None:
    assert LoraC.shapes([8, 6, 5], 2, 1) == ([2, 6, 5], [8, 1, 2])
    assert LoraCOfficial.shapes([8, 6, 5], 2, 1) == ([10, 30], [8, 10])
    assert LoraCOfficial.shapes([8, 3, 3, 3, 3], 2, 2) == ([6, 18], [36, 6])
    assert SideConv.shapes([9, 2, 3, 3], 2, 3) == ([6, 2, 3, 3], [9, 2, 1, 1])


@pytest.mark.parametrize("kind", [LoraC, LoraCOfficial, SideConv])
def test_config_builds_the_same_layer(kind: Any) -> None:
    layer, x = layer_of(kind, nn.Conv2d(4, 6, 3, padding="same").double()), drawn(2, 4, 5, 5)
    twin = kind(**layer.config()).double()
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x)) and twin.config() == layer.config()
    assert "rank=2" in repr(twin) and {n for n, p in twin.named_parameters()} == {"A", "B"}
