"""Losses by name, what parts of a batch add up to, and targets that fit."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from losses import each
from torch import Tensor, nn

from floorplan.errors import FloorplanError
from floorplan.ledger.losses import (
    LOSSES,
    Named,
    Shared,
    as_loss,
    cross_entropy,
    faked,
    loss,
    loss_named,
    spelled,
    target_for,
    target_like,
    trained_in,
    ungraded,
    weights_of,
)


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
    shared = Shared(cross_entropy, None, 4, cross_entropy.counted(target, 3))
    parts = [shared.part(out[p], target[p]) * shared.factor(n) for p, n in ((slice(0, 3), 3), (slice(3, 4), 1))]
    torch.testing.assert_close(parts[0] + parts[1], cross_entropy(out, target))


@pytest.mark.parametrize(
    "loss,out,shape,dtype",
    [
        ("cross_entropy", torch.empty(4, 3), (4,), torch.int64),
        ("cross_entropy", torch.empty(4, 3, 5, 6), (4, 5, 6), torch.int64),
        ("mse", torch.empty(4, 3, dtype=torch.float64), (4, 3), torch.float64),
        ("nll", torch.empty(4, 3, 5), (4, 5), torch.int64),
        ("kl_div", torch.empty(4, 3), (4, 3), torch.float32),
        ("sum", torch.empty(()), (), torch.float32),
    ],
)
def test_targets_fit(loss: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    target = target_like((out, 3), (torch.empty(4),), loss)
    assert (target.shape, target.dtype) == (shape, dtype) and not target.any()
    LOSSES[loss](out.float() if target.dtype == torch.int64 else out, target)


def test_a_model_is_asked_on_fakes() -> None:
    class Loud(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert "Fake" in type(x).__name__
            return super().forward(x)

    assert target_for(Loud(3, 5), (torch.randn(4, 3),), "cross_entropy").shape == (4,)


@pytest.mark.parametrize(
    "loss,out,why",
    [
        ("hinge", torch.empty(4, 3), "--loss hinge: not known; use cross_entropy, nll, .*, sum"),
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


def parted(given: Any, out: Tensor, target: Tensor, sizes: tuple[int, ...], mean: bool | None = None) -> Tensor:
    """The loss of a batch from parts of these sizes."""
    whole, at, total = as_loss(given), 0, torch.zeros((), dtype=out.dtype)
    count = whole.counted(target, max(sizes)) if isinstance(whole, Named) else None
    shared = Shared(whole, mean, len(out), count)
    for n in sizes:
        part = slice(at, at + n)
        total, at = total + shared.part(out[part], target[part]) * shared.factor(n), at + n
    return total


K, MAP = 5, torch.randn(6, 5, 3, 2, dtype=torch.float64)
WEIGHT = torch.rand(K, dtype=torch.float64) + 0.1
NUMBERS = torch.randint(0, K, (6, 3, 2))
VOID = torch.cat([torch.full((2, 3, 2), 255), NUMBERS[2:]])  # the first part has no valid target
ODDS, SHARES = torch.rand_like(MAP), torch.softmax(torch.randn_like(MAP), 1)


@pytest.mark.parametrize(
    "given,out,target",
    [
        (nn.CrossEntropyLoss(), MAP, NUMBERS),
        (nn.CrossEntropyLoss(WEIGHT, ignore_index=255, label_smoothing=0.2), MAP, VOID),
        (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), MAP, SHARES),
        (nn.CrossEntropyLoss(reduction="sum", ignore_index=255), MAP, VOID),
        (nn.CrossEntropyLoss(reduction="none"), MAP[:, :, 0, 0], NUMBERS[:, 0, 0]),
        (partial(F.cross_entropy, ignore_index=255), MAP, VOID),
        (F.cross_entropy, MAP, NUMBERS),
        (loss("cross_entropy", ignore_index=255, weight=WEIGHT), MAP, VOID),
        (nn.NLLLoss(WEIGHT, ignore_index=255), MAP.log_softmax(1), VOID),
        (nn.MSELoss(), MAP, ODDS),
        (nn.L1Loss(), MAP, ODDS),
        (nn.SmoothL1Loss(beta=0.3), MAP, ODDS),
        (nn.HuberLoss(delta=0.3), MAP, ODDS),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHT[:, None, None]), MAP, ODDS),
        (nn.BCEWithLogitsLoss(weight=WEIGHT[:1]), MAP, ODDS),
        (nn.KLDivLoss(), MAP.log_softmax(1), SHARES),
        (nn.KLDivLoss(reduction="batchmean", log_target=True), MAP.log_softmax(1), SHARES.log()),
        ("sum", MAP, ODDS),
    ],
)
def test_torchs_losses_are_shared_out_exactly(given: Any, out: Tensor, target: Tensor) -> None:
    whole = as_loss(given)
    assert isinstance(whole, Named) and whole.adds_up
    a, b = out.clone().requires_grad_(), out.clone().requires_grad_()
    value, got = Shared(whole, None, 6).whole(a, target), parted(given, b, target, (2, 3, 1))
    torch.testing.assert_close(got, value, rtol=1e-13, atol=0)
    value.backward(), got.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-15)


def test_a_batch_without_any_valid_target_is_as_torch_has_it() -> None:
    nothing = torch.full_like(NUMBERS, -100)
    out = MAP.clone().requires_grad_()
    got = parted("cross_entropy", out, nothing, (4, 2))
    got.backward()  # type: ignore[no-untyped-call]
    assert got.isnan() and out.grad is not None and not out.grad.any()


def test_options_are_asked_for_at_every_call() -> None:
    module = nn.CrossEntropyLoss()
    known = as_loss(module)
    module.ignore_index = 0
    assert torch.equal(known(MAP, NUMBERS), F.cross_entropy(MAP, NUMBERS, ignore_index=0))


class Own(nn.CrossEntropyLoss):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    "given", [Own(), lambda o, t: o.mean(), partial(F.cross_entropy, MAP), partial(F.mse_loss, {})]
)
def test_what_is_not_torchs_own_is_not_taken_for_it(given: Any) -> None:
    assert as_loss(given) is given


def test_a_weight_of_every_element_cannot_be_shared_out() -> None:
    assert not loss("bce_with_logits", weight=torch.ones(6, 1)).adds_up


def test_losses_that_are_refused() -> None:
    for make, why in (
        (lambda: loss("hinge"), "loss hinge: not known"),
        (lambda: loss("mse", beta=1), "loss mse: no option beta; it takes reduction"),
        (lambda: loss("mse", reduction="batchmean"), "reduction batchmean: not known; use mean, sum, none"),
        (lambda: as_loss(3), "a int is no loss"),
        (lambda: parted("mse", MAP[:, :, 0, 0], MAP[:, 0, 0, 0], (3, 3)), "is broadcast over samples"),
        (lambda: parted(loss("bce_with_logits", pos_weight=ODDS), MAP, ODDS, (3, 3)), "has a value a sample"),
        (lambda: parted(lambda o, t: o, MAP, ODDS, (6,)), "one value, or one a sample"),
        (lambda: parted(lambda o, t: 0.5, MAP, ODDS, (6,)), "returns a float"),
        (lambda: as_loss(nn.MSELoss())((MAP, MAP), ODDS), "the model returns 2 tensors"),
    ):
        with pytest.raises(FloorplanError, match=why):
            make()


def test_one_value_a_sample_is_reduced() -> None:
    def own(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().sum((1, 2, 3))

    each = own(MAP, ODDS)
    for mean, want in ((None, each.mean()), (True, each.mean()), (False, each.sum())):
        torch.testing.assert_close(Shared(own, mean, 6).whole(MAP, ODDS), want)
        torch.testing.assert_close(parted(own, MAP, ODDS, (4, 2), mean), want)


def test_a_loss_on_fakes_has_fakes_of_its_weights() -> None:
    own, w = loss("cross_entropy", weight=torch.rand(5)), torch.ones(5)
    assert [t.shape for t in weights_of(own)] == [(5,)] and not weights_of(max)
    found = faked(own, [w])
    assert isinstance(found, Named) and found.weights[0] is w
    numbers = torch.arange(3)
    assert torch.equal(faked(lambda o, y: F.one_hot(y, 5), [])(None, numbers), F.one_hot(numbers, 5))


def test_a_loss_in_words() -> None:
    assert spelled(LOSSES["mse"]) == "mse" and spelled(each) == "each" and spelled(nn.Softplus()) == "Softplus"
    assert spelled(loss("nll", weight=torch.rand(5))) == "nll(weight=[5], reduction=mean)"


def test_what_trains_in_a_loss_keeps_its_gradient() -> None:
    own = nn.Linear(2, 1)
    own.weight.grad = before = torch.ones(1, 2)
    with ungraded(own):
        assert all(p.grad is None for p in trained_in(own))
        own(torch.ones(3, 2)).sum().backward()
    assert own.weight.grad is before and own.bias.grad is None
    assert not trained_in(each)
