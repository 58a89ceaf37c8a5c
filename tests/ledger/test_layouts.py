"""What an op makes lies in memory as its fake says: results and gradients of random networks, and of losses.

A copy that a layout makes necessary, or spares, is memory.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, seed, settings
from random_cnns import networks
from random_examples import PROFILE, trains
from random_layers import Spec, batch, network
from torch import Tensor, fx, nn

from floorplan.graph.trace import trace
from floorplan.ledger.fakes import concrete_fakes
from floorplan.ledger.run import Step, Watch, run
from floorplan.torch_doors import tensors_in

Lies = list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]]]
last = torch.channels_last


def _lies(name: str, t: Tensor) -> tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    strides = tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1)
    return name, t.dtype, tuple(t.shape), strides


class Laid(fx.Interpreter):
    """A graph that notes how every result lies, and every gradient that comes back to it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.found: Lies = []

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        for i, t in enumerate(tensors_in(out)):
            self.found.append(_lies(f"{n.name}.{i}", t))
            if t.requires_grad and not t.is_leaf:
                t.register_hook(lambda g, at=f"gradient of {n.name}.{i}": self.found.append(_lies(at, g)))
        return out


def laid(gm: fx.GraphModule, x: Tensor, target: Tensor, loss: Callable[[Any, Tensor], Tensor], fake: bool) -> Lies:
    """How all that a step makes lies, on fakes or for real."""
    seen: list[Laid] = []

    def drive(model: Any, given: Any, tracker: Any) -> None:
        seen.append(Laid(model))
        loss(seen[0].run(given[0]), given[1]).backward()  # type: ignore[no-untyped-call]

    step = Step(gm, (x,), target, drive=drive)
    run(step, Watch(), concrete_fakes(gm, step.given) if fake else False)
    return seen[0].found


def weighed(out: Any, target: Tensor) -> Tensor:
    """All outputs, multiplied by themselves turned round: gradients come in other orders than the maps."""
    return torch.stack([(t * t.detach().flip(-1)).sum() for t in tensors_in(out) if t.dim()]).sum()


@pytest.mark.parametrize("shard", range(2))
def test_layouts_of_random_networks(shard: int) -> None:
    @seed(shard)
    @settings(PROFILE, max_examples=20)
    @given(networks())
    def check(spec: Spec) -> None:
        assume(trains(spec))
        model, x = network(spec), batch(spec)
        gm, y = trace(model, (x,)).gm, torch.zeros(1)
        assert laid(gm, x, y, weighed, True) == laid(gm, x, y, weighed, False)

    check()


NAMES = ["cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"]
NAMES += ["binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss", "hinge_embedding_loss"]


@pytest.mark.parametrize("mapped", [False, True], ids=["map contiguous", "map channels_last"])
@pytest.mark.parametrize("aimed", [False, True], ids=["target contiguous", "target channels_last"])
@pytest.mark.parametrize("name", NAMES)
def test_layouts_of_losses(name: str, mapped: bool, aimed: bool) -> None:
    x, y = torch.randn(3, 4, 5, 6), torch.rand(3, 5, 5, 6) + 0.1
    x, y = x.to(memory_format=last) if mapped else x, y.to(memory_format=last) if aimed else y

    def loss(out: Tensor, target: Tensor) -> Any:
        more = (target.square(),) if name == "gaussian_nll_loss" else ()
        return getattr(F, name)(out, target, *more)

    for reduction in (loss, lambda a, b: loss(a, b) * 2):
        gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(4, 5, 1), nn.Tanh()))
        assert laid(gm, x, y, reduction, True) == laid(gm, x, y, reduction, False)
