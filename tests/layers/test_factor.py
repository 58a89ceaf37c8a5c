"""FactorConv (LoRA-Edge, LoRA-FA) against plain autograd of its formula, and the TT-SVD suffix."""

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from saves import close, drawn, handed, kinds
from torch import Tensor, nn
from torch.func import functional_call

from floorplan.errors import FloorplanError
from floorplan.layers.factor import FactorConv, tensor_train_suffix
from floorplan.layers.geometry import geometry_of

RANK, SCALE = 3, 0.7
Array = npt.NDArray[np.float64]
GEOMETRIES = [
    (nn.Conv1d(6, 8, 5, padding=2), (6, 17)),
    (nn.Conv1d(6, 8, 4, padding="same", dilation=3, bias=False), (6, 17)),
    (nn.Conv2d(4, 6, 1, bias=False), (4, 5, 7)),
    (nn.Conv2d(4, 6, 1, stride=(3, 2), padding=1), (4, 5, 8)),
    (nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3), (6, 8, 9)),
    (nn.Conv2d(6, 12, 3, padding=1, groups=6), (6, 5, 4)),
    (nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 4), (1, 2), padding_mode="circular"), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, padding_mode="reflect"), (4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=(2, 0), padding_mode="replicate"), (4, 9, 9)),
    (nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"), (4, 7, 8)),
    (nn.Conv2d(4, 6, 3, stride=3, padding="valid"), (4, 8, 7)),
    (nn.Conv3d(4, 6, 3, stride=(1, 2, 1), padding=1, groups=2), (4, 4, 5, 6)),
    (nn.Conv3d(4, 5, 2, padding=(0, 1, 1), padding_mode="replicate"), (4, 4, 5, 6)),
]


def factor(conv: Any, rank: int = RANK, scale: float = SCALE) -> FactorConv:
    """The layer of a float64 conv, both factors drawn."""
    bias = None if conv.bias is None else conv.bias.detach().clone()
    shape = list(conv.weight.shape)
    layer = FactorConv(geometry_of(conv).config(), shape, rank, scale, bias is not None).double()
    layer.weight, layer.bias = conv.weight.detach().clone(), bias
    layer.D, layer.U.data = drawn(*layer.D.shape), drawn(*layer.U.shape)
    return layer


