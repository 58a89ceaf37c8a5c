"""What cannot be traced: branches on values, failures, checkpoints, switched contexts."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint_sequential as sequential
from traced_nets import Net, X, conv, same, targets

import floorplan
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


def selective(s: Any, x: Tensor) -> Any:
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.convolution.default])
    return checkpoint(s.c, x, use_reentrant=False, context_fn=keep)


def decorated(s: Any, x: Tensor) -> Any:
    if torch.__version__ < "2.14":
        return checkpoint(s.c, x, use_reentrant=False)  # has no such form yet
    return cast(Any, checkpoint)(use_reentrant=False)(s.c)(x)


CHECKPOINTED: dict[str, Callable[[Any, Tensor], Any]] = {
    "non-reentrant": lambda s, x: checkpoint(s.c, x, use_reentrant=False),
    "reentrant": lambda s, x: checkpoint(s.c, x, use_reentrant=True),
    "not said": lambda s, x: checkpoint(s.c, x),
    "by its full name": lambda s, x: torch.utils.checkpoint.checkpoint(s.c, x, use_reentrant=False),
    "in keywords": lambda s, x: checkpoint(s.c, input=x, use_reentrant=False),
    "a function's own ops": lambda s, x: checkpoint(lambda y: torch.relu(y) + y, x, use_reentrant=False),
    "of a checkpoint": lambda s, x: checkpoint(lambda y: checkpoint(s.c, y), x, use_reentrant=False),
    "sequential": lambda s, x: sequential([s.c, s.d], 2, x, use_reentrant=False),
    "sequential, reentrant": lambda s, x: sequential([s.c, s.d], 2, x, use_reentrant=True),
    "selective": selective,
    "decorator": decorated,
    "wrapped": lambda s, x: checkpoint_wrapper(s.c)(x),  # type: ignore[no-untyped-call]
}


@pytest.mark.filterwarnings("ignore:.*use_reentrant", "ignore:None of the inputs")
@pytest.mark.parametrize("how", CHECKPOINTED)
def test_checkpointing_is_found(how: str) -> None:
    block = Net(CHECKPOINTED[how], c=conv(), d=conv())
    t = trace(nn.Sequential(conv(), block), [X])
    assert list(t.opaque) == ["1"] and "uses activation checkpointing" in t.opaque["1"]
    t = trace(block, [X])
    assert list(t.opaque) == ["model"] and "uses activation checkpointing" in t.opaque["model"]
    assert torch.equal(t.gm(X), block(X))
    net = nn.Sequential(conv(), block)
    report = floorplan.check(net, X, measured=True)
    assert report.predicted == report.measured


def test_checkpointing_of_other_packages_is_found() -> None:
    timm, models = pytest.importorskip("timm"), pytest.importorskip("torchvision.models")
    resnet, densenet = timm.create_model("resnet18"), timm.create_model("densenet121", memory_efficient=True)
    resnet.set_grad_checkpointing()
    for model in (resnet, densenet, models.densenet121(memory_efficient=True)):
        t = trace(model, [torch.randn(2, 3, 64, 64)])
        assert t.opaque and all("uses activation checkpointing" in why for why in t.opaque.values())


def inside(x: Tensor) -> Tensor:
    assert not trace(conv(), [X]).opaque
    return x


def test_what_is_only_named_a_checkpoint_is_traced() -> None:
    """The last segment of a sequence is a plain call, and a trace made inside a checkpoint is no part of it."""
    block = Net(lambda s, x: sequential([s.c, s.d], 1, x, use_reentrant=False), c=conv(), d=conv())
    assert not trace(block, [X]).opaque
    checkpoint(inside, X, use_reentrant=False)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


def autocast(s: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return s.c(x)  # type: ignore[no-any-return]


def offloaded(s: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():  # type: ignore[no-untyped-call]
        return s.c(x)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (offloaded, "saved-tensor hooks"),
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


class Tries(nn.Module):
    """Offers its layers something, and catches what they say."""

    def __init__(self, offer: Any, *layers: nn.Module, catch: type[Exception] = TypeError) -> None:
        super().__init__()
        self.layers, self.offer, self.catch = nn.ModuleList(layers), offer, catch

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = self.offer(layer, x)
            except self.catch:
                x = layer(x)
        return x


class Small(nn.Module):
    """Refuses small maps by itself."""

    def forward(self, x: Tensor, least: int = 0) -> Tensor:
        if x.shape[-1] < least:
            raise ValueError(f"a map of {x.shape[-1]} is too small")
        return x + 1


class Passes(nn.Module):
    """Hands on whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.c = conv()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return cast(Tensor, self.c(x * 2, **options))


class TakesMask(nn.Module):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x if mask is None else x * mask


@pytest.mark.parametrize(
    "model",
    [
        Tries(lambda m, x: m(x, lengths=None), conv(), nn.BatchNorm2d(3), nn.ReLU()),
        Tries(lambda m, x: m(x, mask=x), conv(), TakesMask(), nn.ReLU()),
        Tries(lambda m, x: m(x, x), conv(), nn.MaxPool2d(1), TakesMask()),
        Tries(lambda m, x: m(x, temb=None), Passes(), nn.Sequential(conv())),
        Tries(lambda m, x: m(x, 100), Small(), catch=ValueError),
        Tries(lambda m, x: m(x, least=100), Small(), conv(), catch=Exception),
        Tries(lambda m, x: m(), conv(), nn.ReLU()),
    ],
)
def test_what_a_layer_does_not_take_is_said_to_its_caller(model: nn.Module) -> None:
    t = trace(model, [X])
    assert not t.opaque
    same(model, t, X)


def test_a_call_that_nobody_catches_fails_as_it_does_untraced() -> None:
    model = Net(lambda s, x: s.c(x, lengths=None), c=conv())
    t = trace(model, [X])
    assert "Conv2d.forward() got an unexpected keyword argument 'lengths'" in t.opaque["model"]
