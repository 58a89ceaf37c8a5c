"""Compact pools against plain autograd: values, gradients, ties, what is kept."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saves import formats, kept, same, spatial
from torch import nn

from floorplan.layers.pools import ShapeAdaptiveAvgPool, ShapeAvgPool, compact_pool


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
    packed: Any = compact_pool(pool)
    packed(b).nan_to_num().sum().backward()
    assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unbatched(dims: int) -> None:
    x = torch.randn(spatial(dims)[1:], dtype=torch.float64)
    for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool"):
        pool = getattr(nn, f"{name}{dims}d")(2)
        same(pool, compact_pool(pool), x)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"ceil_mode": True}, {"count_include_pad": False}, {"divisor_override": 5}], ids=str
)
def test_avg_pool_keeps_only_shapes(dims: int, options: dict[str, Any]) -> None:
    if dims == 1 and "divisor_override" in options:
        pytest.skip("AvgPool1d has no divisor_override")
    pool = getattr(nn, f"AvgPool{dims}d")(3, 2, 1, **options)
    packed = compact_pool(pool)
    assert isinstance(packed, ShapeAvgPool)
    for dtype in (torch.float64, torch.float32 if dims == 3 else torch.bfloat16):
        for x in formats(torch.randn(spatial(dims)).to(dtype)):
            same(pool, packed, x)
            assert kept(packed, x.clone().requires_grad_())[1] == []


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("output", [1, 2, 5])
def test_adaptive_avg_pool_keeps_only_shapes(dims: int, output: int) -> None:
    pool = getattr(nn, f"AdaptiveAvgPool{dims}d")(output)
    packed = compact_pool(pool)
    assert isinstance(packed, ShapeAdaptiveAvgPool)
    for x in formats(torch.randn(spatial(dims), dtype=torch.float64)):
        same(pool, packed, x)
        assert kept(packed, x.clone().requires_grad_())[1] == []


def test_adaptive_avg_pool_keeps_a_free_size() -> None:
    pool = nn.AdaptiveAvgPool2d((None, 3))
    same(pool, compact_pool(pool), torch.randn(2, 3, 7, 8, dtype=torch.float64))
