"""Packed dropouts draw what torch draws and keep one bit a decision."""

import pytest
import torch
from saves import formats, kept_bytes, same, spatial
from torch import nn

from floorplan.layers.dropout import PackedDropout


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_draws_what_torch_draws(p: float, dtype: torch.dtype) -> None:
    for training in (True, False):
        plain = nn.Dropout(p).train(training)
        packed = PackedDropout.of(plain)
        for x in formats(torch.randn(3, 5, 7, 3).to(dtype)):
            same(plain, packed, x)
            bits = kept_bytes(packed, x.clone().requires_grad_())
            assert bits == ((315 + 7) // 8 if training and 0 < p < 1 else bits) and bits <= 40


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_channel_dropout_keeps_a_bit_a_channel(dims: int, batched: bool) -> None:
    plain = getattr(nn, f"Dropout{dims}d")(0.4, inplace=False)
    packed = PackedDropout.of(plain)
    for x in formats(torch.randn(spatial(dims)[0 if batched else 1 :], dtype=torch.float64)):
        for seed in range(3):
            same(plain, packed, x, seed)
        assert kept_bytes(packed, x.clone().requires_grad_()) <= (9 * 5 + 7) // 8
    big = torch.randn(8, 16, *[4] * dims, requires_grad=True)
    assert kept_bytes(packed, big) == 8 * 16 // 8
