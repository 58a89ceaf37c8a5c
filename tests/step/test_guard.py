"""Calls that a compiled step must not take: wrong arguments, changed trainables, losses that do not add up."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import Residual
from smooth_nets import adapted_net
from steps import by_autograd, gradients, graph_of, worst
from torch import Tensor, fx, nn

from floorplan.budget.remat.ladder import climb
from floorplan.errors import FloorplanError
from floorplan.step.compile import Schedule, Step, compile_step

X, Y = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 1, 4, 2, 2])


@pytest.fixture
def gm() -> fx.GraphModule:
    return graph_of(Residual(), X).eval()


def compiled(gm: fx.GraphModule, loss: Any = "cross_entropy", **options: Any) -> Step:
    return compile_step(gm, loss, X, plan=Schedule(micro_batch=2), **options)


def test_wrong_calls(gm: fx.GraphModule) -> None:
    step = compiled(gm)
    for given, words in (
        ((X,), "takes 1 inputs and a target"),
        ((3, Y), "no input is a tensor"),
        ((X[:0], Y[:0]), "no input is a tensor with samples"),
    ):
        with pytest.raises(FloorplanError, match=words):
            step(*given)
    with pytest.raises(FloorplanError, match="outside autocast"), torch.autocast("cpu"):
        step(X, Y)


def test_changed_trainables(gm: fx.GraphModule) -> None:
    step = compiled(gm)
    gm.get_submodule("stem").U.requires_grad_(False)
    with pytest.raises(FloorplanError, match="stem.U was frozen or unfrozen since"):
        step(X, Y)


def test_batch_statistics(gm: fx.GraphModule) -> None:
    step = compiled(gm)
    gm.add_submodule("norm", nn.BatchNorm2d(3, affine=False))
    with pytest.raises(FloorplanError, match="normalises by the batch"):
        step(X, Y)


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.t(), torch.arange(len(out)))


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def weighing(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=WEIGHTS.to(out))


def infinite(out: Tensor, y: Tensor) -> Tensor:
    return (out.sum() * 0).log()


@pytest.mark.parametrize(
    ("loss", "words"), [(contrastive, "couples"), (weighing, "weighs or couples"), (infinite, "cannot be shared out")]
)
def test_losses_that_are_said_to_add_up_and_do_not(gm: fx.GraphModule, loss: Any, words: str) -> None:
    with pytest.raises(FloorplanError, match=words):
        compiled(gm, loss, reduction="mean")(X, Y)
    compile_step(gm, loss, X, reduction="mean")(X, Y)  # the whole batch at once is right


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(label_smoothing=0.1), contrastive, weighing])
def test_losses_that_nothing_is_said_of(gm: fx.GraphModule, loss: Any) -> None:
    gm.double()
    value, want = by_autograd(gm, (X.double(),), Y, loss)
    assert abs(float(compile_step(gm, loss, X.double(), plan=Schedule(micro_batch=4))(X.double(), Y) - value)) < 1e-9
    assert worst(gradients(gm), want) <= 1e-12


def test_a_sum_that_is_called_a_mean(gm: fx.GraphModule) -> None:
    def total(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="sum")

    with pytest.raises(FloorplanError, match="is not the mean of its parts"):
        compiled(gm, total, reduction="mean")(X, Y)
    compiled(gm, total, reduction="sum")(X, Y)
    with pytest.raises(FloorplanError, match="reduction mean: loss cross_entropy has its own, sum"):
        compiled(gm, nn.CrossEntropyLoss(reduction="sum"), reduction="mean")


def test_ignored_targets_are_counted(gm: fx.GraphModule) -> None:
    gm.double()
    y = torch.tensor([0, -100, -100, 4, 2, -100])
    value, want = by_autograd(gm, (X.double(),), y, F.cross_entropy)
    for schedule in (Schedule(micro_batch=2), Schedule(stages=(("pool", 2),), last=5)):
        got = compile_step(gm, "cross_entropy", X.double(), plan=schedule)(X.double(), y)
        assert abs(float(got - value)) < 1e-12 and worst(gradients(gm), want) <= 1e-12
    soft = torch.softmax(torch.randn(6, 5, dtype=torch.float64), 1)
    value, want = by_autograd(gm, (X.double(),), soft, F.cross_entropy)
    got = compile_step(gm, "cross_entropy", X.double(), plan=Schedule(micro_batch=4))(X.double(), soft)
    assert abs(float(got - value)) < 1e-12 and worst(gradients(gm), want) <= 1e-12


def test_reductions(gm: fx.GraphModule) -> None:
    with pytest.raises(FloorplanError, match="reduction avg: not known"):
        compiled(gm, nn.CrossEntropyLoss(), reduction="avg")


def test_hooks_and_inference_mode(gm: fx.GraphModule) -> None:
    step = compiled(gm)
    with pytest.raises(FloorplanError, match="inference"), torch.inference_mode():
        step(X, Y)
    handle = gm.get_submodule("conv").register_forward_hook(lambda m, a, out: None)
    with pytest.raises(FloorplanError, match="conv got a hook"):
        step(X, Y)
    handle.remove()
    gm.get_submodule("conv").U.register_hook(lambda g: g)
    with pytest.raises(FloorplanError, match="conv.U has a gradient hook"):
        step(X, Y)


def test_copies_and_pickles(gm: fx.GraphModule) -> None:
    step = compiled(gm)
    twin = copy.deepcopy(step)
    twin(X, Y)
    assert gradients(twin.module) and not gradients(gm)
    with pytest.raises(FloorplanError, match="is not written to a file"):
        pickle.dumps(step)


def test_no_code_comes_from_a_schedule(gm: fx.GraphModule) -> None:
    for bad in ({"micro_batch": "__import__('os').abort() or 0"}, {"layout": ["x"]}, {"stages": [["a", "1"]]}):
        with pytest.raises(FloorplanError, match="schedule: "):
            compile_step(gm, "cross_entropy", X, plan=bad)
    for bad in ({"branches": ["no"]}, {"reuse": ["no"]}, {"stages": [['"""', 2]]}):
        with pytest.raises(FloorplanError, match="no such node|more than one value"):
            compile_step(gm, "cross_entropy", X, plan=bad)
    with pytest.raises(FloorplanError, match="is no plan"):
        compile_step(gm, "cross_entropy", X, plan=5)  # type: ignore[arg-type]


def test_a_step_that_fails_leaves_no_part_of_a_gradient(gm: fx.GraphModule) -> None:
    step = compiled(gm)
    with pytest.raises(FloorplanError, match="step: IndexError: Target 9 is out of bounds"):
        step(X, torch.tensor([0, 1, 2, 9, 1, 1]))
    assert not gradients(gm)
    assert repr(step) == "Step(GraphModule, micro-batch 2, 1 nodes under autograd)"


def test_what_computes_again_is_left_to_autograd() -> None:
    x = torch.randn(2, 3, 16, 16)
    again = climb(adapted_net("groupnorm"), (x,)).fit().module
    with pytest.raises(FloorplanError, match="computes again what it let go"):
        compile_step(again, "sum", x)
