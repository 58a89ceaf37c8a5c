"""Every tensor that autograd keeps is caught with its node, and what the hooks miss by the census."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hard_nets import Lambda, same
from kinds import Apply, Hiding, images
from torch import fx, nn

from floorplan.errors import TraceError
from floorplan.graph.trace import trace
from floorplan.ledger.recorder import op_name
from floorplan.ledger.run import Run, Step, Watch, run


def seen(model: nn.Module, backward: bool = False, **options: Any) -> Run:
    x = images()
    return run(Step(trace(model, (x,)).gm, (x,), backward=backward), Watch(**{"hooks": True} | options))


def two() -> nn.Module:
    return Lambda(lambda m, x: m.c2(F.relu(m.c1(x))), c1=same(3, 8), c2=same(8, 4))


def test_who_saves_what() -> None:
    saved = seen(two()).saved
    assert [(s.node, s.op, s.owner) for s in saved] == [
        ("c1", "Conv2d", "input"),
        ("c1", "Conv2d", "state"),
        ("relu", "relu", "kept"),
        ("c2", "Conv2d", "kept"),
        ("c2", "Conv2d", "state"),
    ]
    assert saved[2].storage == saved[3].storage and saved[2].shape == (4, 8, 12, 12)
    assert saved[2].nbytes == saved[2].tensor_bytes == 4 * 4 * 8 * 144


def test_a_view_counts_its_whole_storage() -> None:
    saved = seen(Lambda(lambda m, x: m.c2(m.c1(x)[:, :2]), c1=same(3, 8), c2=same(2, 4))).saved
    kept = [s for s in saved if s.owner == "kept"]
    assert [(s.nbytes, s.tensor_bytes) for s in kept] == [(18432, 4608)]


def test_hidden_tensors_are_recorded_once() -> None:
    found = seen(Lambda(lambda m, x: m.h(m.c1(x)), c1=same(3, 8), h=Apply(Hiding)))
    assert [(s.node, s.hidden, s.nbytes) for s in found.saved if s.hidden] == [("h", True, 18432)]


def test_real_and_fake_runs_agree() -> None:
    x = images()
    gm = trace(two(), (x,)).gm
    fake, real = seen(two()), run(Step(gm, (x,)).forward, Watch(hooks=True), fake=False)
    assert [(s.node, s.nbytes, s.owner) for s in fake.saved] == [(s.node, s.nbytes, s.owner) for s in real.saved]


def test_lives_of_saved_tensors_and_gradients() -> None:
    found = seen(two(), hooks=False, backward=True)
    lives = found.timeline.lives
    assert sum(lives[i].nbytes for i in found.saved_lives) == 18432
    assert sorted(lives[i].nbytes for i in found.grad_lives) == [16, 32, 864, 1152]
    assert all(lives[i].died is not None for i in found.saved_lives)


def test_gradients_are_left_as_none() -> None:
    model = two()
    run(Step(model, (images(),)), fake=False)
    assert all(p.grad is None for p in model.parameters())


def test_an_op_that_fails_is_named_in_one_line() -> None:
    model = Lambda(lambda m, x: m.fc(F.relu(m.c1(x)).flatten(1)), c1=same(3, 8), fc=nn.Linear(7, 2))
    gm = fx.symbolic_trace(model)
    with pytest.raises(TraceError, match=r"^fc: RuntimeError: .*--input$") as e:
        run(Step(gm, (images(),)).forward, Watch(hooks=True))
    assert "\n" not in str(e.value)


def test_an_overwritten_tensor_is_named_with_its_writer() -> None:
    def spoil(m: Lambda, x: torch.Tensor) -> Any:
        return m.c2(torch.sigmoid(m.c1(x)).mul_(2)).mul_(3)

    assert seen(Lambda(spoil, c1=same(3, 8), c2=same(8, 4)), writes=True).spoiled == ("sigmoid", "mul_")
    assert seen(two(), writes=True).spoiled is None


def test_complex_outputs_are_differentiated() -> None:
    found = seen(Lambda(lambda m, x: torch.fft.rfft2(m.c1(x)), c1=same(3, 8)), hooks=False, backward=True)
    assert len(found.grad_lives) == 2


def test_names_of_ops() -> None:
    gm = fx.symbolic_trace(Lambda(lambda m, x: F.relu(m.c1(x)).mean(), c1=same(3, 8)))
    assert [op_name(n, gm) for n in gm.graph.nodes] == ["x", "Conv2d", "relu", "mean", "output"]
