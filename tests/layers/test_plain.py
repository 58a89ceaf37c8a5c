"""Modules in the place of functions and flags: any shape, and a training mode that stays where it is fixed."""

import pytest
import torch
from torch import nn

from floorplan.layers.plain import AnyBatchNorm, Clamp, TrainingFlag


@pytest.mark.parametrize("low,high", [(0, 6), (None, 1.5), (-0.5, None), (2.0, -2.0)])
def test_clamp_is_torchs(low: float | None, high: float | None) -> None:
    x = torch.randn(50, dtype=torch.float64) * 4
    assert torch.equal(Clamp(low, high)(x), torch.clamp(x, low, high))


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2), (5, 3, 2, 2, 2)])
def test_a_batch_norm_of_any_shape(shape: tuple[int, ...]) -> None:
    norm, x = AnyBatchNorm(3), torch.randn(shape)
    y = norm(x).transpose(0, 1).reshape(3, -1)
    torch.testing.assert_close(y.mean(1), torch.zeros(3), rtol=0, atol=1e-5)
    assert norm.num_batches_tracked == 1


def test_a_fixed_batch_norm_ignores_train() -> None:
    norm = AnyBatchNorm(3, eps=0.1, momentum=0.2, affine=False, fixed=True)
    assert not norm.train().training and AnyBatchNorm(3).train().training and not AnyBatchNorm(3).eval().training
    x = torch.randn(4, 3, 2)
    torch.testing.assert_close(norm(x), x / 1.1**0.5)
    again = AnyBatchNorm(**norm.config())
    assert again.config() == norm.config() and not again.training and again.weight is None


def test_a_training_flag_is_its_blocks() -> None:
    block = nn.Sequential(TrainingFlag())
    assert block[0]() is True and block.eval()[0]() is False and TrainingFlag().config() == {}
