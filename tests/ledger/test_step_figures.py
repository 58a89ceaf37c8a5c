"""The figures of a step with its loss: predicted and measured agree, and a few by hand."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hard_nets import Lambda
from small_step import adapted, images
from torch import Tensor, fx, nn

from floorplan.errors import FloorplanError, TraceError
from floorplan.graph.trace import trace
from floorplan.ledger.losses import LOSSES, target_for
from floorplan.ledger.run import Step
from floorplan.ledger.step_figures import step_figures

METHODS = ["full", "bias", "bn", "lora-c", "lora-edge", "lora-conv", "memflora", "memflora-paper"]


@pytest.fixture(scope="module", params=METHODS)
def model(request: Any) -> fx.GraphModule:
    return adapted(request.param)


@pytest.mark.parametrize("loss", LOSSES)
def test_predicted_is_measured(model: fx.GraphModule, loss: str) -> None:
    for batch in (1, 5) if loss == "cross_entropy" and not _trains_norms(model) else (5,):
        x = images(batch)
        target = target_for(model, (x,), loss)
        predicted = step_figures(Step(model, (x,), target, LOSSES[loss]))
        assert predicted.as_dict() == step_figures(Step(model, (x,), target, LOSSES[loss]), fake=False).as_dict()
        assert 0 < predicted.saved and predicted.saved_refcount < predicted.training_state_peak_refcount


def _trains_norms(model: nn.Module) -> bool:
    return any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def test_a_linear_layer_by_hand() -> None:
    gm, x = trace(nn.Linear(10, 3), (torch.randn(5, 10),)).gm, torch.randn(5, 10)
    state, out = 4 * 33, 4 * 5 * 3
    found = step_figures(Step(gm, (x,), torch.zeros(5, 3), LOSSES["mse"]))
    assert found.trainable_parameters == 33 and found.optimizer == 2 * state
    assert found.saved == out  # the loss keeps what the layer returns
    assert found.saved_refcount == 4 * 50 + 2 * out  # and its input, the result and the target
    # At its most: all that is saved, or in the backward the input and both gradients.
    assert found.training_state_peak_refcount == 3 * state + max(4 * 50 + 2 * out, 4 * 50 + 4 * 3)
    assert found.total == found.requested_peak + 3 * state + 4 * 50 + out


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "name",
    ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "huber_loss", "l1_loss", "binary_cross_entropy_with_logits"],
)
def test_losses_of_the_users_own(name: str, reduction: str) -> None:
    """Some of torch's losses leave their one number in the memory of a whole map."""

    def loss(out: Any, target: Any) -> Tensor:
        return getattr(F, name)(out, target, reduction=reduction).sum()

    x, target = torch.randn(5, 10), torch.ones(5, 3)
    gm = trace(nn.Sequential(nn.Linear(10, 3), nn.ReLU()), (x,)).gm
    assert step_figures(Step(gm, (x,), target, loss)) == step_figures(Step(gm, (x,), target, loss), fake=False)


def test_cross_entropy_keeps_its_result_twice_its_labels_and_a_weight() -> None:
    gm, x = trace(nn.Linear(10, 3), (torch.randn(5, 10),)).gm, torch.randn(5, 10)
    target = target_for(gm, (x,), "cross_entropy")
    found = step_figures(Step(gm, (x,), target, LOSSES["cross_entropy"]))
    logs = 4 * 5 * 3
    assert found.saved == logs + 4
    assert found.saved_refcount == 4 * 50 + 2 * logs + 8 * 5 + 4


def test_the_sum_of_all_outputs() -> None:
    def both(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return y, {"z": m.b(torch.relu(y))}

    x = torch.randn(5, 10)
    gm = trace(Lambda(both, a=nn.Linear(10, 3), b=nn.Linear(3, 2)), (x,)).gm
    found = step_figures(Step(gm, (x,), target_for(gm, (x,), "sum"), LOSSES["sum"]))
    assert found.saved == 4 * 5 * 3 and found.saved_refcount == 4 * 50 + 2 * 4 * 5 * 3
    out = LOSSES["sum"](gm(x), None)
    torch.testing.assert_close(out, gm(x)[0].sum() + gm(x)[1]["z"].sum())


def test_targets_fit_the_first_output() -> None:
    x = torch.randn(2, 3, 6, 6)
    gm = trace(nn.Conv2d(3, 5, 3), (x,)).gm
    labels = target_for(gm, (x,), "cross_entropy")
    assert labels.shape == (2, 4, 4) and labels.dtype == torch.int64
    same = target_for(gm.double(), (x.double(),), "mse")
    assert same.shape == (2, 5, 4, 4) and same.dtype == torch.float64


@pytest.mark.parametrize(
    "run,loss,message",
    [
        (lambda m, x: m.a(x), "hinge", "--loss hinge: not known; use cross_entropy, nll, mse, l1, .*, sum"),
        (
            lambda m, x: m.a(x).sum((1,)),
            "cross_entropy",
            r"--loss cross_entropy: the first output has shape \[5\]; use --loss sum",
        ),
        (
            lambda m, x: m.a(x).argmax(1, True),
            "cross_entropy",
            r"--loss cross_entropy: the first output has shape \[5, 1\]; use --loss sum",
        ),
    ],
)
def test_losses_that_do_not_fit(run: Any, loss: str, message: str) -> None:
    x = torch.randn(5, 10)
    gm = fx.symbolic_trace(Lambda(run, a=nn.Linear(10, 3)))
    with pytest.raises(FloorplanError, match=f"^{message}$"):
        target_for(gm, (x,), loss)


def test_measuring_leaves_the_model_as_it_was() -> None:
    gm, x = adapted("full"), images(5)
    gm(x).sum().backward()
    state, rng = copy.deepcopy(gm.state_dict()), torch.get_rng_state()
    grads = [p.grad for p in gm.parameters()]
    target = target_for(gm, (x,), "cross_entropy")
    for fake in (True, False):
        step_figures(Step(gm, (x,), target, LOSSES["cross_entropy"]), fake)
        assert all(torch.equal(t, state[n]) for n, t in gm.state_dict().items())
        assert all(p.grad is g for p, g in zip(gm.parameters(), grads, strict=True))
        assert torch.equal(torch.get_rng_state(), rng)


def test_a_forward_that_cannot_be_differentiated_is_one_line() -> None:
    def spoil(m: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(m.a(x))
        z = y * 2
        y.mul_(3)
        return z

    x = torch.randn(5, 10)
    gm = fx.symbolic_trace(Lambda(spoil, a=nn.Linear(10, 3)))
    with pytest.raises(TraceError, match="^backward: .*cannot be trained as it stands$"):
        step_figures(Step(gm, (x,), torch.zeros(5, 3), LOSSES["mse"]), fake=False)
