"""The recorder: what hooks and census note, and the running count of saves and gradients."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hard_nets import Lambda, same
from kinds import Apply, Hiding
from torch import Tensor, fx, nn

from floorplan.graph.trace import trace
from floorplan.ledger.recorder import op_name
from floorplan.ledger.run import Run, Step, Watch, run

B, N, FOUR = 5, 10, 4


def seen(model: nn.Module, x: Tensor | None = None, backward: bool = True, **options: Any) -> Run:
    """One real step of a graph, under hooks."""
    x = torch.randn(B, N) if x is None else x
    gm = model if isinstance(model, fx.GraphModule) else fx.symbolic_trace(model)
    return run(Step(gm, (x,), backward=backward), Watch(**{"hooks": True} | options), fake=False)


def chain(**options: Any) -> nn.Module:
    """relu(a(x)) -> b: widths 10, 6, 3, no biases."""
    a, b = nn.Linear(N, 6, bias=False), nn.Linear(6, 3, bias=False)
    return Lambda(lambda m, x: m.b(torch.relu(m.a(x))), a=a, b=b)


X, H = FOUR * B * N, FOUR * B * 6  # bytes of the input and of the hidden map
GA, GB = FOUR * N * 6, FOUR * 6 * 3  # bytes of the two gradients


def test_the_count_adds_saves_and_gradients_and_drops_what_is_read() -> None:
    # Forward: x, relu's result, b's input (the same again). Backward: b drops its input and makes
    # its gradient, relu drops its result, a drops x and makes the last gradient.
    assert seen(chain()).refcount_peak == max(X + 2 * H, X + H + GB, X + GB, GB + GA)


def test_gradients_alone_can_be_the_peak() -> None:
    model = Lambda(lambda m, x: m.a(x), a=nn.Linear(200, 50, bias=False))
    assert seen(model, torch.randn(1, 200)).refcount_peak == FOUR * 200 * 50


def test_frozen_parameters_have_no_gradient_to_count() -> None:
    model: Any = chain()
    model.a.weight.requires_grad_(False)
    assert seen(model).refcount_peak == max(H, GB)


def test_a_shared_parameter_has_one_gradient() -> None:
    model = Lambda(lambda m, x: m.a(m.a(x)), a=nn.Linear(N, N, bias=False))
    assert seen(model, torch.randn(1, N)).refcount_peak == max(2 * FOUR * N, FOUR * N * N)


def test_without_a_backward_nothing_is_counted() -> None:
    found = seen(chain(), backward=False)
    assert found.refcount_peak == 0 and len(found.saved) > 2
    assert seen(chain(), hooks=False).refcount_peak == 0 and seen(chain(), hooks=False).saved == ()


def test_state_is_listed_and_not_counted() -> None:
    saved = seen(chain()).saved
    assert [(s.node, s.owner, s.tensor_bytes) for s in saved] == [
        ("a", "input", X),
        ("relu", "kept", H),
        ("b", "state", GB),
        ("b", "kept", H),
    ]
    assert saved[1].storage == saved[3].storage != saved[0].storage
    assert [s.op for s in saved] == ["Linear", "relu", "Linear", "Linear"]
    assert [s.module for s in saved] == ["a", "", "b", "b"] and "relu" in saved[1].maker


def test_a_view_is_counted_by_itself_and_listed_with_its_storage() -> None:
    model = Lambda(lambda m, x: m.b(m.a(x)[:, :2]), a=nn.Linear(N, 6, bias=False), b=nn.Linear(2, 3, bias=False))
    found = seen(model, torch.randn(B, N))
    (kept,) = [s for s in found.saved if s.owner == "kept"]
    assert (kept.nbytes, kept.tensor_bytes, kept.shape) == (H, FOUR * B * 2, (B, 2))
    assert found.refcount_peak == max(X + FOUR * B * 2, X + FOUR * 6, FOUR * 6 + GA)


@pytest.mark.parametrize("op", [torch.sigmoid, torch.relu, torch.exp, torch.square])
def test_what_dies_with_an_unread_result_is_struck_out(op: Any) -> None:
    """An op that keeps its own result must not be kept alive by the hooks that see it."""

    def unread(m: Any, x: Tensor) -> Tensor:
        op(m.a(x))
        return m.b(x)

    found = seen(Lambda(unread, a=nn.Linear(N, 6, bias=False), b=nn.Linear(N, 3, bias=False)))
    assert [(s.node, s.owner) for s in found.saved] == [("a", "input"), ("b", "input")]
    (life,) = [n for n in found.timeline.lives if n.node == getattr(op, "__name__", "")]
    assert life.died is not None


def test_a_forward_under_hooks_lets_go_of_all_it_has_kept() -> None:
    found = seen(chain(), backward=False)
    gc.collect()
    assert [n.op for n in found.timeline.lives if n.died is None] == ["aten.mm.default"]  # the output
    # The walk above knows by its own events; a real module's memory is looked at from outside.
    died: list[int] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(x)
            weakref.finalize(y.untyped_storage(), died.append, 1)
            return y

    model = nn.Sequential(nn.Linear(N, 6), Spy(), nn.Linear(6, 3))
    run(Step(model, (torch.randn(B, N),)).forward, Watch(hooks=True, nodes=False), fake=False)
    assert died == [1]


def test_hidden_tensors_come_from_the_census_alone() -> None:
    x = torch.randn(B, N)
    found = seen(trace(Lambda(lambda m, x: m.h(m.a(x)), a=nn.Linear(N, 6), h=Apply(Hiding)), (x,)).gm, x)
    (hidden,) = [s for s in found.saved if s.hidden]
    assert (hidden.node, hidden.op, hidden.nbytes) == ("h", "Apply", H)
    assert (hidden.shape, hidden.dtype, hidden.owner) == ((B, 6), torch.float32, "kept")
    assert [s.nbytes for s in seen(chain()).saved if s.hidden] == []


def test_the_loss_is_no_part_of_what_is_kept() -> None:
    found = seen(Lambda(lambda m, x: m.a(x).sum(), a=nn.Linear(N, 6)))
    assert [s.owner for s in found.saved] == ["input"] and found.saved_lives == frozenset()


def test_the_first_overwritten_tensor_is_named() -> None:
    def spoil(m: Any, x: Tensor) -> Any:
        y = torch.sigmoid(m.c1(x))
        z = torch.tanh(y)
        return z.mul_(2) + y.mul_(3)

    found = seen(Lambda(spoil, c1=same(3, 4)), torch.randn(2, 3, 5, 5), writes=True, backward=False)
    assert found.spoiled == ("tanh", "mul_")
    assert seen(chain(), writes=True).spoiled is None


def test_names_of_modules_functions_and_methods() -> None:
    gm = fx.symbolic_trace(Lambda(lambda m, x: torch.relu(m.a(x)).view(-1).sum(), a=nn.Linear(N, 3)))
    names = [op_name(n, gm) for n in gm.graph.nodes if n.op != "output"]
    assert names == ["x", "Linear", "relu", "view", "sum"]
