"""A fake run saves and allocates what a real one does, op by op; sizes stay symbolic."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floorplan.ledger.fakes import Sizes, symbolic_fakes
from floorplan.ledger.kernels import on_fakes, quiet_fakes
from floorplan.ledger.run import Step, Watch, run
from floorplan.torch_doors import FakeTensorMode


class Net(nn.Module):
    """A function of a conv's result, which needs a gradient."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.fn = nn.Conv2d(3, 4, 1), [fn]

    def forward(self, x: Tensor) -> Tensor:
        return self.fn[0](self.conv(x))


OPS: dict[str, Callable[[Tensor], Any]] = {
    "upsample": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "to a size": lambda x: F.interpolate(x, size=(5, 7), mode="nearest"),
    "dropout": lambda x: F.dropout(x, 0.5),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "mse": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "smooth l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="sum"),
    "soft margin": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "no reduction": lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none"),
    "cross entropy of probabilities": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "in place": lambda x: F.leaky_relu(F.hardtanh(x * 1, inplace=True), inplace=True),
    "pad": lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"),
}


@pytest.mark.parametrize("name", OPS)
def test_a_fake_run_is_a_real_one(name: str) -> None:
    torch.manual_seed(0)
    step = Step(torch.fx.symbolic_trace(Net(OPS[name])), (torch.randn(2, 3, 4, 6),), backward=True)
    fake, real = (run(step, Watch(hooks=True), fake=f) for f in (True, False))
    assert [(s.shape, s.dtype, int(s.nbytes)) for s in fake.saved] == [
        (s.shape, s.dtype, int(s.nbytes)) for s in real.saved
    ]
    lives = [[(v.op, int(v.nbytes), v.born, v.died) for v in r.timeline.lives] for r in (fake, real)]
    assert lives[0] == lives[1]


@pytest.mark.parametrize("classes", [5, 9])
def test_one_hot_of_fakes_takes_what_that_of_numbers_takes(classes: int) -> None:
    y = torch.arange(10).reshape(2, 5) % 5
    want = F.one_hot(y, classes)
    assert torch.equal(on_fakes(lambda t: F.one_hot(t, classes))(y), want)
    assert torch.equal(on_fakes(F.one_hot)(y), F.one_hot(y)) and on_fakes(F.one_hot)(y[:0], 5).shape == (0, 5, 5)
    with FakeTensorMode() as mode:
        fake = on_fakes(F.one_hot)(mode.from_tensor(y), classes)
    assert (fake.shape, fake.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("name", ["upsample", "in place", "pad"])
def test_sizes_stay_symbolic(name: str) -> None:
    gm, x = torch.fx.symbolic_trace(Net(OPS[name])), torch.randn(2, 3, 4, 6)
    fakes = symbolic_fakes(gm, (x,), Sizes("primes"))
    found = run(Step(gm, (x,), backward=False), Watch(hooks=True), fakes)
    assert all(isinstance(s.shape[0], torch.SymInt) for s in found.saved if s.owner == "kept")


def test_torch_is_quiet_only_meanwhile() -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with pytest.raises(KeyError), quiet_fakes():
        assert log.disabled
        raise KeyError
    assert not log.disabled


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.binary_cross_entropy_with_logits]
)
@pytest.mark.parametrize("lies", [torch.channels_last, torch.contiguous_format])
def test_the_gradient_of_a_loss_lies_as_torch_lays_it(loss: Any, lies: torch.memory_format) -> None:
    class Doubled(torch.autograd.Function):  # sees how the gradient lies
        @staticmethod
        def forward(ctx: Any, x: Tensor, seen: list[Any]) -> Tensor:
            ctx.seen = seen
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            ctx.seen.append(g.stride())
            return g, None

    seen: list[Any] = []
    x, y = torch.rand(2, 3, 4, 6).to(memory_format=lies), torch.rand(2, 4, 4, 6)
    step = Step(Net(lambda x: Doubled.apply(x, seen)), (x,), y, loss)  # type: ignore[no-untyped-call]
    run(step, Watch(nodes=False)), run(step, Watch(nodes=False), False)
    assert len(seen) == 2 and seen[0] == seen[1]