def reference(conv: Any, x: Tensor, u: Tensor, d: Tensor, scale: float = SCALE) -> Tensor:
    """The conv itself with weight W + s*sum_r U[o,r] D[group of o, r]."""
    per = conv.out_channels // conv.groups
    rows = [sum(u[o, r] * d[o // per, r] for r in range(u.shape[1])) for o in range(u.shape[0])]
    y: Tensor = functional_call(conv, {"weight": conv.weight.detach() + scale * torch.stack(rows)}, (x,))
    return y


@pytest.mark.parametrize("conv,shape", GEOMETRIES, ids=str)
def test_output_gradients_and_what_is_kept(conv: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    conv = copy.deepcopy(conv).double()
    layer, x = factor(conv), drawn(2, *shape).requires_grad_()
    u = layer.U.detach().clone().requires_grad_()
    want = reference(conv, x, u, layer.D)
    g = drawn(*want.shape)
    wanted = torch.autograd.grad(want, [x, u], g)
    for plain in (False, True):
        layer.plain = plain
        y = layer(x)
        close(y, want)
        for a, b in zip(torch.autograd.grad(y, [x, layer.U], g), wanted, strict=True):
            close(a, b)
    layer.plain = False
    kept = kinds(layer, x)
    assert kept == [((2, conv.groups * RANK, *want.shape[2:]), torch.float64)]
    close(functional_call(conv, {"weight": layer.merged()}, (x,)), layer(x), 1e-12)


def layer_and_input() -> tuple[Any, FactorConv, Tensor]:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, padding=1).double()
    return conv, factor(conv), drawn(2, 4, 5, 5)


def test_starts_as_the_source_to_the_bit() -> None:
    for conv, shape in GEOMETRIES[::3]:
        conv = copy.deepcopy(conv).double()
        layer, x = factor(conv), drawn(2, *shape)
        layer.U.data.zero_()
        assert torch.equal(layer(x), conv(x)) and torch.equal(layer.merged(), conv.weight)


def test_a_frozen_u_keeps_nothing_and_x_still_gets_its_gradient() -> None:
    conv, layer, x = layer_and_input()
    layer.U.requires_grad_(False)
    x.requires_grad_()
    assert handed(layer, x) == []
    (got,) = torch.autograd.grad(layer(x).square().sum(), x)
    close(got, torch.autograd.grad(reference(conv, x, layer.U, layer.D).square().sum(), x)[0])


def test_an_input_without_gradient() -> None:
    conv, layer, x = layer_and_input()
    layer(x).square().sum().backward()
    u = layer.U.detach().clone().requires_grad_()
    reference(conv, x, u, layer.D).square().sum().backward()
    assert x.grad is None and layer.U.grad is not None and u.grad is not None
    close(layer.U.grad, u.grad)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_single_precision_and_16_bit_autocast(scale: float) -> None:
    conv, layer, x = layer_and_input()
    layer.scale, want = scale, reference(conv, x, layer.U, layer.D, scale)
    layer, x = layer.float(), x.float().requires_grad_()
    close(layer(x).double(), want, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16 and [t.dtype for t in handed(layer, x)] == [torch.bfloat16]
    close(y.double(), want, 0.05)
    y.sum().backward()
    assert layer.U.grad is not None and layer.U.grad.dtype == torch.float32
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_empty_batch() -> None:
    _, layer, x = layer_and_input()
    x = x[:0].requires_grad_()
    layer(x).sum().backward()
    assert layer.U.grad is not None and not layer.U.grad.any()
    assert x.grad is not None and x.grad.shape == x.shape


def test_misuse_is_noticed() -> None:
    _, layer, x = layer_and_input()
    (gx,) = torch.autograd.grad(layer(x.requires_grad_()).sum(), x, create_graph=True)
    with pytest.raises(FloorplanError, match="FactorConv: its gradient cannot be differentiated again"):
        torch.autograd.grad(gx.sum(), x)
    y = layer(x)
    with torch.no_grad():
        layer.U.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_config_builds_the_same_layer() -> None:
    _, layer, x = layer_and_input()
    twin = FactorConv(**layer.config()).double()
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x)) and twin.config() == layer.config()
    assert "rank=3" in repr(twin) and layer.axes() == {"D": ".rC", "U": "Cr"}


def best(m: Array, rank: int) -> Array:
    """The nearest matrix of that rank."""
    u, s, v = np.linalg.svd(m, full_matrices=False)
    product: Array = (u[:, :rank] * s[:rank]) @ v[:rank]
    return product


def suffix_by_hand(w: Tensor, rank: int) -> Array:
    """All cores but the first of a TT-SVD, each bond cut by the best approximation in turn."""
    rest, axes = w.double().numpy().reshape(w.shape[0], -1), list(w.shape[1:])
    _, s, v = np.linalg.svd(rest, full_matrices=False)
    rows = s[:rank, None] * v[:rank]
    shape, lift = rows.shape, np.eye(len(rows))
    for n in axes[:-1]:
        m = rows.reshape(len(rows) * n, -1)
        left = np.linalg.svd(m, full_matrices=False)[0][:, :rank]
        lift = (lift @ left.reshape(len(rows), -1)).reshape(-1, left.shape[1])
        rows = left.T @ best(m, rank)
    product: Array = (lift @ rows).reshape(shape)
    return product


SHAPES = [(8, 6, 5), (8, 6, 3, 3), (5, 7, 1, 1), (6, 4, 2, 3, 2), (12, 1, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_suffix_is_the_tensor_train_cut_at_every_bond(shape: tuple[int, ...], rank: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape)
    got, want = tensor_train_suffix(w, rank), suffix_by_hand(w, rank)
    assert got.shape == (min(rank, len(want)), *shape[1:]) and got.dtype == w.dtype
    rows = got.double().numpy().reshape(len(want), -1)
    rows *= np.sign((rows * want).sum(1, keepdims=True))  # a singular vector has no sign
    assert np.abs(rows - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_suffix_at_full_rank_and_the_output_core_are_the_weight(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape)
    rows = tensor_train_suffix(w, 99).double().flatten(1).numpy()
    flat = w.double().flatten(1).numpy()
    s = np.linalg.svd(flat, compute_uv=False)
    core = np.linalg.lstsq(rows.T, flat.T, rcond=None)[0].T
    assert rows.shape == (len(s), flat.shape[1])
    assert np.abs(core @ rows - flat).max() < 1e-5
    assert np.abs(core.T @ core - np.eye(len(s))).max() < 1e-5
    assert np.abs(np.linalg.norm(rows, axis=1) - s).max() < 1e-5 * s[0]
