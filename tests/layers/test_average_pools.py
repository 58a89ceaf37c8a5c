"""Average pools against plain autograd: same values and gradients, nothing kept but shapes."""

from typing import Any

import pytest
import torch
from saves import formats, kept, same, spatial
from torch import nn

from floorplan.layers.average_pools import ShapeAdaptiveAvgPool, ShapeAvgPool
from floorplan.layers.max_pools import compact_pool


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
