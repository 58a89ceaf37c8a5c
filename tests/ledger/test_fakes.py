"""Symbolic fakes: which sizes are symbols, with what names, and what is never unified."""

from typing import Any, cast

import pytest
import torch
from hard_nets import Lambda, block2, pair, same
from kinds import images
from torch import SymInt, Tensor, nn

from floorplan.graph.copies import clone_structure
from floorplan.graph.trace import trace
from floorplan.ledger.fakes import Fakes, Sizes, concrete_fakes, symbolic_fakes
from floorplan.ledger.run import Step, Watch, run


def fakes(model: nn.Module, *inputs: Tensor, positions: str = "primes") -> Fakes:
    return symbolic_fakes(trace(model, inputs).gm, inputs, Sizes(positions))


def net() -> nn.Module:
    return Lambda(block2, **pair(8))


def test_names_and_values() -> None:
    f = fakes(net(), images(4, 3, 12, 10))
    assert f.values == {"C1": 8, "C2": 3, "B": 4, "H0": 12, "W0": 10}
    assert f.layers == {"C1": "c1", "C2": "c1"}


def test_equal_widths_share_a_symbol_and_nothing_else_does() -> None:
    f = fakes(Lambda(block2, **pair(12)), images(12, 3, 12, 12))
    (x,) = f.inputs
    width = cast(Any, f.gm.get_submodule("c2")).weight.shape[0]
    symbols = {str(n.node.expr) for n in (width, *x.shape)}
    assert len(symbols) == 5  # width, B, C, H, W though four of them are 12
    assert len({n.node.hint for n in x.shape}) == 4


@pytest.mark.parametrize(("positions", "symbolic"), [("primes", True), ("exact", True), ("fixed", False)])
def test_positions(positions: str, symbolic: bool) -> None:
    (x,) = fakes(net(), images(4, 3, 12, 10), positions=positions).inputs
    assert isinstance(x.shape[2], SymInt) is symbolic
    if positions == "exact":
        assert x.shape[2].node.hint == 12


def test_time_before_channels_is_a_position() -> None:
    model = Lambda(lambda m, x: m.c1(x.unsqueeze(1)), c1=nn.Conv2d(1, 8, (5, 1)))
    f = fakes(model, images(4, 24, 9))
    assert {n for n in f.values if n[0] == "C"} == {"C1"}


def test_a_second_input_gets_its_own_positions() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.mean() + y.mean()

    f = fakes(Two(), images(4, 3, 12, 12), images(4, 3, 6, 9))
    assert sorted(f.values.values()) == sorted([4, 3, 12, 12, 6, 9])


def test_kernels_stay_numbers_and_depthwise_groups_do_not() -> None:
    f = fakes(Lambda(lambda m, x: m.dw(x), dw=same(3, 3, groups=3)), images())
    conv: Any = f.gm.get_submodule("dw")
    assert conv.weight.shape[2:] == (3, 3)
    assert isinstance(conv.groups, SymInt)


def test_concrete_fakes_keep_sizes_ties_and_flags() -> None:
    model, x = Lambda(lambda m, x: m.c2(m.c1(x)), c1=same(3, 3), c2=same(3, 3)), images()
    model.c2.weight = model.c1.weight
    model.c2.bias.requires_grad_(False)
    f = concrete_fakes(trace(model, (x,)).gm, (images().requires_grad_(),))
    first, second = (cast(Any, f.gm.get_submodule(n)) for n in ("c1", "c2"))
    assert first.weight is second.weight and first.weight.shape == (3, 3, 3, 3)
    assert first.bias.requires_grad and not second.bias.requires_grad
    assert f.inputs[0].requires_grad


def test_a_clone_shares_tensors_and_nothing_else() -> None:
    gm = trace(net(), (images(),)).gm
    twin = clone_structure(gm)
    assert twin.get_submodule("c1") is not gm.get_submodule("c1")
    assert twin.get_submodule("c1").weight is gm.get_submodule("c1").weight


def test_old_weight_norm_can_be_cloned() -> None:
    model = Lambda(lambda m, x: m.c1(x), c1=nn.utils.weight_norm(same(3, 8)))
    run(Step(trace(model, (images(),)).gm, (images(),)).forward, Watch(hooks=True))


def test_layouts_are_kept() -> None:
    x = images().to(memory_format=torch.channels_last)
    (fake,) = fakes(net(), x).inputs
    assert fake.stride()[1] == 1
