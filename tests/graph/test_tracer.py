"""What cannot be traced: branches on values, failures, checkpoints, switched contexts."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from traced_nets import Net, X, conv, same, targets

from floorplan.errors import TraceError
from floorplan.graph.trace import trace


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0.1:
            x = x * 2
        return x


def test_branch_on_values() -> None:
    with pytest.raises(TraceError) as e:
        trace(ByValue(), [X])
    assert str(e.value).startswith("forward: test_tracer.py:") and "\n" not in str(e.value)
    assert "branches on tensor values (`if x.mean() > 0.1`); " in str(e.value)
    with pytest.raises(TraceError, match="on tensor values"):
        trace(Net(lambda s, x: x * float(x.sum())), [X])
    model = nn.Sequential(conv(), ByValue(), nn.ReLU())
    t = trace(model, [X])
    assert list(t.opaque) == ["1"] and "branches on tensor values" in t.opaque["1"]
    same(model, t, X)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = conv()

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        torch.from_numpy(y.detach().numpy())
        return cast(Tensor, y * 2)


def test_failures_roll_back_to_the_innermost_module() -> None:
    model = Net(lambda s, x: s.b(s.a(x) + s.a.c.bias.sum()), a=Untraceable(), b=conv())
    t = trace(model, [X])
    assert targets(t)[:2] == ["x", "a"] and list(t.opaque) == ["a"]
    assert t.opaque["a"].startswith("test_tracer.py:") and "TypeError" in t.opaque["a"]
    same(model, t, X)


def test_values_made_inside_a_failure_are_made_again_outside() -> None:
    def inner(s: Any, pair: Any) -> Any:
        y = pair[0].view(pair[1]) + model.get_parameter("b.bias").mean()
        torch.from_numpy(y.detach().numpy())
        return y

    def forward(s: Any, x: Tensor) -> Any:
        size = x.shape
        return s.a((x, size)) + x.view(size) + s.b.bias.sum()

    model = Net(forward, a=Net(inner), b=conv())
    t = trace(model, [X])
    assert list(t.opaque) == ["a"]
    same(model, t, X)


def test_untraceable_root_is_one_call() -> None:
    model = Untraceable()
    t = trace(model, [X])
    assert targets(t) == ["x", "model", "output"] and t.gm.model is model
    assert list(t.opaque) == ["model"] and "TypeError" in t.opaque["model"]
    assert torch.equal(t.gm(X), model(X))
    hooked = nn.Sequential(conv())
    hooked.register_forward_hook(lambda m, i, o: o * 2)
    t = trace(hooked, [X])
    assert t.opaque == {"model": "it has forward hooks"} and torch.equal(t.gm(X), hooked(X))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_found(reentrant: bool) -> None:
    def run(s: Any, x: Tensor) -> Any:
        return checkpoint(s.c, x, use_reentrant=reentrant)

    def run_all(s: Any, x: Tensor) -> Any:
        return checkpoint_sequential(  # type: ignore[no-untyped-call]
            [s.c, s.d], 2, x, use_reentrant=reentrant
        )

    for fn in (run, run_all):
        block = Net(fn, c=conv(), d=conv())
        t = trace(nn.Sequential(conv(), block), [X])
        assert list(t.opaque) == ["1"] and "uses activation checkpointing" in t.opaque["1"]
        t = trace(block, [X])
        assert list(t.opaque) == ["model"] and "uses activation checkpointing" in t.opaque["model"]
        assert torch.equal(t.gm(X), block(X)), "the patch is gone"


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


def no_grad(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return s.c(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (no_grad, "computes under torch.no_grad()"),
        (lambda s, x: cast(Any, Double).apply(x), "custom autograd.Function"),
        (autocast, "switches autocast"),
        (lambda s, x: x + torch.rand(7), "draws random numbers"),
        (lambda s, x: x + s._parameters["w"] * 2, "computes with parameters"),
    ],
)
def test_what_fx_would_lose_in_silence_is_opaque(fn: Callable[..., Any], why: str) -> None:
    block = Net(fn, c=conv())
    block.register_parameter("w", nn.Parameter(torch.ones(7)))
    rng = torch.get_rng_state()
    t = trace(nn.Sequential(conv(), block), [X])
    assert torch.equal(rng, torch.get_rng_state())
    assert list(t.opaque) == ["1"] and why in t.opaque["1"]
