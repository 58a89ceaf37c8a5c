"""Packed max pools against plain autograd: values, gradients, ties, bits kept."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saves import formats, kept, same, spatial
from torch import nn

from floorplan.layers.max_pools import compact_pool


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_max_pool_geometry(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    kernel = tuple(data.draw(st.integers(1, 4)) for _ in range(dims))
    stride = tuple(data.draw(st.integers(1, 3)) for _ in range(dims))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    dilation = tuple(data.draw(st.integers(1, 2)) for _ in range(dims))
    ceil_mode = data.draw(st.booleans())
    size = [(k - 1) * d + 1 + data.draw(st.integers(0, 4)) for k, d in zip(kernel, dilation, strict=True)]
    kind: Any = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1]
    pool = kind(kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    x = torch.randint(0, 3, (3, 2, *size)).double()  # ties
    for z in formats(x):
        same(pool, compact_pool(pool), z)


@pytest.mark.parametrize("kernel,width", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 8)])
def test_max_pool_keeps_the_fewest_bits(kernel: int, width: int) -> None:
    pool = nn.MaxPool2d(kernel, 1)
    y, saved = kept(compact_pool(pool), torch.randn(3, 5, 17, 19, requires_grad=True))
    assert [t.nbytes for t in saved] == [math.ceil(y.numel() * width / 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_pool_overlap_in_low_precision(dtype: torch.dtype) -> None:
    for x in formats(torch.randn(4, 6, 12, 12).to(dtype)):
        same(nn.MaxPool2d(3, 1, 1), compact_pool(nn.MaxPool2d(3, 1, 1)), x)


def test_max_pool_nan_and_padding() -> None:
    x = torch.full((1, 1, 4, 4), -math.inf, dtype=torch.float64)
    pool = nn.MaxPool2d(3, 2, 1)
    same(pool, compact_pool(pool), x)
    x[0, 0, 1, 1] = math.nan
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    pool(a).nan_to_num().sum().backward()
    compact_pool(pool)(b).nan_to_num().sum().backward()
    assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unbatched(dims: int) -> None:
    x = torch.randn(spatial(dims)[1:], dtype=torch.float64)
    for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool"):
        pool = getattr(nn, f"{name}{dims}d")(2)
        same(pool, compact_pool(pool), x)
