"""Losses by name, what parts of a batch add up to, and targets that fit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.ledger.losses import COUNTED, LOSSES, cross_entropy, loss_named, target_for, target_like


def test_losses_read_the_first_output() -> None:
    out, target = torch.randn(4, 3), torch.tensor([0, 2, 1, 0])
    both = {"logits": out, "more": torch.randn(9)}
    assert torch.equal(LOSSES["cross_entropy"](both, target), nn.functional.cross_entropy(out, target))
    assert torch.equal(LOSSES["mse"](both, out * 0), out.square().mean())
    torch.testing.assert_close(LOSSES["sum"](both, None), out.sum() + both["more"].sum())


@pytest.mark.parametrize(
    "target", [torch.tensor([0, 2, -100, 1]), torch.full((4, 3), 1 / 3)], ids=["numbers", "shares"]
)
def test_a_mean_is_its_total_over_what_it_counts(target: Tensor) -> None:
    out = torch.randn(4, 3)
    total, counted = COUNTED[cross_entropy]
    torch.testing.assert_close(total(out, target) / counted(target), cross_entropy(out, target))


@pytest.mark.parametrize(
    "loss,out,shape,dtype",
    [
        ("cross_entropy", torch.empty(4, 3), (4,), torch.int64),
        ("cross_entropy", torch.empty(4, 3, 5, 6), (4, 5, 6), torch.int64),
        ("mse", torch.empty(4, 3, dtype=torch.float64), (4, 3), torch.float64),
        ("sum", torch.empty(()), (), torch.float32),
    ],
)
def test_targets_fit(loss: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    target = target_like((out, 3), (torch.empty(4),), loss)
    assert (target.shape, target.dtype) == (shape, dtype) and not target.any()
    LOSSES[loss](out.float() if loss == "cross_entropy" else out, target)


def test_a_model_is_asked_on_fakes() -> None:
    class Loud(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert "Fake" in type(x).__name__
            return super().forward(x)

    assert target_for(Loud(3, 5), (torch.randn(4, 3),), "cross_entropy").shape == (4,)


@pytest.mark.parametrize(
    "loss,out,why",
    [
        ("hinge", torch.empty(4, 3), "--loss hinge: not known; use cross_entropy, mse, sum"),
        ("mse", {"n": 3}, "--loss mse: the model returns no tensor; return one that the loss can take"),
        ("cross_entropy", torch.empty(4), r"--loss cross_entropy: the first output has shape \[4\]; use --loss sum"),
        ("cross_entropy", torch.empty(4, 3).int(), r"--loss cross_entropy: .* shape \[4, 3\]; use --loss sum"),
    ],
)
def test_losses_that_do_not_fit(loss: str, out: Any, why: str) -> None:
    with pytest.raises(FloorplanError, match=f"^{why}$"):
        target_like(out, (), loss)
    if loss == "hinge":
        with pytest.raises(FloorplanError, match="not known"):
            loss_named(loss)
